"""No file of another program ends the command in a traceback: one line says what it is, with a documented status."""

import os
import pickle
import types
import zipfile
from typing import Any

import pytest
import torch
from commands import documented, run_command
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import async_ckpt

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
TARGETS = {"archive": "t.tar", "safetensors": "t.safetensors", "hf": "t_hf", "torch": "t.pt", "dcp": "t_dcp"}


class Wrapper(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def cyclic() -> Any:
    value: dict[str, Any] = {"w": torch.ones(1)}
    value["me"] = value
    return value


def deep() -> Any:
    value: Any = torch.ones(1)
    for _ in range(300):
        value = [value]
    return value


STATES: dict[str, Any] = {
    "module": lambda: torch.nn.Linear(2, 2),
    "lazy": lambda: torch.nn.LazyLinear(2),
    "conjugate": lambda: {"x": torch.ones(3, dtype=torch.complex64).conj()},
    "negative": lambda: {"x": torch._neg_view(torch.ones(3))},
    "meta": lambda: {"x": torch.ones(3, device="meta")},
    "nested": lambda: {"x": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
    "sparse": lambda: {"x": torch.eye(3).to_sparse()},
    "compressed": lambda: {"x": torch.eye(3).to_sparse_csc()},
    "quantised": lambda: {"x": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)},
    "wrapper": lambda: {"x": Wrapper(torch.ones(2))},
    "float4": lambda: {"x": torch.arange(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)},
    "bits": lambda: {"x": torch.arange(8, dtype=torch.uint8).view(torch.bits1x8)},
    "keys": lambda: {None: torch.ones(1), (1, 2): torch.ones(1), b"b": torch.ones(1), 1.5: 3, torch.float32: 4},
    "text that no terminal takes": lambda: {"\ud800": torch.ones(1), "\x1b[31m": torch.ones(1)},
    "two of one name": lambda: {"a.b": torch.ones(2), "a": {"b": torch.ones(2)}},
    "reserved": lambda: {"__metadata__": torch.ones(2)},
    "cycle": cyclic,
    "deep": deep,
    "empty": lambda: {"a": {}},
    "none": lambda: None,
    "large view": lambda: {"x": torch.ones(1).expand(9 << 20)},
}


def answered(*words: Any) -> int:
    ended = run_command(*words)
    assert ended.returncode in (0, 1, 2, 74), (words, ended)
    assert len(ended.stderr.splitlines()) <= 1, (words, ended.stderr)
    return ended.returncode


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_converted_or_refused_in_one_line(tmp_path, name):
    path = tmp_path / "x.pt"
    torch.save(STATES[name](), path)
    assert answered("diff", path, path, "--trust") == 0
    for form, target in TARGETS.items():
        if answered("convert", path, tmp_path / target, "--as", form, "--trust") == 0:
            assert answered("diff", path, tmp_path / target, "--trust") in (0, 1)
            assert answered("inspect", tmp_path / target, "--stats") in (0, 1)
        else:
            assert not (tmp_path / target).exists()
    for word in ("inspect", "verify", "ls"):
        answered(word, path)


FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "zeros": (bytes(4000), "first bytes are damaged"),
    "gguf": (b"GGUF\3\0\0\0" + bytes(500), "GGUF"),
    "hdf5": (b"\x89HDF\r\n\x1a\n" + bytes(500), "HDF5"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 12\n", "git lfs pull"),
    "npy": (b"\x93NUMPY\1\0" + bytes(100), "numpy.load"),
    "pickle": (pickle.dumps({"a": [1]}), "pickle"),
    "page": (b"<!DOCTYPE html><html></html>", "HTML"),
    "json": (b'{"a": 1}', "JSON"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("word", ["inspect", "diff", "convert"])
def test_the_kind_of_a_foreign_file_is_named(tmp_path, name, word):
    data, said = FILES[name]
    (tmp_path / "x.pt").write_bytes(data)
    more = {"inspect": (), "diff": (tmp_path / "x.pt",), "convert": (tmp_path / "t.tar",)}[word]
    ended = run_command(word, tmp_path / "x.pt", *more)
    assert (ended.returncode, said in ended.stderr, len(ended.stderr.splitlines())) == (1, True, 1), ended.stderr


@pytest.mark.parametrize("num_bytes", [10, 100, 1000, 3000, -300, -10])
def test_a_truncated_file_of_torch_is_said_to_be_one(tmp_path, num_bytes):
    torch.save({"w": torch.ones(1000)}, tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:num_bytes])
    ended = run_command("convert", tmp_path / "x.pt", tmp_path / "t.tar")
    assert (ended.returncode, str(tmp_path / "x.pt") in ended.stderr) == (1, True)


def test_pipes_and_loops_are_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("pipe", "loop"):
        assert answered("diff", tmp_path / name, tmp_path / name) == 74
        assert answered("convert", tmp_path / name, tmp_path / "t.tar") == 74


def test_a_missing_package_is_named_with_the_file(tmp_path, monkeypatch):
    module = types.ModuleType("not_installed")
    kind = type("Config", (), {"__module__": "not_installed"})
    module.Config = kind  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "not_installed", module)
        torch.save({"config": kind()}, tmp_path / "x.pt")
        async_ckpt.save({"config": kind()}, tmp_path / "x.tar").result()
    for name in ("x.pt", "x.tar"):
        ended = run_command("convert", tmp_path / name, tmp_path / "t.pt", "--trust")
        assert (ended.returncode, name in ended.stderr, "not_installed" in ended.stderr) == (2, True, True)
    with pytest.raises(ImportError, match=r"x\.tar.*not_installed"):
        async_ckpt.load(tmp_path / "x.tar", trust=True)


def test_the_code_of_a_script_is_not_lost(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / "x.pt")
    for form, target in TARGETS.items():
        ended = run_command("convert", tmp_path / "x.pt", tmp_path / target, "--as", form, "--trust")
        assert (ended.returncode, "would be lost" in ended.stderr) == (1, True), ended.stderr
    words = ("extract", tmp_path / "x.pt", "--select", "weight", "--to", tmp_path / "w.safetensors", "--trust")
    assert run_command(*words).returncode == 0
    assert [*load_file(tmp_path / "w.safetensors")] == ["weight"]


def test_empty_checkpoints_are_shown_and_are_equal(tmp_path):
    save_file({}, tmp_path / "x.safetensors")
    async_ckpt.save({"a": {}}, tmp_path / "x.tar").result()
    for path in (tmp_path / "x.safetensors", tmp_path / "x.tar"):
        assert answered("inspect", path) == answered("diff", path, path) == 0
    assert documented("inspect", tmp_path / "x.safetensors")["names"] == []
    torch.save({"a": []}, tmp_path / "x.pt")
    assert answered("diff", tmp_path / "x.pt", tmp_path / "x.tar") == 1


@pytest.mark.parametrize(
    "dtype", ["complex64", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"]
)
def test_every_dtype_of_safetensors_is_written_and_read(tmp_path, dtype):
    weights = {"x": torch.arange(48, dtype=torch.uint8).view(2, 24).view(getattr(torch, dtype))}
    save_file(weights, tmp_path / "a.safetensors")
    for target in ("b.safetensors", "b.tar", "b_hf", "b.pt"):
        assert answered("convert", tmp_path / "a.safetensors", tmp_path / target) == 0
        assert answered("diff", tmp_path / "a.safetensors", tmp_path / target) == 0
    async_ckpt.export_hf(weights, tmp_path / "c").result()
    for path in (tmp_path / "b.safetensors", tmp_path / "c" / "model.safetensors"):
        found = load_file(path)["x"]
        assert (found.dtype, found.shape) == (weights["x"].dtype, weights["x"].shape)
        assert torch.equal(found.view(torch.uint8), weights["x"].view(torch.uint8))


def test_half_a_byte_is_held_by_no_file(tmp_path):
    torch.save({"x": torch.zeros((), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path / "x.pt")
    assert answered("convert", tmp_path / "x.pt", tmp_path / "x.safetensors") == 1


def test_a_tensor_called_as_the_format_is_no_other(tmp_path):
    save_file({"pt": torch.ones(1)}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert [*async_ckpt.load(tmp_path / "x.safetensors")] == ["pt"]


def test_a_folder_of_dcp_cannot_be_mapped_and_says_so(tmp_path):
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(ValueError, match=r"folder of torch\.distributed\.checkpoint.*leave mmap out"):
        async_ckpt.load(tmp_path / "x", mmap=True)


def test_a_zip_of_another_program_is_no_file_of_torch(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
        file.writestr("notes.txt", "hello")
    ended = run_command("convert", tmp_path / "x.pt", tmp_path / "t.tar", "--trust")
    assert (ended.returncode, "a zip file" in ended.stderr) == (1, True)
