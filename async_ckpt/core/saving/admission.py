"""The admission of saves: so many may be under way at once, and the others wait for their turn.

In: slots, requested by callers of `save`. Out: admission in the order of requests. Knows nothing of: saves.

The caller's thread may be interrupted between any two steps (Ctrl-C, an exception of a signal handler), so it holds no
lock here and has nothing to undo: a slot is admitted while fewer than `max_in_flight` older ones live. A slot leaves by
`leave`, or when its caller loses it, since the admission has only weak references to slots.
"""

from __future__ import annotations

import queue
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Literal

from ..host.waits import LIVENESS_SECONDS
from ..spec import whole_count

OnOverlap = Literal["wait", "skip"]


class Slot:
    """A slot among the saves under way, from the call until the save is decided."""

    __slots__ = ("__weakref__", "bell", "is_admitted", "needs", "step")

    def __init__(self, step: int | None) -> None:
        self.step = step
        self.needs: Callable[[], Collection[int]] = tuple  # steps that must stay on storage until it is decided
        self.is_admitted = False
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # rings when another slot has left


class Admission:
    """The slots of one saver. From any thread."""

    def __init__(self, max_in_flight: int = 1, on_overlap: OnOverlap = "wait") -> None:
        if on_overlap not in ("wait", "skip"):
            raise ValueError(f'on_overlap must be "wait" or "skip", got {on_overlap!r}')
        self.max_in_flight, self._on_overlap = whole_count("max_in_flight", max_in_flight), on_overlap
        # Oldest first. It changes by `append` and `remove` alone, which are atomic for other threads.
        self._claims: list[weakref.ref[Slot]] = []

    @property
    def may_skip(self) -> bool:
        """True if overlapping saves are skipped."""
        return self._on_overlap == "skip"

    def enter(self, slot: Slot, check: Callable[[], None], *, must: bool = False) -> bool:
        """Wait until it is this slot's turn; False at once where overlapping saves are skipped, but not if it `must`.

        `check` is called while waiting, and raises when there is nothing to wait for.
        """
        self._claims.append(weakref.ref(slot))
        while slot not in self._living()[: self.max_in_flight]:
            if self.may_skip and not must:
                self.leave(slot)
                return False
            try:
                check()
                slot.bell.get(timeout=LIVENESS_SECONDS)
            except queue.Empty:
                continue
            except BaseException:
                self.leave(slot)
                raise
        slot.is_admitted = True
        return True

    def enter_at_once(self, slot: Slot) -> None:
        """Count a save that does not wait for its turn."""
        self._claims.append(weakref.ref(slot))
        slot.is_admitted = True

    def leave(self, slot: Slot) -> None:
        """Give a slot back. Idempotent."""
        try:
            self._claims.remove(weakref.ref(slot))
        except ValueError:
            return
        for other in self._living():
            other.bell.put(None)

    def under_way(self) -> list[Slot]:
        """The admitted slots, oldest first."""
        return [slot for slot in self._living() if slot.is_admitted]

    def _living(self) -> list[Slot]:
        slots = [(claim, claim()) for claim in list(self._claims)]
        for claim, slot in slots:
            if slot is None:  # lost by a caller that was interrupted
                with suppress(ValueError):  # another thread has seen it, too
                    self._claims.remove(claim)
        return [slot for _, slot in slots if slot is not None]
