"""The differences between a live state and a saved one, collected for one error that lists all of them.

In: names and sentences. Out: StateMismatchError if there are differences. Knows nothing of: archives, tensors.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any, Final

from ....errors import StateMismatchError
from ...spec import Json
from ...state.loaders import ANOTHER_ORDER, HOW_TO_KEEP_ORDER, order_differences
from ...state.names import Path, Selector, dotted, shown
from ...state.tree import ValuesByRank

_MAX_LINES: Final = 50
_log = logging.getLogger("async_ckpt")


class Differences:
    """The differences found in one walk over a live state and a saved one. `Match` creates it.

    `selector` is the caller's selection, None for everything.
    """

    def __init__(self, selector: Selector | None) -> None:
        self.selector = selector  # other live entries are ignored
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._mismatched: list[str] = []
        self.generators: set[int] = set()  # the ids of live generators that get their saved state
        self._loaders: list[tuple[Path, Any, Json]] = []
        self._lacks_selected = self._lacks_own = False
        self._shares_a_name = True  # at the top level; True if there are no names

    @property
    def are_none(self) -> bool:
        """True if every selected live entry was saved in the same shape."""
        return not (self._missing or self._mismatched or self._lacks_selected or self._lacks_own)

    def raise_any(self, checkpoint: str, holds: str, *, names: bool, order: bool) -> None:
        """Raises StateMismatchError for differences; with `names` also in names, with `order` also in data order.

        `checkpoint` is the path of the checkpoint, and `holds` lists the names in the checkpoint.
        """
        missing, unexpected = (self._missing, self._unexpected) if names else ([], [])
        orders = [
            f"{name} yields its data in another order than at the save: {facts}" for name, facts in self._orders.items()
        ]
        mismatched = [*self._mismatched, *(orders if order else [])]
        if not (missing or unexpected or mismatched):
            return
        lines = [
            *(f"missing in the checkpoint: {name}" for name in missing),
            *(f"unexpected in the checkpoint: {name}" for name in unexpected),
            *mismatched,
        ]
        if not self._shares_a_name:
            lines.insert(0, f"no name in the checkpoint is in the live state; the checkpoint holds {holds}")
        more = len(lines) - _MAX_LINES
        text = "\n  ".join([*lines[:_MAX_LINES], *([f"… and {more} more"] if more > 0 else [])])
        advice = ""
        if missing or unexpected:
            advice = "; pass strict=False to ignore names that only one side has, or load() all that was saved"
        if mismatched != self._mismatched:
            advice += f"; {HOW_TO_KEEP_ORDER}, or leave strict=True out to go on with another order"
        raise StateMismatchError(
            f"{checkpoint} does not fit the live state; nothing was overwritten{advice}:\n  {text}",
            missing=tuple(missing),
            unexpected=tuple(unexpected),
            mismatched=tuple(mismatched),
        )

    @functools.cached_property
    def _orders(self) -> dict[str, str]:
        """The data loaders whose order would change, by name, with the facts that differ."""
        facts = {shown(path): order_differences(live, saved, self.generators) for path, live, saved in self._loaders}
        return {name: ", ".join(lines) for name, lines in facts.items() if lines}

    def warn_of_order(self, checkpoint: str) -> None:
        for name, facts in self._orders.items():
            _log.warning(ANOTHER_ORDER, checkpoint, name, facts)

    def add_loader(self, path: Path, live: Any, saved: Json) -> None:
        """Add a data loader, to compare its order with these saved facts once all generators are known."""
        self._loaders.append((path, live, saved))

    def add(self, path: Path, sentence: str) -> None:
        """Add a difference of an entry that both sides have."""
        self._mismatched.append(f"{shown(path)} {sentence}")

    def add_all_of(self, path: Path, sentences: Iterable[str]) -> None:
        self._mismatched += [f"{shown(path)}: {sentence}" for sentence in sentences]

    def add_missing(self, path: Path) -> None:
        self._missing.append(shown(path))

    def add_unexpected(self, paths: Iterable[Path]) -> None:
        self._unexpected += map(shown, paths)

    def add_own_names(self, live: Any, saved: Any) -> None:
        """Record whether an object's own state dict has keys, also in nested dicts, that were not saved."""
        self._lacks_own |= _has_more_names(live, saved)

    def add_names(self, live: Iterable[Any], saved: Iterable[Any], path: Path) -> None:
        """Compare the live names at a path with the saved ones."""
        live, saved = list(live), set(saved)
        if not path:
            self._shares_a_name = any(key in saved for key in live)
        lacking = [(*path, key) for key in live if key not in saved]
        if self.selector is None:
            self._missing += map(shown, lacking)
        else:
            self._lacks_selected |= any(
                self.selector(path_of_key) or self.selector.reaches(dotted(path_of_key)) for path_of_key in lacking
            )

    def add_value_of_each_rank(self, saved: ValuesByRank) -> None:
        """Add a difference for a value that each rank saved separately: only the caller may choose one of them."""
        name = shown(saved.path)
        self._mismatched.append(
            f"{name} has a separate value for each rank that saved, and the number of ranks has changed; "
            f"choose a rank, such as from_ranks={{{name!r}: {min(saved.values)}}}, or leave it out with select="
        )


def _has_more_names(live: Any, saved: Any) -> bool:
    """True if a live dict, or a dict nested in it, has a key that was not saved."""
    if not (isinstance(live, dict) and isinstance(saved, dict)):
        return False
    return any(key not in saved or _has_more_names(value, saved[key]) for key, value in live.items())
