"""Files of a run whose digests are right and whose fields are of other types: every reader works, or raises a CheckpointError."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_archives import commit, write_all
from slices import one_in
from states import open_run

import async_ckpt
from async_ckpt import CheckpointError, StorageUnavailableError
from async_ckpt.runs.manifest import seal, unseal
from async_ckpt.storage.local import LocalStorage

ODD: list[Any] = [
    None, True, -1, 2**70, 1e308, float("nan"), "", "x", "\ud800", "../../x", "9" * 5000, [], {}, [[]], [None], {"x": 1}, ["x"] * 3,
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1 is of two ranks, step 3 has borrowed a group of step 2."""
    root = tmp_path_factory.mktemp("sound") / "run"
    folder, base = root / "step_00000001", {"w": torch.arange(64.0)}
    folder.mkdir(parents=True)
    commit(write_all(folder, 2, lambda _: {"base": base, "head": {"w": torch.ones(64)}}))
    with open_run(root) as ckpt:
        for step in (2, 3):
            state = {"base": base, "head": {"w": torch.ones(64) * step}, "step": step}
            ckpt.save(state, step, unchanged="base", record={"loss": 1.0}).result()
        ckpt.wait()
    return root


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from fields(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], by)
    return changed


def without_digest(data: bytes) -> Any:
    told = unseal(data)
    told.pop("digest")
    return told


def lies(told: Any) -> Iterator[tuple[str, Any]]:
    for path in fields(told):
        for odd in ODD:
            yield f"{'.'.join(map(str, path))}={odd!r:.20}", replaced(told, path, odd)


def readers(root: Path) -> Iterator[Callable[[], Any]]:
    ckpt = async_ckpt.AsyncCheckpointer(root)
    yield ckpt.steps
    yield ckpt.latest
    yield ckpt.records
    yield from ((lambda step=step: ckpt.load(step)) for step in (1, 2, 3))
    yield lambda: ckpt.restore({"base": {"w": torch.zeros(64)}, "head": {"w": torch.zeros(64)}})
    yield lambda: async_ckpt.load(root)
    yield lambda: async_ckpt.verify(root)
    yield partial(save, root)


def save(root: Path) -> None:
    with open_run(root, on_rollback="retire") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 4).result()


SEALED = [
    "step_00000001/manifest.json",
    "step_00000003/manifest.json",
    "step_00000001/layout.*",
    "start-*",
]


@pytest.mark.parametrize("name", SEALED)
def test_a_field_of_another_type_is_refused_by_name(sound: Path, tmp_path: Path, name: str) -> None:
    wrong = []
    (original,) = sound.glob(name)
    for number, (lie, told) in enumerate(lies(without_digest(original.read_bytes()))):
        if number % one_in(13) or not isinstance(told, dict):
            continue
        root = shutil.copytree(sound, tmp_path / str(number))
        (root / original.relative_to(sound)).write_bytes(seal(told))
        for at, read in enumerate(readers(root)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    read()
                except CheckpointError:
                    pass
                except Exception as error:
                    wrong.append((lie, at, repr(error)[:200]))
        shutil.rmtree(root)
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    "name",
    [
        "step_00000001",
        "step_00000003",
        "*2/manifest.json",
        "*2/rank*",
        "checkpoints.jsonl",
        "latest",
        "start-*",
    ],
)
def test_a_link_that_leads_to_itself_is_refused_by_name_or_passed_over(
    sound: Path, tmp_path: Path, name: str
) -> None:
    root = shutil.copytree(sound, tmp_path / "run")
    (path,) = root.glob(name)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(path.name)
    for read in readers(root):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                read()
            except CheckpointError:
                continue


def test_a_folder_that_nothing_can_be_written_to_has_no_clock_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailableError, match="is writable"):
        LocalStorage(tmp_path).sweep("file", ["rank_00000.0123abcd.tar"], decided=True, of_ranks=True)
