"""Random generators in a state: stored without a pickle, and set where they are, so that whoever holds one goes on."""

import base64
import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from states import restored
from test_state_objects import member_names

import async_ckpt
from async_ckpt import AsyncCheckpointer, StateMismatchError, UnsupportedStateError, UntrustedObjectError
from async_ckpt.core.state import tree
from async_ckpt.core.state.generators import generator_node


class Die(random.Random):
    def roll(self) -> int:
        return self.randrange(6)


class Counting(random.Random):
    """Its state is more than that of its class."""

    drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return super().random()

    def getstate(self) -> Any:
        return self.drawn, super().getstate()

    def setstate(self, state: Any) -> None:
        self.drawn, inner = state
        super().setstate(inner)


def of_bits(name: str) -> Callable[[Any], Any]:
    return lambda seed: np.random.Generator(getattr(np.random, name)(seed))


def numbers(generator: np.random.Generator) -> list[float]:
    # A draw of 32 bits leaves the other half of a number in stock.
    return [generator.random(), int(generator.integers(2**30, dtype=np.uint32)), generator.standard_normal()]


def children(generator: np.random.Generator) -> list[float]:
    return [child.random() for child in generator.spawn(2)]


BITS = ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"]
# How one is made of a seed, and what it is asked for.
KINDS: dict[str, tuple[Callable[[int], Any], Callable[[Any], Any]]] = {
    "torch": (lambda seed: torch.Generator().manual_seed(seed), lambda g: torch.randn(3, generator=g).tolist()),
    "python": (random.Random, lambda g: [g.random(), g.gauss(0, 1)]),
    "class of python's": (Die, lambda g: [g.random(), g.gauss(0, 1)]),
    **{name: (of_bits(name), numbers) for name in BITS},
    **{f"bits of {name}": (getattr(np.random, name), lambda g: g.random_raw(5).tolist()) for name in BITS},
    "RandomState": (np.random.RandomState, lambda g: [g.rand(), g.randn(), g.randn()]),
    "RandomState of PCG64": (lambda seed: np.random.RandomState(np.random.PCG64(seed)), lambda g: [g.rand(), g.randn()]),
    "children": (np.random.default_rng, children),
    "children of a list": (lambda seed: np.random.default_rng([seed, 2**70]), children),
    "children of an array": (lambda seed: np.random.default_rng(np.arange(3) + seed), children),
    "children of a child": (lambda seed: np.random.default_rng(seed).spawn(2)[1], children),
}  # fmt: skip


@pytest.mark.parametrize("num_drawn", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_live_generator_goes_on_where_the_saved_one_was(kind, num_drawn, tmp_path):
    make, draw = KINDS[kind]
    saved, live = make(1), make(2)
    for _ in range(num_drawn):
        draw(saved)
    state = {"alone": live, "deep": [{"again": live}]}
    with AsyncCheckpointer(tmp_path) as ckpt:
        restored(ckpt, {"alone": saved, "deep": [{"again": saved}]}, state)
        loaded = ckpt.load()["alone"]
        assert "objects.pt" not in member_names(next(tmp_path.rglob("*.tar")))
    assert state["alone"] is state["deep"][0]["again"] is live
    expected = [draw(saved), draw(saved)]
    assert [draw(live), draw(live)] == expected
    assert type(loaded) is (random.Random if isinstance(saved, random.Random) else type(saved))
    assert [draw(loaded), draw(loaded)] == expected


def test_a_loader_resumes_the_order_of_its_own_generator(tmp_path):
    def orders(root: Path, until: int) -> list[Any]:
        generator = torch.Generator().manual_seed(7)
        loader = torch.utils.data.DataLoader(torch.arange(8), batch_size=8, shuffle=True, generator=generator)
        seen = []
        with AsyncCheckpointer(root) as ckpt:
            start = ckpt.restore({"data": generator})
            for epoch in range(0 if start is None else start + 1, until):
                seen += [batch.tolist() for batch in loader]
                ckpt.save({"data": generator}, step=epoch).result()
        return seen

    whole = orders(tmp_path / "whole", 4)
    assert orders(tmp_path / "run", 2) + orders(tmp_path / "run", 4) == whole


@pytest.fixture
def _own_generators() -> Any:
    before = async_ckpt.RngState().state_dict()
    yield
    async_ckpt.RngState().load_state_dict(before)


@pytest.mark.usefixtures("_own_generators")
def test_the_generators_of_the_process_itself_are_set(ckpt):
    state = {"torch": torch.default_generator, "numpy": np.random.mtrand._rand, "python": random._inst}
    ckpt.save(state, 1).result()
    expected = torch.rand(1).item(), np.random.rand(), random.random()
    ckpt.restore(state)
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected


@pytest.mark.parametrize("kind", ["torch", "python", "PCG64", "bits of Philox", "RandomState"])
def test_a_generator_that_was_pickled_still_sets_the_live_one(kind, ckpt, monkeypatch):
    make, draw = KINDS[kind]
    saved, live = make(1), make(2)
    draw(saved)
    with monkeypatch.context() as patched:  # as earlier versions did
        patched.setattr(tree, "generator_node", lambda _: None)
        ckpt.save({"g": saved}, 1).result()
    with pytest.raises(UntrustedObjectError, match=r"g: an? .*trust=True"):
        ckpt.restore({"g": live})
    state = {"g": live}
    ckpt.restore(state, trust=True)
    assert state["g"] is live
    assert draw(live) == draw(saved)


def test_a_generator_with_a_state_of_its_own_class_is_pickled_and_set(ckpt):
    saved, live = Counting(1), Counting(2)
    saved.random()
    state = restored(ckpt, {"g": saved}, {"g": live}, trust=True)
    assert state["g"] is live
    assert (live.drawn, live.random()) == (1, saved.random())


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "another bit generator": (
        np.random.default_rng(1), np.random.Generator(np.random.MT19937(1)),
        "g is a numpy Generator of MT19937 here and a numpy Generator of PCG64 in the checkpoint",
    ),
    "another package": (torch.Generator(), random.Random(1), r"is a random\.Random here and a torch\.Generator of cpu in"),
    "the system's": (random.Random(1), random.SystemRandom(), "g draws from the operating system and has no state"),
    "its state alone": (torch.Generator().get_state(), torch.Generator(), "g is a Generator here and a tensor in the"),
    "nothing": (None, np.random.default_rng(1), "g is a Generator here and a NoneType in the checkpoint"),
    "a list": (random.Random(1), [1], r"g is a list here and a random\.Random in the checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_generator_of_another_kind_is_refused_before_anything_is_set(kind, ckpt):
    saved, live, text = REFUSED[kind]
    ckpt.save({"first": torch.ones(1), "g": saved}, 1).result()
    state = {"first": torch.zeros(1), "g": live}
    with pytest.raises(StateMismatchError, match=text):
        ckpt.restore(state)
    assert not state["first"].any()
    assert state["g"] is live


def test_the_systems_generator_is_refused_when_it_is_saved(ckpt):
    with pytest.raises(UnsupportedStateError, match=r"g: a SystemRandom cannot be pickled .*leave it out"):
        ckpt.save({"g": random.SystemRandom()}, 1)


def test_a_generator_of_a_device_that_is_not_here_is_loaded_as_its_state():
    node = {"generator": ["torch", base64.b64encode(bytes(16)).decode(), "xpu:1"]}
    value, _ = tree.decode(node)
    loaded = tree.replaced(value, lambda leaf: leaf)
    assert torch.equal(loaded, torch.zeros(16, dtype=torch.uint8))
    assert "torch.Generator of xpu" in repr(value)


def test_a_snapshot_has_the_generators_of_its_instant(tmp_path):
    state = {"t": torch.Generator().manual_seed(3), "n": np.random.default_rng(3)}
    with async_ckpt.snapshot(state) as snap:
        expected = torch.rand(1, generator=state["t"]).item(), state["n"].random()
        assert (torch.rand(1, generator=snap["t"]).item(), snap["n"].random()) == expected
        async_ckpt.save(snap, tmp_path / "x.tar").result()
    loaded = async_ckpt.load(tmp_path / "x.tar")
    assert (torch.rand(1, generator=loaded["t"]).item(), loaded["n"].random()) == expected


def test_what_is_shown_of_a_generator_tells_states_apart(tmp_path):
    shown = []
    for seed in (1, 1, 2):
        async_ckpt.save({"g": random.Random(seed)}, tmp_path / "x.tar").result()
        (row,) = async_ckpt.inspect(tmp_path / "x.tar").names
        shown.append(row.value)
    assert shown[0] == shown[1] != shown[2]
    assert "random.Random" in shown[0]


def forged(change: Callable[[Any], Any], make: Any) -> Any:
    node = copy.deepcopy(generator_node(make()))
    change(node["generator"])
    return json.loads(json.dumps(node))


def philox() -> Any:
    return np.random.Generator(np.random.Philox(1))


HOSTILE: dict[str, Any] = {
    "another kind": forged(lambda facts: facts.__setitem__(0, "os.system"), philox),
    "another bit generator": forged(lambda facts: facts[1]["dict"].__setitem__("bit_generator", "seed"), philox),
    "position": forged(lambda facts: facts[1]["dict"].__setitem__("buffer_pos", 10**6), philox),
    "position of MT19937": forged(
        lambda facts: facts[1]["dict"]["state"]["dict"].__setitem__("pos", -1), lambda: np.random.MT19937(1)
    ),
    "short buffer": forged(lambda facts: facts[1]["dict"]["buffer"]["array"].__setitem__(1, ""), philox),
    "objects": forged(lambda facts: facts[1]["dict"]["buffer"]["array"].__setitem__(0, "|O8"), philox),
    "large pool": forged(lambda facts: facts[2]["dict"].__setitem__("pool_size", 10**12), philox),
    "large seed": forged(lambda facts: facts[2]["dict"].__setitem__("entropy", {"int": "0x" + "f" * 9999}), philox),
    "large number": forged(
        lambda facts: facts[1]["dict"]["state"]["dict"].__setitem__("inc", {"int": hex(2**999)}), lambda: np.random.PCG64(1)
    ),
    "nothing": {"generator": []},
    "a number": {"generator": 5},
    "short state": {"generator": ["torch", "AAAA", "cpu"]},
    "state of another": {"generator": ["torch", base64.b64encode(b"\xff" * 5056).decode(), "cpu"]},
    "no device": {"generator": ["torch", "AAAA", "nowhere"]},
    "few numbers": {"generator": ["python", {"tuple": [3, {"tuple": [1, 2]}, None]}]},
    "gauss": forged(lambda facts: facts[1]["tuple"].__setitem__(2, "x"), lambda: random.Random(1)),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_forged_state_is_refused(kind):
    with pytest.raises(ValueError):  # noqa: PT011
        tree.decode(HOSTILE[kind])
