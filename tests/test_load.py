"""Loading: the whole or a part, from a file, a step or a run; copied, or mapped."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import difference, flip, parsed_index, read_index
from torch import nn

import async_ckpt
from async_ckpt import AsyncCheckpointer, CorruptCheckpointError, NotCommittedError
from async_ckpt.spec import BLOCK_BYTES, MIB

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
def test_a_part_is_selected_by_name_glob_or_several(
    select: Any, expected: Any, mmap: bool, saved: Path
) -> None:
    assert difference(async_ckpt.load(saved, select=select, mmap=mmap), expected) is None


@pytest.mark.parametrize(
    "select", ["mode", "model.lay", "MODEL", "x", [], ["x", "y"], "model.layer.0.weight.x"], ids=repr
)
def test_a_selection_that_matches_nothing_names_what_there_is(select: Any, saved: Path) -> None:
    with pytest.raises(KeyError, match=r"matches nothing") as caught:
        async_ckpt.load(saved, select=select)
    for group in ("model", "optimizer", "list", "a[0]"):
        assert group in str(caught.value)


@pytest.mark.parametrize("select", [["epoch", "modle"], ["modle", "model.*", "epoch"]])
def test_of_several_patterns_each_must_match_something(select: list[str], saved: Path) -> None:
    with pytest.raises(KeyError, match=r"'modle' matches nothing.*epoch.*model"):
        async_ckpt.load(saved, select=select)
    with pytest.raises(KeyError, match="'modle' matches nothing"):
        async_ckpt.save(STATE, saved.with_name("other.tar"), select=select)
    assert not saved.with_name("other.tar").exists()


def test_of_several_patterns_each_may_match_in_another_archive(tmp_path: Path) -> None:
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


def test_a_selection_that_matches_nothing_is_an_error_beside_empty_containers(archive: Path) -> None:
    async_ckpt.save(
        {"model": {"w": torch.ones(1)}, "optimizer": {"state": {}, "groups": []}, "t": ()}, archive
    ).result()
    with pytest.raises(KeyError, match="model"):
        async_ckpt.load(archive, select="scheduler")


def test_an_empty_container_that_was_not_selected_is_left_out(archive: Path) -> None:
    async_ckpt.save(
        {"model": {"w": torch.ones(1)}, "optimizer": {"state": {}}, "empty": OrderedDict()}, archive
    ).result()
    assert list(async_ckpt.load(archive, select="model")) == ["model"]
    assert async_ckpt.load(archive, select="optimizer") == {"optimizer": {"state": {}}}
    assert async_ckpt.load(archive, select=["empty"]) == {"empty": OrderedDict()}


def test_a_selected_none_is_something(archive: Path) -> None:
    async_ckpt.save({"a": None, "b": 1}, archive).result()
    assert async_ckpt.load(archive, select="a") == {"a": None}


def test_a_bare_tensor_has_no_name_to_select(archive: Path) -> None:
    async_ckpt.save(torch.ones(2), archive).result()
    with pytest.raises(KeyError, match="no named tensors"):
        async_ckpt.load(archive, select="model")


def test_a_selected_module_keeps_the_metadata_of_its_state_dict(archive: Path) -> None:
    async_ckpt.save({"model": nn.BatchNorm1d(2), "n": 1}, archive).result()
    assert async_ckpt.load(archive, select="model")["model"]._metadata[""] == {"version": 2}


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mmap"])
def test_only_what_is_selected_is_read(mmap: bool, large: tuple[Path, dict[str, Any]]) -> None:
    """The middle one is damaged, which is found by whoever reads it, and by no one else."""
    path, state = large
    damaged = parsed_index(path).tensors[1].extent
    flip(path, damaged.offset + damaged.length // 2)
    for name in "ac":
        loaded = async_ckpt.load(path, select=name, mmap=mmap)
        assert difference(loaded, {name: state[name]}) is None
    for select in ("b", None, ["a", "b"]):
        with pytest.raises(CorruptCheckpointError, match="block") as caught:
            async_ckpt.load(path, select=select, mmap=mmap)
        assert caught.value.path == str(path)
        assert not caught.value.partly_overwritten


def test_unverified_loading_reads_damaged_bytes_as_they_are(large: tuple[Path, dict[str, Any]]) -> None:
    path, state = large
    damaged = parsed_index(path).tensors[1].extent
    flip(path, damaged.offset + 100)
    loaded = async_ckpt.load(path, verify=False)
    assert difference(loaded["a"], state["a"]) is None
    wrong = (loaded["b"]["w"] != state["b"]["w"]).nonzero().flatten().tolist()
    assert wrong == [100]


def test_a_tensor_that_begins_and_ends_inside_of_blocks_is_read_whole(archive: Path) -> None:
    """Sizes around the digest block and the read buffer, each loaded alone and together."""
    sizes = [BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 3, 16 * MIB + 1, 1]
    state = {f"t{i}": torch.randint(0, 256, (n,), dtype=torch.uint8) for i, n in enumerate(sizes)}
    async_ckpt.save(state, archive).result()
    for verify in (True, False):
        assert difference(async_ckpt.load(archive, verify=verify), state) is None
        for name in state:
            assert (
                difference(async_ckpt.load(archive, select=name, verify=verify), {name: state[name]}) is None
            )
    assert (
        difference(
            async_ckpt.load(archive, select=["t5", "t0", "t3"]), {n: state[n] for n in ("t0", "t3", "t5")}
        )
        is None
    )


# --- where to ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), None], ids=repr)
def test_tensors_come_to_the_cpu(device: Any, saved: Path) -> None:
    assert difference(async_ckpt.load(saved, map_location=device), STATE) is None


def test_an_unknown_device_is_an_error_and_the_archive_still_loads(saved: Path) -> None:
    with pytest.raises(RuntimeError, match="nowhere"):
        async_ckpt.load(saved, map_location="nowhere")
    assert difference(async_ckpt.load(saved), STATE) is None


@pytest.mark.parametrize("verify", [True, False])
def test_a_mapped_load_equals_a_copied_one(verify: bool, saved: Path) -> None:
    assert difference(async_ckpt.load(saved, mmap=True, verify=verify), STATE) is None
    assert difference(async_ckpt.load(saved, mmap=True, map_location="cpu"), STATE) is None


def test_writing_to_mapped_tensors_leaves_the_file_alone(saved: Path) -> None:
    before = saved.read_bytes()
    loaded = async_ckpt.load(saved, mmap=True)
    loaded["model"]["layer.0"]["weight"].fill_(7)
    loaded["array"][:] = 7
    assert loaded["model"]["layer.0"]["weight"].eq(7).all()
    assert saved.read_bytes() == before
    assert difference(async_ckpt.load(saved, mmap=True), STATE) is None


def test_mapped_tensors_outlive_the_file_and_are_views_of_one_map(saved: Path) -> None:
    loaded = async_ckpt.load(saved, mmap=True)
    told = parsed_index(saved).tensors
    begin = {row.dotted: row.extent.offset for row in told}
    weight, bias = loaded["model"]["layer.0"]["weight"], loaded["model"]["layer.0"]["bias"]
    apart = begin["model.layer.0.bias"] - begin["model.layer.0.weight"]
    assert bias.data_ptr() - weight.data_ptr() == apart
    saved.unlink()
    assert difference(loaded, STATE) is None


def test_tied_tensors_are_tied_when_they_are_mapped(archive: Path) -> None:
    weight = torch.randn(10)
    async_ckpt.save({"a": weight, "b": [weight]}, archive).result()
    loaded = async_ckpt.load(archive, mmap=True)
    assert loaded["a"].data_ptr() == loaded["b"][0].data_ptr()


def test_a_map_cannot_lie_on_a_device(saved: Path) -> None:
    with pytest.raises(ValueError, match="mmap"):
        async_ckpt.load(saved, mmap=True, map_location="cuda")


def test_two_loads_share_no_memory(saved: Path) -> None:
    first = async_ckpt.load(saved)
    first["model"]["layer.0"]["weight"].zero_()
    first["optimizer"]["param_groups"][0]["lr"] = 0
    assert difference(async_ckpt.load(saved), STATE) is None


def test_arrays_and_tensors_that_were_loaded_can_be_changed(saved: Path) -> None:
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


def test_a_run_folder_gives_its_newest_step(run: Path) -> None:
    assert async_ckpt.load(run)["step"] == 12
    assert async_ckpt.load(str(run) + "/")["step"] == 12


def test_a_step_folder_gives_that_step(run: Path) -> None:
    assert async_ckpt.load(run / "step_00000001")["step"] == 1
    assert async_ckpt.load(run / "step_00000012", mmap=True)["step"] == 12


def test_an_archive_of_a_run_loads_as_a_file(run: Path) -> None:
    (path,) = (run / "step_00000001").glob("*.tar")
    assert async_ckpt.load(path)["step"] == 1
    shutil.copy(path, run / "elsewhere.tar")
    assert async_ckpt.load(run / "elsewhere.tar", select="w")["w"].tolist() == [1, 1, 1]
    assert read_index(path)["step"] == 1


def test_a_checkpointer_loads_a_step_or_the_newest(run: Path) -> None:
    with AsyncCheckpointer(run) as ckpt:
        assert ckpt.load()["step"] == 12
        assert ckpt.load(1)["step"] == 1
        assert ckpt.load(step=1, select="w", mmap=True)["w"].tolist() == [1, 1, 1]
        with pytest.raises(NotCommittedError) as caught:
            ckpt.load(5)
        assert caught.value.step == 5


def test_loading_changes_nothing_in_the_folder(run: Path) -> None:
    before = sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*"))
    async_ckpt.load(run)
    async_ckpt.load(run, mmap=True)
    with AsyncCheckpointer(run) as ckpt:
        ckpt.load()
        ckpt.steps()
    assert sorted((str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*")) == before


def test_a_file_url_is_a_path(tmp_path: Path) -> None:
    target = tmp_path / "with space & ü.tar"
    async_ckpt.save({"n": 1}, target.as_uri()).result()
    assert target.exists()
    assert async_ckpt.load(target.as_uri()) == {"n": 1}
    assert async_ckpt.load(target) == async_ckpt.load(str(target)) == {"n": 1}


def test_a_relative_path_starts_where_the_process_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    async_ckpt.save({"n": 1}, "sub/x.tar").result()
    assert async_ckpt.load("sub/x.tar") == {"n": 1}
    assert (tmp_path / "sub" / "x.tar").exists()


@pytest.mark.parametrize("url", ["nowhere://bucket/x.tar", "s4://bucket/x.tar"])
def test_a_url_of_an_unknown_scheme_is_refused_by_name(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_path_of_another_type_is_a_type_error(path: Any) -> None:
    with pytest.raises(TypeError, match="path"):
        async_ckpt.load(path)
    with pytest.raises(TypeError, match="path"):
        async_ckpt.save({}, path)


def test_what_is_not_there_is_not_committed(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "missing.tar", tmp_path / "no" / "such" / "folder", empty):
        with pytest.raises(NotCommittedError, match=path.name) as caught:
            async_ckpt.load(path)
        assert isinstance(caught.value, FileNotFoundError)
        assert caught.value.path == str(path)
        assert caught.value.step is None


def test_another_tar_says_what_opens_it(tmp_path: Path) -> None:
    with async_ckpt.pack(tmp_path / "x.tar") as folder:
        (folder / "weights.txt").write_text("1 2 3")
    folder.handle.result()
    with pytest.raises(CorruptCheckpointError, match=r"another tar; use unpack\(\)"):
        async_ckpt.load(tmp_path / "x.tar")


def test_what_is_no_checkpoint_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other" / "logs").mkdir(parents=True)
    for name, said in (("missing", "nothing at this path"), ("empty", "is empty"), ("other", "but logs")):
        with pytest.raises(NotCommittedError, match=said):
            async_ckpt.load(tmp_path / name)


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar.bz2"])
def test_a_name_that_promises_another_compression_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"only zstd.*\.tar\.zst"):
        async_ckpt.save(STATE, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
