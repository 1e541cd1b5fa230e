"""Tensors that are made of others: they are stored as their inner tensors, and come back as what they were."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import forge, parsed_index, read_index
from plain_data import round_trip
from states import open_run, restored
from tensor_classes import Rounding, Scaled, Scheme, bytes_in, inner_tensors, scaled
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import async_ckpt
from async_ckpt import AsyncCheckpointer, CorruptCheckpointError, StateMismatchError, UnsupportedStateError

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning"),
]


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[AsyncCheckpointer]:
    with open_run(tmp_path / "run") as ckpt:
        yield ckpt


def jagged(*lengths: int, fill: float = 1.0) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.full((n, 2), fill) for n in lengths], layout=torch.jagged)


def masked(*values: float) -> Any:
    data = torch.tensor(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.masked.MaskedTensor(data, data > 1)


def grid(fill: float = 1.0) -> torch.Tensor:
    return fill * torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))


JAGGED: type = type(jagged(1))
# What is saved, another one like it, and the classes that it is made of.
WRAPPED: dict[str, tuple[Callable[[], Any], Callable[[], Any], list[type]]] = {
    "of a class": (lambda: scaled(3, 4), lambda: scaled(3, 4, seed=1), [Scaled]),
    "of torch's test class": (
        lambda: TwoTensor(torch.arange(6.0), torch.ones(6)),
        lambda: TwoTensor(torch.zeros(6), torch.zeros(6)),
        [TwoTensor],
    ),
    "nested in each other": (
        lambda: Scaled(scaled(3, 4), torch.ones(3, 1)),
        lambda: Scaled(scaled(3, 4, seed=1), torch.zeros(3, 1)),
        [Scaled],
    ),
    "with classes in its context": (
        lambda: scaled(2, 2, context=(Scheme(Rounding.DOWN), {"shape": torch.Size([2]), "cls": Scaled})),
        lambda: scaled(2, 2, seed=1, context=(Scheme(Rounding.DOWN), {"shape": torch.Size([2]), "cls": Scaled})),
        [Scaled, Scheme, Rounding],
    ),
    "a parameter": (
        lambda: nn.Parameter(scaled(3, 4), requires_grad=False),
        lambda: nn.Parameter(scaled(3, 4, seed=1), requires_grad=False),
        [Scaled],
    ),
    "without items": (lambda: scaled(0, 4), lambda: scaled(0, 4), [Scaled]),
    "COO": (lambda: grid().to_sparse(), lambda: grid(2.0).to_sparse(), []),
    "COO, not coalesced": (
        lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True),
        lambda: torch.sparse_coo_tensor([[1, 2]], [0.0, 0.0], (3,), check_invariants=True),
        [],
    ),
    "COO, hybrid": (lambda: grid().to_sparse(1), lambda: grid(2.0).to_sparse(1), []),
    "CSR": (lambda: grid().to_sparse_csr(), lambda: grid(2.0).to_sparse_csr(), []),
    "CSC": (lambda: grid().to_sparse_csc(), lambda: grid(2.0).to_sparse_csc(), []),
    "BSR": (lambda: grid().to_sparse_bsr((2, 2)), lambda: grid(2.0).to_sparse_bsr((2, 2)), []),
    "BSC": (lambda: grid().to_sparse_bsc((2, 2)), lambda: grid(2.0).to_sparse_bsc((2, 2)), []),
    "jagged": (lambda: jagged(2, 3), lambda: jagged(2, 3, fill=0.0), [JAGGED]),
    "masked": (lambda: masked(1.0, 2.0, 3.0), lambda: masked(7.0, 0.0, 0.0), [torch.masked.MaskedTensor]),
    "masked and sparse": (
        lambda: torch.masked.MaskedTensor(grid().to_sparse(), grid().bool().to_sparse()),
        lambda: torch.masked.MaskedTensor(grid(2.0).to_sparse(), grid().bool().to_sparse()),
        [torch.masked.MaskedTensor],
    ),
}
every_kind = pytest.mark.parametrize(("make", "other", "types"), WRAPPED.values(), ids=WRAPPED.keys())


def content(path: Path) -> tuple[Any, list[bytes]]:
    """The index of an archive, and the bytes of its tensors."""
    index = read_index(path)
    plain = async_ckpt.load(path)

    def all_bytes(value: Any) -> list[bytes]:
        return (
            [data for item in value.values() for data in all_bytes(item)]
            if isinstance(value, dict)
            else bytes_in(value)
        )

    return index, all_bytes(plain)


@every_kind
def test_it_comes_back_as_what_it_was_where_its_classes_are_given(make, other, types, archive, tmp_path):
    saved = make()
    loaded = round_trip({"w": saved}, archive, types=types)
    assert type(loaded["w"]) is (torch.Tensor if not types else types[0])
    assert (loaded["w"].layout, tuple(map(str, loaded["w"].shape[-1:]))) == (
        saved.layout,
        tuple(map(str, saved.shape[-1:])),
    )
    assert bytes_in(loaded["w"]) == bytes_in(saved)
    async_ckpt.save(loaded, tmp_path / "again.tar").result()
    assert content(tmp_path / "again.tar") == content(archive)


@every_kind
def test_a_live_one_is_filled_where_it_is(make, other, types, ckpt):
    live = other()
    inner = [part.data_ptr() for part in inner_tensors(live)]
    state = restored(ckpt, {"w": make()}, {"w": live})
    assert state["w"] is live
    assert [part.data_ptr() for part in inner_tensors(live)] == inner
    assert bytes_in(live) == bytes_in(make())


@every_kind
def test_a_restore_makes_one_that_the_live_state_lacks(make, other, types, ckpt):
    state = restored(ckpt, {"g": {"w": make()}}, {"g": {}}, types=types)
    assert bytes_in(state["g"]["w"]) == bytes_in(make())


@every_kind
def test_a_snapshot_holds_it(make, other, types, ckpt):
    live = other()
    with async_ckpt.snapshot({"w": live}) as snap:
        want = bytes_in(live)
        for part in inner_tensors(live):
            part.zero_()
        assert bytes_in(snap["w"]) == want
        ckpt.save(snap, step=1).result()
    assert bytes_in(ckpt.load(types=types)["w"]) == want


def test_without_its_class_its_inner_tensors_are_loaded(archive):
    loaded = round_trip({"w": Scaled(scaled(3, 4), torch.ones(3, 1))}, archive)["w"]
    assert type(loaded) is type(loaded["codes"]) is dict
    assert bytes_in(loaded["codes"]["codes"]) == bytes_in(scaled(3, 4).codes)
    assert torch.equal(loaded["scale"], torch.ones(3, 1))


def test_the_index_names_the_class_and_has_the_context_as_plain_data(archive):
    async_ckpt.save({"w": scaled(3, 4, context={"bits": 8, "block": [1, 4]})}, archive).result()
    index = read_index(archive)
    ((_, node),) = index["skeleton"]["dict"]
    assert {name: node["wrapped"][name] for name in ("class", "size", "stride", "context")} == {
        "class": "tensor_classes.Scaled",
        "size": [3, 4],
        "stride": [4, 1],
        "context": {"dict": [["bits", 8], ["block", {"list": [1, 4]}]]},
    }
    assert [tensor.path for tensor in parsed_index(archive).tensors] == [("w", "codes"), ("w", "scale")]


def test_parameters_of_a_module_are_stored_and_filled(ckpt):
    def model(seed: int) -> nn.Linear:
        linear = nn.Linear(4, 3)
        linear.weight = nn.Parameter(scaled(3, 4, seed=seed), requires_grad=False)
        return linear

    saved, live = model(0), model(1)
    weight = live.weight
    restored(ckpt, {"model": saved}, {"model": live})
    assert live.weight is weight
    assert bytes_in(live.weight) == bytes_in(saved.weight)
    assert torch.equal(live.bias, saved.bias)


def test_a_module_whose_state_dict_is_a_copy_gets_it_by_its_own_method(ckpt):
    class Copying(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.weight = scaled(3, 4, seed=seed)

        def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
            return {"weight": self.weight.clone()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert type(state["weight"]) is Scaled
            self.weight = state["weight"]

    live = restored(ckpt, {"model": Copying(0)}, {"model": Copying(1)})["model"]
    assert bytes_in(live.weight) == bytes_in(scaled(3, 4))


def test_tied_ones_are_stored_once(archive):
    w = scaled(300, 400)
    loaded = round_trip({"a": w, "b": w}, archive, types=[Scaled])
    assert archive.stat().st_size < 2 * 300 * 400
    assert loaded["a"].codes.data_ptr() == loaded["b"].codes.data_ptr()


@pytest.mark.parametrize("select", ["model.w", "*.w", "model"])
def test_it_is_selected_by_its_own_name(select, archive):
    state = {"model": {"w": scaled(3, 4), "b": torch.ones(2)}}
    async_ckpt.save(state, archive, select=select).result()
    for how in ({}, {"select": select}):
        assert bytes_in(async_ckpt.load(archive, types=[Scaled], **how)["model"]["w"]) == bytes_in(scaled(3, 4))


def test_one_of_its_inner_tensors_can_be_selected_alone(archive):
    async_ckpt.save({"model": {"w": scaled(3, 4)}}, archive).result()
    loaded = async_ckpt.load(archive, select="model.w.scale", types=[Scaled])
    assert list(loaded["model"]["w"]) == ["scale"]


# --- what differs -------------------------------------------------------------------------------------------------

DIFFERENT: dict[str, tuple[Any, Any, str]] = {
    "the class": (
        lambda: scaled(3, 4),
        lambda: TwoTensor(torch.ones(3, 4), torch.ones(3, 4)),
        "w has the class torch.testing._internal.two_tensor.TwoTensor here and tensor_classes.Scaled in the checkpoint",
    ),
    "the context": (
        lambda: scaled(3, 4, context={"bits": 8, "block": 4}),
        lambda: scaled(3, 4, context={"bits": 4, "block": 4}),
        r'w has the context [["bits", 4]] here and [["bits", 8]] in the checkpoint',
    ),
    "the size": (lambda: scaled(3, 4), lambda: scaled(2, 4), "w has the size [2, 4] here and [3, 4] in the checkpoint"),
    "the shape of an inner tensor": (
        lambda: scaled(3, 4),
        lambda: Scaled(scaled(3, 4).codes, torch.ones(1, 1)),
        "w.scale is float32[1, 1] here and float32[3, 1] in the checkpoint",
    ),
    "the inner tensors": (
        lambda: jagged(2, 3),
        lambda: torch.nested.nested_tensor_from_jagged(torch.ones(5, 2), torch.tensor([0, 2, 5])),
        'w has the inner tensors ["_values", "_offsets"] here and ["_values", "_offsets", "_min_seqlen_tensor"',
    ),
    "how many values are stored": (
        lambda: grid().to_sparse(),
        lambda: torch.eye(4).to_sparse(),
        "w.values is float32[4] here and float32[8] in the checkpoint",
    ),
    "a plain one here": (
        lambda: scaled(3, 4),
        lambda: torch.ones(3, 4),
        "w is a tensor here and a tensor_classes.Scaled in the checkpoint",
    ),
    "a plain one there": (
        lambda: torch.ones(3, 4),
        lambda: scaled(3, 4),
        "w is a tensor_classes.Scaled here and a tensor in the checkpoint",
    ),
    "a context here that is no plain data": (
        lambda: scaled(3, 4),
        lambda: scaled(3, 4, context={"f": abs}),
        "w cannot be filled: f in the context of tensor_classes.Scaled is a builtin_function_or_method",
    ),
    "nothing here": (
        lambda: scaled(3, 4),
        lambda: None,
        "w is a tensor_classes.Scaled in the checkpoint, but there is no live tensor to fill: pass its class in types=",
    ),
}


@pytest.mark.parametrize(("saved", "live", "difference"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_a_restore_says_what_differs_and_writes_nothing(saved, live, difference, ckpt):
    ckpt.save({"w": saved(), "b": torch.ones(2)}, step=1).result()
    state = {"w": live(), "b": torch.zeros(2)}
    before = None if state["w"] is None else bytes_in(state["w"])
    with pytest.raises(StateMismatchError) as caught:
        ckpt.restore(state)
    assert difference in str(caught.value)
    assert not state["b"].any()
    assert before is None or bytes_in(state["w"]) == before


# --- what is refused ----------------------------------------------------------------------------------------------


class Raising(Scaled):
    def __tensor_flatten__(self) -> Any:
        raise NotImplementedError("not for you")


class Untrue(Scaled):
    def __tensor_flatten__(self) -> Any:
        return ["codes", "context"], None


def handle() -> Any:
    return open(__file__, encoding="utf-8")


REFUSED: dict[str, tuple[Any, str, str]] = {
    "a function in its context": (
        lambda: scaled(2, 2, context=["x", abs]),
        "model.w",
        "model.w: 1 in the context of tensor_classes.Scaled is a builtin_function_or_method, and only plain data is",
    ),
    "an object as its context": (
        lambda: scaled(2, 2, context=object()),
        "model.w",
        "model.w: the context of tensor_classes.Scaled is an object, and only plain data is stored; save its inner",
    ),
    "a tensor in its context": (
        lambda: scaled(2, 2, context={"also": torch.ones(2)}),
        "model.w",
        "model.w: also in the context of tensor_classes.Scaled is a Tensor, and only plain data is stored",
    ),
    "a module in its context": (
        lambda: scaled(2, 2, context={"net": nn.Linear(1, 1)}),
        "model.w",
        "model.w: net in the context of tensor_classes.Scaled is a Linear, and only plain data is stored",
    ),
    "a method that raises": (
        lambda: Raising(torch.ones(2, 2), torch.ones(2, 1)),
        "model.w",
        "model.w: __tensor_flatten__ of Raising failed (NotImplementedError: not for you); save the plain tensors",
    ),
    "a name that is no tensor": (
        lambda: Untrue(torch.ones(2, 2), torch.ones(2, 1)),
        "model.w",
        "model.w: __tensor_flatten__ of Untrue names 'context', which is not a tensor but dict; save the plain tensors",
    ),
    "an inner tensor without values": (
        lambda: Scaled(torch.ones(2, 2, device="meta"), torch.ones(2, 1)),
        "model.w.codes",
        "model.w.codes: a meta tensor has no values; materialise the module first",
    ),
    "a nested one that is not jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "model.w",
        "model.w: a nested tensor of strided layout cannot be stored; make it with layout=torch.jagged, or save its",
    ),
}


@pytest.mark.parametrize(("make", "path", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_stored_is_refused_by_name(make, path, why, archive):
    with pytest.raises(UnsupportedStateError) as caught:
        async_ckpt.save({"model": {"w": make()}}, archive)
    assert why in str(caught.value)
    assert caught.value.path == path
    assert not archive.exists()


def test_a_class_whose_context_needs_another_one_says_which(archive):
    async_ckpt.save({"w": scaled(2, 2, context=Scheme())}, archive).result()
    with pytest.raises(
        TypeError, match=r"types= has tensor_classes\.Scaled, whose context needs tensor_classes\.Round"
    ):
        async_ckpt.load(archive, types=[Scaled, Scheme])


def test_a_class_that_refuses_its_inner_tensors_is_named(archive):
    class Scaled2(Scaled):
        @classmethod
        def __tensor_unflatten__(cls, *_: Any) -> Any:
            raise KeyError("old")

    Scaled2.__module__, Scaled2.__qualname__ = Scaled.__module__, Scaled.__qualname__
    async_ckpt.save({"w": scaled(2, 2)}, archive).result()
    with pytest.raises(
        ValueError, match=r"w: tensor_classes\.Scaled cannot be made .*KeyError: 'old'.* leave it out of"
    ):
        async_ckpt.load(archive, types=[Scaled2])


def test_a_snapshot_of_a_class_that_copies_its_inner_tensors_is_refused(archive):
    class Copying(Scaled):
        @classmethod
        def __tensor_unflatten__(cls, inner: Any, context: Any, *_: Any) -> Any:
            return cls(inner["codes"].clone(), inner["scale"].clone(), context)

    with (
        async_ckpt.snapshot({"w": Copying(torch.ones(2, 2), torch.ones(2, 1))}) as snap,
        pytest.raises(
            UnsupportedStateError, match=r"w: a snapshot cannot hold .*Copying, whose .* save the live state"
        ),
    ):
        async_ckpt.save(snap, archive)


# --- of other packages --------------------------------------------------------------------------------------------


class Float8(Scaled):
    """A stand-in for Transformer Engine's `Float8Tensor`, whose wheel needs a GPU: by its source of August 2026, what
    its two methods return. The context has the class, and a quantizer if the tensor keeps one.
    """

    quantizer: Any = None

    def __tensor_flatten__(self) -> Any:
        plain = {"fp8_dtype": Rounding.NEAREST, "fake_dtype": torch.bfloat16, "quantizer": self.quantizer}
        kept = {"cls": type(self), "is_tensor": True, "requires_grad": False, "nontensor_kwargs": plain}
        return ["_data", "_scale_inv"], kept

    @property
    def _data(self) -> torch.Tensor:
        return self.codes

    @property
    def _scale_inv(self) -> torch.Tensor:
        return self.scale

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, _size: Any, _stride: Any) -> Any:
        made = context["cls"](inner["_data"], inner["_scale_inv"])
        made.quantizer = context["nontensor_kwargs"]["quantizer"]
        return made


def float8(seed: int = 0) -> Float8:
    like = scaled(3, 4, seed=seed)
    return Float8(like.codes, like.scale)


def test_a_tensor_like_those_of_transformer_engine_comes_back(archive, ckpt):
    loaded = round_trip({"w": float8()}, archive, types=[Float8, Rounding])["w"]
    assert type(loaded) is Float8
    assert bytes_in(loaded) == bytes_in(float8())
    assert bytes_in(restored(ckpt, {"w": float8()}, {"w": float8(1)})["w"]) == bytes_in(float8())


def test_a_tensor_like_those_of_transformer_engine_that_keeps_its_quantizer_is_refused(archive):
    w = float8()
    w.quantizer = object()
    with pytest.raises(
        UnsupportedStateError, match=r"w: nontensor_kwargs\.quantizer in the context of .*Float8 is an obj"
    ):
        async_ckpt.save({"w": w}, archive)


def test_layers_of_bitsandbytes_are_stored_with_their_quantisation_states(archive, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    modules = {
        "nf4": bitsandbytes.nn.Linear4bit(128, 64, quant_type="nf4").to("cpu"),
        "fp4": bitsandbytes.nn.Linear4bit(128, 64, quant_type="fp4", compress_statistics=False).to("cpu"),
        "int8": bitsandbytes.nn.Linear8bitLt(128, 64, has_fp16_weights=False).to("cpu"),
    }
    state = {name: module.state_dict() for name, module in modules.items()}
    loaded = round_trip(modules, archive)
    for name, tensors in state.items():
        assert {key: bytes_in(value) for key, value in loaded[name].items()} == {
            key: bytes_in(value) for key, value in tensors.items()
        }
    async_ckpt.save(loaded, tmp_path / "again.tar").result()
    assert content(tmp_path / "again.tar")[1] == content(archive)[1]
    stats = {key.removeprefix("weight."): value for key, value in loaded["nf4"].items() if key.startswith("weight.")}
    weight = bitsandbytes.nn.Params4bit.from_prequantized(loaded["nf4"]["weight"], stats, device="cpu")
    dequantised = bitsandbytes.functional.dequantize_4bit
    assert torch.equal(
        dequantised(weight.data, weight.quant_state),
        dequantised(modules["nf4"].weight.data, modules["nf4"].weight.quant_state),
    )


# --- beside saves of its own --------------------------------------------------------------------------------------


def test_a_guard_lets_the_inner_tensors_of_a_parameter_wait(ckpt):
    from async_ckpt.core.staging.guard import deferrable
    from async_ckpt.core.state.capture import capture

    weight = nn.Parameter(scaled(2048, 1024), requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    captured = capture({"w": weight})
    waiting = deferrable((optimizer,), captured.tensors)
    assert {captured.specs[number].dotted for number in waiting} == {"w.codes"}
    handle = ckpt.save({"w": weight}, step=1, guard=optimizer)
    want = bytes_in(weight)
    weight.grad = torch.ones(2048, 1024)
    optimizer.step()
    handle.result()
    assert bytes_in(weight) != want
    assert bytes_in(ckpt.load(types=[Scaled])["w"]) == want


def test_a_group_of_wrapped_tensors_is_taken_for_unchanged_only_while_it_is(ckpt):
    frozen = {"w": scaled(300, 400)}
    state = {"base": frozen, "n": torch.ones(1)}
    ckpt.save(state, step=1).result()
    second = ckpt.save(state, step=2, unchanged=["base"]).result()
    assert second.num_bytes < 300 * 400
    assert bytes_in(ckpt.load(types=[Scaled])["base"]["w"]) == bytes_in(frozen["w"])
    frozen["w"].codes.add_(1)
    with pytest.raises(async_ckpt.NotUnchangedError, match="base"):
        ckpt.save(state, step=3, unchanged=["base"]).result()


def test_publications_refuse_it_by_name(tmp_path):
    with (
        async_ckpt.Publisher(tmp_path) as publisher,
        pytest.raises(UnsupportedStateError, match="'w': a Scaled has no mem"),
    ):
        publisher.publish({"w": scaled(3, 4)}, 1)


# --- files that lie -----------------------------------------------------------------------------------------------

LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a size that is text": lambda node: node.update(size="ab"),
    "a negative size": lambda node: node.update(size=[-1, 4]),
    "a size that is too long": lambda node: node.update(size=[1] * 65),
    "no class": lambda node: node.pop("class"),
    "a class that is a number": lambda node: node.update({"class": 3}),
    "no inner tensors": lambda node: node.update(inner=None),
    "a tensor in its context": lambda node: node.update(context={"tensor": 0}),
    "a context of an unknown kind": lambda node: node.update(context={"code": "1"}),
    "unknown facts": lambda node: node.update({"shards": "ab"}),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_an_index_that_lies_about_a_wrapped_tensor_is_corrupt(lie, archive):
    async_ckpt.save({"w": scaled(3, 4)}, archive).result()
    forge(archive, lambda index: lie(index["skeleton"]["dict"][0][1]["wrapped"]) and None)
    with pytest.raises(CorruptCheckpointError, match="its skeleton cannot be read"):
        async_ckpt.load(archive, types=[Scaled])


def test_a_sparse_tensor_of_an_impossible_size_is_corrupt(archive):
    async_ckpt.save({"g": {"w": grid().to_sparse()}}, archive).result()
    forge(archive, lambda index: _wrapped_in(index)["wrapped"].update(size=[None, 4]))
    with pytest.raises(CorruptCheckpointError, match=r"g\.w: torch\.sparse_coo cannot be made"):
        async_ckpt.load(archive)


def _wrapped_in(index: dict[str, Any]) -> dict[str, Any]:
    """The node of g.w."""
    node: dict[str, Any] = index["skeleton"]["dict"][0][1]["dict"][0][1]
    return node


def test_a_wrapped_tensor_is_a_view_of_a_mapped_file(archive):
    async_ckpt.save({"w": scaled(3, 4), "s": grid().to_sparse()}, archive).result()
    loaded = async_ckpt.load(archive, mmap=True, types=[Scaled])
    assert bytes_in(loaded["w"]) == bytes_in(scaled(3, 4))
    assert torch.equal(loaded["s"].to_dense(), grid())


INDICES = {
    "COO": (lambda: grid().to_sparse(), "_indices"),
    "CSR": (lambda: grid().to_sparse_csr(), "col_indices"),
    "BSC": (lambda: grid().to_sparse_bsc((2, 2)), "row_indices"),
}


@pytest.mark.parametrize(("make", "name"), INDICES.values(), ids=INDICES.keys())
def test_indices_outside_of_a_sparse_tensor_are_corrupt(make, name, archive, ckpt):
    """A kernel of torch would write to whatever memory they say."""
    lying = make()
    getattr(lying, name)().fill_(1 << 40)
    with pytest.raises(CorruptCheckpointError, match="w is not a sparse tensor"):
        round_trip({"w": lying}, archive)
    ckpt.save({"w": lying}, step=1).result()
    with pytest.raises(CorruptCheckpointError, match=r"w is not a sparse tensor.*partly overwritten"):
        ckpt.restore({"w": make()}, step=1)
