"""What a pull into a module needs of the module, each time: all of it is filled, or nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exported import assert_same, state_of

from async_ckpt import NotCommittedError, Publisher, StateMismatchError, Subscriber, UnsupportedStateError
from async_ckpt.core.host import limits
from async_ckpt.core.saving.kept_memory import host_memory


def layers() -> torch.nn.Sequential:
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Versions 1 and 2 of two layers."""
    model = layers()
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(model, 1).result()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.view(-1)[0] = 1 / 3
        publisher.publish(model, 2).result()
    return tmp_path / "weights"


def resized(model: torch.nn.Sequential) -> None:
    model[1] = torch.nn.Linear(4, 5)


def shrunk(model: torch.nn.Sequential) -> None:
    del model[1]


def grown(model: torch.nn.Sequential) -> None:
    model.append(torch.nn.Linear(4, 4))


def in_half(model: torch.nn.Sequential) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize("change", [resized, shrunk, grown, in_half], ids=lambda f: f.__name__)
def test_a_module_that_has_changed_since_the_last_pull_is_refused_and_stays_as_it_is(change, root):
    model, subscriber = layers(), Subscriber(root)
    subscriber.pull(model, 1)
    change(model)
    were = state_of(model)
    with pytest.raises(StateMismatchError, match="does not fit the module"):
        subscriber.pull(model, 2)

    assert_same(state_of(model), were)


def meta(model: Any) -> None:
    model[1].to("meta")


def expanded(model: Any) -> None:
    model[1].bias = torch.nn.Parameter(torch.zeros(1).expand(4))


def copied(model: Any) -> None:
    model.register_state_dict_post_hook(lambda _, told, *__: told.update({"1.bias": told["1.bias"].clone()}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (meta, "'1.bias|'1.weight': a meta tensor has no values; materialise"),
        (expanded, "'1.bias': several of its elements share"),
        (copied, "'1.bias': the module's state dict has a copy"),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_a_module_that_cannot_be_filled_in_place_is_refused_by_name_before_anything_changes(change, told, root):
    model = layers()
    change(model)
    first = model[0].weight.detach().clone()
    with pytest.raises(UnsupportedStateError, match=told):
        Subscriber(root).pull(model)

    assert torch.equal(model[0].weight, first)


class Tied(torch.nn.Module):
    def __init__(self, *, tie: bool) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
        if tie:
            self.head.weight = self.embed.weight


class Overlapping(torch.nn.Module):
    """Two buffers of which the first ends where the second has its first half."""

    def __init__(self, memory: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("one", memory[:6])
        self.register_buffer("other", memory[3:])


def test_a_version_whose_weights_differ_where_tensors_of_the_module_overlap_is_refused(tmp_path):
    apart, memory = Overlapping(torch.arange(9.0)), torch.zeros(9)
    with Publisher(tmp_path / "weights") as publisher, Subscriber(tmp_path / "weights") as subscriber:
        publisher.publish(apart, 1).result()
        subscriber.pull(Overlapping(memory))
        assert memory.tolist() == [*range(9)]
        apart.other = torch.zeros(6)
        publisher.publish(apart, 2).result()
        with pytest.raises(StateMismatchError, match="one and other overlap in the memory of the module"):
            subscriber.pull(Overlapping(memory))
        with pytest.raises(UnsupportedStateError, match="the model has no weights"):
            subscriber.pull(torch.nn.Identity())
    assert memory.tolist() == [*range(9)]


def test_a_version_whose_weights_differ_where_the_module_ties_them_is_refused(tmp_path):
    with Publisher(tmp_path / "weights") as publisher:
        publisher.publish(Tied(tie=False), 1).result()
        tied = Tied(tie=True)
        were = state_of(tied)
        with pytest.raises(StateMismatchError, match=r"embed\.weight and head\.weight are one tensor"):
            Subscriber(tmp_path / "weights").pull(tied)
        assert_same(state_of(tied), were)
        one = Tied(tie=False)
        one.head.weight.data.copy_(one.embed.weight)
        publisher.publish(one, 2).result()
    Subscriber(tmp_path / "weights").pull(tied)
    assert torch.equal(tied.head.weight, one.head.weight)


def test_the_mode_of_the_caller_does_not_matter(root):
    """A rollout loop generates in inference mode, and models are made under a default device."""
    made, subscriber = layers(), Subscriber(root)
    with torch.inference_mode():
        of_inference = layers()
        subscriber.pull(made, 1)
        subscriber.pull(of_inference, 1)
    with torch.device("meta"):
        subscriber.pull(made)
    subscriber.pull(of_inference)

    assert_same(state_of(made), state_of(of_inference))
    assert made[0].weight.view(-1)[0] == torch.tensor(1 / 3)
    made(torch.ones(4)).sum().backward()  # which it could not after a change in inference mode


@pytest.mark.parametrize("wrong", ["1", 1.0, True, -1])
def test_a_version_that_is_no_number_is_refused(wrong, root):
    with pytest.raises(ValueError, match="version must be a whole number"):
        Subscriber(root).pull(layers(), wrong)


def test_a_version_that_is_not_there_leaves_no_folder(root, tmp_path):
    with pytest.raises(NotCommittedError, match="version 9 does not exist; there are 1 to 2"):
        Subscriber(root).pull(tmp_path / "local", 9)
    assert not (tmp_path / "local").exists()


def test_too_little_memory_for_a_module_is_said_in_words_of_the_pull(tmp_path, monkeypatch):
    model = torch.nn.Linear(700, 700)
    with Publisher(tmp_path / "weights", encoding=None) as publisher:
        publisher.publish(model.state_dict(), 1).result()
    host_memory().release()
    monkeypatch.setattr(limits, "free_memory_bytes", lambda: 10)
    with pytest.raises(MemoryError, match=r"a pull into a module, .* takes the size of the weights"):
        Subscriber(tmp_path / "weights").pull(model)


@pytest.mark.parametrize("wrong", [None, "1", 0, float("nan")])
def test_a_time_between_two_looks_that_is_none_is_refused(wrong, root):
    with pytest.raises(ValueError, match="poll_seconds must be a number of seconds above 0"):
        Subscriber(root).watch(poll_seconds=wrong)
