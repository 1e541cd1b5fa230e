"""`wrap`: what a function writes in the background is what it would have written at once, and appears whole."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import gc
import io
import json
import os
import pickle
import sys
import threading
import types
import warnings
import weakref
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from racing import Call, Gate, Thrown
from states import MIB, names_below

import async_ckpt
from async_ckpt import (
    NothingWrittenError,
    SaveHandle,
    SaveReport,
    TornSnapshotError,
    UnsupportedStateError,
    wrap,
)
from async_ckpt.around.pack import files_saver
from async_ckpt.host.threads import LibraryThread
from async_ckpt.saving import default
from async_ckpt.spec import DTYPES
from async_ckpt.staging.stager import Snapshot


def records(path: Path) -> dict[str, bytes]:
    """What `torch.save` wrote, record by record, but for its own name and the number that it draws from it."""
    with zipfile.ZipFile(path) as file:
        both = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    return {name: data for name, data in both.items() if "serialization_id" not in name}


def loaded(path: Path) -> Any:
    return torch.load(path, weights_only=False)


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path):
    """After every test: no temporary file, and no memory counted as in use."""
    yield
    assert [name for name in names(tmp_path) if "async_ckpt-tmp" in name] == []
    assert repr(default.host_memory()).startswith("<HostMemory 0 bytes lent")


def names(root: Path) -> list[str]:
    """Every file below a folder, when all calls so far have ended and cleaned up."""
    files_saver().wait()
    return names_below(root)


def save_text(text: str, path: str) -> None:
    Path(path).write_text(text)


def save_folder(state: dict[str, Any], folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    torch.save(state, os.path.join(folder, "state.pt"))
    Path(folder, "config.json").write_text("{}")


# --- what is written ---------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Held:
    weight: torch.Tensor
    note: str = "n"


@dataclasses.dataclass(slots=True)
class Slotted:
    weight: torch.Tensor


class Pair(NamedTuple):
    left: Any
    right: Any


class Sub(torch.Tensor):
    """A tensor type of a user's."""


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)
        self.outer = torch.nn.Linear(3, 3)
        self.outer.weight = self.inner.weight
        self.register_buffer("mean", torch.randn(3))
        self.inner.weight.role = "tied"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x)) + self.mean


def trained() -> Any:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer.state_dict(), "lr": schedule.state_dict()}


def raw(dtype: torch.dtype) -> torch.Tensor:
    data = torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage(), 0, (2, 3), (3, 1))


def savable(name: str) -> bool:
    try:
        torch.save(raw(getattr(torch, name)), io.BytesIO())
    except Exception:
        return False
    return True


def inferred() -> torch.Tensor:
    with torch.inference_mode():
        return torch.randn(3)


def with_attributes() -> torch.Tensor:
    p = torch.nn.Parameter(torch.randn(2))
    p.sharded, p.scale = True, torch.randn(3)
    return p


big = torch.arange(100.0)
STATES: dict[str, Callable[[], Any]] = {
    "bare": lambda: torch.randn(3),
    "nested": lambda: {"a": [torch.randn(3), (torch.randn(2), {"b": torch.randn(1)})], "n": None},
    "ordered": lambda: torch.nn.Linear(2, 2).state_dict(),
    "dataclass": lambda: Held(torch.randn(3)),
    "slots": lambda: Slotted(torch.randn(3)),
    "namedtuple": lambda: Pair(torch.randn(3), [Pair(1, torch.randn(2))]),
    "keys": lambda: {torch.randn(2): 1, (1, 2): torch.randn(2)},
    "set": lambda: {torch.randn(2)},
    "deque": lambda: collections.deque([torch.randn(2)], maxlen=3),
    "partial": lambda: functools.partial(torch.add, torch.randn(2), other=torch.randn(2)),
    "module": Tied,
    "trained": trained,
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "frozen": lambda: torch.nn.Parameter(torch.randn(3), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(torch.randn(3), persistent=False),
    "attributes": with_attributes,
    "subclass": lambda: torch.randn(3).as_subclass(Sub),
    "leaf": lambda: torch.randn(3, requires_grad=True),
    "not a leaf": lambda: torch.randn(3, requires_grad=True) * 2,
    "inference": inferred,
    "tied": lambda: [big, big, big.clone()],
    "views": lambda: [big[10:20], big[15:], big.view(10, 10).t(), big],
    "strided": lambda: torch.randn(4, 6)[::2, 1::3],
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "0-dim": lambda: torch.tensor(3.0),
    "empty": lambda: [torch.empty(0), torch.empty(3, 0), torch.randn(3)[3:]],
    "conj": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "quantised": lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8),
    "meta": lambda: torch.ones(3, device="meta"),
    "numpy": lambda: {"a": np.arange(5), "s": np.float32(2), "o": np.array([{"x": 1}], dtype=object)},
    "plain": lambda: {"step": 3, "lr": 0.1, "b": b"x", "c": 1j, "s": {1, 2}, "p": Path("a")},
    "large": lambda: [torch.randint(0, 256, (40 * MIB,), dtype=torch.uint8), torch.randn(3)],
    **{name: (lambda name=name: raw(getattr(torch, name))) for name in DTYPES if savable(name)},
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")  # of torch itself, for quantised tensors
@pytest.mark.parametrize("kind", STATES)
def test_torch_save_writes_every_record_that_it_would_have_written_at_once(tmp_path, kind):
    state = STATES[kind]()
    torch.save(state, tmp_path / "plain.pt")
    wrap(torch.save)(state, tmp_path / "wrapped.pt").result()

    plain, wrapped = records(tmp_path / "plain.pt"), records(tmp_path / "wrapped.pt")
    assert wrapped == plain


def test_jagged_tensors_are_saved_too(tmp_path):
    state = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    wrap(torch.save)(state, tmp_path / "x.pt").result()

    assert [t.tolist() for t in loaded(tmp_path / "x.pt").unbind()] == [[1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    "options",
    [
        {"pickle_protocol": 4},
        {"pickle_module": pickle},
        {"_use_new_zipfile_serialization": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_the_options_of_torch_save_are_passed_on(tmp_path, options):
    state = {"w": torch.randn(3), "v": big[3:5], "p": torch.nn.Parameter(torch.randn(2))}
    torch.save(state, tmp_path / "plain.pt", **options)
    wrap(torch.save)(state, tmp_path / "wrapped.pt", **options).result()

    if "_use_new_zipfile_serialization" in options:  # it writes addresses into the file
        assert torch.equal(loaded(tmp_path / "wrapped.pt")["v"], big[3:5])
    else:
        assert records(tmp_path / "wrapped.pt") == records(tmp_path / "plain.pt")


@pytest.mark.parametrize("ending", ["", ".npy"])
def test_numpys_save_adds_its_ending_as_ever(tmp_path, ending):
    handle = wrap(np.save)(tmp_path / f"x{ending}", np.arange(5))

    assert handle.result().path == str(tmp_path / "x.npy")
    assert names(tmp_path) == ["x.npy"]
    assert np.load(tmp_path / "x.npy").tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("function", [np.savez, np.savez_compressed])
def test_numpys_archives_hold_what_was_given_by_position_and_by_name(tmp_path, function):
    arrays = {"path": np.arange(3), "out": np.ones((2, 2)), "w": torch.arange(4)}
    wrap(function)(str(tmp_path / "x"), np.zeros(2), **arrays).result()

    with np.load(tmp_path / "x.npz") as found:
        assert sorted(found) == ["arr_0", "out", "path", "w"]
        assert found["w"].tolist() == [0, 1, 2, 3]


def test_safetensors_write_the_same_bytes(tmp_path):
    state = {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2).bfloat16()}
    safetensors.torch.save_file(state, tmp_path / "plain", {"format": "pt"})
    wrap(safetensors.torch.save_file)(state, tmp_path / "wrapped", {"format": "pt"}).result()
    model = Tied()
    safetensors.torch.save_model(model, str(tmp_path / "plain_model"))
    wrap(safetensors.torch.save_model)(model, str(tmp_path / "wrapped_model")).result()

    assert (tmp_path / "wrapped").read_bytes() == (tmp_path / "plain").read_bytes()
    assert (tmp_path / "wrapped_model").read_bytes() == (tmp_path / "plain_model").read_bytes()


def test_shared_memory_is_seen_by_a_function_that_refuses_it(tmp_path):
    data = bytearray(8)
    both = {k: torch.frombuffer(data, dtype=torch.uint8) for k in "ab"}
    handle = wrap(safetensors.torch.save_file)(both, str(tmp_path / "x"))

    with pytest.raises(RuntimeError, match="share memory"):
        handle.result()


def test_a_function_that_takes_an_open_file_is_streamed(tmp_path):
    given = []

    def dump(value: Any, file: Any) -> None:
        given.append(file)
        pickle.dump(value, file)

    save = wrap(dump, file_object=True)
    save([1, 2], tmp_path / "x.pkl").result()

    assert pickle.loads((tmp_path / "x.pkl").read_bytes()) == [1, 2]
    with pytest.raises(ValueError, match="the function has returned"):
        given[0].write(b"more")


def test_torch_save_by_another_name_gets_a_path(tmp_path):
    @functools.wraps(torch.save)
    def careful(obj: Any, f: str) -> None:
        torch.save(obj, f + ".new")
        os.rename(f + ".new", f)

    wrap(careful)(torch.ones(3), str(tmp_path / "x.pt")).result()
    wrap(functools.partial(torch.save, pickle_protocol=3))(torch.ones(3), tmp_path / "y.pt").result()

    assert names(tmp_path) == ["x.pt", "y.pt"]


def test_a_function_may_write_several_files(tmp_path):
    def dump(state: Any, path: str) -> list[str]:
        for number in range(3):
            np.save(f"{path}_{number:02}.npy", np.full(3, number))
        Path(path).write_text("index")
        return [path]

    report = wrap(dump)(None, str(tmp_path / "new" / "x")).result()

    assert names(tmp_path / "new") == ["x", "x_00.npy", "x_01.npy", "x_02.npy"]
    assert report.num_bytes == sum(p.stat().st_size for p in (tmp_path / "new").iterdir())


def test_a_function_may_only_write_beside_its_path(tmp_path):
    def dump(path: str) -> None:
        Path(path + ".json").write_text("{}")

    wrap(dump)(str(tmp_path / "x")).result()

    assert names(tmp_path) == ["x.json"]


# --- of one instant ----------------------------------------------------------------------------------------------


def change_in_place(state: dict[str, Any]) -> None:
    state["w"].zero_()
    state["m"].weight.data.zero_()
    state["a"][:] = 0


def change_structure(state: dict[str, Any]) -> None:
    state["list"].append("more")
    state["bytes"] += b"more"
    state.clear()


def replace_data(state: dict[str, Any]) -> None:
    state["w"].data = torch.zeros(1)
    state["m"].weight.data = torch.zeros(1)
    state["m"].weight.role = "other"


def free_memory(state: dict[str, Any]) -> None:
    state["w"].untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [change_in_place, change_structure, replace_data, free_memory])
def test_what_changes_after_the_call_is_not_in_the_file(tmp_path, gate, change):
    def slow(state: Any, path: str) -> None:
        gate.passed()
        torch.save(state, path)

    model = torch.nn.Linear(2, 2)
    state = {"w": torch.randn(1000), "m": model, "a": np.arange(3), "list": [1], "bytes": bytearray(b"x")}
    torch.save(state, tmp_path / "plain.pt")
    handle = wrap(slow)(state, str(tmp_path / "x.pt"))
    change(state)
    gate.open()
    handle.result()

    assert records(tmp_path / "x.pt") == records(tmp_path / "plain.pt")


class Trainer:
    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def save(self, path: str) -> None:
        torch.save(self.model.state_dict(), path)

    @wrap
    def decorated(self, path: str) -> None:
        torch.save(self.model.state_dict(), path)

    @staticmethod
    @wrap
    def static(model: torch.nn.Module, path: str) -> None:
        torch.save(model.state_dict(), path)

    @classmethod
    @wrap
    def of_class(cls, model: torch.nn.Module, path: str) -> None:
        torch.save(model.state_dict(), path)

    def __call__(self, path: str) -> None:
        self.save(path)


def save_model(model: torch.nn.Module, path: str) -> None:
    torch.save(model.state_dict(), path)


FORMS: dict[str, Callable[[torch.nn.Module, str], SaveHandle]] = {
    "function": lambda model, path: wrap(save_model)(model, path),
    "bound method": lambda model, path: wrap(Trainer(model).save)(path),
    "decorated method": lambda model, path: Trainer(model).decorated(path),
    "static method": lambda model, path: Trainer.static(model, path),
    "class method": lambda model, path: Trainer.of_class(model, path),
    "object": lambda model, path: wrap(Trainer(model))(path),
    "partial": lambda model, path: wrap(functools.partial(save_model, model))(path),
    "partial by name": lambda model, path: wrap(functools.partial(save_model, model=model))(path=path),
    "partial of a method": lambda model, path: wrap(functools.partial(Trainer(model).save))(path),
    "decorator with options": lambda model, path: wrap(destination="path")(save_model)(model, path),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_function_works_on_a_snapshot(tmp_path, form):
    model = torch.nn.Linear(100, 100)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = Gate()
    blocking = wrap(lambda path: (first.passed(), save_text("", path)))(str(tmp_path / "first"))
    handle = FORMS[form](model, str(tmp_path / "x.pt"))
    with torch.no_grad():
        model.weight.zero_()
    first.open()
    blocking.result()
    handle.result()

    assert all(torch.equal(loaded(tmp_path / "x.pt")[name], tensor) for name, tensor in before.items())


def test_a_function_that_closes_over_tensors_is_refused(tmp_path):
    state = {"model": [torch.ones(3)]}

    with pytest.raises(UnsupportedStateError, match=r"uses state\.model\.0 .* make it an argument"):
        wrap(lambda path: torch.save(state, path))(tmp_path / "x.pt")


def test_gradients_and_hooks_are_what_the_function_would_have_found(tmp_path):
    seen = []

    def save(model: torch.nn.Module, path: str) -> None:
        seen.append({name: (p.grad, p.requires_grad, p.device) for name, p in model.named_parameters()})
        save_text("x", path)

    model = Tied()
    model.register_forward_hook(lambda *_: None)
    model(torch.ones(3)).sum().backward()
    model.outer.bias.grad = None
    want = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    handle = wrap(save)(model, str(tmp_path / "x"))
    model.zero_grad(set_to_none=False)
    handle.result()

    assert {name: grad is None or torch.equal(grad, want[name]) for name, (grad, _, _) in seen[0].items()}
    assert all(torch.equal(grad, want[name]) for name, (grad, _, _) in seen[0].items() if grad is not None)
    assert seen[0]["outer.bias"][0] is None
    assert all(requires_grad for _, requires_grad, _ in seen[0].values())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_function_runs_in_the_callers_grad_mode(tmp_path, mode):
    seen = []

    def save(p: torch.Tensor, path: str) -> None:
        seen.append(torch.is_grad_enabled())
        save_text("x", path)

    with mode():
        wrap(save)(torch.nn.Parameter(torch.ones(3)), str(tmp_path / "x")).result()

    assert seen == [mode is torch.enable_grad]


def test_numpy_sees_parameters_where_it_would_have_seen_them(tmp_path):
    p = torch.nn.Parameter(torch.arange(3.0))
    with torch.no_grad():
        wrap(lambda p, path: np.save(path, p.numpy()))(p, str(tmp_path / "x.npy")).result()

    assert np.load(tmp_path / "x.npy").tolist() == [0, 1, 2]


def test_what_the_function_does_to_its_arguments_is_not_seen(tmp_path):
    def save(state: dict[str, Any], path: str) -> None:
        state["w"].zero_()
        state.pop("note")
        torch.save(state, path)

    state = {"w": torch.ones(3), "note": "x"}
    wrap(save)(state, str(tmp_path / "x.pt")).result()

    assert state["note"] == "x"
    assert bool((state["w"] == 1).all())


# --- the guard ---------------------------------------------------------------------------------------------------


def guarded(count: int, mib: int = 4) -> tuple[list[torch.nn.Parameter], list[torch.optim.Optimizer]]:
    params = [torch.nn.Parameter(torch.ones(mib * MIB // 4)) for _ in range(count)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params, [torch.optim.SGD([p], lr=1.0) for p in params]


@pytest.fixture
def held_copiers(gate, monkeypatch):
    """What is copied in the background waits for the gate."""
    copy_later = Snapshot._fill_later

    def held(snapshot: Snapshot) -> None:
        gate.passed()
        copy_later(snapshot)

    monkeypatch.setattr(Snapshot, "_fill_later", held)
    return gate


def test_guarded_parameters_are_copied_while_training_goes_on_and_their_steps_wait(tmp_path, held_copiers):
    params, optimizers = guarded(2)
    handle = wrap(torch.save, guard=optimizers)(params, tmp_path / "x.pt")
    assert not handle.staging_completion.done()
    steps = [Call(optimizer.step) for optimizer in optimizers]
    for step in steps:
        step.wait_until_inside("hold")
    assert all(bool((p == 1).all()) for p in params)
    held_copiers.open()
    for step in steps:
        step.outcome()
    handle.wait_staged(60)
    handle.result()

    assert all(bool((p == 1).all()) for p in loaded(tmp_path / "x.pt"))
    assert all(bool((p == 0).all()) for p in params)


def test_a_guarded_parameter_that_is_changed_elsewhere_fails_the_save_by_name(tmp_path, held_copiers):
    (p,), optimizers = guarded(1)
    handle = wrap(torch.save, guard=optimizers[0])({"a": {"w": p}}, tmp_path / "x.pt")
    p.data.add_(1)
    held_copiers.open()

    with pytest.raises(TornSnapshotError, match=r"obj\.a\.w"):
        handle.result()
    assert names(tmp_path) == []


def test_what_the_guard_does_not_speak_of_is_copied_before_the_call_returns(tmp_path, held_copiers):
    flat = torch.ones(2 * MIB)
    first, second = torch.nn.Parameter(flat[:MIB]), torch.nn.Parameter(flat[MIB:])
    handle = wrap(torch.save, guard=torch.optim.SGD([first]))([flat, first, second], tmp_path / "x.pt")

    assert handle.staging_completion.done()
    flat.zero_()
    held_copiers.open()
    handle.result()
    assert all(bool((t == 1).all()) for t in loaded(tmp_path / "x.pt"))


def test_a_guarded_optimizer_can_be_an_argument(tmp_path):
    _, (optimizer,) = guarded(1)
    save = wrap(lambda o, path: torch.save(o.state_dict(), path), guard=optimizer)
    save(optimizer, str(tmp_path / "x.pt")).result()
    optimizer.step()
    save(optimizer, str(tmp_path / "x.pt")).result()

    assert loaded(tmp_path / "x.pt")["param_groups"][0]["lr"] == 1.0


def test_a_guard_that_is_none_is_refused_when_the_function_is_wrapped():
    with pytest.raises(TypeError, match="guard must be a torch optimizer"):
        wrap(torch.save, guard=3)


# --- which argument is the destination ---------------------------------------------------------------------------


def test_the_destination_is_found_by_its_name_by_being_the_only_path_or_is_said(tmp_path):
    def by_name(a: str, save_directory: str) -> None:
        Path(save_directory).write_text(a)

    def only_path(where: Path, a: int) -> None:
        where.write_text(str(a))

    def said(a: str, b: str, /, *rest: str, **more: str) -> None:
        Path(more.get("c") or (*rest, b)[0]).write_text(a)

    wrap(by_name)("1", str(tmp_path / "1")).result()
    wrap(by_name)(save_directory=str(tmp_path / "2"), a="2").result()
    wrap(only_path)(tmp_path / "3", 3).result()
    wrap(said, destination=1)("4", str(tmp_path / "4")).result()
    wrap(said, destination="b")("5", str(tmp_path / "5")).result()
    wrap(said, destination=2)("6", "x", str(tmp_path / "6")).result()
    wrap(said, destination="c")("7", "x", c=str(tmp_path / "7")).result()
    wrap(by_name, destination=1)("8", save_directory=str(tmp_path / "8")).result()

    assert [(tmp_path / name).read_text() for name in "12345678"] == [*"12345678"]


def test_the_destination_may_be_the_default_of_its_argument(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def by_name(number: int, path: str = "a") -> None:
        Path(path).write_text(str(number))

    def said(number: int, *, where: Path = Path("b")) -> None:
        where.write_text(str(number))

    wrap(by_name)(1).result()
    wrap(said, destination="where")(2).result()

    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("1", "2")


@pytest.mark.parametrize(
    ("fn", "arguments", "message"),
    [
        (lambda a, b: None, ("x", "y"), "several of them may; say so"),
        (lambda folder, filename: None, ("x", "y"), "several of them may; say so"),
        (lambda a, b: None, (1, 2), "none of them may; say so"),
        (lambda path: None, (), "missing a required argument: 'path'"),
        (lambda path: None, ("a", "b"), "too many positional arguments"),
        (
            torch.save,
            (1, io.BytesIO()),
            "given a BytesIO to write to; a wrapped function needs a path or URL",
        ),
        (torch.save, ("text", io.BytesIO()), "given a BytesIO to write to"),
        (lambda path: None, (b"bytes",), "none of them may"),
    ],
)
def test_a_destination_that_cannot_be_told_is_an_error_of_the_call(fn, arguments, message):
    with pytest.raises(TypeError, match=message):
        wrap(fn)(*arguments)


def test_a_destination_that_the_function_does_not_have_is_refused_when_it_is_wrapped():
    with pytest.raises(TypeError, match="has no argument 'where'; it has obj, f, "):
        wrap(torch.save, destination="where")
    with pytest.raises(TypeError, match="was called without its destination 7"):
        wrap(torch.save, destination=7)(1, "x")
    with pytest.raises(TypeError, match="given a int to write to"):
        wrap(lambda a, b: None, destination="b")("x", 1)


def test_a_builtin_function_without_a_signature_can_be_wrapped(tmp_path):
    handle = wrap(dict.__setitem__, destination=1)({}, str(tmp_path / "x"), 2)

    assert isinstance(handle.exception(), NothingWrittenError)


@pytest.mark.parametrize(
    ("kind", "given"),
    [(str, "x.txt"), (Path, Path("x.txt")), (str, os.DirEntry)],
    ids=["str", "Path", "other"],
)
def test_the_function_gets_the_kind_of_path_that_it_was_given(tmp_path, kind, given):
    seen = []

    def save(path: Any) -> None:
        seen.append(path)
        Path(path).write_text("x")

    if given is os.DirEntry:
        (tmp_path / "x.txt").touch()
        (given,) = os.scandir(tmp_path)
        wrap(save)(given).result()
    else:
        wrap(save)(kind(tmp_path / given)).result()

    assert isinstance(seen[0], kind)
    assert os.path.basename(seen[0]) == "x.txt"
    assert (tmp_path / "x.txt").read_text() == "x"


# --- what cannot be wrapped --------------------------------------------------------------------------------------


async def coroutine(path: str) -> None:
    """Writes when it is awaited."""


def generator(path: str) -> Any:
    yield path


async def async_generator(path: str) -> Any:
    yield path


@pytest.mark.parametrize(
    "fn", [coroutine, generator, async_generator, functools.partial(coroutine)], ids=lambda fn: str(fn)[:20]
)
def test_what_does_not_write_when_it_is_called_cannot_be_wrapped(fn):
    with pytest.raises(TypeError, match="when it is awaited or gone through; wrap a plain function"):
        wrap(fn)


@pytest.mark.parametrize("value", ["out.pt", 3, {"w": 1}])
def test_what_is_no_function_cannot_be_wrapped(value):
    with pytest.raises(TypeError, match=r"wrap takes a function, not a .*; write wrap"):
        wrap(value)


def test_a_wrapped_function_looks_like_the_one_that_it_wraps():
    save = wrap(torch.save)

    assert save.__name__ == "save"
    assert save.__wrapped__ is torch.save
    assert save.__doc__ == torch.save.__doc__


def test_arguments_that_cannot_be_copied_are_refused_and_nothing_is_kept(tmp_path):
    with pytest.raises(UnsupportedStateError, match="save_text cannot be called later"):
        wrap(save_text)(threading.Lock(), str(tmp_path / "x"))
    assert names(tmp_path) == []

    wrap(save_text)("x", str(tmp_path / "x")).result()  # nor is the destination taken


# --- functions that fail -----------------------------------------------------------------------------------------


class Odd(BaseException):
    """No Exception."""


def half_done(error: BaseException) -> Callable[[Any, str], None]:
    def save(state: Any, path: str) -> None:
        os.makedirs(path)
        Path(path, "part").write_text("half")
        Path(path + ".json").write_text("{}")
        raise error

    return save


@pytest.mark.parametrize(
    "error",
    [
        Thrown("x"),
        OSError(28, "no space"),
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        Odd(),
    ],
    ids=repr,
)
def test_what_a_function_raises_is_on_the_handle_and_nothing_is_visible(tmp_path, error):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "old").write_text("old")
    save = wrap(half_done(error))
    handle = save(torch.ones(3), str(tmp_path / "y"))
    assert handle.exception() is error
    with pytest.raises(type(error)):
        handle.result()
    assert names(tmp_path) == ["x/old"]

    assert wrap(save_text)("next", str(tmp_path / "y")).result().status == "committed"


@pytest.mark.parametrize("error", [StopIteration(1), StopAsyncIteration(), GeneratorExit()], ids=repr)
def test_what_python_itself_uses_to_end_things_does_not_hang_the_handle(tmp_path, error):
    handle = wrap(half_done(error))(1, str(tmp_path / "y"))
    found = handle.exception(60)

    assert error in (found, found.__cause__)
    assert names(tmp_path) == []


def test_a_stream_that_fails_in_the_middle_leaves_nothing(tmp_path):
    class Unpicklable:
        def __reduce__(self) -> Any:
            raise Thrown("in the middle")

        def __deepcopy__(self, memo: Any) -> Unpicklable:
            return self

    (tmp_path / "x.pt").write_text("old")
    handle = wrap(torch.save)([torch.ones(9 * MIB), Unpicklable()], tmp_path / "x.pt")

    assert isinstance(handle.exception(), Thrown)
    assert names(tmp_path) == ["x.pt"]
    assert (tmp_path / "x.pt").read_text() == "old"


def write_nothing(path: str) -> None:
    """Not a byte."""


def write_elsewhere(path: str) -> None:
    Path(path).parent.parent.joinpath("elsewhere").write_text("x")


def leave_open(path: str) -> None:
    leave_open.file = open(path, "w")  # noqa: SIM115
    leave_open.file.write("in the buffer")


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (write_nothing, "wrote nothing to the path that it was given; .* is left as it was"),
        (write_elsewhere, "wrote nothing to the path that it was given"),
        (leave_open, "left x open, so nobody knows whether all of it is written; close it before returning"),
        (os.mkdir, "wrote nothing to the path that it was given"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_function_that_does_not_write_or_end_its_file_is_an_error(tmp_path, save, message):
    (tmp_path / "link").symlink_to(tmp_path)
    handle = wrap(save)(str(tmp_path / "link" / "x"))

    with pytest.raises(NothingWrittenError, match=message):
        handle.result()
    assert "x" not in names(tmp_path)
    if save is leave_open:
        leave_open.file.close()


def test_a_file_that_is_left_to_the_collector_is_an_error(tmp_path):
    """Which may close it without what Python has buffered for it."""

    def save(path: str) -> None:
        file = open(path, "w")  # noqa: SIM115
        file.write("x")
        circle = [file]
        circle.append(circle)

    threshold = gc.get_threshold()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of whoever collects it in the end
        gc.set_threshold(0)  # no thread's allocation sets the collector off
        try:
            with pytest.raises(NothingWrittenError, match="left x open"):
                wrap(save)(str(tmp_path / "x")).result()
        finally:
            gc.set_threshold(*threshold)
            gc.collect()
    assert names(tmp_path) == []


def test_a_file_that_is_only_read_may_stay_open(tmp_path):
    kept = []

    def save(path: str) -> None:
        Path(path).write_text("x")
        kept.append(open(path))  # noqa: SIM115

    wrap(save)(str(tmp_path / "x")).result()
    kept[0].close()


def test_a_stream_without_a_byte_is_an_error(tmp_path):
    (tmp_path / "x").write_text("old")
    handle = wrap(lambda f: None, file_object=True)(str(tmp_path / "x"))

    with pytest.raises(NothingWrittenError, match="wrote nothing"):
        handle.result()
    assert (tmp_path / "x").read_text() == "old"


def test_a_failure_keeps_no_copies(tmp_path):
    gone = []

    def save(state: Any, path: str) -> None:
        gone.append(weakref.ref(state["w"]))
        inner(state)

    def inner(state: Any) -> None:
        try:
            state["w"].view(7)
        except RuntimeError as error:
            raise Thrown("x") from error

    gone_too = torch.ones(1000)
    gone.append(weakref.ref(gone_too))
    handle = wrap(save)({"w": gone_too}, str(tmp_path / "x"))
    del gone_too
    error = handle.exception()

    assert isinstance(error, Thrown)
    assert error.__traceback__ is not None
    assert [ref() for ref in gone] == [None, None]


def test_a_finished_handle_keeps_neither_the_arguments_nor_their_copies(tmp_path):
    gone = []

    def save(state: Any, path: str) -> None:
        gone.append(weakref.ref(state["w"]))
        torch.save(state, path)

    w = torch.ones(1000)
    gone.append(weakref.ref(w))
    handle = wrap(save)({"w": w}, str(tmp_path / "x"))
    del w
    handle.result()

    assert [ref() for ref in gone] == [None, None]


def test_a_function_that_saves_in_the_background_itself_is_refused(tmp_path):
    handle = wrap(async_ckpt.save)({"w": torch.ones(3)}, tmp_path / "x.tar")

    with pytest.raises(ValueError, match="nothing can be saved there in the background"):
        handle.result()
    assert names(tmp_path) == []


def test_wrapped_functions_may_write_into_a_folder_that_is_packed(tmp_path):
    with async_ckpt.pack(tmp_path / "x.tar") as folder:
        wrap(torch.save)(torch.ones(3), folder / "x.pt").result()
        async_ckpt.save({"w": torch.ones(3)}, folder / "x.tar").result()
    folder.handle.result()

    with async_ckpt.unpack(tmp_path / "x.tar") as again:
        assert sorted(os.listdir(again)) == ["x.pt", "x.tar"]


# --- the handle --------------------------------------------------------------------------------------------------


def test_the_report_has_the_numbers_of_the_save(tmp_path):
    handle = wrap(torch.save)([torch.ones(1000), torch.ones(10)], tmp_path / "x.pt")
    report = handle.result()

    assert isinstance(report, SaveReport)
    assert (report.status, report.step, report.path) == ("committed", None, str(tmp_path / "x.pt"))
    assert report.num_bytes == (tmp_path / "x.pt").stat().st_size
    assert report.num_tensors == 2
    assert report.retries == 0
    assert 0 < report.stall_seconds <= report.total_seconds
    assert report.write_seconds + report.commit_seconds <= report.total_seconds
    assert [(d.path, d.num_bytes) for d in report.destinations] == [(report.path, report.num_bytes)]
    assert handle.path == report.path
    assert handle.done()


def test_the_progress_ends_with_all_of_it(tmp_path, gate):
    def save(state: Any, path: str) -> None:
        gate.passed()
        Path(path).write_bytes(bytes(10 * state.nbytes))

    handle = wrap(save)(torch.ones(1000), str(tmp_path / "x"))
    gate.wait_reached()
    assert handle.progress == async_ckpt.Progress(4096, 4096, 0)
    gate.open()
    handle.result()

    assert handle.progress.fraction == 1.0
    assert handle.progress.written_bytes == 40_000


async def test_a_handle_can_be_awaited(tmp_path):
    report = await wrap(torch.save)(torch.ones(3), tmp_path / "x.pt")
    assert report.status == "committed"
    with pytest.raises(Thrown):
        await wrap(half_done(Thrown()))(1, str(tmp_path / "y"))


def test_calls_are_made_in_their_order_and_one_at_a_time(tmp_path):
    order: list[Any] = []

    def save(number: int, path: str) -> None:
        order.append(number)
        save_text(str(number), path)
        order.append(number)

    save = wrap(save)
    handles = [save(number, str(tmp_path / str(number))) for number in range(10)]
    for handle in reversed(handles):
        handle.result()

    assert order == [number for number in range(10) for _ in range(2)]


def test_the_function_runs_on_another_thread_and_may_start_its_own(tmp_path):
    seen = []

    def save(path: str) -> None:
        seen.append(threading.current_thread())
        writer = threading.Thread(target=save_text, args=("x", path))
        writer.start()
        writer.join()

    wrap(save)(str(tmp_path / "x")).result()

    assert isinstance(seen[0], LibraryThread)
    assert (tmp_path / "x").read_text() == "x"


def test_many_threads_may_call_at_once(tmp_path):
    save = wrap(torch.save)
    state = torch.arange(10_000)
    calls = [Call(lambda n=n: save(state + n, tmp_path / f"{n}.pt").result()) for n in range(16)]
    for call in calls:
        call.outcome()

    for number in range(16):
        assert torch.equal(loaded(tmp_path / f"{number}.pt"), state + number)


def test_a_failure_that_nobody_looked_at_is_told_at_the_next_call(tmp_path):
    handle = wrap(half_done(Thrown("lost")))(1, str(tmp_path / "y"))
    ended = threading.Event()
    handle.add_done_callback(lambda _: ended.set())
    assert ended.wait(60)
    with pytest.warns(RuntimeWarning, match="y was not saved: Thrown: lost") as told:
        wrap(save_text)("x", str(tmp_path / "x")).result()
    assert told[0].filename == __file__
    assert handle.exception() is not None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrap(save_text)("x", str(tmp_path / "x")).result()


def test_a_hundred_calls_leave_no_threads_descriptors_or_memory(tmp_path):
    save = wrap(torch.save)

    def count() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0

    def call(number: int) -> None:
        save(torch.ones(number * 7919 % 300_000), tmp_path / f"{number % 3}.pt").result()

    for number in range(10):
        call(number)
    before = count()
    for number in range(100):
        call(number)

    names(tmp_path)
    threads, files = count()
    assert threads <= before[0] + 4  # a crew's threads may still be about to end
    assert files <= before[1] + 2
    assert default.host_memory()._idle_bytes() <= 32 * MIB


def test_release_gives_the_memory_back(tmp_path):
    wrap(torch.save)(torch.ones(1000), tmp_path / "x.pt").result()
    async_ckpt.release()

    assert repr(default.host_memory()) == "<HostMemory 0 bytes lent, 0 buffers idle>"


# --- functions within functions ----------------------------------------------------------------------------------


def test_waiting_for_a_handle_in_a_wrapped_function_raises_at_once(tmp_path):
    inner = wrap(torch.save)
    handles = []

    def outer(state: Any, path: str) -> None:
        handles.append(inner(state, elsewhere))
        handles[0].result()

    elsewhere = str(tmp_path / "inner.pt")
    with pytest.raises(RuntimeError, match="must not wait for a save"):
        wrap(outer)(torch.ones(3), str(tmp_path / "outer")).result()
    handles[0].result()

    assert names(tmp_path) == ["inner.pt"]


def test_a_wrapped_function_may_begin_another_save_elsewhere_whatever_memory_is_free(tmp_path, monkeypatch):
    small = async_ckpt.staging.whole.HostMemory(1000)
    monkeypatch.setattr(default, "_host_memory", small)
    inner = wrap(torch.save)
    handles = []

    def outer(state: Any, path: str) -> None:
        handles.append(inner(state, elsewhere))
        torch.save(state, path)

    elsewhere = str(tmp_path / "inner.pt")
    wrap(outer)(torch.ones(1000), str(tmp_path / "outer.pt")).result(60)
    handles[0].result(60)

    assert records(tmp_path / "inner.pt") == records(tmp_path / "outer.pt")


def test_a_wrapped_function_that_is_called_into_the_folder_of_another_is_refused(tmp_path):
    save_weights = wrap(safetensors.torch.save_file)

    def save(state: Any, folder: str) -> None:
        os.makedirs(folder)
        save_weights(state, os.path.join(folder, "model.safetensors"))

    def save_at_once(state: Any, folder: str) -> None:
        os.makedirs(folder)
        save_weights.__wrapped__(state, os.path.join(folder, "model.safetensors"))

    with pytest.raises(ValueError, match=r"nothing can be saved there in the background.*__wrapped__"):
        wrap(save)({"w": torch.ones(3)}, str(tmp_path / "x")).result()
    assert names(tmp_path) == []

    wrap(save_at_once)({"w": torch.ones(3)}, str(tmp_path / "x")).result()
    assert names(tmp_path) == ["x/model.safetensors"]


def test_a_function_that_is_wrapped_twice_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing can be saved there in the background"):
        wrap(wrap(save_text))("x", str(tmp_path / "x")).result()
    assert names(tmp_path) == []


def test_a_callback_may_call_a_wrapped_function(tmp_path):
    save, ended = wrap(save_text), threading.Event()
    handles = []

    def again(_: SaveHandle) -> None:
        handles.append(save("second", str(tmp_path / "b")))
        ended.set()

    save("first", str(tmp_path / "a")).add_done_callback(again)
    assert ended.wait(60)
    handles[0].result()

    assert names(tmp_path) == ["a", "b"]


def test_modules_and_their_types_come_through(tmp_path):
    state = types.SimpleNamespace(module=json, kind=torch.nn.Linear, dtype=torch.bfloat16)
    seen = []
    wrap(lambda s, path: (seen.append(s), save_text("x", path)))(state, str(tmp_path / "x")).result()

    assert seen[0] is not state
    assert (seen[0].module, seen[0].kind, seen[0].dtype) == (json, torch.nn.Linear, torch.bfloat16)
