"""The kinds of files that other programs write, recognized by their first bytes.

In: the first bytes of a file, and for a zip the names of its members. Out: a text about the kind, and the program that
reads it. Knows nothing of: the rest of the file, which may be damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from ...core.format import index, safetensors, tar

# Enough bytes for every kind: for a tar header, and for the name of the first member of a zip.
NEEDED_BYTES: Final = 1024
_OWN_MEMBER: Final = f"{index.MEMBER}\0".encode()
_ZIP: Final = b"PK\x03\x04"
# In the header of a zip's member: the field with the length of its name, and the offset of the name.
_ZIP_NAME_BYTES: Final = slice(26, 28)
_ZIP_NAME: Final = 30
# The pickled number at the start of torch.save's files before torch 1.6.
_LEGACY_TORCH: Final = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_CONVERT: Final = "async-ckpt convert makes an archive of it"
_LOAD_BY_TORCH: Final = f"torch.load reads it, and {_CONVERT}"


class ForeignFile(NamedTuple):
    """A file that this library has not written: a short name of its kind, a text about it, and what reads it.

    `kind` is "torch" (torch.save), "legacy torch" (before torch 1.6), "torchscript", "dcp item", "safetensors",
    "numpy", "hdf5", "gguf", "lfs pointer", "zip", "tar", "compressed", "pickle", "html", "json" or "text".
    """

    kind: str
    words: str
    advice: str

    def __str__(self) -> str:
        return f"{self.words}; {self.advice}"


_TORCH: Final = ForeignFile("torch", "a zip file, as torch.save writes", _LOAD_BY_TORCH)
_LEGACY: Final = ForeignFile("legacy torch", "a file of torch.save of before torch 1.6", _LOAD_BY_TORCH)
_SCRIPT: Final = ForeignFile("torchscript", "a TorchScript file, with a model's code", "torch.jit.load reads it")
_EXPORTED: Final = ForeignFile("zip", "a program of torch.export", "torch.export.load reads it")
_PACKAGE: Final = ForeignFile("zip", "a package of torch.package", "torch.package.PackageImporter reads it")
_ITEM: Final = ForeignFile(
    "dcp item", "a piece of a checkpoint of torch.distributed.checkpoint", "load its folder with that"
)
_SAFETENSORS: Final = ForeignFile(
    "safetensors", "a safetensors file, which has no digests", f"async_ckpt.load reads it, and {_CONVERT}"
)
_NPZ: Final = ForeignFile("numpy", "a file of numpy.savez", "numpy.load reads it")
_KERAS: Final = ForeignFile("zip", "a model of Keras", "keras.models.load_model reads it")
_OTHER_ZIP: Final = ForeignFile("zip", "a zip file", "extract it, and give a file in it")
_TAR: Final = ForeignFile("tar", "another tar", "use unpack() or extract()")
_PICKLE: Final = ForeignFile("pickle", "a pickle", "pickle.load reads it, if you know where it comes from")
_HTML: Final = ForeignFile("html", "a page of HTML", "the download gave a page instead of the file; fetch it again")
_JSON: Final = ForeignFile("json", "a text of JSON", "give the checkpoint that it describes")
_TEXT: Final = ForeignFile("text", "a text file", "give a checkpoint")


def _compressed(by: str, tool: str) -> ForeignFile:
    return ForeignFile("compressed", by, f"decompress it first, by {tool}")


_BY_MAGIC: Final[tuple[tuple[bytes, ForeignFile], ...]] = (
    (_LEGACY_TORCH, _LEGACY),
    (
        b"version https://git-lfs.github.com/",
        ForeignFile("lfs pointer", "a pointer of Git LFS, not the file itself", "fetch the file by `git lfs pull`"),
    ),
    (
        b"GGUF",
        ForeignFile("gguf", "a GGUF file, as llama.cpp reads", "convert the model's safetensors files instead"),
    ),
    (b"\x89HDF\r\n\x1a\n", ForeignFile("hdf5", "an HDF5 file, as Keras writes", "h5py reads it")),
    (b"\x93NUMPY", ForeignFile("numpy", "a file of numpy.save", "numpy.load reads it")),
    (b"PK\x05\x06", ForeignFile("zip", "a zip file without a member", "fetch it again")),
    (b"\x1f\x8b", _compressed("gzip", "gunzip")),
    (b"\x28\xb5\x2f\xfd", _compressed("zstd", "unzstd")),
    (b"BZh", _compressed("bzip2", "bunzip2")),
    (b"\xfd7zXZ\0", _compressed("xz", "unxz")),
    (b"\x04\x22\x4d\x18", _compressed("lz4", "unlz4")),
    (b"7z\xbc\xaf\x27\x1c", _compressed("a 7z archive", "7z")),
)


def foreign_file(
    begin: bytes | bytearray | memoryview, *, path: str = "", members: Iterable[str] = ()
) -> ForeignFile | None:
    """The kind of a file that another program has written; None for an unknown kind, and for our own archives.

    Also None for an empty file, and for an archive with a damaged header.

    Args:
        begin: the first `NEEDED_BYTES` of the file, or the whole of a shorter one.
        path: its path or URL. The suffix identifies the pieces of a DCP checkpoint.
        members: the names in a zip, if they are known; only they distinguish TorchScript from torch.save.
    """
    head = bytes(begin[:NEEDED_BYTES])
    beginnings = (_OWN_MEMBER, _ZIP, *(magic for magic, _ in _BY_MAGIC))
    if any(begin.startswith(head) for begin in beginnings) or (len(head) < tar.BLOCK and head.startswith(_OWN_MEMBER)):
        return None  # perhaps our own archive, cut off
    if head.startswith(_ZIP):
        return _ITEM if path.endswith(".distcp") else _kind_of_zip([_first_member(head), *members])
    if path.endswith("/.metadata") and _is_pickle(head):
        return _ITEM
    kind = next((kind for magic, kind in _BY_MAGIC if head.startswith(magic)), None)
    return kind or next((kind for is_of, kind in _BY_TEST if is_of(head)), None)


def _kind_of_zip(members: Iterable[str]) -> ForeignFile:
    names = [name for name in members if name]
    if any(name.count("/") == 1 and name.endswith("/constants.pkl") for name in names):
        return _SCRIPT  # it contains the code of a model, which torch.save would lose
    inner = {name.partition("/")[2] for name in names}
    if "archive_format" in inner or any(name.startswith("data/weights/") for name in inner):
        return _EXPORTED
    if ".data/extern_modules" in inner:
        return _PACKAGE
    if inner & {"data.pkl", ".format_version", "data/0"}:
        return _TORCH
    if names and all(name.endswith(".npy") for name in names):
        return _NPZ
    if {"metadata.json", "config.json", "model.weights.h5"} & {*names}:
        return _KERAS
    return _OTHER_ZIP


def _first_member(head: bytes) -> str:
    num_bytes = int.from_bytes(head[_ZIP_NAME_BYTES], "little")
    return head[_ZIP_NAME : _ZIP_NAME + num_bytes].decode(errors="replace")


def _is_pickle(head: bytes) -> bool:
    """True for a pickle of protocol 2 or later, which begins with the protocol's number."""
    return head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5") and len(head) > 2


def is_tar_header(block: bytes) -> bool:
    """True for an undamaged header of a tar."""
    with suppress(ValueError):
        return len(block) == tar.BLOCK and tar.has_checksum(block)
    return False


def _is_other_tar(head: bytes) -> bool:
    """True for an undamaged header of a tar that does not begin with our index, not even with a damaged one."""
    block, text = head[: tar.BLOCK], head[tar.BLOCK :]
    begin = text[: len(index.BEGIN)]
    num_same = sum(one == ours for one, ours in zip(begin, index.BEGIN, strict=False))
    has_index = index.FORMAT.encode() in text or 2 * num_same >= len(begin)
    return is_tar_header(block) and not (block.startswith(_OWN_MEMBER) or has_index)


def _is_text(head: bytes) -> bool:
    """True for text in UTF-8, whose last character may be cut off."""
    try:
        text = head.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3 or len(head) < NEEDED_BYTES:
            return False
        text = head[: error.start].decode("utf-8-sig")
    return bool(text.strip()) and all(one.isprintable() or one in "\t\n\r\f" for one in text)


def _is_html(head: bytes) -> bool:
    return head.lstrip().lower().startswith((b"<!doctype html", b"<html"))


def _is_json(head: bytes) -> bool:
    return _is_text(head) and head.lstrip()[:1] in (b"{", b"[")


# The first match counts.
_BY_TEST: Final[tuple[tuple[Callable[[bytes], bool], ForeignFile], ...]] = (
    (safetensors.begins, _SAFETENSORS),
    (_is_pickle, _PICKLE),
    (_is_other_tar, _TAR),
    (_is_html, _HTML),
    (_is_json, _JSON),
    (_is_text, _TEXT),
)
