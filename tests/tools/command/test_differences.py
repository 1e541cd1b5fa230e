"""`async-ckpt diff` compares by type and content: what differs is never equal, and two loads of one file always are."""

import collections
import dataclasses
import enum
import random
import struct
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from commands import documented, run_command
from safetensors.torch import save_file

import async_ckpt

# Two kinds of NaN, which have one text.
QUIET, OTHER = (struct.unpack("<d", struct.pack("<Q", bits))[0] for bits in (0x7FF8000000000000, 0x7FF8000000000001))


class Net(torch.nn.Module):
    def __init__(self, note: str = "x", buffer: float = 0.0) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(self.fc.weight)
        torch.nn.init.zeros_(self.fc.bias)
        self.register_buffer("cache", torch.full((2,), buffer), persistent=False)
        self.note = note


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Shade(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: Any


class Place(NamedTuple):
    x: Any


@dataclasses.dataclass
class Config:
    a: Any


@dataclasses.dataclass
class Other:
    a: Any


class Slots:
    __slots__ = ("v",)

    def __init__(self, v: Any) -> None:
        self.v = v

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


class Secret:
    """It does not say what it consists of."""

    def __reduce__(self) -> Any:
        return Secret, ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        if protocol == 4:
            raise TypeError("not like that")
        return self.__reduce__()


def long(middle: float) -> Any:
    array = np.arange(5000.0)
    array[2500] = middle
    return array


def objects(last: Any) -> Any:
    array = np.empty(3, object)
    array[:] = [1, "x", last]
    return array


def holding(value: Any) -> dict[str, Any]:
    cyclic: dict[str, Any] = {"value": value}
    cyclic["me"] = [cyclic]
    return cyclic


PAIRS: dict[str, tuple[Any, Any]] = {
    "1 and True": (1, True),
    "1 and 1.0": (1, 1.0),
    "0.0 and -0.0": (0.0, -0.0),
    "two NaN": (QUIET, OTHER),
    "text and bytes": ("a", b"a"),
    "list and tuple": ([1, 2], (1, 2)),
    "list and tuple of tensors": ([torch.ones(1)], (torch.ones(1),)),
    "list and dict": ([torch.ones(1)], {0: torch.ones(1)}),
    "empty dict and list": ({}, []),
    "dict and OrderedDict": ({"a": 1}, collections.OrderedDict(a=1)),
    "factories": (collections.defaultdict(list, a=1), collections.defaultdict(set, a=1)),
    "long arrays": (long(2500), long(-1)),
    "arrays of objects": (objects(1), objects(2)),
    "arrays of arrays": (objects(long(0)), objects(long(1))),
    "structured": (np.array([(1, 2.0)], "i4,f8"), np.array([(1, 3.0)], "i4,f8")),
    "fields": (np.array([(1,)], [("a", "i4")]), np.array([(1,)], [("b", "i4")])),
    "texts": (np.array(["a", "b" * 99]), np.array(["a", "b" * 98 + "c"])),
    "long texts": (np.array(["b" * 99], np.dtypes.StringDType()), np.array(["c" * 99], np.dtypes.StringDType())),
    "array and scalar": (np.array(1.0), np.float64(1.0)),
    "array and tensor": (np.ones(3), torch.ones(3, dtype=torch.float64)),
    "masks": (np.ma.masked_array([1, 2], [0, 1]), np.ma.masked_array([1, 2], [1, 0])),
    "bytes and tensor": (bytes(5000), torch.zeros(5000, dtype=torch.uint8)),
    "namespaces": (types.SimpleNamespace(w=torch.ones(3)), types.SimpleNamespace(w=torch.zeros(3))),
    "dataclasses": (Config(torch.ones(2)), Config(torch.zeros(2))),
    "classes of dataclasses": (Config(1), Other(1)),
    "classes of namedtuples": (Point(torch.ones(1)), Place(torch.ones(1))),
    "enums": (Color.RED, Color.BLUE),
    "classes of enums": (Color.RED, Shade.RED),
    "slots, which say that they are equal": (Slots(1), Slots(2)),
    "sets": ({Point(1)}, {Point(2)}),
    "deques": (collections.deque([torch.ones(1)]), collections.deque([torch.zeros(1)])),
    "lengths of deques": (collections.deque([torch.ones(1)], 2), collections.deque([torch.ones(1)], 3)),
    "nested": ([types.SimpleNamespace(a=[{"b": long(0)}])], [types.SimpleNamespace(a=[{"b": long(1)}])]),
    "cycles": (types.SimpleNamespace(a=holding(1)), types.SimpleNamespace(a=holding(2))),
    "keys of objects": ({Color.RED: torch.ones(1)}, {Color.RED: torch.zeros(1)}),
    "keys that are tensors": ({torch.ones(1): 1}, {torch.ones(1): 2}),
    "keys of a kind": ({True: torch.ones(1)}, {1: torch.ones(1)}),
    "random numbers of Python": (random.Random(1), random.Random(2)),
    "generators of numpy": (np.random.default_rng(1), np.random.default_rng(2)),
    "states of numpy": (np.random.RandomState(1).get_state(), np.random.RandomState(2).get_state()),
    "generators of torch": (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
    "storages": (torch.ones(3).untyped_storage(), torch.zeros(3).untyped_storage()),
    "requires_grad": (torch.ones(2), torch.ones(2).requires_grad_()),
    "parameters": (torch.ones(2), torch.nn.Parameter(torch.ones(2), requires_grad=False)),
    "sparse": (torch.eye(3).to_sparse(), (2 * torch.eye(3)).to_sparse()),
    "sparse and dense": (torch.eye(3).to_sparse(), torch.eye(3)),
    "compressed": (torch.eye(3).to_sparse_csr(), (2 * torch.eye(3)).to_sparse_csr()),
    "scales": tuple(torch.quantize_per_tensor(torch.zeros(2), scale, 0, torch.qint8) for scale in (0.1, 0.2)),
    "conjugates": (torch.ones(2, dtype=torch.complex64).conj(), torch.full((2,), 1j).conj()),
    "meta": (torch.ones(2, device="meta"), torch.ones(3, device="meta")),
    "modules": (Net(), torch.nn.Sequential(Net())),
    "attributes of modules": (Net("x"), Net("y")),
    "buffers that are not persistent": (Net(), Net(buffer=1.0)),
    "modules in objects": (types.SimpleNamespace(net=Net()), types.SimpleNamespace(net=Net("y"))),
    "functions": (print, len),
}  # fmt: skip
IGNORED = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def diff(a: Path, b: Path, *options: str) -> int:
    return run_command("diff", a, b, *options).returncode


@IGNORED
@pytest.mark.parametrize("name", PAIRS)
def test_what_differs_in_type_or_content_is_different_and_two_loads_are_equal(tmp_path, name):
    for file, value in zip("ab", PAIRS[name], strict=True):
        torch.save({"x": value}, tmp_path / file)
    assert diff(tmp_path / "a", tmp_path / "b", "--trust") == 1
    assert diff(tmp_path / "a", tmp_path / "a", "--trust") == diff(tmp_path / "b", tmp_path / "b", "--trust") == 0


_HELD = ["arrays of objects", "namespaces", "classes of enums", "classes of dataclasses", "deques", "long arrays", "sets",
         "classes of namedtuples", "bytes and tensor", "array and tensor", "structured", "random numbers of Python"]  # fmt: skip


@pytest.mark.parametrize("name", _HELD)
def test_archives_are_compared_as_strictly_and_without_unpickling_what_may_be_equal_is_not(tmp_path, name):
    for file, value in zip("ab", PAIRS[name], strict=True):
        async_ckpt.save({"x": value}, tmp_path / file).result()
        torch.save({"x": value}, tmp_path / f"{file}.pt")
    assert diff(tmp_path / "a", tmp_path / "b", "--trust") == 1
    assert diff(tmp_path / "a", tmp_path / "b") in (1, 2)
    for options in ((), ("--trust",)):
        assert diff(tmp_path / "a", tmp_path / "a", *options) == 0
    assert diff(tmp_path / "a", tmp_path / "a.pt", "--trust") == 0


def test_an_object_that_cannot_be_compared_is_not_equal(tmp_path):
    torch.save({"x": Secret(), "w": torch.ones(1)}, tmp_path / "a.pt")
    told = documented("diff", tmp_path / "a.pt", tmp_path / "a.pt", "--trust", status=2)
    assert ([row["what"] for row in told["differences"]], told["num_equal"]) == (["not compared"], 1)
    torch.save({"x": Secret(), "w": torch.zeros(1)}, tmp_path / "b.pt")
    assert diff(tmp_path / "a.pt", tmp_path / "b.pt", "--trust") == 1
    assert diff(tmp_path / "a.pt", tmp_path / "a.pt") == 2  # nothing is unpickled


@pytest.mark.parametrize("write", [torch.save, lambda state, path: async_ckpt.save(state, path).result()])
def test_names_are_compared_by_their_keys_and_shown_apart(tmp_path, write):
    ones, zeros = torch.ones(2), torch.zeros(2)
    for file, value in (("a", zeros), ("b", ones)):
        write({0: zeros, "0": value, "a": {"b": zeros}, "a.b": value}, tmp_path / file)
    told = documented("diff", tmp_path / "a", tmp_path / "b", status=1)
    assert [row["name"] for row in told["differences"]] == ["'0'", "'a.b'"]
    write({"a": {"b": zeros}}, tmp_path / "c")
    write({"a.b": zeros}, tmp_path / "d")
    assert diff(tmp_path / "c", tmp_path / "d") == 1


def test_flat_formats_share_the_names_that_they_can_hold(tmp_path):
    nested = {"model": {"w": torch.ones(2), "b": torch.zeros(1)}, "empty": {}}
    torch.save(nested, tmp_path / "a.pt")
    save_file({"model.w": torch.ones(2), "model.b": torch.zeros(1)}, tmp_path / "b.safetensors")
    assert diff(tmp_path / "a.pt", tmp_path / "b.safetensors") == 0
    torch.save({**nested, "model.w": torch.zeros(2)}, tmp_path / "c.pt")
    assert diff(tmp_path / "c.pt", tmp_path / "b.safetensors") == 1


@IGNORED
def test_scripts_are_compared_by_weights_and_code(tmp_path):
    for file, module in (("a", Net().fc), ("b", torch.nn.Linear(2, 2)), ("c", torch.nn.Linear(2, 2, bias=False))):
        torch.jit.script(module).save(tmp_path / file)
    assert diff(tmp_path / "a", tmp_path / "a", "--trust") == 0
    assert diff(tmp_path / "a", tmp_path / "b", "--trust") == diff(tmp_path / "a", tmp_path / "c", "--trust") == 1
    assert diff(tmp_path / "a", tmp_path / "a") == 2


@pytest.mark.parametrize("dtype", ["float4_e2m1fn_x2", "float8_e8m0fnu", "complex32", "bits8", "uint16", "int64"])
def test_items_of_rare_dtypes_are_compared(tmp_path, dtype):
    for file, item in (("a", 0), ("b", 1)):
        raw = torch.zeros(16, dtype=torch.uint8)
        raw[8] = item
        torch.save({"w": raw.view(getattr(torch, dtype))}, tmp_path / file)
    assert diff(tmp_path / "a", tmp_path / "a") == 0
    assert diff(tmp_path / "a", tmp_path / "b") == 1


def test_large_integers_are_told_apart(tmp_path):
    for file, item in (("a", 2**60), ("b", 2**60 + 1)):
        torch.save({"w": torch.tensor([item])}, tmp_path / file)
    assert diff(tmp_path / "a", tmp_path / "b", "--atol", "0.5") == 1
    assert diff(tmp_path / "a", tmp_path / "b", "--atol", "1") == 0
