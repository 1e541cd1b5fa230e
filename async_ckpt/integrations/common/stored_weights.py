"""Weights that are stored anywhere, as a stream of tensors by the names that inference engines know.

In: an archive, a step, a run, an export, or a published version. Out: names and tensors, one after the other. Knows
nothing of: engines.

For a model of any size, the stream takes the memory of three pieces of 128 MiB, or of the size of the largest tensor:
one that the caller uses, one that waits, and one that a thread is reading.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Self, TypeAlias

import torch

from ... import Place
from ...errors import NotCommittedError, StorageUnavailableError
from ...plumbing import contents, fill, find, spec, threads, waits
from ...weights.publishing.folder_replica import FolderReplica
from ...weights.publishing.subscriber import Subscriber
from ...weights.publishing.verify_versions import has_versions
from ...weights.publishing.version_files import WeightsState

PIECE_BYTES: Final = 128 * spec.MIB
_MODEL: Final = "model"

Item: TypeAlias = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class StoredWeights:
    """The place of a model's weights, in values that JSON can represent.

        StoredWeights("s3://bucket/run", step=1200)
        StoredWeights("s3://bucket/weights", version=1200, folder="/local/model")

    Args:
        path: an archive, the folder of a step, a run, a Hugging Face folder, or the root of a Publisher; a path or URL.
        step: for a run, a committed step; by default the newest.
        version: for a Publisher's root, a version; by default the newest.
        part: the name of the entry with the weights, such as "policy"; by default "model", unless the state consists
            only of tensors.
        folder: for versions, a local folder to which they are pulled, and from which they are read. Processes may share
            it.
        options: options of the client for a URL, such as its endpoint.

    Raises ValueError for arguments that contradict each other.
    """

    path: str
    step: int | None = None
    version: int | None = None
    part: str | None = None
    folder: str | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.step is not None and self.version is not None:
            raise ValueError("step is for a run and version for the root of a Publisher; give one of them")
        for name, kind in (("path", str), ("step", int), ("version", int), ("part", str), ("folder", str)):
            value = getattr(self, name)
            if isinstance(value, bool) or not (isinstance(value, kind) or (value is None and name != "path")):
                raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r:.100}")
        self.place()

    @classmethod
    def of(cls, given: Mapping[str, Any], **defaults: Any) -> Self:
        """Created from a JSON object, with `defaults` for missing names. Raises ValueError for unknown names."""
        known = [field.name for field in fields(cls)]
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(f"{unknown[0]!r} is not an option; known are {', '.join(known)}")
        values = {**defaults, **given}
        if "path" not in values:
            raise ValueError('"path" is missing: where the weights are, a path or URL')
        return cls(**values)

    def place(self) -> Place:
        """The path with its options."""
        return Place(self.path, options=self.options) if self.options else Place(self.path)

    def __str__(self) -> str:
        numbers = [f"{name} {value}" for name in ("step", "version") if (value := getattr(self, name)) is not None]
        return ", ".join([self.place().shown, *numbers])

    def check(self) -> None:
        """Raise the errors of `tensors` if there is nothing to read. Reads only indices."""
        if self._is_published():
            self._published_version()
        else:
            self._open(lambda parts: weights_in(parts, self.part))

    def tensors(self) -> Iterator[Item]:
        """The names and tensors of the weights, on the host, in the order in which they are stored.

        Every byte is compared with its digest, if there is one. Tied tensors come under each of their names. Raises
        NotCommittedError for a step or version that does not exist or is not complete, KeyError for a missing `part`,
        CorruptCheckpointError, ValueError for versions without a `folder`, and StorageUnavailableError, also if the
        weights are replaced while they are read.
        """
        return read_ahead(self._read)

    # --- on the reading thread --------------------------------------------------------------------------------

    def _read(self, put: Callable[[deque[Item]], None]) -> None:
        if not self._is_published():
            self._open(_once(lambda parts: _read_all(weights_in(parts, self.part), put), self))
            return
        folder, state = self._pulled()
        find.from_path(folder, _once(lambda parts: _read_all(weights_in(parts, None), put), self), verify=True)
        after = _state_of(folder)
        if after != state:
            version = "none" if after is None else after.version
            raise StorageUnavailableError(
                f"{folder} changed from version {state.version} to {version} while its weights were read; load them "
                "again, and let engines of different versions have folders of their own",
                path=str(folder),
            )

    def _open(self, use: Callable[[Sequence[contents.Part]], Any]) -> Any:
        if self.step is not None:
            return find.from_committed(find.committed_step(self.place(), self.step), use, verify=True)
        return find.from_path(self.place(), use, verify=True)

    def _is_published(self) -> bool:
        """True if the path has published versions. Raises NotCommittedError if it has none, but one is requested."""
        storage = self.place().storage()
        names = storage.names("")
        if has_versions(names):
            return True
        if self.version is None:
            return False
        path = storage.locate("")
        raise NotCommittedError(
            f"{path}: version {self.version} does not exist, and there are no other versions; give the root of a "
            "Publisher",
            path=path,
            step=self.version,
        )

    def _published_version(self) -> int:
        """The number of the version. Raises NotCommittedError if it does not exist."""
        with Subscriber(self.place()) as subscriber:
            numbers = subscriber.versions()
        version = max(numbers, default=None) if self.version is None else self.version
        if version is None or version not in numbers:
            advice = f"there are {numbers[0]} to {numbers[-1]}" if numbers else "none is complete"
            raise NotCommittedError(
                f"{self}: the version does not exist; {advice}", path=self.place().shown, step=self.version
            )
        return version

    def _pulled(self) -> tuple[Path, WeightsState]:
        """Pull the version to the local folder. Returns the folder and its state."""
        if self.folder is None:
            raise ValueError(
                f"{self.place().shown} has published versions, which are pulled into a folder of this machine first: "
                'give one, such as "folder": "/local/model"; it may be shared by all engines of the host'
            )
        folder = Path(self.folder)
        with Subscriber(self.place()) as subscriber:
            report = subscriber.pull(folder, self.version)
        state = _state_of(folder)
        if state is None or state.version != report.version:
            raise StorageUnavailableError(
                f"{folder} has meanwhile changed from version {report.version} to another; load it again, and let "
                "engines of different versions have folders of their own",
                path=str(folder),
            )
        return folder, state


def _state_of(folder: Path) -> WeightsState | None:
    replica = FolderReplica(folder)
    with replica.locked():
        return replica.state


def _once(
    use: Callable[[Sequence[contents.Part]], None], weights: StoredWeights
) -> Callable[[Sequence[contents.Part]], None]:
    """`use`, which cannot start again once it has passed tensors on: a second call raises StorageUnavailableError."""
    calls: list[None] = []

    def use_once(parts: Sequence[contents.Part]) -> None:
        if calls:
            raise StorageUnavailableError(
                f"{weights} was replaced, or could not be read, while its weights were being handed on; load it again",
                path=weights.place().shown,
            )
        calls.append(None)
        use(parts)

    return use_once


# --- the weights in a state ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LocatedTensor:
    """One tensor of an open file, by its number there."""

    file: contents.Contents
    number: int


def weights_in(parts: Sequence[contents.Part], part: str | None) -> dict[str, LocatedTensor]:
    """The tensors of a model in the state of these files, by name. Raises KeyError if there is no such part."""

    def located(one: contents.Part) -> Any:
        value, _ = one.archive.tree(groups=one.groups)
        return contents.replaced(
            value, lambda leaf: LocatedTensor(one.archive, leaf.number) if leaf.kind == "tensor" else None
        )

    state = contents.load_parts(parts, located)
    path = parts[0].archive.path
    if part is None:
        has_more = isinstance(state, Mapping) and not all(isinstance(item, LocatedTensor) for item in state.values())
        part = _MODEL if has_more and _MODEL in state else None
        found = state if part is None else state[part]
        if has_more and part is None:
            names = ", ".join(map(str, state))
            raise KeyError(f'{path} holds {names:.300}; say which of these are the weights, such as "part": "policy"')
    else:
        found = _entry(state, part, path)
    tensors = dict(_named(found, ""))
    if not tensors:
        raise KeyError(f"{path} has no tensors{f' in {part!r}' if part else ''}; give the part that has the weights")
    return tensors


def _entry(state: Any, part: str, path: str) -> Any:
    """The entry with this name, or with the path of keys that its dots separate."""
    for key in [part] if isinstance(state, Mapping) and part in state else part.split("."):
        if not isinstance(state, Mapping) or key not in state:
            known = ", ".join(map(str, state)) if isinstance(state, Mapping) else "no names"
            raise KeyError(f"part {part!r} is not in {path}; there are {known:.300}")
        state = state[key]
    return state


def _named(value: Any, name: str) -> Iterator[tuple[str, LocatedTensor]]:
    if isinstance(value, LocatedTensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{name}.{key}" if name else str(key))


def _read_all(tensors: Mapping[str, LocatedTensor], put: Callable[[deque[Item]], None]) -> None:
    """Read the tensors in pieces, and pass each piece to `put`."""
    by_file: dict[int, tuple[contents.Contents, dict[int, list[str]]]] = {}
    for name, stored in tensors.items():
        _, names = by_file.setdefault(id(stored.file), (stored.file, {}))
        names.setdefault(stored.number, []).append(name)
    for file, names in by_file.values():
        file.need((number, None) for number in names)  # before `primary`, since some ties are known only after this
        of_primary: dict[int, list[str]] = {}
        for number, given in names.items():
            of_primary.setdefault(file.primary(number), []).extend(given)
        piece: dict[int, torch.Tensor] = {}
        num_bytes = 0
        for number in of_primary:
            piece[number] = file.empty(number, contents.CPU)
            num_bytes += piece[number].nbytes
            if num_bytes >= PIECE_BYTES:
                put(_filled(file, piece, of_primary))
                num_bytes = 0
        if piece:
            put(_filled(file, piece, of_primary))


def _filled(file: contents.Contents, piece: dict[int, torch.Tensor], names: Mapping[int, Sequence[str]]) -> deque[Item]:
    fill.fill(fill.planned([(file, [fill.Wanted(number, tensor) for number, tensor in piece.items()])]))
    items = deque((name, tensor) for number, tensor in piece.items() for name in names[number])
    piece.clear()
    return items


# --- a reader one piece ahead of its caller -----------------------------------------------------------------------


class _UnwantedError(Exception):
    """The caller has closed the iterator."""


@dataclass(frozen=True)
class _End:
    error: BaseException | None


def read_ahead(read: Callable[[Callable[[deque[Item]], None]], None]) -> Iterator[Item]:
    """The items of the pieces that `read` passes to its argument. `read` runs on a separate thread.

    An error of `read` is raised to the caller of the iterator. The thread ends soon after the iterator is closed.
    """
    pieces: queue.Queue[deque[Item] | _End] = queue.Queue(1)
    closed = threading.Event()

    def put(piece: deque[Item] | _End) -> None:
        while not closed.is_set():
            with suppress(queue.Full):
                pieces.put(piece, timeout=waits.LIVENESS_SECONDS)
                return
        raise _UnwantedError

    def run() -> None:
        error = None
        try:
            read(put)
        except BaseException as failed:
            error = failed
        with suppress(_UnwantedError):
            put(_End(error))

    thread = threads.start_thread("weights", run, daemon=True)
    try:
        while True:
            try:
                piece = pieces.get(timeout=waits.LIVENESS_SECONDS)
            except queue.Empty:
                if not thread.is_alive() and pieces.empty():
                    raise RuntimeError("the thread that reads weights has died; load them again") from None
                continue
            if isinstance(piece, _End):
                if piece.error is not None:
                    raise piece.error
                return
            while piece:
                yield piece.popleft()
    finally:
        closed.set()
