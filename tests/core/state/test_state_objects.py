"""Leaves that are not plain data: what loads without trust, what needs it, and what is refused by name."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import enum
import io
import operator
import re
import sys
import tarfile
import threading
import warnings
from collections import Counter, OrderedDict, UserDict
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_data import ARRAYS, VALUES, round_trip
from states import difference
from torch import nn

import async_ckpt
from async_ckpt import UnsupportedStateError, UntrustedObjectError

# --- leaves that are not plain data ------------------------------------------------------------------------------


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    """Text that may know more."""


@dataclasses.dataclass
class Declared:
    value: int


class Inherited(Declared):
    """No dataclass itself, so it may have more than its fields."""


class Nowhere(datetime.tzinfo):
    """A time zone of the user's own."""

    def utcoffset(self, _when: Any) -> datetime.timedelta:
        return datetime.timedelta(0)


nowhere = datetime.datetime(2024, 2, 29, tzinfo=Nowhere())


class Custom:
    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.value == self.value

    __hash__ = None


def member_names(path: Path) -> list[str]:
    with tarfile.open(path) as tar:
        return tar.getnames()


def test_a_state_of_plain_data_has_no_pickle_in_it(archive):
    async_ckpt.save({"w": torch.ones(1), "values": list(VALUES), "arrays": list(ARRAYS.values())}, archive).result()
    assert "objects.pt" not in member_names(archive)


def test_leaves_that_torch_takes_for_plain_data_load_without_trust(archive):
    state = {"layouts": {torch.strided}, "buffer": bytearray(b"abc"), "w": torch.ones(2)}
    assert difference(round_trip(state, archive), state) is None
    assert "objects.pt" in member_names(archive)


def quiet(make: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def quantised_in_two_ways() -> list[torch.Tensor]:
    base, scales, zeros = torch.ones(2, 3), torch.ones(2), torch.zeros(2)
    return quiet(
        lambda: [
            torch.quantize_per_tensor(base, 0.1, 0, torch.quint8),
            torch.quantize_per_channel(base, scales, zeros, 0, torch.qint8),
        ]
    )


class Settings(Custom):
    """What a user has told torch to load."""

    def __hash__(self) -> int:
        return 1


class Slotted:
    """Likewise; its state is a pair."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and other.value == self.value

    __hash__ = None


def as_subclass_with_attribute() -> torch.Tensor:
    tensor = nn.Parameter(torch.ones(3))
    tensor.note = "kept"
    return tensor


long_bytes = bytes(range(256)) * 200
shared = {"x": list(range(50))}
SAFE: dict[str, Any] = {
    "sets": Settings([{1, 2.5, "text", None, 1j, b"bytes", (1, (2, "x")), 2**70, -(2**63)}, set()]),
    "a large set": Settings(set(range(50_000))),
    "sets of the same": [{long_bytes, i} for i in range(300)],
    "sets of torch's": {torch.float8_e5m2, torch.device("cpu"), torch.device("cuda", 3), torch.Size([3, 4]), torch.strided},
    "bytearrays": [bytearray(), bytearray(b"abc"), bytearray(long_bytes)],
    "a mapping": Settings({"a": Counter("abca"), "b": OrderedDict(x=1), "c": {}, (1, "k"): [(), (1,), (1, 2, 3, 4)]}),
    "settings of settings": Settings([Settings(1), {Settings(2)}, Settings(Settings(None))]),
    "slots": [Slotted(1), Slotted([Slotted("x")])],
    "one dict in many": [Settings(shared) for _ in range(500)],
    "a namespace": argparse.Namespace(lr=0.1, layers=[1, 2], name="x"),
}  # fmt: skip
SAFE_TENSORS: dict[str, Any] = {
    "dtypes": lambda: [torch.ones(3).to(d) for d in (torch.float16, torch.bfloat16, torch.bool, torch.uint16, torch.complex64)],
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "views": lambda: [torch.arange(12.0).view(3, 4).t(), torch.arange(12.0)[3:7], torch.tensor(1.0).expand(1000, 10)],
    "empty": lambda: [torch.empty(0), torch.empty(3, 0), torch.tensor(2)],
    "one storage": lambda: [base := torch.arange(1000.0), base[:10], base.view(10, 100)],
    "conj": lambda: torch.tensor([1 + 2j]).conj(),
    "parameter": lambda: nn.Parameter(torch.ones(2), requires_grad=False),
    "with an attribute": as_subclass_with_attribute,
    "meta": lambda: torch.ones(1000, 1000, device="meta"),
    "sparse": lambda: torch.eye(50).to_sparse(),
    "csr": lambda: quiet(lambda: torch.eye(50).to_sparse_csr()),
    "quantised": quantised_in_two_ways,
}  # fmt: skip


@pytest.fixture
def told() -> Iterator[None]:
    """What is in these leaves was registered with torch."""
    with torch.serialization.safe_globals([Settings, Slotted, argparse.Namespace, (Slotted, "another.Name")]):
        yield


@pytest.mark.parametrize("leaf", SAFE.values(), ids=SAFE.keys())
def test_what_torch_was_told_is_safe_loads_without_trust(leaf, told, archive):
    state = {"leaf": leaf, "more": {"leaf": leaf}}
    loaded = round_trip(state, archive)
    assert loaded == state
    assert async_ckpt.load(archive, trust=True) == state
    assert "objects.pt" in member_names(archive)


@pytest.mark.parametrize("make", SAFE_TENSORS.values(), ids=SAFE_TENSORS.keys())
def test_tensors_in_what_torch_was_told_is_safe_load_without_trust(make, told, archive):
    value = make()
    # torch warns of its own doings with quantised and sparse tensors.
    loaded = quiet(lambda: round_trip({"leaf": Settings(value)}, archive))["leaf"].value
    saved = quiet(lambda: torch_saved(value))
    expected = quiet(lambda: torch.load(io.BytesIO(saved), weights_only=True))
    assert quiet(lambda: torch_saved(loaded)) == quiet(lambda: torch_saved(expected))


def torch_saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "leaf",
    [Custom(3), operator.add, Name("x"), slice("a", "b"), Fraction(1, 2**5000), Inherited(3), nowhere],
    ids=lambda leaf: type(leaf).__name__,
)
def test_an_object_is_opened_only_with_trust(leaf, archive):
    state = {"w": torch.ones(2), "extra": {"leaf": leaf, "n": 1}}
    async_ckpt.save(state, archive).result()
    with pytest.raises(UntrustedObjectError, match=r"extra\.leaf: an? .*trust=True") as caught:
        async_ckpt.load(archive)
    assert caught.value.path == str(archive)
    assert caught.value.__cause__ is not None
    loaded = async_ckpt.load(archive, trust=True)
    assert loaded["extra"]["leaf"] == leaf
    assert type(loaded["extra"]["leaf"]) is type(leaf)
    assert difference(async_ckpt.load(archive, select=["w", "extra.n"])["extra"], {"n": 1}) is None


shared_buffer = bytearray(b"ab")
INNOCENT: dict[str, Any] = {
    "buffer": shared_buffer, "layout": {torch.strided}, "counters": [{1, torch.strided}], "empty": {torch.device("cpu")},
}  # fmt: skip


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (..., "an Ellipsis"), (Custom(shared_buffer), "a .*Custom"), ([{"deep": (Custom(1),)}], "a .*Custom"),
        (operator.add, "an? .*add"), (Custom, "a .*Custom"), (Fraction(1, 2**5000), "a fractions.Fraction"),
        ({2**5000, torch.strided}, "an int"), (UserDict(a=1), "a collections.UserDict"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_the_error_names_only_what_needs_trust(leaf, kind, archive):
    async_ckpt.save({**INNOCENT, "bad": leaf, "worse": {"too": leaf}, "w": torch.ones(1)}, archive).result()
    place = r"bad(\.[\w.]+)?, worse\.too(\.[\w.]+)?"
    with pytest.raises(UntrustedObjectError, match=rf"^{re.escape(str(archive))}: {place}: {kind} is a Python object"):
        async_ckpt.load(archive)
    assert async_ckpt.load(archive, select="w")["w"] == 1
    with pytest.raises(UntrustedObjectError, match=rf": buffer: in one pickle with {place}: {kind} is a Python object"):
        async_ckpt.load(archive, select="buffer")
    assert async_ckpt.load(archive, trust=True)["buffer"] == shared_buffer


def test_what_will_need_trust_is_told_when_it_is_saved(archive, caplog):
    class Stated(Custom):
        """Nobody has saved one before."""

    Stated.__qualname__ = "Stated"
    globals()["Stated"] = Stated  # where pickle looks for it
    state = {"config": {"root": Stated(1), "seen": {1, 2}}}
    for _ in range(2):
        async_ckpt.save(state, archive).result()
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "async_ckpt: config.root is a Stated, which is pickled: loading it will need trust=True. Store text or numbers instead to avoid this"
    ]


def test_an_object_is_stored_as_it_was_when_save_was_called(archive):
    custom, members = Custom([1]), {1}
    handle = async_ckpt.save({"c": custom, "s": members}, archive)
    custom.value.append(2)
    members.add(2)
    handle.result()
    assert async_ckpt.load(archive, trust=True) == {"c": Custom([1]), "s": {1}}


@pytest.mark.parametrize(
    "empty", [{}, [], (), torch.amp.GradScaler("cpu", enabled=False)], ids=["dict", "list", "tuple", "scaler"]
)
def test_what_is_empty_can_be_selected(empty, archive):
    state = {"w": torch.ones(2), "nothing": empty, "other": {}}
    async_ckpt.save(state, archive, select=["w", "nothing"]).result()
    loaded = async_ckpt.load(archive)
    assert set(loaded) == {"w", "nothing"}
    assert len(loaded["nothing"]) == 0


# --- what is refused ---------------------------------------------------------------------------------------------


class TwoTensors(torch.Tensor):
    """A wrapper subclass: it looks like a tensor and has no memory of its own."""

    @staticmethod
    def __new__(cls, part: torch.Tensor) -> TwoTensors:
        return torch.Tensor._make_wrapper_subclass(cls, part.shape, dtype=part.dtype)

    def __init__(self, part: torch.Tensor) -> None:
        self.part = part

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


class Flavoured(torch.Tensor):
    """A subclass with memory of its own."""


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


def quantised() -> torch.Tensor:
    return quiet(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8))


REFUSED = {
    "meta": lambda: torch.ones(2, device="meta"),
    "meta parameter": lambda: nn.Linear(2, 2, device="meta").weight,
    "quantised": quantised,
    "fake": fake,
    "nested": lambda: quiet(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "lazy": lambda: nn.LazyLinear(2).weight,
    "wrapper": lambda: TwoTensors(torch.ones(2)),
    "empty wrapper": lambda: TwoTensors(torch.ones(0)),
    "freed": freed,
    "lambda": lambda: lambda: None,
    "lock": threading.Lock,
    "generator": lambda: (i for i in range(2)),
    "module of Python": lambda: sys,
    "mapping": lambda: type.__dict__,
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_stored_is_refused_by_name(make, archive, tmp_path):
    state = {"model": {"good": torch.ones(2), "layers": [torch.ones(1), {"bad.weight": make()}]}}
    with pytest.raises(UnsupportedStateError, match=r"model\.layers\.1\.bad\.weight") as caught:
        async_ckpt.save(state, archive)
    assert caught.value.path == "model.layers.1.bad.weight"
    assert list(tmp_path.iterdir()) == []
    assert difference(round_trip({"w": torch.ones(2)}, archive), {"w": torch.ones(2)}) is None


def test_a_tensor_inside_a_functional_transform_is_refused(archive):
    def inside(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedStateError, match="inner"):
            async_ckpt.save({"inner": x}, archive)
        return x

    torch.func.vmap(inside)(torch.ones(2, 3))
    torch.func.grad(lambda x: inside(x).sum())(torch.ones(3))
    assert not archive.exists()


def test_a_distributed_tensor_of_a_process_group_of_one_is_saved_as_what_it_holds(archive):
    distributed = pytest.importorskip("torch.distributed.tensor")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        tensor = distributed.distribute_tensor(torch.ones(4), mesh)
        async_ckpt.save({"w": tensor}, archive).result()
    finally:
        torch.distributed.destroy_process_group()
    assert torch.equal(async_ckpt.load(archive)["w"], torch.ones(4))


def test_a_subclass_with_memory_of_its_own_is_stored_as_a_plain_tensor(archive):
    loaded = round_trip({"w": torch.arange(3.0).as_subclass(Flavoured)}, archive)["w"]
    assert type(loaded) is torch.Tensor
    assert difference(loaded, torch.arange(3.0)) is None


def cyclic_dict() -> Any:
    inner: dict[str, Any] = {}
    inner["self"] = inner
    return inner


def cyclic_list() -> Any:
    inner: list[Any] = [1]
    inner.append((inner,))
    return inner


class Endless:
    """Its state contains itself."""

    def state_dict(self) -> dict[str, Any]:
        return {"me": self}


class Bottomless:
    """Its state contains another one like it, for ever."""

    def state_dict(self) -> dict[str, Any]:
        return {"next": Bottomless()}


@pytest.mark.parametrize("make", [cyclic_dict, cyclic_list, Endless], ids=["dict", "list", "state_dict"])
def test_a_state_that_contains_itself_is_refused(make, archive):
    with pytest.raises(UnsupportedStateError, match="contains itself") as caught:
        async_ckpt.save({"a": {"b": make()}}, archive)
    assert caught.value.path.startswith("a.b")
    assert not archive.exists()
    async_ckpt.save({"w": torch.ones(1)}, archive).result()


def test_one_container_in_two_places_is_no_cycle(archive):
    shared = {"w": torch.ones(1), "l": [1]}
    state = {"a": shared, "b": [shared, shared]}
    assert difference(round_trip(state, archive), state) is None


@pytest.mark.parametrize("make", [dict, list, tuple, Bottomless], ids=lambda kind: kind.__name__)
def test_a_state_nested_too_deeply_is_refused(make, archive):
    state: Any = Bottomless() if make is Bottomless else torch.ones(1)
    for _ in range(5000):
        state = {"k": state} if make is dict else [state] if make is list else (state,)
        if make is Bottomless:
            break
    with pytest.raises(UnsupportedStateError, match="nested too deeply"):
        async_ckpt.save(state, archive)
    assert not archive.exists()


record = np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")])
record.flags.writeable = False  # or it has no hash


@pytest.mark.parametrize(
    "key",
    [
        Custom, Colour.RED, frozenset({Colour.RED}), object(), (1, operator.add), record[0], 7**9000, -(7**9000),
        (1, (7**9000,)),
    ],
    ids=lambda key: type(key).__name__,
)  # fmt: skip
def test_a_key_that_cannot_be_stored_is_refused_by_name(key, archive):
    for value in (torch.ones(1), 1):
        with pytest.raises(UnsupportedStateError, match="key") as caught:
            async_ckpt.save({"model": {"good": 1, key: value}}, archive)
        assert caught.value.path.startswith("model.")
    assert not archive.exists()


def test_a_refused_state_leaves_the_older_file_as_it_was(archive):
    async_ckpt.save({"w": torch.ones(1)}, archive).result()
    before = archive.read_bytes()
    with pytest.raises(UnsupportedStateError):
        async_ckpt.save({"w": torch.ones(2, device="meta")}, archive)
    assert archive.read_bytes() == before


def test_an_error_raised_by_a_state_dict_reaches_the_caller(archive):
    class Broken:
        def state_dict(self) -> Any:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        async_ckpt.save({"b": Broken()}, archive)
    assert not archive.exists()
