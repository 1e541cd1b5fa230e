"""SkyRL's checkpoint calls: archives as SkyRL reads and writes them, while the engine goes on with other tenants.

What is saved is trained by SkyRL's own strategy, on one rank in this process, behind SkyRL's own dispatch.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from states import difference
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import async_ckpt
from async_ckpt import Place, RngState
from async_ckpt.integrations.skyrl import CheckpointBackend
from async_ckpt.testing import FaultyProxy
from async_ckpt.testing.servers import Server

pytest.importorskip("skyrl", reason="skyrl is not installed: make test-frameworks")

from skyrl_runs import OneWorker, Training

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's and SkyRL's own

RANK_FILES = [f"./{what}_world_size_1_rank_0.pt" for what in ("extra_state", "model", "optim")]
MEMBERS = [
    ".",
    RANK_FILES[0],
    "./fsdp_config.json",
    "./huggingface",
    "./huggingface/config.json",
    "./huggingface/tokenizer_config.json",
    *RANK_FILES[1:],
]


class Tokenizer:
    """Bytes, one by one."""

    def save_pretrained(self, folder: Path) -> None:
        Path(folder, "tokenizer_config.json").write_text('{"tokenizer_class": "ByteTokenizer"}')


class Tenants(OneWorker):
    """Trainings by the ids of their owners."""

    def __init__(self, trainings: Mapping[str, Training]) -> None:
        super().__init__(next(iter(trainings.values())))
        self._trainings = trainings

    def save_checkpoint(self, *args: Any, model_id: str | None = None, **kwargs: Any) -> None:
        self._training = self._trainings[model_id]
        super().save_checkpoint(*args, **kwargs)

    def load_checkpoint(self, *args: Any, model_id: str | None = None, **kwargs: Any) -> None:
        self._training = self._trainings[model_id]
        super().load_checkpoint(*args, **kwargs)


def train(one: Training, steps: int) -> list[str]:
    """The loss of each step, in every bit. Dropout is drawn from the global generator."""
    return one.train(one.step + steps)


def training(steps: int) -> Training:
    one = Training(None)
    one.train(steps)
    return one


def state_of(one: Training) -> dict[str, Any]:
    return copied({name: part.state_dict() for name, part in one.parts.items()})


def copied(state: Any) -> Any:
    """A copy that training does not change."""
    file = io.BytesIO()
    torch.save(tree_map_only(DTensor, DTensor.to_local, state), file)
    file.seek(0)
    return torch.load(file)


def backend_of(one: Training, **options: Any) -> CheckpointBackend:
    return CheckpointBackend(OneWorker(one), tokenizer=Tokenizer(), **options)


def with_options(options: dict[str, Any]) -> Callable[[Any], Place]:
    return lambda path: Place(path, options=options)


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def trained() -> Training:
    return training(3)


@pytest.fixture
def proxy(s3: Server) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3.endpoint) as started:
        yield started


@pytest.fixture
def through(s3: Server, proxy: FaultyProxy) -> Callable[[Any], Place]:
    """Places that lead through the proxy."""
    return with_options({**s3.options, "endpoint": proxy.endpoint})


# --- the archive ----------------------------------------------------------------------------------------------


def test_skyrl_reads_the_archive_as_it_reads_its_own(trained, tmp_path):
    """Opened as SkyRL opens it, every file has the bytes that the workers wrote."""
    path = tmp_path / "model_a" / "000003.tar.gz"
    with backend_of(trained) as backend:
        backend.save_checkpoint(path, "a").result()
    OneWorker(trained).save_checkpoint("policy", str(tmp_path / "direct"), Tokenizer())

    with tarfile.open(path, "r") as tar:
        tar.extractall(tmp_path / "out", filter="data")

    assert everything_below(tmp_path / "out") == everything_below(tmp_path / "direct")
    for file in RANK_FILES:
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "direct" / file).read_bytes()


def test_members_have_the_names_and_the_order_that_tarfile_gives_them(trained, tmp_path):
    with backend_of(trained) as backend:
        backend.save_checkpoint(tmp_path / "ours.tar.gz", "a").result()
    OneWorker(trained).save_checkpoint("policy", str(tmp_path / "direct"), Tokenizer())
    with tarfile.open(tmp_path / "theirs.tar.gz", "w") as tar:
        tar.add(tmp_path / "direct", arcname=".")

    with (
        tarfile.open(tmp_path / "ours.tar.gz", "r:") as ours,
        tarfile.open(tmp_path / "theirs.tar.gz") as theirs,
    ):
        assert ours.getnames() == MEMBERS
        told = [[(m.name, m.type, m.size, m.mode) for m in tar.getmembers()] for tar in (ours, theirs)]
    assert told[0][1:] == told[1][1:]
    assert told[0][0][:3] == told[1][0][:3]


def write_plain(folder: Path, path: Path) -> None:
    with tarfile.open(path, "w") as tar:
        tar.add(folder, arcname=".")


def write_gzip(folder: Path, path: Path) -> None:
    with tarfile.open(path, "w:gz", compresslevel=0) as tar:
        tar.add(folder, arcname="")


@pytest.mark.parametrize("write", [write_plain, write_gzip])
def test_archives_that_skyrl_wrote_are_loaded(trained, tmp_path, write):
    """Its trainers write plain tars called .tar.gz, its JAX backend gzip frames without a leading dot."""
    (tmp_path / "direct").mkdir()
    OneWorker(trained).save_checkpoint("policy", str(tmp_path / "direct"))
    write(tmp_path / "direct", tmp_path / "000003.tar.gz")
    fresh = training(1)

    backend_of(fresh).load_checkpoint(tmp_path / "000003.tar.gz", "a", load_optimizer=True)

    assert difference(state_of(fresh), state_of(trained)) is None


# --- resuming -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_store", [False, True])
def test_training_goes_on_from_a_load_as_if_it_had_never_stopped(trained, tmp_path, s3, bucket, in_store):
    """Bit for bit: model, optimizer, scheduler, and every random number that follows."""
    path = f"s3://{bucket}/model_a/000003.tar.gz" if in_store else tmp_path / "model_a" / "000003.tar.gz"
    options = {"place": with_options(s3.options), "scratch": tmp_path / "scratch"} if in_store else {}
    with backend_of(trained, **options) as backend:
        backend.save_checkpoint(path, "a")
        expected = train(trained, 5)  # while the save goes on
    fresh = training(1)
    backend_of(fresh, **options).load_checkpoint(path, "a", load_optimizer=True)
    fresh.step = 3

    assert train(fresh, 5) == expected
    assert difference(state_of(fresh), state_of(trained)) is None


def test_without_the_optimizer_a_load_leaves_it_and_its_scheduler_alone(trained, tmp_path):
    with backend_of(trained) as backend:
        backend.save_checkpoint(tmp_path / "x.tar.gz", "a")
    fresh = training(1)
    train(fresh, 1)
    before = state_of(fresh)

    backend_of(fresh).load_checkpoint(tmp_path / "x.tar.gz", "a", load_optimizer=False)

    after = state_of(fresh)
    assert difference(after["model"], state_of(trained)["model"]) is None
    assert difference(after["optimizer"], before["optimizer"]) is None
    assert difference(after["scheduler"], before["scheduler"]) is None


def test_tenants_get_back_their_own(tmp_path):
    tenants = {name: training(steps) for steps, name in enumerate(["a", "b", "c"])}
    saved = {name: state_of(one) for name, one in tenants.items()}
    roles = dict.fromkeys(tenants, "policy")

    async def tenant(backend: CheckpointBackend, name: str) -> None:
        for step in range(3):  # each waits for its own save, the others' go on
            await backend.save_checkpoint(tmp_path / name / f"{step:06d}.tar.gz", name)
            train(tenants[name], 1)
            backend.load_checkpoint(tmp_path / name / f"{step:06d}.tar.gz", name)

    async def all_of_them() -> None:
        with CheckpointBackend(Tenants(tenants), role=roles) as backend:
            await asyncio.gather(*(tenant(backend, name) for name in tenants))

    asyncio.run(all_of_them())

    assert all(difference(state_of(tenants[name]), saved[name]) is None for name in tenants)
    assert everything_below(tmp_path) == sorted(
        [*tenants, *(f"{name}/{step:06d}.tar.gz" for name in tenants for step in range(3))]
    )


# --- what the engine sees -------------------------------------------------------------------------------------


def test_the_engine_goes_on_while_an_upload_is_held_up(trained, tmp_path, proxy, through, bucket):
    """One tenant's archive is stuck on its way into the store; training, another save and a load are not."""
    with backend_of(trained) as local:
        local.save_checkpoint(tmp_path / "earlier.tar.gz", "a")
    hold = proxy.delay(None, method="PUT")

    with backend_of(trained, place=through, scratch=tmp_path / "scratch") as backend:
        stuck = backend.save_checkpoint(f"s3://{bucket}/a/1.tar.gz", "a")
        hold.wait()
        train(trained, 2)
        next_one = backend.save_checkpoint(f"s3://{bucket}/a/2.tar.gz", "a")
        backend.load_checkpoint(tmp_path / "earlier.tar.gz", "a")

        assert not stuck.done()
        assert not next_one.done()
        hold.clear()

    assert stuck.result().status == next_one.result().status == "committed"
    assert everything_below(tmp_path / "scratch") == []


def test_a_load_waits_for_the_save_to_its_path(trained, tmp_path, proxy, through, bucket):
    hold = proxy.delay(None, method="PUT")
    order = []

    class Watching(OneWorker):
        def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            order.append(handle.done())
            super().load_checkpoint(*args, **kwargs)

    def let_it_go(model_id: str) -> None:
        if hold.hits:  # in the load: nothing else would have let the upload go on
            hold.clear()

    dispatch = Watching(trained)
    options = {"place": through, "scratch": tmp_path / "scratch"}
    with CheckpointBackend(dispatch, validate=let_it_go, **options) as backend:
        handle = backend.save_checkpoint(f"s3://{bucket}/a.tar.gz", "a")
        hold.wait()
        backend.load_checkpoint(f"s3://{bucket}/a.tar.gz", "a")

    assert order == [True]


def test_a_load_waits_for_the_save_to_its_path_by_any_other_name(trained, tmp_path, proxy, through, bucket):
    """Archives go one after the other: the one on the disk waits for the one that is held up."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    hold = proxy.delay(None, method="PUT")

    def let_it_go(model_id: str) -> None:
        if hold.hits:
            hold.clear()

    options = {"place": through, "scratch": tmp_path / "scratch"}
    with backend_of(trained, validate=let_it_go, **options) as backend:
        backend.save_checkpoint(f"s3://{bucket}/a.tar.gz", "a")
        hold.wait()
        backend.save_checkpoint(tmp_path / "link" / "x.tar.gz", "a")
        backend.load_checkpoint(tmp_path / "real" / "x.tar.gz", "a")

    assert hold.hits


def test_a_load_of_what_could_not_be_saved_raises_what_went_wrong(trained, tmp_path, proxy, through, bucket):
    """Until somebody has seen it: what lies at the path from before is not what the caller means."""
    path = f"s3://{bucket}/a.tar.gz"
    with backend_of(trained, place=through, scratch=tmp_path / "scratch") as backend:
        backend.save_checkpoint(path, "a").result()
        before = state_of(trained)
        train(trained, 1)
        denied = proxy.answer("AccessDenied", method="PUT")
        backend.save_checkpoint(path, "a")

        with pytest.raises(async_ckpt.StorageUnavailableError):
            backend.load_checkpoint(path, "a")
        denied.clear()
        backend.load_checkpoint(path, "a")

    assert difference(state_of(trained), before) is None


def leave(backend: CheckpointBackend) -> None:
    with backend:
        pass


@pytest.mark.parametrize("end", [CheckpointBackend.wait, CheckpointBackend.close, leave])
def test_a_failed_save_is_a_warning_at_the_next_one_and_raised_at_the_end(
    trained, tmp_path, proxy, through, bucket, end
):
    backend = backend_of(trained, place=through, scratch=tmp_path / "scratch")
    denied = proxy.answer("AccessDenied", method="PUT")
    failed = backend.save_checkpoint(f"s3://{bucket}/1.tar.gz", "a")
    wait([failed])  # which is not to look at it
    denied.clear()

    with pytest.warns(RuntimeWarning, match=r"1\.tar\.gz was not saved"):
        following = backend.save_checkpoint(f"s3://{bucket}/2.tar.gz", "a")

    with pytest.raises(async_ckpt.StorageUnavailableError):
        end(backend)
    assert following.result().status == "committed"


# --- validation -----------------------------------------------------------------------------------------------


def test_an_unknown_model_is_refused_before_anything_is_written(trained, tmp_path):
    roles = {"a": "policy"}
    backend = CheckpointBackend(Tenants({"a": trained}), role=roles)
    for call in (backend.save_checkpoint, backend.save_sampler_checkpoint, backend.load_checkpoint):
        with pytest.raises(ValueError, match=r"no model 'b' here \(known: 'a'\); create it first"):
            call(tmp_path / "new" / "x.tar.gz", "b")

    assert everything_below(tmp_path) == []
    roles["b"] = "policy"  # a model that was created since
    with pytest.raises(KeyError):  # the dispatch was asked, and has none
        backend.save_checkpoint(tmp_path / "x.tar.gz", "b")


def test_the_state_of_a_model_is_validated_once_per_call_and_first(trained, tmp_path):
    story = []

    class Telling(OneWorker):
        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            story.append("written")
            super().save_checkpoint(*args, **kwargs)

    backend = CheckpointBackend(Telling(trained), validate=story.append)
    backend.save_checkpoint(tmp_path / "x.tar.gz", "a").result()
    backend.load_checkpoint(tmp_path / "x.tar.gz", "a")

    assert story == ["a", "written", "a"]


def test_what_has_no_checkpoint_methods_is_refused_when_the_backend_is_made():
    with pytest.raises(TypeError, match="object has no save_checkpoint; give an object like SkyRL's"):
        CheckpointBackend(object())


# --- dispatches of every age ----------------------------------------------------------------------------------


class OldDispatch:
    """As it was before tenants and asynchronous saves."""

    def __init__(self, one: Training) -> None:
        self._inner = OneWorker(one)

    def save_checkpoint(self, model: str, ckpt_dir: str, tokenizer: Any = None) -> None:
        self._inner.save_checkpoint(model, ckpt_dir, tokenizer)

    def load_checkpoint(
        self,
        model: str,
        ckpt_dir: str,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
    ) -> None:
        self._inner.load_checkpoint(model, ckpt_dir, load_optimizer_states, load_lr_scheduler_states)

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        self._inner.save_hf_model(model, export_dir, tokenizer)


def test_a_dispatch_without_the_newer_methods_is_served_too(trained, tmp_path):
    before = state_of(trained)
    with CheckpointBackend(OldDispatch(trained)) as backend:
        backend.save_checkpoint(tmp_path / "x.tar.gz", "whoever")
        backend.save_sampler_checkpoint(tmp_path / "sampler.tar.gz", "whoever")
        train(trained, 2)
        backend.load_checkpoint(tmp_path / "x.tar.gz", "whoever")

    assert difference(state_of(trained), before) is None


def test_a_save_that_workers_go_on_with_is_complete_before_it_is_packed(trained, tmp_path):
    """As with Megatron's: the call returns before the files are there, and `finalize_pending_saves` waits for them."""

    class Megatron(OneWorker):
        pending: Any = None

        def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            self.pending = args, kwargs

        def finalize_pending_saves(self, model: str) -> None:
            assert model == "policy"
            args, kwargs = self.pending
            super().save_checkpoint(*args, **kwargs)

    with CheckpointBackend(Megatron(trained)) as backend:
        backend.save_checkpoint(tmp_path / "x.tar.gz", "a")

    with tarfile.open(tmp_path / "x.tar.gz") as tar:
        assert set(RANK_FILES) <= set(tar.getnames())


class Creating(OneWorker):
    """Its workers make the folder by themselves, and would take one that is there for somebody else's."""

    def save_checkpoint(self, model: str, ckpt_dir: str, *args: Any, **kwargs: Any) -> None:
        os.makedirs(ckpt_dir)
        super().save_checkpoint(model, ckpt_dir, *args, **kwargs)

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        staged = f"{export_dir}.staged"
        super().save_hf_model(model, staged, tokenizer)
        shutil.move(staged, export_dir)  # into it, if it were there


@pytest.mark.parametrize("call", ["save_checkpoint", "save_sampler_checkpoint"])
def test_workers_are_given_a_folder_that_is_not_there_yet_as_skyrl_does(trained, tmp_path, call):
    dispatch = Creating(trained)
    with CheckpointBackend(dispatch, tokenizer=Tokenizer()) as backend:
        getattr(backend, call)(tmp_path / "ours.tar.gz", "a")
    with backend_of(trained) as backend:
        getattr(backend, call)(tmp_path / "expected.tar.gz", "a")

    names = []
    for archive in ("ours.tar.gz", "expected.tar.gz"):
        with tarfile.open(tmp_path / archive) as tar:
            names.append(tar.getnames())
    assert names[0] == names[1]
    assert len(names[0]) > 2
    assert everything_below(tmp_path) == ["expected.tar.gz", "ours.tar.gz"]


class Idle(OneWorker):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        pass


def test_workers_that_write_nothing_save_nothing(trained, tmp_path):
    backend = CheckpointBackend(Idle(trained))
    with pytest.raises(async_ckpt.NothingWrittenError, match="nothing was written"):
        backend.save_checkpoint(tmp_path / "x.tar.gz", "a").result()
    backend.close()

    assert everything_below(tmp_path) == []


# --- failures -------------------------------------------------------------------------------------------------


class Failing(OneWorker):
    """Its second rank runs out of memory: some files are there, others are not."""

    def save_checkpoint(self, model: str, ckpt_dir: str, *args: Any, **kwargs: Any) -> None:
        os.makedirs(ckpt_dir, exist_ok=True)
        Path(ckpt_dir, "model_world_size_2_rank_0.pt").write_bytes(b"half of it")
        raise MemoryError("rank 1")

    def save_hf_model(self, model: str, export_dir: str, tokenizer: Any) -> None:
        os.makedirs(f"{export_dir}.staged")
        os.makedirs(export_dir, exist_ok=True)
        Path(export_dir, "config.json").write_text("{}")
        raise MemoryError("rank 1")

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        raise MemoryError("rank 1")


@pytest.mark.parametrize("call", ["save_checkpoint", "save_sampler_checkpoint", "load_checkpoint"])
def test_workers_that_fail_publish_nothing_and_leave_no_files(trained, tmp_path, call):
    with backend_of(trained) as backend:
        backend.save_checkpoint(tmp_path / "x.tar.gz", "a")
    before = (tmp_path / "x.tar.gz").read_bytes()

    with pytest.raises(MemoryError, match="rank 1"):
        getattr(CheckpointBackend(Failing(trained)), call)(tmp_path / "x.tar.gz", "a")

    assert everything_below(tmp_path) == ["x.tar.gz"]
    assert (tmp_path / "x.tar.gz").read_bytes() == before


def test_loading_what_is_not_there_makes_no_folder(trained, tmp_path):
    with pytest.raises(FileNotFoundError):
        backend_of(trained).load_checkpoint(tmp_path / "new" / "x.tar.gz", "a")

    assert everything_below(tmp_path) == []


def test_nothing_is_saved_after_the_end_and_ending_twice_is_ending_once(trained, tmp_path):
    backend = backend_of(trained)
    backend.close()
    backend.close()

    with pytest.raises(async_ckpt.ClosedError):
        backend.save_checkpoint(tmp_path / "x.tar.gz", "a")
    assert everything_below(tmp_path) == []


# --- where the workers write ----------------------------------------------------------------------------------


class Noting(OneWorker):
    folders: list[Path]

    def save_checkpoint(self, model: str, ckpt_dir: str, *args: Any, **kwargs: Any) -> None:
        self.folders = [Path(ckpt_dir)]
        super().save_checkpoint(model, ckpt_dir, *args, **kwargs)

    def load_checkpoint(self, model: str, ckpt_dir: str, *args: Any, **kwargs: Any) -> None:
        self.folders.append(Path(ckpt_dir))
        super().load_checkpoint(model, ckpt_dir, *args, **kwargs)


@pytest.mark.parametrize("scratch", [None, "shared"])
def test_workers_write_and_read_beside_the_archive_or_where_they_are_told(trained, tmp_path, scratch):
    dispatch = Noting(trained)
    where = tmp_path / (scratch or "model_a")
    with CheckpointBackend(dispatch, scratch=where if scratch else None) as backend:
        backend.save_checkpoint(tmp_path / "model_a" / "x.tar.gz", "a")
        backend.load_checkpoint(tmp_path / "model_a" / "x.tar.gz", "a")

    assert len(dispatch.folders) == 2
    assert all(folder.is_relative_to(where) for folder in dispatch.folders)
    assert everything_below(tmp_path) == sorted({"model_a", "model_a/x.tar.gz", where.name})


class CloudPath:
    """An object in a store, in the manner of cloudpathlib: as a file it is a copy in a cache."""

    def __init__(self, url: str, cache: Path) -> None:
        self._url, self._cache = url, cache

    def as_uri(self) -> str:
        return self._url

    def __str__(self) -> str:
        return self._url

    def __fspath__(self) -> str:
        return str(self._cache)


def test_a_path_into_a_store_is_never_taken_for_its_copy_in_a_cache(trained, tmp_path, s3, bucket):
    path = CloudPath(f"s3://{bucket}/model_a/x.tar.gz", tmp_path / "cache")
    before = state_of(trained)
    with backend_of(trained, place=with_options(s3.options), scratch=tmp_path / "scratch") as backend:
        backend.save_checkpoint(path, "a")
        train(trained, 1)
        backend.load_checkpoint(path, "a")

    assert s3.keys(bucket) == ["model_a/x.tar.gz"]
    assert everything_below(tmp_path) == ["scratch"]
    assert difference(state_of(trained), before) is None


def test_paths_are_strings_paths_and_file_urls(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with backend_of(trained) as backend:
        backend.save_checkpoint("a/x.tar.gz", "a")
        backend.save_checkpoint(Path("b/x.tar.gz"), "a")
        backend.save_checkpoint((tmp_path / "c" / "x.tar.gz").as_uri(), "a")
        backend.load_checkpoint(str(tmp_path / "a" / "x.tar.gz"), "a")  # under way under another spelling

    assert everything_below(tmp_path) == ["a", "a/x.tar.gz", "b", "b/x.tar.gz", "c", "c/x.tar.gz"]


# --- weights for sampling -------------------------------------------------------------------------------------


class Sending(OneWorker):
    """Has inference engines, which get the weights in memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sent_to: list[str | None] = []

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        await asyncio.sleep(0)
        self.sent_to.append(model_id)


def test_a_sampler_checkpoint_is_the_export_of_the_model(trained, tmp_path):
    path = tmp_path / "model_a" / "sampler_weights" / "000003.tar.gz"
    with backend_of(trained) as backend:
        backend.save_sampler_checkpoint(path, "a")

    with async_ckpt.unpack(path) as folder:
        names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer_config.json"]
        assert everything_below(folder) == names
        weights = load_file(folder / "model.safetensors")
    assert difference(weights, dict(sorted(state_of(trained)["model"].items()))) is None
    assert everything_below(path.parent) == [path.name]


@pytest.mark.parametrize("in_store", [False, True])
def test_weights_that_are_not_to_be_kept_leave_a_marker_as_skyrl_writes_it(trained, tmp_path, s3, bucket, in_store):
    name = "model_a/sampler_weights/x.tar.gz"
    place = CloudPath(f"s3://{bucket}/{name}", tmp_path / "cache") if in_store else tmp_path / name
    with backend_of(trained, place=with_options(s3.options)) as backend:
        backend.save_sampler_checkpoint(place, "a", persist=False)
    if in_store:
        (tmp_path / name).parent.mkdir(parents=True)
        s3.client.download_file(bucket, name, str(tmp_path / name))

    assert everything_below((tmp_path / name).parent) == ["x.tar.gz"]
    with tarfile.open(tmp_path / name, "r:") as tar:
        (member,) = tar.getmembers()
        told = tar.extractfile(member).read()
    assert (member.name, member.isreg()) == ("MARKER", True)
    assert b"a are in the inference engines alone" in told


def test_a_marker_is_not_loaded_as_weights(trained, tmp_path):
    before = state_of(trained)
    with backend_of(trained) as backend:
        backend.save_sampler_checkpoint(tmp_path / "x.tar.gz", "a", persist=False)
        with pytest.raises(async_ckpt.NotCommittedError, match=r"only a marker.*persist=False"):
            backend.load_checkpoint(tmp_path / "x.tar.gz", "a")

    assert difference(state_of(trained), before) is None
    assert everything_below(tmp_path) == ["x.tar.gz"]


@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize(("lora", "sent_to"), [(False, [None]), (True, ["a"])])
def test_the_inference_engines_get_the_weights_whatever_is_kept(trained, tmp_path, persist, lora, sent_to):
    dispatch = Sending(trained)
    with CheckpointBackend(dispatch, lora=lora) as backend:
        backend.save_sampler_checkpoint(tmp_path / "x.tar.gz", "a", persist=persist)

    assert dispatch.sent_to == sent_to
    assert everything_below(tmp_path) == ["x.tar.gz"]


@pytest.mark.parametrize("persist", [False, True])
async def test_only_the_policy_can_be_sampled_from(trained, tmp_path, persist):
    """SkyRL refuses a critic by ValueError, too. Nothing is sent, since the engines would get the policy's weights."""
    dispatch = Sending({"a": trained, "b": trained})
    with CheckpointBackend(dispatch, role={"a": "policy", "b": "critic"}) as backend:
        with pytest.raises(ValueError, match=r"'b' is a critic.*only a policy.*save_checkpoint"):
            await asyncio.to_thread(backend.save_sampler_checkpoint, tmp_path / "x.tar.gz", "b", persist)
        with pytest.raises(ValueError, match=r"'b' is a critic.*only a policy.*save_checkpoint"):
            await backend.save_sampler_checkpoint_async(tmp_path / "x.tar.gz", "b", persist)

    assert dispatch.sent_to == []
    assert everything_below(tmp_path) == []


async def test_on_an_event_loop_sending_weights_is_awaited(trained, tmp_path):
    """A call that would have to hold the loop is refused before anything is sent."""
    dispatch = Sending(trained)
    with CheckpointBackend(dispatch) as backend:
        with pytest.raises(RuntimeError, match="await save_sampler_checkpoint_async instead"):
            backend.save_sampler_checkpoint(tmp_path / "x.tar.gz", "a")
        assert dispatch.sent_to == []

        handle = await backend.save_sampler_checkpoint_async(tmp_path / "x.tar.gz", "a", persist=False)
        report = await handle

    assert report.status == "committed"
    assert dispatch.sent_to == [None]


async def test_weights_that_could_not_be_sent_leave_no_marker(trained, tmp_path):
    class Broken(Sending):
        async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
            raise ConnectionError("an engine is gone")

    with CheckpointBackend(Broken(trained)) as backend, pytest.raises(ConnectionError):
        await backend.save_sampler_checkpoint_async(tmp_path / "x.tar.gz", "a", persist=False)

    assert everything_below(tmp_path) == []


def test_the_random_states_are_those_that_skyrl_knows(trained, tmp_path):
    with backend_of(trained) as backend:
        backend.save_checkpoint(tmp_path / "x.tar.gz", "a")

    with async_ckpt.unpack(tmp_path / "x.tar.gz") as folder:
        extra = torch.load(folder / RANK_FILES[0], weights_only=False)
    assert set(extra) == {"lr_scheduler", "client_state", "tag", "fsdp_strategy", "world_size", "rank", "rng"}
    assert {"cpu", "numpy", "random"} <= set(extra["rng"])
    RngState("skyrl").load_state_dict(extra["rng"])
