"""Make all witnesses anew by the code that is installed. Needed only when a kind is added; the others stay as they are.

    python -m tests.witnesses.make FOLDER [NAME ...]

In: nothing. Out: FOLDER/<name>.tar.gz for each kind, a tar of the folder that the code has written. The committed ones were
made by commit 7c58eda of 2026-11-27. Knows nothing of: what is compared afterwards.
"""

import gzip
import io
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import async_ckpt
from async_ckpt import AsyncCheckpointer, Keep, Publisher

from .contents import RANKS, model_at, state_at, values, weights_at

WITNESSES: dict[str, Callable[[Path], None]] = {}


def witness(make: Callable[[Path], None]) -> Callable[[Path], None]:
    WITNESSES[make.__name__] = make
    return make


def saved(ckpt: AsyncCheckpointer, *steps: int, **options: Any) -> None:
    for step in steps:
        ckpt.save(state_at(step), step=step, **options).result()
        ckpt.wait()


# --- runs of one process --------------------------------------------------------------------------------------------


@witness
def run(folder: Path) -> None:
    """Steps 2, 4 and 5 of five, by retention; each with a record."""
    with AsyncCheckpointer(folder, keep=Keep(last=2, every=2)) as ckpt:
        for step in range(1, 6):
            saved(ckpt, step, record={"loss": 1 / step})


@witness
def run_rng(folder: Path) -> None:
    random.seed(7)
    torch.manual_seed(7)
    with AsyncCheckpointer(folder) as ckpt:
        ckpt.save({"rng": async_ckpt.RngState()}, step=1).result()


@witness
def run_borrowing(folder: Path) -> None:
    """Steps 2 and 3 have the group `frozen` of step 1."""
    with AsyncCheckpointer(folder) as ckpt:
        state = state_at(1)
        ckpt.save(state, step=1).result()
        for step in (2, 3):
            ckpt.save(state_at(step) | {"frozen": state["frozen"]}, step=step, unchanged=["frozen"]).result()


@witness
def run_overwritten(folder: Path) -> None:
    """Step 2 was step 7's state, and was replaced."""
    with AsyncCheckpointer(folder) as ckpt:
        saved(ckpt, 1)
        ckpt.save(state_at(7), step=2).result()
        saved(ckpt, 2, overwrite=True)


@witness
def run_rolled_back(folder: Path) -> None:
    """Steps 1 and 2; a rollback has retired 3 and 4, and everything is cleaned up."""
    with AsyncCheckpointer(folder) as ckpt:
        saved(ckpt, 1, 3, 4)
    with AsyncCheckpointer(folder, on_rollback="retire") as ckpt:
        ckpt.restore(state_at(0), step=1)
        saved(ckpt, 2)


@witness
def run_rolled_back_unfinished(folder: Path) -> None:
    """The same; the disk failed before the manifests of steps 3 and 4 were renamed, so the intent is still there."""
    from scripted_disk import scripted

    from async_ckpt import StorageUnavailableError

    with AsyncCheckpointer(folder) as ckpt:
        saved(ckpt, 1, 3, 4)
    with AsyncCheckpointer(folder, on_rollback="retire") as ckpt, scripted(ckpt) as disk:
        ckpt.restore(state_at(0), step=1)
        disk.fail("move", error=StorageUnavailableError("the disk is gone", path=str(folder)), times=None)
        saved(ckpt, 2)


@witness
def run_two_roots(folder: Path) -> None:
    """Steps 1 and 2 at `near`; `far` has step 1 alone."""
    with AsyncCheckpointer([folder / "near", folder / "far"]) as ckpt:
        saved(ckpt, 1)
    with AsyncCheckpointer(folder / "near") as ckpt:
        saved(ckpt, 2)


@witness
def run_named_verl(folder: Path) -> None:
    with AsyncCheckpointer(folder, naming="verl") as ckpt:
        saved(ckpt, 1, 2)


@witness
def run_killed(folder: Path) -> None:
    """Step 1; a process was killed while it wrote step 2."""
    with AsyncCheckpointer(folder) as ckpt:
        saved(ckpt, 1)
    child = subprocess.run([sys.executable, "-c", _KILLED, str(folder)], check=False)
    assert child.returncode == -signal.SIGKILL


_KILLED = """
import os, signal, sys
from tests.witnesses.contents import state_at
from async_ckpt import AsyncCheckpointer
from async_ckpt.core.storage.local import LocalSink
LocalSink.finish = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
ckpt = AsyncCheckpointer(sys.argv[1])
ckpt.save(state_at(2), step=2).result()
"""


@witness
def run_damaged(folder: Path) -> None:
    """Steps 1 and 2; one byte of a tensor of step 2 was flipped afterwards."""
    with AsyncCheckpointer(folder) as ckpt:
        saved(ckpt, 1, 2)
    (archive,) = folder.glob("step_00000002/rank_*.tar")
    data = bytearray(archive.read_bytes())
    place = data.index(values([7], 1).numpy().tobytes())
    data[place] ^= 1
    archive.write_bytes(data)


@witness
def run_without_tracker(folder: Path) -> None:
    """Steps 1 and 2; `latest` and the journal were lost."""
    with AsyncCheckpointer(folder) as ckpt:
        saved(ckpt, 1, 2)
    (folder / "latest").unlink()
    (folder / "checkpoints.jsonl").unlink()


@witness
def run_objects(folder: Path) -> None:
    """Values that need trust beside plain ones, and a generator that was pickled."""
    with AsyncCheckpointer(folder) as ckpt:
        ckpt.save({"object": slice, "generator": random.Random(7), "plain": 1}, step=1).result()


# --- runs of several ranks ------------------------------------------------------------------------------------------


def on_ranks(script: str, folder: Path) -> None:
    """Run `script` on `RANKS` ranks of gloo: it has `mesh`, `rank` and `folder`."""
    with tempfile.TemporaryDirectory() as meeting:
        text = _RANK.format(script=script, size=RANKS, meeting=meeting, folder=str(folder))
        ranks = [
            subprocess.Popen([sys.executable, "-c", text], env={**os.environ, "RANK": str(rank)})
            for rank in range(RANKS)
        ]
        assert [rank.wait(120) for rank in ranks] == [0] * RANKS


_RANK = """
import os
from pathlib import Path
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
import async_ckpt
from async_ckpt import AsyncCheckpointer
from tests.witnesses.contents import *
from tests.witnesses.contents import sharded_at
rank, folder = int(os.environ["RANK"]), Path({folder!r})
dist.init_process_group("gloo", init_method="file://{meeting}/store", rank=rank, world_size={size})
mesh = init_device_mesh("cpu", ({size},))
{script}
dist.barrier()
dist.destroy_process_group()
"""
_SAVE_ON_RANKS = """
with AsyncCheckpointer(folder) as ckpt:
    frozen = None
    for step in (1, 2, 3):
        state = sharded_at(step, mesh)
        state["frozen"] = frozen = frozen or state["frozen"]
        ckpt.save(state, step=step, per_rank=["data"], unchanged=["frozen"], record={"loss": 1 / step}).result()
"""


@witness
def run_of_ranks(folder: Path) -> None:
    """Steps 1 to 3; the group `frozen` is that of step 1."""
    on_ranks(_SAVE_ON_RANKS, folder)


@witness
def run_of_ranks_without_layout(folder: Path) -> None:
    """The same; the layout of step 3 was lost."""
    on_ranks(_SAVE_ON_RANKS, folder)
    for layout in folder.glob("step_00000003/layout*"):
        layout.unlink()


@witness
def run_of_ranks_refused(folder: Path) -> None:
    """Step 1 is committed; step 2 failed by a verdict, since one rank could not store its state."""
    on_ranks(
        """
with AsyncCheckpointer(folder) as ckpt:
    ckpt.save(sharded_at(1, mesh), step=1, per_rank=["data"]).result()
    state = sharded_at(2, mesh)
    if rank == 1:
        state["model"]["rows"] = state["model"]["rows"].to("meta")
    try:
        ckpt.save(state, step=2, per_rank=["data"]).result()
    except async_ckpt.CheckpointError:
        pass
    else:
        raise SystemExit("step 2 was committed")
""",
        folder,
    )


@witness
def one_off_of_ranks(folder: Path) -> None:
    on_ranks('async_ckpt.save(sharded_at(1, mesh), folder / "all").result()', folder)


# --- archives and folders -------------------------------------------------------------------------------------------


@witness
def archives(folder: Path) -> None:
    """One state, saved once, compressed, and from a held snapshot."""
    async_ckpt.save(state_at(1), folder / "plain.tar").result()
    async_ckpt.save(state_at(1), folder / "compressed.tar.zst").result()
    with async_ckpt.snapshot(state_at(1)) as snapshot:
        async_ckpt.save(snapshot, folder / "held.tar").result()


@witness
def packs(folder: Path) -> None:
    """Folders in a tar, and what wrapped functions have written."""
    for name in ("plain.tar", "compressed.tar.zst"):
        with async_ckpt.pack(folder / name) as packed:
            (packed / "below").mkdir()
            (packed / "below" / "text").write_text("witness\n")
    async_ckpt.wrap(torch.save)({"weight": values([3], 1)}, folder / "wrapped.pt").result()


@witness
def exports(folder: Path) -> None:
    async_ckpt.export_hf(weights_at(1), folder / "hf").result()


# --- publications ---------------------------------------------------------------------------------------------------


@witness
def versions(folder: Path) -> None:
    """An anchor, two deltas, and an anchor that ends the chain."""
    with Publisher(folder, anchor_every=3) as publisher:
        for version in range(1, 5):
            publisher.publish(weights_at(version), version).result()


@witness
def versions_of_ranks(folder: Path) -> None:
    on_ranks(
        """
with async_ckpt.Publisher(folder, anchor_every=3) as publisher:
    for version in (1, 2):
        publisher.publish(sharded_at(version, mesh)["model"], version).result()
""",
        folder,
    )


# --- folders of frameworks ------------------------------------------------------------------------------------------


@witness
def dcp(folder: Path) -> None:
    """By torch.distributed.checkpoint with our writer."""
    import torch.distributed.checkpoint as torch_dcp

    from async_ckpt.integrations.dcp import TarStorageWriter

    torch_dcp.save({"model": model_at(1).state_dict()}, storage_writer=TarStorageWriter(str(folder / "step")))


def _accelerate(layout: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from accelerate import Accelerator

        from async_ckpt.integrations.accelerate import AsyncState

        accelerator = Accelerator(cpu=True)
        model = model_at(1)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        with AsyncState(accelerator, layout=layout) as checkpoints:  # type: ignore[arg-type]
            checkpoints.save_state(str(folder / "state"))

    return make


WITNESSES["accelerate_own"] = _accelerate("accelerate")
WITNESSES["accelerate_archive"] = _accelerate("archive")


def _transformers(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        import trainers

        trainers.trainer_of(getattr(trainers, name), folder, save_steps=trainers.STEPS // 2).train()
        shutil.rmtree(folder / f"checkpoint-{trainers.STEPS}")  # so that something is left to do
        for path in folder.glob("*/training_args.bin"):
            path.unlink()  # a pickle of classes of transformers, which change from version to version

    return make


WITNESSES["transformers_own"] = _transformers("Files")
WITNESSES["transformers_archive"] = _transformers("Archives")


@witness
def lightning(folder: Path) -> None:
    """A training of twelve steps, stopped after eight."""
    import lightning_runs

    from async_ckpt.integrations.lightning import AsyncTarCheckpointIO

    kit = lightning_runs.kit_of(lightning_runs.NAMES[0])
    callback = kit.ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1)
    trainer = lightning_runs.trainer_of(kit, folder, AsyncTarCheckpointIO(), callback, max_steps=8)
    trainer.fit(kit.Model(), lightning_runs.batches())


# --- packing them ---------------------------------------------------------------------------------------------------


def packed(folder: Path) -> bytes:
    """A tar of the folder, compressed, without times, owners and inode numbers of this machine."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as file, tarfile.open(fileobj=file, mode="w") as tar:
        tar.add(folder, arcname=".", filter=_plain)
    return buffer.getvalue()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def write(target: Path, makers: Mapping[str, Callable[[Path], None]]) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name, make in makers.items():
        folder = Path(tempfile.mkdtemp()) / name
        folder.mkdir()
        make(folder)
        (target / f"{name}.tar.gz").write_bytes(packed(folder))
        shutil.rmtree(folder.parent)
        print(f"{name}: {(target / f'{name}.tar.gz').stat().st_size:,} bytes", flush=True)


def main(target: Path, names: list[str]) -> None:
    write(target, {name: WITNESSES[name] for name in names or WITNESSES})


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    main(Path(sys.argv[1]), sys.argv[2:])
