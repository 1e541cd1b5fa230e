"""An exponential mean of weights in host memory, updated from the copies that saves make.

In: the state of each save, when it is its turn. Out: the state with the mean as one more group. Knows nothing of:
archives, ranks.

A save with a mean first copies the weights to a separate buffer. The mean is updated and the segments are filled from
that buffer, so that a device is read once. The mean is a fold over the saves whose copy was complete, in their order:
even if such a save fails later, the next one counts its steps from there. A restore replaces the mean by that of the
archive.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import cache, partial
from typing import Any, Final, NamedTuple

import torch

from ...errors import UnsupportedStateError
from ..host.loop import get_loop
from ..host.threads import conclude, running_future
from ..spec import Ema
from ..staging.held_snapshot import HeldSnapshot
from ..staging.held_snapshot import begin as begin_copy
from ..staging.host_copy import BufferPool
from ..staging.snapshot import Snapshot
from ..state.capture import capture
from ..state.captured import SnapshotCopies, SnapshotView, part_of, structure_of, tree_of
from ..state.tree import InnerTensors, StoredLeaf, parts_in
from ..state.wrappers import StateDictOf, state_dict_of

GROUP: Final = "ema"
# For longer operations, torch uses the threads of the training (at::internal::GRAIN_SIZE).
_CHUNK_ITEMS: Final = 32_767

_log = logging.getLogger("async_ckpt")


class Mean:
    """The tensors of one mean by their names in the state, and the step of the last save in it. Updates own it."""

    def __init__(self, tensors: dict[str, torch.Tensor], step: int | None = None) -> None:
        self.tensors, self.step = tensors, step

    def has(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """True if the mean has exactly these tensors."""
        wanted = {name: (_mean_dtype(one.dtype), one.shape) for name, one in tensors.items()}
        return wanted == {name: (one.dtype, one.shape) for name, one in self.tensors.items()}

    def update(self, copies: Mapping[str, torch.Tensor], step: int, decay: float) -> None:
        """Add the weights of a save at `step`. The decay is per step since the last save."""
        num_steps = None if self.step is None else max(0, step - self.step)
        self.step = step
        with torch.no_grad():
            for name, mean in self.tensors.items():
                if num_steps is None or not (mean.is_floating_point() or mean.is_complex()):
                    mean.copy_(copies[name])
                elif num_steps:  # a repeated save of the same step has the same weights
                    _move(mean, copies[name].detach(), 1 - decay**num_steps)


class Joined(NamedTuple):
    """A state with the mean as one more group."""

    state: Any
    futures: Collection[Future[None]] = ()
    """Futures that resolve when the copy of the weights and the mean are complete."""
    copy: Snapshot | None = None
    """The staging of the copy of the weights; None if the save needs no copy of its own."""


class WeightMean:
    """The mean of one checkpointer, which creates it. Saves and restores call it, on the caller's thread.

    Updates run one after the other in the background: each waits until its weights are copied, and until the previous
    save has copied the mean.
    """

    group: Final = GROUP

    def __init__(self, ema: Ema) -> None:
        """Raises TypeError unless `ema` is an Ema."""
        if not isinstance(ema, Ema):
            raise TypeError(f"ema must be Ema(decay, groups=…), got {ema!r:.100}")
        self._ema, self._memory = ema, BufferPool()
        self._mean: Mean | None = None
        self._readers: tuple[Future[None], ...] = ()  # the last update, and the save that copies its result

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self._ema.groups)

    def joined(self, state: Any, step: int, guard: Any) -> Joined:
        """The state of a save with the mean. Begins the copy of the weights.

        Raises UnsupportedStateError, naming the tensor, for a tensor that has no mean.
        """
        entries = {key: part_of(state, key) if isinstance(state, SnapshotView) else state[key] for key in state}
        held = None
        if isinstance(state, SnapshotView):
            source, structure = state._source, {name: entries[name]._structure for name in self.groups}
        else:
            weights = {name: entries[name] for name in self.groups}
            held = HeldSnapshot(weights, guard=guard, memory=self._memory, waits=True)
            entries |= {name: part_of(held, name) for name in self.groups}
            source, structure = held._source, held._structure
        copies = _named(source, structure, source.copies())
        mean = self._mean
        if mean is None or not mean.has(copies):
            if mean is not None:
                _log.warning("the mean of %s begins anew, since their tensors have changed", ", ".join(self.groups))
            mean = self._mean = Mean({name: _blank(name, copied) for name, copied in copies.items()})
        updated: Future[None] = running_future()
        view = _view(source, structure, mean, updated)
        if held is not None:
            begin_copy(held)
        # A handle that is kept for long has futures whose callbacks must not keep the copies alive.
        todo = deque([(mean, copies)])
        update = partial(self._update, source.completion, updated, todo, step)
        background = get_loop().background
        _after((source.completion, *self._readers), lambda: background.submit(update, updated.set_exception))
        self._readers = (updated,)
        copy = None if held is None else held._copy.snapshot
        return Joined({**entries, GROUP: view}, (source.completion, updated), copy)

    def _update(
        self,
        copied: Future[None],
        updated: Future[None],
        todo: deque[tuple[Mean, dict[str, torch.Tensor]]],
        step: int,
    ) -> None:
        mean, copies = todo.pop()
        if (error := copied.exception()) is None:
            try:
                mean.update(copies, step, self._ema.decay)
            except BaseException as failed:
                error = failed.with_traceback(None)
        conclude(updated, error)

    def follow(self, staged: Future[None]) -> None:
        """Note that the save last joined has copied the mean once `staged` is done."""
        self._readers += (staged,)

    def planned(self, state: Any) -> dict[Any, Any]:
        """The state with a mean that no save has filled yet, for the plan of the first save."""
        tensors, mean = self.live(state)
        self._mean = self._mean or mean
        return {**state, GROUP: tensors}

    def live(self, state: Any, state_dict_of: StateDictOf = state_dict_of) -> tuple[Any, Mean]:
        """The mean's tensors in the structure of a state, to be filled, and the mean that owns them. Raises ValueError
        for a state without the groups, and UnsupportedStateError as `joined` does.
        """
        if not isinstance(state, Mapping) or not all(name in state for name in self.groups):
            raise ValueError(f"the state lacks an entry of Ema(groups=…): {', '.join(self.groups)}")
        captured = capture({name: state[name] for name in self.groups}, local_parts=True, state_dict_of=state_dict_of)
        source, structure = SnapshotCopies(captured, captured.tensors, running_future()), structure_of(captured)
        mean = Mean({name: _blank(name, one) for name, one in _named(source, structure, captured.tensors).items()})
        return tree_of(_view(source, structure, mean, running_future())), mean

    def release(self) -> None:
        """Free the memory that is kept for the next copy."""
        self._memory.release()

    def restored(self, mean: Mean | None, step: int) -> None:
        """Continue from the mean of a step; with None, the next save begins a new mean."""
        if mean is not None:
            mean.step = step
        self._mean = mean


def _named(source: SnapshotCopies, structure: Any, copies: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a structure by name; tied tensors once. Raises UnsupportedStateError for wrapped tensors."""
    for wrapped in parts_in(structure, InnerTensors):
        raise _unsupported(".".join(map(str, wrapped.path)), wrapped.kind)
    numbers = dict.fromkeys(_primary(source, leaf) for leaf in _tensors(structure))
    return {source.captured.specs[number].dotted: copies[number] for number in numbers}


def _tensors(structure: Any) -> list[StoredLeaf]:
    """The tensors of a structure. Arrays and bytes have no mean, so those of the weights are saved."""
    return [leaf for leaf in parts_in(structure, StoredLeaf) if leaf.kind == "tensor"]


def _primary(source: SnapshotCopies, leaf: StoredLeaf) -> int:
    alias = source.captured.specs[leaf.number].alias_of
    return leaf.number if alias is None else alias


def _view(source: SnapshotCopies, structure: Any, mean: Mean, completion: Future[None]) -> SnapshotView:
    """The mean in the structure of the weights, as a snapshot that is complete once `completion` is done."""
    copies = source.copies().copy()
    for leaf in _tensors(structure):
        copies[leaf.number] = mean.tensors[source.captured.specs[_primary(source, leaf)].dotted]
    return SnapshotView(source.with_copies(copies, completion), structure)


def _after(futures: Sequence[Future[None]], then: Callable[[], None]) -> None:
    """Call `then` once all futures are done, even if they failed. No thread waits for that."""
    if futures:
        futures[0].add_done_callback(lambda _: _after(futures[1:], then))
    else:
        then()


@cache
def _mean_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of a mean: at least float32, unchanged for integers; None if torch does not convert this dtype."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return dtype
    try:
        wide = torch.promote_types(dtype, torch.complex64 if dtype.is_complex else torch.float32)
        torch.zeros(1, dtype=torch.uint8, device="cpu").expand(dtype.itemsize).contiguous().view(dtype).to(wide)
    except RuntimeError:
        return None
    return wide


def _blank(name: str, tensor: torch.Tensor) -> torch.Tensor:
    dtype = _mean_dtype(tensor.dtype)
    if dtype is None:
        raise _unsupported(name, str(tensor.dtype))
    return torch.empty(tensor.shape, dtype=dtype, device="cpu")


def _unsupported(name: str, kind: str) -> UnsupportedStateError:
    return UnsupportedStateError(f"{name}: there is no mean of {kind}; leave its group out of Ema(groups=…)", path=name)


def _move(mean: torch.Tensor, weights: torch.Tensor, share: float) -> None:
    """Move the mean towards the weights by this share of the distance."""
    if not weights.is_contiguous():
        mean.lerp_(weights.to(mean.dtype), share)
        return
    for to, of in zip(mean.view(-1).split(_CHUNK_ITEMS), weights.view(-1).split(_CHUNK_ITEMS), strict=True):
        to.lerp_(of.to(mean.dtype), share)
