"""What lies in a folder when the handle of a save is done: what was saved, and nothing that goes later."""

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from racing import PATIENCE, Gate
from states import names_below

import async_ckpt
from async_ckpt import SaveHandle
from async_ckpt.face.around.scratch import Scratch
from async_ckpt.files import pack_folder

STATE = {"w": torch.arange(1000.0)}


def save_folder(state: Any, folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    torch.save(state, os.path.join(folder, "state.pt"))


def save_file(state: Any, path: str) -> None:
    torch.save(state, path)


def fail(state: Any, path: str) -> None:
    save_file(state, path)
    raise ValueError("no room")


def packed(folder: Path, *, with_pipe: bool = False) -> SaveHandle:
    with async_ckpt.pack(folder / "x.tar") as inner:
        (inner / "a").write_text("b")
        if with_pipe:
            os.mkfifo(inner / "pipe")
    return inner.handle


class Writer(NamedTuple):
    save: Callable[[Path], SaveHandle]
    stays: set[str]  # beside it nothing does
    cleans: bool = True  # it has a folder to remove


WRITERS = {
    "wrap, a file": Writer(lambda out: async_ckpt.wrap(save_file)(STATE, out / "x.pt"), {"x.pt"}),
    "wrap, a stream": Writer(lambda out: async_ckpt.wrap(torch.save)(STATE, out / "x.pt"), {"x.pt"}, cleans=False),
    "wrap, a folder": Writer(lambda out: async_ckpt.wrap(save_folder)(STATE, out / "x"), {"x"}),
    "wrap, a whole folder": Writer(
        lambda out: async_ckpt.wrap(save_folder, whole_folder=True)(STATE, out / "x"), {"x"}
    ),
    "pack": Writer(packed, {"x.tar"}),
    "pack_folder": Writer(lambda out: pack_folder(__file__.rpartition("/")[0], out / "x.tar"), {"x.tar"}, cleans=False),
    "export": Writer(lambda out: async_ckpt.export_hf(STATE, out / "hf"), {"hf"}),
    "save": Writer(lambda out: async_ckpt.save(STATE, out / "x.tar"), {"x.tar"}, cleans=False),
    "save, compressed": Writer(lambda out: async_ckpt.save(STATE, out / "x.tar.zst"), {"x.tar.zst"}, cleans=False),
}
CLEANING = [name for name, writer in WRITERS.items() if writer.cleans]


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Where a scratch folder is about to be removed."""
    gate, remove = Gate(), Scratch.remove

    def held(scratch: Scratch) -> None:
        gate.passed()
        remove(scratch)

    monkeypatch.setattr(Scratch, "remove", held)
    yield gate
    gate.open()


@pytest.mark.parametrize("name", WRITERS)
def test_only_what_stays_is_in_the_folder_and_the_folder_can_go(out, name):
    """Several times, also over what is there, while other threads could be cleaning up."""
    for again in range(8):
        WRITERS[name].save(out).result()
        assert {*os.listdir(out)} == WRITERS[name].stays
        assert not [path for path in names_below(out) if "async_ckpt-" in path]
        if again % 2:
            shutil.rmtree(out)
            out.mkdir()


@pytest.mark.parametrize("way", ["result", "await", "callback"])
@pytest.mark.parametrize("name", CLEANING)
def test_the_handle_waits_until_the_scratch_folder_is_gone(out, gate, name, way):
    seen: list[set[str]] = []
    handle = WRITERS[name].save(out)
    gate.wait_reached()
    assert {*os.listdir(out)} > WRITERS[name].stays  # it is there already
    assert not handle.done()
    with pytest.raises(TimeoutError):
        handle.result(0.0)
    gate.open()

    async def awaited() -> None:
        await handle
        seen.append({*os.listdir(out)})

    if way == "await":
        asyncio.run(awaited())
    elif way == "callback":
        called = threading.Event()
        handle.add_done_callback(lambda _: seen.append({*os.listdir(out)}))
        handle.add_done_callback(lambda _: called.set())
        assert called.wait(PATIENCE)
    else:
        handle.result()
        seen.append({*os.listdir(out)})
    assert seen == [WRITERS[name].stays]


def test_the_handle_of_a_version_waits_until_older_ones_are_gone(out, gate):
    with async_ckpt.Publisher(out, anchor_every=1, keep=1) as publisher:
        first = publisher.publish(STATE, version=1)
        gate.wait_reached()
        assert not first.done()
        gate.open()
        first.result()
        assert {*os.listdir(out)} == {"publisher.json", "weight_v000001"}
        publisher.publish(STATE, version=2).result()
        assert {*os.listdir(out)} == {"publisher.json", "weight_v000002"}


def test_handles_are_done_in_the_order_of_their_saves(out, gate):
    first = packed(out)
    gate.wait_reached()
    second = async_ckpt.wrap(save_file)(STATE, out / "y.pt")

    with pytest.raises(TimeoutError):
        second.result(0.05)
    assert not (out / "y.pt").exists()
    gate.open()
    second.result(PATIENCE)

    assert first.done()
    assert {*os.listdir(out)} == {"x.tar", "y.pt"}


def test_a_failed_save_has_removed_its_scratch_folder_when_its_handle_raises(out, gate):
    handle = async_ckpt.wrap(fail)(STATE, out / "x.pt")
    gate.wait_reached()
    assert not handle.done()
    gate.open()

    with pytest.raises(ValueError, match="no room"):
        handle.result()
    assert os.listdir(out) == []


def test_a_failed_pack_leaves_what_its_error_names_alone(out):
    error = packed(out, with_pipe=True).exception()

    (kept,) = os.listdir(out)
    assert f"is kept in {out / kept}/" in error.__notes__[0]


def test_what_cannot_be_removed_is_logged_and_the_save_is_made_all_the_same(out, monkeypatch, caplog):
    def refuse(_: Scratch) -> None:
        raise async_ckpt.StorageUnavailableError("no rights", path=str(out))

    monkeypatch.setattr(Scratch, "remove", refuse)

    assert packed(out).result().status == "committed"
    assert f"{out / 'x.tar'} is committed, but cleaning up after it failed: no rights" in caplog.text
