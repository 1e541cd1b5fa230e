"""A state as it was at one instant, with other tensors in the place of its own.

In: a capture, and copies of its tensors. Out: parts of it by name, and plain containers. Knows nothing of: who copies.
"""

from __future__ import annotations

import io
import json
import operator
import os
import weakref
from collections import deque
from collections.abc import Iterator, KeysView, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ClosedError
from ..spec import with_article
from .dtypes import dtype_named
from .names import Path, shown
from .tree import SavedRecord, Stored, decode, replaced

if TYPE_CHECKING:  # a capture may be of a state that was held before
    from .capture import Capture, Mark


def structure_of(captured: Capture) -> Any:
    """The state, with a `Stored` for what is not in the skeleton itself. Raises TypeError for two classes of one name."""
    return decode(json.loads(captured.skeleton), types=captured.types)[0]


class Source:
    """What all parts of one snapshot share: the copies, until it is closed."""

    def __init__(self, captured: Capture, copies: list[torch.Tensor], completion: Future[None]) -> None:
        self.completion = completion
        self.modules: Mapping[Path, weakref.ref[torch.nn.Module]] = captured.modules
        self._pickled = captured.objects
        self._copies: list[torch.Tensor] | None = copies
        self._specs, self._marks = captured.specs, captured.marks
        self._pid = os.getpid()

    def close(self) -> None:
        self._copies = None

    @property
    def is_closed(self) -> bool:
        return self._copies is None

    def copies(self) -> list[torch.Tensor]:
        """Raises ClosedError when there are none any more, or not in this process."""
        if self._copies is None:
            raise ClosedError("this snapshot is closed; use it inside its `with` block, or take another one")
        if os.getpid() != self._pid:
            raise ClosedError("this snapshot belongs to the parent process; use it there")
        return self._copies

    def marks(self) -> dict[int, Mark | None]:
        """What the copied tensors were at that instant, by the id of each copy."""
        return {id(copy): mark for copy, mark in zip(self.copies(), self._marks, strict=True)}

    def _objects(self) -> list[Any]:
        # They were pickled here, of objects of this very process.
        return torch.load(io.BytesIO(self._pickled or b""), weights_only=False)  # type: ignore[no-any-return]

    def filled(self, structure: Any) -> Any:
        """A part of the structure, in containers of its own, and with objects of its own: whoever has it may change them."""
        copies = self.copies()
        objects: list[Any] = []

        def give(stored: Stored) -> Any:
            if stored.kind == "object":
                objects[:] = objects or self._objects()
                return objects[stored.number]
            copy = copies[stored.number]
            if stored.kind == "tensor":
                return copy
            if stored.kind == "bytes":
                return bytes(copy.numpy())
            spec = self._specs[stored.number]
            return stored.as_array(copy.view(dtype_named(spec.dtype)).view(spec.shape))

        return replaced(structure, give)


class Held:
    """A snapshot, or a part of one: a state as it was at one instant, with its tensors on the host.

        snap["model"]["weight"]  # a tensor; snap["model"] is a part

    The names are those of the state dicts. `save`, `export_hf` and wrapped functions accept a snapshot in place of the
    state, and read it in the background. All readers share its tensors, so they must not be written to.
    """

    def __init__(self, source: Source, structure: Any, path: Path = ()) -> None:
        self._source, self._structure, self._path = source, structure, path

    @property
    def completion(self) -> Future[None]:
        """A future that is done when every byte has been copied. It raises TornSnapshotError if a tensor changed too early.

        snap.completion.result(timeout=60)  # seconds
        """
        return self._source.completion

    @property
    def module(self) -> torch.nn.Module | None:
        """The live module whose state this is, without wrappers; None where it is the state of none. Raises ReferenceError if it is gone."""
        known = self._source.modules.get(self._path)
        module = None if known is None else known()
        if known is not None and module is None:
            raise ReferenceError(
                f"the module that {shown(self._path)} is a snapshot of was deleted; keep it, or use the state_dict() of this part"
            )
        return module

    @property
    def marks(self) -> Mapping[int, Mark | None]:
        """What each tensor was when it was copied, by the id of the copy."""
        return self._source.marks()

    def tree(self) -> Any:
        """The state in plain containers, at once: its tensors have their bytes when `completion` has resolved."""
        return self._source.filled(self._structure)

    def state_dict(self) -> Any:
        """Wait for `completion` and return the state in plain containers.

            state = snap.state_dict()  # {"model": {"weight": tensor(…)}, …}

        Raises ClosedError and TornSnapshotError.
        """
        tree = self.tree()
        error = self.completion.exception()
        if error is not None:
            del (
                tree
            )  # or the error, which a handle may keep for long, would keep the copies by way of its traceback
            raise error
        return tree

    @property
    def is_leaf(self) -> bool:
        """Whether it is one tensor, or one value."""
        return not isinstance(self._structure, dict | list | tuple | deque | SavedRecord) or isinstance(
            self._structure, torch.Size
        )

    @property
    def _entries(self) -> Any:
        """Raises TypeError where there are none."""
        if self.is_leaf:
            raise TypeError(
                f"{shown(self._path)} is one value, without parts; its state_dict() is that value"
            )
        structure = self._structure
        return structure.fields if isinstance(structure, SavedRecord) else structure

    @property
    def _names(self) -> dict[Any, Any]:
        """Raises TypeError where there are none."""
        entries = self._entries
        if not isinstance(entries, dict):
            raise TypeError(
                f"{shown(self._path)} is {with_article(type(entries).__name__)}, whose entries have no names"
            )
        return entries

    def inner(self, key: Any) -> Held:
        """The part of this name or number. Raises KeyError, and TypeError if it has no parts."""
        entries = self._entries
        try:
            if not isinstance(entries, dict):
                key = range(len(entries))[
                    operator.index(key)
                ]  # by which the parts are known, also from the end
            inner = entries[key]
        except (KeyError, IndexError, TypeError):
            there = ", ".join(map(repr, entries)) if isinstance(entries, dict) else f"{len(self)} entries"
            raise KeyError(f"{key!r} is not in {shown(self._path)}; there are {there:.300}") from None
        return Held(self._source, inner, (*self._path, key))

    def __getitem__(self, key: Any) -> Any:
        """A part; or a tensor or a value, after waiting for `completion`. Raises KeyError and ClosedError."""
        inner = self.inner(key)
        return inner.state_dict() if inner.is_leaf else inner

    def keys(self) -> KeysView[Any]:
        """The names in it. Raises TypeError if it is not a dict.

        list(snap.keys())  # ["model", "optimizer"]
        """
        return self._names.keys()

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the names of a dict, or over the items of a list."""
        if isinstance(self._entries, dict):
            return iter(self._entries)
        return (self[i] for i in range(len(self)))

    def __contains__(self, name: object) -> bool:
        """Whether there is an entry of this name. Raises TypeError if it is not a dict."""
        return name in self._names

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> Any:
        raise TypeError("a snapshot cannot be pickled or copied; use its state_dict()")

    def __repr__(self) -> str:
        if self._source.is_closed:
            state = "closed"
        elif not self.completion.done():
            state = "copying"
        else:
            state = "complete" if self.completion.exception() is None else "torn"
        return f"<{type(self).__name__} of {shown(self._path)}, {state}>"
