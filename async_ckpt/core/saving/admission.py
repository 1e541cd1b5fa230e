"""The admission of saves: at most `max_in_flight` are under way at once, and the others wait for their turn.

In: slots, requested by callers of `save`. Out: admission in the order of requests. Knows nothing of: saves.

The caller's thread may be interrupted between any two steps (Ctrl-C, an exception from a signal handler), so it holds
no lock here and has nothing to undo: a slot is admitted while fewer than `max_in_flight` older slots live. A slot
leaves by `leave`, or when its caller drops the last reference to it: `Admission` keeps only weak references.
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
    """A save's place in the queue, from its call until the save is decided: committed or failed."""

    __slots__ = ("__weakref__", "bell", "is_admitted", "needs", "step")

    def __init__(self, step: int | None) -> None:
        self.step = step
        self.needs: Callable[[], Collection[int]] = tuple  # steps that must stay on storage until this save is decided
        self.is_admitted = False
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # rings when another slot has left


class Admission:
    """The slots of one saver. May be called from any thread."""

    def __init__(self, max_in_flight: int = 1, on_overlap: OnOverlap = "wait") -> None:
        if on_overlap not in ("wait", "skip"):
            raise ValueError(f'on_overlap must be "wait" or "skip", got {on_overlap!r}')
        self.max_in_flight, self._on_overlap = whole_count("max_in_flight", max_in_flight), on_overlap
        # Oldest first. Changed only by `append` and `remove`, which are atomic for other threads.
        self._claims: list[weakref.ref[Slot]] = []

    @property
    def may_skip(self) -> bool:
        """True if overlapping saves are skipped."""
        return self._on_overlap == "skip"

    def enter(self, slot: Slot, check: Callable[[], None], *, must: bool = False) -> bool:
        """Wait until it is this slot's turn, and return True.

        Where overlapping saves are skipped, return False at once instead of waiting, unless `must` is True. `check` is
        called while waiting, and raises if waiting is useless.
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
        """Return a slot and wake the slots that wait. Idempotent."""
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
            if slot is None:  # its caller was interrupted
                with suppress(ValueError):  # another thread has removed it already
                    self._claims.remove(claim)
        return [slot for _, slot in slots if slot is not None]
