"""Ranks that hold the same tensors each read a part, and broadcast it to the rest of their group.

In: the memory that each rank has to fill, and a process group of the caller. Out: the same memory, filled.
Knows nothing of: steps, the content of archives.

Collectives are called only here, on the thread that restores, in the same order even if a rank fails. First, each rank
reads its part, or fails. Then the ranks exchange the outcome. The parts are broadcast only if all ranks succeeded.
"""

from __future__ import annotations

import hashlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch

from ...errors import PeerFailedError
from ..backends import is_dense
from ..spec import MIB
from ..staging.device import flat_bytes, flat_items
from .archives.contents import Contents
from .fill import Wanted
from .live.containers import take_actions

T = TypeVar("T")
# Smaller tensors are sent together in one message.
_SMALL_BYTES: Final = MIB
_MESSAGE_BYTES: Final = 64 * MIB


class Item(NamedTuple):
    """Memory that each rank of the group has to fill with the same bytes. `name` is the same on all ranks."""

    name: str
    archive: Contents
    wanted: Wanted


class Share(NamedTuple):
    """The memory that the ranks of a group fill together, and the actions that each rank takes afterwards."""

    items: Sequence[Item] = ()
    actions: Sequence[Callable[[], None]] = ()

    def digest(self) -> str:
        """A digest that is equal on ranks that have to fill the same slices."""
        digest = hashlib.blake2b(digest_size=16)
        for name, _, wanted in self.items:
            facts = [name, wanted.offsets, tuple(wanted.into.shape), str(wanted.into.dtype)]
            digest.update(repr(facts).encode(errors="backslashreplace"))
        return digest.hexdigest()


class Sharing:
    """One restore by the ranks of a group, on the thread that restores. `AsyncCheckpointer.restore` creates it.

    Raises ValueError without an initialised process group, and TypeError for anything that is not a group.
    """

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError("broadcast= needs an initialised process group")
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "broadcast must be a process group, such as mesh.get_group('replicate') or dist.group.WORLD, got "
                f"{group!r:.100}"
            )
        self._dist, self._group = dist, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def own(self, items: Sequence[Item]) -> list[Item]:
        """The items that this rank reads."""
        return [item for item, owner in zip(items, self._owners(items), strict=True) if owner == self._rank]

    def _owners(self, items: Sequence[Item]) -> list[int]:
        """For each item, the number of the rank that reads it. All ranks read about the same number of bytes."""
        ends = list(itertools.accumulate((item.wanted.into.nbytes for item in items), initial=0))
        return [at * self._size // ends[-1] if ends[-1] else 0 for at in ends[:-1]]

    def restore(self, read: Callable[[], tuple[T, Share | None]], read_all: Callable[[T], object]) -> T:
        """Fill everything, and return the first item of the result of `read`, which must be the same on all ranks.

        `read` fills this rank's part, and also returns the share of the group. `read_all` fills everything, and is
        called if the ranks hold different slices. Raises the error of `read`, and PeerFailedError if `read` has failed
        on another rank.
        """
        result: T | None = None
        share: Share | None = None
        error: Exception | None = None
        try:
            result, share = read()
        except Exception as caught:
            error = caught
        share = share or Share()
        answers: list[Any] = [None] * self._size
        own_answer = result, share.digest(), None if error is None else f"{type(error).__name__}: {error}"[:2000]
        self._dist.all_gather_object(answers, own_answer, group=self._group)
        if error is not None:
            raise error
        result = cast(T, result)
        for number, (_, _, failure) in enumerate(answers):
            if failure is not None:
                rank = self._dist.get_global_rank(self._group, number)
                raise PeerFailedError(
                    f"rank {rank} could not read its part of what is broadcast: {failure} - and the live state is "
                    "partly overwritten by now: restore another step before training on",
                    rank=rank,
                )
        if any(step != result for step, _, _ in answers):
            raise ValueError(
                f"the ranks of broadcast= restore different steps: {[step for step, _, _ in answers]}; give all of "
                "them the same"
            )
        if any(digest != own_answer[1] for _, digest, _ in answers):
            warnings.warn(
                "the ranks of broadcast= hold different slices, so each reads all of its own slices; pass the group "
                "of ranks that hold the same slices, such as mesh.get_group('replicate')",
                RuntimeWarning,
                stacklevel=4,
            )
            read_all(result)
        else:
            self._broadcast(share.items)
            take_actions(share.actions)
        return result

    def _broadcast(self, items: Sequence[Item]) -> None:
        small: dict[tuple[int, torch.device], list[torch.Tensor]] = {}
        for item, owner in zip(items, self._owners(items), strict=True):
            tensor = item.wanted.into.detach()
            if not tensor.nbytes:
                continue
            if not tensor.is_inference() and owner != self._rank:
                torch.autograd.graph.increment_version(tensor)  # autograd detects writes by this counter
            if tensor.nbytes < _SMALL_BYTES:
                small.setdefault((owner, tensor.device), []).append(tensor)
            else:
                self._send([tensor], owner)
        for (owner, _), tensors in small.items():
            at_once = max(1, _MESSAGE_BYTES // _SMALL_BYTES)
            for begin in range(0, len(tensors), at_once):
                self._send(tensors[begin : begin + at_once], owner)

    def _send(self, tensors: Sequence[torch.Tensor], owner: int) -> None:
        """Broadcast tensors from their owner, as bytes: not every backend supports every dtype."""
        with torch.inference_mode():
            is_one_dense = len(tensors) == 1 and is_dense(tensors[0])
            parts = list(map(flat_items, tensors))
            message = parts[0] if is_one_dense else torch.cat(parts)
            source = self._dist.get_global_rank(self._group, owner)
            for begin in range(0, message.numel(), _MESSAGE_BYTES):
                self._dist.broadcast(message[begin : begin + _MESSAGE_BYTES], src=source, group=self._group)
            if is_one_dense or owner == self._rank:
                return
            for tensor, part in zip(tensors, message.split([part.numel() for part in parts]), strict=True):
                if is_dense(tensor):
                    flat_bytes(tensor).copy_(part)
                else:
                    tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
