"""An export is whole at every moment: over what is there, on disks and stores that fail, and when its process ends."""

import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import Bucket, InMemory, OnServer
from children import injected, why_no_strace
from disks import mounted, needs_mount
from exported import (
    PeftModel,
    Tensors,
    adapter_of,
    assert_loads,
    assert_only,
    assert_same,
    gpt2,
    held_back,  # noqa: F401
    mixtral,
    spoil,
    state_of,
    weights_in,
)
from racing import Call, until
from slices import some
from states import MIB, names_below

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported

import transformers
from safetensors import safe_open

import async_ckpt
from async_ckpt import StorageFullError, StorageUnavailableError
from async_ckpt.core.saving.kept_memory import host_memory
from async_ckpt.core.storage.store_facts import PROBE
from async_ckpt.testing import FaultyProxy


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder that is not there yet, in one where nothing else is."""
    (tmp_path / "outer").mkdir()
    return tmp_path / "outer" / "model"


# --- over what is there -------------------------------------------------------------------------------------------


def version(number: int, num_tensors: int = 4) -> Tensors:
    return {f"w{i}": torch.full((500,), float(number)) for i in range(num_tensors)}


def config_of(folder: Path, number: int) -> Path:
    """A folder with a config that says which export it belongs to."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"version": number}))
    return folder


def assert_is_version(folder: Path, number: int, num_tensors: int = 4) -> None:
    """As a loader goes about it: the config, then the one file or the index, then what these name."""
    assert json.loads((folder / "config.json").read_text()) == {"version": number}
    if (folder / "model.safetensors").exists():
        names = ["model.safetensors"]
        assert not (folder / "model.safetensors.index.json").exists()
    else:
        where = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        names = sorted(set(where.values()))
    assert sorted(path.name for path in folder.glob("*.safetensors")) == names
    found: Tensors = {}
    for name in names:
        with safe_open(folder / name, "pt") as file:
            found |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    assert_same(found, version(number, num_tensors))


def test_an_export_over_another_keeps_other_files_and_no_shard_of_the_old(out, tmp_path):
    for number, max_shard_bytes in enumerate([2000, 4000, 10**9, 2000], start=1):
        async_ckpt.export_hf(version(number), out, config_of(tmp_path / "config", number), max_shard_bytes).result()
        if number == 1:  # what else may lie there, weights of others below included
            for name in ("notes.txt", "checkpoint-5/model.safetensors", "a/b/model.safetensors.index.json"):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_text(name)
            (out / "link").symlink_to("notes.txt")

        assert_is_version(out, number)
        for name in ("notes.txt", "checkpoint-5/model.safetensors", "a/b/model.safetensors.index.json"):
            assert (out / name).read_text() == name
        assert os.readlink(out / "link") == "notes.txt"
        assert_only(out.parent, "model")


def test_a_state_dict_alone_leaves_the_config_that_is_there(out, tmp_path):
    async_ckpt.export_hf(version(1), out, config_of(tmp_path / "config", 2), 2000).result()
    async_ckpt.export_hf(version(2), out).result()

    assert_is_version(out, 2)


def test_an_empty_folder_and_a_link_to_a_folder_are_written_to_and_parents_are_made(tmp_path):
    (tmp_path / "far" / "empty").mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/full")
    async_ckpt.export_hf(version(1), tmp_path / "far" / "empty", config_of(tmp_path / "config", 1)).result()
    for number in (1, 2):  # at first a link to nothing
        async_ckpt.export_hf(version(number), tmp_path / "link", config_of(tmp_path / "config", number)).result()
    async_ckpt.export_hf(version(3), tmp_path / "a" / "b" / "c", config_of(tmp_path / "config", 3)).result()

    assert_is_version(tmp_path / "far" / "empty", 1)
    assert_is_version(tmp_path / "link", 2)
    assert_is_version(tmp_path / "a" / "b" / "c", 3)
    assert os.readlink(tmp_path / "link") == "far/full"
    assert_only(tmp_path / "far", "empty", "full")


def test_a_model_is_not_put_beside_an_adapter_and_an_adapter_leaves_a_model(out, adapter_config, tmp_path):
    """from_pretrained takes the adapter's base for the model wherever there is an adapter."""
    async_ckpt.export_hf(version(1), out, config_of(tmp_path / "config", 1)).result()
    for _ in range(2):
        async_ckpt.export_hf(PeftModel("mine"), out).result()
    held = names_below(out)
    with pytest.raises(FileExistsError, match=r"holds an adapter.*delete it"):
        async_ckpt.export_hf(version(2), out, config_of(tmp_path / "config", 2)).result()

    assert held == ["adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors"]
    assert names_below(out) == held
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.get_tensor("w0")[0] == 1
    assert_only(out.parent, "model")


def test_two_exports_at_once_to_one_destination_are_written_one_after_the_other(out, tmp_path, held_back):  # noqa: F811
    handles = [async_ckpt.export_hf(version(i), out, config_of(tmp_path / "config", i), 2000 * i) for i in (1, 2, 3)]
    assert not any(handle.done() for handle in handles)
    assert not out.exists()
    held_back.set()
    for handle in handles:
        handle.result()

    assert_is_version(out, 3)
    assert_only(out.parent, "model")


@pytest.mark.skipif(sys.platform != "linux", reason="folders are exchanged, and opened, as on Linux")
def test_whoever_has_opened_the_folder_reads_one_export_or_none(out, tmp_path):
    async_ckpt.export_hf(version(0), out, config_of(tmp_path / "config", 0), 2000).result()
    num_read, ended = 0, threading.Event()

    def read_on() -> None:
        nonlocal num_read
        while not ended.is_set():
            there = os.open(out, os.O_RDONLY)  # at every moment there is one
            try:
                folder = Path(f"/proc/self/fd/{there}")
                number = json.loads((folder / "config.json").read_text())["version"]
                assert_is_version(folder, number)
                num_read += 1
            except (FileNotFoundError, AssertionError):
                if (folder / "config.json").exists() and os.stat(there).st_ino == os.stat(out).st_ino:
                    raise  # it was not removed under the reader
            finally:
                os.close(there)

    reading = Call(read_on)
    try:
        until(lambda: num_read > 0)
        for number in range(1, 25):
            async_ckpt.export_hf(
                version(number), out, config_of(tmp_path / "config", number), 2000 * (number % 3 + 1)
            ).result()
    finally:
        ended.set()
    reading.outcome()

    assert_is_version(out, 24)


DYING = """
import sys
import torch
import async_ckpt
from children import die_at
state = {f"w{i}": torch.full((500,), 2.0) for i in range(4)}
async_ckpt.export_hf(state, sys.argv[2] + "/warm").result()
count = die_at(int(sys.argv[3]))
async_ckpt.export_hf(state, sys.argv[1], sys.argv[2], 4000).result()
print(count())
"""


@pytest.mark.parametrize("was_there", [False, True])
def test_killed_at_any_change_of_the_disk_one_export_is_there_or_the_other(was_there, nursery, tmp_path):
    new, old = config_of(tmp_path / "new", 2), config_of(tmp_path / "old", 1)
    num_calls = 0
    for number in some(range(1, 1000), 3):
        folder = tmp_path / "runs" / str(number) / "model"
        folder.parent.mkdir(parents=True)
        if was_there:
            async_ckpt.export_hf(version(1), folder, old, 2000).result()
            (folder / "notes.txt").write_text("mine")
        ended = nursery.run(DYING, folder, new, number)
        assert ended.status in (0, -9), ended.err
        if not was_there and not folder.exists():
            assert ended.status == -9
        else:
            assert_is_version(folder, json.loads((folder / "config.json").read_text())["version"] if was_there else 2)
            assert not was_there or (folder / "notes.txt").read_text() == "mine"
        async_ckpt.export_hf(version(3), folder, config_of(tmp_path / "next", 3), 4000).result()
        assert_is_version(folder, 3)
        assert_only(folder.parent, "model")
        if ended.status == 0:
            num_calls = int(ended.out)
            break
        shutil.rmtree(folder.parent)

    assert number > num_calls > 15  # the scratch is removed once the handle has resolved


# --- what goes wrong ----------------------------------------------------------------------------------------------


@needs_mount
def test_a_disk_without_room_is_told_before_a_byte_is_written_and_a_read_only_one_too(tmp_path, config_folder):
    with mounted(tmp_path / "disk", "size=2m") as mount:
        async_ckpt.export_hf({"w": torch.ones(1000)}, mount / "model", config_folder).result()
        state = {"v": torch.ones(MIB // 4), "w": torch.ones(MIB // 2)}
        with pytest.raises(StorageFullError) as caught:
            async_ckpt.export_hf(state, mount / "model", config_folder, max_shard_bytes=MIB).result()
        assert caught.value.needed_bytes > 3 * MIB > 2 * MIB > (caught.value.free_bytes or 0)  # of all shards
        assert_only(mount, "model")
        assert_same(weights_in(mount / "model"), {"w": torch.ones(1000)})

        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        with pytest.raises(StorageUnavailableError):
            async_ckpt.export_hf({"w": torch.ones(5)}, mount / "model", config_folder).result()
        with pytest.raises(StorageUnavailableError):
            async_ckpt.export_hf({"w": torch.ones(5)}, mount / "other", config_folder).result()
        assert_only(mount, "model")
        assert_same(weights_in(mount / "model"), {"w": torch.ones(1000)})


FAILING = """
import sys
import torch
import async_ckpt
from children import allow_tracing
allow_tracing()
print("ready", flush=True)
sys.stdin.readline()
state = {f"w{i}": torch.full((500,), 2.0) for i in range(4)}
handle = async_ckpt.export_hf(state, sys.argv[1], sys.argv[2], 4000)
print(type(handle.exception()).__name__, flush=True)
"""


@pytest.mark.skipif(why_no_strace() is not None, reason="strace is needed")
@pytest.mark.parametrize(
    "fault",
    [
        "pwrite64:error=ENOSPC:when=2",
        "fsync:error=EIO:when=3",
        "link,linkat:error=EIO:when=1",
        "renameat2:error=EXDEV",
    ],
)
def test_a_disk_that_fails_in_the_middle_leaves_the_old_export_and_no_scratch(fault, nursery, tmp_path):
    folder = tmp_path / "outer" / "model"
    async_ckpt.export_hf(version(1), folder, config_of(tmp_path / "old", 1), 2000).result()
    (folder / "notes.txt").write_text("mine")
    os.mkfifo(tmp_path / "go")
    child = nursery.start(FAILING, folder, config_of(tmp_path / "new", 2), stdin=str(_opened_later(tmp_path / "go")))
    child.wait_for_line("ready")
    with injected(child, fault):
        (tmp_path / "go").write_text("\n")
        ended = child.ended()

    name = {"pwrite64": "StorageFullError"}.get(fault.partition(":")[0], "StorageUnavailableError")
    if fault.startswith("renameat2"):  # a file system without exchange: two renames do it
        assert "NoneType" in ended.out
        assert_is_version(folder, 2)
    else:
        assert name in ended.out, ended.err
        assert_is_version(folder, 1)
    assert_only(folder.parent, "model")


def _opened_later(path: Path) -> Path:
    """A pipe that its reader need not wait for."""
    os.open(path, os.O_RDWR | os.O_NONBLOCK)
    return path


# --- stores -------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["s3", "memory"])
def far(request: pytest.FixtureRequest) -> OnServer | InMemory:
    return InMemory() if request.param == "memory" else OnServer(request.getfixturevalue("bucket"), "obstore")


@pytest.fixture
def watched(bucket: Bucket, proxy: FaultyProxy) -> OnServer:
    """A folder in a bucket behind the proxy."""
    return OnServer(bucket, "obstore", endpoint=proxy.endpoint)


def fetched(far: OnServer | InMemory, folder: Path) -> Path:
    for name in far.names():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(far.read(name))
    return folder


def test_a_model_in_a_store_loads_and_the_next_one_leaves_no_shard_of_it(far, tmp_path):
    model = gpt2()
    wanted = state_of(model)
    handle = async_ckpt.export_hf(model, far.place, max_shard_bytes=20_000)
    spoil(model)
    report = handle.result()

    first = fetched(far, tmp_path / "first")
    assert_loads(first, wanted, transformers.GPT2LMHeadModel)
    assert report.num_bytes == sum(path.stat().st_size for path in first.iterdir())
    assert "model.safetensors.index.json" in far.names()

    async_ckpt.export_hf(model, far.place).result()
    assert far.names() == ["config.json", "generation_config.json", "model.safetensors"]
    assert_loads(fetched(far, tmp_path / "second"), state_of(model), transformers.GPT2LMHeadModel)


def test_the_config_in_a_store_stays_where_only_weights_come(far, tmp_path):
    async_ckpt.export_hf(version(1), far.place, config_of(tmp_path / "config", 2), 2000).result()
    async_ckpt.export_hf(version(2), far.place).result()

    assert_is_version(fetched(far, tmp_path / "fetched"), 2)


def test_an_adapter_in_a_store_comes_with_its_config_last_and_keeps_a_model_away(far, tmp_path):
    model = PeftModel("mine")
    async_ckpt.export_hf(model, far.place).result()
    with pytest.raises(FileExistsError, match="holds an adapter"):
        async_ckpt.export_hf(version(1), far.place).result()

    assert far.names() == ["adapter_config.json", "adapter_model.safetensors"]
    assert_same(
        weights_in(fetched(far, tmp_path / "fetched")),
        adapter_of(model.base_model.model.state_dict(), "mine"),
    )


def changes(proxy: FaultyProxy) -> list[str]:
    """What was put and deleted, in order: `+name` and `-name`, but for the probes of the store."""
    return [
        ("-" if request.method == "DELETE" else "+") + request.target.partition("?")[0].rpartition("/")[2]
        for request in proxy.requests
        if request.kind in ("put_object", "delete_object") and PROBE not in request.target
    ]


def test_in_a_store_the_config_goes_first_and_comes_last(watched, proxy, tmp_path):
    async_ckpt.export_hf(version(1), watched.place, config_of(tmp_path / "config", 1), 4000).result()
    assert changes(proxy) == [
        "+model-00001-of-00002.safetensors", "+model-00002-of-00002.safetensors", "+model.safetensors.index.json",
        "+config.json",
    ]  # fmt: skip
    before = len(changes(proxy))
    async_ckpt.export_hf(version(2), watched.place, config_of(tmp_path / "config", 2)).result()

    assert changes(proxy)[before:] == [
        "-config.json", "+model.safetensors", "-model-00001-of-00002.safetensors", "-model-00002-of-00002.safetensors",
        "-model.safetensors.index.json", "+config.json",
    ]  # fmt: skip
    assert_is_version(fetched(watched, tmp_path / "fetched"), 2)


def test_an_upload_that_fails_in_the_middle_leaves_nothing_that_loads_and_the_next_export_mends_it(
    watched, proxy, tmp_path
):
    async_ckpt.export_hf(version(1), watched.place, config_of(tmp_path / "config", 1), 2000).result()
    fault = proxy.answer("AccessDenied", target="model-00002-of-00002", method="PUT")
    with pytest.raises(StorageUnavailableError):
        async_ckpt.export_hf(version(2), watched.place, config_of(tmp_path / "config", 2), 4000).result()
    assert fault.hits
    assert "config.json" not in watched.names()
    proxy.clear()
    async_ckpt.export_hf(version(3), watched.place, config_of(tmp_path / "config", 3), 4000).result()

    assert_is_version(fetched(watched, tmp_path / "fetched"), 3)


def test_a_large_shard_goes_up_in_parts(watched, proxy, tmp_path):
    state = {"w": torch.arange(10 * MIB // 2), "v": torch.arange(3)}
    async_ckpt.export_hf(state, watched.place).result()

    assert proxy.count(kind="upload_part") >= 2
    assert_same(weights_in(fetched(watched, tmp_path / "fetched")), state)


# --- its life -----------------------------------------------------------------------------------------------------


def test_a_program_that_ends_right_after_the_call_loses_nothing(nursery, tmp_path):
    script = """
import sys
import torch, async_ckpt
state = {"w": torch.arange(3_000_000)}
snap = async_ckpt.snapshot(state)
async_ckpt.export_hf(snap, sys.argv[1] + "/hf")
async_ckpt.save(snap, sys.argv[1] + "/x.tar")
state["w"].zero_()
"""
    nursery.out_of(script, tmp_path)
    for found in (async_ckpt.load(tmp_path / "x.tar"), weights_in(tmp_path / "hf")):
        assert_same(found, {"w": torch.arange(3_000_000)})
    assert_only(tmp_path, "x.tar", "hf")


def test_the_report_and_the_progress_count_what_was_written(out, config_folder, held_back):  # noqa: F811
    state = {"w": torch.ones(5 * MIB // 4), "v": torch.ones(3)}
    handle = async_ckpt.export_hf(state, out, config_folder, max_shard_bytes=1000)
    handle.wait_staged()
    before = handle.progress
    held_back.set()
    report = handle.result()
    after = handle.progress

    assert before.staged_bytes == before.total_bytes > 5 * MIB > before.written_bytes == 0
    num_bytes = sum((out / name).stat().st_size for name in names_below(out))
    assert after.written_bytes == after.total_bytes == after.staged_bytes == num_bytes
    assert (report.status, report.step, report.path) == ("committed", None, str(out))
    assert (report.num_bytes, report.num_tensors) == (num_bytes, 2)
    assert report.destinations[0].num_bytes == num_bytes
    assert report.total_seconds >= report.write_seconds > 0
    assert report.total_seconds >= report.commit_seconds > 0
    assert 0 < report.stall_seconds < report.total_seconds
    assert handle.path == str(out)


def test_many_exports_keep_no_thread_no_file_no_memory_and_no_model(tmp_path):
    def counted() -> tuple[int, int]:
        # The crews' threads stay, and are started as they are needed: how many there are says nothing.
        others = [t for t in threading.enumerate() if not t.name.startswith("async_ckpt-")]
        return len(others), len(os.listdir("/proc/self/fd"))

    def settle() -> None:
        assert_only(tmp_path, "hf")
        until(lambda: not any("append" in thread.name for thread in threading.enumerate()))
        gc.collect()

    model: Any = mixtral()
    handles = [async_ckpt.export_hf(model, tmp_path / "hf", max_shard_bytes=20_000)]
    handles[0].result()
    settle()
    before = counted()
    for number in range(20):
        handles.append(async_ckpt.export_hf(model, tmp_path / "hf", max_shard_bytes=20_000))
        if number % 5 == 0:
            assert async_ckpt.export_hf(model, __file__ + "/nowhere").exception() is not None
    for handle in handles:
        handle.result()
    gone = weakref.ref(model)
    del model
    settle()

    assert counted() <= before
    assert gone() is None
    assert not host_memory()._bytes(held=False)
