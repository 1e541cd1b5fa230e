"""SGLang: the weights of a held snapshot for an engine on the same devices, or on the same host.

In: an engine of SGLang, or its URL, and a part of a snapshot. Out: an engine that has the weights. Knows nothing of:
files.

The weights are sent in SGLang's flattened buckets: one tensor with the bytes of several, of which the engine gets a
handle. In each bucket, tensors with the largest items come first, so that every tensor is aligned.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ..plumbing import backends, captured, spec, timing
from ..weights.following.web import EngineError, HttpClient
from .common.framework_checks import require, require_module, require_names
from .common.held_weights import SnapshotWeights, in_buckets
from .common.joint_errors import lists_of_all_ranks, meet

_FORMAT: Final = "flattened_bucket"


class UpdatableEngine(Protocol):
    """The methods of an engine that are used; `sglang.Engine` and `HttpEngine` have them."""

    def begin_weight_update(self) -> Any: ...

    def update_weights_from_tensor(self, named_tensors: list[Any], load_format: str, flush_cache: bool) -> Any: ...

    def end_weight_update(self) -> Any: ...


def send_weights(
    engine: UpdatableEngine | None,
    view: captured.SnapshotView,
    *,
    device: Any = None,
    bucket_bytes: int = 512 * spec.MIB,
    tp_size: int = 1,
    group: Any = None,
    version: int | str | None = None,
) -> None:
    """Send the weights of a snapshot to an engine of SGLang, and return when it has loaded them.

        send_weights(engine, snap["model"], device="cuda")
        send_weights(HttpEngine("http://127.0.0.1:30000"), snap["model"], device="cuda", version=step)

    The engine must be on the same host, and must not handle requests meanwhile. After an error it may have a mix of old
    and new weights: send them again before it generates.

    Args:
        engine: an `sglang.Engine`, or an `HttpEngine`. With several ranks, only the first rank's engine is used.
        view: the part of the snapshot that is the model.
        device: the device of the buckets of which the engine gets handles: "cuda" for an engine on the same GPU. By
            default, buckets stay on the host, in memory that is shared through files.
        bucket_bytes: the size of a bucket; a larger tensor gets a bucket of its own.
        tp_size: the tensor parallelism of the engine, if one process sends to all of its ranks.
        group: the process group of the training's ranks, if each of them sends to the engine's rank on the same device.
            All of them make this call. By default, this process sends alone.
        version: the new version of the weights for the engine, such as the training step; only for an `HttpEngine`.

    Raises RuntimeError with the engine's message if the engine refuses; ConnectionError if it cannot be reached;
    TypeError unless `view` is a part of a snapshot; ClosedError, TornSnapshotError and UnsupportedStateError; and
    PeerFailedError if another rank of the group has failed.
    """
    if group is not None and tp_size != 1:
        raise ValueError("tp_size is for one process that sends to all ranks of the engine; leave it out with group=")
    bucket_bytes, tp_size = spec.whole_bytes("bucket_bytes", bucket_bytes), spec.whole_count("tp_size", tp_size)
    if version is not None and engine is not None and not hasattr(engine, "update_weight_version"):
        raise ValueError(f"{type(engine).__name__} cannot be told the version of its weights; leave version out")
    sglang = _sglang()
    ranks = _SendingRanks(tp_size, group)
    buckets = flattened_buckets(SnapshotWeights(view), bucket_bytes, device)
    bucket = next(buckets, None)  # if the snapshot fails, it fails before the engine is called
    if bucket is None:
        raise ValueError("the model has no items to send")
    caller = engine if ranks.is_first else None
    _call_engine(ranks, caller, "begin_weight_update")
    try:
        while bucket is not None:
            following = next(buckets, None)
            payloads = ranks.payloads(partial(_serialized, sglang, bucket))
            how = {"load_format": _FORMAT, "flush_cache": following is None}
            _call_engine(ranks, caller, "update_weights_from_tensor", payloads, **how)
            bucket = following
    except BaseException:
        if caller is not None:  # otherwise the engine would refuse to begin another update
            with suppress(Exception):
                caller.end_weight_update()
        raise
    _call_engine(ranks, caller, "end_weight_update")
    if version is not None and caller is not None:
        caller.update_weight_version(str(version))  # type: ignore[attr-defined]


def flattened_buckets(weights: SnapshotWeights, bucket_bytes: int, device: Any = None) -> Iterator[Any]:
    """SGLang's FlattenedTensorBuckets with these weights, each of at most `bucket_bytes` unless a tensor is larger."""
    bucket_of = _sglang().tensor_bucket.FlattenedTensorBucket
    items = ((name, tensor) for name, tensor in weights.whole(device) if tensor.numel())  # others are empty
    for bucket in in_buckets(items, bucket_bytes):
        bucket.sort(key=lambda named: -named[1].element_size())
        flat = bucket_of(named_tensors=bucket)
        bucket.clear()
        yield flat


class HttpEngine:
    """An engine behind SGLang's HTTP server, on this host.

    engine = HttpEngine("http://127.0.0.1:30000", timeout_seconds=120)

    `api_key` is the server's admin key, if it has one. Calls return the server's answer, and raise ConnectionError if
    there is none within `timeout_seconds`. Raises ValueError for an invalid URL.
    """

    def __init__(self, url: str, *, timeout_seconds: float = 300.0, api_key: str | None = None) -> None:
        self._client, self._timeout_seconds = HttpClient(url, key=api_key), timeout_seconds

    def begin_weight_update(self) -> Any:
        return self._post("begin_weight_update", {})

    def update_weights_from_tensor(self, named_tensors: list[Any], load_format: str, flush_cache: bool) -> Any:
        payloads = [base64.b64encode(payload).decode() for payload in named_tensors]
        request = {"serialized_named_tensors": payloads, "load_format": load_format, "flush_cache": flush_cache}
        return self._post("update_weights_from_tensor", request)

    def end_weight_update(self) -> Any:
        return self._post("end_weight_update", {})

    def update_weight_version(self, version: str) -> Any:
        return self._post("update_weight_version", {"new_version": version, "abort_all_requests": False})

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        try:
            reply = self._client.post(f"/{route}", body, deadline=timing.TIMEKEEPER.now() + self._timeout_seconds)
        except EngineError as error:
            raise ConnectionError(
                f"the engine has not answered ({error}); if it was in the middle of an update, it has a mix of old "
                "and new weights"
            ) from error
        if reply.is_fine or reply.fields():
            return reply.fields()
        return {"success": False, "message": f"HTTP status {reply.status}: {reply.text:.500}"}


# --- one process, or one of several -------------------------------------------------------------------------------


class _SendingRanks:
    """The ranks of a training that together send to one engine."""

    def __init__(self, tp_size: int, group: Any) -> None:
        self._tp_size, self._group = tp_size, group
        self.is_first = group is None or dist.get_rank(group) == 0

    def gather(self, brought: list[Any]) -> list[Any]:
        """The lists of all ranks, concatenated."""
        return brought if self._group is None else lists_of_all_ranks(brought, self._group)

    def payloads(self, serialize: Callable[[], bytes]) -> list[bytes]:
        """A handle for each rank of the engine. A handle can be opened once, so a single process makes `tp_size`."""
        if self._group is None:
            return [serialize() for _ in range(self._tp_size)]
        return meet(serialize, self.gather)


def _call_engine(ranks: _SendingRanks, engine: UpdatableEngine | None, name: str, *args: Any, **options: Any) -> None:
    """Call the engine on the first rank. The others wait, since it reads their memory, and raise its error, too."""

    def call() -> None:
        if engine is not None:
            _check_answer(getattr(engine, name)(*args, **options), name)
        elif ranks.is_first:
            raise TypeError("the first rank needs an engine, got None")

    meet(call, ranks.gather)


def _check_answer(answer: Any, name: str) -> None:
    """Raise RuntimeError for an answer that is not a success. Engines answer with a tuple, servers with a dict."""
    if isinstance(answer, dict):
        success, message = bool(answer.get("success")), answer.get("message", answer)
    else:
        success, message = (*answer, "")[:2]
    if not success:
        raise RuntimeError(
            f"SGLang refuses {name}: {message}; if it was in the middle of an update, it has a mix of old and new "
            "weights. Send weights of the model that the engine has, by the names that export_hf writes"
        )


# --- the parts of SGLang that are used ----------------------------------------------------------------------------


class _Sglang(NamedTuple):
    tensor_bucket: Any
    serializer: Any
    patch_reductions: Callable[[], None]  # replaces those of torch permanently


def _sglang() -> _Sglang:
    """The parts of SGLang. Raises ImportError, and RuntimeError if one is missing."""
    package = require("sglang")
    tensor_bucket = require_module(package, "sglang.srt.weight_sync.tensor_bucket")
    utils = require_module(package, "sglang.srt.utils")
    patches = require_module(package, "sglang.srt.utils.patch_torch")
    require_names(package, tensor_bucket, ["FlattenedTensorBucket"])
    bucket = tensor_bucket.FlattenedTensorBucket
    require_names(package, bucket, ["supports_multi_dtypes", "get_flattened_tensor", "get_metadata"])
    require_names(package, utils, ["MultiprocessingSerializer"])
    require_names(package, patches, ["monkey_patch_torch_reductions"])
    return _Sglang(tensor_bucket, utils.MultiprocessingSerializer, patches.monkey_patch_torch_reductions)


def _serialized(sglang: _Sglang, bucket: Any) -> bytes:
    """A handle of a bucket, which any process of this host can open once."""
    flat = bucket.get_flattened_tensor()
    strategy = torch.multiprocessing.get_sharing_strategy()
    if not backends.is_on_host(flat):
        sglang.patch_reductions()  # handles with names of devices, whose numbers may differ in the engine
    elif hasattr(torch.multiprocessing.reductions, "_reduce_tensor_original"):
        raise ValueError("in this process, SGLang can share only the memory of devices; pass device=")
    else:  # file descriptors only reach children, file names any process
        torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        payload = {"flattened_tensor": flat, "metadata": bucket.get_metadata()}
        serialized: bytes = sglang.serializer.serialize(payload)
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    return serialized
