"""vLLM's own registries, configs and reloading around a model that needs no kernels, in this process or behind HTTP."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # it would print to where our children answer

import torch
from racing import until
from served_engines import serve
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of vLLM's own imports
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.config.load import LoadConfig
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from async_ckpt.integrations.vllm import register


class Decoder(nn.Module):
    """A model as vLLM's are: it takes names and tensors, refuses what it does not know, and says what it has loaded."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, 32, bias=False)
        self.before_weight = lambda name: None

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            self.before_weight(name)
            load = getattr(parameters[name], "weight_loader", default_weight_loader)
            load(parameters[name], tensor)
            loaded.add(name)
        return loaded


def model_config(path: object = "/no/such/model") -> Any:
    """What a loader asks of vLLM's ModelConfig, which is made of a config of Hugging Face alone."""
    return SimpleNamespace(
        model=str(path), model_weights="", quantization=None, multimodal_config=None, is_moe=False, revision=None
    )


def on_cpu() -> VllmConfig:
    return VllmConfig(device_config=DeviceConfig(device="cpu"))


def loaded(
    model: nn.Module,
    *,
    path: object = "/no/such/model",
    download_dir: object = None,
    given: dict[str, Any] | None = None,
) -> Any:
    """Fill a model as a cold engine does: by the load format `async_ckpt`, with a model's path, or what it is given.

    Returns as much of the engine's config as `reloaded` takes.
    """
    register()
    config = LoadConfig(
        load_format="async_ckpt",
        model_loader_extra_config=given or {},
        download_dir=None if download_dir is None else str(download_dir),
    )
    engine = SimpleNamespace(model_config=model_config(path), load_config=config, lora_config=None)
    loader = get_model_loader(config)
    with set_current_vllm_config(on_cpu()):
        record_metadata_for_reloading(model)
        loader.download_model(engine.model_config)
        loader.load_weights(model, engine.model_config)
    return engine


def reloaded(engine: Any, model: nn.Module, path: object = None) -> None:
    """Have a running engine load its weights again, as its `reload_weights` does."""
    with set_current_vllm_config(on_cpu()):
        reload_weights(engine, model, None, None if path is None else str(path), is_checkpoint_format=True)


class Worker:
    """What vLLM's worker does with its transfer engine. It is a client, too: for a training in the same process."""

    def __init__(self, model: nn.Module | None = None) -> None:
        register()
        self.model = Decoder() if model is None else model
        record_metadata_for_reloading(self.model)
        config = SimpleNamespace(parallel_config=None, model_config=model_config())
        self._engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend="async_ckpt"), config, torch.device("cpu"), self.model
        )
        self.version: str | None = None
        self.num_updates = 0
        self._is_active = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._engine.init_transfer_engine(self._engine.parse_init_info(init_info))

    def start_weight_update(self) -> None:
        if self._is_active:
            raise RuntimeError("start_weight_update called while a weight update is already active")
        self._engine.start_weight_update()
        self._is_active = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._is_active:
            raise RuntimeError("start_weight_update must be called before update_weights")
        try:
            self._engine.update_weights(json.loads(json.dumps(update_info)))  # it goes over HTTP
        except BaseException:
            self._is_active = False
            raise
        self.num_updates += 1

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._engine.finish_weight_update()
        self._is_active = False
        self.version = weight_version or self.version


def serve_in(folder: str) -> None:
    """A worker behind vLLM's routes, until it is killed. A weight waits while `folder` has the file `hold`."""
    worker = Worker()

    def hold(name: str) -> None:
        Path(folder, "loading").write_text(name)
        until(lambda: not Path(folder, "hold").exists())

    worker.model.before_weight = hold  # type: ignore[assignment]

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/state":
            state = {name: tensor.tolist() for name, tensor in worker.model.state_dict().items()}
            return 200, {"state": state, "version": worker.version}
        try:
            getattr(worker, path.strip("/"))(**body)
        except Exception as error:
            return 500, f"{type(error).__name__}: {error}"
        return 200, ""

    serve(folder, answer)
