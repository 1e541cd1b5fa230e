"""The tensors in somebody's arguments, and a copy of the arguments that shares nothing that changes."""

import array
import collections
import copyreg
import dataclasses
import functools
import io
import os
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from async_ckpt import UnsupportedStateError
from async_ckpt.face.around.arguments import closure_of, deep_copied, tensors_in


@dataclasses.dataclass
class Plain:
    weight: Any


@dataclasses.dataclass(slots=True)
class Slotted:
    weight: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    weight: Any


class Below(Slotted):
    """Slots and a `__dict__`."""


class Pair(NamedTuple):
    left: Any
    right: Any


class Registered:
    """What `copyreg` knows how to take apart."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight


copyreg.pickle(Registered, lambda value: (Registered, (value.weight,)))


class Secretive:
    """Shows what it holds only to those who copy it."""

    def __init__(self, weight: Any) -> None:
        self.hidden = {"at": [weight]}

    def __getstate__(self) -> dict[str, Any]:
        return {"w": self.hidden["at"][0]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.hidden = {"at": [state["w"]]}


class Sub(torch.Tensor):
    """A tensor of another type, with memory of its own."""


def below() -> Any:
    value = Below(torch.ones(1))
    value.other = torch.ones(1)
    return value


def subclass_of_dict() -> Any:
    value = collections.OrderedDict(a=torch.ones(1))
    value._metadata = {"": torch.ones(1)}
    return value


class Saver:
    def __init__(self) -> None:
        self.weight = torch.ones(1)

    def save(self, path: str) -> None:
        """Its object holds a tensor."""


# what -> how many tensors are in it
HOLDERS = {
    "bare": (lambda: torch.ones(1), 1),
    "list": (lambda: [torch.ones(1), [torch.ones(1)]], 2),
    "tuple": (lambda: (torch.ones(1), (torch.ones(1),)), 2),
    "dict": (lambda: {"a": torch.ones(1), 1: {None: torch.ones(1)}}, 2),
    "keys": (lambda: {torch.ones(1): 1, (torch.ones(1), 2): 2}, 2),
    "set": (lambda: {torch.ones(1), torch.ones(1)}, 2),
    "frozenset": (lambda: frozenset({torch.ones(1)}), 1),
    "deque": (lambda: collections.deque([torch.ones(1)]), 1),
    "defaultdict": (lambda: collections.defaultdict(list, a=[torch.ones(1)]), 1),
    "ordered": (subclass_of_dict, 2),
    "namedtuple": (lambda: Pair(torch.ones(1), [torch.ones(1)]), 2),
    "dataclass": (lambda: Plain(torch.ones(1)), 1),
    "slots": (lambda: Slotted(torch.ones(1)), 1),
    "frozen": (lambda: Frozen(torch.ones(1)), 1),
    "slots and dict": (below, 2),
    "namespace": (lambda: SimpleNamespace(weight=torch.ones(1)), 1),
    "partial": (lambda: functools.partial(print, torch.ones(1), end=torch.ones(1)), 2),
    "method": (lambda: Saver().save, 1),
    "copyreg": (lambda: Registered(torch.ones(1)), 1),
    "getstate": (lambda: Secretive(torch.ones(1)), 1),
    "module": (lambda: torch.nn.Linear(2, 2), 2),
    "optimizer": (lambda: torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 1),
    "subclass": (lambda: torch.ones(1).as_subclass(Sub), 1),
    "exception": (lambda: ValueError(torch.ones(1)), 1),
    "twice": (lambda: [torch.ones(1)] * 3, 1),
}


@pytest.mark.parametrize(("make", "count"), HOLDERS.values(), ids=HOLDERS)
def test_every_tensor_is_found_and_is_replaced_in_the_copy(make, count):
    value = make()
    names, tensors, _ = tensors_in({"x": value})
    assert len(names) == len(tensors) == count

    instead = [tensor.clone().detach() for tensor in tensors]
    _, found, _ = tensors_in({"x": deep_copied(value, tensors, instead, function_name="f")})
    assert {id(tensor) for tensor in found} == {id(tensor) for tensor in instead}


def test_names_say_where_a_tensor_hangs():
    value = {"model": [torch.ones(1), Plain(torch.ones(1))]}

    assert tensors_in({"state": value, "other": torch.ones(1)})[0] == [
        "state.model.0",
        "state.model.1.weight",
        "other",
    ]


def test_circles_end():
    value: dict[str, Any] = {"w": torch.ones(1)}
    value["self"] = value
    names, tensors, _ = tensors_in({"x": value})
    again = deep_copied(value, tensors, [torch.zeros(1)], function_name="f")

    assert names == ["x.w"]
    assert again["self"] is again
    assert again["w"] == 0


@pytest.mark.parametrize(
    "value", [range(10**12), memoryview(bytes(8)), array.array("d", [0.0]), "x" * 100, np.zeros(3)], ids=type
)
def test_what_is_only_long_is_not_gone_through(value):
    assert tensors_in({"x": value}) == ([], [], [])


def test_the_attributes_and_the_gradient_of_a_tensor_come_along():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.full((2,), 3.0)
    p.role = {"scale": torch.full((2,), 5.0)}
    buffer = torch.nn.Buffer(torch.ones(1), persistent=False)
    names, tensors, _ = tensors_in({"p": p, "b": buffer})
    assert names == ["p", "p.role.scale", "p.grad", "b"]

    instead = [torch.nn.Parameter(torch.zeros(2)), torch.zeros(2), torch.zeros(2), torch.zeros(1)]
    new_p, new_b = deep_copied((p, buffer), tensors, instead, function_name="f")
    assert new_p.grad is instead[2]
    assert new_p.role["scale"] is instead[1]
    assert new_p.role is not p.role
    assert isinstance(new_b, torch.nn.Buffer)
    assert new_b.persistent is False


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # of torch itself, for quantised tensors
@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["meta", "sparse", "quantised", "nested"],
)
def test_tensors_of_other_kinds_are_left_to_the_copy(tensor):
    assert tensors_in({"x": tensor}) == ([], [], [])
    assert deep_copied(tensor, [], [], function_name="f") is not tensor


def test_a_tensor_that_says_itself_how_it_is_copied_is_left_to_do_so():
    class Own(torch.Tensor):
        def __deepcopy__(self, memo: dict[int, Any]) -> str:
            return "mine"

    value = torch.ones(2).as_subclass(Own)

    assert tensors_in({"x": value}) == ([], [], [])
    assert deep_copied([value], [], [], function_name="f") == ["mine"]


@pytest.mark.parametrize(
    "value",
    [torch, np.random, len, print, Plain, torch.float32, torch.Generator()],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_what_cannot_change_or_be_copied_is_passed_on(value):
    again = deep_copied([value], [], [], function_name="f")[0]

    assert again is value or isinstance(value, torch.Generator)


@pytest.mark.parametrize(
    "value", [threading.Lock(), (n for n in ()), io.FileIO(os.devnull)], ids=lambda v: type(v).__name__
)
def test_what_cannot_be_copied_is_refused_by_what_it_is(value):
    assert tensors_in({"x": [value]}) == ([], [], [])
    with pytest.raises(
        UnsupportedStateError, match=r"f cannot be called in the background.* cannot be copied .*state_dict"
    ):
        deep_copied([value], [], [], function_name="f")


class ByItem(dict):
    """Its entries are attributes, so that it raises KeyError for `__deepcopy__`."""

    __getattr__ = dict.__getitem__


class Every(dict):
    """It has any attribute, `__deepcopy__` too."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __missing__(self, name: Any) -> Any:
        return Every()


class OrderedByItem(collections.OrderedDict):
    __getattr__ = collections.OrderedDict.__getitem__


@pytest.mark.parametrize("cls", [ByItem, Every, OrderedByItem])
def test_dicts_whose_entries_are_attributes_are_copied(cls):
    weight, inner = torch.ones(2), cls(b=[1], a=2)
    value = {"one": cls(weight=weight, inner=inner), "same": [inner]}
    inner.__dict__["note"] = ["kept"]

    names, tensors, _ = tensors_in({"x": value})
    again = deep_copied(value, tensors, [torch.zeros(2)], function_name="f")

    assert names == ["x.one.weight"]
    assert again["one"]["inner"] is again["same"][0] is not inner
    assert type(again["one"]) is type(again["same"][0]) is cls
    assert list(again["same"][0].items()) == [("b", [1]), ("a", 2)]
    assert again["same"][0].__dict__ == {"note": ["kept"]}
    assert again["one"]["weight"].tolist() == [0, 0]
    again["same"][0]["b"].append(3)
    assert inner["b"] == [1]


def test_what_is_nested_too_deeply_is_refused():
    value: list[Any] = []
    for _ in range(10_000):
        value = [value]
    with pytest.raises(UnsupportedStateError, match="recursion"):
        deep_copied(value, *[tensors_in({"x": value})[1]] * 2, function_name="f")


def test_the_variables_of_the_function_around_are_found():
    weight = torch.ones(1)
    if threading.active_count() < 0:
        later = None

    def inner() -> Any:
        return weight, later

    assert set(closure_of(inner)) == {"weight"}
    assert set(closure_of(functools.partial(functools.partial(inner)))) == {"weight"}
    assert closure_of(torch.save) == {}
    assert closure_of(len) == {}
    assert closure_of(Saver().save) == {}
