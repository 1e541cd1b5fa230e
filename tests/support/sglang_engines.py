"""An engine that takes weights by SGLang's own code, in a small model, in this process or behind SGLang's routes."""

from __future__ import annotations

import base64
import warnings
from pathlib import Path
from typing import Any

import torch
from racing import until
from served_engines import serve
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of SGLang's own imports
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket


class Policy(nn.Module):
    """A model whose tensors have items of several sizes, one of them of an odd number of bytes, and one without items."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.arange(7, dtype=torch.int8), requires_grad=False)
        self.embed = nn.Embedding(32, width)
        self.scale = nn.Parameter(torch.rand((), dtype=torch.float64))
        self.narrow = nn.Parameter(torch.randn(3, width).to(torch.bfloat16))
        self.none = nn.Parameter(torch.empty(0, width))
        self.before_load = lambda: None

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            self.before_load()
            with torch.no_grad():
                parameters[name].copy_(tensor)


class Engine:
    """What `sglang.Engine` does with a weight update, as its scheduler does it: a session, and answers."""

    def __init__(self, model: nn.Module | None = None, tp_rank: int = 0) -> None:
        self.model = Policy() if model is None else model
        self._tp_rank = tp_rank
        self.num_flushed, self.sizes = 0, []
        self._is_open = False

    def begin_weight_update(self) -> tuple[bool, str]:
        if self._is_open:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self._is_open = True
        return True, "Success"

    def update_weights_from_tensor(self, named_tensors: list[Any], load_format: str, flush_cache: bool) -> Any:
        if not self._is_open or load_format != "flattened_bucket":
            return False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
        received = MultiprocessingSerializer.deserialize(named_tensors[self._tp_rank])
        flat = received["flattened_tensor"]
        self.sizes.append(flat.numel())
        bucket = FlattenedTensorBucket(flattened_tensor=flat, metadata=received["metadata"])
        described = bucket.get_metadata()
        same = FlattenedTensorBucket.empty(  # it refuses tensors that are not aligned
            [m.name for m in described], [m.dtype for m in described], [m.shape for m in described], "cpu"
        )
        assert same.get_metadata() == described
        try:
            self.model.load_weights(bucket.reconstruct_tensors())
        except Exception as error:
            return False, f"Failed to update parameter online: {error!r}"
        self.num_flushed += flush_cache
        return True, "Success"

    def end_weight_update(self) -> tuple[bool, str]:
        if not self._is_open:
            return False, "no weight-update session is open"
        self._is_open = False
        return True, "Success"


def serve_in(folder: str) -> None:
    """An engine behind SGLang's routes, until it is killed. A load waits while `folder` has the file `hold`."""
    engine, version = Engine(), ["default"]

    def hold() -> None:
        Path(folder, "loading").touch()
        until(lambda: not Path(folder, "hold").exists())

    engine.model.before_load = hold  # type: ignore[assignment]

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/state":
            model = {name: tensor.tolist() for name, tensor in engine.model.state_dict().items()}
            return 200, {"state": model, "version": version[0]}
        if path == "/update_weight_version":
            version[0] = body["new_version"]
            return 200, {"success": True, "new_version": version[0]}
        if "serialized_named_tensors" in body:
            body["named_tensors"] = [base64.b64decode(one) for one in body.pop("serialized_named_tensors")]
        success, message = getattr(engine, path.strip("/"))(**body)
        return 200 if success else 400, {"success": success, "message": message}

    serve(folder, answer)
