"""Damaged, truncated and foreign archives, and runs with damaged steps: always a CheckpointError, never wrong data."""

import gzip
import io
import json
import os
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import assemble, flip, forge_manifest, parsed_index, read_index
from damage import STATE, assert_refused
from slices import is_tried, some
from states import MIB, difference, states_equal
from torch import nn

import async_ckpt
from async_ckpt import (
    AsyncCheckpointer,
    CheckpointError,
    CorruptCheckpointError,
    ForeignFileError,
    FormatVersionError,
    NotCommittedError,
)
from async_ckpt.core.format import index, tar


@pytest.fixture
def saved(archive: Path) -> Path:
    async_ckpt.save(STATE, archive).result()
    return archive


# --- damage ------------------------------------------------------------------------------------------------------


def test_an_archive_with_bytes_behind_its_end_is_not_called_truncated(saved):
    with saved.open("ab") as file:
        file.write(b"x")
    with pytest.raises(CorruptCheckpointError, match="something was appended to it"):
        async_ckpt.load(saved)


def test_a_damaged_manifest_is_named_with_the_folder_of_its_run(tmp_path):
    with AsyncCheckpointer(tmp_path) as ckpt:
        ckpt.save(STATE, 1).result()
    manifest = tmp_path / "step_00000001" / "manifest.json"
    manifest.write_text("{}")
    with pytest.raises(CorruptCheckpointError) as refused:
        async_ckpt.load(tmp_path)
    assert refused.value.path == str(manifest)


@pytest.mark.parametrize("read", [async_ckpt.load, async_ckpt.verify])
def test_no_damaged_byte_goes_unnoticed(saved, read):
    """Bytes everywhere in a small archive are changed, one after the other: in its objects and digests, too."""
    assert parsed_index(saved).member(index.OBJECTS)
    unnoticed = []
    for offset in some(range(saved.stat().st_size), 3):
        flip(saved, offset, 1 << offset % 8)
        try:
            read(saved)
        except CorruptCheckpointError:
            pass
        else:
            unnoticed.append(offset)
        flip(saved, offset, 1 << offset % 8)
    assert unnoticed == []
    async_ckpt.verify(saved)
    assert states_equal(async_ckpt.load(saved), STATE)


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_a_flipped_bit_of_the_index_is_damage_and_never_a_newer_format(verify, saved):
    """Unverified, a wrong value may get through, but what is refused is corrupt."""
    told = read_index(saved)
    end = tar.BLOCK + len(json.dumps(told, separators=(",", ":"))) + 2  # of the text; then come spaces
    refused, tried = 0, 0
    with open(saved, "r+b", buffering=0) as file:
        for offset in range(end):
            (byte,) = os.pread(file.fileno(), 1, offset)
            for bit in [bit for bit in range(8) if is_tried(bit + offset, 3)]:
                os.pwrite(file.fileno(), bytes([byte ^ (1 << bit)]), offset)
                tried += 1
                try:
                    async_ckpt.load(saved, verify=verify)
                except CorruptCheckpointError:
                    refused += 1
            os.pwrite(file.fileno(), bytes([byte]), offset)
    assert refused == tried if verify else refused > tried / 2
    assert difference(async_ckpt.load(saved), STATE) is None


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_a_damaged_archive_of_a_newer_format_is_damaged_before_it_is_newer(verify, archive):
    """Its digests are found by the size of the file alone: its index may be of another shape."""
    for num_bytes in range(0, 6 * 4096, 512):  # so that the digests lie at every distance from the end
        raw = {"format": "async_ckpt", "version": 99, "all": "different"}
        honest = assemble(json.dumps(raw).encode(), bytes(num_bytes))
        archive.write_bytes(honest)
        assert assert_refused(archive, FormatVersionError, verify=verify).version == 99
        for damaged in (
            honest[: tar.BLOCK + 20] + b"!" + honest[tar.BLOCK + 21 :],
            honest.replace(b'"blocks":"', b'"blocks":"0', 1),
            honest[: len(honest) // 2],
            b"",
        ):
            archive.write_bytes(damaged)
            assert_refused(archive, CorruptCheckpointError, verify=verify)


def test_a_run_passes_over_an_archive_whose_version_was_damaged(small_run):
    (path,) = (small_run / "step_00000002").glob("*.tar")
    path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":3', 1))
    assert_step_2_is_passed_over(small_run)


@pytest.mark.parametrize("how", [{"verify": False}, {"verify": False, "mmap": True}], ids=["read", "mmap"])
def test_an_unverified_load_of_a_damaged_archive_loads_or_is_refused(how, saved):
    """Not looking at digests may give wrong values; it must not give another kind of error."""
    size = saved.stat().st_size
    for offset in some(range(0, size, 11), 3):
        flip(saved, offset, 1 << offset % 8)
        try:
            async_ckpt.load(saved, **how)
        except CorruptCheckpointError:
            pass
        flip(saved, offset, 1 << offset % 8)
    assert difference(async_ckpt.load(saved, **how), STATE) is None


@pytest.mark.parametrize("verify", [True, False])
def test_an_archive_cut_short_anywhere_is_refused(verify, saved):
    whole = saved.read_bytes()
    told = parsed_index(saved)
    edges = {
        0,
        len(whole),
        told.digests.data.offset,
        told.digests.data.end,
        *(m.data.end for m in told.members),
    }
    edges |= {m.data.offset for m in told.members} | {t.slices[0].extent.end for t in told.tensors}
    near = {edge + by for edge in edges for by in (-513, -512, -1, 0, 1, 511, 512)}
    for length in sorted((near | set(range(0, len(whole), 97))) & set(range(len(whole)))):
        saved.write_bytes(whole[:length])
        assert_refused(saved, CorruptCheckpointError, verify=verify, mmap=length % 2 == 0)


@pytest.mark.parametrize("num_bytes", [1, 512, 4096, 5 * MIB])
def test_an_archive_with_something_behind_its_end_is_refused(num_bytes, saved):
    with open(saved, "ab") as file:
        file.write(bytes(num_bytes))
    assert_refused(saved, CorruptCheckpointError)


def test_damage_in_any_block_of_a_larger_archive_is_found(archive):
    state = {"w": torch.randint(0, 256, (13 * MIB,), dtype=torch.uint8), "b": torch.ones(5)}
    async_ckpt.save(state, archive).result()
    size = archive.stat().st_size
    for offset in (
        0,
        300,
        600,
        4096,
        5000,
        4 * MIB - 1,
        4 * MIB,
        9 * MIB + 7,
        12 * MIB,
        size - 1,
        size - 2000,
        size - 4000,
    ):
        flip(archive, offset)
        assert_refused(archive)
        assert_refused(archive, mmap=True)
        flip(archive, offset)
    assert difference(async_ckpt.load(archive), state) is None


def test_blocks_that_changed_places_are_found(archive):
    state = {"w": torch.randint(0, 256, (13 * MIB,), dtype=torch.uint8)}
    async_ckpt.save(state, archive).result()
    data = bytearray(archive.read_bytes())
    data[4 * MIB : 8 * MIB], data[8 * MIB : 12 * MIB] = data[8 * MIB : 12 * MIB], data[4 * MIB : 8 * MIB]
    archive.write_bytes(data)
    assert_refused(archive, CorruptCheckpointError)


# --- what is no archive of ours ----------------------------------------------------------------------------------


def test_an_empty_file_is_refused_and_called_empty(archive):
    archive.touch()
    assert "empty" in str(assert_refused(archive, CorruptCheckpointError))


def test_a_file_of_torch_save_is_named_and_torch_load_recommended(archive):
    torch.save({"w": torch.ones(2)}, archive)
    assert "torch.load" in str(assert_refused(archive, ForeignFileError))


def test_a_compressed_archive_is_named(saved):
    saved.write_bytes(gzip.compress(saved.read_bytes()))
    assert "gzip" in str(assert_refused(saved, ForeignFileError))


@pytest.mark.parametrize("name", ["model.txt", "index.json", "digests.json", "./index.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b'{"format":"other"}', b"\xff\xfe", b"{" * 3000], ids=repr
)
def test_a_tar_of_something_else_is_refused(name, content, archive):
    with tarfile.open(archive, "w") as made:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        made.addfile(info, io.BytesIO(content))
    # A tar whose first member has the name, or begins like the content, of our index is taken for a damaged archive.
    kind = CorruptCheckpointError if name == "index.json" or b"format" in content else ForeignFileError
    assert_refused(archive, kind)
    assert_refused(archive, kind, verify=False)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 4096, 100_000])
@pytest.mark.parametrize("byte", [b"\x00", b" ", b"\xff", b"{"], ids=repr)
def test_a_file_of_one_byte_repeated_is_refused(byte, size, archive):
    archive.write_bytes(byte * size)
    assert_refused(archive, ForeignFileError if byte == b"{" else CorruptCheckpointError)


def test_an_extracted_and_packed_again_archive_is_refused_without_harm(saved, tmp_path):
    """Its members lie elsewhere than the index says."""
    with tarfile.open(saved) as old, tarfile.open(tmp_path / "y.tar", "w") as new:
        for member in reversed(old.getmembers()):
            new.addfile(member, old.extractfile(member))
    assert_refused(tmp_path / "y.tar", ForeignFileError)


def test_a_folder_without_a_commit_is_not_committed(tmp_path):
    (tmp_path / "step_00000001").mkdir()
    for path in (tmp_path, tmp_path / "step_00000001"):
        with pytest.raises(NotCommittedError):
            async_ckpt.load(path)


def test_a_path_below_a_file_is_not_committed_or_unavailable(saved):
    with pytest.raises(CheckpointError):
        async_ckpt.load(saved / "below")


def test_a_name_too_long_for_the_file_system_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError):
        async_ckpt.load(tmp_path / ("x" * 300))


# --- restoring from a run that is damaged ------------------------------------------------------------------------


def big_state(value: int) -> dict[str, Any]:
    """Two tensors that lie more than a read apart, and a plain value."""
    return {
        "first": torch.full((30 * MIB,), value, dtype=torch.uint8),
        "last": torch.full((9,), float(value)),
        "n": value,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with AsyncCheckpointer(tmp_path / "run") as ckpt:
        for step in (1, 2, 3):
            ckpt.save(big_state(step), step=step).result()
    return tmp_path / "run"


def damage_last_block_of_data(root: Path, step: int) -> None:
    (path,) = (root / f"step_{step:08d}").glob("*.tar")
    extent = next(t.slices[0].extent for t in parsed_index(path).tensors if t.dotted == "first")
    flip(path, extent.end - 1)


def test_the_newest_step_that_is_not_damaged_is_restored(run):
    damage_last_block_of_data(run, 3)
    live = big_state(0)
    with (
        AsyncCheckpointer(run) as ckpt,
        pytest.warns(RuntimeWarning, match="step 3 is skipped.*block"),
    ):
        assert ckpt.restore(live) == 2
    assert difference(live, big_state(2)) is None


def test_every_damaged_step_is_passed_over_with_a_warning_of_its_own(run):
    damage_last_block_of_data(run, 3)
    (path,) = (run / "step_00000002").glob("*.tar")
    path.write_bytes(path.read_bytes()[:5000])
    live = big_state(0)
    with AsyncCheckpointer(run) as ckpt, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert ckpt.restore(live) == 1
    assert [str(w.message).split(" is skipped")[0] for w in seen] == ["step 3", "step 2"]
    assert {w.filename for w in seen} == {__file__}  # the line of the user's call
    assert difference(live, big_state(1)) is None


def test_when_all_steps_are_damaged_the_error_is_raised(run):
    for step in (1, 2, 3):
        damage_last_block_of_data(run, step)
    with AsyncCheckpointer(run) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CorruptCheckpointError) as caught:
            ckpt.restore(big_state(0))
    assert caught.value.partly_overwritten


def test_a_named_step_that_is_damaged_says_whether_live_state_was_touched(run):
    damage_last_block_of_data(run, 3)
    live = big_state(0)
    with AsyncCheckpointer(run) as ckpt:
        with pytest.raises(CorruptCheckpointError, match="partly overwritten") as caught:
            ckpt.restore(live, step=3)
        assert caught.value.partly_overwritten is True
        assert live["n"] == 0
        assert ckpt.restore(live, step=2) == 2
    assert difference(live, big_state(2)) is None


def test_verifying_first_leaves_live_state_untouched(run):
    damage_last_block_of_data(run, 3)
    live = big_state(0)
    with AsyncCheckpointer(run) as ckpt:
        with pytest.raises(CorruptCheckpointError) as caught:
            ckpt.restore(live, step=3, verify="first")
        assert caught.value.partly_overwritten is False
        assert difference(live, big_state(0)) is None
        assert ckpt.restore(live, step=2, verify="first") == 2
    assert difference(live, big_state(2)) is None


def test_damage_in_the_index_touches_nothing(run):
    (path,) = (run / "step_00000003").glob("*.tar")
    flip(path, 700)
    live = big_state(0)
    with AsyncCheckpointer(run) as ckpt:
        with pytest.raises(CorruptCheckpointError) as caught:
            ckpt.restore(live, step=3)
        assert not caught.value.partly_overwritten
    assert difference(live, big_state(0)) is None


@pytest.fixture
def small_run(tmp_path: Path) -> Path:
    with AsyncCheckpointer(tmp_path / "run") as ckpt:
        for step in (1, 2):
            ckpt.save({"w": torch.full((3,), float(step))}, step=step).result()
    return tmp_path / "run"


def assert_step_2_is_passed_over(root: Path, match: str | None = None) -> None:
    """Whatever is wrong with it, by its name it is corrupt, and without one the older step is taken."""
    live = {"w": torch.zeros(3)}
    with AsyncCheckpointer(root) as ckpt:
        with pytest.raises(CorruptCheckpointError, match=match):
            ckpt.load(2)
        with pytest.raises(CorruptCheckpointError):
            async_ckpt.load(root / "step_00000002")
        with pytest.raises(CorruptCheckpointError):
            ckpt.restore(live, step=2)
        assert not live["w"].any()
        with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
            assert ckpt.restore(live) == 1
    assert live["w"].tolist() == [1, 1, 1]


def test_an_archive_that_its_manifest_names_and_that_is_gone_is_corrupt(small_run):
    (path,) = (small_run / "step_00000002").glob("*.tar")
    path.unlink()
    assert_step_2_is_passed_over(small_run, "missing")


@pytest.mark.parametrize("verify", [True, False])
def test_an_archive_of_another_size_than_its_manifest_says_is_corrupt(verify, small_run):
    (path,) = (small_run / "step_00000002").glob("*.tar")
    path.write_bytes(path.read_bytes() + bytes(4096))
    with AsyncCheckpointer(small_run) as ckpt, pytest.raises(CorruptCheckpointError, match="manifest says"):
        ckpt.load(2, verify=verify)
    assert_step_2_is_passed_over(small_run)


def test_a_good_archive_of_another_attempt_is_not_taken_for_the_one_named(small_run):
    (first,) = (small_run / "step_00000001").glob("*.tar")
    (second,) = (small_run / "step_00000002").glob("*.tar")
    assert first.stat().st_size == second.stat().st_size
    second.write_bytes(first.read_bytes())
    assert_step_2_is_passed_over(small_run, "manifest")


MANIFESTS = {
    "empty": b"",
    "binary": b"\xff\xfe\x00",
    "not json": b"{",
    "null": b"null",
    "list": b"[]",
    "number": b"3",
    "string": b'"x"',
    "no fields": b"{}",
    "deep": b"[" * 100_000,
    "version string": b'{"version":"1"}',
    "version null": b'{"version":null}',
}
CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no archives": lambda m: m.update(archives=[]),
    "archives null": lambda m: m.update(archives=None),
    "archives a dict": lambda m: m.update(archives={"a": 1}),
    "archive null": lambda m: m.update(archives=[None]),
    "archive string": lambda m: m.update(archives=["x"]),
    "archive empty": lambda m: m.update(archives=[{}]),
    "archives a number": lambda m: m.update(archives=3),
    "name above": lambda m: m["archives"][0].update(name="../x.tar"),
    "name in step 1": lambda m: m["archives"][0].update(name="../step_00000001/manifest.json"),
    "name absolute": lambda m: m["archives"][0].update(name="/etc/passwd"),
    "name dots": lambda m: m["archives"][0].update(name=".."),
    "name empty": lambda m: m["archives"][0].update(name=""),
    "name null": lambda m: m["archives"][0].update(name=None),
    "name a number": lambda m: m["archives"][0].update(name=5),
    "name with a backslash": lambda m: m["archives"][0].update(name="a\\b"),
    "name zero": lambda m: m["archives"][0].update(name="x\x00y"),
    "name surrogate": lambda m: m["archives"][0].update(name="\udfff"),
    "name long": lambda m: m["archives"][0].update(name="x" * 5000),
    "name of the manifest": lambda m: m["archives"][0].update(name="manifest.json"),
    "size infinite": lambda m: m["archives"][0].update(num_bytes=float("inf")),
    "size nan": lambda m: m["archives"][0].update(num_bytes=float("nan")),
    "size huge": lambda m: m["archives"][0].update(num_bytes=2**90),
    "size negative": lambda m: m["archives"][0].update(num_bytes=-1),
    "size null": lambda m: m["archives"][0].update(num_bytes=None),
    "digest other": lambda m: m["archives"][0].update(digest="0" * 32),
    "digest null": lambda m: m["archives"][0].update(digest=None),
    "digest missing": lambda m: m["archives"][0].pop("digest"),
    "step infinite": lambda m: m.update(step=float("inf")),
    "step string": lambda m: m.update(step="one"),
    "world size null": lambda m: m.update(world_size=None),
    "created list": lambda m: m.update(created=[]),
    "created huge": lambda m: m.update(created=10**400),
    "created null": lambda m: m.update(created=None),
    "record null": lambda m: m.update(record=None),
    "record a list": lambda m: m.update(record=[1]),
}


@pytest.mark.parametrize("data", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_manifest_of_garbage_is_a_corrupt_step(data, small_run):
    (small_run / "step_00000002" / "manifest.json").write_bytes(data)
    assert_step_2_is_passed_over(small_run)


@pytest.mark.parametrize("lie", CHANGES.values(), ids=CHANGES.keys())
def test_a_manifest_that_lies_is_a_corrupt_step(lie, small_run):
    forge_manifest(small_run / "step_00000002" / "manifest.json", lie)
    assert_step_2_is_passed_over(small_run, r"step_00000002.*(manifest\.json|archive)")


@pytest.mark.parametrize("where", ["own", "borrowed"])
def test_a_manifest_that_names_a_folder_is_a_corrupt_step(where, small_run):
    folder = small_run / "step_00000002"
    (folder / "weights").mkdir()

    def lie(made: dict[str, Any]) -> None:
        if where == "own":
            made["archives"][0]["name"] = "weights"
        else:
            archive = made["archives"][0] | {"name": "weights"}
            made["elsewhere"].append({"group": "w", "step": 2, "folder": folder.name, "archive": archive})

    forge_manifest(folder / "manifest.json", lie)
    assert_step_2_is_passed_over(small_run)


def test_a_manifest_from_the_future_is_told_apart_from_damage(small_run):
    forge_manifest(small_run / "step_00000002" / "manifest.json", version=3, archives="elsewhere")
    with AsyncCheckpointer(small_run) as ckpt:
        for read in (
            ckpt.load,
            lambda: ckpt.restore({"w": torch.zeros(3)}),
            lambda: async_ckpt.load(small_run),
        ):
            with pytest.raises(FormatVersionError) as caught:
                read()
            assert caught.value.version == 3


def test_a_damaged_step_of_a_module_and_its_optimizer_is_healed_by_the_older_one(tmp_path):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    kept: dict[int, Any] = {}
    with AsyncCheckpointer(tmp_path) as ckpt:
        for step in (1, 2):
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
            ckpt.save({"model": model, "optimizer": optimizer}, step=step).result()
            kept[step] = ckpt.load(step)
        (path,) = (tmp_path / "step_00000002").glob("*.tar")
        flip(path, parsed_index(path).tensors[-1].slices[0].extent.offset)
        with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
            assert ckpt.restore({"model": model, "optimizer": optimizer}) == 1
    assert difference(model.state_dict(), kept[1]["model"]) is None
    assert difference(optimizer.state_dict(), kept[1]["optimizer"]) is None
