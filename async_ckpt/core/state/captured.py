"""The state of one instant as a value: its capture, and a view of copies of its tensors by name.

In: a capture, and copies of its tensors. Out: parts of the state by name, and plain containers.
Knows nothing of: how tensors are copied.
"""

from __future__ import annotations

import io
import json
import operator
import os
import weakref
from collections import deque
from collections.abc import Collection, Iterator, KeysView, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias

import torch

from ...errors import ClosedError, UnsupportedStateError
from ..slicing.sharded import Placed
from ..slicing.slices import Slices
from ..spec import Json, RankFacts, TensorSpec, with_article
from .names import Path, dotted, dtype_named, is_within, shown
from .tree import InnerTensors, SavedRecord, StoredLeaf, decode, parts_in, replaced
from .wrapped import plain_parts

Mark: TypeAlias = tuple[int, int]
# The tensor of a spec without bytes in this archive.
NOTHING: Final = torch.empty(0, dtype=torch.uint8, device="cpu")


class Capture(NamedTuple):
    """One state, taken apart by `state.capture`. `tensors[i]` holds the bytes of `specs[i]`.

    A tensor with aliases is stored once. `marks[i]` has the address and the version counter of the user's own tensor;
    None for a copy that was made here. `completions` has the completions of snapshots in the state, and `frozen` the
    numbers of their tensors, which have their final bytes once the snapshots are complete.
    """

    specs: list[TensorSpec]
    tensors: list[torch.Tensor]
    skeleton: str
    objects: bytes | None
    marks: list[Mark | None]
    completions: tuple[Future[None], ...] = ()
    frozen: frozenset[int] = frozenset()
    modules: Mapping[Path, weakref.ref[torch.nn.Module]] = MappingProxyType({})
    types: Collection[type] = ()
    slices: Sequence[Slices] = ()
    """The slices of each tensor that this rank holds, by the tensor's number; empty for a state of one process."""
    per_rank: tuple[str, ...] = ()
    """The names of values that each process has separately: random generators."""
    placed: Mapping[int, Placed] = MappingProxyType({})
    """The DTensors of a held snapshot, by number. `tensors` has their local tensors."""
    notes: Mapping[Path, Mapping[str, Json]] = MappingProxyType({})
    """Facts that a restore compares with the live objects besides their state dicts, by path: see `tree.with_notes`."""


class RankShare(NamedTuple):
    """The part of a state that one rank writes. `StateDivider.divided` creates it for each save."""

    captured: Capture
    ranks: RankFacts | None
    """The facts about ranks for the archive's index; None if the archive has all of the state."""
    small: Mapping[str, int] = MappingProxyType({})
    """The numbers of the specs of small tensors that every rank writes itself, by dotted name."""
    balance: int = 0
    """The result of `shares.balance`, from which rank 0 checks that the ranks write everything."""


def structure_of(captured: Capture) -> Any:
    """The state, with a `StoredLeaf` for each leaf outside of the skeleton.

    Raises TypeError for two classes with the same name.
    """
    return decode(json.loads(captured.skeleton), types=captured.types)[0]


class SnapshotCopies:
    """The copies of one snapshot's tensors until it is closed, shared by all views of the snapshot."""

    def __init__(self, captured: Capture, copies: list[torch.Tensor], completion: Future[None]) -> None:
        self.completion = completion
        self.captured = captured._replace(tensors=[], skeleton="")  # so that the user's own tensors are not kept alive
        self._copies: list[torch.Tensor] | None = copies
        self._pid = os.getpid()

    def with_copies(self, copies: list[torch.Tensor], completion: Future[None]) -> SnapshotCopies:
        """Other copies with the same names, which do not belong to tensors of the user."""
        captured = self.captured._replace(marks=[None] * len(copies), modules={}, notes={})
        return SnapshotCopies(captured, copies, completion)

    def close(self) -> None:
        self._copies = None

    @property
    def is_closed(self) -> bool:
        return self._copies is None

    def copies(self) -> list[torch.Tensor]:
        """The copies. Raises ClosedError if the snapshot is closed, or belongs to the parent process."""
        if self._copies is None:
            raise ClosedError("this snapshot is closed; use it inside its `with` block, or take another one")
        if os.getpid() != self._pid:
            raise ClosedError("this snapshot belongs to the parent process; use it there")
        return self._copies

    def marks(self) -> Iterator[tuple[torch.Tensor, Mark | None]]:
        """The copies, each with the mark of the user's tensor at the instant of the snapshot."""
        return zip(self.copies(), self.captured.marks, strict=True)

    def filled(self, structure: Any) -> Any:
        """A part of the structure with new containers and new objects, which the caller may change."""
        copies = self.copies()
        objects: list[Any] = []

        def give(stored: StoredLeaf) -> Any:
            if stored.kind == "object":
                if not objects:  # this process has pickled the objects itself, so they are trusted
                    pickle = io.BytesIO(self.captured.objects or b"")
                    objects.extend(torch.load(pickle, weights_only=False))  # nosec B614
                return objects[stored.number]
            copy = copies[stored.number]
            if stored.kind == "tensor":
                placed = self.captured.placed.get(stored.number)
                return copy if placed is None else placed.around(copy)
            if stored.kind == "bytes":
                return bytes(copy.numpy())
            spec = self.captured.specs[stored.number]
            return stored.as_array(copy.view(dtype_named(spec.dtype)).view(spec.shape))

        return replaced(structure, give, of_inner=_around_copies)


def _around_copies(captured: InnerTensors, copies: dict[str, Any]) -> Any:
    """The wrapped tensor of these copies, to be filled later. Raises UnsupportedStateError if its class copies them."""
    tensor = captured.made(copies)
    given = [part.data_ptr() for copy in copies.values() for part in plain_parts(copy)]
    if [part.data_ptr() for part in plain_parts(tensor)] != given:
        name = shown(captured.path)
        raise UnsupportedStateError(
            f"{name}: a snapshot cannot hold {captured.kind}, whose __tensor_unflatten__ copies the inner tensors; "
            "save the live state instead",
            path=name,
        )
    return tensor


class SnapshotView:
    """A snapshot or a part of a snapshot: the state at one instant, with its tensors on the host.

        snap["model"]["weight"]  # a tensor; snap["model"] is a part

    Names are as in state dicts. `save`, `export_hf` and wrapped functions accept a snapshot in place of the state, and
    read it in the background. All readers share its tensors, so they must not be written to.
    """

    def __init__(self, source: SnapshotCopies, structure: Any, path: Path = ()) -> None:
        self._source, self._structure, self._path = source, structure, path

    @property
    def completion(self) -> Future[None]:
        """A future that resolves when all bytes are copied, with TornSnapshotError if a tensor changed too early.

        snap.completion.result(timeout=60)  # seconds
        """
        return self._source.completion

    def state_dict(self) -> Any:
        """Wait for `completion` and return the state in plain containers.

            state = snap.state_dict()  # {"model": {"weight": tensor(…)}, …}

        Raises ClosedError and TornSnapshotError.
        """
        tree = tree_of(self)
        error = self.completion.exception()
        if error is not None:
            # A handle may keep the error for a long time, and its traceback would keep the copies alive.
            del tree
            raise error
        return tree

    @property
    def _entries(self) -> Any:
        """The container of the parts. Raises TypeError for a single value."""
        if is_leaf(self):
            raise TypeError(f"{shown(self._path)} is one value, without parts; its state_dict() is that value")
        structure = self._structure
        return structure.fields if isinstance(structure, SavedRecord) else structure

    @property
    def _names(self) -> dict[Any, Any]:
        """The parts by name. Raises TypeError if this is not a dict."""
        entries = self._entries
        if not isinstance(entries, dict):
            raise TypeError(
                f"{shown(self._path)} is {with_article(type(entries).__name__)}, whose entries have no names"
            )
        return entries

    def __getitem__(self, key: Any) -> Any:
        """A part. For a single tensor or value, waits for `completion` and returns it.

        Raises KeyError, IndexError and ClosedError.
        """
        inner = part_of(self, key)
        return inner.state_dict() if is_leaf(inner) else inner

    def keys(self) -> KeysView[Any]:
        """The names of the parts. Raises TypeError if this is not a dict.

        list(snap.keys())  # ["model", "optimizer"]
        """
        return self._names.keys()

    def items(self) -> Iterator[tuple[Any, Any]]:
        """The names of the parts, each with `snap[name]`. Raises TypeError if this is not a dict.

        for name, part in snap.items(): ...
        """
        return ((name, self[name]) for name in self._names)

    def get(self, name: Any, default: Any = None) -> Any:
        """`snap[name]`, or `default` if there is no entry of this name. Raises TypeError if this is not a dict.

        snap.get("scheduler")  # None if there is no such entry
        """
        return self[name] if name in self._names else default

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the names of a dict, or over the items of a list."""
        if isinstance(self._entries, dict):
            return iter(self._entries)
        return (self[i] for i in range(len(self)))

    def __contains__(self, name: object) -> bool:
        """True if there is an entry of this name. Raises TypeError if this is not a dict."""
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


# --- for readers of snapshots in this library ---------------------------------------------------------------------


def module_of(view: SnapshotView) -> torch.nn.Module | None:
    """The live module of a view, without wrappers, or None. Raises ReferenceError if the module was deleted."""
    known = view._source.captured.modules.get(view._path)
    module = None if known is None else known()
    if known is not None and module is None:
        raise ReferenceError(
            f"the module that {shown(view._path)} is a snapshot of was deleted; keep it, or use the "
            "state_dict() of this part"
        )
    return module


class FrozenTensors:
    """Tensors of a snapshot, or views of them, under other names: a state whose tensors do not change."""

    def __init__(self, view: SnapshotView, tensors: dict[str, torch.Tensor]) -> None:
        self.view, self._tensors = view, tensors

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self._tensors


class FrozenParts:
    """The snapshots in a state, and their tensors. A capture creates it."""

    def __init__(self) -> None:
        self.completions: list[Future[None]] = []
        self.numbers: set[int] = set()  # the numbers of the tensors
        self._moved: dict[int, Mark | None] = {}  # by storage: the distance to the user's tensor, and its version

    def add(self, view: SnapshotView) -> None:
        self.completions.append(view.completion)
        for copy, mark in view._source.marks():
            if address := copy.untyped_storage().data_ptr():
                self._moved[address] = None if mark is None else (mark[0] - copy.data_ptr(), mark[1])

    def has(self, tensor: torch.Tensor) -> bool:
        """True for a tensor of a snapshot, and for a view of such a tensor."""
        return bool(self._moved) and tensor.untyped_storage().data_ptr() in self._moved

    def mark(self, tensor: torch.Tensor) -> Mark | None:
        """The mark of the user's own tensor, or of the same view of it, at the instant of the snapshot."""
        moved = self._moved[tensor.untyped_storage().data_ptr()]
        return None if moved is None else (tensor.data_ptr() + moved[0], moved[1])


def per_rank_in(view: SnapshotView, path: Path) -> list[str]:
    """The names of values that each process has separately, in a snapshot at this path of a state."""
    top, at = dotted(view._path), dotted(path)
    names = (name for name in view._source.captured.per_rank if not top or is_within(name, {top}))
    return [".".join(filter(None, (at, name[len(top) :].lstrip(".")))) for name in names]


def notes_in(view: SnapshotView, path: Path) -> dict[Path, Mapping[str, Json]]:
    """The notes on state dicts in a snapshot at this path of a state."""
    top = view._path
    known = view._source.captured.notes
    return {(*path, *inner[len(top) :]): notes for inner, notes in known.items() if inner[: len(top)] == top}


def tree_of(view: SnapshotView) -> Any:
    """The state in plain containers, without waiting: its tensors have their bytes once `completion` has resolved."""
    return view._source.filled(view._structure)


def has_dtensors(view: SnapshotView) -> bool:
    """True if other ranks hold other shards of a snapshot's tensors. Works for a closed snapshot, too."""
    placed = view._source.captured.placed
    return any(leaf.number in placed for leaf in parts_in(view._structure, StoredLeaf) if leaf.kind == "tensor")


def is_leaf(view: SnapshotView) -> bool:
    """True for a view of a single tensor or value."""
    structure = view._structure
    if isinstance(structure, torch.Size | InnerTensors):
        return True
    return not isinstance(structure, dict | list | tuple | deque | SavedRecord)


def part_of(view: SnapshotView, key: Any) -> SnapshotView:
    """The part of this name or number. Raises KeyError or IndexError, and TypeError for a single value."""
    entries = view._entries
    is_named = isinstance(entries, dict)
    try:
        if not is_named:
            key = range(len(entries))[operator.index(key)]  # a negative index counts from the end
        inner = entries[key]
    except (KeyError, IndexError, TypeError) as error:
        known = ", ".join(map(repr, entries)) if is_named else f"{len(entries)} entries"
        kind = IndexError if isinstance(error, IndexError) else KeyError
        raise kind(f"{key!r} is not in {shown(view._path)}; there are {known:.300}") from None
    return SnapshotView(view._source, inner, (*view._path, key))
