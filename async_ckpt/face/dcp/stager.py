"""`PinnedStager`: the host copy of a state dict for torch.distributed.checkpoint.async_save, in page-locked memory.

In: a state dict, with or without DTensors and ShardedTensors. Out: a copy of it with its tensors in host memory.
Knows nothing of: the use of the copy.

The copy is made as in `snapshot`: ordered after the training stream, by several threads, to memory that is reused once
no tensor of the previous copy is referenced. So no save sees the bytes of another save, however many are under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.staging import AsyncStager

from ...core.host.loop import get_loop
from ...core.host.threads import running_future
from ...core.slicing.sharded import is_dtensor
from ...core.spec import whole_bytes
from ...core.staging.guard import unwrapped
from ...core.staging.host_copy import BufferPool, HostCopy
from ...core.staging.tensors import Wording
from ...core.state.capture import why_not
from ...core.state.names import Path, shown
from ...errors import UnsupportedStateError
from ..around.arguments import deep_copy

# Before torch 2.9, a stager could only return the state dict itself.
_MAY_RETURN_FUTURE: Final = hasattr(state_dict_saver, "AsyncSaveResponse")


class PinnedStager(AsyncStager):
    """Stage state dicts in page-locked host memory, which is kept from save to save.

        stager = PinnedStager()
        response = torch.distributed.checkpoint.async_save(
            {"model": model.state_dict()}, storage_writer=writer, async_stager=stager
        )
        response.upload_completion.result()

    `stage` returns as soon as training may continue: on the CPU, when everything is copied; on a device, when the
    copies are enqueued. They run after the work that is in the training stream, and before all later work.

    Args:
        guard: the optimizer (or optimizers) whose `step()` is the only code that changes its parameters and its state.
            Copying them then overlaps the next forward and backward pass, and `step()` waits until the copy is done. A
            tensor that changes earlier makes the save fail.
        host_bytes: the most memory for all staged copies together; by default half of the free memory.

    A save raises MemoryError if there is not enough memory, and UnsupportedStateError with the names of tensors that
    have no bytes of their own. `close()` frees the memory.
    """

    _synchronize_after_execute = False  # the future that `stage` returns resolves when the copy is complete

    def __init__(self, *, guard: Any = None, host_bytes: int | None = None) -> None:
        self._optimizers = unwrapped(guard)
        self._max_bytes = None if host_bytes is None else whole_bytes("host_bytes", host_bytes)
        self._memory = BufferPool()
        self._last: Future[None] | None = None

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """A future of a copy of the state dict; the copy itself if torch is older than 2.9."""
        tensors_by_id: dict[int, tuple[str, Any]] = {}
        _collect_tensors(state_dict, (), tensors_by_id)
        tensors: list[torch.Tensor] = []
        names: list[str] = []
        for name, tensor in tensors_by_id.values():
            for part in _parts(tensor):
                if why := why_not(part):
                    raise UnsupportedStateError(f"{name}: {why}; nothing was staged", path=name)
                tensors.append(part)
                names.append(name)
        host_copy = HostCopy(
            tensors,
            names,
            optimizers=self._optimizers,
            memory=self._memory,
            crew=get_loop().copiers,
            held=True,
            max_bytes=self._max_bytes,
            wording=Wording("the copy of a state dict that is staged", "response.staging_completion"),
        )
        copies = iter(host_copy.tensors)
        memo: dict[int, Any] = {key: _rebuild(tensor, copies) for key, (_, tensor) in tensors_by_id.items()}
        try:
            staged = deep_copy(state_dict, memo)
        except Exception as error:
            raise UnsupportedStateError(
                f"a value in the state dict cannot be copied ({error}); pass plain data, or what its state_dict() "
                "gives",
                path="",
            ) from error
        self._last = host_copy.completion
        host_copy.begin()  # last: its threads take processors from this one
        if not _MAY_RETURN_FUTURE:
            host_copy.completion.result()
            return staged
        return _staged_after(host_copy.completion, staged)

    def synchronize_staging(self) -> None:
        """Wait until the last state dict is copied. Raises TornSnapshotError."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Free the memory of copies that are no longer in use. The next save allocates it again."""
        self._memory.release()

    def __getstate__(self) -> dict[str, Any]:
        """The state for another process, which writes what this one has staged."""
        return {**vars(self), "_optimizers": (), "_memory": None, "_last": None}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state, _memory=BufferPool())


def _staged_after(completion: Future[None], staged: Any) -> Future[Any]:
    """A future of the state dict, which resolves once it is copied and alone keeps it alive."""
    future: Future[Any] = running_future()
    kept = [staged]
    del staged

    def resolve(done: Future[None]) -> None:
        error = done.exception()
        value = kept.pop()
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    completion.add_done_callback(resolve)
    return future


def _collect_tensors(value: Any, path: Path, tensors: dict[int, tuple[str, Any]]) -> None:
    """Collect all tensors in a value: by id, the name and the tensor."""
    if isinstance(value, torch.Tensor):
        tensors.setdefault(id(value), (shown(path), value))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            _collect_tensors(inner, (*path, key), tensors)
    elif isinstance(value, list | tuple | deque):
        for number, inner in enumerate(value):
            _collect_tensors(inner, (*path, number), tensors)


def _parts(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors that make up a tensor, detached, since a staged copy is not part of the autograd graph."""
    if is_dtensor(tensor):
        return [_wait_for_collective(tensor._local_tensor).detach()]
    if hasattr(tensor, "local_shards"):
        return [inner for shard in tensor.local_shards() for inner in _parts(shard.tensor)]
    return [tensor.detach()]


def _wait_for_collective(tensor: Any) -> Any:
    """The tensor, after waiting for the collective that produces it."""
    return tensor.wait() if type(tensor).__name__ == "AsyncCollectiveTensor" else tensor


def _rebuild(tensor: Any, copies: Any) -> Any:
    """The tensor rebuilt around its copies, the next items of `copies`."""
    if is_dtensor(tensor):
        return type(tensor)(next(copies), tensor._spec, requires_grad=False)
    if hasattr(tensor, "local_shards"):
        from torch.distributed._shard.sharded_tensor.shard import Shard

        shards = [Shard(_rebuild(shard.tensor, copies), shard.metadata) for shard in tensor.local_shards()]
        return type(tensor)._init_from_local_shards_and_global_metadata(
            shards,
            sharded_tensor_metadata=tensor.metadata(),
            process_group=tensor._process_group,
            init_rrefs=tensor._init_rrefs,
        )
    copied = next(copies)
    if attributes := getattr(tensor, "__dict__", None):  # for example those that describe its slices
        vars(copied).update(attributes)
    return copied
