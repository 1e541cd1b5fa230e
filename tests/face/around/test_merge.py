"""`merge`: what many ranks have saved as one archive, which loads as the step does, bit for bit."""

import tarfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from archives import flip
from fake_ranks import distributed, standing_at
from matrix_slices import MODEL_PARALLEL, fsdp2_over_tp, numbered, torch_cuts
from rank_archives import ATTEMPT, Build, commit, write_all
from states import MIB, difference
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard
from trained_ranks import own_values, trained

import async_ckpt
from async_ckpt import CorruptCheckpointError, NotCommittedError, StateMismatchError, StorageFullError
from async_ckpt.core.host.memory import HostBuffer
from async_ckpt.errors import UntrustedObjectError
from async_ckpt.face.around import merge as merging


def saved(folder: Path, world: int, build: Build, **how: Any) -> Path:
    """The root of a run with step 1."""
    commit(write_all(folder / "run" / "step_00000001", world, build, **how), per_rank=how.get("per_rank", ()))
    return folder / "run"


def everything(rank: int) -> dict[str, Any]:
    """Each kind of leaf, tied tensors, and tensors in pieces of any form."""
    strided = torch_cuts((2, 3), [(_StridedShard(0, split_factor=2), Shard(1)), (Shard(1), Shard(1))], [8, 13])
    model = {name: tensor for name, (tensor, _) in strided.items()}
    model |= {
        name: tensor for name, (tensor, _) in fsdp2_over_tp(rank, {"dp": 3, "tp": 2}, MODEL_PARALLEL, [7, 13]).items()
    }
    return {
        "model": {**model, "tied": next(iter(model.values())), "none": torch.empty(0, 3)},
        "dtypes": [torch.tensor([1, 2], dtype=dtype) for dtype in (torch.bool, torch.bfloat16, torch.complex128)],
        "array": np.arange(5),
        "texts": ("a", b"bytes", 1.5, None),
        "object": torch.Size([2, 3]),
        "large": numbered((700, 600)),
    }


def test_a_merged_step_loads_as_the_step_does(tmp_path):
    run = saved(tmp_path, 6, everything)

    report = async_ckpt.merge(run, 1, tmp_path / "new" / "x.tar")

    assert difference(async_ckpt.load(tmp_path / "new" / "x.tar"), async_ckpt.load(run)) is None
    loaded = async_ckpt.load(report.path)
    assert loaded["model"]["tied"] is next(iter(loaded["model"].values()))
    assert report.num_bytes == (tmp_path / "new" / "x.tar").stat().st_size
    assert (report.step, report.status) == (1, "committed")
    assert async_ckpt.verify(report.path).num_archives == 1


@pytest.mark.parametrize("segment_bytes", [4 * MIB, 8 * MIB])
def test_it_is_the_same_archive_whatever_the_segments_are(segment_bytes, tmp_path, monkeypatch):
    """A tensor goes over several, and the digests over the border of two."""

    def build(_: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (3,))
        return {
            "wide": distributed(numbered((5, 777_777)), mesh, [Shard(1)]),
            "bytes": distributed((numbered((4 * MIB - 15_000,)) % 251).to(torch.uint8), mesh, [Shard(0)]),
        }

    run = saved(tmp_path, 3, build)
    monkeypatch.setattr(merging, "SEGMENT_BYTES", segment_bytes)

    async_ckpt.merge(run, None, tmp_path / "x.tar")

    with standing_at(0, 1):
        assert difference(async_ckpt.load(tmp_path / "x.tar"), async_ckpt.load(run)) is None
    with tarfile.open(tmp_path / "x.tar") as tar:
        member = tar.extractfile("model.safetensors")
        assert member is not None
        tensors = safetensors.torch.load(member.read())
    assert torch.equal(tensors["wide"], numbered((5, 777_777)))


def test_a_trained_model_and_its_optimizer_go_on_from_a_merged_archive(tmp_path):
    run = saved(tmp_path, 3, lambda _: trained(3))
    async_ckpt.merge(run, 1, tmp_path / "x.tar")

    loaded, expected = async_ckpt.load(tmp_path / "x.tar"), trained(None)
    expected["model"].load_state_dict(loaded["model"])
    expected["optimizer"].load_state_dict(loaded["optimizer"])

    assert difference(loaded["optimizer"]["state"], expected["optimizer"].state_dict()["state"]) is None


def test_values_of_each_rank_need_a_choice(tmp_path):
    run = saved(tmp_path, 3, own_values, per_rank=("rng",))

    with pytest.raises(
        StateMismatchError, match=r"rng, timer: each rank has saved its own value; choose .* from_ranks=\{'rng': 0\}"
    ):
        async_ckpt.merge(run, 1, tmp_path / "x.tar")
    assert not (tmp_path / "x.tar").exists()
    with pytest.raises(KeyError, match="'other' names nothing"):
        async_ckpt.merge(run, 1, tmp_path / "x.tar", from_ranks={"rng": 2, "timer": 0, "other": 1})

    async_ckpt.merge(run, 1, tmp_path / "x.tar", from_ranks={"rng": 2, "timer": 0})
    assert difference(async_ckpt.load(tmp_path / "x.tar"), {**own_values(2), "timer": 0.0}) is None


def test_borrowed_groups_are_in_it(tmp_path):
    root = tmp_path / "run"
    with async_ckpt.AsyncCheckpointer(root) as ckpt:
        base = {"frozen": {"w": torch.ones(5), "tied": None}, "model": {"w": torch.zeros(3)}}
        ckpt.save(base, 1).result()
        base["model"]["w"] += 1
        ckpt.save(base, 2, unchanged="frozen").result()

    async_ckpt.merge(root, 2, tmp_path / "x.tar")

    assert difference(async_ckpt.load(tmp_path / "x.tar"), async_ckpt.load(root)) is None


class Odd:
    """No plain data."""


def test_values_that_are_not_plain_need_trust(tmp_path):
    root = tmp_path / "run"
    with async_ckpt.AsyncCheckpointer(root) as ckpt:
        ckpt.save({"odd": Odd(), "w": torch.ones(2)}, 1).result()

    with pytest.raises(UntrustedObjectError):
        async_ckpt.merge(root, 1, tmp_path / "x.tar")
    async_ckpt.merge(root, 1, tmp_path / "x.tar", trust=True)

    assert isinstance(async_ckpt.load(tmp_path / "x.tar", trust=True)["odd"], Odd)


def test_damage_is_told_and_leaves_nothing(tmp_path):
    run = saved(tmp_path, 3, lambda _: {"large": numbered((4000, 1024))})
    (tmp_path / "x.tar").write_bytes(b"before")
    flip(run / "step_00000001" / f"rank_00001.{ATTEMPT}.tar", 5_000_000)

    with pytest.raises(CorruptCheckpointError, match="large"):
        async_ckpt.merge(run, 1, tmp_path / "x.tar")

    assert (tmp_path / "x.tar").read_bytes() == b"before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "x.tar"]


def test_what_cannot_be_merged_is_told_before_anything_is_read(tmp_path):
    run = saved(tmp_path, 2, lambda _: {"w": numbered((3,))})

    with pytest.raises(NotCommittedError, match="step 7 is not committed there; 1 are"):
        async_ckpt.merge(run, 7, tmp_path / "x.tar")
    with pytest.raises(NotCommittedError, match="nothing at this path"):
        async_ckpt.merge(tmp_path / "none", None, tmp_path / "x.tar")
    with pytest.raises(ValueError, match="plain tar"):
        async_ckpt.merge(run, 1, tmp_path / "x.tar.zst")
    with pytest.raises(ValueError, match="only zstd"):
        async_ckpt.merge(run, 1, tmp_path / "x.tar.xz")
    with pytest.raises(IsADirectoryError):
        async_ckpt.merge(run, 1, tmp_path)
    with pytest.raises(NotCommittedError, match="is the folder of step 1, not of 7; give the root of the run"):
        async_ckpt.merge(run / "step_00000001", 7, tmp_path / "x.tar")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for name in (f"rank_00000.{ATTEMPT}.tar", "x.tar"):
        with pytest.raises(ValueError, match="the folder of a committed step"):
            async_ckpt.merge(run, 1, run / "step_00000001" / name)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_the_folder_of_a_step_may_be_named_whatever_it_is_called(tmp_path):
    state = {"w": numbered((3,))}
    folder = saved(tmp_path, 2, lambda _: state) / "step_00000001"
    folder.rename(tmp_path / "best")
    for step in (None, 1):
        async_ckpt.merge(tmp_path / "best", step, tmp_path / "x.tar")
        assert difference(async_ckpt.load(tmp_path / "x.tar"), state) is None


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path, monkeypatch):
    run = saved(tmp_path, 2, lambda _: {"w": numbered((300, 1000))})
    (tmp_path / "full").mkdir()
    monkeypatch.setattr("os.pwrite", full)
    monkeypatch.setattr("os.pwritev", full)

    with pytest.raises(StorageFullError):
        async_ckpt.merge(run, 1, tmp_path / "full" / "x.tar")

    assert not list((tmp_path / "full").iterdir())


def full(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def test_it_takes_a_few_segments_of_memory(tmp_path, monkeypatch):
    """Of 128 MiB, of which each rank has half of every row."""

    def build(_: int) -> dict[str, Any]:
        whole = torch.arange(16 * 1024 * 1024, dtype=torch.int64).view(64, -1)
        return {"w": distributed(whole, init_device_mesh("cpu", (2,)), [Shard(1)])}

    run = saved(tmp_path, 2, build)
    live: weakref.WeakSet[HostBuffer] = weakref.WeakSet()
    peak = 0
    make = HostBuffer.__init__

    def counted(self: HostBuffer, *arguments: Any, **options: Any) -> None:
        nonlocal peak
        make(self, *arguments, **options)
        live.add(self)
        peak = max(peak, sum(one.num_bytes for one in list(live)))

    monkeypatch.setattr(merging, "SEGMENT_BYTES", 8 * MIB)
    monkeypatch.setattr(HostBuffer, "__init__", counted)
    report = async_ckpt.merge(run, 1, tmp_path / "x.tar")
    monkeypatch.undo()

    assert 0 < peak <= 112 * MIB < report.num_bytes
    loaded = async_ckpt.load(tmp_path / "x.tar", mmap=True)["w"]
    assert torch.equal(loaded.flatten(), torch.arange(16 * 1024 * 1024))


def test_from_store_to_store(bucket, tmp_path):
    run = saved(tmp_path, 3, lambda _: {"large": numbered((3000, 1024)), "small": numbered((3,))})
    there = [bucket.place(name) for name in ("run", "new/x.tar")]
    async_ckpt.files.upload_directory(run, there[0])

    report = async_ckpt.merge(there[0], 1, there[1])

    assert difference(async_ckpt.load(there[1]), async_ckpt.load(run)) is None
    assert report.path == bucket.url("new/x.tar")
