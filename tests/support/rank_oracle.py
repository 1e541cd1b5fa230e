"""What several ranks have saved, read by the plainest means: every slice is put where it says that it belongs."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from states import bits_of, open_run

from async_ckpt import Place
from async_ckpt.core.format.index import IndexedTensor, Slice
from async_ckpt.core.loading.archives.archive import OpenArchive
from async_ckpt.core.runs.manifest import Manifest
from async_ckpt.core.runs.receipts import archives_of
from async_ckpt.core.runs.run import Run
from async_ckpt.core.state.names import dtype_named


@dataclass
class Saved:
    """A committed step: its full tensors by dotted path, and the plain rest of the state that each rank has stored."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]
    states: list[Any]
    num_bytes: list[int]  # of tensors, written by each rank


def run_of(root: str | os.PathLike[str] | Place) -> Run:
    return open_run(root)._roots.runs[0]


def saved(root: str | os.PathLike[str] | Place, step: int) -> Saved:
    """Every byte compared with its digest, and every element of every tensor in some archive, or it fails."""
    run = run_of(root)
    made = run.manifest(step)
    told = archives_of(run.storage, run.folder(step), made)
    assert len(told) == made.world_size
    pieces: dict[str, list[tuple[IndexedTensor, Slice, torch.Tensor]]] = {}
    tensors: dict[str, IndexedTensor] = {}
    states, num_bytes = [], []
    for archive in told:
        path = run.root.archive_path(step, archive)
        with run.storage.open(path) as reader:
            opened = OpenArchive(reader, path=path, verify=True)
            assert (opened.digest, reader.num_bytes) == (archive.digest, archive.num_bytes)
            states.append(opened.tree()[0])
            num_bytes.append(0)
            for tensor in opened.index.tensors:
                before = tensors.setdefault(tensor.dotted, tensor)
                assert (tensor.shape, tensor.dtype) == (before.shape, before.dtype), tensor.dotted
                for piece in tensor.slices:
                    data = _read(opened, tensor, piece)
                    pieces.setdefault(tensor.dotted, []).append((tensor, piece, data))
                    num_bytes[-1] += piece.extent.length if tensor.alias_of is None else 0
    return Saved(
        made,
        {name: _joined(tensor, pieces.get(name, [])) for name, tensor in tensors.items()},
        states,
        num_bytes,
    )


def _read(archive: OpenArchive, tensor: IndexedTensor, piece: Slice) -> torch.Tensor:
    made = torch.empty(piece.box.sizes, dtype=dtype_named(tensor.dtype))
    data = archive.read(piece.extent)
    if data:
        bits_of(made).copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return made


def _joined(tensor: IndexedTensor, pieces: list[tuple[IndexedTensor, Slice, torch.Tensor]]) -> torch.Tensor:
    whole = torch.empty(tensor.shape, dtype=dtype_named(tensor.dtype))
    is_there = torch.zeros(tensor.shape, dtype=torch.bool)
    for _, piece, data in pieces:
        where = tuple(slice(at, at + size) for at, size in zip(*piece.box, strict=True))
        twice = is_there[where].clone()
        if bool(twice.any()):
            assert torch.equal(whole[where][twice], data[twice]), f"{tensor.dotted}: two ranks wrote other bytes"
        whole[where], is_there[where] = data, True
    assert bool(is_there.all()), f"{tensor.dotted}: nobody has written all of it"
    return whole
