"""The weights of held snapshots, one after the other, by the names that inference engines know.

In: a part of a snapshot, and later that of the next snapshot. Out: constant names, shapes and layouts, and tensors.
Knows nothing of: engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch

from ...errors import StateMismatchError, UnsupportedStateError
from ...plumbing import captured, hf_weights, sharded


class HeldTensor(NamedTuple):
    """One full tensor of a model; `spec` is torch's DTensorSpec if it is sharded."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    spec: Any

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def placements(self) -> tuple[int | None, ...] | None:
        """For each axis of the mesh, the dimension that is sharded along it, or None. None for other placements."""
        kinds = {type(placement).__name__ for placement in self.spec.placements}
        if not kinds <= {"Shard", "Replicate"}:
            return None
        return tuple(getattr(placement, "dim", None) for placement in self.spec.placements)


class SnapshotWeights:
    """The weights of a model in a snapshot, by the names that `export_hf` writes.

        weights = SnapshotWeights(snap["model"])
        for name, tensor in weights.whole(): ...

    If the snapshot is closed while it is read, it is read to the end, and the next call raises ClosedError. Created on
    the training thread, and used by one thread at a time.

    Raises TypeError unless `view` is a part of a snapshot, and UnsupportedStateError if that part is not a model.
    """

    def __init__(self, view: captured.SnapshotView) -> None:
        self.tensors = _described(_weights_in(view))
        self._view = view

    def renew(self, view: captured.SnapshotView) -> None:
        """Switch to a later snapshot of the same model.

        Raises StateMismatchError if it has other names, shapes, dtypes or layouts, and then keeps the previous one.
        """
        tensors = _described(_weights_in(view))
        before, after = {t.name: t for t in self.tensors}, {t.name: t for t in tensors}
        mismatched = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
        if before == after:
            self._view = view
            return
        missing, unexpected = sorted(before.keys() - after.keys()), sorted(after.keys() - before.keys())
        named = [*missing, *unexpected, *mismatched]
        raise StateMismatchError(
            f"the snapshot is of another model than the engine expects ({', '.join(named[:5])!a:.300}); begin "
            "another transfer for it",
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            mismatched=tuple(mismatched),
        )

    def whole(self, device: Any = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The full tensors, on the host or on `device`, in the order of `tensors`.

        Sharded tensors are gathered, one at a time: then all ranks that hold slices must iterate over all items. Waits
        until the snapshot is complete. Raises ClosedError and TornSnapshotError.
        """
        return self._each(device, whole=True)

    def local(self, device: Any = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `whole`, but this rank's slice of each tensor, without communication.

        Only a tensor whose `placements` is None is gathered.
        """
        return self._each(device, whole=False)

    def _each(self, device: Any, *, whole: bool) -> Iterator[tuple[str, torch.Tensor]]:
        weights, completion = _weights_in(self._view), self._view.completion
        error = completion.exception()
        if error is not None:
            raise error
        tensors: dict[str, Any] = (
            dict(weights.tensors) if weights.is_spread else weights.as_published(dict(weights.tensors))
        )
        del weights
        for described in self.tensors:
            tensor = tensors.pop(described.name)  # its memory is freed once nothing refers to it
            with torch.no_grad():
                if described.spec is not None:
                    is_whole = whole or described.placements is None
                    tensor = _gathered(tensor) if is_whole else tensor._local_tensor
                yield described.name, tensor if device is None else tensor.to(device)


def in_buckets(items: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The items in buckets of at most `max_bytes`, or of one larger tensor. The caller may empty each bucket."""
    bucket: list[tuple[str, torch.Tensor]] = []
    room = max_bytes
    for name, tensor in items:
        if bucket and tensor.nbytes > room:
            yield bucket
            bucket, room = [], max_bytes
        bucket.append((name, tensor))
        room -= tensor.nbytes
    if bucket:
        yield bucket


def _weights_in(view: captured.SnapshotView) -> hf_weights.Weights:
    if not isinstance(view, captured.SnapshotView):
        raise TypeError(
            f"the weights must be in a snapshot, got {type(view).__name__}; take one and give its part: "
            'async_ckpt.snapshot({"model": model})["model"]'
        )
    weights = hf_weights.weights_of(view, {})
    if weights.stem != "model":
        raise UnsupportedStateError(
            "this is an adapter, and engines take whole models here; write it by export_hf, and have the engine load "
            "that folder",
            path="",
        )
    for name, tensor in weights.tensors.items():
        if sharded.is_sharded(tensor) and not sharded.is_dtensor(tensor):
            raise UnsupportedStateError(f"{name!a} is a shard but not a DTensor; use export_hf instead", path=name)
    return weights


def _described(weights: hf_weights.Weights) -> list[HeldTensor]:
    if not weights.is_spread:
        described = weights.described()
        return [HeldTensor(name, tensor.dtype, tuple(tensor.shape), None) for name, tensor in described.items()]
    weights.refuse_converted()
    spread: dict[str, Any] = weights.tensors
    return [
        HeldTensor(name, tensor.dtype, tuple(tensor.shape), tensor._spec if sharded.is_dtensor(tensor) else None)
        for name, tensor in spread.items()
    ]


def _gathered(tensor: Any) -> torch.Tensor:
    """The full tensor of a DTensor whose slices are on the host, gathered by a collective on the mesh's devices."""
    local = tensor._local_tensor.to(tensor.device_mesh.device_type)
    whole: torch.Tensor = sharded.Placed.of(tensor).around(local).full_tensor()
    return whole
