"""Files of other programs are told by their first bytes, and damage is taken for none of them."""

import bz2
import gzip
import json
import lzma
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import async_ckpt
from async_ckpt.face.foreign.foreign_files import NEEDED_BYTES, foreign_file


def tarred(format_: int, name: str) -> Callable[[Path], Any]:
    def write(path: Path) -> None:
        (path.parent / "member").write_text("hello")
        with tarfile.open(path, "w", format=format_) as file:
            file.add(path.parent / "member", arcname=name)

    return write


def packed(path: Path) -> None:
    with async_ckpt.pack(path) as folder:
        (folder / "weights.txt").write_text("1 2 3")
    folder.handle.result()


def text(value: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(value, encoding="utf-8")


def data(value: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(value)


FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "x.pt": ("torch", lambda path: torch.save({"w": torch.ones(2)}, path)),
    "0.pt": ("torch", lambda path: torch.save(3, path)),
    "old.pt": (
        "legacy torch",
        lambda path: torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False),
    ),
    "x.pt2": (
        "zip",
        lambda path: torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), path),
    ),
    "__0_0.distcp": ("dcp item", lambda path: torch.save({}, path)),
    "x.safetensors": ("safetensors", lambda path: save_file({"w": torch.ones(2)}, path)),
    "x.npy": ("numpy", lambda path: np.save(path, np.ones(3))),
    "x.npz": ("numpy", lambda path: np.savez_compressed(path, a=np.ones(3))),
    "x.h5": ("hdf5", data(b"\x89HDF\r\n\x1a\n" + bytes(500))),
    "x.gguf": ("gguf", data(b"GGUF\3\0\0\0" + bytes(500))),
    "pointer": ("lfs pointer", text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 12\n")),
    "empty.zip": ("zip", lambda path: zipfile.ZipFile(path, "w").close()),
    "pax.tar": ("tar", tarred(tarfile.PAX_FORMAT, "é" * 90)),
    "gnu.tar": ("tar", tarred(tarfile.GNU_FORMAT, "n" * 200)),
    "ustar.tar": ("tar", tarred(tarfile.USTAR_FORMAT, "index.json.old")),
    "packed.tar": ("tar", packed),
    "x.gz": ("compressed", data(gzip.compress(b"1"))),
    "x.bz2": ("compressed", data(bz2.compress(b"1"))),
    "x.xz": ("compressed", data(lzma.compress(b"1"))),
    **{f"{n}.pkl": ("pickle", data(pickle.dumps({"a": [n]}, protocol=n))) for n in range(2, 6)},
    "page": ("html", text("\n<!DOCTYPE html>\n<html>")),
    "x.json": ("json", text(json.dumps({"a": 1}))),
    "x": ("text", text("x")),
    "notes.md": ("text", text("lines, and 雪" * 500)),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_program_is_told_by_its_first_bytes(tmp_path, name):
    kind, write = FILES[name]
    write(tmp_path / name)
    begin = (tmp_path / name).read_bytes()[:NEEDED_BYTES]
    found = foreign_file(begin, path=f"/there/{name}")
    assert (found and found.kind) == kind
    assert str(found)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_told_by_the_names_in_its_zip(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "x.pt")
    begin = (tmp_path / "x.pt").read_bytes()[:NEEDED_BYTES]
    with zipfile.ZipFile(tmp_path / "x.pt") as file:
        found = foreign_file(begin, members=file.namelist())
    assert found is not None
    assert found.kind == "torchscript"


def test_damage_is_no_kind_of_file(tmp_path):
    async_ckpt.save({"w": torch.ones(2)}, tmp_path / "own.tar").result()
    begin = (tmp_path / "own.tar").read_bytes()[:NEEDED_BYTES]
    assert foreign_file(begin) is None
    for offset in range(tarfile.BLOCKSIZE):
        damaged = bytearray(begin)
        damaged[offset] ^= 1 << offset % 8
        assert foreign_file(damaged) is None, offset
    for none in (b"", b"\0" * 600, b"\x80", b" \n", b"PK", b"ind", b"\xff\xfe\xfd" * 400):
        assert foreign_file(none) is None
