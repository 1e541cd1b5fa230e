"""The form of an e-tag in the condition of a put: with its quotes, as in HTTP, or without.

In: puts that replace one version only. Out: their result, or the fact that the store refuses all of them.
Knows nothing of: clients, objects.

Ceph's gateway (RGW 16) compares the header with the bare e-tag, byte for byte, so it refuses every quoted one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar

T = TypeVar("T")
Form = Callable[[str], str]


def toggle_quotes(etag: str) -> str:
    """The e-tag without its quotes; with quotes if it has none."""
    return etag[1:-1] if etag.startswith('"') else f'"{etag}"'


_FORMS: Final[tuple[Form, ...]] = (str, toggle_quotes)  # as it is, or changed


class Conditions:
    """The form of e-tag that one store accepts. The storage creates and owns it. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # The forms that the store may accept: both, one once it is known, none if it refuses both. Under _lock.
        self._forms = _FORMS

    def replace(
        self, put: Callable[[Form], T], *, is_there: Callable[[], bool], accepts: Callable[[Form], bool]
    ) -> T | None:
        """The result of `put` in a form that the store accepts; None if it accepts none.

        `put` raises FileExistsError if it is refused. If `is_there` says that the version is there all the same,
        `accepts` tries each form on an object of its own, where no other writer can be the reason.
        Raises FileExistsError if the version is no longer there.
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
