"""Models whose weights change a little from version to version, and roots with versions of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from exported import Tensors, assert_same, gpt2, state_of, weights_in

from async_ckpt import Publisher, Subscriber
from async_ckpt.weights.delta import INDEX, folder_of, seal


def changed(model: torch.nn.Module, share: float = 0.02) -> Tensors:
    """Change a share of every parameter, as a step of training does; what the model is then."""
    with torch.no_grad():
        for parameter in model.parameters():
            some = torch.rand(parameter.shape) < share
            parameter[some] += 0.01
    return state_of(model)


class Line:
    """A model, and the versions of it that were published: what each was, by its number."""

    def __init__(self, root: Any, model: torch.nn.Module | None = None, **options: Any) -> None:
        self.root = root
        self.model = gpt2() if model is None else model
        self.publisher = Publisher(root, **options)
        self.were: dict[int, Tensors] = {}

    def publish(self, *versions: int, **options: Any) -> None:
        for version in versions:
            self.were[version] = changed(self.model)
            self.publisher.publish(self.model, version, **options).result()

    def subscriber(self) -> Subscriber:
        return Subscriber(self.root)

    def folder(self, version: int) -> Path:
        return Path(self.root) / folder_of(version)

    def assert_is(self, version: int, into: Path | torch.nn.Module) -> None:
        """Every bit of it; tied names are in a folder once."""
        if isinstance(into, torch.nn.Module):
            assert_same(dict(into.state_dict()), self.were[version])
            return
        found = weights_in(into)
        assert_same(found, {name: self.were[version][name] for name in found})
        assert len(found) >= len(self.were[version]) - 1

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.close()


def edit(folder: Path, change: Any) -> None:
    """Change what an index says; one of ours has its digest made right."""
    path = folder / INDEX
    told = json.loads(path.read_text())
    change(told)
    ours = told.get("metadata", {}).get("async_ckpt", {})
    if "digest" in ours:
        ours["digest"] = "0" * 32
    data = json.dumps(told).encode()
    path.write_bytes(seal(data) if "digest" in ours else data)


def as_others_write(folder: Path) -> None:
    """Without what only this library writes and reads, in a root of others."""
    edit(folder, lambda told: told["metadata"].pop("async_ckpt"))
    (folder.parent / "publisher.json").unlink(missing_ok=True)


def flip(path: Path, at: int, bit: int = 0x10) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def files_below(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too, and its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def files_but_the_marker(folder: Path) -> dict[str, bytes]:
    """The same, without the marker. It notes inode and time of each file, anew for files that were copied or written."""
    return {name: data for name, data in files_below(folder).items() if name != ".weight_sync/state.json"}


def weights_below(folder: Path) -> dict[str, bytes]:
    """The files that a model is loaded from."""
    return {name: data for name, data in files_below(folder).items() if not name.startswith(".")}
