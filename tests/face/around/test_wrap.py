"""`wrap`: what a function writes in the background is what it would have written at once, of one instant."""

import collections
import dataclasses
import functools
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from racing import Call, Gate
from states import MIB
from wrapped import loaded, names, records, save_text

from async_ckpt import SaveHandle, TornSnapshotError, UnsupportedStateError, wrap
from async_ckpt.core.spec import DTYPES
from async_ckpt.core.staging.snapshot import Snapshot

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

    wrap(dump, file_object=True)([1, 2], tmp_path / "x.pkl").result()
    wrap(pickle.dump, file_object=True)([1, 2], tmp_path / "y.pkl").result()

    for name in ("x.pkl", "y.pkl"):
        assert pickle.loads((tmp_path / name).read_bytes()) == [1, 2]
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
