"""`async-ckpt diff`, `extract` and `convert`: every format into every other that can hold it, and what differs."""

import collections
import dataclasses
import enum
import itertools
import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import documented, run_command, store_options
from exported import gpt2
from folders import read as tree_of
from rank_archives import commit, write_all
from safetensors.torch import load_file, save_file
from slices import some
from states import open_run
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.testing._internal.two_tensor import TwoTensor

import async_ckpt

WEIGHTS = {
    "layer.weight": torch.arange(12.0).reshape(3, 4),
    "layer.bias": torch.tensor([1.5, math.nan, math.inf], dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 3),
}

DYING = """
import contextlib, io, sys
from children import die_at
from async_ckpt.tools.command.main import status_of
target, source, name, number = sys.argv[1:]
count = die_at(int(number))
with contextlib.redirect_stdout(io.StringIO()):
    assert status_of(["convert", source, target, "--as", name]) == 0
print(count())
"""


class Custom:
    """An object that is no plain data."""


def state() -> dict[str, Any]:
    model = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    return {"model": model, "optimizer": {"lr": 0.5, "momentum": [torch.ones(2), torch.zeros(2)]}, "step": 3}


@pytest.fixture
def step(tmp_path: Path) -> Path:
    with open_run(tmp_path / "run") as ckpt:
        ckpt.save(state(), 3).result()
    return tmp_path / "run" / "step_00000003"


def source_of(kind: str, folder: Path) -> Path:
    """The weights in a file or folder that its own library has written."""
    path = folder / {"safetensors": "s.safetensors", "torch": "s.pt", "lightning": "s.ckpt"}.get(kind, f"s_{kind}")
    if kind == "safetensors":
        save_file(WEIGHTS, path)
    elif kind == "hf":
        path.mkdir()
        save_file(
            {name: WEIGHTS[name] for name in ("layer.weight", "count")}, path / "model-00001-of-00002.safetensors"
        )
        save_file({name: WEIGHTS[name] for name in ("layer.bias", "empty")}, path / "model-00002-of-00002.safetensors")
        files = {name: f"model-0000{1 + (name in ('layer.bias', 'empty'))}-of-00002.safetensors" for name in WEIGHTS}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    elif kind == "dcp":
        torch.save(WEIGHTS, folder / "x.pt")
        torch_save_to_dcp(folder / "x.pt", path)
    elif kind == "archive":
        path = folder / "s.tar"
        async_ckpt.save(WEIGHTS, path).result()
    elif kind == "step":
        with open_run(folder / "source") as ckpt:
            ckpt.save(WEIGHTS, 5).result()
        path = folder / "source"
    else:
        torch.save(WEIGHTS, path)
    return path


def weights_in(kind: str, path: Path) -> dict[str, torch.Tensor]:
    """The weights in what was written, read by the library whose format it is."""
    if kind == "safetensors":
        return load_file(path)
    if kind == "hf":
        return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    if kind == "dcp":
        assert FileSystemReader(path).read_metadata()
        dcp_to_torch_save(path, path.with_suffix(".as_torch"))
        return torch.load(path.with_suffix(".as_torch"))
    if kind == "torch":
        return torch.load(path)
    return async_ckpt.load(path)


def assert_same(found: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert {*found} == {*want}
    for name, tensor in want.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


# --- convert and extract ------------------------------------------------------------------------------------------

_TARGETS = {
    "archive": "t.tar",
    "step": "out/step_00000009",
    "safetensors": "t.safetensors",
    "hf": "t_hf",
    "torch": "t.pt",
    "dcp": "t_dcp",
}


@pytest.mark.parametrize("target", list(_TARGETS))
@pytest.mark.parametrize("source", ["archive", "step", "safetensors", "hf", "torch", "lightning", "dcp"])
def test_each_format_is_converted_to_each(tmp_path, source, target):
    given = source_of(source, tmp_path)
    path = tmp_path / _TARGETS[target]
    told = documented("convert", given, path, "--as", target)
    assert told["format"] == target
    assert_same(weights_in(target, path), WEIGHTS)
    assert documented("diff", given, path)["num_equal"] == len(WEIGHTS)
    assert [p.name for p in tmp_path.rglob("*async_ckpt-tmp*")] == []


@pytest.mark.parametrize("target", ["archive", "step", "torch", "dcp"])
def test_whole_states_are_converted_where_they_can_be_held(tmp_path, step, target):
    path = tmp_path / _TARGETS[target]
    assert run_command("convert", step, path, "--as", target).returncode == 0
    told = documented("diff", step, path)
    assert (told["num_equal"], told["differences"]) == (told["num_names"], [])
    if target == "torch":
        loaded = torch.load(path)
        assert (loaded["step"], loaded["optimizer"]["lr"]) == (3, 0.5)
        assert_same(loaded["model"], WEIGHTS)


def test_what_a_format_cannot_hold_is_named_before_anything_is_written(tmp_path, step):
    for target in ("t.safetensors", "t_hf"):
        ended = run_command("convert", step, tmp_path / target, "--as", "hf" if target == "t_hf" else "safetensors")
        assert ended.returncode == 1
        assert "optimizer.lr" in ended.stderr
        assert "--select" in ended.stderr
        assert not (tmp_path / target).exists()


def test_names_are_extracted_and_lose_their_beginning(tmp_path, step):
    path = tmp_path / "model.safetensors"
    assert run_command("extract", step, "--select", "model", "--strip", "model.", "--to", path).returncode == 0
    assert_same(load_file(path), WEIGHTS)
    assert (
        run_command("extract", step, "--select", "model", "--strip", "model.", "--to", tmp_path / "llama-3").returncode
        == 0
    )
    assert_same(weights_in("hf", tmp_path / "llama-3"), WEIGHTS)
    assert run_command("extract", step, "--select", "model.layer.*", "--to", tmp_path / "two.pt").returncode == 0
    assert_same(torch.load(tmp_path / "two.pt")["model"], {n: WEIGHTS[n] for n in ("layer.weight", "layer.bias")})
    assert (
        run_command("extract", step, "--select", "model", "--strip", "model", "--to", tmp_path / "m.pt").returncode == 0
    )
    assert_same(torch.load(tmp_path / "m.pt"), WEIGHTS)


def test_a_step_of_four_ranks_becomes_one_state(tmp_path):
    folder = tmp_path / "a" / "step_00000001"
    folder.mkdir(parents=True)
    commit(
        write_all(folder, 4, lambda rank: {"w": torch.arange(1e5), "own": rank}, per_rank=("own",)), per_rank=("own",)
    )

    ended = run_command("convert", folder, tmp_path / "one.tar")
    assert (ended.returncode, "--from-rank own=0" in ended.stderr) == (1, True)
    for target in ("one.tar", "one.pt"):
        assert run_command("convert", folder, tmp_path / target, "--from-rank", "own=2").returncode == 0
    assert async_ckpt.load(tmp_path / "one.tar")["own"] == torch.load(tmp_path / "one.pt")["own"] == 2
    told = documented("diff", folder, tmp_path / "one.tar", status=1)
    assert {row["name"]: row["what"] for row in told["differences"]} == {
        **{f"own.rank {rank}": "only in A" for rank in range(4)},
        "own": "only in B",
    }


def test_a_run_in_a_bucket_becomes_a_local_file_and_the_other_way_round(tmp_path, bucket):
    place = bucket.place("runs/a")
    with open_run(place) as ckpt:
        ckpt.save(state(), 3).result()
    at, env = store_options(place.options)
    assert run_command("convert", place.url, tmp_path / "t.pt", *at, **env).returncode == 0
    assert run_command("convert", tmp_path / "t.pt", bucket.url("t.tar"), *at, **env).returncode == 0
    assert (
        run_command(
            "extract", bucket.url("t.tar"), "--select", "model", "--to", bucket.url("m.safetensors"), *at, **env
        ).returncode
        == 0
    )
    assert run_command("diff", place.url, bucket.url("t.tar"), *at, **env).returncode == 0
    bucket.server.client.put_object(Bucket=bucket, Key="t.pt", Body=(tmp_path / "t.pt").read_bytes())
    assert run_command("diff", bucket.url("t.pt"), bucket.url("t.tar"), *at, **env).returncode == 0
    ended = run_command("convert", place.url, bucket.url("t_dcp"), "--as", "dcp", *at, **env)
    assert (ended.returncode, "local path" in ended.stderr) == (2, True)


def test_nothing_is_unpickled_unless_that_is_said(tmp_path):
    torch.save({"w": torch.ones(2), "who": Custom()}, tmp_path / "x.pt")
    ended = run_command("convert", tmp_path / "x.pt", tmp_path / "x.tar")
    assert (ended.returncode, "--trust" in ended.stderr) == (1, True)
    assert not (tmp_path / "x.tar").exists()
    assert run_command("convert", tmp_path / "x.pt", tmp_path / "x.tar", "--trust").returncode == 0
    ended = run_command("convert", tmp_path / "x.tar", tmp_path / "y.pt")
    assert ended.returncode == 1
    assert run_command("diff", tmp_path / "x.tar", tmp_path / "x.tar").returncode == 0  # without unpickling them
    assert run_command("convert", tmp_path / "x.tar", tmp_path / "y.pt", "--trust").returncode == 0


@pytest.mark.parametrize("target", list(_TARGETS))
def test_what_is_there_is_replaced_only_if_that_is_said(tmp_path, target):
    given, other, path = source_of("safetensors", tmp_path), tmp_path / "other.pt", tmp_path / _TARGETS[target]
    torch.save({"other": torch.ones(3)}, other)
    assert run_command("convert", other, path, "--as", target).returncode == 0
    before = tree_of(path.parent)
    ended = run_command("convert", given, path, "--as", target)
    assert (ended.returncode, "overwrite" in ended.stderr) == (1, True), ended.stderr
    assert tree_of(path.parent) == before
    assert run_command("convert", given, path, "--as", target, "--overwrite").returncode == 0
    assert_same(weights_in(target, path), WEIGHTS)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("convert", "{tmp}/nowhere", "{tmp}/x.tar"), 1, "nothing at this path"),
        (("convert", "{tmp}/empty", "{tmp}/x.tar"), 1, "the folder is empty"),
        (("convert", "{tmp}/text", "{tmp}/x.tar"), 1, "text"),
        (("convert", "{tmp}/cut.pt", "{tmp}/x.tar"), 1, "cut.pt"),
        (("convert", "{tmp}/run", "{tmp}/x.gguf"), 2, "--as"),
        (("convert", "{tmp}/run", "{tmp}/x", "--as", "gguf"), 2, "gguf"),
        (("convert", "{tmp}/run", "{tmp}/x", "--as", "step"), 2, "number in its name"),
        (("convert", "{tmp}/run", "/proc/nowhere/x.tar"), 74, "/proc"),
        (("convert", "{tmp}/run", "/proc/nowhere/x.pt"), 74, "/proc"),
        (("convert", "{tmp}/run", "{tmp}/x.pt", "--strip", "model."), 2, "--strip"),
        (("extract", "{tmp}/run", "--select", "nothing.*", "--to", "{tmp}/x.pt"), 1, "matches nothing"),
        (("extract", "{tmp}/run"), 2, "--to"),
        (("convert", "{tmp}/run", "{tmp}/x.pt", "--from-rank", "x"), 2, "name and a rank"),
        (("diff", "{tmp}/run", "{tmp}/nowhere"), 1, "nothing at this path"),
        (("diff", "{tmp}/run"), 2, "Missing argument"),
    ],
)
def test_what_cannot_be_converted_is_said(tmp_path, step, arguments, status, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no checkpoint")
    torch.save(WEIGHTS, tmp_path / "whole.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:-300])
    ended = run_command(*(one.format(tmp=tmp_path) for one in arguments))
    assert (ended.returncode, said in ended.stderr) == (status, True), ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "x.tar").exists()
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("name", ["x.tar.gz", "x.TGZ", "x.pt.gz", "x.tar.lz4"])
def test_nothing_is_written_under_the_name_of_another_compression(tmp_path, step, name):
    before = sorted(tmp_path.iterdir())
    for format_name in ("archive", "torch", "safetensors", "dcp", "hf"):
        ended = run_command("convert", step, tmp_path / name, "--as", format_name)
        assert (ended.returncode, name in ended.stderr) == (2, True), ended.stderr
    ended = run_command("cp", step.parent, tmp_path / name)
    assert (ended.returncode, name in ended.stderr) == (2, True), ended.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_a_name_that_ends_in_zst_is_that_of_a_compressed_archive(tmp_path, step):
    assert run_command("convert", step, tmp_path / "x.tar.zst").returncode == 0

    assert (tmp_path / "x.tar.zst").read_bytes()[:4] == bytes.fromhex("28b52ffd")
    assert async_ckpt.load(tmp_path / "x.tar.zst")["step"] == 3


def test_a_damaged_source_leaves_nothing(tmp_path, step):
    (archive,) = step.glob("*.tar")
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(data)
    before = tree_of(tmp_path)
    for target in ("x.tar", "x.pt", "x_hf"):
        options = ("--select", "model", "--as", "hf") if target == "x_hf" else ()
        assert run_command("convert", step, tmp_path / target, *options).returncode == 1
    assert tree_of(tmp_path) == before


@pytest.mark.parametrize("target", list(_TARGETS))
def test_killed_at_any_call_the_destination_is_whole_or_absent(quick_path, nursery, target):
    source = source_of("safetensors", quick_path)
    before = source.read_bytes()
    numbers = itertools.count()

    def place() -> Path:
        folder = quick_path / str(next(numbers))
        folder.mkdir()
        return folder / _TARGETS[target]

    whole = nursery.run(DYING, place(), source, target, 0)
    assert (whole.status, whole.err) == (0, "")
    for number in some(range(1, int(whole.out) + 1), 3):
        path = place()
        assert nursery.run(DYING, path, source, target, number).status == -signal.SIGKILL
        if (path / "manifest.json" if target == "step" else path).exists():
            assert_same(weights_in(target, path), WEIGHTS)
        assert run_command("convert", source, path, "--as", target, "--overwrite").returncode == 0
        assert_same(weights_in(target, path), WEIGHTS)
        if target in ("hf", "torch", "dcp"):  # the next one has swept what the first has left
            assert [p.name for p in path.parent.iterdir() if "tmp" in p.name] == []
        assert source.read_bytes() == before
        shutil.rmtree(path.parent)


# --- diff ---------------------------------------------------------------------------------------------------------


def differing(tmp_path: Path, a: Any, b: Any, *options: Any, status: int = 1) -> dict[str, dict[str, Any]]:
    async_ckpt.save(a, tmp_path / "a.tar").result()
    async_ckpt.save(b, tmp_path / "b.tar").result()
    rows = documented("diff", tmp_path / "a.tar", tmp_path / "b.tar", *options, status=status)["differences"]
    return {row["name"]: row for row in rows}


def test_each_kind_of_difference_is_named(tmp_path):
    a = {"same": torch.ones(3), "gone": torch.ones(1), "shape": torch.ones(2, 3), "dtype": torch.ones(2), "value": 1}
    b = {
        "same": torch.ones(3),
        "new": 5,
        "shape": torch.ones(3, 2),
        "dtype": torch.ones(2, dtype=torch.float64),
        "value": 2,
    }
    rows = differing(tmp_path, a | {"kind": 1}, b | {"kind": torch.ones(1)})
    assert {name: row["what"] for name, row in rows.items()} == {
        "gone": "only in A",
        "new": "only in B",
        "kind": "kind",
        "shape": "shape",
        "dtype": "dtype",
        "value": "value",
    }
    assert rows["dtype"]["max_abs"] == 0.0


def test_differences_of_values_are_measured(tmp_path):
    a, b = torch.arange(1.0, 9.0), torch.arange(1.0, 9.0)
    b[3] += 2.0
    b[0] += 0.5
    row = differing(tmp_path, {"w": a}, {"w": b})["w"]
    assert (row["max_abs"], row["share"]) == (2.0, 0.25)
    assert row["max_rel"] == pytest.approx(max(2 / 6, 0.5 / 1.5))


@pytest.mark.parametrize(
    ("a", "b", "max_abs", "share"),
    [
        (math.nan, math.nan, None, None),
        (math.nan, 1.0, "inf", 1.0),
        (math.inf, math.inf, None, None),
        (math.inf, -math.inf, "inf", 1.0),
        (0.0, -0.0, 0.0, 1.0),
        (1.0, 0.0, 1.0, 1.0),
    ],
)
def test_numbers_that_are_no_numbers(tmp_path, a, b, max_abs, share):
    rows = differing(tmp_path, {"w": torch.tensor([a])}, {"w": torch.tensor([b])}, status=int(share is not None))
    if share is None:
        assert rows == {}
    else:
        assert (rows["w"]["max_abs"], rows["w"]["share"]) == (max_abs, share)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint8])
def test_items_of_any_dtype_are_compared(tmp_path, dtype):
    a, b = torch.zeros(5).to(dtype), torch.tensor([0.0, 0, 1, 0, 0]).to(dtype)
    row = differing(tmp_path, {"w": a}, {"w": b})["w"]
    assert (row["max_abs"], row["share"]) == (1.0, 0.2)


@pytest.mark.parametrize("option", ["--rtol", "--atol"])
@pytest.mark.parametrize("number", ["-1", "nan", "inf"])
def test_a_tolerance_that_is_no_number_from_0_on_is_refused(tmp_path, option, number):
    result = run_command("diff", tmp_path / "a", tmp_path / "b", option, number)

    assert result.returncode == 2
    assert f"{option} must be a number from 0 on, got {number}" in result.stderr


def test_tolerances_are_those_of_allclose_and_differences_in_bits_are_told_all_the_same(tmp_path):
    a, b = torch.tensor([1.0, 100.0]), torch.tensor([1.0, 100.5])
    assert differing(tmp_path, {"w": a}, {"w": b}, "--rtol", "0.01", status=0)["w"]["what"] == "within tolerance"
    assert differing(tmp_path, {"w": a}, {"w": b}, "--atol", "0.4")["w"]["what"] == "value"
    assert differing(tmp_path, {"w": a}, {"w": b}, "--atol", "0.6", status=0)["w"]["what"] == "within tolerance"


def test_the_largest_difference_comes_first_and_the_selection_bounds_what_is_compared(tmp_path):
    a = {"m": {f"w{n}": torch.zeros(2) for n in range(4)}, "other": 1}
    b = {"m": {f"w{n}": torch.full((2,), float(n)) for n in range(4)}, "other": 2}
    assert list(differing(tmp_path, a, b, "--select", "m")) == ["m.w3", "m.w2", "m.w1"]


def test_tensors_larger_than_a_chunk_are_compared_to_the_last_item(tmp_path):
    a = torch.zeros(9 << 20)
    b = a.clone()
    b[-1] = 1.0
    torch.save({"w": a}, tmp_path / "a.pt")
    async_ckpt.save({"w": b}, tmp_path / "b.tar").result()
    (row,) = documented("diff", tmp_path / "a.pt", tmp_path / "b.tar", status=1)["differences"]
    assert (row["max_abs"], row["share"]) == (1.0, 1 / (9 << 20))


def test_names_of_a_checkpoint_reach_no_terminal_raw(tmp_path):
    async_ckpt.save({"red\x1b[31m\nnext": torch.ones(1), "v": "\x1b]0;x\x07"}, tmp_path / "a.tar").result()
    async_ckpt.save({"w": torch.ones(1), "v": "y"}, tmp_path / "b.tar").result()
    ended = run_command("diff", tmp_path / "a.tar", tmp_path / "b.tar")
    assert ended.returncode == 1
    assert "\x1b" not in ended.stdout
    assert "\x07" not in ended.stdout


# --- what others load ---------------------------------------------------------------------------------------------


class Phase(enum.Enum):
    WARM = ("warm", 1)
    COLD = "cold"


Bounds = collections.namedtuple("Bounds", "low high")


@dataclasses.dataclass
class Position:
    epoch: int
    bounds: Bounds
    phase: Phase


@pytest.mark.parametrize("target", ["new.tar", "new/step_00000004"])
def test_an_archive_keeps_the_names_of_classes(tmp_path, target):
    wrapped = {"two": TwoTensor(torch.ones(3), torch.zeros(3)), "sparse": torch.eye(2).to_sparse()}
    position = Position(1, Bounds(torch.zeros(2), 3), Phase.WARM)
    async_ckpt.save({**wrapped, "at": [position, Phase.COLD]}, tmp_path / "old.tar").result()

    assert run_command("convert", tmp_path / "old.tar", tmp_path / target).returncode == 0

    assert documented("diff", tmp_path / "old.tar", tmp_path / target)["differences"] == []
    loaded = async_ckpt.load(tmp_path / target, types=[Position, Bounds, Phase, TwoTensor])
    assert repr(loaded["at"]) == repr([position, Phase.COLD])
    assert type(loaded["two"]) is TwoTensor
    assert torch.equal(loaded["two"].a, torch.ones(3))
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(2))


def test_a_file_of_torch_keeps_the_versions_of_modules(tmp_path):
    model = torch.nn.BatchNorm1d(2)
    async_ckpt.save({"model": model}, tmp_path / "old.tar").result()

    assert run_command("convert", tmp_path / "old.tar", tmp_path / "new.pt").returncode == 0

    assert torch.load(tmp_path / "new.pt")["model"]._metadata == model.state_dict()._metadata


def test_plain_torch_load_reads_a_converted_file_with_random_states(tmp_path):
    with open_run(tmp_path / "run") as ckpt:
        state = {"w": torch.ones(3), "rng": async_ckpt.RngState(), "array": np.arange(4), "scalar": np.float64(2.5)}
        ckpt.save(state, 1).result()

    ended = run_command("convert", tmp_path / "run", tmp_path / "all.pt")

    assert (ended.returncode, ended.stderr) == (0, "")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert torch.equal(loaded["array"], torch.arange(4))
    assert loaded["scalar"] == 2.5
    assert (
        loaded["rng"]["numpy"]["state"]["key"].tolist()
        == async_ckpt.load(tmp_path / "run")["rng"]["numpy"]["state"]["key"].tolist()
    )


def test_objects_that_plain_torch_load_refuses_are_named(tmp_path):
    async_ckpt.save({"path": Path("x")}, tmp_path / "a.tar").result()
    ended = run_command("convert", tmp_path / "a.tar", tmp_path / "a.pt", "--trust")
    assert (ended.returncode, "pathlib" in ended.stderr) == (0, True), ended


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run with a model of Transformers and its optimizer, beside the folder of that model."""
    pytest.importorskip("transformers")
    model, folder = gpt2(), tmp_path_factory.mktemp("trained")
    model.save_pretrained(folder / "base")
    (folder / "base/tokenizer.json").write_text("{}")
    with open_run(folder / "run") as ckpt:
        ckpt.save({"model": model, "optimizer": torch.optim.AdamW(model.parameters())}, 1).result()
    return folder, model


def test_a_folder_with_the_config_of_a_model_is_one_that_from_pretrained_loads(trained, tmp_path):
    folder, model = trained
    options = ("--to", "hf", "--config", folder / "base")

    ended = run_command("convert", folder / "run", tmp_path / "out", *options)
    assert (ended.returncode, "--select 'model.*' --strip 'model.'" in ended.stderr) == (1, True), ended
    assert not (tmp_path / "out").exists()
    ended = run_command(
        "convert", folder / "run", tmp_path / "out", *options, "--select", "model.*", "--strip", "model."
    )

    assert ended.returncode == 0, ended.stderr
    assert "missing" not in ended.stderr
    loaded = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in model.state_dict().items())
    assert (tmp_path / "out/tokenizer.json").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_weights_of_lora_become_the_folder_of_an_adapter_that_peft_loads(trained, tmp_path):
    peft: Any = pytest.importorskip("peft")
    folder, _ = trained
    adapted = peft.get_peft_model(gpt2(), peft.LoraConfig(task_type="CAUSAL_LM", r=2, fan_in_fan_out=True))
    weights = {name: value for name, value in adapted.state_dict().items() if "lora_" in name}
    weights = {name: torch.randn_like(value) for name, value in weights.items()}
    adapted.load_state_dict(weights, strict=False)
    adapted.save_pretrained(tmp_path / "by_peft")
    async_ckpt.save({"model": weights}, tmp_path / "a.tar").result()

    ended = run_command("convert", tmp_path / "a.tar", tmp_path / "bare", "--to", "hf")
    assert (ended.returncode, "PEFT needs adapter_config.json beside the weights" in ended.stderr) == (0, True)
    assert [path.name for path in (tmp_path / "bare").iterdir()] == ["adapter_model.safetensors"]
    ended = run_command("convert", tmp_path / "a.tar", tmp_path / "x", "--to", "hf", "--config", folder / "base")
    assert (ended.returncode, "has no adapter_config.json" in ended.stderr) == (2, True)

    sources = {"own": (tmp_path / "a.tar", "--config", tmp_path / "by_peft"), "again": (tmp_path / "by_peft",)}
    for name, source in sources.items():
        ended = run_command("convert", source[0], tmp_path / name, "--to", "hf", *source[1:])
        assert (ended.returncode, ended.stderr) == (0, "")
        loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path / name).state_dict()
        assert all(torch.equal(value, loaded[name]) for name, value in weights.items())


def test_weights_that_a_model_would_have_anew_are_named(trained, tmp_path):
    folder, _ = trained
    wanted = ("--select", "model.transformer.h.*", "--strip", "model.")
    ended = run_command("convert", folder / "run", tmp_path / "out", "--to", "hf", "--config", folder / "base", *wanted)
    assert (ended.returncode, "are missing" in ended.stderr) == (0, True), ended
    ended = run_command("convert", folder / "run", tmp_path / "x.pt", "--config", folder / "base")
    assert (ended.returncode, "--to hf" in ended.stderr) == (2, True)
    ended = run_command("convert", folder / "run", tmp_path / "y", "--config", tmp_path)
    assert (ended.returncode, "config.json" in ended.stderr) == (2, True)
