"""What earlier code has written is read, verified, restored, gone on with and repaired by today's.

The folders lie packed beside this file; `make.py` says how each was made, and `contents.py` what is in it.
Those of frameworks that need an environment of their own are tried beside the other tests of the framework.
"""

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run_command
from states import difference

import async_ckpt
from async_ckpt import AsyncCheckpointer, CorruptCheckpointError, NotCommittedError, Subscriber, UntrustedObjectError

from .contents import RANKS, full_at, model_at, optimizer_at, state_at, values, weights_at
from .make import WITNESSES
from .make_frameworks import WITNESSES as OF_FRAMEWORKS

HERE = Path(__file__).parent


def test_each_kind_of_witness_is_kept():
    assert {path.name.removesuffix(".tar.gz") for path in HERE.glob("*.tar.gz")} == {*WITNESSES, *OF_FRAMEWORKS}


def plain_of(state: dict[str, Any]) -> dict[str, Any]:
    """A state as `load` returns it: modules and optimizers as their state dicts."""
    return {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}


def assert_is(loaded: dict[str, Any], step: int) -> None:
    want = plain_of(state_at(step))  # groups of another step come last
    assert difference({name: loaded[name] for name in want}, want) is None
    assert {*loaded} == {*want}


# --- runs -----------------------------------------------------------------------------------------------------------

STEPS = {
    "run": [2, 4, 5],
    "run_borrowing": [1, 2, 3],
    "run_overwritten": [1, 2],
    "run_rolled_back": [1, 2],
    "run_rolled_back_unfinished": [1, 2],
    "run_two_roots/near": [1, 2],
    "run_two_roots/far": [1],
    "run_killed": [1],
    "run_without_tracker": [1, 2],
}


def root_of(witness: Callable[[str], Path], name: str) -> Path:
    name, _, below = name.partition("/")
    return witness(name) / below


@pytest.mark.parametrize("name", STEPS)
def test_every_step_of_a_run_is_read_and_verified(witness, name):
    root = root_of(witness, name)
    with AsyncCheckpointer(root) as ckpt:
        assert ckpt.steps() == STEPS[name]
        assert ckpt.latest() == STEPS[name][-1]
        for step in STEPS[name]:
            assert_is(ckpt.load(step), step)
    assert_is(async_ckpt.load(root), STEPS[name][-1])
    assert async_ckpt.verify(root).num_bytes > 0


@pytest.mark.parametrize("name", STEPS)
def test_a_training_goes_on_from_a_run(witness, name):
    root, last = root_of(witness, name), STEPS[name][-1]
    model = model_at(0)
    live = state_at(0) | {"model": model, "optimizer": optimizer_at(model, 0)}
    with AsyncCheckpointer(root, on_rollback="retire") as ckpt:
        assert ckpt.restore(live) == last
        assert_is(plain_of(live), last)
        ckpt.save(state_at(last + 1), step=last + 1).result()
        ckpt.wait()
        assert ckpt.steps() == [*STEPS[name], last + 1]
    assert_is(async_ckpt.load(root), last + 1)
    assert async_ckpt.verify(root).num_bytes > 0


def test_records_and_history_are_kept(witness):
    root = witness("run")
    with AsyncCheckpointer(root) as ckpt:
        assert {step: record["loss"] for step, record in ckpt.records().items()} == {
            step: 1 / step for step in STEPS["run"]
        }
        assert ckpt.best("loss", mode="min") == 5
    commits = [event for event in async_ckpt.history(root) if event["kind"] == "save"]
    assert [event["step"] for event in commits] == [1, 2, 3, 4, 5]


def test_steps_under_the_names_of_another_program_are_found(witness):
    with AsyncCheckpointer(witness("run_named_verl"), naming="verl") as ckpt:
        assert ckpt.steps() == [1, 2]
        assert_is(ckpt.load(), 2)


def test_several_roots_are_caught_up(witness):
    folder = witness("run_two_roots")
    with AsyncCheckpointer([folder / "near", folder / "far"]) as ckpt:
        ckpt.catch_up()
    with AsyncCheckpointer(folder / "far") as ckpt:
        assert ckpt.steps() == [1, 2]
        assert_is(ckpt.load(), 2)


def test_a_damaged_step_is_refused_and_the_one_before_it_restored(witness):
    root = witness("run_damaged")
    with pytest.raises(CorruptCheckpointError):
        async_ckpt.verify(root)
    with AsyncCheckpointer(root) as ckpt:
        with pytest.raises(CorruptCheckpointError):
            ckpt.load(2)
        assert_is(ckpt.load(1), 1)
        model = model_at(0)
        live = state_at(0) | {"model": model, "optimizer": optimizer_at(model, 0)}
        with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
            assert ckpt.restore(live, fallback=True) == 1
        assert_is(plain_of(live), 1)


def test_a_lost_tracker_and_journal_are_made_again(witness):
    root = witness("run_without_tracker")
    assert run_command("repair", root, "--apply").returncode == 0
    assert "step_00000002" in (root / "latest").read_text(encoding="utf-8")
    assert len((root / "checkpoints.jsonl").read_text(encoding="utf-8").splitlines()) == 2


def test_random_states_are_restored(witness):
    random.seed(7)
    torch.manual_seed(7)
    want = random.random(), torch.rand(3)
    with AsyncCheckpointer(witness("run_rng")) as ckpt:
        ckpt.restore({"rng": async_ckpt.RngState()})
    assert random.random() == want[0]
    assert torch.equal(torch.rand(3), want[1])


def test_objects_that_were_pickled_need_trust(witness):
    root = witness("run_objects")
    with pytest.raises(UntrustedObjectError):
        async_ckpt.load(root)
    loaded = async_ckpt.load(root, trust=True)
    assert loaded["object"] is slice
    assert loaded["generator"].random() == random.Random(7).random()


# --- runs of several ranks ------------------------------------------------------------------------------------------


def assert_is_full(loaded: dict[str, Any], step: int) -> None:
    for name, tensor in full_at(step).items():
        group, _, inner = name.partition(".")
        assert torch.equal(loaded[group][inner], tensor), name
    assert loaded["epoch"] == step


@pytest.mark.parametrize("name", ["run_of_ranks", "run_of_ranks_without_layout"])
def test_one_process_reads_what_ranks_have_saved(witness, name):
    root = witness(name)
    with AsyncCheckpointer(root, ranks=(0, 1)) as ckpt:
        assert ckpt.steps() == [1, 2, 3]
        for step in (1, 2, 3):
            assert_is_full(ckpt.load(step, select=["model", "frozen", "epoch"]), step)
            live = {
                name: {"rows": torch.zeros_like(tensor)} for name, tensor in [("frozen", full_at(1)["frozen.rows"])]
            }
            ckpt.restore(live, step=step, select="frozen")
            assert torch.equal(live["frozen"]["rows"], full_at(1)["frozen.rows"])
    if name == "run_of_ranks":
        assert async_ckpt.verify(root).num_bytes > 0


def test_a_layout_that_was_lost_is_not_needed(witness):
    root = witness("run_of_ranks_without_layout")
    assert not list(root.glob("step_00000003/layout*"))
    assert_is_full(async_ckpt.load(root, select=["model", "frozen", "epoch"]), 3)
    assert async_ckpt.verify(root).num_bytes > 0
    assert run_command("repair", root, "--apply").returncode == 0


def test_other_ranks_go_on(witness, worlds):
    """Each rank has its own position back, and another step is committed beside the old ones."""
    root = witness("run_of_ranks")
    world = worlds.start(
        RANKS,
        f"""
from torch.distributed.device_mesh import init_device_mesh
from async_ckpt import AsyncCheckpointer
from tests.witnesses.contents import sharded_at
mesh, rank = init_device_mesh("cpu", ({RANKS},)), dist.get_rank()
live = sharded_at(0, mesh)
with AsyncCheckpointer({str(root)!r}) as ckpt:
    here.tell(ckpt.restore(live))
    here.tell([live["data"]["position"], live["epoch"]])
    ckpt.save(sharded_at(4, mesh), step=4, per_rank=["data"]).result()
""",
    )
    for rank, end in enumerate(world.ended()):
        assert end.told == [3, [300 + rank, 3]]
    assert_is_full(async_ckpt.load(root, select=["model", "frozen", "epoch"]), 4)
    assert async_ckpt.verify(root).num_bytes > 0


def test_a_step_that_failed_by_a_verdict_is_no_step(witness):
    root = witness("run_of_ranks_refused")
    with AsyncCheckpointer(root, ranks=(0, 1)) as ckpt:
        assert ckpt.steps() == [1]
        assert_is_full(ckpt.load(select=["model", "frozen", "epoch"]), 1)
        with pytest.raises(NotCommittedError):
            ckpt.load(2)


def test_a_one_off_save_of_ranks_is_read(witness):
    folder = witness("one_off_of_ranks") / "all"
    assert_is_full(async_ckpt.load(folder, select=["model", "frozen", "epoch"]), 1)
    assert async_ckpt.verify(folder).num_bytes > 0


# --- archives, folders, publications --------------------------------------------------------------------------------


def assert_are_weights(loaded: dict[str, Any], want: dict[str, torch.Tensor]) -> None:
    """In a file, tensors are in the order of their item sizes."""
    assert difference({name: loaded[name] for name in want}, want) is None
    assert {*loaded} == {*want}


@pytest.mark.parametrize("name", ["plain.tar", "compressed.tar.zst", "held.tar"])
def test_archives_are_read_and_verified(witness, name):
    path = witness("archives") / name
    assert_is(async_ckpt.load(path), 1)
    assert async_ckpt.verify(path).num_bytes > 0


@pytest.mark.parametrize("name", ["plain.tar", "compressed.tar.zst"])
def test_packs_are_unpacked(witness, name):
    with async_ckpt.unpack(witness("packs") / name) as folder:
        assert (folder / "below" / "text").read_text(encoding="utf-8") == "witness\n"


def test_a_wrapped_save_is_read_by_torch(witness):
    assert torch.equal(torch.load(witness("packs") / "wrapped.pt")["weight"], values([3], 1))


def test_an_export_is_read(witness):
    loaded = async_ckpt.load(witness("exports") / "hf" / "model.safetensors")
    assert_are_weights(loaded, weights_at(1))


def test_versions_are_verified_and_pulled_one_after_the_other(witness, tmp_path):
    root = witness("versions")
    assert async_ckpt.verify(root).num_bytes > 0
    subscriber = Subscriber(root)
    for version in range(1, 5):
        subscriber.pull(tmp_path / "pulled", version=version)
        loaded = async_ckpt.load(next((tmp_path / "pulled").glob("*.safetensors")))
        assert_are_weights(loaded, weights_at(version))


def test_versions_of_ranks_are_pulled_as_whole_tensors(witness, tmp_path):
    Subscriber(witness("versions_of_ranks")).pull(tmp_path / "pulled")
    loaded = async_ckpt.load(next((tmp_path / "pulled").glob("*.safetensors")))
    want = {name.removeprefix("model."): tensor for name, tensor in full_at(2).items() if name.startswith("model.")}
    assert_are_weights(loaded, want)


# --- folders of frameworks ------------------------------------------------------------------------------------------


def test_a_folder_of_dcp_is_read_by_torch_and_by_us(witness):
    import torch.distributed.checkpoint as torch_dcp

    from async_ckpt.integrations.dcp import TarStorageReader

    folder = witness("dcp") / "step"
    live = {"model": model_at(0).state_dict()}
    torch_dcp.load(live, storage_reader=TarStorageReader(str(folder)))
    assert difference(live, {"model": model_at(1).state_dict()}) is None


@pytest.mark.parametrize("layout", ["own", "archive"])
def test_a_state_of_accelerate_is_loaded(witness, layout):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator

    from async_ckpt.integrations.accelerate import AsyncState

    accelerator = Accelerator(cpu=True)
    live = model_at(0)
    accelerator.prepare(live, torch.optim.SGD(live.parameters(), lr=0.25))
    with AsyncState(accelerator) as checkpoints:
        checkpoints.load_state(str(witness(f"accelerate_{layout}") / "state"))
    assert difference(dict(live.state_dict()), dict(model_at(1).state_dict())) is None


@pytest.mark.parametrize("layout", ["own", "archive"])
def test_a_training_of_transformers_goes_on(witness, layout):
    pytest.importorskip("transformers")
    import trainers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind = trainers.Files if layout == "own" else trainers.Archives
        trainer = trainers.trainer_of(kind, witness(f"transformers_{layout}"))
        trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == trainers.STEPS
    assert {*range(1, trainers.STEPS + 1)} == {*trainers.losses(trainer)}


def test_a_training_of_lightning_goes_on(witness):
    lightning_runs = pytest.importorskip("lightning_runs")
    if not lightning_runs.NAMES:
        pytest.skip("Lightning is not installed")
    from async_ckpt.integrations.lightning import AsyncTarCheckpointIO

    folder, kit = witness("lightning"), lightning_runs.kit_of(lightning_runs.NAMES[0])
    (newest,) = folder.glob("*step=8.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning_runs.trainer_of(kit, folder, AsyncTarCheckpointIO())
        model = kit.Model()
        trainer.fit(model, lightning_runs.batches(), ckpt_path=newest)
    assert sorted(model.losses) == [8, 9, 10, 11]
