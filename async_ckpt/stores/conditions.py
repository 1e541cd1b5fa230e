"""Conditional puts: whether a store obeys the condition, and whether it accepts e-tags with quotes or without.

In: a put that creates an object, or replaces one version of it. Out: its result, or the fact that the store refuses
or ignores all such puts. Knows nothing of: clients.

Some servers accept a condition and ignore it. Ceph's gateway (RGW 16) compares the header byte by byte with the e-tag
without quotes, so it refuses every quoted e-tag.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final, Generic, TypeVar

T = TypeVar("T")
Form = Callable[[str], str]


def toggle_quotes(etag: str) -> str:
    """The e-tag without its quotes; with quotes if it has none."""
    return etag[1:-1] if etag.startswith('"') else f'"{etag}"'


NEVER: Final = f'"{"0" * 32}"'
_FORMS: Final[tuple[Form, ...]] = (str, toggle_quotes)  # the e-tag unchanged, or changed


class Conditions(Generic[T]):
    """Conditional puts to one store. The storage creates and owns it. Thread-safe.

    `put` replaces one version of an object, with the e-tag in a given form; or it creates the object, if the version is
    None. It raises FileExistsError if the store refuses, and an error that `is_unsupported` if the store does not
    support such puts. `version_of` returns the version of an object, and `probe` makes a small object that exists
    within its block. `are_obeyed` is None if it is unknown whether the store obeys conditions.
    """

    def __init__(
        self,
        put: Callable[[str, bytes, str | None, Form], T],
        version_of: Callable[[str], str],
        probe: Callable[[], AbstractContextManager[str]],
        is_unsupported: Callable[[Exception], bool],
        *,
        are_obeyed: bool | None = None,
        never: str = NEVER,
    ) -> None:
        """`never` is a version that no object has."""
        self._put, self._version_of, self._probe = put, version_of, probe
        self._is_unsupported, self._never = is_unsupported, never
        self._are_obeyed = are_obeyed
        self._lock = threading.Lock()
        # The forms that the store may accept: both at first, later the accepted form, or no form. Under _lock.
        self._forms = _FORMS

    def are_obeyed(self) -> bool:
        """Whether the store refuses puts whose condition is false. Tested at the first call, by two puts to a probe."""
        if self._are_obeyed is None:
            with self._probe() as path:
                self._are_obeyed = all(self._is_refused(path, version) for version in (None, self._never))
        return self._are_obeyed

    def _is_refused(self, path: str, version: str | None) -> bool:
        try:
            self._put(path, b"", version, str)
        except FileExistsError:
            return True
        except Exception as error:
            if not self._is_unsupported(error):
                raise
        return False

    def create(self, path: str, data: bytes) -> T:
        """Create an object. Returns the result of `put`. Raises FileExistsError if the object exists."""
        return self._put(path, data, None, str)

    def replace(self, path: str, data: bytes, version: str) -> T | None:
        """Replace a version of an object. Returns the result of `put`, or None if the store accepts no form of e-tag.

        If the put is refused although the object has this version, each form is tried on a probe, where no other writer
        can be the reason. Raises FileExistsError if the object no longer has this version.
        """
        with self._lock:
            forms = self._forms
        if not forms:
            return None
        try:
            result = self._put(path, data, version, forms[0])
        except FileExistsError:
            if len(forms) == 1 or not self.is_there(path, version):
                raise
        else:
            self._settle(forms[:1])
            return result
        accepted = next((form for form in forms if self._accepts(form)), None)
        self._settle(() if accepted is None else (accepted,))
        return None if accepted is None else self._put(path, data, version, accepted)

    def is_there(self, path: str, version: str) -> bool:
        """Whether an object has this version."""
        try:
            return self._version_of(path) == version
        except FileNotFoundError:
            return False

    def _accepts(self, form: Form) -> bool:
        """Whether the store accepts this form of e-tag, tested on a probe."""
        with self._probe() as path:
            try:
                self._put(path, b"accepted", self._version_of(path), form)
            except FileExistsError:
                return False
        return True

    def _settle(self, forms: tuple[Form, ...]) -> None:
        with self._lock:
            self._forms = forms
