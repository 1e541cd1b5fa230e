"""Enums, dataclasses and other plain values: what comes back of them, with and without their classes, and into live ones."""

import dataclasses
import enum
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, ClassVar, NamedTuple
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pytest
import torch
from archives import forge, little_memory, read_index
from damage import assert_refused, refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_data import round_trip
from slices import examples
from states import difference, restored

import async_ckpt
from async_ckpt import CorruptCheckpointError, StateMismatchError, UnsupportedStateError

# --- any plain value ----------------------------------------------------------------------------------------------

offsets = st.timedeltas(timedelta(hours=-23), timedelta(hours=23)).map(timezone)
zones = st.one_of(st.none(), st.just(UTC), offsets, st.sampled_from(["Europe/Berlin", "Asia/Kathmandu"]).map(ZoneInfo))
integers = st.one_of(st.integers(), st.integers(-(2**90), 2**90))
paths = st.text(st.characters(exclude_characters="\x00"), max_size=12)
values = st.one_of(
    st.dates(), st.datetimes(timezones=zones), st.times(timezones=zones), st.timedeltas(), offsets,
    st.decimals(), st.fractions(), st.uuids(), paths.map(Path), paths.map(PurePosixPath),
    st.builds(range, integers, integers, integers.filter(bool)),
    st.builds(slice, st.none() | integers, st.none() | integers, st.none() | integers),
    st.sampled_from([torch.float16, torch.device("cpu"), torch.channels_last, torch.preserve_format]),
)  # fmt: skip
hashables = st.one_of(
    st.none(), st.booleans(), integers, st.floats(allow_nan=False), st.text(max_size=5), st.dates(), st.uuids(),
    st.timedeltas(), st.decimals(allow_nan=False), paths.map(Path), st.tuples(integers, st.text(max_size=3)),
)  # fmt: skip
containers = st.one_of(
    st.sets(hashables, max_size=6),
    st.frozensets(st.frozensets(hashables, max_size=3), max_size=3),
    st.builds(deque, st.lists(values, max_size=4), st.none() | st.integers(4, 2**63 - 1)),
    st.dictionaries(hashables, values, max_size=4),
)


@pytest.fixture(scope="module")
def one_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain") / "x.tar"


@settings(max_examples=examples(150), deadline=None)
@given(state=st.lists(values | containers, max_size=8))
def test_any_plain_value_comes_back_without_a_pickle(state, one_path):
    assert difference(round_trip(state, one_path), state) is None
    assert "objects.pt" not in [name for name, _ in read_index(one_path)["members"]]


def test_memory_formats_come_back_without_a_pickle(archive):
    state = [torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format]
    loaded = round_trip(state, archive)
    assert all(a is b for a, b in zip(loaded, state, strict=True))
    assert "objects.pt" not in [name for name, _ in read_index(archive)["members"]]


def test_a_set_has_one_skeleton_in_whatever_order_its_items_are_met(tmp_path):
    """Text hashes to something else in every process; these two numbers to the same place of a set."""
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other)
    async_ckpt.save(one, tmp_path / "1").result()
    async_ckpt.save(other, tmp_path / "2").result()
    assert read_index(tmp_path / "1")["skeleton"] == read_index(tmp_path / "2")["skeleton"]


def test_a_set_of_what_is_not_plain_is_pickled_as_a_whole(archive):
    state = {"s": {1, Shade.DARK}}
    assert round_trip(state, archive, trust=True) == state
    assert "objects.pt" in [name for name, _ in read_index(archive)["members"]]


def test_tensors_in_a_deque_are_tensors_of_the_archive(archive):
    state = {"window": deque([torch.ones(2), {"loss": torch.zeros(1)}], maxlen=8)}
    loaded = round_trip(state, archive)
    assert difference(loaded, state) is None
    assert [row["path"] for row in read_index(archive)["tensors"]] == [["window", 0], ["window", 1, "loss"]]
    assert list(async_ckpt.load(archive, select="window.1")["window"][0]) == ["loss"]


def test_a_path_of_the_other_kind_of_system_comes_back_as_its_words(archive):
    """`WindowsPath` cannot be made on Linux, nor `PosixPath` on Windows."""
    other = ("WindowsPath", PureWindowsPath) if sys.platform != "win32" else ("PosixPath", PurePosixPath)
    async_ckpt.save({"path": Path("a/b")}, archive).result()
    forge(archive, lambda raw: raw["skeleton"]["dict"][0].__setitem__(1, {"path": [other[0], "a/b"]}))
    loaded = async_ckpt.load(archive)["path"]
    assert type(loaded) is other[1]
    assert loaded == other[1]("a/b")


def test_decimals_are_read_whatever_the_context_of_the_reader(archive):
    """One without traps would take what is no number for NaN."""
    state = {"w": 1, "n": Decimal("1." + "1" * 100)}
    async_ckpt.save(state, archive).result()
    with localcontext(prec=3, traps=[]):
        assert async_ckpt.load(archive) == state
        forge(archive, with_node({"decimal": "ten"}))
        assert_refused(archive, CorruptCheckpointError)


# --- enums --------------------------------------------------------------------------------------------------------


class Shade(enum.Enum):
    DARK = "dark"
    PAIR = (1, "x")


class Level(enum.IntEnum):
    LOW = 1


class Word(enum.StrEnum):
    YES = "yes"


class Bits(enum.Flag):
    A = 1
    B = 2


class Wrapped(enum.Enum):
    """Its value is not plain."""

    ONE = bytearray(b"1")


ENUMS = {"a": Shade.DARK, "b": [Shade.PAIR, Level.LOW], "c": (Word.YES,), "d": Bits.A | Bits.B, "e": Bits(0)}
ENUM_CLASSES = [Shade, Level, Word, Bits]


def test_a_member_of_an_enum_loads_as_its_value(archive):
    plain = {"a": "dark", "b": [(1, "x"), 1], "c": ("yes",), "d": 3, "e": 0}
    assert difference(round_trip(ENUMS, archive), plain) is None


def test_a_member_of_an_enum_loads_as_itself_where_the_class_is_given(archive):
    loaded = round_trip(ENUMS, archive, types=ENUM_CLASSES)
    assert loaded == ENUMS
    assert loaded["a"] is Shade.DARK
    assert loaded["b"][1] is Level.LOW
    assert type(loaded["d"]) is Bits


def test_a_value_that_the_given_enum_has_no_longer_stays_a_value(archive):
    class Now(enum.Enum):
        LIGHT = "light"

        @classmethod
        def _missing_(cls, value: object) -> Any:
            raise KeyError(value)

    Now.__module__, Now.__qualname__ = Shade.__module__, Shade.__qualname__
    assert round_trip({"a": Shade.DARK}, archive, types=[Now]) == {"a": "dark"}


def test_an_enum_whose_value_is_not_plain_is_an_object(archive):
    assert round_trip({"a": Wrapped.ONE}, archive, trust=True)["a"] is Wrapped.ONE
    assert_refused(archive)


def test_enums_fill_live_enums(ckpt):
    live = {"a": Shade.PAIR, "b": [Shade.DARK, Level.LOW], "c": (Word.YES,), "d": Bits.A, "e": Bits.A}
    restored(ckpt, ENUMS, live)
    assert live == ENUMS
    assert type(live["d"]) is Bits


def test_what_is_no_member_replaces_a_live_enum_as_it_is(ckpt):
    live = {"a": Shade.DARK, "b": Level.LOW}
    assert restored(ckpt, {"a": None, "b": [7]}, live) == {"a": None, "b": [7]}


# --- dataclasses --------------------------------------------------------------------------------------------------


@dataclass
class Inner:
    w: Any
    note: str = "n"


@dataclass
class Config:
    lr: float
    inner: Inner
    layers: list[Any] = field(default_factory=list)
    root: Path = Path("x")
    derived: int = field(init=False, default=0)
    unset: Any = field(init=False, repr=False)
    given: InitVar[int] = 1
    shared: ClassVar[int] = 5

    def __post_init__(self, given: int) -> None:
        self.derived = 10 * given


@dataclass(frozen=True, slots=True)
class Frozen:
    t: Any
    step: int


@dataclass(frozen=True)
class Point:
    x: Any
    y: Any


def config() -> Config:
    return Config(0.5, Inner(torch.arange(3.0)), [Inner(1), Frozen(torch.ones(2), 7)], Path("/data"), given=4)


AS_DICTS = {
    "lr": 0.5,
    "inner": {"w": torch.arange(3.0), "note": "n"},
    "layers": [{"w": 1, "note": "n"}, {"t": torch.ones(2), "step": 7}],
    "root": Path("/data"),
    "derived": 40,
}


def test_a_dataclass_loads_as_a_dict_of_its_fields(archive):
    assert difference(round_trip({"cfg": config()}, archive), {"cfg": AS_DICTS}) is None
    names = [".".join(map(str, row["path"])) for row in read_index(archive)["tensors"]]
    assert names == ["cfg.inner.w", "cfg.layers.1.t"]
    assert difference(async_ckpt.load(archive, select="cfg.inner"), {"cfg": {"inner": AS_DICTS["inner"]}}) is None


def test_a_dataclass_loads_as_itself_where_its_class_is_given(archive):
    """As it was saved: nothing is derived once more."""
    loaded = round_trip({"cfg": config()}, archive, types=[Config, Inner, Frozen])["cfg"]
    assert difference(loaded.inner, config().inner) is None
    assert difference(loaded.layers[0], Inner(1)) is None
    assert type(loaded.layers[1]) is Frozen
    assert torch.equal(loaded.layers[1].t, torch.ones(2))
    assert (type(loaded), loaded.lr, loaded.root, loaded.derived) == (Config, 0.5, Path("/data"), 40)
    assert not hasattr(loaded, "unset")
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.layers[1].step = 1


def test_each_class_is_given_on_its_own(archive):
    loaded = round_trip({"cfg": config()}, archive, types=[Inner])["cfg"]
    assert type(loaded) is dict
    assert type(loaded["inner"]) is Inner
    assert type(loaded["layers"][1]) is dict


def test_a_bare_dataclass_is_a_state(archive):
    assert difference(round_trip(config(), archive), AS_DICTS) is None


def changed(name: str, *fields: Any) -> Any:
    """A class that goes by the name of Inner."""
    made = dataclasses.make_dataclass(name, fields)
    made.__module__, made.__qualname__ = Inner.__module__, Inner.__qualname__
    return made


class Strict:
    """Not to be made without arguments."""

    def __new__(cls, must: int) -> Any:
        return super().__new__(cls)


@pytest.mark.parametrize(
    "cls",
    [
        changed("Less", "w"),
        changed("More", "w", "note", "extra"),
        changed("Other", "w", "text"),
        dataclasses.make_dataclass(
            "Inner",
            ["w", "note"],
            bases=(Strict,),
            namespace={"__module__": __name__, "__qualname__": "Inner"},
        ),
    ],
    ids=["fewer fields", "more fields", "other fields", "not to be made"],
)
def test_a_dataclass_that_the_given_class_does_not_fit_stays_a_dict(cls, archive):
    assert f"{cls.__module__}.{cls.__qualname__}" == f"{__name__}.Inner"
    assert round_trip({"i": Inner(1)}, archive, types=[cls]) == {"i": {"w": 1, "note": "n"}}


def test_part_of_a_dataclass_is_a_dict(archive):
    async_ckpt.save({"i": Inner(1)}, archive).result()
    assert async_ckpt.load(archive, select="i.w", types=[Inner]) == {"i": {"w": 1}}


def test_a_field_that_cannot_be_stored_is_named(archive):
    with pytest.raises(UnsupportedStateError, match=r"cfg\.inner\.w"):
        async_ckpt.save({"cfg": Config(1, Inner(lambda: None))}, archive)
    inner = Inner(None)
    inner.w = inner
    with pytest.raises(UnsupportedStateError, match=r"cfg\.w contains itself"):
        async_ckpt.save({"cfg": inner}, archive)


def test_only_classes_that_are_stored_by_name_can_be_given(archive):
    async_ckpt.save({"a": 1}, archive).result()
    for cls in (Path, "Config", int, torch.nn.Parameter):
        with pytest.raises(
            TypeError, match="types must be classes of namedtuples, dataclasses, enums or wrapped tensors; got "
        ):
            async_ckpt.load(archive, types=[cls])


# --- into live ones -----------------------------------------------------------------------------------------------


def test_a_live_dataclass_is_filled_in_place(ckpt):
    live = {"cfg": Config(0, Inner(torch.zeros(3), "old"), [Inner(0), Frozen(torch.zeros(2), 0)])}
    cfg, inner, frozen = live["cfg"], live["cfg"].inner, live["cfg"].layers[1]
    restored(ckpt, {"cfg": config()}, live)
    assert live["cfg"] is cfg
    assert cfg.inner is inner
    assert (cfg.lr, cfg.root, cfg.derived, inner.note) == (0.5, Path("/data"), 40, "n")
    assert torch.equal(inner.w, torch.arange(3.0))
    assert type(cfg.layers[1]) is Frozen
    assert cfg.layers[1].t is frozen.t
    assert frozen.t.all()
    assert (frozen.step, cfg.layers[1].step) == (0, 7)


def test_a_bare_live_dataclass_is_filled(ckpt):
    live = Inner(torch.zeros(2), "old")
    weight = live.w
    restored(ckpt, Inner(torch.ones(2), "new"), live)
    assert live.w is weight
    assert weight.all()
    assert live.note == "new"
    ckpt.wait()
    with pytest.raises(TypeError, match="cannot fill a Frozen"):
        ckpt.restore(Frozen(torch.zeros(2), 1))


def test_a_field_that_has_no_value_yet_takes_the_saved_one(ckpt):
    saved, live = config(), Config(0, Inner(torch.zeros(3)))
    saved.layers, saved.unset = [], {"mean": torch.ones(2)}
    restored(ckpt, {"cfg": saved}, {"cfg": live})
    assert torch.equal(live.unset["mean"], torch.ones(2))


def test_fields_that_do_not_fit_are_named_and_nothing_is_overwritten(ckpt):
    live = {"p": changed("Later", "w", "added")(torch.zeros(2), 1), "q": Inner(torch.zeros(1))}
    ckpt.save({"p": Inner(torch.ones(2)), "q": 5}, step=1).result()
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(live)
    assert caught.value.missing == ("p.added",)
    assert caught.value.unexpected == ("p.note",)
    assert caught.value.mismatched == ("q is an Inner here and an int in the checkpoint",)
    assert not live["p"].w.any()


def test_a_live_value_without_memory_of_its_own_is_replaced_by_whatever_was_saved(ckpt):
    saved = {"best": None, "later": Inner(1), "known": Point(1, 2), "when": date(2024, 2, 29), "seen": {1}}
    live: dict[str, Any] = {"best": Inner(3), "later": None, "known": None, "when": None, "seen": set()}
    restored(ckpt, saved, live, types=[Point])
    assert live == {**saved, "later": {"w": 1, "note": "n"}}


def test_a_class_that_is_known_fills_a_dict_too(ckpt):
    live = {"p": {"w": torch.zeros(2), "note": ""}}
    weight = live["p"]["w"]
    restored(ckpt, {"p": Inner(torch.ones(2))}, live, types=[Inner])
    assert live["p"]["w"] is weight
    assert weight.all()
    assert live["p"]["note"] == "n"


def test_a_live_deque_is_filled_in_place_and_keeps_its_maxlen(ckpt):
    saved = {
        "short": deque([1, 2, 3], 5),
        "empty": deque([1, 2], 9),
        "t": deque([torch.ones(2)]),
        "same": [4, 5],
    }
    live = {
        "short": deque([0], 2),
        "empty": deque(maxlen=4),
        "t": deque([torch.zeros(2)]),
        "same": deque([0, 0]),
    }
    before, weight = dict(live), live["t"][0]
    restored(ckpt, saved, live)
    assert all(live[name] is before[name] for name in live)
    assert live["short"] == deque([2, 3])
    assert (live["empty"], live["empty"].maxlen) == (deque([1, 2]), 4)
    assert live["t"][0] is weight
    assert weight.all()
    assert live["same"] == deque([4, 5])


# --- nodes that lie -----------------------------------------------------------------------------------------------

HOSTILE: dict[str, Any] = {
    "path of no class": {"path": ["Path", "x"]}, "path of text": {"path": "x"}, "path of a number": {"path": ["PosixPath", 1]},
    "path of a set": {"path": ["PosixPath", {"set": []}]}, "path unhashable": {"path": [[], "x"]},
    "date of a number": {"date": 20240229}, "date of no day": {"date": "2023-02-29"}, "date of text": {"date": "x" * 10**5},
    "datetime of text": {"datetime": "2024-02-29"}, "datetime of two": {"datetime": ["2024-02-29T00:00:00", 0]},
    "datetime fold": {"datetime": ["2024-02-29T00:00:00", 2, None]}, "datetime in no zone": {"datetime": ["2024-02-29T00:00:00", 0, 1]},
    "datetime in a path": {"datetime": ["2024-02-29T00:00:00", 0, {"path": ["PosixPath", "/"]}]},
    "time of text": {"time": "1"}, "time of no hour": {"time": ["25:00", 0, None]}, "time in no zone": {"time": ["01:00", 0, "UTC"]},
    "timedelta endless": {"timedelta": [10**30, 0, 0]}, "timedelta of floats": {"timedelta": [1e308, 0, 0]}, "timedelta of two": {"timedelta": [1, 2]},
    "timezone too far": {"timezone": [2, 0, 0]}, "timezone of text": {"timezone": "UTC"}, "timezone of an odd name": {"timezone": [0, 0, 0, 5]},
    **{f"zone {key!r:.40}": {"zone": key} for key in (
        "../../../../etc/passwd", "/etc/passwd", "Europe/../../../../etc/passwd", "Europe", "", ".", "Europe/", "Nowhere/At_All",
        "tzdata.zi", "zone.tab", "Europe\\Berlin", "Europe/Berlin\x00", "Europe/Berlin\n", "C:/x", "a" * 10**5, "a/" * 5000 + "a", 5, None, ["UTC"],
    )},
    "decimal of words": {"decimal": "ten"}, "decimal of a number": {"decimal": 1}, "decimal of its parts": {"decimal": [0, [1], 10**9]},
    "decimal out of range": {"decimal": "1e9999999999999999999999"},
    "fraction of zero": {"fraction": [1, 0]}, "fraction of text": {"fraction": "1/3"}, "fraction of floats": {"fraction": [1.5, 2]},
    "fraction endless": {"fraction": [{"int": "f" * 10**6}, {"int": "7" * 10**6}]},
    "uuid short": {"uuid": "00"}, "uuid of a number": {"uuid": 5}, "uuid of words": {"uuid": "x" * 32},
    "range of no step": {"range": [0, 1, 0]}, "range of floats": {"range": [0.0, 1.0, 1.0]}, "range of one": {"range": [5]}, "range of bools": {"range": [False, True, True]},
    "memory format of none": {"memory_format": "channels"}, "memory format of a list": {"memory_format": []},
    "slice of text": {"slice": ["a", "b", None]}, "slice of two": {"slice": [1, 2]}, "slice of tensors": {"slice": [{"tensor": 0}, None, None]},
    "set of lists": {"set": [{"list": []}]}, "set of a list": {"set": [[1]]}, "set of tensors": {"set": [{"tensor": 0}]}, "set of nothing": {"set": None},
    "set of sets": {"set": [{"set": []}]}, "set of records": {"set": [{"npscalar": [[["a", "<f4"]], "AAAAAA=="]}]}, "set of snan": {"set": [{"decimal": "sNaN"}]},
    "frozenset of a number": {"frozenset": 5},
    "deque of a number": {"deque": 5}, "deque of one": {"deque": [[]]}, "deque overfull": {"deque": [[1, 2], 1]}, "deque of a negative maxlen": {"deque": [[], -1]},
    "deque of text": {"deque": [[], "5"]}, "deque of a true maxlen": {"deque": [[], True]}, "deque of an endless maxlen": {"deque": [[], 2**70]},
    "enum of one": {"enum": ["x"]}, "enum of a list": {"enum": ["x", {"list": []}]}, "enum of a tensor": {"enum": ["x", {"tensor": 0}]}, "enum unhashable": {"enum": [[], 1]},
    "dataclass of one": {"dataclass": ["x"]}, "dataclass of numbers": {"dataclass": ["x", [1]]}, "dataclass unhashable": {"dataclass": [[], [["a", 1]]]},
    "dataclass of an unknown kind": {"dataclass": ["x", [["a", {"code": 1}]]]},
}  # fmt: skip


def with_node(node: Any) -> Callable[[Any], Any]:
    return lambda raw: raw["skeleton"]["dict"].__setitem__(-1, ["n", node])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_plain_value_that_lies_is_refused_without_taking_memory(name, archive):
    async_ckpt.save({"w": torch.ones(1), "n": 1}, archive).result()
    forge(archive, with_node(HOSTILE[name]))
    with little_memory():
        assert_refused(archive, CorruptCheckpointError, types=[Inner, Shade])
        assert_refused(archive, CorruptCheckpointError, select="n")


LARGE: dict[str, Any] = {
    "range": ({"range": [0, 2**62, 1]}, range(2**62)),
    "decimal": ({"decimal": "1e999999999"}, Decimal("1e999999999")),
    "deque": ({"deque": [[1], 2**62]}, deque([1], 2**62)),
    "slice": ({"slice": [0, 2**62, None]}, slice(0, 2**62)),
    "keys": ({"dict": [[{"decimal": "1e999999999"}, 1], [{"range": [0, 2**62, 1]}, 2]]}, {Decimal("1e999999999"): 1, range(2**62): 2}),
}  # fmt: skip


@pytest.mark.parametrize(("node", "value"), LARGE.values(), ids=LARGE.keys())
def test_a_value_that_stands_for_much_takes_no_memory(node, value, archive):
    async_ckpt.save({"n": 1}, archive).result()
    forge(archive, with_node(node))
    with little_memory():
        assert difference(async_ckpt.load(archive), {"n": value}) is None


def test_a_class_of_the_readers_is_given_only_its_own_fields(archive):
    """Fields that it lacks, names that are no text, `__class__`: none of them reaches an instance."""
    name = f"{__name__}.Inner"
    for fields in (
        [["w", 1], ["note", 2], ["__class__", 3]],
        [["w", 1], ["__dict__", {"dict": []}]],
        [["w", 1], [5, 2]],
        [["w", 1], [{"tuple": ["note"]}, 2]],
        [["w", 1], ["w", 2]],
    ):
        async_ckpt.save({"n": 1}, archive).result()
        forge(archive, with_node({"dataclass": [name, fields]}))
        assert type(async_ckpt.load(archive, types=[Inner])["n"]) is dict
        forge(archive, with_node({"enum": [name, 1]}))
        assert async_ckpt.load(archive, types=[Inner])["n"] == 1
        forge(archive, with_node({"dataclass": [f"{__name__}.Shade", [["w", 1]]]}))
        assert async_ckpt.load(archive, types=[Shade])["n"] == {"w": 1}


def test_no_file_is_looked_for_by_a_name_that_leaves_the_folder_of_zones(archive, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr("zoneinfo.ZoneInfo", asked.append)
    async_ckpt.save({"w": torch.ones(1), "n": 1}, archive).result()
    keys = [node["zone"] for node in HOSTILE.values() if "zone" in node]
    for key in [*keys, "Etc/UTC"]:
        forge(archive, with_node({"zone": key}))
        refusal(lambda: async_ckpt.load(archive))
    assert asked == ["Europe", "Nowhere/At_All", "Etc/UTC"]


def test_a_zone_that_this_system_lacks_says_what_to_install(archive):
    async_ckpt.save({"n": 1}, archive).result()
    forge(archive, with_node({"zone": "Mars/Olympus_Mons"}))
    assert "install the tzdata package" in str(assert_refused(archive, CorruptCheckpointError))


class NamedArchives(NamedTuple):
    a: Any


def test_records_of_every_kind_within_each_other_come_back(archive):
    state = {"x": NamedArchives(Frozen(deque([NamedArchives(Shade.DARK), Point(torch.ones(1), {1: Level.LOW})], 3), 1))}
    loaded = round_trip(state, archive, types=[NamedArchives, Frozen, Point, Shade, Level])["x"]
    assert type(loaded.a.t) is deque
    assert loaded.a.t[0].a is Shade.DARK
    assert loaded.a.t[1].y[1] is Level.LOW
    assert torch.equal(loaded.a.t[1].x, torch.ones(1))
    plain = async_ckpt.load(archive)
    want = {"x": ({"t": deque([("dark",), {"x": torch.ones(1), "y": {1: 1}}], 3), "step": 1},)}
    assert difference(plain, want) is None


def test_keys_may_be_plain_values(archive):
    state = {
        Path("a"): {date(2024, 2, 29): torch.ones(1)},
        UUID(int=5): 1,
        frozenset({1, "a"}): {Fraction(1, 3): time(1)},
    }
    assert difference(round_trip(state, archive), state) is None
    assert difference(round_trip({uuid4(): datetime(2024, 1, 1)}, archive), async_ckpt.load(archive)) is None


@dataclasses.dataclass
class Grown:
    step: int = 0

    def __post_init__(self) -> None:
        self.history = [self.step]


def test_an_attribute_beside_the_fields_of_a_dataclass_is_not_lost(tmp_path):
    """Such an instance is pickled whole, as an object of any other class is."""
    async_ckpt.save({"grown": Grown(3)}, tmp_path / "x.tar").result()
    with pytest.raises(async_ckpt.UntrustedObjectError):
        async_ckpt.load(tmp_path / "x.tar")
    assert async_ckpt.load(tmp_path / "x.tar", trust=True)["grown"].history == [3]
