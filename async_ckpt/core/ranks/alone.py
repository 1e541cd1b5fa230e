"""The agreement of a process that saves alone, without the protocol of several ranks.

In: the name of an attempt. Out: the answers of an `agreement.Agreement` with nobody. Knows nothing of: ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ..host.loop import OffLoop
    from ..runs.manifest import Manifest


class Alone:
    """In place of an `Agreement`. It has nothing to agree on."""

    rank, world_size, has_others, decides = 0, 1, False, True
    is_apart = fails_elsewhere = is_told = False
    spread: Final[Mapping[str, Any]] = MappingProxyType({})
    found = ""
    lent: Final[Collection[tuple[str, int]]] = ()

    def __init__(self, attempt: str) -> None:
        self.attempt = attempt

    async def named(self, check: Callable[[], None]) -> None:
        """Do nothing: the attempt has its name."""

    async def has_room(self, check: Callable[[], None]) -> None:
        """Do nothing: this process makes room itself."""

    def made_room(self) -> None:
        """Do nothing: no other rank waits for room."""

    async def agree(self, *_: Any) -> None:
        """Do nothing: no other rank writes the step."""

    async def hear(self, off_loop: OffLoop, check: Callable[[], None]) -> None:
        """Do nothing: no other rank decides."""

    def claim(self) -> None:
        """The root is this process's."""

    def committing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def committed(self, manifest: Manifest) -> None:
        """Do nothing: no other rank waits for the commit."""

    def afterwards(self) -> None:
        """Do nothing: there are no receipts."""

    def refuse(self, error: BaseException) -> bool:  # noqa: ARG002
        return True
