"""Damaged, truncated, foreign and lying archives: always a CheckpointError, never wrong data, never much memory."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import tarfile
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support import (
    assemble,
    difference,
    flip,
    forge,
    little_memory,
    parsed_index,
    read_index,
    states_equal,
)
from torch import nn

import async_ckpt
from async_ckpt import (
    AsyncCheckpointer,
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    NotCommittedError,
    UntrustedObjectError,
)
from async_ckpt.format import digests, index, tar
from async_ckpt.functional import _open_any
from async_ckpt.restore import restore_state
from async_ckpt.spec import MIB


class Triple(NamedTuple):
    """A class that the caller knows."""

    a: Any
    b: Any
    c: Any


STATE: dict[str, Any] = {
    "m": {
        "w": torch.arange(10.0), "tied": None, "b": torch.ones(3, dtype=torch.bfloat16), "z": torch.tensor([1j]),
        "a": np.arange(3, dtype=">i2"),
    },
    "seen": {1, 2},
    "n": -1.5,
}  # fmt: skip
STATE["m"]["tied"] = STATE["m"]["w"]


@pytest.fixture
def saved(archive: Path) -> Path:
    async_ckpt.save(STATE, archive).result()
    return archive


def assert_refused(path: Path, kind: type[CheckpointError] = CheckpointError, **how: Any) -> CheckpointError:
    with pytest.raises(kind) as caught:
        async_ckpt.load(path, **how)
    assert str(path) in str(caught.value)
    assert caught.value.path == str(path)
    return caught.value


# --- damage ------------------------------------------------------------------------------------------------------


def test_no_damaged_byte_goes_unnoticed(saved: Path) -> None:
    """Every byte of a small archive is changed, one after the other."""
    size = saved.stat().st_size
    noticed = 0
    with open(saved, "r+b", buffering=0) as file:
        for offset in range(size):
            (byte,) = os.pread(file.fileno(), 1, offset)
            os.pwrite(file.fileno(), bytes([byte ^ (1 << offset % 8)]), offset)
            try:
                async_ckpt.load(saved)
            except CheckpointError:
                noticed += 1
            os.pwrite(file.fileno(), bytes([byte]), offset)
    assert noticed == size
    assert states_equal(async_ckpt.load(saved), STATE)


@pytest.mark.parametrize("how", [{"verify": False}, {"verify": False, "mmap": True}], ids=["read", "mmap"])
def test_an_unverified_load_of_a_damaged_archive_loads_or_is_refused(
    how: dict[str, Any], saved: Path
) -> None:
    """Not looking at digests may give wrong values; it must not give another kind of error."""
    size = saved.stat().st_size
    for offset in range(0, size, 11):
        flip(saved, offset, 1 << offset % 8)
        try:
            async_ckpt.load(saved, **how)
        except CheckpointError:
            pass
        flip(saved, offset, 1 << offset % 8)
    assert difference(async_ckpt.load(saved, **how), STATE) is None


@pytest.mark.parametrize("verify", [True, False])
def test_an_archive_cut_short_anywhere_is_refused(verify: bool, saved: Path) -> None:
    whole = saved.read_bytes()
    told = parsed_index(saved)
    edges = {
        0,
        len(whole),
        told.digests.data.offset,
        told.digests.data.end,
        *(m.data.end for m in told.members),
    }
    edges |= {m.data.offset for m in told.members} | {t.extent.end for t in told.tensors}
    near = {edge + by for edge in edges for by in (-513, -512, -1, 0, 1, 511, 512)}
    for length in sorted((near | set(range(0, len(whole), 97))) & set(range(len(whole)))):
        saved.write_bytes(whole[:length])
        assert_refused(saved, CorruptCheckpointError, verify=verify, mmap=length % 2 == 0)


@pytest.mark.parametrize("num_bytes", [1, 512, 4096, 5 * MIB])
def test_an_archive_with_something_behind_its_end_is_refused(num_bytes: int, saved: Path) -> None:
    with open(saved, "ab") as file:
        file.write(bytes(num_bytes))
    assert_refused(saved, CorruptCheckpointError)


def test_damage_in_any_block_of_a_larger_archive_is_found(archive: Path) -> None:
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


def test_blocks_that_changed_places_are_found(archive: Path) -> None:
    state = {"w": torch.randint(0, 256, (13 * MIB,), dtype=torch.uint8)}
    async_ckpt.save(state, archive).result()
    data = bytearray(archive.read_bytes())
    data[4 * MIB : 8 * MIB], data[8 * MIB : 12 * MIB] = data[8 * MIB : 12 * MIB], data[4 * MIB : 8 * MIB]
    archive.write_bytes(data)
    assert_refused(archive, CorruptCheckpointError)


# --- what is no archive of ours ----------------------------------------------------------------------------------


def test_an_empty_file_is_refused_and_called_empty(archive: Path) -> None:
    archive.touch()
    assert "empty" in str(assert_refused(archive, CorruptCheckpointError))


def test_a_file_of_torch_save_is_named_and_torch_load_recommended(archive: Path) -> None:
    torch.save({"w": torch.ones(2)}, archive)
    assert "torch.load" in str(assert_refused(archive, CorruptCheckpointError))


def test_a_file_of_the_old_torch_save_is_refused(archive: Path) -> None:
    torch.save({"w": torch.ones(2)}, archive, _use_new_zipfile_serialization=False)
    assert_refused(archive, CorruptCheckpointError)


def test_a_bare_safetensors_file_is_refused(archive: Path) -> None:
    save_file({"w": torch.ones(200)}, archive)
    assert_refused(archive, CorruptCheckpointError)


def test_a_compressed_archive_is_named(saved: Path) -> None:
    saved.write_bytes(gzip.compress(saved.read_bytes()))
    assert "gzip" in str(assert_refused(saved, CorruptCheckpointError))


@pytest.mark.parametrize("name", ["model.txt", "index.json", "digests.json", "./index.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"null", b'{"format":"other"}', b"\xff\xfe", b"{" * 3000], ids=repr
)
def test_a_tar_of_something_else_is_refused(name: str, content: bytes, archive: Path) -> None:
    with tarfile.open(archive, "w") as made:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        made.addfile(info, io.BytesIO(content))
    assert_refused(archive, CorruptCheckpointError)
    assert_refused(archive, CorruptCheckpointError, verify=False)


@pytest.mark.parametrize("size", [1, 511, 512, 513, 4096, 100_000])
@pytest.mark.parametrize("byte", [b"\x00", b" ", b"\xff", b"{"], ids=repr)
def test_a_file_of_one_byte_repeated_is_refused(byte: bytes, size: int, archive: Path) -> None:
    archive.write_bytes(byte * size)
    assert_refused(archive, CorruptCheckpointError)


def test_an_extracted_and_packed_again_archive_is_refused_without_harm(saved: Path, tmp_path: Path) -> None:
    """Its members lie elsewhere than the index says."""
    with tarfile.open(saved) as old, tarfile.open(tmp_path / "y.tar", "w") as new:
        for member in reversed(old.getmembers()):
            new.addfile(member, old.extractfile(member))
    assert_refused(tmp_path / "y.tar", CorruptCheckpointError)


def test_a_folder_without_a_commit_is_not_committed(tmp_path: Path) -> None:
    (tmp_path / "step_00000001").mkdir()
    for path in (tmp_path, tmp_path / "step_00000001"):
        with pytest.raises(NotCommittedError):
            async_ckpt.load(path)


def test_a_path_below_a_file_is_not_committed_or_unavailable(saved: Path) -> None:
    with pytest.raises(CheckpointError):
        async_ckpt.load(saved / "below")


def test_a_name_too_long_for_the_file_system_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        async_ckpt.load(tmp_path / ("x" * 300))


# --- archives that lie -------------------------------------------------------------------------------------------
# Everything below has digests that agree: only the sense of the index can tell.


def row(number: int, **facts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["tensors"][number].update(facts)


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.__setitem__(key, value)


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.__delitem__(key)


def node(value: Any) -> Callable[[dict[str, Any]], None]:
    """A skeleton in which the last value is this node."""
    return lambda raw: raw["skeleton"]["dict"].__setitem__(-1, ["n", value])


def member_size(number: int, by: int) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["members"][number].__setitem__(1, raw["members"][number][1] + by)


# tensor 0: m.w float32[10]; 1: its alias m.tied; 2: m.b bfloat16[3]; 3: m.z complex64[1]; 4: the array's bytes
LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "extent negative begin": row(0, extent=[-4, 40]),
    "extent negative length": row(0, extent=[4096, -40]),
    "extent out of the member": row(0, extent=[2**20, 40]),
    "extent out of the file": row(0, extent=[2**62, 40]),
    "extent huge": row(0, extent=[0, 2**62], shape=[2**60]),
    "extent beyond 64 bits": row(0, extent=[2**80, 40]),
    "extent of floats": row(0, extent=[4096.0, 40.0]),
    "extent of strings": row(0, extent=["0", "40"]),
    "extent of three": row(0, extent=[0, 40, 1]),
    "extent null": row(0, extent=None),
    "extent moved": row(2, extent=[4048, 6]),
    "extent in the header": row(0, extent=[0, 40]),
    "extents overlap": lambda raw: raw["tensors"][2].update(extent=[raw["tensors"][0]["extent"][0], 6]),
    "shape other size": row(0, shape=[11]),
    "shape other": row(0, shape=[5, 2]),
    "shape negative": row(0, shape=[-10]),
    "shape two negatives": row(0, shape=[-5, -2]),
    "shape absurd": row(0, shape=[2**62]),
    "shape absurd with zero": row(0, shape=[2**62, 2**62, 0], extent=[4096, 0]),
    "shape zero": row(0, shape=[2**62, 0], extent=[4096, 0]),
    "shape of another order": row(0, shape=[2, 5]),
    "shape overflows to the size": row(0, shape=[2**32, 2**32, 10]),
    "shape many": row(0, shape=[1] * 100_000 + [10]),
    "shape bool": row(0, shape=[True, 10]),
    "shape string": row(0, shape="10"),
    "shape null": row(0, shape=None),
    "shape beyond 64 bits": row(0, shape=[2**64 + 10]),
    "dtype unknown": row(0, dtype="float33"),
    "dtype attribute of torch": row(0, dtype="nn"),
    "dtype list": row(0, dtype=["float32"]),
    "dtype null": row(0, dtype=None),
    "dtype same size": row(0, dtype="int32"),
    "dtype same size as stored": row(3, dtype="int64"),
    "dtype other size": row(0, dtype="float64"),
    "dtype same stored code": row(3, dtype="complex32", shape=[2]),
    "name of another": row(2, name="w"),
    "name other": row(2, name="c"),
    "name null": row(2, name=None),
    "name swapped": lambda raw: (raw["tensors"][0].update(name="b"), raw["tensors"][2].update(name="w"))[2:],
    "member out of range": row(0, member=9),
    "member negative": row(0, member=-1),
    "member other": row(0, member=1),
    "member bool": row(0, member=False),
    "alias to itself": row(1, alias=1),
    "alias to a later one": row(1, alias=2),
    "alias negative": row(1, alias=-1),
    "alias of an alias": lambda raw: raw["tensors"].append({"path": ["x"], "alias": 1}),
    "alias huge": row(1, alias=2**70),
    "alias null": row(1, alias=None),
    "row null": lambda raw: raw["tensors"].__setitem__(0, None),
    "row string": lambda raw: raw["tensors"].__setitem__(0, "w"),
    "row empty": lambda raw: raw["tensors"].__setitem__(0, {}),
    "row missing": lambda raw: raw["tensors"].__delitem__(2),
    "rows twice": lambda raw: raw["tensors"].extend(raw["tensors"]),
    "rows null": put("tensors", None),
    "rows number": put("tensors", 5),
    "rows dict": put("tensors", {"a": 1}),
    "path null": row(0, path=None),
    "path number": row(0, path=3),
    "members null": put("members", None),
    "members empty": put("members", []),
    "members strings": put("members", ["ab", "cd"]),
    "members twice": lambda raw: raw["members"].append(raw["members"][0]),
    "member size larger": member_size(0, 512),
    "member size smaller": member_size(0, -512),
    "member size by one": member_size(0, 1),
    "member size negative": member_size(0, -(10**6)),
    "member size huge": member_size(0, 2**62),
    "member size beyond 64 bits": member_size(0, 2**90),
    "member sizes shifted": lambda raw: (member_size(0, 512)(raw), member_size(1, -512)(raw))[2:],
    "member called index": lambda raw: raw["members"][0].__setitem__(0, "index.json"),
    "member called digests": lambda raw: raw["members"][0].__setitem__(0, "digests.json"),
    "objects renamed": lambda raw: raw["members"][-1].__setitem__(0, "other.pt"),
    "version string": put("version", "1"),
    "version negative": put("version", -1),
    "version null": put("version", None),
    "version missing": drop("version"),
    "format other": put("format", "other"),
    "format missing": drop("format"),
    "step negative": put("step", -1),
    "step string": put("step", "1"),
    "step missing": drop("step"),
    "skeleton missing": drop("skeleton"),
    "skeleton a list": put("skeleton", []),
    "skeleton an empty object": put("skeleton", {}),
    "kind unknown": node({"code": "os.system"}),
    "kind empty": node({"": 1}),
    "tensor out of range": node({"tensor": 5}),
    "tensor far out of range": node({"tensor": 2**70}),
    "tensor negative": node({"tensor": -1}),
    "tensor bool": node({"tensor": True}),
    "tensor string": node({"tensor": "0"}),
    "tensor null": node({"tensor": None}),
    "bytes out of range": node({"bytes": 99}),
    "object out of range": node({"object": 1}),
    "object negative": node({"object": -1}),
    "dict null": node({"dict": None}),
    "dict of numbers": node({"dict": [1]}),
    "dict of triples": node({"dict": [["a", 1, 2]]}),
    "dict bare list inside": node({"dict": [["a", [1]]]}),
    "dict unhashable key": node({"dict": [[{"list": []}, 1]]}),
    "dict tensor key": node({"dict": [[{"tensor": 0}, 1]]}),
    "dict unhashable tuple key": node({"dict": [[{"tuple": [{"dict": []}]}, 1]]}),
    "ordered null": node({"ordered": None}),
    "ordered metadata odd": node({"ordered": [], "metadata": [1]}),
    "ordered metadata unknown": node({"ordered": [], "metadata": {"code": 1}}),
    "list null": node({"list": None}),
    "list number": node({"list": 3}),
    "tuple number": node({"tuple": 3}),
    "namedtuple empty": node({"namedtuple": []}),
    "namedtuple null": node({"namedtuple": None}),
    "namedtuple unhashable": node({"namedtuple": [[], ["a"], [1]]}),
    "namedtuple fields null": node({"namedtuple": ["x", None, [1]]}),
    "float short": node({"float": "00"}),
    "float long": node({"float": "00" * 9}),
    "float no hex": node({"float": "zz"}),
    "float number": node({"float": 1.5}),
    "complex short": node({"complex": "00"}),
    "complex null": node({"complex": None}),
    "inline no base64": node({"inline": "***"}),
    "inline number": node({"inline": 3}),
    "inline half": node({"inline": "AAA"}),
    "int odd": node({"int": "zz"}),
    "int null": node({"int": None}),
    "size of strings": node({"size": ["a"]}),
    "size number": node({"size": 3}),
    "size of dicts": node({"size": [{}]}),
    "dtype node unknown": node({"dtype": "float33"}),
    "dtype node module": node({"dtype": "nn"}),
    "dtype node list": node({"dtype": []}),
    "device unknown": node({"device": "nowhere"}),
    "device null": node({"device": None}),
    "device list": node({"device": []}),
    "npscalar empty": node({"npscalar": []}),
    "npscalar null": node({"npscalar": None}),
    "npscalar short": node({"npscalar": ["<f8", "AAAA"]}),
    "npscalar object": node({"npscalar": ["|O", "AAAAAAAAAAA="]}),
    "npscalar unknown": node({"npscalar": ["<q99", ""]}),
    "npscalar huge": node({"npscalar": ["<U500000000", ""]}),
    "npscalar huge struct": node({"npscalar": [[["a", "<f8", [2000000000]]], ""]}),
    "npscalar huge void": node({"npscalar": ["|V2147483647", ""]}),
    "npscalar odd struct": node({"npscalar": [[1, 2], ""]}),
    "ndarray empty": node({"ndarray": []}),
    "ndarray null": node({"ndarray": None}),
    "ndarray out of range": node({"ndarray": [99, "<f4", [10]]}),
    "ndarray other shape": node({"ndarray": [0, "<f4", [11]]}),
    "ndarray guessed shape": node({"ndarray": [0, "<f4", [-1]]}),
    "ndarray negative shape": node({"ndarray": [0, "<f4", [-2, -5]]}),
    "ndarray huge shape": node({"ndarray": [0, "<f4", [2**62, 2**62]]}),
    "ndarray zero-size huge": node({"ndarray": [0, "<U0", [2**40]]}),
    "ndarray void huge": node({"ndarray": [0, "|V0", [2**62]]}),
    "ndarray no shape": node({"ndarray": [0, "<f4"]}),
    "ndarray odd shape": node({"ndarray": [0, "<f4", "x"]}),
    "ndarray other size": node({"ndarray": [0, "<c32", [2]]}),
    "ndarray objects": node({"ndarray": [0, "|O", [5]]}),
    "ndarray objects inside": node({"ndarray": [0, [["a", "|O"]], [5]]}),
    "ndarray odd dtype": node({"ndarray": [0, 3, [10]]}),
    "ndarray odd dtype list": node({"ndarray": [0, [3], [10]]}),
    "ndarray unknown dtype": node({"ndarray": [0, "<q99", [10]]}),
    "ndarray too many": node({"ndarray": [0, "<f4", [10], 1]}),
    "ndarray of bfloat16": node({"ndarray": [2]}),
    "bytes of bfloat16": node({"bytes": 2}),
}  # fmt: skip


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
@pytest.mark.parametrize("name", LIES)
def test_an_archive_that_lies_is_refused_without_taking_memory(name: str, verify: bool, saved: Path) -> None:
    forge(saved, LIES[name])
    with little_memory():
        assert_refused(saved, CorruptCheckpointError, verify=verify)
        assert_refused(saved, CorruptCheckpointError, verify=verify, mmap=True)


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("honest")
    with AsyncCheckpointer(root) as ckpt:
        for step in (1, 2):
            ckpt.save(STATE, step=step).result()
    return root


@pytest.mark.parametrize("name", LIES)
def test_a_run_passes_over_an_archive_that_lies(name: str, honest_run: Path, tmp_path: Path) -> None:
    """The manifest agrees with it too; nothing that is live is touched by it."""
    root = shutil.copytree(honest_run, tmp_path / "run")
    forge_step(root, 2, LIES[name])
    live = {
        "m": {
            "w": torch.zeros(10),
            "tied": None,
            "b": torch.zeros(3, dtype=torch.bfloat16),
            "z": None,
            "a": 0,
        },
        "n": 0,
    }
    live["m"]["tied"] = live["m"]["w"]
    with AsyncCheckpointer(root) as ckpt, little_memory():
        with pytest.raises(CorruptCheckpointError) as caught:
            ckpt.restore(live, step=2)
        assert not caught.value.partly_overwritten
        assert not live["m"]["w"].any()
        with pytest.warns(RuntimeWarning, match="step 2 is passed over"):
            assert ckpt.restore(live) == 1
    assert difference(live, {"m": STATE["m"], "n": STATE["n"]}) is None


def test_a_tensor_member_in_the_place_of_the_objects_is_not_opened(saved: Path) -> None:
    def lie(raw: dict[str, Any]) -> None:
        raw["members"][-1][0], raw["members"][0][0] = "other.pt", "objects.pt"

    forge(saved, lie)
    assert_refused(saved)
    assert_refused(saved, trust=True)


def forge_step(root: Path, step: int, lie: Callable[[dict[str, Any]], Any]) -> None:
    """Make a committed archive lie, and its manifest agree with it."""
    folder = root / f"step_{step:08d}"
    (path,) = folder.glob("*.tar")
    forge(path, lie)
    data = path.read_bytes()
    manifest = json.loads((folder / "manifest.json").read_text())
    member_bytes = data[: data.rindex(b'"}\n') + 3]
    manifest["archives"][0].update(num_bytes=len(data), digest=digests.self_digest(member_bytes))
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_an_honest_archive_made_by_the_forger_loads(saved: Path) -> None:
    """So what is refused above is refused for the lie."""
    forge(saved)
    assert difference(async_ckpt.load(saved), STATE) is None
    forge(saved, put("step", 7))
    assert difference(async_ckpt.load(saved, mmap=True), STATE) is None


TEXTS: dict[str, Callable[[str], str]] = {
    "deeply nested lists": lambda text: text.replace('"skeleton": ', '"skeleton": ' + "[" * 100_000, 1),
    "deeply nested objects": lambda text: text.replace(
        '"skeleton": ', '"skeleton": ' + '{"list":' * 100_000, 1
    ),
    "whole text nested": lambda text: "[" * 200_000 + "]" * 200_000,
    "a number of a million digits": lambda text: text.replace(
        '"step": null', '"step": ' + "9" * 1_000_000, 1
    ),
    "an extent of many digits": lambda text: text.replace('"extent": [', '"extent": [' + "9" * 4000, 1),
    "a shape of many digits": lambda text: text.replace('"shape": [', '"shape": [' + "9" * 4000, 1),
    "infinity": lambda text: text.replace('"shape": [10', '"shape": [Infinity', 1),
    "a float out of range": lambda text: text.replace('"shape": [10', '"shape": [1e999', 1),
    "not a number": lambda text: text.replace('"extent": [', '"extent": [NaN, ', 1),
    "infinite version": lambda text: text.replace('"version": 1', '"version": Infinity', 1),
    "two texts": lambda text: text + text,
    "cut": lambda text: text[: len(text) // 2],
    "single quotes": lambda text: text.replace('"', "'"),
    "no text": lambda text: "",
    "null": lambda text: "null",
}


@pytest.mark.parametrize("change", TEXTS.values(), ids=TEXTS.keys())
@pytest.mark.parametrize("verify", [True, False], ids=["verified", "unverified"])
def test_an_index_that_is_absurd_as_text_is_refused(change: Any, verify: bool, saved: Path) -> None:
    honest = parsed_index(saved)
    before = json.dumps(read_index(saved))
    assert change(before) != before
    between = saved.read_bytes()[
        honest.members[0].data.offset - tar.BLOCK : honest.digests.data.offset - tar.BLOCK
    ]
    saved.write_bytes(assemble(change(before).encode(), between))
    with little_memory():
        assert_refused(saved, CorruptCheckpointError, verify=verify)


@pytest.mark.parametrize(
    "depth", [50, 150, 200, 250, 300, 320, 350, 400, 450, 480, 500, 600, 1000, 3000, 50_000]
)
@pytest.mark.parametrize("kind", ["dict", "ordered", "list", "tuple"])
def test_a_skeleton_of_any_depth_loads_or_is_refused(kind: str, depth: int, archive: Path) -> None:
    text = {
        "dict": ('{"dict":[["k",', "]]}"), "ordered": ('{"ordered":[["k",', "]]}"),
        "list": ('{"list":[', "]}"), "tuple": ('{"tuple":[', "]}"),
    }[kind]  # fmt: skip
    async_ckpt.save({"w": torch.ones(1)}, archive).result()
    deep = text[0] * depth + '{"tensor":0}' + text[1] * depth
    forge(archive, put("skeleton", "HERE"), text=lambda whole: whole.replace('"HERE"', deep))
    live: Any = {"k": {}} if kind in ("dict", "ordered") else [[]]
    try:
        found = async_ckpt.load(archive)
    except CorruptCheckpointError:
        assert depth >= 150
    else:
        for _ in range(depth):
            found = found["k" if kind in ("dict", "ordered") else 0]
        assert found.item() == 1
    if kind != "tuple":
        try:
            with _open_any(archive, True, {}) as opened:
                restore_state(opened, live)
        except CorruptCheckpointError:
            assert depth >= 150


ODD_VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10, 512, 4096, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30, 1.5, float("inf"),
    float("nan"), "", "w", "a", "float32", "int8", "bool", "dict", "tensor", "x" * 2000, "\x00", "\ud800", "../x", [], [[]], {}, [0], [1, 2], [0, 40],
    {"tensor": 0}, {"tensor": 4}, {"object": 0}, {"ndarray": [4]}, {"ndarray": [0, "<f4", [10]]}, {"bytes": 4}, {"list": []}, {"dict": []},
    {"dict": [["a", 1]]}, {"tuple": [1]}, {"size": [1]}, {"float": "0" * 16}, {"npscalar": ["<f8", "AAAAAAAAAAA="]}, {"path": ["x"], "alias": 0},
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a JSON text that holds a value: what it is in, and its key there."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from places(value[key])


def mutate(raw: dict[str, Any], random: Random) -> None:
    """Change one to three values of an index: to something odd, to nothing, or to what stands elsewhere in it."""
    for _ in range(random.randint(1, 3)):
        everywhere = list(places(raw))
        if not everywhere:
            return
        where, key = random.choice(everywhere)
        act = random.randint(0, 3)
        if act == 0:
            del where[key]
        elif act == 1:
            other, name = random.choice(everywhere)
            where[key] = deepcopy(other[name])
        elif act == 2 and type(where[key]) is int:
            where[key] += random.choice([-512, -8, -1, 1, 2, 8, 512, 2**40])
        else:
            where[key] = deepcopy(random.choice(ODD_VALUES))


def test_an_index_changed_at_random_loads_or_is_refused(saved: Path, tmp_path: Path) -> None:
    """Thousands of lies that nobody thought of: no other error, no memory, no code."""
    whole, told = saved.read_bytes(), json.dumps(read_index(saved))
    random = Random(20240229)
    refused = 0
    honest = parsed_index(saved)
    between = whole[honest.members[0].data.offset - tar.BLOCK : honest.digests.data.offset - tar.BLOCK]
    with little_memory():
        for number in range(1200):
            raw = json.loads(told)
            mutate(raw, random)
            saved.write_bytes(assemble(json.dumps(raw).encode(), between))
            live = {
                "m": {
                    "w": torch.zeros(10),
                    "tied": None,
                    "b": torch.zeros(3).bfloat16(),
                    "z": {},
                    "a": np.zeros(3, ">i2"),
                },
                "n": 0,
            }
            try:
                if number % 3 == 2:
                    with _open_any(saved, True, {}) as archive:
                        restore_state(archive, live, strict=False, types=[Triple])
                else:
                    async_ckpt.load(saved, mmap=number % 3 == 1, verify=number % 2 == 0, types=[Triple])
            except CheckpointError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{error!r} from {json.dumps(raw)}") from error
    assert refused > 600


def test_a_model_and_its_optimizer_restored_from_an_index_changed_at_random(archive: Path) -> None:
    """Restored, or refused; the structure that an optimizer relies on may be a lie as well."""

    def make() -> dict[str, Any]:
        model = nn.Linear(2, 2, bias=False)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    trained = make()
    trained["model"](torch.ones(1, 2)).sum().backward()
    trained["optimizer"].step()
    async_ckpt.save(trained, archive).result()
    whole, told = archive.read_bytes(), json.dumps(read_index(archive))
    honest = parsed_index(archive)
    between = whole[honest.members[0].data.offset - tar.BLOCK : honest.digests.data.offset - tar.BLOCK]
    random = Random(1)
    with little_memory():
        for _ in range(700):
            raw = json.loads(told)
            mutate(raw["skeleton"], random)
            archive.write_bytes(assemble(json.dumps(raw).encode(), between))
            try:
                with _open_any(archive, True, {}) as opened:
                    restore_state(opened, make(), strict=False)
            except CheckpointError:
                pass
            except Exception as error:
                raise AssertionError(f"{error!r} from {json.dumps(raw['skeleton'])}") from error


def test_a_newer_format_is_told_apart_from_damage(saved: Path) -> None:
    whole = saved.read_bytes()
    forge(saved, put("version", 2))
    error = assert_refused(saved, FormatVersionError)
    assert error.version == 2
    assert "install a newer" in str(error)
    saved.write_bytes(whole)
    forge(saved, lambda raw: {"format": "async_ckpt", "version": 99, "all": "different"})
    assert assert_refused(saved, FormatVersionError).version == 99


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other dtype": lambda table: table["w"].update(dtype="I32"),
    "other shape": lambda table: table["w"].update(shape=[2, 5]),
    "other offsets": lambda table: table["w"].update(data_offsets=[0, 40]),
    "name missing": lambda table: table.pop("w") and None,
    "name more": lambda table: table.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    "metadata missing": lambda table: table.pop("__metadata__") and None,
    "row null": lambda table: table.update(w=None),
    "offset infinite": lambda table: table["w"].update(data_offsets=[0, float("inf")]),
    "shape null": lambda table: table["w"].update(shape=None),
    "not a table": lambda table: [1],
}


@pytest.mark.parametrize("lie", HEADERS.values(), ids=HEADERS.keys())
def test_index_and_member_header_must_tell_the_same_story(lie: Any, saved: Path) -> None:
    def change(between: bytearray) -> None:
        length = int.from_bytes(between[tar.BLOCK : tar.BLOCK + 8], "little")
        table = json.loads(between[tar.BLOCK + 8 : tar.BLOCK + 8 + length])
        text = json.dumps(lie(table) or table)
        between[tar.BLOCK + 8 : tar.BLOCK + 8 + length] = text.encode().ljust(length)

    forge(saved, members=change)
    assert_refused(saved, CorruptCheckpointError)
    assert_refused(saved, CorruptCheckpointError, verify=False, mmap=True)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_member_whose_header_length_lies_is_refused(length: int, saved: Path) -> None:
    def change(between: bytearray) -> None:
        between[tar.BLOCK : tar.BLOCK + 8] = length.to_bytes(8, "little")

    forge(saved, members=change)
    with little_memory():
        assert_refused(saved, CorruptCheckpointError)
        assert_refused(saved, CorruptCheckpointError, verify=False)


@pytest.mark.parametrize(
    "size",
    [
        b"\x80" + b"\xff" * 11,
        b"77777777777\0",
        b"-0000001000\0",
        b"-7777777777\0",
        b"\0" * 12,
        b"zzzzzzzzzzz\0",
    ],
    ids=repr,
)
def test_a_tar_header_whose_size_lies_is_refused(size: bytes, saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    data[124:136] = size
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    saved.write_bytes(data)
    with little_memory():
        assert_refused(saved, CorruptCheckpointError)
        assert_refused(saved, CorruptCheckpointError, verify=False)


def test_a_header_that_names_another_first_member_is_refused(saved: Path) -> None:
    data = bytearray(saved.read_bytes())
    _, length = tar.parse_header(data[:512])
    data[:512] = tar.header("model.safetensors", length, mtime=0)
    saved.write_bytes(data)
    assert_refused(saved, CorruptCheckpointError)


# --- pickles -----------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def test_a_pickle_runs_no_code_without_trust(archive: Path, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    async_ckpt.save({"w": torch.ones(1), "bomb": Bomb(marker)}, archive).result()
    for how in ({}, {"verify": False}, {"mmap": True}, {"select": "bomb"}, {"types": [Bomb]}):
        assert_refused(archive, UntrustedObjectError, **how)
        assert not marker.exists()
    assert async_ckpt.load(archive, select="w")["w"].item() == 1
    assert not marker.exists()
    async_ckpt.load(archive, trust=True)
    assert marker.is_dir()


def test_restoring_runs_no_code_without_trust(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    live = {"w": torch.zeros(1), "bomb": None}
    with AsyncCheckpointer(tmp_path / "run") as ckpt:
        ckpt.save({"w": torch.ones(1), "bomb": Bomb(marker)}, step=1).result()
        with pytest.raises(UntrustedObjectError):
            ckpt.restore(live)
        assert not marker.exists()
        assert live["w"].item() == 0
        assert ckpt.restore(live, trust=True) == 1
    assert marker.is_dir()


def objects_swapped(path: Path, pickled: bytes) -> None:
    """The archive with another `objects.pt`, its size and digests made right."""
    honest = parsed_index(path)
    data = path.read_bytes()
    told = honest.member(index.OBJECTS)
    assert told is not None
    raw = read_index(path)
    raw["members"][-1][1] = len(pickled)
    between = data[honest.members[0].data.offset - tar.BLOCK : told.data.offset - tar.BLOCK]
    between += (
        tar.header(index.OBJECTS, len(pickled), mtime=0) + pickled + bytes(tar.padding_after(len(pickled)))
    )
    path.write_bytes(assemble(json.dumps(raw).encode(), between))


def torch_saved(value: Any, **how: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()


PICKLES = {
    "empty": b"",
    "garbage": b"\x80\x04garbage",
    "zip of nothing": b"PK\x05\x06" + bytes(18),
    "not a list": torch_saved({"a": 1}),
    "an empty list": torch_saved([]),
    "cut": torch_saved([{1, 2}])[:-30],
    "old format, cut": torch_saved([{1, 2}], _use_new_zipfile_serialization=False)[:20],
}


@pytest.mark.parametrize("pickled", PICKLES.values(), ids=PICKLES.keys())
@pytest.mark.parametrize("trust", [False, True])
def test_objects_that_cannot_be_loaded_are_a_checkpoint_error(
    pickled: bytes, trust: bool, saved: Path
) -> None:
    objects_swapped(saved, pickled)
    assert_refused(saved, trust=trust)
    assert difference(async_ckpt.load(saved, select="m")["m"], STATE["m"]) is None


def test_objects_put_in_their_place_load(saved: Path) -> None:
    """So what is refused above is refused for what it is."""
    objects_swapped(saved, torch_saved([{3}]))
    assert async_ckpt.load(saved)["seen"] == {3}


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
    extent = next(t.extent for t in parsed_index(path).tensors if t.dotted == "first")
    flip(path, extent.end - 1)


def test_the_newest_step_that_is_not_damaged_is_restored(run: Path) -> None:
    damage_last_block_of_data(run, 3)
    live = big_state(0)
    with (
        AsyncCheckpointer(run) as ckpt,
        pytest.warns(RuntimeWarning, match="step 3 is passed over.*block"),
    ):
        assert ckpt.restore(live) == 2
    assert difference(live, big_state(2)) is None


def test_every_damaged_step_is_passed_over_with_a_warning_of_its_own(run: Path) -> None:
    damage_last_block_of_data(run, 3)
    (path,) = (run / "step_00000002").glob("*.tar")
    path.write_bytes(path.read_bytes()[:5000])
    live = big_state(0)
    with AsyncCheckpointer(run) as ckpt, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert ckpt.restore(live) == 1
    assert [str(w.message).split(" is passed over")[0] for w in seen] == ["step 3", "step 2"]
    assert difference(live, big_state(1)) is None


def test_when_all_steps_are_damaged_the_error_is_raised(run: Path) -> None:
    for step in (1, 2, 3):
        damage_last_block_of_data(run, step)
    with AsyncCheckpointer(run) as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CorruptCheckpointError) as caught:
            ckpt.restore(big_state(0))
    assert caught.value.partly_overwritten


def test_a_named_step_that_is_damaged_says_whether_live_state_was_touched(run: Path) -> None:
    damage_last_block_of_data(run, 3)
    live = big_state(0)
    with AsyncCheckpointer(run) as ckpt:
        with pytest.raises(CorruptCheckpointError, match="partly overwritten") as caught:
            ckpt.restore(live, step=3)
        assert caught.value.partly_overwritten is True
        assert live["n"] == 0
        assert ckpt.restore(live, step=2) == 2
    assert difference(live, big_state(2)) is None


def test_verifying_first_leaves_live_state_untouched(run: Path) -> None:
    damage_last_block_of_data(run, 3)
    live = big_state(0)
    with AsyncCheckpointer(run) as ckpt:
        with pytest.raises(CorruptCheckpointError) as caught:
            ckpt.restore(live, step=3, verify="first")
        assert caught.value.partly_overwritten is False
        assert difference(live, big_state(0)) is None
        assert ckpt.restore(live, step=2, verify="first") == 2
    assert difference(live, big_state(2)) is None


def test_damage_in_the_index_touches_nothing(run: Path) -> None:
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


def assert_step_2_is_passed_over(root: Path) -> None:
    """Whatever is wrong with it, by its name it is corrupt, and without one the older step is taken."""
    live = {"w": torch.zeros(3)}
    with AsyncCheckpointer(root) as ckpt:
        with pytest.raises(CorruptCheckpointError):
            ckpt.load(2)
        with pytest.raises(CorruptCheckpointError):
            async_ckpt.load(root / "step_00000002")
        with pytest.raises(CorruptCheckpointError):
            ckpt.restore(live, step=2)
        assert not live["w"].any()
        with pytest.warns(RuntimeWarning, match="step 2 is passed over"):
            assert ckpt.restore(live) == 1
    assert live["w"].tolist() == [1, 1, 1]


def test_an_archive_that_its_manifest_names_and_that_is_gone_is_corrupt(small_run: Path) -> None:
    (path,) = (small_run / "step_00000002").glob("*.tar")
    path.unlink()
    assert_step_2_is_passed_over(small_run)


@pytest.mark.parametrize("verify", [True, False])
def test_an_archive_of_another_size_than_its_manifest_says_is_corrupt(verify: bool, small_run: Path) -> None:
    (path,) = (small_run / "step_00000002").glob("*.tar")
    path.write_bytes(path.read_bytes() + bytes(4096))
    with AsyncCheckpointer(small_run) as ckpt, pytest.raises(CorruptCheckpointError, match="manifest says"):
        ckpt.load(2, verify=verify)
    assert_step_2_is_passed_over(small_run)


def test_a_good_archive_of_another_attempt_is_not_taken_for_the_one_named(small_run: Path) -> None:
    (first,) = (small_run / "step_00000001").glob("*.tar")
    (second,) = (small_run / "step_00000002").glob("*.tar")
    assert first.stat().st_size == second.stat().st_size
    second.write_bytes(first.read_bytes())
    assert_step_2_is_passed_over(small_run)


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
    "name above": lambda m: m["archives"][0].update(name="../x.tar"),
    "name in step 1": lambda m: m["archives"][0].update(name="../step_00000001/manifest.json"),
    "name absolute": lambda m: m["archives"][0].update(name="/etc/passwd"),
    "name dots": lambda m: m["archives"][0].update(name=".."),
    "name empty": lambda m: m["archives"][0].update(name=""),
    "name null": lambda m: m["archives"][0].update(name=None),
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
    "world size null": lambda m: m.update(world_size=None),
    "created list": lambda m: m.update(created=[]),
    "created huge": lambda m: m.update(created=10**400),
}


@pytest.mark.parametrize("data", MANIFESTS.values(), ids=MANIFESTS.keys())
def test_a_manifest_of_garbage_is_a_corrupt_step(data: bytes, small_run: Path) -> None:
    (small_run / "step_00000002" / "manifest.json").write_bytes(data)
    assert_step_2_is_passed_over(small_run)


@pytest.mark.parametrize("lie", CHANGES.values(), ids=CHANGES.keys())
def test_a_manifest_that_lies_is_a_corrupt_step(lie: Any, small_run: Path) -> None:
    path = small_run / "step_00000002" / "manifest.json"
    told = json.loads(path.read_text())
    lie(told)
    path.write_text(json.dumps(told))
    assert_step_2_is_passed_over(small_run)


def test_a_manifest_from_the_future_is_told_apart_from_damage(small_run: Path) -> None:
    path = small_run / "step_00000002" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))
    with AsyncCheckpointer(small_run) as ckpt:
        for read in (
            ckpt.load,
            lambda: ckpt.restore({"w": torch.zeros(3)}),
            lambda: async_ckpt.load(small_run),
        ):
            with pytest.raises(FormatVersionError) as caught:
                read()
            assert caught.value.version == 3


def test_a_damaged_step_of_a_module_and_its_optimizer_is_healed_by_the_older_one(tmp_path: Path) -> None:
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
        flip(path, parsed_index(path).tensors[-1].extent.offset)
        with pytest.warns(RuntimeWarning, match="step 2 is passed over"):
            assert ckpt.restore({"model": model, "optimizer": optimizer}) == 1
    assert difference(model.state_dict(), kept[1]["model"]) is None
    assert difference(optimizer.state_dict(), kept[1]["optimizer"]) is None
