"""Archives that lie: always a CheckpointError, never wrong data, never much memory.

The lies that are drawn at random are few, and others with each commit (see `slices`). For more of them, and of pickles:

    ASYNC_CKPT_FUZZ=200000 python -m pytest tests/core/loading/test_corrupt_*.py -k at_random -o faulthandler_timeout=0
"""

import itertools
import json
import shutil
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from enum import Enum
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from archives import assemble, forge, forge_manifest, little_memory, parsed_index, read_index
from damage import NUM_LIES, STATE, assert_refused, objects_swapped, refusal, torch_saved
from slices import PART, some
from states import MIB, difference
from torch import nn

import async_ckpt
from async_ckpt import (
    AsyncCheckpointer,
    CheckpointError,
    CorruptCheckpointError,
    FormatVersionError,
    StateMismatchError,
    UntrustedObjectError,
)
from async_ckpt.core.format import digests, tar
from async_ckpt.core.loading.archives.find import from_path
from async_ckpt.core.loading.restore import RestoreOptions, restore_state


class Triple(NamedTuple):
    """A class that the caller knows."""

    a: Any
    b: Any
    c: Any


@dataclass
class Options:
    """Likewise."""

    a: Any
    b: Any


class Shade(Enum):
    """Likewise."""

    DARK = "dark"


@pytest.fixture(scope="module")
def honest_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("honest") / "x.tar"
    async_ckpt.save(STATE, path).result()
    return path.read_bytes()


@pytest.fixture
def saved(honest_bytes: bytes, archive: Path) -> Path:
    archive.write_bytes(honest_bytes)
    return archive


def restored(path: Path, live: Any, **how: Any) -> None:
    """Restore live objects from one archive."""
    from_path(path, lambda parts: restore_state(parts, live, RestoreOptions(**how)), verify=True)


# --- archives that lie -------------------------------------------------------------------------------------------
# Everything below has digests that agree: only the sense of the index can tell.


def row(number: int, **facts: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        told = raw["tensors"][number]
        for key, value in facts.items():
            (told["slices"][0] if key in ("member", "name", "extent") else told)[key] = value

    return change


def slices(change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any]], None]:
    """The first tensor with other slices."""
    return lambda raw: raw["tensors"][0].update(slices=change(raw["tensors"][0]["slices"]))


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.__setitem__(key, value)


def drop(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.__delitem__(key)


def node(value: Any) -> Callable[[dict[str, Any]], None]:
    """A skeleton in which the last value is this node."""
    return lambda raw: raw["skeleton"]["dict"].__setitem__(-1, ["n", value])


def member_size(number: int, by: int) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["members"][number].__setitem__(1, raw["members"][number][1] + by)


# tensor 0: m.w float32[10]; 1: its alias m.tied; 2: m.b bfloat16[3]; 3: m.z complex64[1]; 4: the array's bytes
LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "extent negative begin": row(0, extent=[-4, 40]),
    "extent negative length": row(0, extent=[4096, -40]),
    "extent out of the member": row(0, extent=[2**20, 40]),
    "extent out of the file": row(0, extent=[2**62, 40]),
    "extent huge": row(0, extent=[0, 2**62], shape=[2**60]),
    "extent beyond 64 bits": row(0, extent=[2**80, 40]),
    "extent of floats": row(0, extent=[4096.0, 40.0]),
    "extent of strings": row(0, extent=["0", "40"]),
    "extent of three": row(0, extent=[0, 40, 1]),
    "extent null": row(0, extent=None),
    "extent moved": row(2, extent=[4048, 6]),
    "extent in the header": row(0, extent=[0, 40]),
    "extents overlap": lambda raw: row(2, extent=[raw["tensors"][0]["slices"][0]["extent"][0], 6])(raw),
    "slices none": slices(lambda of: []),
    "slices two": slices(lambda of: of * 2),
    "slices halved": slices(
        lambda of: [
            of[0] | {"name": name, "extent": [of[0]["extent"][0] + at, 20]} for name, at in (("w", 0), ("x", 20))
        ]
    ),
    "slices null": slices(lambda of: None),
    "slices a table": slices(lambda of: of[0]),
    "slice null": slices(lambda of: [None]),
    "slice empty": slices(lambda of: [{}]),
    "slice a list": slices(lambda of: [of]),
    "shape other size": row(0, shape=[11]),
    "shape other": row(0, shape=[5, 2]),
    "shape negative": row(0, shape=[-10]),
    "shape two negatives": row(0, shape=[-5, -2]),
    "shape absurd": row(0, shape=[2**62]),
    "shape absurd with zero": row(0, shape=[2**62, 2**62, 0], extent=[4096, 0]),
    "shape zero": row(0, shape=[2**62, 0], extent=[4096, 0]),
    "shape of another order": row(0, shape=[2, 5]),
    "shape overflows to the size": row(0, shape=[2**32, 2**32, 10]),
    "shape many": row(0, shape=[1] * 100_000 + [10]),
    "shape bool": row(0, shape=[True, 10]),
    "shape string": row(0, shape="10"),
    "shape null": row(0, shape=None),
    "shape beyond 64 bits": row(0, shape=[2**64 + 10]),
    "dtype unknown": row(0, dtype="float33"),
    "dtype attribute of torch": row(0, dtype="nn"),
    "dtype list": row(0, dtype=["float32"]),
    "dtype null": row(0, dtype=None),
    "dtype same size": row(0, dtype="int32"),
    "dtype same size as stored": row(3, dtype="int64"),
    "dtype other size": row(0, dtype="float64"),
    "dtype same stored code": row(3, dtype="complex32", shape=[2]),
    "name of another": row(2, name="w"),
    "name other": row(2, name="c"),
    "name null": row(2, name=None),
    "name swapped": lambda raw: (row(0, name="b")(raw), row(2, name="w")(raw))[2:],
    "member out of range": row(0, member=9),
    "member negative": row(0, member=-1),
    "member other": row(0, member=1),
    "member bool": row(0, member=False),
    "alias to itself": row(1, alias=1),
    "alias to a later one": row(1, alias=2),
    "alias negative": row(1, alias=-1),
    "alias of an alias": lambda raw: raw["tensors"].append({"path": ["x"], "alias": 1}),
    "alias huge": row(1, alias=2**70),
    "alias null": row(1, alias=None),
    "row null": lambda raw: raw["tensors"].__setitem__(0, None),
    "row string": lambda raw: raw["tensors"].__setitem__(0, "w"),
    "row empty": lambda raw: raw["tensors"].__setitem__(0, {}),
    "row missing": lambda raw: raw["tensors"].__delitem__(2),
    "rows twice": lambda raw: raw["tensors"].extend(raw["tensors"]),
    "rows null": put("tensors", None),
    "rows number": put("tensors", 5),
    "rows dict": put("tensors", {"a": 1}),
    "path null": row(0, path=None),
    "path number": row(0, path=3),
    "members null": put("members", None),
    "members empty": put("members", []),
    "members strings": put("members", ["ab", "cd"]),
    "members twice": lambda raw: raw["members"].append(raw["members"][0]),
    "member size larger": member_size(0, 512),
    "member size smaller": member_size(0, -512),
    "member size by one": member_size(0, 1),
    "member size negative": member_size(0, -(10**6)),
    "member size huge": member_size(0, 2**62),
    "member size beyond 64 bits": member_size(0, 2**90),
    "member sizes shifted": lambda raw: (member_size(0, 512)(raw), member_size(1, -512)(raw))[2:],
    "member called index": lambda raw: raw["members"][0].__setitem__(0, "index.json"),
    "member called digests": lambda raw: raw["members"][0].__setitem__(0, "digests.json"),
    "objects renamed": lambda raw: raw["members"][-1].__setitem__(0, "other.pt"),
    "version string": put("version", "1"),
    "version negative": put("version", -1),
    "version null": put("version", None),
    "version missing": drop("version"),
    "format other": put("format", "other"),
    "format missing": drop("format"),
    "step negative": put("step", -1),
    "step string": put("step", "1"),
    "step missing": drop("step"),
    "skeleton missing": drop("skeleton"),
    "skeleton a list": put("skeleton", []),
    "skeleton an empty object": put("skeleton", {}),
    "kind unknown": node({"code": "os.system"}),
    "kind empty": node({"": 1}),
    "tensor out of range": node({"tensor": 5}),
    "tensor far out of range": node({"tensor": 2**70}),
    "tensor negative": node({"tensor": -1}),
    "tensor bool": node({"tensor": True}),
    "tensor string": node({"tensor": "0"}),
    "tensor null": node({"tensor": None}),
    "bytes out of range": node({"bytes": 99}),
    "object out of range": node({"object": 1}),
    "object negative": node({"object": -1}),
    "dict null": node({"dict": None}),
    "dict of numbers": node({"dict": [1]}),
    "dict of triples": node({"dict": [["a", 1, 2]]}),
    "dict bare list inside": node({"dict": [["a", [1]]]}),
    "dict unhashable key": node({"dict": [[{"list": []}, 1]]}),
    "dict tensor key": node({"dict": [[{"tensor": 0}, 1]]}),
    "dict unhashable tuple key": node({"dict": [[{"tuple": [{"dict": []}]}, 1]]}),
    "ordered null": node({"ordered": None}),
    "ordered metadata odd": node({"ordered": [], "metadata": [1]}),
    "ordered metadata unknown": node({"ordered": [], "metadata": {"code": 1}}),
    "list null": node({"list": None}),
    "list number": node({"list": 3}),
    "tuple number": node({"tuple": 3}),
    "namedtuple empty": node({"namedtuple": []}),
    "namedtuple null": node({"namedtuple": None}),
    "namedtuple unhashable": node({"namedtuple": [[], ["a"], [1]]}),
    "namedtuple fields null": node({"namedtuple": ["x", None, [1]]}),
    "float short": node({"float": "00"}),
    "float long": node({"float": "00" * 9}),
    "float no hex": node({"float": "zz"}),
    "float number": node({"float": 1.5}),
    "complex short": node({"complex": "00"}),
    "complex null": node({"complex": None}),
    "inline no base64": node({"inline": "***"}),
    "inline number": node({"inline": 3}),
    "inline half": node({"inline": "AAA"}),
    "int odd": node({"int": "zz"}),
    "int null": node({"int": None}),
    "size of strings": node({"size": ["a"]}),
    "size number": node({"size": 3}),
    "size of dicts": node({"size": [{}]}),
    "dtype node unknown": node({"dtype": "float33"}),
    "dtype node module": node({"dtype": "nn"}),
    "dtype node list": node({"dtype": []}),
    "device unknown": node({"device": "nowhere"}),
    "device null": node({"device": None}),
    "device list": node({"device": []}),
    "npscalar empty": node({"npscalar": []}),
    "npscalar null": node({"npscalar": None}),
    "npscalar short": node({"npscalar": ["<f8", "AAAA"]}),
    "npscalar object": node({"npscalar": ["|O", "AAAAAAAAAAA="]}),
    "npscalar unknown": node({"npscalar": ["<q99", ""]}),
    "npscalar huge": node({"npscalar": ["<U500000000", ""]}),
    "npscalar huge struct": node({"npscalar": [[["a", "<f8", [2000000000]]], ""]}),
    "npscalar huge void": node({"npscalar": ["|V2147483647", ""]}),
    "npscalar odd struct": node({"npscalar": [[1, 2], ""]}),
    "ndarray empty": node({"ndarray": []}),
    "ndarray null": node({"ndarray": None}),
    "ndarray out of range": node({"ndarray": [99, "<f4", [10]]}),
    "ndarray other shape": node({"ndarray": [0, "<f4", [11]]}),
    "ndarray guessed shape": node({"ndarray": [0, "<f4", [-1]]}),
    "ndarray negative shape": node({"ndarray": [0, "<f4", [-2, -5]]}),
    "ndarray huge shape": node({"ndarray": [0, "<f4", [2**62, 2**62]]}),
    "ndarray zero-size huge": node({"ndarray": [0, "<U0", [2**40]]}),
    "ndarray void huge": node({"ndarray": [0, "|V0", [2**62]]}),
    "ndarray no shape": node({"ndarray": [0, "<f4"]}),
    "ndarray odd shape": node({"ndarray": [0, "<f4", "x"]}),
    "ndarray other size": node({"ndarray": [0, "<c32", [2]]}),
    "ndarray objects": node({"ndarray": [0, "|O", [5]]}),
    "ndarray objects inside": node({"ndarray": [0, [["a", "|O"]], [5]]}),
    "ndarray odd dtype": node({"ndarray": [0, 3, [10]]}),
    "ndarray odd dtype list": node({"ndarray": [0, [3], [10]]}),
    "ndarray unknown dtype": node({"ndarray": [0, "<q99", [10]]}),
    "ndarray too many": node({"ndarray": [0, "<f4", [10], 1]}),
    "ndarray of bfloat16": node({"ndarray": [2]}),
    "bytes of bfloat16": node({"bytes": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", LIES)
def test_an_archive_that_lies_is_refused_without_taking_memory(name, saved):
    forge(saved, LIES[name])
    with little_memory():
        for verify, mmap in itertools.product((True, False), repeat=2):
            assert_refused(saved, CorruptCheckpointError, verify=verify, mmap=mmap)


@pytest.fixture(scope="module")
def honest_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("honest-run")
    with AsyncCheckpointer(root) as ckpt:
        for step in (1, 2):
            ckpt.save(STATE, step=step).result()
    return root


def test_a_tensor_in_two_slices_is_of_a_format_that_is_not_there_yet(saved):
    forge(saved, LIES["slices halved"])
    assert "is in 2 slices, not in one" in str(assert_refused(saved, CorruptCheckpointError))


@pytest.mark.parametrize("name", some(list(LIES), 5))
def test_a_run_passes_over_an_archive_that_lies(name, honest_run, tmp_path):
    """The manifest agrees with it too; nothing that is live is touched by it."""
    root = shutil.copytree(honest_run, tmp_path / "run")
    forge_step(root, 2, LIES[name])
    live = {
        "m": {
            "w": torch.zeros(10),
            "tied": None,
            "b": torch.zeros(3, dtype=torch.bfloat16),
            "z": None,
            "a": 0,
        },
        "n": 0,
    }
    live["m"]["tied"] = live["m"]["w"]
    with AsyncCheckpointer(root) as ckpt, little_memory():
        with pytest.raises(CorruptCheckpointError) as caught:
            ckpt.restore(live, step=2)
        assert not caught.value.partly_overwritten
        assert not live["m"]["w"].any()
        with pytest.warns(RuntimeWarning, match="step 2 is skipped"):
            assert ckpt.restore(live) == 1
    assert difference(live, {"m": STATE["m"], "n": STATE["n"]}) is None


def test_a_tensor_member_in_the_place_of_the_objects_is_not_opened(saved):
    def lie(raw: dict[str, Any]) -> None:
        raw["members"][-1][0], raw["members"][0][0] = "other.pt", "objects.pt"

    forge(saved, lie)
    assert_refused(saved)
    assert_refused(saved, trust=True)


def forge_step(root: Path, step: int, lie: Callable[[dict[str, Any]], Any]) -> None:
    """Make a committed archive lie, and its manifest agree with it."""
    folder = root / f"step_{step:08d}"
    (path,) = folder.glob("*.tar")
    forge(path, lie)
    data = path.read_bytes()
    member_bytes = data[: data.rindex(b'"}\n') + 3]
    told = {"num_bytes": len(data), "digest": digests.self_digest(member_bytes)}
    forge_manifest(folder / "manifest.json", lambda manifest: manifest["archives"][0].update(told))


def test_an_honest_archive_made_by_the_forger_loads(saved):
    """So what is refused above is refused for the lie."""
    forge(saved)
    assert difference(async_ckpt.load(saved), STATE) is None
    forge(saved, put("step", 7))
    assert difference(async_ckpt.load(saved, mmap=True), STATE) is None


TEXTS: dict[str, Callable[[str], str]] = {
    "deeply nested lists": lambda text: text.replace('"skeleton": ', '"skeleton": ' + "[" * 100_000, 1),
    "deeply nested objects": lambda text: text.replace('"skeleton": ', '"skeleton": ' + '{"list":' * 100_000, 1),
    "whole text nested": lambda text: "[" * 200_000 + "]" * 200_000,
    "a number of a million digits": lambda text: text.replace('"step": null', '"step": ' + "9" * 1_000_000, 1),
    "an extent of many digits": lambda text: text.replace('"extent": [', '"extent": [' + "9" * 4000, 1),
    "a shape of many digits": lambda text: text.replace('"shape": [', '"shape": [' + "9" * 4000, 1),
    "infinity": lambda text: text.replace('"shape": [10', '"shape": [Infinity', 1),
    "a float out of range": lambda text: text.replace('"shape": [10', '"shape": [1e999', 1),
    "not a number": lambda text: text.replace('"extent": [', '"extent": [NaN, ', 1),
    "infinite version": lambda text: text.replace('"version": 1', '"version": Infinity', 1),
    "two texts": lambda text: text + text,
    "cut": lambda text: text[: len(text) // 2],
    "single quotes": lambda text: text.replace('"', "'"),
    "no text": lambda text: "",
    "null": lambda text: "null",
}


@pytest.mark.parametrize("change", TEXTS.values(), ids=TEXTS.keys())
def test_an_index_that_is_absurd_as_text_is_refused(change, saved):
    honest = parsed_index(saved)
    before = json.dumps(read_index(saved))
    assert change(before) != before
    between = saved.read_bytes()[honest.members[0].data.offset - tar.BLOCK : honest.digests.data.offset - tar.BLOCK]
    saved.write_bytes(assemble(change(before).encode(), between))
    with little_memory():
        for verify in (True, False):
            assert_refused(saved, CorruptCheckpointError, verify=verify)


NESTED = {
    "dict": ('{"dict":[["k",', "]]}"), "ordered": ('{"ordered":[["k",', "]]}"),
    "list": ('{"list":[', "]}"), "tuple": ('{"tuple":[', "]}"),
}  # fmt: skip


@pytest.mark.parametrize("depth", [50, 150, 200, 250, 300, 320, 350, 400, 450, 480, 500, 600, 1000, 3000, 50_000])
@pytest.mark.parametrize("kind", ["dict", "ordered", "list", "tuple"])
def test_a_skeleton_of_any_depth_loads_or_is_refused(kind, depth, archive):
    text = NESTED[kind]
    async_ckpt.save({"w": torch.ones(1)}, archive).result()
    deep = text[0] * depth + '{"tensor":0}' + text[1] * depth
    forge(archive, put("skeleton", "HERE"), text=lambda whole: whole.replace('"HERE"', deep))
    live: Any = {"k": {}} if kind in ("dict", "ordered") else [[]]
    try:
        found = async_ckpt.load(archive)
    except CorruptCheckpointError:
        assert depth >= 150
    else:
        for _ in range(depth):
            found = found["k" if kind in ("dict", "ordered") else 0]
        assert found.item() == 1
    if kind != "tuple":
        try:
            restored(archive, live)
        except CorruptCheckpointError:
            assert depth >= 150


def nested(depth: int, kind: str) -> Any:
    value: Any = {"tensor": 0}
    for _ in range(depth):
        value = {kind: [value]} if kind in ("list", "tuple") else {kind: [["k", value]]}
    return value


LONG = {"int": "f" * 5000}  # more digits than Python writes in decimal
LONE = {"str": "eda080"}  # a lone surrogate, which cannot be printed
ODD_NODES: list[Any] = [
    {"tensor": 0}, {"tensor": 1}, {"tensor": 5}, {"object": 0}, {"ndarray": [4]}, {"ndarray": [0, "<f4", [10]]}, {"bytes": 4}, {"bytes": 6},
    {"list": []}, {"dict": []}, {"dict": [["a", 1]]}, {"tuple": [1]}, {"size": [1]}, {"float": "0" * 16}, {"npscalar": ["<f8", "AAAAAAAAAAA="]},
    LONG, LONE, {"int": "-0x" + "f" * 99}, {"dict": [[LONG, 1]]}, {"dict": [[{"tuple": [LONG]}, {"tensor": 0}]]}, {"dict": [[LONE, {"tensor": 0}]]},
    {"ordered": [["a", {"tensor": 0}]], "metadata": {"tensor": 1}}, {"ordered": [[LONE, 1]], "metadata": {"list": []}}, {"str": "zz"}, {"str": []},
    {"size": [2**62] * 70}, {"size": [2**64]}, {"size": [True]}, {"device": "\ud800"}, {"dtype": "\ud800"}, {"device": "cuda:99999999999"},
    {"ndarray": [4, "\ud800", [1]]}, {"ndarray": [5, ">i2", [10**4000] * 50]}, {"ndarray": [5, [["\ud800", ">i2"]], [3]]}, {"ndarray": [5, ">i2", [-3]]},
    {"npscalar": ["|V0", ""]}, {"npscalar": ["<M8[\ud800]", ""]}, {"npscalar": [[["a", "<f4"], ["b", "<f4"]], "AAAAAAAAAAA="]}, {"npstr": LONE},
    {"dict": [[{"npscalar": [[["a", "<f4"], ["b", "<f4"]], "AAAAAAAAAAA="]}, {"tensor": 0}]]}, {"dict": [[{"size": [1]}, {"tensor": 0}]]},
    {"path": ["PosixPath", LONE]}, {"date": "2024-02-29"}, {"datetime": ["2024-02-29T00:00:00", 0, {"zone": "UTC"}]}, {"timedelta": [1, 2, 3]},
    {"zone": "../x"}, {"decimal": "1e999999999"}, {"fraction": [LONG, 3]}, {"range": [0, LONG, 1]}, {"slice": [None, LONG, None]}, {"uuid": "0" * 32},
    {"set": [1, LONG, LONE]}, {"frozenset": [{"range": [0, LONG, 1]}]}, {"deque": [[1], 2**62]}, {"deque": [[{"tensor": 0}], None]},
    {"dict": [[{"frozenset": [LONG]}, {"tensor": 0}]]}, {"dict": [[{"range": [0, LONG, 1]}, {"tensor": 0}]]}, {"dict": [[{"fraction": [1, LONG]}, 1]]},
    {"enum": ["x", LONG]}, {"dataclass": ["test_corrupt_lies.Options", [["a", {"tensor": 0}], ["b", LONE]]]}, {"dataclass": ["x", [[LONG, 1]]]},
    {"namedtuple": ["\ud800", ["\ud800"], [1]]}, {"namedtuple": ["test_corrupt_lies.Triple", ["a", "b", "c"], [1, 2]]}, {"complex": "0" * 32},
    *(nested(depth, kind) for depth in (20, 60, 100, 140) for kind in ("dict", "ordered", "list", "tuple")),
]  # fmt: skip
ODD_VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 7, 10, 512, 4096, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, -(2**63), 10**30, 10**4290, 1.5,
    float("inf"), float("nan"), "", "w", "a", "float32", "int8", "bool", "dict", "tensor", "x" * 2000, "\x00", "\ud800", "../x", [], [[]], {},
    [0], [1, 2], [0, 40], [LONG, 1], [LONE, {"tensor": 0}], {"path": ["x"], "alias": 0}, *ODD_NODES,
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place of a JSON text that holds a value: what it is in, and its key there."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from places(value[key])


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def mutate(raw: dict[str, Any], random: Random) -> None:
    """Change one to three values of an index: to something odd, to nothing, or to what stands elsewhere in it."""
    for _ in range(random.randint(1, 3)):
        everywhere = list(places(raw))
        if not everywhere:
            return
        where, key = random.choice(everywhere)
        act = random.randint(0, 3)
        if act == 0:
            del where[key]
        elif act == 1:
            other, name = random.choice(everywhere)
            where[key] = copied(other[name])
        elif act == 2 and type(where[key]) is int:
            where[key] += random.choice([-512, -8, -1, 1, 2, 8, 512, 2**40])
        else:
            where[key] = copied(random.choice(ODD_VALUES))


RICH: dict[Any, Any] = {
    "m": {**STATE["m"], "s": np.zeros(2, [("a", "<i4"), ("b", ">f8", (2,))]), "blob": bytes(5000)},
    "o": OrderedDict(nn.BatchNorm1d(2).state_dict()),
    "seen": {1, 2},
    "buffer": bytearray(b"12"),
    "t": (1, Triple(1, 2, 3), np.float32(2)),
    (1, "a"): 2**70,
    3: [torch.Size([1, 2]), 1.5, b"x", torch.int8, torch.device("cpu"), float("inf"), 1j, np.str_("x\x00"), "\ud800"],
    "options": Options(deque([1, Shade.DARK], 3), {Path("x"): date(2024, 2, 29), "s": {2.5, "x"}}),
    "n": -1.5,
}  # fmt: skip
RICH["o"]._metadata = {"": {"version": 2}}
TYPES = [Triple, Options, Shade]
SELECTIONS = [None, None, None, "m", "nothing", ["m", "n"], ["nothing", "m.*"], "*.w", "3", "m.s", ("o",), []]


def rich_live() -> dict[Any, Any]:
    """What the rich state fits into, more or less."""
    return {
        "m": {
            "w": torch.zeros(10),
            "tied": None,
            "b": torch.zeros(3).bfloat16(),
            "z": {},
            "a": np.zeros(3, ">i2"),
            "blob": 0,
        },
        "o": nn.BatchNorm1d(2),
        "t": (0, 0, 0),
        3: [0] * 9,
        "options": Options([0, Shade.DARK], {}),
        "n": 0,
    }


def read_somehow(path: Path, number: int, select: Any) -> None:
    """Load or restore in one of the ways that there are."""
    if number % 4 == 2:
        restored(path, rich_live(), strict=number % 3 == 0, types=TYPES, select=select)
    else:
        async_ckpt.load(path, mmap=number % 4 == 1, verify=number % 4 != 3, types=TYPES, select=select)


def test_an_index_changed_at_random_loads_or_is_refused(saved):
    """Thousands of lies that nobody thought of: no other error, no memory, no code."""
    async_ckpt.save(RICH, saved).result()
    whole, told = saved.read_bytes(), json.dumps(read_index(saved))
    random = Random(PART)
    refused = 0
    honest = parsed_index(saved)
    between = whole[honest.members[0].data.offset - tar.BLOCK : honest.digests.data.offset - tar.BLOCK]
    with little_memory():
        for number in range(NUM_LIES):
            raw = json.loads(told)
            mutate(raw["skeleton"] if random.random() < 0.7 else raw, random)
            text = json.dumps(raw)
            saved.write_bytes(assemble(text.encode(), between))
            select = random.choice(SELECTIONS)
            error = refusal(lambda n=number, s=select: read_somehow(saved, n, s))
            refused += isinstance(error, CheckpointError)
            if isinstance(error, KeyError) and select is not None:
                assert "matches nothing" in error.args[0], text
            elif error is not None and not isinstance(error, CheckpointError):
                raise AssertionError(f"{error!r} from select={select!r} of {text}") from error
            assert error is None or str(error.args[0]).encode()  # it can be printed
    assert refused > NUM_LIES / 4


def test_a_model_and_its_optimizer_restored_from_an_index_changed_at_random(archive):
    """Restored, or refused; the structure that an optimizer relies on may be a lie as well."""

    def make(wrap: Any = nn.DataParallel) -> dict[str, Any]:
        model = wrap(nn.Linear(2, 2, bias=False))
        return {"model": model, "optimizer": torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)}

    trained = make()
    trained["model"](torch.ones(1, 2)).sum().backward()
    trained["optimizer"].step()
    async_ckpt.save(trained, archive).result()
    whole, told = archive.read_bytes(), json.dumps(read_index(archive))
    honest = parsed_index(archive)
    between = whole[honest.members[0].data.offset - tar.BLOCK : honest.digests.data.offset - tar.BLOCK]
    random = Random(PART)
    with little_memory():
        for number in range(NUM_LIES // 4):
            raw = json.loads(told)
            mutate(raw["skeleton"], random)
            archive.write_bytes(assemble(json.dumps(raw).encode(), between))
            try:
                restored(archive, make(nn.DataParallel if number % 2 else nn.Sequential), strict=False)
            except CheckpointError:
                pass
            except Exception as error:
                raise AssertionError(f"{error!r} from {json.dumps(raw['skeleton'])}") from error


SKELETON_LIES = [
    "kind unknown",
    "tensor bool",
    "dict null",
    "float short",
    "npscalar huge",
    "device list",
    "skeleton a list",
]


@pytest.mark.parametrize("name", SKELETON_LIES)
def test_a_lie_beside_a_selection_that_matches_nothing_is_refused_or_not_met(name, saved):
    forge(saved, LIES[name])
    for select in ("nothing", ["nothing"], ["m", "nothing"]):
        error = refusal(lambda s=select: async_ckpt.load(saved, select=s))
        assert isinstance(error, CorruptCheckpointError | KeyError)
        error = refusal(lambda s=select: restored(saved, {"m": {}}, select=s))
        assert isinstance(error, CorruptCheckpointError | KeyError)


def test_keys_of_thousands_of_digits_have_a_name(saved):
    """Python refuses to write them in decimal; whoever is told of them must not be told of that."""
    keys = [LONG, {"tuple": [LONG, 1]}, LONE]
    forge(saved, put("skeleton", {"dict": [[key, {"dict": [["w", {"tensor": 0}]]}] for key in keys]}))
    loaded = async_ckpt.load(saved)
    assert list(loaded) == [int("f" * 5000, 16), (int("f" * 5000, 16), 1), "\ud800"]
    assert list(async_ckpt.load(saved, select="0xfff*.w")) == [int("f" * 5000, 16)]
    assert list(async_ckpt.load(saved, select="\ud800")) == ["\ud800"]
    for read in (
        lambda: async_ckpt.load(saved, select="nothing"),
        lambda: async_ckpt.load(saved, select=["nothing", "m"]),
        lambda: restored(saved, {"w": torch.ones(1)}),
        lambda: restored(saved, {key: {"w": 1, "x": torch.ones(2)} for key in loaded}),
    ):
        error = refusal(read)
        assert isinstance(error, StateMismatchError | KeyError)
        assert "…" in error.args[0]
        assert r"\ud800" in error.args[0].encode().decode()


def test_an_object_with_an_odd_name_is_refused_by_it(saved):
    objects_swapped(saved, torch_saved([Path("x")]))
    forge(saved, put("skeleton", {"dict": [[LONE, {"object": 0}], [LONG, {"object": 0}]]}))
    error = assert_refused(saved, UntrustedObjectError)
    assert r"\ud800, 0xffff" in str(error)


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_the_deepest_structures_are_restored_or_refused(kind, saved):
    """Reading the text, decoding it and comparing it with what is live run out of stack at depths of their own."""
    refused = []
    honest = saved.read_bytes()
    begin, end = NESTED[kind]
    for depth in range(100, 500, 20):
        deep = begin * depth + '{"tensor":0}' + end * depth
        saved.write_bytes(honest)
        forge(saved, put("skeleton", "HERE"), text=lambda whole, deep=deep: whole.replace('"HERE"', deep))
        live: Any = torch.zeros(10)
        for _ in range(depth):
            live = {"k": live} if kind == "dict" else [live]
        error = refusal(lambda live=live: restored(saved, live))
        assert isinstance(error, CorruptCheckpointError | None)
        refused.append(error is not None)
    assert refused == sorted(refused)
    assert {*refused} == {True, False}


@pytest.mark.parametrize("kind", ["bytes", "ndarray"])
@pytest.mark.parametrize("aliased", [False, True])
def test_bytes_that_many_leaves_ask_for_are_not_copied_for_each(kind, aliased, archive):
    async_ckpt.save({"b": bytes(8 * MIB)}, archive).result()
    numbers = range(1000) if aliased else [0] * 1000

    def lie(raw: dict[str, Any]) -> None:
        if aliased:
            raw["tensors"] += [{"path": [i], "alias": 0} for i in numbers[1:]]
        leaves = [{kind: n if kind == "bytes" else [n]} for n in numbers]
        raw["skeleton"] = {"dict": [["b", {"list": leaves}]]}

    forge(archive, lie)
    with little_memory():
        assert_refused(archive, CorruptCheckpointError, verify=False)
        error = refusal(lambda: restored(archive, {"b": []}))
    assert isinstance(error, CorruptCheckpointError)


def fields_within_fields(depth: int) -> Any:
    return "<f8" if not depth else [["a", fields_within_fields(depth - 1)], ["b", fields_within_fields(depth - 1)]]


# Of a few megabytes each, and minutes of arithmetic.
SLOW: dict[str, Callable[[dict[str, Any]], Any]] = {
    "shape": row(0, shape=[10**4000] * 1000),
    "shape of an array": node({"ndarray": [4, "<i2", [10**15 + 1] * 300_000]}),
    "dtype of an array": lambda raw: node({"ndarray": [4, fields_within_fields(17), [0]]})(raw),
    "dtype of a scalar": lambda raw: node({"npscalar": [fields_within_fields(17), ""]})(raw),
}


@pytest.mark.parametrize("name", SLOW)
def test_an_archive_takes_little_time_to_be_refused(name, nursery, saved):
    """In a process that may use a few seconds of its processor and no more: then the system ends it."""
    forge(saved, SLOW[name])
    code = """
        import os, resource, sys
        import async_ckpt
        resource.setrlimit(resource.RLIMIT_CPU, (8, 8))
        for how in ({}, {"verify": False, "select": ["m", "n"]}):
            try:
                async_ckpt.load(sys.argv[1], **how)
            except async_ckpt.CorruptCheckpointError as error:
                print("refused", flush=True)
        os._exit(0)  # how an interpreter ends is for other tests
    """
    assert nursery.out_of(code, saved) == "refused\nrefused\n"


def test_a_newer_format_is_told_apart_from_damage(saved):
    whole = saved.read_bytes()
    forge(saved, put("version", 9))
    error = assert_refused(saved, FormatVersionError)
    assert error.version == 9
    assert "install a newer" in str(error)
    saved.write_bytes(whole)
    forge(saved, lambda raw: {"format": "async_ckpt", "version": 99, "all": "different"})
    assert assert_refused(saved, FormatVersionError).version == 99


@pytest.mark.parametrize("how", [{}, {"mmap": True}, {"verify": False}], ids=str)
def test_a_dtype_that_this_torch_lacks_takes_a_newer_one(how, archive, monkeypatch):
    async_ckpt.save({"w": torch.ones(3).to(torch.float8_e5m2), "b": torch.ones(2)}, archive).result()
    monkeypatch.delattr(torch, "float8_e5m2")
    assert "install a newer" in str(assert_refused(archive, FormatVersionError, **how))
    error = refusal(lambda: restored(archive, {"w": None}))
    assert isinstance(error, FormatVersionError | StateMismatchError)
    assert async_ckpt.load(archive, select="b")["b"].tolist() == [1, 1]


HEADERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "other dtype": lambda table: table["w"].update(dtype="I32"),
    "other shape": lambda table: table["w"].update(shape=[2, 5]),
    "other offsets": lambda table: table["w"].update(data_offsets=[0, 40]),
    "name missing": lambda table: table.pop("w") and None,
    "name more": lambda table: table.update(x={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    "metadata missing": lambda table: table.pop("__metadata__") and None,
    "row null": lambda table: table.update(w=None),
    "offset infinite": lambda table: table["w"].update(data_offsets=[0, float("inf")]),
    "shape null": lambda table: table["w"].update(shape=None),
    "not a table": lambda table: [1],
}


@pytest.mark.parametrize("lie", HEADERS.values(), ids=HEADERS.keys())
def test_index_and_member_header_must_tell_the_same_story(lie, saved):
    def change(between: bytearray) -> None:
        length = int.from_bytes(between[tar.BLOCK : tar.BLOCK + 8], "little")
        table = json.loads(between[tar.BLOCK + 8 : tar.BLOCK + 8 + length])
        text = json.dumps(lie(table) or table)
        between[tar.BLOCK + 8 : tar.BLOCK + 8 + length] = text.encode().ljust(length)

    forge(saved, members=change)
    assert_refused(saved, CorruptCheckpointError)
    assert_refused(saved, CorruptCheckpointError, verify=False, mmap=True)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_member_whose_header_length_lies_is_refused(length, saved):
    def change(between: bytearray) -> None:
        between[tar.BLOCK : tar.BLOCK + 8] = length.to_bytes(8, "little")

    forge(saved, members=change)
    with little_memory():
        assert_refused(saved, CorruptCheckpointError)
        assert_refused(saved, CorruptCheckpointError, verify=False)


@pytest.mark.parametrize(
    "size",
    [
        b"\x80" + b"\xff" * 11,
        b"77777777777\0",
        b"-0000001000\0",
        b"-7777777777\0",
        b"\0" * 12,
        b"zzzzzzzzzzz\0",
    ],
    ids=repr,
)
def test_a_tar_header_whose_size_lies_is_refused(size, saved):
    data = bytearray(saved.read_bytes())
    data[124:136] = size
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    saved.write_bytes(data)
    with little_memory():
        assert_refused(saved, CorruptCheckpointError)
        assert_refused(saved, CorruptCheckpointError, verify=False)


def test_a_header_that_names_another_first_member_is_refused(saved):
    data = bytearray(saved.read_bytes())
    _, length = tar.parse_header(data[:512])
    data[:512] = tar.header("model.safetensors", length, mtime=0)
    saved.write_bytes(data)
    assert_refused(saved, CorruptCheckpointError)
