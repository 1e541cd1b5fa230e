"""In which form a store takes an e-tag in a condition: with its quotes, as HTTP has it, or without.

In: puts that are to replace one version only. Out: such a put, or that the store refuses all of them.
Knows nothing of: clients, objects.

Ceph's gateway (RGW 16) compares the header with the bare e-tag, byte for byte, so it refuses every quoted one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
Form = Callable[[str], str]


def unchanged(e_tag: str) -> str:
    return e_tag


def toggle_quotes(e_tag: str) -> str:
    """Without quotes if it has them, else with."""
    return e_tag[1:-1] if e_tag.startswith('"') else f'"{e_tag}"'


_FORMS: Final[tuple[Form, ...]] = (unchanged, toggle_quotes)


class Conditions:
    """The conditions that one store was found to take. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Those that it may take, the likeliest first; one once that is known, none if it refuses both. Under _lock.
        self._forms = _FORMS

    def replace(
        self, put: Callable[[Form], T], *, is_there: Callable[[], bool], accepts: Callable[[Form], bool]
    ) -> T | None:
        """The result of `put` in a form that the store takes; None if it takes none. Asks nothing more of a store that obeys.

        `put` raises FileExistsError when it is refused; `is_there` tells whether the version is still there all the
        same; then `accepts` tries a form on an object of its own, where no other writer can be the reason.
        Raises FileExistsError when the version is no longer there.
        """
        with self._lock:
            forms = self._forms
        if not forms:
            return None
        try:
            result = put(forms[0])
        except FileExistsError:
            if len(forms) == 1 or not is_there():
                raise
        else:
            self._settle(forms[:1])
            return result
        accepted = next((form for form in forms if accepts(form)), None)
        self._settle(() if accepted is None else (accepted,))
        return None if accepted is None else put(accepted)

    def _settle(self, forms: tuple[Form, ...]) -> None:
        with self._lock:
            self._forms = forms
