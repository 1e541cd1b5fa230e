"""Further places with `compression=`: what is copied there, how it is read, and what damage to it costs."""

import json
import os
import random
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from racing import PATIENCE
from slices import examples
from states import MIB, difference, everywhere, leftovers, noise, open_run

import async_ckpt
from async_ckpt import AsyncCheckpointer, CorruptCheckpointError, Place, load, verify
from async_ckpt.core.format import blocks
from async_ckpt.core.host.pool import SegmentPool
from async_ckpt.core.storage import compressed
from async_ckpt.core.storage.compressed import BlocksInTar, CompressingSink, open_decompressed
from async_ckpt.core.storage.local import LocalStorage

zstandard = pytest.importorskip("zstandard")
numpy = pytest.importorskip("numpy")
BLOCK = 4 * MIB


def weights(step: int, mib: int = 12) -> dict[str, Any]:
    """Weights as they come out of training, in several dtypes, and what does not get smaller."""
    made = torch.Generator().manual_seed(step)
    single = torch.randn(mib * MIB // 4, generator=made) * 0.02
    return {
        "model": {"single": single, "half": single.to(torch.bfloat16), "step": torch.tensor(step)},
        "noise": torch.frombuffer(bytearray(noise(5 * MIB, step)), dtype=torch.uint8),
        "step": step,
    }


def places(folder: Path) -> list[Any]:
    return [folder / "near", Place(folder / "far", compression="zstd")]


def saved(folder: Path, *steps: int, **options: Any) -> tuple[Path, Path]:
    """The near and the far archive of the last step."""
    with open_run(places(folder), segment_bytes=32 * MIB, **options) as ckpt:
        for step in steps:
            everywhere(ckpt, ckpt.save(weights(step), step=step))
    near, far = (next((folder / name / f"step_{steps[-1]:08d}").glob("*.tar")) for name in ("near", "far"))
    return near, far


def content(path: Path) -> bytes:
    """The archive in a tar of compressed blocks, as the format says, without this library."""
    found = []
    with tarfile.open(path) as tar:
        for name in sorted(name for name in tar.getnames() if name.startswith("blocks/")):
            planes = int(name.split(".")[1])
            data = numpy.frombuffer(zstandard.decompress(tar.extractfile(name).read()), "u1")  # type: ignore[union-attr]
            found.append(data.reshape(planes, -1).T.tobytes())
    return b"".join(found)


def damage(path: Path, *numbers: int, at: int = 2000) -> None:
    """Change a byte within the compressed blocks of these numbers."""
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        for name in tar.getnames():
            if name.startswith("blocks/") and int(name[7:15]) in numbers:
                data[tar.getmember(name).offset_data + at] ^= 1
    path.write_bytes(data)


# --- what is there ---------------------------------------------------------------------------------------------


def test_steps_arrive_compressed_and_are_read_as_if_they_were_not(tmp_path):
    near, far = saved(tmp_path, 1, 2)

    assert far.stat().st_size < 0.9 * near.stat().st_size
    assert near.name == far.name
    assert leftovers(tmp_path / "far") == []
    for path in (far, far.parent, tmp_path / "far"):
        assert difference(load(path), weights(2)) is None
        assert difference(load(path, verify=False), weights(2)) is None
        assert torch.equal(load(path, select="noise")["noise"], weights(2)["noise"])
    report = verify(tmp_path / "far")
    assert report.steps == (1, 2)
    assert report.num_bytes == 2 * near.stat().st_size
    assert verify(far).num_archives == 1
    with open_run(tmp_path / "far") as alone:
        live = weights(9)
        assert alone.restore(live) == 2
        assert difference(live, weights(2)) is None


def test_the_tar_names_its_blocks_says_that_it_is_compressed_and_holds_the_archive_itself(tmp_path):
    near, far = saved(tmp_path, 1)
    num_bytes = near.stat().st_size
    with tarfile.open(far) as tar:
        names = tar.getnames()
        facts = json.load(tar.extractfile("index.json"))  # type: ignore[arg-type]
        sizes = tar.extractfile("sizes.txt").read().split()  # type: ignore[union-attr]
        members = [tar.getmember(name) for name in names[1:-1]]

    assert (names[0], names[-1]) == ("index.json", "sizes.txt")
    assert len(members) == -(-num_bytes // BLOCK)
    assert facts["version"] == 3
    assert facts["compressed"] == {"num_bytes": num_bytes, "block_bytes": BLOCK, "block": "byte planes, zstd"}
    assert [int(size) for size in sizes[::2]] == [member.size for member in members]
    assert [int(planes) for planes in sizes[1::2]] == [int(member.name.split(".")[1]) for member in members]
    assert {int(planes) for planes in sizes[1::2]} == {1, 4}  # each block by what it holds most of
    assert content(far) == near.read_bytes()


def test_the_copy_is_made_by_the_mover_and_not_in_the_pass_of_a_save(tmp_path):
    with open_run(places(tmp_path)) as ckpt:
        assert not ckpt._lineage.tiers.movers[0].may_follow(1)
        everywhere(ckpt, ckpt.save(weights(1), step=1))


def test_a_step_that_the_far_place_takes_itself_is_plain_there(tmp_path):
    """As when the near place is full: compression would hold up the save."""
    with open_run(places(tmp_path)) as ckpt:
        near = ckpt._roots.runs[0]
        ckpt._lineage.tiers.failed(near, OSError("full"), for_good=True)
        report = ckpt.save(weights(1), step=1).result()
        assert Path(report.path).is_relative_to(tmp_path / "far")
    with tarfile.open(report.path) as tar:
        assert "model.safetensors" in tar.getnames()
    with open_run(places(tmp_path)) as ckpt:
        live = weights(9)
        assert ckpt.restore(live) == 1
    assert difference(live, weights(1)) is None


def test_gaps_are_filled_compressed(tmp_path):
    with open_run(tmp_path / "near") as ckpt:
        for step in (1, 2):
            ckpt.save(weights(step), step=step).result()
    with open_run(places(tmp_path)) as ckpt:
        assert sorted(ckpt.catch_up()[str(tmp_path / "far")]) == [1, 2]
    assert verify(tmp_path / "far").steps == (1, 2)
    for archive in (tmp_path / "far").glob("step_*/*.tar"):
        assert content(archive) == (tmp_path / "near" / archive.parent.name / archive.name).read_bytes()


def test_a_copy_that_was_interrupted_goes_on_with_what_is_there(tmp_path):
    _, far = saved(tmp_path, 1)
    before = far.stat().st_ino
    for name in ("manifest.json", "../latest"):
        (far.parent / name).unlink()
    with open_run(places(tmp_path)) as ckpt:
        assert ckpt.restore(weights(9)) == 1
        everywhere(ckpt, ckpt.save(weights(2), step=2))
        ckpt.catch_up()
    assert far.stat().st_ino == before
    assert verify(tmp_path / "far").steps == (1, 2)


def test_retention_rollbacks_and_overwrites_go_on_there(tmp_path):
    with open_run(places(tmp_path), keep=2, on_rollback="retire") as ckpt:
        for step in (1, 3, 5):
            everywhere(ckpt, ckpt.save(weights(step), step=step))
        everywhere(ckpt, ckpt.save(weights(30), step=5, overwrite=True))
        with open_run(tmp_path / "far") as alone:
            assert difference(alone.load(5), weights(30)) is None
        assert ckpt.restore(weights(9), step=3) == 3
        everywhere(ckpt, ckpt.save(weights(4), step=4))
    assert verify(tmp_path / "far").steps == (3, 4)
    with open_run(tmp_path / "far") as alone:
        assert difference(alone.load(4), weights(4)) is None


def test_groups_that_a_step_borrows_are_read_from_the_step_that_has_them(tmp_path):
    with open_run(places(tmp_path)) as ckpt:
        first = weights(1)
        everywhere(ckpt, ckpt.save(first, step=1))
        state = {**first, "step": 2}
        everywhere(ckpt, ckpt.save(state, step=2, unchanged=["model"]))
    found = load(tmp_path / "far")
    assert difference({name: found[name] for name in state}, state) is None
    assert verify(tmp_path / "far").steps == (1, 2)


def test_the_command_lists_verifies_and_copies_such_a_run(tmp_path):
    near, far = saved(tmp_path, 1, 2)

    def command(*arguments: str | Path) -> str:
        done = run_command(*arguments)
        return done.stdout + done.stderr

    assert "broken" not in command("ls", "--check", tmp_path / "far")
    assert "2 steps, 1 to 2, sound" in command("verify", tmp_path / "far")
    command("cp", tmp_path / "far", tmp_path / "copy")
    copied = next((tmp_path / "copy" / "step_00000002").glob("*.tar"))
    assert copied.read_bytes() == near.read_bytes()
    assert far.read_bytes() != near.read_bytes()
    far.write_bytes(far.read_bytes()[:-4096])
    assert f"{far.name} has" in command("ls", "--check", tmp_path / "far")
    assert "damaged" in command("verify", tmp_path / "far")


def test_another_process_that_moves_the_steps_compresses_them(tmp_path):
    with open_run(places(tmp_path)) as ckpt:
        everywhere(ckpt, ckpt.save(weights(1), step=1))
    with open_run(tmp_path / "near") as ckpt:
        ckpt.save(weights(2), step=2).result()
    done = [sys.executable, "-m", "async_ckpt", "move", str(tmp_path / "near"), "--once"]
    subprocess.run(done, check=True, capture_output=True, timeout=PATIENCE)
    far = next((tmp_path / "far" / "step_00000002").glob("*.tar"))
    assert content(far) == (tmp_path / "near" / "step_00000002" / far.name).read_bytes()


@pytest.mark.parametrize("engine", ["obstore", "fsspec"])
def test_steps_arrive_compressed_at_a_store_in_fewer_bytes_and_are_read_by_ranges(s3, bucket, tmp_path, engine):
    plain = Place(f"s3://{bucket}/run", engine=engine, options=s3.options)
    far = replace(plain, compression="zstd")
    with open_run([tmp_path / "near", far]) as ckpt:
        for step in (1, 2):
            everywhere(ckpt, ckpt.save(weights(step), step=step))
    assert difference(load(plain), weights(2)) is None
    assert torch.equal(load(plain, select="noise")["noise"], weights(2)["noise"])
    assert verify(plain).steps == (1, 2)
    with open_run(plain) as alone:
        live = weights(9)
        assert alone.restore(live) == 2
    assert difference(live, weights(2)) is None


# --- damage ----------------------------------------------------------------------------------------------------


def test_a_damaged_block_is_named_with_its_tensors_and_the_others_are_read(tmp_path):
    _, far = saved(tmp_path, 1)
    damage(far, 4)

    for verified in (True, False):
        with pytest.raises(CorruptCheckpointError, match=r"block 4 .*does not match its digest.*model") as caught:
            load(far.parent, verify=verified)
        assert caught.value.tensors
    assert torch.equal(load(far.parent, select="noise")["noise"], weights(1)["noise"])
    with pytest.raises(CorruptCheckpointError, match="block 4 "):
        verify(far.parent)


def test_blocks_that_are_damaged_at_different_places_are_read_from_the_other(tmp_path):
    near, far = saved(tmp_path, 1)
    data = bytearray(near.read_bytes())
    for number in (0, 3):
        data[number * BLOCK + 5000] ^= 1
    near.write_bytes(data)
    damage(far, 1, 2)
    live = weights(9)
    with open_run(places(tmp_path)) as ckpt, pytest.warns(RuntimeWarning, match="another place"):
        ckpt.restore(live)
    assert difference(live, weights(1)) is None

    damage(far, 3)
    with open_run(places(tmp_path)) as ckpt, pytest.raises(CorruptCheckpointError, match="has an undamaged copy"):
        ckpt.restore(weights(9), step=1)


@pytest.mark.parametrize("left", [0, 100, 1500, BLOCK, -1, -512, -2000])
def test_a_file_that_is_cut_off_is_refused(tmp_path, left):
    near, far = saved(tmp_path, 1)
    far.write_bytes(far.read_bytes()[:left])
    with pytest.raises(CorruptCheckpointError):
        load(far.parent)
    with pytest.raises(CorruptCheckpointError):
        load(far)
    live = weights(9)
    with open_run(places(tmp_path)) as ckpt:
        assert ckpt.restore(live) == 1
    assert near.exists()


def test_a_damaged_copy_is_replaced_from_another_place(tmp_path):
    _, far = saved(tmp_path, 1)
    damage(far, 2)
    assert run_command("cp", tmp_path / "near", tmp_path / "far", "--overwrite").returncode == 0
    assert verify(tmp_path / "far").steps == (1,)
    assert difference(load(tmp_path / "far"), weights(1)) is None


def test_a_compressed_archive_that_is_as_large_as_the_plain_one_is_not_taken_for_it(tmp_path):
    """Blocks that do not get smaller become 512 bytes larger, which the index makes up for."""
    for number in range(30):
        folder, many = tmp_path / str(number), bytearray(noise(7 * MIB + number * 16_384))
        state = {f"x{i}": torch.frombuffer(many, dtype=torch.uint8).roll(i) for i in range(4)}
        with open_run(places(folder), segment_bytes=32 * MIB) as ckpt:
            everywhere(ckpt, ckpt.save(state, step=1))
        near, far = (next((folder / name / "step_00000001").glob("*.tar")) for name in ("near", "far"))
        if near.stat().st_size == far.stat().st_size:
            break
    else:
        pytest.fail("none was as large")
    assert near.read_bytes() != far.read_bytes()
    for path in (far, far.parent, folder / "far"):
        assert difference(load(path), state) is None
        assert difference(load(path, verify=False), state) is None
        assert verify(path).num_archives == 1
    with open_run(places(folder)) as ckpt:
        assert ckpt.catch_up()[str(folder / "far")] == []
    run_command("cp", folder / "far", folder / "copy")
    assert next((folder / "copy" / "step_00000001").glob("*.tar")).read_bytes() == near.read_bytes()
    near.write_bytes(b"damaged")
    with open_run(places(folder)) as ckpt, pytest.warns(RuntimeWarning, match="another place"):
        assert difference(ckpt.load(1), state) is None


@pytest.mark.parametrize("missing", ["zstandard", "numpy"])
def test_a_package_that_is_missing_at_a_read_is_named_with_the_file(tmp_path, monkeypatch, missing):
    _, far = saved(tmp_path, 1)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf'{far.name} is compressed; .* needs {missing}; pip install "async_ckpt'):
        load(tmp_path / "far")


def test_many_open_files_together_keep_a_few_blocks(tmp_path):
    data = noise(6 * MIB)
    compressed_file(tmp_path / "x.tar", data)
    readers = [open_decompressed(LocalStorage(tmp_path).open("x.tar"), "x.tar") for _ in range(20)]
    for number, reader in enumerate(readers):
        for begin in (number, BLOCK + number):
            target = bytearray(100)
            reader.read_into(begin, memoryview(target))
            assert target == data[begin : begin + 100]
    assert sum(map(len, compressed._cached.values())) <= 8 * BLOCK
    for reader in readers:
        reader.close()
    assert not compressed._cached


# --- the format ------------------------------------------------------------------------------------------------


def compressed_file(path: Path, data: bytes, segment_bytes: int = 8 * MIB, num_threads: int = 2) -> None:
    sink = CompressingSink(
        LocalStorage(path.parent),
        path.name,
        num_bytes=len(data),
        segment_bytes=segment_bytes,
        packing=BlocksInTar(len(data)),
        num_threads=num_threads,
    )
    pool = SegmentPool(segment_bytes, max_bytes=32 * segment_bytes)
    begins = list(range(0, len(data), segment_bytes))
    random.Random(len(data)).shuffle(begins)
    for begin in begins:
        lease = pool.lease((0, begin), pin=None, check=lambda: None)
        part = data[begin : begin + segment_bytes]
        lease.segment.view[: len(part)] = part
        sink.write(begin, lease.segment.view[: len(part)], lease)
        lease.release()
    sink.finish()
    sink.close()
    pool.close()


def read_all(path: Path, num_bytes: int) -> bytes:
    with open_decompressed(LocalStorage(path.parent).open(path.name), str(path)) as reader:
        found = bytearray(num_bytes)
        reader.read_into(0, memoryview(found))
    return bytes(found)


_files: list[tuple[Path, bytes]] = []


def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """Made once: five blocks."""
    if not _files:
        path = tmp_path_factory.mktemp("blocks") / "x.tar"
        data = weights(3, 8)["model"]["single"].numpy().tobytes() + noise(5 * MIB) + bytes(4 * MIB + 4096)
        compressed_file(path, data)
        _files.append((path, data))
    return _files[0]


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4096, BLOCK - 1, BLOCK, BLOCK + 1, 9 * MIB + 6, 16 * MIB])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_whatever_its_size_an_object_comes_back(tmp_path, num_bytes, num_threads):
    data = noise(num_bytes)
    compressed_file(tmp_path / "x.tar", data, num_threads=num_threads)
    with open_decompressed(LocalStorage(tmp_path).open("x.tar"), "x.tar") as reader:
        found = bytearray(reader.num_bytes)
        reader.read_into(0, memoryview(found))
    assert found == data
    assert content(tmp_path / "x.tar") == data
    assert (tmp_path / "x.tar").stat().st_size < num_bytes * 1.001 + 8192


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 18 * MIB), st.integers(0, 9 * MIB)), min_size=1, max_size=6))
def test_any_range_is_read(tmp_path_factory, ranges):
    path, data = example(tmp_path_factory)
    with open_decompressed(LocalStorage(path.parent).open(path.name), str(path)) as reader:
        assert reader.num_bytes == len(data)
        for offset, length in ranges:
            offset, length = min(offset, len(data)), min(length, len(data) - min(offset, len(data)))
            target = bytearray(length)
            reader.read_into(offset, memoryview(target))
            assert target == data[offset : offset + length]
        with pytest.raises(EOFError, match="ends at byte"):
            reader.read_into(len(data), memoryview(bytearray(1)))


@settings(max_examples=examples(200), deadline=None)
@given(st.one_of(st.integers(0, 1023), st.integers(-4096, -1), st.integers(1024, 12 * MIB)), st.integers(1, 255))
def test_a_wrong_byte_anywhere_is_refused_or_harms_nothing(tmp_path_factory, at, change):
    path, data = example(tmp_path_factory)
    wrong = bytearray(path.read_bytes())
    wrong[at % len(wrong)] ^= change
    (path.parent / "wrong.tar").write_bytes(wrong)
    try:
        with open_decompressed(LocalStorage(path.parent).open("wrong.tar"), "wrong.tar") as reader:
            if not isinstance(reader, compressed.BlocksInTarReader):
                assert at % len(wrong) < 1024  # it is not taken for one
                return
            found = bytearray(len(data))
            reader.read_into(0, memoryview(found))
    except (CorruptCheckpointError, EOFError):
        return
    assert found == data


@given(st.lists(st.tuples(st.integers(1, BLOCK + BLOCK // 100), st.sampled_from([1, 4])), min_size=1, max_size=50))
def test_a_table_comes_back(sizes):
    facts = [blocks.CompressedBlock(*size) for size in sizes]
    num_bytes = len(facts) * BLOCK
    members = sum(512 + -(-fact.num_bytes // 512) * 512 for fact in facts)
    end = blocks.end(facts)
    total = blocks.HEAD_BYTES + members + len(end)

    assert len(blocks.head(num_bytes)) == blocks.HEAD_BYTES
    assert blocks.begins(blocks.head(num_bytes))
    assert blocks.content_bytes(blocks.head(num_bytes)) == num_bytes
    extent = blocks.end_extent(num_bytes, total)
    assert extent.end == total
    found = list(blocks.parse_end(end, num_bytes, extent.offset))
    assert [block for _, block in found] == sizes
    assert [extent.length for extent, _ in found] == [512 + fact.num_bytes for fact in facts]
    with pytest.raises(ValueError, match="does not describe the blocks"):
        list(blocks.parse_end(end, num_bytes, extent.offset + 512))


LIES = {
    "too few lines": lambda lines: [lines[0][:-2].rjust(20) + b"%d\n" % 4, *lines[2:]],
    "another line end": lambda lines: [lines[0][:-1] + b"\r", *lines[1:]],
    "a sign": lambda lines: [b"+" + lines[0][1:], *lines[1:]],
    "no size": lambda lines: [b"%8d 4\n" % 0, *lines[1:]],
    "an immense size": lambda lines: [b"99999999 4\n", *lines[1:]],
    "other planes": lambda lines: [lines[0][:-2] + b"3\n", *lines[1:]],
    "no number": lambda lines: [b"abcdefgh 4\n", *lines[1:]],
    "in another order": lambda lines: [*reversed(lines)],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_table_that_lies_is_refused(tmp_path_factory, lie):
    path, data = example(tmp_path_factory)
    whole = path.read_bytes()
    end = blocks.end_extent(len(data), len(whole))
    table = whole[end.offset + 512 :][: 11 * -(-len(data) // BLOCK)]
    wrong = b"".join(LIES[lie]([table[at : at + 11] for at in range(0, len(table), 11)]))
    assert len(wrong) == len(table)
    (path.parent / "wrong.tar").write_bytes(whole[: end.offset + 512] + wrong + whole[end.offset + 512 + len(wrong) :])
    with pytest.raises(CorruptCheckpointError):
        read_all(path.parent / "wrong.tar", len(data))


# --- what is refused -------------------------------------------------------------------------------------------


def test_the_first_place_and_a_single_one_cannot_be_compressed(tmp_path):
    compressing = Place(tmp_path / "a", compression="zstd")
    for root in (compressing, [compressing], [compressing, tmp_path / "b"]):
        with pytest.raises(ValueError, match="compression= is for a further place"):
            AsyncCheckpointer(root)
    with pytest.raises(ValueError, match=r"compression= are for the places of an AsyncCheckpointer"):
        async_ckpt.save(weights(1), Place(tmp_path / "x.tar", compression="zstd"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", ["gzip", "", True, 1, async_ckpt.Zstd()])
def test_another_compression_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match='compression of a place must be "zstd" or None'):
        Place(tmp_path, compression=value)


@pytest.mark.parametrize("missing", ["zstandard", "numpy"])
def test_a_missing_package_is_named_before_anything_is_saved(tmp_path, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"needs {missing}; pip install"):
        AsyncCheckpointer(places(tmp_path))
    assert os.listdir(tmp_path) == []
