"""Live containers are filled where they are: whoever holds one, such as the loop that adds to it, has what was saved."""

import argparse
import array
import dataclasses
import enum
import functools
import operator
import re
import types
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from states import difference, restored

import async_ckpt
from async_ckpt import AsyncCheckpointer, StateMismatchError
from async_ckpt.integrations.dcp import TarStorageWriter
from async_ckpt.integrations.dcp import restore as restore_dcp


class History(list):
    """A list that may know more."""


class Named(dict):
    pass


class Seen(set):
    pass


class Line(deque):
    pass


Pair = namedtuple("Pair", "count items")


@dataclasses.dataclass
class Record:
    epoch: int = 0
    lines: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    epoch: int
    lines: list[Any]


def lists() -> defaultdict[str, list[Any]]:
    return defaultdict(list)


def nested(**lines: Any) -> Any:
    return filled(defaultdict(lists), train=filled(lists(), **lines))


def filled(container: Any, **entries: Any) -> Any:
    container.update(entries)
    return container


# What was saved, and the live one.
IN_PLACE: dict[str, Callable[[], tuple[Any, Any]]] = {
    "list": lambda: ([1, [2]], []),
    "longer list": lambda: ([1], [1, 2, 3]),
    "list of dicts": lambda: ([{"a": 1}, {"a": 2}], [{"a": 0}]),
    "longer list of dicts": lambda: ([{"a": 1}], [{"a": 0}, {"b": 0}]),
    "list of its own class": lambda: (History([1]), History()),
    "list of records": lambda: ([Record(1), Record(2, [3])], [Record()]),
    "list of named tuples": lambda: ([Pair(1, [2]), Pair(3, [])], [Pair(0, [])]),
    "dict": lambda: ({"a": 1, "b": {"c": [2]}}, {}),
    "dict by step": lambda: ({0: 0.5, 1: 1.5}, {0: 0.0}),
    "dict of later steps": lambda: ({0: 0.5}, {0: 0.5, 1: 1.5, 2: 2.5}),
    "dict by names, one more": lambda: ({"loss": [1], "accuracy": [2]}, {"loss": []}),
    "dict by tuples": lambda: ({(1, 2.5, None): True, b"x": 0}, {(9,): 9}),
    "dict of its own class": lambda: (Named(a=1), Named()),
    "dict in another order": lambda: ({"b": 1, "a": 2}, {"a": 0, "b": 0}),
    "OrderedDict": lambda: (OrderedDict(b=1, a=2), OrderedDict()),
    "OrderedDict in another order": lambda: (OrderedDict(b=1, a=2), OrderedDict(a=0, b=0)),
    "defaultdict": lambda: (filled(lists(), loss=[1, 2]), lists()),
    "defaultdict that went on": lambda: (filled(lists(), loss=[1]), filled(lists(), loss=[1, 2], late=[3])),
    "defaultdict of defaultdicts": lambda: (nested(loss=[1]), defaultdict(lists)),
    "defaultdict of Counters": lambda: (filled(defaultdict(Counter), a=Counter(b=2)), defaultdict(Counter)),
    "Counter": lambda: (Counter(a=2, b=1), Counter()),
    "Counter that went on": lambda: (Counter(a=2), Counter(b=1, a=5)),
    "set": lambda: ({1, "a", (2,)}, set()),
    "larger set": lambda: ({1}, {1, 2}),
    "deque": lambda: (deque([1, 2], 5), deque(maxlen=5)),
    "deque that went on": lambda: (deque([{"a": 1}, {"b": 2}], 2), deque([{"b": 2}, {"c": 3}], 2)),
    "bytearray": lambda: (bytearray(b"abc"), bytearray()),
    "array": lambda: (np.arange(3), np.zeros(3, np.int64)),
    "in a dict": lambda: ({"inner": {"list": [1], "set": {2}}}, {"inner": {"list": [], "set": set()}}),
    "in a record": lambda: (Record(1, [2]), Record()),
    "empty again": lambda: ([], [1]),
    "nothing in it again": lambda: ({}, {0: 1}),
}  # fmt: skip
WITH_TRUST: dict[str, Callable[[], tuple[Any, Any]]] = {
    "UserDict": lambda: (UserDict(a=1, b=[2]), UserDict(a=0, b=[])),
    "UserList": lambda: (UserList([1]), UserList()),
    "array.array": lambda: (array.array("i", [1, 2]), array.array("i")),
    "set of its own class": lambda: (Seen([1]), Seen()),
    "deque of its own class": lambda: (Line([1], 3), Line(maxlen=3)),
    "Namespace": lambda: (argparse.Namespace(lr=1, betas=[2]), argparse.Namespace(lr=0, betas=[])),
    "SimpleNamespace": lambda: (types.SimpleNamespace(a=[1]), types.SimpleNamespace(a=[])),
}


@pytest.mark.parametrize("kind", [*IN_PLACE, *WITH_TRUST])
def test_a_live_container_is_filled_where_it_is_and_keeps_its_class(kind, ckpt):
    saved, live = (IN_PLACE | WITH_TRUST)[kind]()
    cls, factory = type(live), getattr(live, "default_factory", None)
    state = restored(ckpt, {"w": torch.ones(1), "h": saved}, {"w": torch.zeros(1), "h": live}, trust=kind in WITH_TRUST)
    assert state["h"] is live
    assert type(live) is cls
    assert getattr(live, "default_factory", None) is factory
    assert live == saved if isinstance(saved, set) else repr(live) == repr(saved)


@pytest.mark.parametrize(
    ("saved", "live", "held"),
    [
        ((1, [2]), (0, []), lambda h: h[1]),
        (Pair(1, [2]), Pair(0, []), lambda h: h.items),
        (Frozen(1, [2]), Frozen(0, []), lambda h: h.lines),
        (Record(1, [2]), Record(), lambda h: h.lines),
        ({"a": ({"b": {1}},)}, {"a": ({"b": set()},)}, lambda h: h["a"][0]["b"]),
        ([1, [2], 3], [0, []], lambda h: h[1]),
    ],
    ids=["tuple", "named tuple", "frozen record", "record", "deep", "shorter list"],
)
def test_what_is_alive_inside_of_what_cannot_change_stays_itself(saved, live, held, ckpt):
    inner = held(live)
    state = restored(ckpt, {"h": saved}, {"h": live})
    assert repr(state["h"]) == repr(saved)
    assert held(state["h"]) is inner


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ([1, {"a": [2]}], []), ([1], [0, 5]), ({"a": [1]}, {}), (filled(lists(), a=[1]), lists()), ({1, 2}, set()),
        (bytearray(b"ab"), bytearray()), (deque([1]), deque()), (np.arange(3), np.zeros(3, np.int64)),
        (Counter(a=2, b=1), Counter(c=5)), ({0: 1, 1: 2}, {0: 0, 5: 5}), (filled(lists(), a=[1]), filled(lists(), b=[1])),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_container_that_is_the_whole_state_is_filled(saved, live, ckpt):
    restored(ckpt, saved, live)
    assert repr(live) == repr(saved)


def test_children_that_a_defaultdict_makes_are_of_its_kind(ckpt):
    live = defaultdict(lists)
    restored(ckpt, {"h": nested(loss=[1])}, {"h": live})
    live["train"]["accuracy"].append(2)
    assert live == {"train": {"loss": [1], "accuracy": [2]}}


class Meter:
    """An object that a defaultdict makes, with a state of its own."""

    def __init__(self) -> None:
        self.total = 0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def test_objects_that_a_defaultdict_makes_get_their_state(ckpt):
    saved, live = defaultdict(Meter), defaultdict(Meter)
    saved["loss"].total = 7
    restored(ckpt, {"meters": saved}, {"meters": live})
    assert type(live["loss"]) is Meter
    assert live["loss"].total == 7


def test_entries_of_a_driver_and_of_borrowed_groups_are_filled_where_they_are(ckpt):
    state = {"model": {"w": torch.ones(3)}, "history": {"loss": [1]}}
    ckpt.save(state, 1).result()
    state["history"]["loss"].append(2)
    ckpt.save(state, 2, unchanged=["model"], driver={"seen": {1}, "lines": [{"a": 1}]}).result()
    live = {"model": {"w": torch.zeros(3)}, "history": {}, "seen": set(), "lines": []}
    kept = dict(live)
    ckpt.restore(live)
    assert all(live[name] is kept[name] for name in live)
    assert difference(live, {**state, "seen": {1}, "lines": [{"a": 1}]}) is None
    everything: dict[str, Any] = {}
    ckpt.restore(everything)
    assert difference({name: everything[name] for name in live}, live) is None


@pytest.mark.parametrize("by", ["torch", "us"])
def test_containers_are_filled_from_a_folder_of_dcp(tmp_path, by):
    saved = {
        "w": torch.ones(1), "dict": {"a": 1, "b": [{"c": 2}]}, "lists": filled(lists(), a=[1]), "counter": Counter(x=2),
        "set": {1, 2}, "list": [1, 2], "deque": deque([1], 3), "bytes": bytearray(b"ab"), "counters": [Counter(a=2)],
        "tuple": (1, [2]), "by step": {0: 1, 1: 2}, "deep": {"x": {"y": [1]}},
    }  # fmt: skip
    live: dict[str, Any] = {
        "w": torch.zeros(1), "dict": {}, "lists": lists(), "counter": Counter(), "set": set(), "list": [],
        "deque": deque(maxlen=3), "bytes": bytearray(), "counters": [], "tuple": (0, []), "by step": {0: 0, 5: 0},
        "deep": {"x": {"y": []}},
    }  # fmt: skip
    if by == "torch":
        dcp.save(saved, checkpoint_id=tmp_path / "x")
    else:
        dcp.save(saved, storage_writer=TarStorageWriter(tmp_path / "x"))
    kept = {**live, "tuple": live["tuple"][1], "deep": live["deep"]["x"]["y"]}
    restore_dcp(live, tmp_path / "x", trust=True)
    assert torch.equal(live["w"], saved["w"])
    assert all(live[name] == saved[name] for name in live)
    assert live["tuple"][1] is kept["tuple"]
    assert live["deep"]["x"]["y"] is kept["deep"]
    assert all(live[name] is kept[name] for name in live if name not in ("tuple", "deep"))


def test_what_dcp_leaves_out_since_it_is_empty_stays_beside_plain_values(tmp_path):
    dcp.save({"h": {"n": 1, "none": {}}}, checkpoint_id=tmp_path / "x")
    live = {"h": {"none": {}, "n": 0}}
    none = live["h"]["none"]
    restore_dcp(live, tmp_path / "x")
    assert live == {"h": {"none": {}, "n": 1}}
    assert live["h"]["none"] is none


# --- going back, and parts ---------------------------------------------------------------------------------------------


def test_a_training_that_goes_back_has_its_histories_of_that_step(ckpt):
    state = {"lines": [], "by_step": {}, "by_name": {"train": []}, "seen": set(), "counts": Counter()}
    for step in range(4):
        state["lines"].append({"step": step})
        state["by_step"][step] = step / 2
        state["by_name"]["train"].append(step)
        state["by_name"].setdefault(f"evaluation {step}", []).append(step)
        state["seen"].add(step)
        state["counts"][f"{step}"] += 1
        ckpt.save(state, step).result()
    ckpt.restore(state, step=1)
    assert difference(state, {**ckpt.load(1), "counts": Counter(ckpt.load(1)["counts"])}) is None
    assert list(state["by_name"]) == ["train", "evaluation 0", "evaluation 1"]


def test_a_new_setting_that_the_checkpoint_lacks_is_missing_and_kept_without_strict(tmp_path):
    with AsyncCheckpointer(tmp_path) as ckpt:
        ckpt.save({"w": torch.ones(1), "settings": {"lr": 1.0}}, 1).result()
    live = {"w": torch.zeros(1), "settings": {"lr": 0.0, "new": True}}
    with AsyncCheckpointer(tmp_path) as ckpt:
        with pytest.raises(StateMismatchError, match=r"strict=False(.|\n)*missing in the checkpoint: settings\.new$"):
            ckpt.restore(live)
        assert not live["w"].any()
        assert live["settings"] == {"lr": 0.0, "new": True}
        ckpt.restore(live, strict=False)
        assert live["settings"] == {"lr": 1.0, "new": True}
        ckpt.restore(live, strict=False)
        assert live["settings"] == {"lr": 1.0, "new": True}


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("h", {"a": [1, 2], "b": {3: 4}, "d": [{"x": 1, "y": 1}, {"x": 2, "y": 2}]}),
        ("h.a", {"a": [1, 2], "b": {7: 8}, "d": [{"x": 0, "y": 0}, {"x": 0, "y": 0}]}),
        ("h.a.*", {"a": [1, 2], "b": {7: 8}, "d": [{"x": 0, "y": 0}, {"x": 0, "y": 0}]}),
        ("h.b", {"a": [], "b": {3: 4}, "d": [{"x": 0, "y": 0}, {"x": 0, "y": 0}]}),
        ("h.b.3", {"a": [], "b": {7: 8, 3: 4}, "d": [{"x": 0, "y": 0}, {"x": 0, "y": 0}]}),
        ("h.d.1", {"a": [], "b": {7: 8}, "d": [{"x": 0, "y": 0}, {"x": 2, "y": 2}]}),
        ("h.d.1.y", {"a": [], "b": {7: 8}, "d": [{"x": 0, "y": 0}, {"x": 0, "y": 2}]}),
    ],
)
def test_what_is_not_selected_stays(select, expected, ckpt):
    live = {"a": [], "b": {7: 8}, "d": [{"x": 0, "y": 0}, {"x": 0, "y": 0}]}
    saved = {"a": [1, 2], "b": {3: 4}, "d": [{"x": 1, "y": 1}, {"x": 2, "y": 2}]}
    restored(ckpt, {"h": saved}, {"h": live}, select=select)
    assert live == expected


@dataclasses.dataclass
class Later:
    """A `Record` with another field in place of its lines."""

    epoch: int = 0
    patience: int = 0


def test_a_record_with_other_fields_than_were_saved_is_a_difference_and_stays_as_it_is(ckpt):
    live = Later()
    with pytest.raises(StateMismatchError) as raised:
        restored(ckpt, {"h": Record(1, [2])}, {"h": live})

    assert raised.value.missing == ("h.patience",)
    assert raised.value.unexpected == ("h.lines",)
    assert live == Later()


def test_items_of_a_longer_list_cannot_be_selected(ckpt):
    live = [0]
    with pytest.raises(StateMismatchError, match="h is partly selected, and the selected items differ"):
        restored(ckpt, {"h": [1, 2, 3]}, {"h": live}, select="h.2")
    assert live == [0]


def test_a_corrupt_step_leaves_nothing_of_its_own_in_a_history(tmp_path):
    with AsyncCheckpointer(tmp_path) as ckpt:
        for step, names in ((1, "a"), (2, "bc")):
            history = {name: torch.full((3,), float(step)) for name in names}
            ckpt.save({"model": {"w": torch.ones(300_000)}, "history": history}, step).result()
        (newest,) = tmp_path.glob("step_00000002/*.tar")
        data = bytearray(newest.read_bytes())
        data[600_000] ^= 1
        newest.write_bytes(data)
        live: dict[str, Any] = {"model": {"w": torch.zeros(300_000)}, "history": {}}
        history = live["history"]
        with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
            assert ckpt.restore(live) == 1
    assert live["history"] is history
    assert list(history) == ["a"]


# --- one object at two places ------------------------------------------------------------------------------------------


def test_a_list_at_two_places_of_the_state_is_filled_once(ckpt):
    both, live = [1, torch.ones(1), np.arange(2), float("nan"), {"a": deque([bytes(5000)])}], []
    state = restored(ckpt, {"a": both, "b": {"c": both}}, {"a": live, "b": {"c": live}})
    assert state["a"] is state["b"]["c"] is live
    assert difference(live, both) is None


def test_one_object_for_two_saved_values_is_refused(ckpt):
    live: list[int] = []
    with pytest.raises(StateMismatchError, match=r"b\.c is the same object as a here, and has another value"):
        restored(ckpt, {"a": [1], "b": {"c": [2]}}, {"a": live, "b": {"c": live}})
    assert live == []


def test_one_list_in_a_history_twice_is_exchanged_where_its_items_differ(ckpt):
    live = [[0]] * 2
    restored(ckpt, {"h": [[1], [2], [3]]}, {"h": live})
    assert live == [[1], [2], [3]]


# --- what cannot be filled ---------------------------------------------------------------------------------------------


class Locked(dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("this one is locked")


class Sealed(list):
    def extend(self, items: Any) -> None:
        raise TypeError("this one is sealed")


@dataclasses.dataclass
class Once:
    value: int

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            raise AttributeError("it is set already")
        super().__setattr__(name, value)


def locked() -> Any:
    made = Locked()
    dict.__setitem__(made, "a", 0)
    return made


def read_only() -> Any:
    array = np.zeros(2)
    array.flags.writeable = False
    return array


class OneWay:
    def state_dict(self) -> dict[str, Any]:
        return {"a": 1}


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value


REFUSED: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "locked dict": ({"a": 1}, locked, r"bad cannot be filled: a Locked refuses the change \(TypeError: this one is locked"),
    "sealed list": ([1], lambda: Sealed([0]), "bad cannot be filled: a Sealed refuses the change"),
    "record that is set once": (Once(1), lambda: Once(0), r"bad\.value cannot be filled: an Once refuses the change"),
    "read-only array": (np.ones(2), read_only, "bad cannot be filled: it is a read-only numpy array"),
    "array of another shape": (np.ones(2), lambda: np.zeros(3), r"bad is a numpy array float64\[3\] here and float64\[2\]"),
    "array for None": (None, lambda: np.zeros(3), r"bad is a numpy array float64\[3\] here and a NoneType"),
    "dict for None": (None, dict, "bad is a dict here and a NoneType in the checkpoint"),
    "list for None": (None, list, "bad is a list here and a NoneType in the checkpoint"),
    "set for a list": ([1], set, "bad is a set here and a list in the checkpoint"),
    "object for None": (None, Meter, "bad is a Meter here and a NoneType in the checkpoint"),
    "no load_state_dict": (OneWay(), OneWay, r"bad is an OneWay here, which has a state_dict\(\) but no load_state_dict"),
    "another object": (Opaque(1), lambda: Opaque(2), "bad is an Opaque here, which restore cannot fill: .* give it state_dict"),
    "object for a number": (1, lambda: Opaque(2), "bad is an Opaque here, which restore cannot fill"),
    "object in a list": ([Opaque(1)], lambda: [Opaque(2)], r"bad\.0 is an Opaque here, which restore cannot fill"),
    "tensors by name": ({"a": torch.ones(1), "b": torch.ones(1)}, lambda: {"a": torch.zeros(1)}, r"unexpected .*bad\.b"),
    "tensors in a list": ([torch.ones(1)] * 2, lambda: [torch.zeros(1)], "bad has 1 entries here and 2 .* an empty list"),
    "tuple of another length": ((1, 2), lambda: (0,), "bad has 1 entries here and 2 in the checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_filled_is_named_before_anything_is_touched(kind, ckpt):
    saved, make, text = REFUSED[kind]
    ckpt.save({"first": torch.ones(2), "list": [1], "bad": saved}, 1).result()
    live: dict[str, Any] = {"first": torch.zeros(2), "list": [], "bad": make()}
    bad = live["bad"]
    before = repr(vars(bad) if hasattr(bad, "__dict__") and not isinstance(bad, dict | list) else bad)
    with pytest.raises(StateMismatchError, match=text):
        ckpt.restore(live, trust=True)
    assert not live["first"].any()
    assert live["list"] == []
    assert live["bad"] is bad
    assert repr(vars(bad) if hasattr(bad, "__dict__") and not isinstance(bad, dict | list) else bad) == before


class Colour(enum.Enum):
    RED = object  # no plain value
    BLUE = int


class Text(str):
    """Text that may know more."""


@dataclasses.dataclass(frozen=True)
class Setting:
    value: int


class MoreSetting(Setting):
    """No dataclass itself, so it may have more than its fields."""


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        (Colour.RED, Colour.BLUE), (MoreSetting(1), MoreSetting(2)), (operator.add, operator.sub), (Opaque, Meter),
        (..., None), (..., ...), (torch.strided, torch.sparse_coo), (re.compile("a"), re.compile("b")), (list[int], list[str]),
        (Text("a"), Text("b")), (Fraction(1, 2**5000), Fraction(1, 2)), ((operator.add, 1), (operator.sub, 0)),
        (np.dtype("f4"), np.dtype("f8")), (Opaque.__init__, None),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_pickled_value_that_cannot_change_is_exchanged(saved, live, ckpt):
    state = restored(ckpt, {"value": saved}, {"value": live}, trust=True)
    assert state["value"] == saved
    assert type(state["value"]) is type(saved)


def test_an_object_that_is_as_it_was_saved_stays(ckpt):
    live = Opaque([1, {0, 8}, functools.partial(max, 1)])
    saved = Opaque([1, {8, 0}, functools.partial(max, 1)])
    state = restored(ckpt, {"value": saved, "n": 1}, {"value": live, "n": 0}, trust=True)
    assert state["value"] is live
    assert state["n"] == 1


# --- dicts whose entries are attributes --------------------------------------------------------------------------------


class ByItem(dict):
    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Ordered(OrderedDict):
    __getattr__ = OrderedDict.__getitem__


class Every(dict):
    """Like addict.Dict: it has any attribute."""

    def __getattr__(self, name: str) -> Any:
        return self[name]

    def __missing__(self, name: Any) -> Any:
        return Every()

    __hash__ = None


class NoneFor(dict):
    """Like munch.DefaultMunch(None)."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class Itself(dict):
    def __init__(self, *args: Any, **entries: Any) -> None:
        super().__init__(*args, **entries)
        self.__dict__ = self


class EveryUser(UserDict):
    def __getattr__(self, name: str) -> Any:
        if name == "data":
            raise AttributeError(name)
        return self[name]


WITH_ATTRIBUTES = [ByItem, Ordered, Every, NoneFor, Itself, EveryUser]
MARKS = {
    "state_dict": {"a": 1}, "load_state_dict": 5, "_metadata": {"x": 1}, "key": "k", "data": [1], "global_shape": [2],
    "local_shape": 1, "global_offset": 0, "axis_fragmentations": None, "replica_id": 0, "default_factory": None,
}  # fmt: skip


@pytest.mark.parametrize("cls", WITH_ATTRIBUTES)
@pytest.mark.parametrize("is_empty", [False, True], ids=["filled", "empty"])
def test_a_dict_with_its_entries_as_attributes_is_a_dict(cls, is_empty, ckpt):
    live = cls() if is_empty else cls(dict.fromkeys(MARKS) | {"lr": 0.0, "deep": cls(n=0)})
    saved = cls({**MARKS, "lr": 1.0, "deep": cls(n=1)})
    state = restored(ckpt, {"settings": saved, "epoch": 3}, {"settings": live, "epoch": 0}, trust=cls is EveryUser)
    assert state["settings"] is live
    assert dict(live.items()) == dict(saved.items())
    assert type(live["deep"]) is cls
    assert state["epoch"] == 3


@pytest.mark.parametrize("cls", [ByItem, Ordered, Every, NoneFor, Itself])
def test_a_dict_with_its_entries_as_attributes_may_be_the_state(cls, tmp_path):
    state, live = cls(w=torch.ones(2), cfg=cls(n=1)), cls(w=torch.zeros(2), cfg=cls(n=0))
    async_ckpt.save(state, tmp_path / "x.tar").result()
    assert async_ckpt.load(tmp_path / "x.tar")["cfg"] == {"n": 1}
    with async_ckpt.snapshot(state) as snap:
        assert snap["cfg"].state_dict() == {"n": 1}
    with AsyncCheckpointer(tmp_path / "run") as ckpt:
        restored(ckpt, state, live)
    assert live["w"].all()
    assert live["cfg"] == {"n": 1}


class Proxy:
    """A wrapper whose inner object has the methods."""

    def __init__(self, inner: Any) -> None:
        self.__dict__["inner"] = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_an_object_with_the_methods_of_another_has_a_state(ckpt):
    saved, live, given = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), []
    own = types.SimpleNamespace(state_dict=lambda: {"a": 1}, load_state_dict=given.append)
    restored(ckpt, {"proxy": Proxy(saved), "own": own}, {"proxy": Proxy(live), "own": own})
    assert difference(dict(live.state_dict()), dict(saved.state_dict())) is None
    assert given == [{"a": 1}]
