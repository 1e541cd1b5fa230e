"""Everyone's tools open the archive: GNU tar, bsdtar, Python's tarfile, and safetensors on what comes out of it."""

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_model
from states import MIB, difference
from torch import nn

import async_ckpt

PAGE_BYTES = 4096  # see docs/format.md

MEMBERS = ["index.json", "model.safetensors", "optimizer.safetensors", "objects.pt", "digests.json"]


@pytest.fixture(scope="module")
def state() -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(300, 1000)
    return {
        "model": {
            "embed": weight, "head": weight, "bias": torch.randn(1000, dtype=torch.bfloat16), "scale": torch.tensor(2.0),
            "mask": torch.tensor([True, False]), "deep": {"w.x": torch.arange(5), "list": [torch.empty(0)]},
            "big": torch.randn(3 * MIB).t(), "ünï/😀": torch.ones(2, dtype=torch.float8_e4m3fn),
        },
        "optimizer": {"state": {0: {"exp_avg": torch.randn(300, 1000)}}, "wave": torch.tensor([1 + 2j])},
        "seen": bytearray(b"12"),
        "step": 5,
    }  # fmt: skip


@pytest.fixture(scope="module")
def saved(state: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "x.tar"
    async_ckpt.save(state, path).result()
    return path


def quietly(*command: str | Path) -> str:
    """What a command prints; it must succeed, and say nothing on stderr."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ, LC_ALL="C.UTF-8"))
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def assert_same_members(folder: Path, path: Path) -> None:
    """What a tool extracted is what the file holds at the offsets that the index gives."""
    assert sorted(p.name for p in folder.iterdir()) == sorted(MEMBERS)
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            assert (folder / member.name).stat().st_size == member.size
            extracted = archive.extractfile(member)
            assert extracted is not None
            assert (folder / member.name).read_bytes() == extracted.read()


@pytest.mark.parametrize("name", ["tar", "bsdtar"])
def test_a_tar_program_lists_and_extracts_it_without_a_warning(name, saved, tmp_path):
    program = tool(name)
    assert quietly(program, "-tf", saved).split() == MEMBERS
    quietly(program, "-xf", saved, "-C", tmp_path)
    assert_same_members(tmp_path, saved)
    assert (tmp_path / "index.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("name", ["tar", "bsdtar"])
def test_one_member_comes_out_of_the_archive_or_out_of_a_pipe(name, saved):
    program = tool(name)
    assert json.loads(quietly(program, "-xOf", saved, "index.json"))["format"] == "async_ckpt"
    with open(saved, "rb") as pipe:
        done = subprocess.run([program, "-xO", "-f", "-", "index.json"], stdin=pipe, capture_output=True, check=True)
    assert json.loads(done.stdout)["step"] is None
    assert done.stderr == b""


def test_gnu_tar_finds_nothing_different_after_extracting(saved, tmp_path):
    program = tool("tar")
    if "GNU" not in quietly(program, "--version"):
        pytest.skip("this tar is not GNU tar")
    quietly(program, "-xf", saved, "-C", tmp_path)
    assert quietly(program, "--compare", "-f", saved, "-C", tmp_path) == ""


def test_pythons_tarfile_lists_and_extracts_it(saved, tmp_path):
    with tarfile.open(saved, "r:") as archive:
        assert archive.getnames() == MEMBERS
        assert all(m.isreg() and m.uid == m.gid == 0 and m.mtime > 0 for m in archive.getmembers())
        archive.extractall(tmp_path, filter="data")
    assert_same_members(tmp_path, saved)


def test_pythons_tarfile_reads_it_as_a_stream(saved):
    with open(saved, "rb") as pipe, tarfile.open(fileobj=pipe, mode="r|") as archive:
        assert [member.name for member in archive] == MEMBERS


def test_the_file_is_whole_pages_and_ends_in_two_zero_blocks(saved, tmp_path):
    assert saved.stat().st_size % PAGE_BYTES == 0
    assert not any(saved.read_bytes()[-1024:])
    for size in (0, 1, 1000, 4096):
        async_ckpt.save({"w": torch.ones(size, dtype=torch.int8), "x": list(range(size))}, tmp_path / "y.tar").result()
        assert (tmp_path / "y.tar").stat().st_size % PAGE_BYTES == 0
        assert quietly(tool("tar"), "-tf", tmp_path / "y.tar").split() == [
            "index.json",
            "model.safetensors",
            "digests.json",
        ]


@pytest.fixture(scope="module")
def extracted(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("extracted")
    with tarfile.open(saved) as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_safetensors_loads_a_member_with_the_same_tensors(extracted, state):
    loaded = load_file(extracted / "model.safetensors")
    model = state["model"]
    expected = {
        "embed": model["embed"], "bias": model["bias"], "scale": model["scale"], "mask": model["mask"], "big": model["big"],
        "deep.w.x": model["deep"]["w.x"], "deep.list.0": model["deep"]["list"][0], "ünï/😀": model["ünï/😀"],
    }  # fmt: skip
    assert difference(dict(sorted(loaded.items())), dict(sorted(expected.items()))) is None


def test_safetensors_sees_a_tied_tensor_once_and_its_other_name_in_the_metadata(extracted):
    with safe_open(extracted / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "head": "embed"}
        assert "head" not in file.keys()  # noqa: SIM118 - it is no dict
        assert file.get_slice("embed").get_shape() == [300, 1000]


def test_safetensors_sees_a_dtype_that_it_lacks_as_bytes(extracted, state):
    wave = load_file(extracted / "optimizer.safetensors")["wave"]
    assert (wave.dtype, wave.shape) == (torch.uint8, (1, 8))
    assert difference(wave.view(torch.complex64).reshape(1), state["optimizer"]["wave"]) is None


def test_torch_loads_the_objects_as_plain_data(extracted):
    assert torch.load(extracted / "objects.pt", weights_only=True) == [bytearray(b"12")]


class Tied(nn.Module):
    """Two names for one weight, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_module_loads_with_safetensors_load_model(archive, tmp_path):
    model, other = Tied(), Tied()
    async_ckpt.save({"model": model}, archive).result()
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="data")
    missing, unexpected = load_model(other, tmp_path / "model.safetensors")
    assert (missing, unexpected) == (set(), [])
    assert difference(other.state_dict(), model.state_dict()) is None
    save_model(other, str(tmp_path / "theirs.safetensors"))
    with (
        safe_open(tmp_path / "theirs.safetensors", "pt") as theirs,
        safe_open(tmp_path / "model.safetensors", "pt") as ours,
    ):
        assert len(theirs.metadata()) == len(ours.metadata()) - 1  # ours says "format" too


def test_a_flat_state_dict_is_a_member_called_model(archive, tmp_path):
    model = nn.Linear(3, 2)
    async_ckpt.save(model.state_dict(), archive).result()
    with tarfile.open(archive) as tar:
        assert tar.getnames() == ["index.json", "model.safetensors", "digests.json"]
        tar.extractall(tmp_path, filter="data")
    nn.Linear(3, 2).load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert difference(load_file(tmp_path / "model.safetensors")["weight"], model.weight) is None


def test_hostile_names_extract_into_the_folder_and_nowhere_else(archive, tmp_path):
    state = {name: {name or "w": torch.ones(1)} for name in ["../x", "/etc/x", "-rf", "a/b", "", ".."]}
    async_ckpt.save(state, archive).result()
    folder = tmp_path / "inner" / "out"
    folder.mkdir(parents=True)
    quietly(tool("tar"), "-xf", archive, "-C", folder)
    assert len(list(folder.iterdir())) == len(state) + 2
    assert list((tmp_path / "inner").iterdir()) == [folder]
    assert sum(len(load_file(p)) for p in folder.glob("*.safetensors")) == len(state)
