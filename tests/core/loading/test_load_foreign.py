"""Safetensors files of any program, folders of Hugging Face and extracted archives load like archives."""

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import flip, little_memory
from damage import NUM_LIES, STATE, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from slices import PART, examples
from states import difference, noise
from torch.distributed import checkpoint as dcp

import async_ckpt
from async_ckpt import (
    CheckpointError,
    CorruptCheckpointError,
    ForeignFileError,
    NotCommittedError,
    UntrustedObjectError,
)
from async_ckpt.core.spec import BLOCK_BYTES, DTYPES, MIB
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.face.foreign.dcp_folder import OpenDcp

WEIGHTS: dict[str, torch.Tensor] = {
    "model.layers.0.weight": torch.arange(12.0).view(3, 4),
    "model.layers.0.bias": torch.ones(3, dtype=torch.bfloat16),
    "lm_head.weight": torch.arange(5, dtype=torch.int64),
    "flag": torch.tensor([True, False, True]),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 7),
}


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """As Hugging Face writes them."""
    save_file(WEIGHTS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def write(path: Path, table: Any, data: bytes = b"", *, length: int | None = None, pad: int = 0) -> Path:
    """A safetensors file of just this header."""
    head = table if isinstance(table, bytes) else json.dumps(table).encode()
    head += b" " * pad
    path.write_bytes((len(head) if length is None else length).to_bytes(8, "little") + head + data)
    return path


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert difference(dict(sorted(a.items())), dict(sorted(b.items()))) is None


def refused(path: Path, match: str | None = None, **how: Any) -> CorruptCheckpointError:
    with pytest.raises(CorruptCheckpointError, match=match) as caught:
        async_ckpt.load(path, **how)
    return caught.value


# --- one file ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"mmap": True}, {"verify": False}, {"map_location": "cpu"}], ids=str)
def test_a_safetensors_file_is_a_flat_dict_of_its_tensors(weights, how):
    loaded = async_ckpt.load(weights, **how)
    assert type(loaded) is dict
    same(loaded, WEIGHTS)


def test_a_part_of_a_safetensors_file_is_selected_by_name_and_by_glob(weights):
    assert set(async_ckpt.load(weights, select="model.layers.0")) == {
        "model.layers.0.weight", "model.layers.0.bias",
    }  # fmt: skip
    assert set(async_ckpt.load(weights, select=["*.weight", "flag"])) == {
        "model.layers.0.weight", "lm_head.weight", "flag",
    }  # fmt: skip
    with pytest.raises(KeyError, match="matches nothing"):
        async_ckpt.load(weights, select="optimizer")


DTYPES_OF_SAFETENSORS = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8",
    "bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    "complex64",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES_OF_SAFETENSORS)
@pytest.mark.parametrize("mmap", [False, True])
def test_every_dtype_that_safetensors_writes_is_read(tmp_path, dtype, mmap):
    items = torch.frombuffer(bytearray(noise(48 * DTYPES[dtype][0])), dtype=torch.uint8)
    if dtype == "bool":
        items &= 1
    tensor = items.view(getattr(torch, dtype)).view(3, 16)
    save_file({"w": tensor}, tmp_path / "x.safetensors")
    loaded = async_ckpt.load(tmp_path / "x.safetensors", mmap=mmap)["w"]

    assert (loaded.dtype, loaded.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("pad", range(9))
@pytest.mark.parametrize("mmap", [False, True])
def test_tensors_of_any_alignment_are_read(tmp_path, pad, mmap):
    table = {
        "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "w": {"dtype": "F64", "shape": [2], "data_offsets": [3, 19]},
    }
    numbers = torch.tensor([1.5, -2.0], dtype=torch.float64)
    path = write(tmp_path / "x", table, b"\1\2\3" + bytes(numbers.view(torch.uint8).numpy()), pad=pad)
    loaded = async_ckpt.load(path, mmap=mmap)

    assert torch.equal(loaded["w"], numbers)
    assert loaded["odd"].tolist() == [1, 2, 3]
    assert loaded["w"].data_ptr() % 8 == 0


def test_a_mapped_tensor_is_a_view_of_the_file_and_writes_stay_in_this_process(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.zeros(1000)}, path)
    loaded = async_ckpt.load(path, mmap=True)["w"]
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(torch.tensor([7.0]).numpy().tobytes())
    assert loaded[-1] == 7
    loaded.fill_(1)
    assert load_file(path)["w"][0] == 0


def test_names_that_metadata_ties_to_a_tensor_come_back_tied(tmp_path):
    """As `safetensors.torch.save_model` and an archive's own members have them."""
    save_file(
        {"embed": torch.ones(3)},
        tmp_path / "x",
        metadata={"format": "pt", "head": "embed", "author": "nobody"},
    )
    loaded = async_ckpt.load(tmp_path / "x")
    assert list(loaded) == ["embed", "head"]
    assert loaded["head"].data_ptr() == loaded["embed"].data_ptr()


def test_a_member_taken_out_of_an_archive_loads_alone(archive, tmp_path):
    async_ckpt.save(STATE, archive).result()
    async_ckpt.files.extract(archive, tmp_path / "folder")
    loaded = async_ckpt.load(tmp_path / "folder" / "m.safetensors")
    assert torch.equal(loaded["w"], STATE["m"]["w"])
    assert loaded["tied"].data_ptr() == loaded["w"].data_ptr()


def test_a_header_of_more_than_a_block_is_read(tmp_path):
    tensors = {f"{'n' * 200}.{i}": torch.tensor([i]) for i in range(18_000)}
    save_file(tensors, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size > BLOCK_BYTES
    loaded = async_ckpt.load(tmp_path / "x", select=f"{'n' * 200}.1700?")
    assert {int(tensor) for tensor in loaded.values()} == set(range(17000, 17010))


def test_a_file_without_tensors_is_an_empty_dict(tmp_path):
    assert async_ckpt.load(write(tmp_path / "x", {})) == {}
    assert async_ckpt.load(write(tmp_path / "x", {"__metadata__": {"format": "pt"}})) == {}


@pytest.mark.parametrize("engine", ["obstore", "s3fs"])
def test_a_safetensors_file_of_a_store_is_read(bucket, weights, engine):
    bucket.write(["a/model.safetensors"], weights.read_bytes())
    how = {"engine": engine}
    same(async_ckpt.load(bucket.place("a/model.safetensors", **how)), WEIGHTS)
    same(async_ckpt.load(bucket.place("a", **how)), WEIGHTS)
    with pytest.raises(ValueError, match="leave mmap out"):
        async_ckpt.load(bucket.place("a/model.safetensors", **how), mmap=True)


def test_of_a_safetensors_file_the_header_and_the_size_are_verified(weights):
    report = async_ckpt.verify(weights)
    assert report.num_bytes == weights.stat().st_size
    assert "its header was compared with its size, but not its tensors" in str(report)
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(CorruptCheckpointError, match="truncated"):
        async_ckpt.verify(weights)


# --- folders of Hugging Face -------------------------------------------------------------------------------------


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(60, 60), torch.nn.Linear(60, 60), torch.nn.BatchNorm1d(60))


@pytest.mark.parametrize("max_shard_bytes", [10**9, 15_000])
@pytest.mark.parametrize("mmap", [False, True])
def test_what_export_hf_has_written_loads(tmp_path, model, max_shard_bytes, mmap):
    async_ckpt.export_hf(model, tmp_path / "hf", max_shard_bytes=max_shard_bytes).result()
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == (1 if max_shard_bytes > 10**6 else 3)
    loaded = async_ckpt.load(tmp_path / "hf", mmap=mmap)
    same(loaded, dict(model.state_dict()))
    assert set(async_ckpt.load(tmp_path / "hf", select="*.bias")) == {"0.bias", "1.bias", "2.bias"}


def test_shards_of_a_store_load(bucket, model):
    async_ckpt.export_hf(model, bucket.place("hf"), max_shard_bytes=15_000).result()
    same(async_ckpt.load(bucket.place("hf")), dict(model.state_dict()))


def sharded(folder: Path, weight_map: Any) -> Path:
    """Two shards, and an index of this."""
    folder.mkdir()
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.full((2,), 2.0), "c": torch.full((2,), 3.0)}, folder / "model-2.safetensors")
    text = weight_map if isinstance(weight_map, str) else json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.mark.parametrize("of_b", [1, 2])
def test_a_tensor_that_two_shards_have_comes_from_the_one_that_the_index_names(tmp_path, of_b):
    files = {"a": "model-1.safetensors", "b": f"model-{of_b}.safetensors", "c": "model-2.safetensors"}
    loaded = async_ckpt.load(sharded(tmp_path / "hf", files))
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        "a": [0, 0], "b": [of_b, of_b], "c": [3, 3],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({"a": "model-1.safetensors", "x": "model-1.safetensors"}, r"lists 'x', which are missing"),
        ({"a": "model-3.safetensors"}, r"model-3\.safetensors: it is missing"),
        ({"a": "../model-1.safetensors"}, "is not the name of a file beside it"),
        ({"a": "/etc/passwd"}, "is not the name of a file beside it"),
        ({"a": ".."}, "is not the name of a file beside it"),
        ({"a": "model.safetensors.index.json"}, "it is not a safetensors file"),
        ({"a": 1}, "is not the name of a file beside it"),
        ({"a": ["model-1.safetensors"]}, "it is not an index of safetensors files"),
        ({"a": 1, "b": "model-1.safetensors"}, "it is not an index of safetensors files"),
        ({}, "it names no file"),
        (None, "it is not an index of safetensors files"),
        ([], "it names no file"),
        ("{", "it is not an index of safetensors files"),
        ("[]", "it is not an index of safetensors files"),
        ("[" * 100_000, "it is not an index of safetensors files"),
    ],
    ids=repr,
)
def test_an_index_of_shards_that_lies_is_refused(tmp_path, weight_map, match):
    refused(sharded(tmp_path / "hf", weight_map), match)


def test_shards_that_are_not_selected_may_be_missing(tmp_path):
    files = {"a": "model-1.safetensors", "c": "model-2.safetensors"}
    folder = sharded(tmp_path / "hf", files)
    (folder / "model-2.safetensors").unlink()
    assert set(async_ckpt.load(folder, select="a")) == {"a"}
    for select in ("c", ["a", "c"], "*", None):
        refused(folder, r"model-2\.safetensors: it is missing, though", select=select)
    with pytest.raises(KeyError, match="matches nothing"):
        async_ckpt.load(folder, select="x")


def test_a_folder_of_several_safetensors_files_without_an_index_says_so(tmp_path):
    (sharded(tmp_path / "hf", {}) / "model.safetensors.index.json").unlink()
    with pytest.raises(NotCommittedError, match=r"load one of them: model-1\.safetensors, model-2"):
        async_ckpt.load(tmp_path / "hf")


def test_pieces_of_torch_distributed_checkpoint_are_not_taken_for_a_model(weights):
    (weights.parent / ".metadata").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata cannot be trusted"):
        async_ckpt.load(weights.parent)


def of_torchs_writer(folder: Path, *, distributed: bool) -> list[Path]:
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=distributed)
    dcp.save({"w": torch.ones(4)}, storage_writer=writer)
    return sorted(folder.glob("*.safetensors"))


def test_pieces_of_tensors_in_safetensors_files_are_refused_whatever_they_are_called(tmp_path):
    (file,) = of_torchs_writer(tmp_path / "whole", distributed=False)
    for path in (file, file.parent):
        assert async_ckpt.load(path)["w"].tolist() == [1, 1, 1, 1]

    (file,) = of_torchs_writer(tmp_path / "pieces", distributed=True)
    for path in (file, file.parent):
        with pytest.raises(ForeignFileError, match=r"pieces of tensors, .* with its HuggingFaceStorageReader"):
            async_ckpt.load(path)
    shutil.copy(file, file.with_name(file.name.replace("shard-00001", "shard-00002")))
    with pytest.raises(NotCommittedError, match="pieces of tensors"):
        async_ckpt.load(file.parent)
    second = file.with_name("x.safetensors")
    second.write_bytes(file.read_bytes().replace(b'"saved_offsets\\": [0]', b'"saved_offsets\\": [4]'))
    with pytest.raises(ForeignFileError, match="pieces of tensors"):
        async_ckpt.load(second)


def test_files_of_torch_say_what_loads_them(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(NotCommittedError, match=r"but pytorch_model\.bin, which torch\.load reads"):
        async_ckpt.load(tmp_path)
    torch.save({"w": torch.ones(1)}, tmp_path / "__0_0.distcp")
    with pytest.raises(ForeignFileError, match=r"a piece of a checkpoint of torch\.distributed\.checkpoint; load its"):
        async_ckpt.load(tmp_path / "__0_0.distcp")


def test_a_header_that_is_no_table_of_tensors_is_told_in_words(tmp_path):
    for table in ({"w": 5}, {"w": {"dtype": "F32"}}):
        error = refused(write(tmp_path / "x.safetensors", table), "not a table of tensors, each with dtype, shape and")
        assert "Error" not in str(error)


# --- extracted archives ------------------------------------------------------------------------------------------


def extracted(state: Any, tmp_path: Path, by: str = "tar") -> Path:
    async_ckpt.save(state, tmp_path / "saved.tar").result()
    folder = tmp_path / "folder"
    if by == "extract":
        async_ckpt.files.extract(tmp_path / "saved.tar", folder)
    else:
        folder.mkdir()
        subprocess.run([by, "-xf", tmp_path / "saved.tar", "-C", folder], check=True)
    (tmp_path / "saved.tar").unlink()
    return folder


@pytest.mark.parametrize("by", ["tar", "bsdtar", "extract"])
@pytest.mark.parametrize("verify", [True, False])
def test_the_folder_of_an_extracted_archive_is_the_state(tmp_path, by, verify):
    if by != "extract" and shutil.which(by) is None:
        pytest.skip(f"no {by} here")
    loaded = async_ckpt.load(extracted(STATE, tmp_path, by), verify=verify)
    assert difference(loaded, STATE) is None
    assert loaded["m"]["tied"].data_ptr() == loaded["m"]["w"].data_ptr()


def large_state() -> dict[str, Any]:
    return {
        group: {f"w{i}": torch.frombuffer(bytearray(noise(3 * MIB, i)), dtype=torch.uint8) for i in range(5)}
        for group in ("model", "optimizer")
    }


def test_an_extracted_archive_of_many_blocks_and_members_is_the_state(tmp_path):
    folder = extracted(large_state(), tmp_path)
    assert difference(async_ckpt.load(folder), large_state()) is None
    part = async_ckpt.load(folder, select="optimizer.w3")
    assert difference(part, {"optimizer": {"w3": large_state()["optimizer"]["w3"]}}) is None


@pytest.mark.parametrize("verify", [True, False])
def test_members_of_an_extracted_archive_that_are_not_selected_may_be_missing(tmp_path, verify):
    folder = extracted({**large_state(), "object": Thing()}, tmp_path)
    for lost in ("optimizer.safetensors", "objects.pt"):
        (folder / lost).unlink()
    assert difference(async_ckpt.load(folder, select="model", verify=verify), {"model": large_state()["model"]}) is None
    for select, lost in (("optimizer.w1", "optimizer.safetensors"), ("object", "objects.pt")):
        refused(folder, f"{lost}: it is missing, though index.json names it", select=select, verify=verify)
    flip(folder / "model.safetensors", 9 * MIB)
    if verify:
        refused(folder, "does not match its digest", select="model")


def test_damage_in_an_extracted_member_is_found_in_every_block_without_a_header(tmp_path):
    folder = extracted(large_state(), tmp_path)
    for offset in (5 * MIB, 9 * MIB):
        flip(folder / "model.safetensors", offset)
        refused(folder, "does not match its digest; damaged: model.safetensors")
        async_ckpt.load(folder, verify=False)
        async_ckpt.load(folder, select="optimizer")
        flip(folder / "model.safetensors", offset)
    async_ckpt.load(folder)


HARM: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a member is missing": (lambda folder: (folder / "m.safetensors").unlink(), "it is missing, though"),
    "a member is a folder": (
        lambda folder: ((folder / "m.safetensors").unlink(), (folder / "m.safetensors").mkdir()),
        "it is not a file",
    ),
    "a member is cut short": (lambda folder: os.truncate(folder / "m.safetensors", 100), r"100 bytes, but index\.json"),
    "objects are cut short": (lambda folder: os.truncate(folder / "objects.pt", 100), r"100 bytes, but index\.json"),
    "a header is damaged": (lambda folder: flip(folder / "m.safetensors", 20), "m.safetensors"),
    "the digests are damaged": (lambda folder: flip(folder / "digests.json", 150, 1), "does not match its own digest"),
    "the index is of something else": (lambda folder: (folder / "index.json").write_text("{}"), "not an async_ckpt index"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARM)
def test_an_extracted_archive_that_is_damaged_is_refused(tmp_path, name):
    harm, match = HARM[name]
    folder = extracted(STATE, tmp_path)
    harm(folder)
    refused(folder, match)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "..", "a/b", "", "C:x"])
def test_an_extracted_index_names_only_what_lies_beside_it(tmp_path, name):
    folder = extracted(STATE, tmp_path)
    (tmp_path / "secret").write_bytes((folder / "m.safetensors").read_bytes())
    raw = json.loads((folder / "index.json").read_text())
    raw["members"][0][0] = name
    (folder / "index.json").write_text(json.dumps(raw))
    refused(folder, "is not the name of a file beside it")


def test_a_member_of_an_extracted_index_with_a_long_name_is_refused(tmp_path):
    folder = extracted(STATE, tmp_path)
    raw = json.loads((folder / "index.json").read_text())
    raw["members"][0][0] = "m" * 150
    (folder / "index.json").write_text(json.dumps(raw))
    (folder / "m.safetensors").rename(folder / ("m" * 150))
    refused(folder, "too long for the name of a member")


def test_an_extracted_archive_is_not_unpickled_without_trust(tmp_path):
    folder = extracted({"w": torch.ones(2), "object": Thing()}, tmp_path)
    with pytest.raises(UntrustedObjectError):
        async_ckpt.load(folder)
    assert isinstance(async_ckpt.load(folder, trust=True)["object"], Thing)


class Thing:
    pass


def test_an_extracted_archive_cannot_be_mapped(tmp_path):
    with pytest.raises(ValueError, match="extracted; leave mmap out"):
        async_ckpt.load(extracted(STATE, tmp_path), mmap=True)


def test_an_extracted_archive_is_verified_as_an_archive_only(tmp_path):
    with pytest.raises(NotCommittedError, match="only the archive itself can be verified"):
        async_ckpt.verify(extracted(STATE, tmp_path))


def test_an_extracted_archive_of_a_store_loads(bucket, tmp_path):
    for path in extracted(STATE, tmp_path).iterdir():
        bucket.write([f"folder/{path.name}"], path.read_bytes())
    loaded = async_ckpt.load(bucket.place("folder"))
    assert difference(loaded, STATE) is None


def test_the_files_of_a_folder_are_closed_again(tmp_path, monkeypatch):
    opened: list[Any] = []
    closed: list[Any] = []
    real = LocalStorage.open

    def open_(self: LocalStorage, path: str) -> Any:
        reader = real(self, path)
        close = reader.close
        monkeypatch.setattr(reader, "close", lambda: (closed.append(reader), close()))
        opened.append(reader)
        return reader

    folder = extracted(STATE, tmp_path)
    monkeypatch.setattr(LocalStorage, "open", open_)
    async_ckpt.load(folder)
    (folder / "objects.pt").unlink()
    refused(folder)
    assert len(opened) == len(closed) == 5


# --- headers that lie --------------------------------------------------------------------------------------------


def told(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


LIES: dict[str, tuple[Any, bytes]] = {
    "overlap": ({"a": told(), "b": told(offsets=(4, 12))}, bytes(12)),
    "the same bytes twice": ({"a": told(), "b": told()}, bytes(8)),
    "hole at the beginning": ({"a": told(offsets=(4, 12))}, bytes(12)),
    "hole in between": ({"a": told(), "b": told(offsets=(12, 20))}, bytes(20)),
    "bytes behind the last": ({"a": told()}, bytes(9)),
    "out of the file": ({"a": told()}, bytes(7)),
    "far out of the file": ({"a": told(shape=[2**40], offsets=(0, 2**42))}, bytes(8)),
    "no tensors, but bytes": ({}, bytes(1)),
    "begins behind its end": ({"a": told(offsets=(8, 0))}, bytes(8)),
    "negative begin": ({"a": told(offsets=(-8, 0))}, b""),
    "negative shape": ({"a": told(shape=(-1, -2))}, bytes(8)),
    "a shape of another size": ({"a": told(shape=(3,))}, bytes(8)),
    "a huge shape of nothing": ({"a": told(shape=(0, 2**62, 2**62), offsets=(0, 0))}, b""),
    "a long shape": ({"a": told(shape=[1] * 100_000 + [2])}, bytes(8)),
    "a shape of long numbers": ({"a": told(shape=[10**4000] * 50)}, bytes(8)),
    "an unknown dtype": ({"a": told(dtype="F6_E2M3", shape=(8,))}, bytes(8)),
    "a dtype that is a number": ({"a": told(dtype=4)}, bytes(8)),
    "a dtype of torch's name": ({"a": told(dtype="float32")}, bytes(8)),
    "half a pair": ({"a": told(dtype="F4", shape=(17,))}, bytes(8)),
    "a pair without a dimension": ({"a": told(dtype="F4", shape=())}, bytes(8)),
    "offsets of floats": ({"a": told(offsets=(0.0, 8.0))}, bytes(8)),
    "offsets of booleans": ({"a": told(dtype="U8", shape=(1,), offsets=(False, True))}, bytes(1)),
    "offsets of text": ({"a": told(offsets="08")}, bytes(8)),
    "three offsets": ({"a": told(offsets=(0, 8, 8))}, bytes(8)),
    "no offsets": ({"a": {"dtype": "F32", "shape": [2]}}, bytes(8)),
    "a row that is a list": ({"a": []}, bytes(8)),
    "metadata that is a list": ({"__metadata__": ["x"], "a": told()}, bytes(8)),
    "metadata of lists": ({"__metadata__": {"x": ["a"]}, "a": told()}, bytes(8)),
    "a name twice": (b'{"a":%s,"a":%s}' % (2 * (json.dumps(told()).encode(),)), bytes(8)),
    "a key of a row twice": (
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"data_offsets":[0,8]}}',
        bytes(8),
    ),
    "not json": (b"{]", b""),
    "json of something else behind it": (b'{} {"a":1}', b""),
    "not utf-8": (b'{"\xff":1}', b""),
    "nested deeply": (b'{"a":' + b"[" * 100_000, b""),
    "NaN": (b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8)),
    "numbers of thousands of digits": (b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,8]}}' % (b"9" * 5000), bytes(8)),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused_without_taking_memory(name, tmp_path):
    table, data = LIES[name]
    path = write(tmp_path / "x.safetensors", table, data)
    with little_memory():
        for how in ({}, {"mmap": True}, {"select": "a"}):
            error = refused(path, **how)
            assert error.path == str(path)
            assert str(path) in str(error)


@pytest.mark.parametrize("length", [3, 1000, 99_999_999, 100_000_001, 2**40, 2**64 - 1])
def test_a_header_whose_length_lies_is_refused_without_taking_memory(length, tmp_path):
    path = write(tmp_path / "x", {"a": told()}, bytes(8), length=length)
    with little_memory():
        refused(path)


@pytest.mark.parametrize(
    ("num_bytes", "match"),
    [
        (0, "the file is empty"),
        (1, "not an async_ckpt archive"),
        (8, "not an async_ckpt archive"),
        (9, "truncated inside its header"),
        (50, "truncated inside its header"),
        (-1, "describes .*: truncated"),
    ],
)
def test_a_safetensors_file_that_is_cut_short_is_refused(weights, num_bytes, match):
    os.truncate(weights, num_bytes if num_bytes >= 0 else weights.stat().st_size + num_bytes)
    refused(weights, match)


def test_names_that_no_terminal_takes_load_and_are_shown(tmp_path):
    head = json.dumps({"a\ud800": told()}).encode()
    loaded = async_ckpt.load(write(tmp_path / "x", head, bytes(8)))
    assert list(loaded) == ["a\ud800"]
    head = json.dumps({"a\ud800": told(dtype="X")}).encode()
    str(refused(write(tmp_path / "x", head, bytes(8)))).encode()


def test_a_file_changed_at_random_loads_or_is_refused(weights):
    honest = weights.read_bytes()
    length = 8 + int.from_bytes(honest[:8], "little")
    draw = random.Random(PART)
    num_refused = 0
    with little_memory():
        for _ in range(NUM_LIES // 2):
            data = bytearray(honest)
            for _ in range(draw.randint(1, 4)):
                at = draw.randrange(length)
                data[at : at + draw.randint(0, 3)] = bytes(
                    draw.choices(b'0123456789",:[]{}ABCF_ax-e\xff', k=draw.randint(0, 3))
                )
            weights.write_bytes(data)
            error = refusal(lambda: async_ckpt.load(weights, mmap=draw.random() < 0.5))
            assert error is None or isinstance(error, CheckpointError), error
            num_refused += error is not None
    assert num_refused > NUM_LIES // 4


_names = st.sampled_from(["a", "b", "c", "__metadata__"])
_numbers = st.one_of(st.integers(-4, 40), st.just(2**62), st.none(), st.just(1.0))
_rows = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "F4", "BOOL", "C64", "X", None]),
        "shape": st.lists(_numbers, max_size=3),
        "data_offsets": st.lists(_numbers, min_size=1, max_size=3),
    },
)


@settings(max_examples=examples(400), deadline=None)
@given(st.dictionaries(_names, _rows, max_size=3), st.integers(0, 40))
def test_whatever_a_header_says_what_loads_lies_within_the_file(tmp_path_factory, table, num_bytes):
    path = write(tmp_path_factory.getbasetemp() / "any.safetensors", table, bytes(range(num_bytes)))
    try:
        loaded = async_ckpt.load(path)
    except CorruptCheckpointError:
        return
    assert sum(tensor.nbytes for tensor in loaded.values()) == num_bytes


class Odd:
    """Not plain data, so it is pickled."""

    def __init__(self, number: int) -> None:
        self.number = number


def test_pickled_objects_of_dcp_have_equal_digests_if_they_are_equal(tmp_path):
    """So they are compared without being loaded, which would need trust."""
    dcp.save({"w": torch.ones(3), "a": Odd(1), "b": Odd(2), "c": Odd(1)}, checkpoint_id=tmp_path, no_dist=True)

    with ExitStack() as stack:
        archive = OpenDcp(LocalStorage(tmp_path), stack, verify=True)
        _, stored = archive.tree()
        digest_of = archive.object_digests(stored)
        told = {leaf.path[-1]: digest_of[leaf.number] for leaf in stored if leaf.kind == "object"}

    assert sorted(told) == ["a", "b", "c"]
    assert told["a"] == told["c"] != told["b"]
