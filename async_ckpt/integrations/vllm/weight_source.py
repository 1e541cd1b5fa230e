"""`SnapshotSource`: the weights of a held snapshot for vLLM's transfer engines.

In: a part of a snapshot. Out: its metadata and tensors, whole or as this rank holds them. Knows nothing of: transports.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from importlib import import_module
from typing import Any, Final

import torch

from ...plumbing import captured
from ..common.held_weights import HeldTensor, SnapshotWeights

_transfer: Final[Any] = import_module("vllm.distributed.weight_transfer")


class SnapshotSource(_transfer.WeightSource):  # type: ignore[misc]
    """A held snapshot as a WeightSource of vLLM, for its own transfer engines and for "async_ckpt".

        source = SnapshotSource(snap["model"])
        engine = WeightTransferTrainerFactory.trainer_init(init_info, client=client, source=source)
        engine.send_weights()
        ...
        source.renew(later["model"])  # of the next step, before the next `send_weights`

    `iter_full` gathers sharded tensors, one at a time, by a collective on the devices of their mesh. `iter_local` uses
    no collective. The names are those that `export_hf` writes.

    Args:
        view: the part of a snapshot that is the model, on every rank.
        device: the device that tensors are copied to, such as "cuda" for engines that send by NCCL or CUDA's IPC; by
            default they stay on the host.

    Raises TypeError for anything but a part of a snapshot, and UnsupportedStateError for a part that is not a model.
    """

    def __init__(self, view: captured.SnapshotView, *, device: Any = None) -> None:
        self._weights, self._device = SnapshotWeights(view), device

    @cached_property
    def metadata(self) -> list[Any]:
        """A ParamMeta of vLLM for each tensor, in the order of both iterations."""
        return [_meta(tensor) for tensor in self._weights.tensors]

    def renew(self, view: captured.SnapshotView) -> None:
        """Continue with a later snapshot of the same model.

        source.renew(snap["model"])

        Raises StateMismatchError if it has other names, shapes, dtypes or layouts.
        """
        self._weights.renew(view)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor as a whole. Raises ClosedError if the snapshot is closed, and TornSnapshotError.

        for name, tensor in source.iter_full(): ...
        """
        return self._weights.whole(self._device)

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The slice of each tensor that this rank holds, by its `placements`. Raises the errors of `iter_full`.

        for name, tensor in source.iter_local(): ...
        """
        return self._weights.local(self._device)


def _meta(tensor: HeldTensor) -> Any:
    if tensor.spec is None:
        return _transfer.ParamMeta(tensor.name, tensor.dtype, tensor.shape)
    grid, placements = tensor.spec.mesh.mesh, tensor.placements
    return _transfer.ParamMeta(
        tensor.name,
        tensor.dtype,
        tensor.shape,
        owners=tuple(grid.flatten().tolist()),
        mesh_shape=tuple(grid.shape),
        placements=placements
        and tuple(_transfer.Replicate() if dim is None else _transfer.Shard(dim) for dim in placements),
    )
