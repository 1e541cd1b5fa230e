"""A step that lies at several places is read block by block: each from the first place where it is sound."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import Bucket
from states import MIB, everywhere, open_run, states_equal

import async_ckpt
from async_ckpt import AsyncCheckpointer, CorruptCheckpointError, Place, StorageUnavailableError
from async_ckpt.core.loading.archives.archive import OpenArchive
from async_ckpt.core.spec import BLOCK_BYTES
from async_ckpt.core.storage.local import LocalReader


def state_at(step: int) -> dict[str, Any]:
    """Two groups, the second of which begins behind the first blocks."""
    return {name: {"w": torch.full((5 * MIB // 4,), step + n)} for n, name in enumerate(("a", "b"))} | {"n": [step]}


def restored(ckpt: AsyncCheckpointer, **how: Any) -> Any:
    state = state_at(0)
    assert ckpt.restore(state, **how) == 1
    return state


def loaded(ckpt: AsyncCheckpointer, **how: Any) -> Any:
    return ckpt.load(1, **how)


def mapped(ckpt: AsyncCheckpointer, **how: Any) -> Any:
    return ckpt.load(mmap=True, **how)


READS = pytest.mark.parametrize("read", [restored, loaded, mapped])


@pytest.fixture
def ckpt(roots: list[Path]) -> Iterator[AsyncCheckpointer]:
    """Step 1 is at both places."""
    with open_run(roots) as ckpt:
        everywhere(ckpt, ckpt.save(state_at(1), 1))
        yield ckpt


def archive(root: Path, step: int = 1) -> Path:
    return next((root / f"step_{step:08d}").glob("*.tar"))


def flip(path: Path, *offsets: int) -> None:
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


def parts(path: Path) -> dict[str, int]:
    """The offset of a byte in each part of an archive."""
    with LocalReader(path) as reader:
        opened = OpenArchive(reader, path=str(path), verify=True)
        first, second = sorted(opened.index.members, key=lambda member: -member.data.length)[:2]
    return {
        "the index": 600,
        "a tar header": first.data.offset - 512,
        "a later tar header": max(first.data.offset, second.data.offset) - 512,
        "a later safetensors header": max(first.data.offset, second.data.offset) + 20,
        "a tensor": BLOCK_BYTES + 77,
        "the digests": opened.index.digests.data.offset + 100,
        "the end": path.stat().st_size - 1,
    }


PARTS = [
    "the index",
    "a tar header",
    "a later tar header",
    "a later safetensors header",
    "a tensor",
    "the digests",
    "the end",
]


def assert_sound(read: Callable[..., Any], ckpt: AsyncCheckpointer, near: Path | str, **how: Any) -> None:
    """It reads step 1 with one warning, which names the file."""
    with pytest.warns(RuntimeWarning) as told:
        assert states_equal(read(ckpt, **how), state_at(1))
    (message,) = [str(one.message) for one in told]
    assert message.startswith(f"step 1 is read from another place, since a copy is damaged or missing: {near}")


@READS
@pytest.mark.parametrize("part", PARTS)
def test_a_damaged_byte_at_one_place_is_read_from_the_next(ckpt, roots, part, read):
    near = archive(roots[0])
    flip(near, parts(near)[part])
    assert_sound(read, ckpt, near)


@pytest.mark.parametrize("second", ["the index", "a later tar header", "a tensor", "the digests"])
@pytest.mark.parametrize("first", ["the index", "a later tar header", "a tensor", "the digests"])
def test_two_damaged_copies_are_enough_if_no_block_is_damaged_in_both(ckpt, roots, first, second):
    near, far = map(archive, roots)
    at = parts(near)
    flip(near, at[first])
    flip(far, at[second])
    if first != second:
        assert_sound(restored, ckpt, near)
    else:
        with pytest.raises(CorruptCheckpointError) as refused:
            ckpt.load(1)
        assert str(near) in str(refused.value)
        assert str(far) in str(refused.value)
        assert refused.value.tensors == (("a.w",) if first == "a tensor" else ())


def test_a_block_that_is_whole_nowhere_fails_the_step_and_an_older_one_is_restored_with_fallback(ckpt, roots):
    everywhere(ckpt, ckpt.save(state_at(2), 2))
    for root in roots:
        flip(archive(root, 2), 2 * BLOCK_BYTES)
    with pytest.warns(RuntimeWarning, match="step 2 is skipped, .*near.*far"):
        assert states_equal(restored(ckpt), state_at(1))
    with pytest.raises(CorruptCheckpointError, match=r"no place has an undamaged copy: .*near.*; .*far") as refused:
        ckpt.restore(state_at(0), step=2)
    assert refused.value.partly_overwritten


@pytest.mark.parametrize("how", [{}, {"verify": False}], ids=str)
@pytest.mark.parametrize("num_bytes", [0, 511, 5 * MIB])
def test_a_copy_that_was_cut_off_is_read_from_the_next_place(ckpt, roots, num_bytes, how):
    near = archive(roots[0])
    os.truncate(near, num_bytes)
    assert_sound(restored, ckpt, near, **how)
    assert_sound(loaded, ckpt, near, **how)


# --- what happens while it is read ----------------------------------------------------------------------------


@pytest.fixture
def opened(ckpt: AsyncCheckpointer, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[str], None]], None]:
    """Has something done at a place once the archive there was opened, or if `before`, ahead of that."""

    def at(number: int, do: Callable[[str], None], *, before: bool = False) -> None:
        storage = ckpt._roots.runs[number].storage
        real = storage.open

        def instead(path: str) -> Any:
            if before:
                do(path)
            reader = real(path)
            if not before:
                do(path)
            return reader

        monkeypatch.setattr(storage, "open", instead)

    return at


@READS
def test_an_archive_that_is_deleted_before_it_is_opened_is_read_from_the_next_place(ckpt, roots, opened, read):
    near = archive(roots[0])
    opened(0, lambda _: near.unlink(missing_ok=True), before=True)
    assert_sound(read, ckpt, near)


@READS
def test_a_near_place_that_is_emptied_while_it_is_read_costs_nothing(ckpt, roots, opened, read):
    near = archive(roots[0])
    opened(0, lambda _: shutil.rmtree(roots[0]))  # what is open stays readable on a disk
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert states_equal(read(ckpt), state_at(1))
    assert not near.exists()


@pytest.mark.parametrize("how", [{}, {"verify": False}], ids=str)
def test_a_file_that_is_cut_off_while_it_is_read_is_read_on_from_the_next_place(ckpt, roots, opened, how):
    near = archive(roots[0])
    opened(0, lambda _: os.truncate(near, 600_000))
    assert_sound(restored, ckpt, near, **how)


def test_a_near_place_of_memory_that_a_reboot_has_emptied_is_no_matter(roots):
    places = [Place(roots[0], volatile=True), roots[1]]
    with open_run(places) as ckpt:
        everywhere(ckpt, ckpt.save(state_at(1), 1))
    shutil.rmtree(roots[0])
    with open_run(places) as ckpt:
        assert states_equal(restored(ckpt), state_at(1))
        everywhere(ckpt, ckpt.save(state_at(2), 2))
    assert states_equal(async_ckpt.load(roots[0]), state_at(2))


def test_a_damaged_step_is_not_given_up_for_an_older_one_while_a_place_that_may_have_it_is_silent(ckpt, roots, opened):
    everywhere(ckpt, ckpt.save(state_at(2), 2))
    flip(archive(roots[0], 2), 2 * BLOCK_BYTES)

    def away(_: str) -> None:
        raise StorageUnavailableError("it is away", path="far")

    opened(1, away, before=True)
    with pytest.raises(StorageUnavailableError, match=r"near.*block 2 .*; .*far.*it is away"):
        ckpt.restore(state_at(0))


def test_a_step_that_a_store_deletes_while_it_is_read_is_not_committed_any_more(s3, monkeypatch):
    bucket = Bucket(s3)
    s3.make_bucket(bucket)
    with open_run(bucket.place("run")) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(1), step).result()
        storage = ckpt._roots.runs[0].storage
        real = storage.open

        def instead(path: str) -> Any:
            reader = real(path)
            if "step_00000002" in path:
                for key in [key for key in bucket.keys() if "step_00000002" in key]:  # noqa: SIM118
                    bucket.delete(key)
            return reader

        monkeypatch.setattr(storage, "open", instead)
        assert states_equal(restored(ckpt), state_at(1))


@pytest.mark.parametrize("deletes", [True, False])
def test_what_a_store_loses_while_it_is_read_is_read_from_the_next_place(s3, tmp_path, monkeypatch, deletes):
    bucket = Bucket(s3)
    s3.make_bucket(bucket)
    with open_run([bucket.place("run"), tmp_path / "far"]) as ckpt:
        everywhere(ckpt, ckpt.save(state_at(1), 1))
        storage = ckpt._roots.runs[0].storage
        real, (key,) = storage.open, [key for key in bucket.keys() if key.endswith(".tar")]  # noqa: SIM118

        def instead(path: str) -> Any:
            reader = real(path)
            bucket.delete(key) if deletes else bucket.write([key], b"another")
            return reader

        monkeypatch.setattr(storage, "open", instead)
        assert_sound(restored, ckpt, bucket.url(key))


# --- groups that were lent, and several ranks -----------------------------------------------------------------


def test_a_damaged_archive_that_lends_a_group_is_read_from_the_next_place(roots):
    state = state_at(1)
    with open_run(roots) as ckpt:
        everywhere(ckpt, ckpt.save(state, 1, unchanged=["a"]))
        everywhere(ckpt, ckpt.save(state, 2, unchanged=["a"]))
        lender = archive(roots[0], 1)
        flip(lender, BLOCK_BYTES)
        with pytest.warns(
            RuntimeWarning, match=f"is read from another place, since a copy is damaged or missing: {lender}"
        ):
            assert states_equal({name: ckpt.load(2)[name] for name in state}, state_at(1))


SAVING = """
with open_run({roots}) as ckpt:
    handle = ckpt.save(small(3), 3)
    for place in ckpt.roots:
        handle.at(place).result(60)
"""
RESTORING = """
import warnings
with open_run({roots}) as ckpt, warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    state = small(0)
    assert ckpt.restore(state) == 3
    assert torch.equal(state["model"]["cut"].to_local(), small(3)["model"]["cut"].to_local())
    assert torch.equal(state["model"]["whole"], small(3)["model"]["whole"])
    here.tell([str(one.message) for one in told if "is read from another place" in str(one.message)])
"""


def test_each_rank_reads_what_is_damaged_at_one_place_from_the_next(worlds, roots):
    places = [*map(str, roots)]
    worlds.run(2, SAVING.format(roots=places))
    near, far = (sorted((root / "step_00000003").glob("rank_*.tar")) for root in roots)
    flip(near[0], near[0].stat().st_size // 2)
    flip(far[1], far[1].stat().st_size // 2)
    first, second = worlds.run(2, RESTORING.format(roots=places))
    assert str(near[0]) in first.told[0][0]
    assert second.told[0] == [] or str(near[0]) in second.told[0][0]  # it may read from both archives
    flip(far[1], far[1].stat().st_size // 2)  # as it was
    near[1].unlink()
    for path in (roots[0] / "step_00000003").glob("layout.*"):
        path.unlink()
    with pytest.warns(RuntimeWarning, match="is read from another place"), open_run(places) as ckpt:
        assert ckpt.load(3)["step"] == 3
    archives = next((roots[0] / "step_00000003").glob("archives.*"))
    flip(archives, 0)  # the list of archives, by which a reader begins
    first, second = worlds.run(2, RESTORING.format(roots=places))
    assert str(archives) in first.told[0][0]
