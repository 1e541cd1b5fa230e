"""States of plain data go into an archive and come back: every container, every value, every dtype."""

import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from archives import parsed_index, read_index
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_data import ARRAYS, VALUES, round_trip
from slices import examples
from states import bits_of, difference
from torch import nn

import async_ckpt
from async_ckpt import UnsupportedStateError, UntrustedObjectError
from async_ckpt.core.spec import DTYPES, MIB


def random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)


# --- containers --------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


CONTAINERS = {
    "empty dict": {},
    "empty list": [],
    "empty tuple": (),
    "bare tensor": torch.arange(6.0).reshape(2, 3),
    "bare value": 7,
    "bare none": None,
    "list root": [torch.ones(2), 1, [torch.zeros(3)]],
    "tuple root": (torch.ones(2), (1, 2)),
    "nested": {"a": {"b": [1, (2, {"c": torch.ones(1)}), []], "d": {}}, "e": ()},
    "ordered": OrderedDict([("z", torch.ones(1)), ("a", OrderedDict())]),
    "dict of nothing": {"a": {}, "b": [], "c": (), "d": None},
    "100 deep": None,  # made below
}
deep: Any = torch.ones(1)
for _ in range(50):
    deep = {"k": [deep]}
CONTAINERS["100 deep"] = deep


@pytest.mark.parametrize("state", CONTAINERS.values(), ids=CONTAINERS.keys())
def test_any_nesting_of_containers_comes_back(state, archive):
    assert difference(round_trip(state, archive), state) is None


def test_the_order_of_keys_is_kept(archive):
    state = {name: {"w": torch.tensor(i)} for i, name in enumerate("zebra")}
    assert list(round_trip(state, archive)) == list("zebra")


def test_a_modules_state_dict_keeps_its_metadata(archive):
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    loaded = round_trip(model.state_dict(), archive)
    assert difference(loaded, model.state_dict()) is None
    assert loaded._metadata["1"] == {"version": 2}
    model.load_state_dict(loaded)


def test_a_namedtuple_is_rebuilt_only_when_its_class_is_given(archive):
    state = {"p": Pair(torch.ones(2), [Pair(1, 2)])}
    plain = round_trip(state, archive)
    assert type(plain["p"]) is tuple
    assert type(plain["p"][1][0]) is tuple
    assert difference(async_ckpt.load(archive, types=[Pair]), state) is None


def test_a_namedtuple_with_other_fields_than_the_given_class_stays_a_tuple(archive):
    shaped = namedtuple("Pair", ["a", "b", "c"])
    shaped.__module__, shaped.__qualname__ = Pair.__module__, Pair.__qualname__
    assert round_trip({"p": shaped(1, 2, 3)}, archive, types=[Pair]) == {"p": (1, 2, 3)}


def test_subclasses_of_dict_come_back_as_dicts(archive):
    state = {"d": defaultdict(list, {"a": [1]}), "c": Counter("aab")}
    loaded = round_trip(state, archive)
    assert loaded == {"d": {"a": [1]}, "c": {"a": 2, "b": 1}}
    assert type(loaded["d"]) is dict
    assert type(loaded["c"]) is dict


def test_an_object_with_a_state_dict_is_stored_by_it(archive):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    loaded = round_trip({"model": model, "optimizer": optimizer}, archive)
    assert difference(loaded["model"], model.state_dict()) is None
    assert difference(loaded["optimizer"], optimizer.state_dict()) is None


def test_a_class_with_a_state_dict_method_is_not_called(archive):
    async_ckpt.save({"cls": nn.Linear, "w": torch.ones(1)}, archive).result()
    with pytest.raises(UntrustedObjectError):
        async_ckpt.load(archive)
    assert async_ckpt.load(archive, trust=True)["cls"] is nn.Linear


# --- plain values ------------------------------------------------------------------------------------------------


# By number, for the text of a set is another in every process.
@pytest.mark.parametrize("value", VALUES, ids=[f"{n} {type(v).__name__}" for n, v in enumerate(VALUES)])
def test_a_plain_value_comes_back_bit_for_bit(value, archive):
    state = {"value": value, "in": [value, (value,)]}
    assert difference(round_trip(state, archive), state) is None


def test_an_integer_too_long_for_decimal_text_comes_back(archive):
    state = {"n": 7**9000, "m": -(2**20000)}
    assert round_trip(state, archive) == state


def test_two_lone_surrogates_in_a_row_do_not_become_one_character(archive):
    pair = "\ud83d" + "\ude00"
    state = {"text": pair, "keys": {pair: 1, "😀": 2}}
    loaded = round_trip(state, archive)
    assert loaded == state


KEYS = [
    "", ".", "a.b", "a/b", "../x", "ü😀", "\x00", "\ud800", "__metadata__", "~2", " ", "k" * 3000,
    0, 1, -5, 2**70, True, False, None, 1.0, -0.0, 0.5, math.inf, (), (1, "a", None, (2.5, True)), b"bytes",
    torch.float32, torch.device("cpu"), np.int64(3), np.float32(0.5), 2 + 3j,
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS, ids=lambda k: repr(k)[:20].encode("ascii", "replace").decode())
def test_any_hashable_plain_key_comes_back_with_its_type(key, archive):
    state = {"inner": {key: torch.arange(3)}, "plain": {key: 1}}
    assert difference(round_trip(state, archive), state) is None
    top = {key: {"w": torch.ones(2)}}
    assert difference(round_trip(top, archive), top) is None
    flat = {key: torch.ones(2)}
    assert difference(round_trip(flat, archive), flat) is None


def test_a_nan_key_comes_back(archive):
    state = {math.nan: {"w": torch.ones(1)}, "x": 1}
    assert difference(round_trip(state, archive), state) is None


def test_all_kinds_of_keys_live_side_by_side(archive):
    """Every tensor keeps its own value, however alike the names look."""
    keys = [1, "1", "1.0", 2.0, "2", "2.0", True and "True", (1,), "(1,)", None, "None", "none"]
    state = {"top": {k: torch.tensor(i) for i, k in enumerate(keys)}}
    state.update({k: {"w": torch.tensor([i])} for i, k in enumerate(keys)})
    assert difference(round_trip(state, archive), state) is None


COLLISIONS = {
    "dots": {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2)}},
    "dots inside": {"m": {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2), "b~2": torch.tensor(3)}}},
    "tilde": {"m": {"a.b": torch.tensor(1), "a.b~2": torch.tensor(2), "a": {"b": torch.tensor(3)}}},
    "reserved": {"m": {"__metadata__": torch.tensor(1)}, "__metadata__": torch.tensor(2)},
    "reserved group": {"__metadata__": {"__metadata__": torch.tensor(1)}},
    "long": {"m": {"x" * 1500 + c: torch.tensor(i) for i, c in enumerate("abc")}},
    "long unicode": {"m": {"😀" * 400 + c: torch.tensor(i) for i, c in enumerate("abc")}},
    "list and dict": {"m": {"a": [torch.tensor(1)], "a.0": torch.tensor(2)}},
    "int and string": {"m": {1: torch.tensor(1), "1": torch.tensor(2)}},
    "model and top": {"model": {"w": torch.tensor(1)}, "w": torch.tensor(2), "state": {"w": torch.tensor(3)}},
    "case": {"Model": {"w": torch.tensor(1)}, "model": {"w": torch.tensor(2)}},
    "surrogates": {"m": {"\ud800": torch.tensor(1), "\\ud800": torch.tensor(2)}},
    "members": {"index": {"w": torch.tensor(1)}, "digests": {"w": torch.tensor(2)}, "objects": {"w": torch.tensor(3)}},
}  # fmt: skip


@pytest.mark.parametrize("state", COLLISIONS.values(), ids=COLLISIONS.keys())
def test_names_that_collide_are_told_apart(state, archive):
    assert difference(round_trip(state, archive), state) is None
    told = parsed_index(archive)
    names = [piece.name for t in told.tensors for piece in t.slices]
    assert all(len(name.encode()) <= 1024 and name != "__metadata__" for name in names)


# --- numpy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS.keys())
def test_a_numpy_array_comes_back_writable_and_the_same(array, archive):
    loaded = round_trip({"a": array, "again": [array]}, archive)["a"]
    assert type(loaded) is np.ndarray
    assert difference(loaded, array) is None
    assert loaded.flags.writeable
    loaded[...] = loaded


def test_an_aligned_structured_dtype_keeps_its_fields(archive):
    array = np.zeros(2, np.dtype([("a", "i1"), ("b", "f8")], align=True))
    array["b"] = 2.5
    loaded = round_trip({"a": array}, archive)["a"]
    assert loaded.dtype.fields == array.dtype.fields
    assert loaded.tobytes() == array.tobytes()


def test_a_memory_map_is_stored_as_the_array_that_it_is(archive, tmp_path):
    mapped = np.memmap(tmp_path / "m.bin", dtype="f4", mode="w+", shape=(3, 2))
    mapped[:] = 1.5
    loaded = round_trip({"a": mapped}, archive)["a"]
    assert difference(loaded, np.array(mapped)) is None


def test_an_array_changed_after_save_returned_is_stored_as_it_was(archive):
    array, tensor = np.zeros(1000), torch.zeros(1000)
    handle = async_ckpt.save({"a": array, "t": tensor}, archive)
    array[:] = 1
    tensor.fill_(1)
    handle.result()
    loaded = async_ckpt.load(archive)
    assert not loaded["a"].any()
    assert not loaded["t"].any()


SCALARS = [
    np.float64(0.1), np.float32("nan"), np.float16(1.5), np.int8(-1), np.uint64(2**64 - 1), np.bool_(True),
    np.complex128(1 - 2j), np.longdouble(1) / 3, np.datetime64("2024-01-01T00:00:01", "ns"), np.datetime64("NaT"),
    np.timedelta64(5, "m"), np.str_("ü😀"), np.str_(""), np.bytes_(b"ab"), np.bytes_(b""),
    np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")])[0], np.void(b"abc"),
]  # fmt: skip


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: f"{type(s).__name__} {s!r}"[:30])
def test_a_numpy_scalar_comes_back_with_its_type(scalar, archive):
    loaded = round_trip({"s": scalar}, archive)["s"]
    assert type(loaded) is type(scalar)
    assert loaded.dtype == scalar.dtype
    assert loaded.tobytes() == scalar.tobytes()


@pytest.mark.parametrize("scalar", [np.str_("ab\x00"), np.bytes_(b"ab\x00\x00")], ids=repr)
def test_a_numpy_string_keeps_the_zeros_that_it_ends_in(scalar, archive):
    loaded = round_trip({"s": scalar}, archive)["s"]
    assert type(loaded) is type(scalar)
    assert loaded == scalar
    assert len(loaded) == len(scalar)


# Some have no bytes at all, or keep them elsewhere: whatever happens, no value may come back changed.
@pytest.mark.parametrize(
    "array",
    [
        np.zeros(3, "V0"),
        np.zeros(3, np.dtype([])),
        np.array(["a", "b" * 100], np.dtypes.StringDType()) if hasattr(np.dtypes, "StringDType") else np.zeros(0),
        np.array([1, "x", None], dtype=object),
        np.ma.masked_array([1, 2, 3], mask=[0, 1, 0]),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.zeros(2, [(f"f{i}", "i1") for i in range(12_000)]),
    ],
    ids=["V0", "no fields", "StringDType", "object", "masked", "recarray", "too many fields"],
)  # fmt: skip
def test_an_odd_array_comes_back_or_needs_trust(array, archive):
    async_ckpt.save({"a": array}, archive).result()
    loaded = async_ckpt.load(archive, trust=True)["a"]
    assert type(loaded) is type(array)
    assert loaded.dtype == array.dtype
    assert loaded.tolist() == array.tolist()


# --- tensors: memory ---------------------------------------------------------------------------------------------


def test_tied_tensors_come_back_tied_and_are_stored_once(archive):
    weight = nn.Parameter(torch.randn(1000, 100))
    state = {
        "a": {"w": weight, "again": weight.data},
        "b": [weight.detach()],
        "other": weight.detach().clone(),
    }
    loaded = round_trip(state, archive)
    assert loaded["a"]["w"].data_ptr() == loaded["a"]["again"].data_ptr() == loaded["b"][0].data_ptr()
    assert loaded["other"].data_ptr() != loaded["a"]["w"].data_ptr()
    assert difference(loaded["b"][0], weight.detach()) is None
    assert archive.stat().st_size < 2 * 400_000 + 50_000
    assert [t.alias_of for t in parsed_index(archive).tensors] == [None, 0, 0, None]


def test_a_tied_tensor_can_be_selected_without_the_first_of_them(archive):
    weight = torch.randn(10)
    async_ckpt.save({"a": {"w": weight}, "b": {"w": weight}}, archive).result()
    assert difference(async_ckpt.load(archive, select="b"), {"b": {"w": weight}}) is None


def test_views_that_begin_alike_are_not_taken_for_tied(archive):
    base = torch.arange(12.0)
    state = {
        "base": base, "head": base[:4], "grid": base.view(3, 4), "turned": base.view(3, 4).t(),
        "bits": base.view(torch.int32), "tail": base[4:], "every": base[::2],
    }  # fmt: skip
    assert difference(round_trip(state, archive), state) is None


def test_a_view_of_a_huge_tensor_stores_only_its_own_bytes(archive):
    huge = torch.zeros(16 * MIB // 4)
    state = {"a": huge[1000:1010], "b": huge[::500_000], "c": huge.view(-1, 1024)[:, 3][:100]}
    assert difference(round_trip(state, archive), state) is None
    assert archive.stat().st_size < 32_000


def test_huge_expanded_views_of_one_number_come_back_whole(archive):
    state = {"a": torch.tensor(3.0).expand(1000, 70), "b": torch.arange(3).unsqueeze(1).expand(3, 5)}
    assert difference(round_trip(state, archive), state) is None


SHAPED = {
    "0-dim": torch.tensor(2.5),
    "0-dim view": torch.arange(5)[3],
    "empty": torch.empty(0),
    "empty 3-d": torch.empty(2, 0, 3, dtype=torch.int16),
    "strided": torch.arange(60).reshape(3, 4, 5)[:, ::2, 1:],
    "permuted": torch.arange(60.0).reshape(3, 4, 5).permute(2, 0, 1),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "overlapping": torch.arange(10).as_strided((4, 3), (1, 2)),
    "odd offset": random_bytes(100)[3:],
    "parameter": nn.Parameter(torch.ones(2)),
    "buffer": nn.Buffer(torch.ones(2)),
    "needs grad": torch.ones(2, requires_grad=True) * 2,
    "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "conj transposed": torch.randn(3, 4, dtype=torch.complex64).conj().t(),
    "neg": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "neg conj": torch._neg_view(torch.tensor([1 + 2j, 3 - 4j])).conj(),
    "real of conj": torch.tensor([1 + 2j, 3 - 4j]).conj().real,
    "nan payloads": torch.tensor([0x7FC00123, -4194000], dtype=torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("tensor", SHAPED.values(), ids=SHAPED.keys())
def test_a_tensor_of_any_shape_and_stride_comes_back(tensor, archive):
    state = {"m": {"t": tensor, "pad": torch.ones(3, dtype=torch.uint8)}, "bare": tensor}
    assert difference(round_trip(state, archive), state) is None
    loaded = async_ckpt.load(archive)["m"]["t"]
    assert loaded.is_contiguous()
    assert not loaded.is_conj()
    assert not loaded.is_neg()
    assert type(loaded) is torch.Tensor


def test_conj_and_neg_views_are_not_taken_for_the_tensor_they_view(archive):
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"z": z, "conj": z.conj(), "neg": torch._neg_view(z), "imag": z.imag, "neg imag": z.conj().imag}
    assert difference(round_trip(state, archive), state) is None


def test_large_tensors_that_are_not_contiguous_come_back(archive):
    """Each spans several segments or ends inside of one, and their parts are put together again."""
    side = 3000
    base = torch.randn(side, side)
    state = {
        "turned": base.t(),
        "every second": base[:, ::2],
        "half": base.half().t(),
        "conj": torch.complex(base[:1200, :1200], base[1200:2400, :1200]).conj().t(),
        "channels last": torch.randn(2, 64, 120, 130).to(memory_format=torch.channels_last),
        "bool": (base > 0).t()[1:],
    }
    assert difference(round_trip(state, archive), state) is None


def test_a_tensor_larger_than_several_segments_comes_back(archive):
    big = random_bytes(70 * MIB + 13)
    state = {"small": torch.ones(3), "big": big, "tail": torch.ones(5, dtype=torch.float64)}
    assert difference(round_trip(state, archive), state) is None


def test_thousands_of_small_tensors_come_back(archive):
    state = {
        "m": {f"t{i}": torch.full((i % 7,), i % 128, dtype=[torch.float32, torch.int8][i % 2]) for i in range(3000)}
    }
    assert difference(round_trip(state, archive), state) is None


def test_what_the_caller_has_set_as_default_changes_nothing(archive):
    """Default device and dtype, inference mode, no_grad: they are the caller's, and hold in the background too."""
    state = {
        "w": torch.ones(3),
        "a": np.zeros((0, 2)),
        "big": bytes(9000),
        "t": torch.ones(4, 4).t(),
        "n": 1,
        "s": {1},
        "z": torch.tensor([1j]).conj(),
    }
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.inference_mode():
            loaded = round_trip(state, archive)
            mapped = async_ckpt.load(archive, mmap=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert difference(loaded, state) is None
    assert difference(mapped, state) is None


def test_tensors_of_inference_mode_are_stored(archive):
    with torch.inference_mode():
        state = {"a": torch.arange(5.0), "b": torch.arange(6.0).reshape(2, 3).t(), "c": torch.ones(MIB)}
    assert difference(round_trip(state, archive), state) is None


# --- tensors: dtypes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(4, 3), (), (0, 2)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(name, shape, archive):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    num_items = math.prod(shape)
    raw = random_bytes(num_items * DTYPES[name][0])
    if dtype == torch.bool:
        raw = raw % 2
    tensor = raw.view(dtype).reshape(shape) if num_items else torch.empty(shape, dtype=dtype)
    state = {"t": tensor, "w": torch.ones(3)}
    assert difference(round_trip(state, archive), state) is None
    assert difference(async_ckpt.load(archive, mmap=True), state) is None


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_when_it_is_not_contiguous(name, archive):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    item_bytes = DTYPES[name][0]
    raw = random_bytes(6 * item_bytes)
    raw = raw % 2 if dtype == torch.bool else raw
    loaded = round_trip({"t": raw.view(dtype).reshape(2, 3).t()}, archive)["t"]
    expected = raw.reshape(2, 3, item_bytes).transpose(0, 1).reshape(-1)
    assert (loaded.dtype, loaded.shape) == (dtype, (3, 2))
    assert torch.equal(bits_of(loaded), expected)


def test_dtypes_that_torch_knows_are_stored_or_refused_by_name(archive):
    refused = 0
    for dtype in {d for d in vars(torch).values() if isinstance(d, torch.dtype)}:
        name = str(dtype).removeprefix("torch.")
        try:
            tensor = torch.empty(2, dtype=dtype)
        except (RuntimeError, NotImplementedError):
            continue
        if name in DTYPES:
            assert DTYPES[name][0] == tensor.element_size(), name
        else:
            refused += 1
            with pytest.raises(UnsupportedStateError, match="layer"):
                async_ckpt.save({"layer": tensor}, archive)
    assert refused
    assert not archive.exists()


# --- any tree, any tensor ----------------------------------------------------------------------------------------

any_text = st.text(st.characters(codec=None), max_size=8)
plain_leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), any_text, st.binary(max_size=20),
    st.sampled_from([torch.Size([1, 2]), torch.int8, torch.device("cpu"), np.float32(2), bytearray(b"12")]),
)  # fmt: skip
small_tensors = st.builds(
    lambda shape, dtype: torch.ones(shape, dtype=dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
)
small_arrays = st.builds(
    np.zeros, st.lists(st.integers(0, 3), max_size=3), st.sampled_from(["f4", ">i2", "M8[s]", "U2"])
)
keys = st.one_of(
    any_text,
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.tuples(st.integers(), any_text),
)
trees = st.recursive(
    st.one_of(plain_leaves, small_tensors, small_arrays),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(any_text, inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(Pair._make),
    ),
    max_leaves=25,
)  # fmt: skip


@pytest.fixture(scope="module")
def one_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("state") / "x.tar"


@settings(max_examples=examples(150), deadline=None)
@given(state=trees)
def test_any_tree_comes_back(state, one_path):
    assert difference(round_trip(state, one_path, types=[Pair]), state) is None


@st.composite
def any_tensors(draw: Any) -> torch.Tensor:
    """A view into random bytes of any dtype, with any strides that stay inside of them."""
    name = draw(st.sampled_from(["float64", "float32", "bfloat16", "float8_e5m2", "int16", "complex64", "complex128"]))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    strides = [draw(st.integers(0, 7)) for _ in shape]
    offset = draw(st.integers(0, 3))
    num_items = offset + 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    storage = random_bytes(num_items * DTYPES[name][0]).view(getattr(torch, name))
    view = torch.as_strided(storage, shape, strides, offset)
    return draw(st.sampled_from([view, view.conj(), view.t() if view.ndim == 2 else view]))


@settings(max_examples=examples(100), deadline=None)
@given(tensors=st.lists(any_tensors(), max_size=6))
def test_a_tensor_of_any_dtype_shape_and_strides_comes_back(tensors, one_path):
    state = {"m": tensors, "flat": tensors[:1]}
    assert difference(round_trip(state, one_path), state) is None


def test_the_index_is_one_json_text_that_lists_every_tensor(archive):
    async_ckpt.save({"m": {"w": torch.ones(2, 3)}, 5: {"v": torch.ones(1)}}, archive).result()
    rows = read_index(archive)["tensors"]
    assert [row["path"] for row in rows] == [["m", "w"], [5, "v"]]
    assert json.dumps(rows)
