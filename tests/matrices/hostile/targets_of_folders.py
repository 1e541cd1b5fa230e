"""Parsers that read files, and the words and places of users: whole archives, folders, tars, notes, histories, the command.

In: bytes, which are put into the scratch folder. Out: nothing, or a documented error. Knows nothing of: what looks on.
"""

import contextlib
import gzip
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import CellType, SimpleNamespace
from typing import Any

from archives import assemble
from typer.core import TyperCommand

import async_ckpt
from async_ckpt.core.events.log import FOLDER, NAME, EventLog
from async_ckpt.core.ranks.nodes import RunNodes
from async_ckpt.core.ranks.world import World
from async_ckpt.core.runs import starts, tenure
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.core.storage.place import Place
from async_ckpt.core.storage.url import parent_and_name, place_and_name, shown, split_bucket, without_secrets
from async_ckpt.core.timing import wall_time
from async_ckpt.errors import CheckpointError, StorageUnavailableError
from async_ckpt.files import extract
from async_ckpt.tools.command.main import app, status_of
from async_ckpt.weights import delta
from async_ckpt.weights.confined_files import ConfinedFolder
from async_ckpt.weights.following.shared_folder import SharedFolder
from async_ckpt.weights.publishing.folder_notes import Notes
from async_ckpt.weights.publishing.versions import Versions

from . import seed_inputs as seeds
from .hostile_target import Scratch, Target, unwrapped
from .targets_in_memory import sealed


def load_archive(data: bytes) -> None:
    """A whole archive: its index as mutated, and every digest right."""
    raw = unwrapped(data)
    if raw is None:
        text, _, between = data.partition(b"\0\n")
        raw = assemble(text, between.ljust(-(-len(between) // 512) * 512, b"\0"))
    async_ckpt.load(Scratch.file(raw, "x.tar"))


def load_objects_archive(data: bytes) -> None:
    """An archive whose `objects.pt` is another pickle."""
    raw = unwrapped(data)
    async_ckpt.load(Scratch.file(seeds.archive_with_objects(data if raw is None else raw), "x.tar"))


def load_safetensors(data: bytes) -> None:
    raw = unwrapped(data)
    text, _, body = data.partition(b"\0\n")
    async_ckpt.load(
        Scratch.file(len(text).to_bytes(8, "little") + text + body if raw is None else raw, "x.safetensors")
    )


def load_folder(data: bytes) -> None:
    """A folder of Hugging Face, whose index names files."""
    folder = Scratch.emptied()
    (folder / "model.safetensors.index.json").write_bytes(unwrapped(data) or data)
    shutil.copyfile(seeds.small_safetensors(), folder / "model-00001-of-00002.safetensors")
    async_ckpt.load(folder)


def load_dcp(data: bytes) -> None:
    """A folder of torch.distributed.checkpoint, with the files of its ranks."""
    folder = Scratch.emptied()
    (folder / ".metadata").write_bytes(unwrapped(data) or data)
    for path in seeds.dcp_folder().glob("*.distcp"):
        os.link(path, folder / path.name)
    async_ckpt.load(folder)


def _with_checksums(data: bytes) -> bytes:
    """A tar whose headers all have the right checksum."""
    out = bytearray(data)
    for at in range(0, len(out) - 511, 512):
        if out[at + 257 : at + 262] == b"ustar":
            out[at + 148 : at + 156] = b" " * 8
            out[at + 148 : at + 156] = b"%06o\0 " % sum(out[at : at + 512])
    return bytes(out)


def extract_tar(data: bytes) -> None:
    raw = unwrapped(data)
    source = Scratch.file(_with_checksums(data) if raw is None else raw, "x.tar")
    folder = Scratch.emptied() / "out"
    try:
        extract(source, folder, max_bytes=1 << 20, max_members=100)
    finally:
        assert {*os.listdir(folder.parent)} <= {"out"}, "something was left beside the folder"
    for path in folder.rglob("*"):
        if path.is_symlink():
            assert Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)), f"{path} leads out"


def read_claim(data: bytes) -> None:
    """The claim of a rank to a folder, by which the other ranks of its node know that rank."""
    folder = Scratch.emptied()
    (folder / "world.t.json").write_bytes(unwrapped(data) or data)
    nodes = RunNodes(_Rank1(), SimpleNamespace(runs=()), lambda *_: None)  # type: ignore[arg-type]
    nodes._lead_at(SimpleNamespace(storage=LocalStorage(folder)))  # type: ignore[arg-type]


class _Rank1:
    """Stands for the meeting of rank 1 with rank 0."""

    world = World(1, 2)

    def token(self) -> str:
        return "t"


def read_notes(data: bytes) -> None:
    """The notes of a pull, and of a sidecar, in a folder of weights."""
    folder = Scratch.emptied()
    (folder / ".weight_sync").mkdir()
    content = unwrapped(data) or data
    sidecar = SharedFolder(folder, "engine")
    for name in (
        ".weight_sync/state.json",
        ".weight_sync/files.json",
        delta.INDEX,
        f".weight_sync/follow.{sidecar._id}.json",
    ):
        (folder / name).write_bytes(content)
    notes = Notes(ConfinedFolder(folder))
    notes.marker(), notes.files(), notes.foreign_files()
    sidecar.held()
    record = sidecar._read(sidecar._id)
    record._replace(address=None).outlives_its_sidecar()


def read_root(data: bytes) -> None:
    """A root of published versions: the index of one, and the note of its publisher."""
    folder = Scratch.emptied()
    inner = folder / delta.folder_of(2)
    inner.mkdir()
    raw = unwrapped(data)
    content = data if raw is None else raw
    with contextlib.suppress(ValueError):
        content = delta.seal(content) if raw is None else content
    (inner / delta.INDEX).write_bytes(content)
    if raw is not None:
        (folder / "publisher.json").write_bytes(raw)
    versions = Versions(LocalStorage(folder))
    versions.numbers(), versions.owner_token(), versions.is_ours(2), versions.is_complete(2)
    versions.chain(2, None)


def read_starts(data: bytes) -> None:
    """The file of a start, which tells of a process."""
    folder = Scratch.emptied()
    start = starts.Start(8, "5f3a9c01", 500)
    (folder / start.name).write_bytes(sealed(data))
    tenure._taken_error(str(folder), start, starts.about_start(LocalStorage(folder), start), is_alive=True)


def read_history(data: bytes) -> None:
    """A history with parts that are compressed."""
    folder = Scratch.emptied()
    (folder / FOLDER).mkdir()
    raw = unwrapped(data)
    (folder / NAME).write_bytes(data if raw is None else raw)
    (folder / FOLDER / "000001.jsonl.gz").write_bytes(gzip.compress(data, 1, mtime=0) if raw is None else raw)
    log = EventLog(LocalStorage(folder), wall_time)
    log.read(), log.read_newest(), log.read_before()


def parse_place(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    without_secrets(text), shown(text)
    place = Place(text)
    assert "p4ssword" not in repr(place) or place.is_local or "://" not in text or _is_no_secret(text)
    _ = place.is_local, place.shown
    for parse in (split_bucket, parent_and_name, place_and_name):
        with contextlib.suppress(ValueError, StorageUnavailableError):
            parse(text)
    if place.is_local:
        place.storage(), place.inside()


def _is_no_secret(text: str) -> bool:
    """Whether the word is where no password can be: in the path of a URL."""
    return ":p4ssword@" not in text


class NoStatus(Exception):
    """The command has said no."""


class UsageStatus(Exception):
    """The command has said how it is used."""


class StorageStatus(Exception):
    """The command has said that a storage does not work."""


def parse_arguments(data: bytes) -> None:
    """The words of the command. What they do is left out: `_parses_only` ends it where the work would begin."""
    words = [word.decode(errors="surrogateescape") for word in data.split(b"\0")]
    with _parses_only(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
        status = status_of(words)
    text = said.getvalue()
    assert status in (0, 1, 2, 74), f"status {status}"
    assert status == 0 or text.strip(), f"status {status} without a message"
    assert "Traceback" not in text, "a traceback"
    if status:
        raise {1: NoStatus, 2: UsageStatus, 74: StorageStatus}[status]


@contextlib.contextmanager
def _parses_only() -> Iterator[None]:
    """Replace what a word does once its places are opened, and what words without a place do at all."""
    kept, cells = TyperCommand.invoke, dict(_words())
    were = [(cell, cell.cell_contents) for cell in cells.values()]

    def invoke(self: Any, context: Any) -> Any:
        return kept(self, context) if self.name in cells else 0

    TyperCommand.invoke = invoke  # type: ignore[method-assign]
    for cell, _ in were:
        cell.cell_contents = lambda **_: None
    try:
        yield
    finally:
        TyperCommand.invoke = kept  # type: ignore[method-assign]
        for cell, word in were:
            cell.cell_contents = word


def _words() -> Iterator[tuple[str, CellType]]:
    """Where `options.with_place` keeps the function of each word."""
    for command in app.registered_commands:
        called = command.callback
        names = () if called is None else called.__code__.co_freevars
        if called is not None and "word" in names:
            yield command.name or called.__name__.replace("_", "-"), (called.__closure__ or ())[names.index("word")]


_ANY = (CheckpointError,)
TARGETS = [
    Target("archive", load_archive, _ANY, "json", seeds.archives, 2, 32768),
    Target("archive objects", load_objects_archive, _ANY, "pickle", seeds.pickles, 1),
    Target("safetensors file", load_safetensors, _ANY, "json", seeds.safetensors_files, 2),
    Target("Hugging Face folder", load_folder, _ANY, "json", seeds.weight_maps, 1, 2048),
    Target("DCP folder", load_dcp, _ANY, "pickle", seeds.dcp_metadata, 1),
    Target("foreign tar", extract_tar, _ANY, "tar", seeds.tars, 3, 16384),
    Target("claim", read_claim, _ANY, "json", seeds.claims, 1, 512),
    Target("notes", read_notes, (), "json", seeds.notes, 2),
    Target("root of versions", read_root, _ANY, "json", seeds.delta_indices, 2),
    Target("start", read_starts, (), "json", seeds.starts, 2, 1024),
    Target("history files", read_history, (), "lines", seeds.histories, 2),
    Target("place", parse_place, (TypeError, ValueError, StorageUnavailableError), "words", seeds.places, 3, 512, True),
    Target("command", parse_arguments, (NoStatus, UsageStatus, StorageStatus), "words", seeds.commands, 1, 512, True),
]
