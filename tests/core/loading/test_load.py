"""Loading: the whole or a part, from a file, a step or a run; copied, or mapped."""

import contextlib
import gc
import http
import json
import shutil
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from archives import flip, forge_manifest, parsed_index, read_index
from racing import Call
from states import difference
from torch import nn

import async_ckpt
from async_ckpt import AsyncCheckpointer, CorruptCheckpointError, Keep, NotCommittedError, StorageUnavailableError
from async_ckpt.core.loading import load as load_module
from async_ckpt.core.loading.archives import find
from async_ckpt.core.loading.archives.archive import OpenArchive
from async_ckpt.core.loading.archives.contents import Part
from async_ckpt.core.loading.archives.find import from_newest
from async_ckpt.core.loading.restore import RestoreOptions, restore_state
from async_ckpt.core.runs.roots import Roots
from async_ckpt.core.runs.run import Run
from async_ckpt.core.spec import BLOCK_BYTES, MIB
from async_ckpt.core.storage.local import LocalReader, LocalStorage

STATE: dict[str, Any] = {
    "model": {"layer.0": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(3)}, "layer.1": {"bias": torch.zeros(2)}},
    "optimizer": {"state": {0: {"step": torch.tensor(1.0)}, 1: {"step": torch.tensor(2.0)}}, "param_groups": [{"lr": 0.1}]},
    "list": [torch.tensor(0), torch.tensor(1), {"x": torch.tensor(2)}],
    "array": np.arange(4, dtype=">i4"),
    "blob": bytes(range(256)) * 20,
    "epoch": 3,
    "a[0]": {"w*": torch.tensor(5)},
}  # fmt: skip


@pytest.fixture
def saved(archive: Path) -> Path:
    async_ckpt.save(STATE, archive).result()
    return archive


@pytest.fixture
def large(archive: Path) -> tuple[Path, dict[str, Any]]:
    """Three tensors that lie megabytes apart."""
    state = {name: {"w": torch.randint(0, 256, (9 * MIB + 5,), dtype=torch.uint8)} for name in "abc"}
    async_ckpt.save(state, archive).result()
    return archive, state


# --- select ------------------------------------------------------------------------------------------------------

SELECTED = {
    "name": ("model", {"model": STATE["model"]}),
    "dotted": ("model.layer.0", {"model": {"layer.0": STATE["model"]["layer.0"]}}),
    "glob": (
        "model.*.bias",
        {"model": {"layer.0": {"bias": torch.ones(3)}, "layer.1": {"bias": torch.zeros(2)}}},
    ),
    "glob in the middle": ("*.step", {"optimizer": {"state": STATE["optimizer"]["state"]}}),
    "several": (["epoch", "model.layer.1"], {"model": {"layer.1": STATE["model"]["layer.1"]}, "epoch": 3}),
    "tuple": (("epoch", "blob"), {"blob": STATE["blob"], "epoch": 3}),
    "number": ("optimizer.state.1", {"optimizer": {"state": {1: {"step": torch.tensor(2.0)}}}}),
    "list item": ("list.1", {"list": [torch.tensor(1)]}),
    "in a list": ("optimizer.param_groups", {"optimizer": {"param_groups": [{"lr": 0.1}]}}),
    "brackets in the name": ("a[0]", {"a[0]": STATE["a[0]"]}),
    "star in the name": ("a[0].w*", {"a[0]": STATE["a[0]"]}),
    "array": ("array", {"array": STATE["array"]}),
    "all": ("*", STATE),
}


@pytest.mark.parametrize(("select", "expected"), SELECTED.values(), ids=SELECTED.keys())
@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
def test_a_part_is_selected_by_name_glob_or_several(select, expected, mmap, saved):
    assert difference(async_ckpt.load(saved, select=select, mmap=mmap), expected) is None


@pytest.mark.parametrize(
    "select", ["mode", "model.lay", "MODEL", "x", [], ["x", "y"], "model.layer.0.weight.x"], ids=repr
)
def test_a_selection_that_matches_nothing_names_what_there_is(select, saved):
    with pytest.raises(KeyError, match=r"matches nothing") as caught:
        async_ckpt.load(saved, select=select)
    for group in ("model", "optimizer", "list", "a[0]"):
        assert group in str(caught.value)


@pytest.mark.parametrize("select", [["epoch", "modle"], ["modle", "model.*", "epoch"]])
def test_of_several_patterns_each_must_match_something(select, saved):
    with pytest.raises(KeyError, match=r"'modle' matches nothing.*epoch.*model"):
        async_ckpt.load(saved, select=select)
    with pytest.raises(KeyError, match="'modle' matches nothing"):
        async_ckpt.save(STATE, saved.with_name("other.tar"), select=select)
    assert not saved.with_name("other.tar").exists()


def test_of_several_patterns_each_may_match_in_another_archive(tmp_path):
    state = {"base": {"w": torch.ones(3)}, "adapter": {"w": torch.ones(2)}}
    with AsyncCheckpointer(tmp_path) as ckpt:
        ckpt.save(state, step=1).result()
        ckpt.save(state, step=2, unchanged="base").result()
        assert set(ckpt.load(2, select=["base", "adapter"])) == {"base", "adapter"}
        live = {name: {"w": torch.zeros_like(group["w"])} for name, group in state.items()}
        assert ckpt.restore(live, step=2, select=["base", "adapter"]) == 2
        assert difference(live, state) is None
        with pytest.raises(KeyError, match="'bass' matches nothing"):
            ckpt.load(2, select=["bass", "adapter"])
        with pytest.raises(KeyError, match="'bass' matches nothing"):
            ckpt.restore(live, step=2, select=["adapter", "bass"])


@pytest.fixture
def promised(tmp_path: Path) -> Path:
    """A run whose step 2 says that step 1 lends it a group, which is not there, beside one that is."""
    root = tmp_path / "run"
    state = {"base": {"w": torch.ones(3)}, "adapter": {"w": torch.ones(2)}, "n": 1}
    with AsyncCheckpointer(root) as ckpt:
        ckpt.save(state, step=1).result()
        ckpt.save(state, step=2, unchanged="base").result()

    def lie(manifest: dict[str, Any]) -> None:
        manifest["elsewhere"].append(manifest["elsewhere"][0] | {"group": "embedding"})

    forge_manifest(root / "step_00000002" / "manifest.json", lie)
    return root


@pytest.mark.parametrize("lent", ["beside another", "alone"])
@pytest.mark.parametrize("select", [None, "embedding", "embedding.*", "*.w", "e*", ["adapter", "embedding.w"]])
def test_a_group_that_a_manifest_promises_and_its_archive_lacks_is_corrupt(promised, select, lent):
    if lent == "alone":
        path = promised / "step_00000002" / "manifest.json"
        forge_manifest(path, lambda made: made["elsewhere"].__delitem__(0))
    live = {"embedding": {"w": torch.zeros(3)}, "adapter": {"w": torch.zeros(2)}}
    with AsyncCheckpointer(promised) as ckpt:
        for read in (
            lambda: ckpt.load(2, select=select),
            lambda: async_ckpt.load(promised / "step_00000002", select=select),
            lambda: ckpt.restore(live, step=2, select=select),
            lambda: ckpt.restore(live, step=2, select=select, strict=False),
        ):
            with pytest.raises(CorruptCheckpointError, match=r"step_00000001.*'embedding'") as caught:
                read()
            assert not caught.value.partly_overwritten
    assert not live["adapter"]["w"].any()


def test_a_promised_group_that_nobody_asks_for_may_be_missing(promised):
    live = {"base": {"w": torch.zeros(3)}, "adapter": {"w": torch.zeros(2)}}
    with AsyncCheckpointer(promised) as ckpt:
        assert set(ckpt.load(2, select=["base", "adapter.w"])) == {"base", "adapter"}
        assert set(ckpt.load(2, select="b*")) == {"base"}
        assert set(ckpt.load(2, select="n")) == {"n"}
        assert ckpt.restore(live, step=2) == 2
    assert live["base"]["w"].all()


def test_a_step_that_borrows_and_is_no_dict_of_groups_itself_is_corrupt(promised):
    (lender,) = (promised / "step_00000001").glob("*.tar")
    made = json.loads((promised / "step_00000002" / "manifest.json").read_bytes())
    with AsyncCheckpointer(promised) as ckpt:
        ckpt.save([torch.ones(2)], step=3).result()
    forge_manifest(promised / "step_00000003" / "manifest.json", elsewhere=made["elsewhere"][:1])
    assert lender.exists()
    with pytest.raises(CorruptCheckpointError, match=r"step_00000003.*not a dict"):
        async_ckpt.load(promised)


def test_a_selection_that_matches_nothing_is_an_error_beside_empty_containers(archive):
    async_ckpt.save(
        {"model": {"w": torch.ones(1)}, "optimizer": {"state": {}, "groups": []}, "t": ()}, archive
    ).result()
    with pytest.raises(KeyError, match="model"):
        async_ckpt.load(archive, select="scheduler")


def test_an_empty_container_that_was_not_selected_is_left_out(archive):
    async_ckpt.save(
        {"model": {"w": torch.ones(1)}, "optimizer": {"state": {}}, "empty": OrderedDict()}, archive
    ).result()
    assert list(async_ckpt.load(archive, select="model")) == ["model"]
    assert async_ckpt.load(archive, select="optimizer") == {"optimizer": {"state": {}}}
    assert async_ckpt.load(archive, select=["empty"]) == {"empty": OrderedDict()}


def test_a_selected_none_is_something(archive):
    async_ckpt.save({"a": None, "b": 1}, archive).result()
    assert async_ckpt.load(archive, select="a") == {"a": None}


def test_a_bare_tensor_has_no_name_to_select(archive):
    async_ckpt.save(torch.ones(2), archive).result()
    with pytest.raises(KeyError, match="no named tensors"):
        async_ckpt.load(archive, select="model")


def test_a_selected_module_keeps_the_metadata_of_its_state_dict(archive):
    async_ckpt.save({"model": nn.BatchNorm1d(2), "n": 1}, archive).result()
    assert async_ckpt.load(archive, select="model")["model"]._metadata[""] == {"version": 2}


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
def test_only_what_is_selected_is_read(mmap, large):
    """The middle one is damaged, which is found by whoever reads it, and by no one else."""
    path, state = large
    damaged = parsed_index(path).tensors[1].slices[0].extent
    flip(path, damaged.offset + damaged.length // 2)
    for name in "ac":
        loaded = async_ckpt.load(path, select=name, mmap=mmap)
        assert difference(loaded, {name: state[name]}) is None
    for select in ("b", None, ["a", "b"]):
        with pytest.raises(CorruptCheckpointError, match="block") as caught:
            async_ckpt.load(path, select=select, mmap=mmap)
        assert caught.value.path == str(path)
        assert not caught.value.partly_overwritten


def test_unverified_loading_reads_damaged_bytes_as_they_are(large):
    path, state = large
    damaged = parsed_index(path).tensors[1].slices[0].extent
    flip(path, damaged.offset + 100)
    loaded = async_ckpt.load(path, verify=False)
    assert difference(loaded["a"], state["a"]) is None
    wrong = (loaded["b"]["w"] != state["b"]["w"]).nonzero().flatten().tolist()
    assert wrong == [100]


def test_a_tensor_that_begins_and_ends_inside_of_blocks_is_read_whole(archive):
    """Sizes around the digest block and the read buffer, each loaded alone and together."""
    sizes = [BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3, 16 * MIB + 1, 1]
    state = {f"t{i}": torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    async_ckpt.save(state, archive).result()
    for verify in (True, False):
        assert difference(async_ckpt.load(archive, verify=verify), state) is None
        for name in state:
            assert difference(async_ckpt.load(archive, select=name, verify=verify), {name: state[name]}) is None
    assert (
        difference(async_ckpt.load(archive, select=["t5", "t0", "t3"]), {n: state[n] for n in ("t0", "t3", "t5")})
        is None
    )


# --- where to ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), None], ids=repr)
def test_tensors_come_to_the_cpu(device, saved):
    assert difference(async_ckpt.load(saved, map_location=device), STATE) is None


def test_an_unknown_device_is_an_error_and_the_archive_still_loads(saved):
    with pytest.raises(ValueError, match="map_location='nowhere' is not a device"):
        async_ckpt.load(saved, map_location="nowhere")
    assert difference(async_ckpt.load(saved), STATE) is None


@pytest.mark.parametrize("verify", [True, False])
def test_a_mapped_load_equals_a_copied_one(verify, saved):
    assert difference(async_ckpt.load(saved, mmap=True, verify=verify), STATE) is None
    assert difference(async_ckpt.load(saved, mmap=True, map_location="cpu"), STATE) is None


def test_writing_to_mapped_tensors_leaves_the_file_alone(saved):
    before = saved.read_bytes()
    loaded = async_ckpt.load(saved, mmap=True)
    loaded["model"]["layer.0"]["weight"].fill_(7)
    loaded["array"][:] = 7
    assert loaded["model"]["layer.0"]["weight"].eq(7).all()
    assert saved.read_bytes() == before
    assert difference(async_ckpt.load(saved, mmap=True), STATE) is None


def test_mapped_tensors_outlive_the_file_and_are_views_of_one_map(saved):
    loaded = async_ckpt.load(saved, mmap=True)
    told = parsed_index(saved).tensors
    begin = {row.dotted: row.slices[0].extent.offset for row in told}
    weight, bias = loaded["model"]["layer.0"]["weight"], loaded["model"]["layer.0"]["bias"]
    apart = begin["model.layer.0.bias"] - begin["model.layer.0.weight"]
    assert bias.data_ptr() - weight.data_ptr() == apart
    saved.unlink()
    assert difference(loaded, STATE) is None


def test_tied_tensors_are_tied_when_they_are_mapped(archive):
    weight = torch.randn(10)
    async_ckpt.save({"a": weight, "b": [weight]}, archive).result()
    loaded = async_ckpt.load(archive, mmap=True)
    assert loaded["a"].data_ptr() == loaded["b"][0].data_ptr()


def test_a_map_cannot_lie_on_a_device(saved):
    with pytest.raises(ValueError, match="mmap"):
        async_ckpt.load(saved, mmap=True, map_location="cuda")


def test_two_loads_share_no_memory(saved):
    first = async_ckpt.load(saved)
    first["model"]["layer.0"]["weight"].zero_()
    first["optimizer"]["param_groups"][0]["lr"] = 0
    assert difference(async_ckpt.load(saved), STATE) is None


def test_arrays_and_tensors_that_were_loaded_can_be_changed(saved):
    loaded = async_ckpt.load(saved)
    loaded["array"][0] = 9
    loaded["model"]["layer.0"]["weight"].add_(1)
    assert loaded["array"].dtype == np.dtype(">i4")
    assert not loaded["model"]["layer.0"]["weight"].requires_grad


# --- where from --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the steps 1 and 12."""
    root = tmp_path / "a run"
    with AsyncCheckpointer(root) as ckpt:
        for step in (1, 12):
            ckpt.save({"w": torch.full((3,), float(step)), "step": step}, step=step).result()
    return root


def test_a_run_folder_gives_its_newest_step(run):
    assert async_ckpt.load(run)["step"] == 12
    assert async_ckpt.load(str(run) + "/")["step"] == 12


def test_a_step_folder_gives_that_step(run):
    assert async_ckpt.load(run / "step_00000001")["step"] == 1
    assert async_ckpt.load(run / "step_00000012", mmap=True)["step"] == 12


def test_an_archive_of_a_run_loads_as_a_file(run):
    (path,) = (run / "step_00000001").glob("*.tar")
    assert async_ckpt.load(path)["step"] == 1
    shutil.copy(path, run / "elsewhere.tar")
    assert async_ckpt.load(run / "elsewhere.tar", select="w")["w"].tolist() == [1, 1, 1]
    assert read_index(path)["step"] == 1


def test_a_checkpointer_loads_a_step_or_the_newest(run):
    with AsyncCheckpointer(run) as ckpt:
        assert ckpt.load()["step"] == 12
        assert ckpt.load(1)["step"] == 1
        assert ckpt.load(step=1, select="w", mmap=True)["w"].tolist() == [1, 1, 1]
        with pytest.raises(NotCommittedError) as caught:
            ckpt.load(5)
        assert caught.value.step == 5


def test_loading_changes_nothing_in_the_folder(run):
    before = sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*"))
    async_ckpt.load(run)
    async_ckpt.load(run, mmap=True)
    with AsyncCheckpointer(run) as ckpt:
        ckpt.load()
        ckpt.steps()
    assert sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*")) == before


def test_a_file_url_is_a_path(tmp_path):
    target = tmp_path / "with space & ü.tar"
    async_ckpt.save({"n": 1}, target.as_uri()).result()
    assert target.exists()
    assert async_ckpt.load(target.as_uri()) == {"n": 1}
    assert async_ckpt.load(target) == async_ckpt.load(str(target)) == {"n": 1}


def test_a_relative_path_starts_where_the_process_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    async_ckpt.save({"n": 1}, "sub/x.tar").result()
    assert async_ckpt.load("sub/x.tar") == {"n": 1}
    assert (tmp_path / "sub" / "x.tar").exists()


@pytest.mark.parametrize("url", ["nowhere://bucket/x.tar", "s4://bucket/x.tar"])
def test_a_url_of_an_unknown_scheme_is_refused_by_name(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scheme = url.split(":")[0]
    for act in (
        lambda: async_ckpt.load(url),
        lambda: async_ckpt.save({}, url),
        lambda: AsyncCheckpointer(url),
    ):
        with pytest.raises(ValueError, match=scheme):
            act()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [b"x.tar", 3, None, ["x"]], ids=repr)
def test_a_path_of_another_type_is_a_type_error(path):
    with pytest.raises(TypeError, match="path"):
        async_ckpt.load(path)
    with pytest.raises(TypeError, match="path"):
        async_ckpt.save({}, path)


def test_what_is_not_there_is_not_committed(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "missing.tar", tmp_path / "no" / "such" / "folder", empty):
        with pytest.raises(NotCommittedError, match=path.name) as caught:
            async_ckpt.load(path)
        assert isinstance(caught.value, FileNotFoundError)
        assert caught.value.path == str(path)
        assert caught.value.step is None


def test_what_opening_has_read_of_an_archive_is_not_asked_for_again(archive, monkeypatch):
    async_ckpt.save({"w": torch.ones(3)}, archive).result()
    with LocalStorage(archive.parent).open(archive.name) as reader:
        opened, asked = OpenArchive(reader, path=str(archive), verify=True), []
        monkeypatch.setattr(LocalReader, "read_into", lambda self, offset, target: asked.append((offset, len(target))))
        known = bytearray(opened.num_begun)
        opened.read_into(0, memoryview(known))

    assert known == archive.read_bytes()[: opened.num_begun] != b""
    assert asked == []


def test_what_is_no_checkpoint_is_told_apart(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "logs").mkdir(parents=True)
    for name, said in (("missing", "nothing at this path"), ("empty", "is empty"), ("other", "but logs")):
        with pytest.raises(NotCommittedError, match=said):
            async_ckpt.load(tmp_path / name)


# --- beside a writer that keeps one step -------------------------------------------------------------------------


class Overtaking(LocalStorage):
    """A run's folder in which, when a reader has come by a certain call, a writer commits a step and deletes the older one."""

    keep_every: int | None = None

    def __init__(self, root: Path, call: str, times: int, *, before: bool) -> None:
        super().__init__(root)
        self._writes_to, self._call, self._times, self._before = root, call, times, before
        self._lock = threading.Lock()  # readers are threads
        self.newest = max(AsyncCheckpointer(root).steps())

    @contextlib.contextmanager
    def _at(self, call: str) -> Iterator[None]:
        if call == self._call and self._before:
            self._overtake()
        yield
        if call == self._call and not self._before:
            self._overtake()

    def _overtake(self) -> None:
        with self._lock:
            if not self._times:
                return
            self._times -= 1
            self.newest += 1
            Call(self._save).outcome()  # no reader's thread may wait for a save

    def _save(self) -> None:
        with AsyncCheckpointer(self._writes_to, keep=Keep(last=1, every=self.keep_every)) as ckpt:
            ckpt.save({"w": torch.full((3,), float(self.newest)), "step": self.newest}, self.newest)

    def names(self, folder: str) -> list[str]:
        with self._at("names"):
            return super().names(folder)

    def exists(self, path: str) -> bool:
        with self._at("exists"):
            return super().exists(path)

    def existing(self, paths: Sequence[str]) -> list[str]:
        with self._at("exists"):
            return super().existing(paths)

    def read(self, path: str) -> tuple[bytes, str]:
        with self._at("read"):
            return super().read(path)

    def open(self, path: str) -> LocalReader:
        with self._at("open"):
            return OvertakenReader(self, self.root / path)


class OvertakenReader(LocalReader):
    def __init__(self, storage: Overtaking, path: Path) -> None:
        super().__init__(path)
        self._storage = storage

    def read_into(self, offset: int, target: memoryview) -> None:
        with self._storage._at("read_into"):
            super().read_into(offset, target)


@pytest.fixture(params=["names", "exists", "read", "open", "read_into"])
def overtaken(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Overtaking]:
    """A run of which readers see what such a storage shows."""

    def make(*, times: int, before: bool, steps: Sequence[int] = (1, 2)) -> Overtaking:
        root = tmp_path / "run"
        with AsyncCheckpointer(root) as ckpt:
            for step in steps:
                ckpt.save({"w": torch.full((3,), float(step)), "step": step}, step).result()
        storage = Overtaking(root, request.param, times, before=before)

        def storage_at(path: Any) -> LocalStorage:
            return storage if Path(path) == root else real(path)

        real = find.storage_at
        monkeypatch.setattr(find, "storage_at", storage_at)
        return storage

    return make


HOW = [{}, {"mmap": True, "verify": False}]


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_run_whose_newest_step_is_deleted_while_it_is_opened_gives_a_newer_one(overtaken, before, how):
    storage = overtaken(times=3, before=before)
    loaded = async_ckpt.load(storage.root, **how)
    assert loaded["step"] == loaded["w"][0] > 1


@pytest.mark.parametrize("overtaken", ["names", "exists", "read", "open"], indirect=True)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_an_old_step_that_is_kept_is_not_taken_for_the_newest_when_that_is_deleted_meanwhile(overtaken, before):
    storage = overtaken(times=1, before=before, steps=(5, 6))
    storage.keep_every = 5
    assert async_ckpt.load(storage.root)["step"] >= 6


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_the_newest_step_of_roots_is_a_newer_one_when_it_is_deleted_while_it_is_opened(overtaken, before, how):
    storage = overtaken(times=2, before=before)
    roots = Roots([Run(storage, clock=time.time)])

    def use(parts: Sequence[Part]) -> Any:
        return load_module.state_of(parts, load_module.LoadOptions(mmap=how.get("mmap", False)))

    found = from_newest(roots, use, verify=how.get("verify", True))
    assert found is not None
    step, loaded = found
    assert step == loaded["step"] == loaded["w"][0] > 1


@pytest.mark.parametrize("how", HOW, ids=str)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_step_that_is_named_and_deleted_while_it_is_opened_is_not_committed(overtaken, before, how, monkeypatch):
    """Or it was opened already, and is all there."""
    storage = overtaken(times=1, before=before)
    named = storage.root / "step_00000002"

    class Below(Overtaking):
        """The folder of the step, seen through the same hook."""

        def __init__(self) -> None:
            LocalStorage.__init__(self, named)

        def _at(self, call: str) -> Any:
            return storage._at(call)

    monkeypatch.setattr(find, "storage_at", lambda path: Below() if Path(path) == named else LocalStorage(path))
    with contextlib.suppress(NotCommittedError):
        assert async_ckpt.load(named, **how)["step"] == 2


@pytest.mark.parametrize("overtaken", ["read", "open"], indirect=True)
def test_a_run_whose_steps_are_deleted_for_ever_is_given_up(overtaken, monkeypatch):
    monkeypatch.setattr(find, "TRIES", 5)
    storage = overtaken(times=10_000, before=True)
    with pytest.raises(StorageUnavailableError, match=r"deleted.*keep=") as caught:
        async_ckpt.load(storage.root)
    assert caught.value.path == str(storage.root)
    assert isinstance(caught.value.__cause__, NotCommittedError | None)


def test_a_run_that_is_deleted_while_it_is_opened_is_not_committed(run, monkeypatch):
    class Deleted(LocalStorage):
        def read(self, path: str) -> tuple[bytes, str]:
            shutil.rmtree(run)
            return super().read(path)

    monkeypatch.setattr(find, "storage_at", lambda path: Deleted(path))
    with pytest.raises(NotCommittedError, match="nothing at this path"):
        async_ckpt.load(run)


def test_an_archive_is_mapped_as_it_was_opened(saved, monkeypatch):
    """Whatever is at its path by then."""

    class Replaced(LocalReader):
        def close(self) -> None:
            super().close()

        def read_into(self, offset: int, target: memoryview) -> None:
            super().read_into(offset, target)
            saved.unlink(missing_ok=True)
            saved.write_bytes(bytes(self.num_bytes))

    monkeypatch.setattr(LocalStorage, "open", lambda self, path: Replaced(self.root / path))
    assert difference(async_ckpt.load(saved, mmap=True), STATE) is None


def test_a_step_that_can_be_read_no_more_once_it_is_deleted_is_followed_by_a_newer_one(run, monkeypatch):
    """In an object store nobody holds what was opened: its reads fail."""
    with AsyncCheckpointer(run) as ckpt:  # more than is read to open it
        ckpt.save({"w": torch.ones(5 * MIB, dtype=torch.uint8), "step": 12}, 12, overwrite=True).result()

    class Far(LocalReader):
        is_opened = False

        def read_into(self, offset: int, target: memoryview) -> None:
            if self.is_opened and (run / "step_00000012").exists():
                Call(lambda: save_over(run, 13)).outcome()
            self.is_opened = True
            if not self._path.exists():
                raise StorageUnavailableError(f"{self._path}: 404", path=str(self._path))
            super().read_into(offset, target)

    monkeypatch.setattr(LocalStorage, "open", lambda self, path: Far(self.root / path))
    assert async_ckpt.load(run)["step"] == 13
    with pytest.raises(NotCommittedError):
        async_ckpt.load(run / "step_00000012")


def save_over(root: Path, step: int) -> None:
    with AsyncCheckpointer(root, keep=1) as ckpt:
        ckpt.save({"w": torch.full((3,), float(step)), "step": step}, step)


def test_a_step_that_is_deleted_while_it_is_restored_says_what_it_has_overwritten(tmp_path):
    with AsyncCheckpointer(tmp_path) as ckpt:
        ckpt.save({"w": torch.ones(9 * MIB, dtype=torch.uint8)}, 7).result()
    (path,) = (tmp_path / "step_00000007").glob("*.tar")
    flip(path, 8 * MIB)
    live = {"w": torch.zeros(9 * MIB, dtype=torch.uint8)}

    def put_back(parts: Sequence[Part]) -> None:
        try:
            restore_state(parts, live, RestoreOptions())
        finally:
            shutil.rmtree(path.parent)

    roots = Roots([Run(LocalStorage(tmp_path), clock=time.time)])
    with pytest.raises(NotCommittedError, match="deleted while it was read") as caught:
        find.from_step(roots, 7, put_back, verify=True)
    assert caught.value.step == 7
    assert isinstance(caught.value.__cause__, CorruptCheckpointError)
    assert caught.value.partly_overwritten is caught.value.__cause__.partly_overwritten is True


def test_of_the_newest_steps_corrupt_ones_are_told_of_and_passed_over(run):
    roots = Roots([Run(LocalStorage(run), clock=time.time)])
    told: list[int] = []

    def taken() -> tuple[int, str] | None:
        return from_newest(
            roots,
            lambda parts: parts[0].archive.path,
            verify=True,
            falls_back=True,
            on_skip=lambda step, reason: told.append(step),
        )

    assert taken() == (12, str(next((run / "step_00000012").glob("*.tar"))))
    flip(next((run / "step_00000012").glob("*.tar")), 700)
    assert taken() == (1, str(next((run / "step_00000001").glob("*.tar"))))
    assert told == [12]
    with pytest.raises(CorruptCheckpointError, match="step_00000012"):
        from_newest(roots, len, verify=True)
    flip(next((run / "step_00000001").glob("*.tar")), 700)
    with pytest.raises(CorruptCheckpointError, match="step_00000012"):
        taken()
    shutil.rmtree(run)
    assert taken() is None


def test_a_step_that_a_rollback_has_taken_out_of_the_run_is_not_its_newest(run):
    """As soon as the rollback is committed: that the step's manifest is renamed comes later, or never."""
    kept, newer = (json.loads((run / f"step_{step:08d}" / "manifest.json").read_bytes()) for step in (1, 12))
    (run / f"rollback-1.{kept['attempt']}.json").write_bytes(b"announced")
    assert async_ckpt.load(run)["step"] == 12
    forge_manifest(run / "step_00000001" / "manifest.json", retires=[{"step": 12, "attempt": newer["attempt"]}])
    assert async_ckpt.load(run)["step"] == 1
    forge_manifest(run / "step_00000012" / "manifest.json", attempt="0" * 8)  # committed since
    assert async_ckpt.load(run)["step"] == 12


_WRITER = """
    import itertools, sys, torch
    from async_ckpt import AsyncCheckpointer
    with AsyncCheckpointer(sys.argv[1], keep=1) as ckpt:
        for step in itertools.count(1):
            ckpt.save({"base": {"w": torch.full((3,), float(step))}, "step": step}, step).result()
            if step == 2:
                print("two steps", flush=True)
"""


def test_a_run_is_read_two_hundred_times_beside_a_process_that_writes_it(tmp_path, nursery):
    child = nursery.start(_WRITER, tmp_path / "run")
    try:
        child.wait_for_line("two steps")
        last = 0
        for number in range(200):
            loaded = async_ckpt.load(tmp_path / "run", mmap=number % 2 == 1, verify=number % 3 > 0)
            assert loaded["step"] == loaded["base"]["w"][0] >= last
            last = loaded["step"]
    finally:
        child.send(signal.SIGKILL)
        child.ended()
    assert last > 2


@pytest.mark.parametrize(
    "read",
    [
        async_ckpt.load,
        async_ckpt.verify,
        lambda root: AsyncCheckpointer(root).restore({"a": {"w": torch.zeros(9)}, "b": {"w": torch.zeros(9)}}),
    ],
    ids=["load", "verify", "restore"],
)
def test_the_blocks_that_were_read_are_freed_without_the_garbage_collector(read, tmp_path):
    """A process that loads again and again would grow by megabytes for each archive until the next collection."""
    state = {"a": {"w": torch.ones(9)}, "b": {"w": torch.ones(9)}}
    with AsyncCheckpointer(tmp_path) as ckpt:
        ckpt.save(state, 1)
        ckpt.save(state, 2, unchanged=["a"])
    gc.collect()
    gc.disable()
    try:
        read(tmp_path)
        assert not [one for one in gc.get_objects() if type(one) is OpenArchive]
    finally:
        gc.enable()


# --- other names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar.bz2", "X.TAR.GZ", "x.txz", "x.tar.zstd"])
def test_a_name_that_promises_another_compression_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=r"only zstd.*\.tar\.zst"):
        async_ckpt.save(STATE, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"select": 5}, TypeError, "select must be a name, a glob such as .* got 5"),
        ({"select": ["a", 5]}, TypeError, "select must be a name, a glob such as .* got 5"),
        ({"types": dict}, TypeError, r"types must be a list of classes, such as types=\[Config\], got dict"),
        ({"types": 5}, TypeError, "types must be a list of classes, .* got 5"),
        (
            {"map_location": "hpu:77"},
            ValueError,
            "map_location='hpu:77' is not a device that torch can use here",
        ),
    ],
    ids=repr,
)
def test_arguments_that_mean_nothing_are_refused_by_their_names(how, error, message, archive):
    async_ckpt.save({"w": torch.ones(1)}, archive).result()
    with pytest.raises(error, match=message):
        async_ckpt.load(archive, **how)


def test_types_of_none_are_no_types(tmp_path):
    with AsyncCheckpointer(tmp_path) as ckpt:
        ckpt.save({"status": http.HTTPStatus.OK}, 1).result()
        live = {"status": None}
        ckpt.restore(live, types=None)
        for loaded in (live, ckpt.load(types=None), async_ckpt.load(tmp_path, types=None)):
            assert (type(loaded["status"]), loaded["status"]) == (int, 200)
