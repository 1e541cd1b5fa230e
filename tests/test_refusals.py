"""What docs/trainers.md says is refused: each row of its tables is refused, with this message."""

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_classes import Scaled, scaled
from torch import nn

import async_ckpt
from async_ckpt import AsyncCheckpointer

REPOSITORY = Path(__file__).parent.parent


def rows(heading: str) -> list[list[str]]:
    """The cells of the table below a heading of the page, without its head."""
    page = (REPOSITORY / "docs/trainers.md").read_text(encoding="utf-8")
    section = page.partition(f"\n{heading}\n")[2].partition("\n#")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in lines[2:]]


class Copying(Scaled):
    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, *_: Any) -> Any:
        return cls(inner["codes"].clone(), inner["scale"].clone(), context)


class Opaque(torch.Tensor):
    @staticmethod
    def __new__(cls) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2,))

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


def freed() -> torch.Tensor:
    tensor = torch.ones(2)
    tensor.untyped_storage().resize_(0)
    return tensor


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def in_itself() -> list[Any]:
    inner: list[Any] = []
    inner.append(inner)
    return inner


def saved(make: Callable[[], Any]) -> Callable[[Path], Any]:
    return lambda folder: async_ckpt.save({"model": {"w": make()}}, folder / "x.tar")


def in_a_snapshot(folder: Path) -> None:
    with async_ckpt.snapshot({"model": {"w": Copying(torch.ones(2, 2), torch.ones(2, 1))}}) as snap:
        async_ckpt.save(snap, folder / "x.tar")


def with_a_mean(folder: Path) -> None:
    with AsyncCheckpointer(folder / "run", ema=async_ckpt.Ema(0.9)) as ckpt:
        ckpt.save({"model": {"w": scaled(2, 2)}}, 1).result()


REFUSED: dict[str, Callable[[Path], Any]] = {
    "a meta tensor": saved(lambda: torch.ones(2, device="meta")),
    "a fake tensor": saved(fake),
    "a lazy parameter": saved(lambda: nn.LazyLinear(2).weight),
    "a tensor whose storage was freed": saved(freed),
    "a tensor that torch itself quantises": saved(quantised),
    "a nested tensor of strided layout": saved(nested),
    "a wrapper subclass without torch's two methods": saved(Opaque),
    "a wrapped tensor whose context is not plain data": saved(lambda: scaled(2, 2, context={"f": abs})),
    "a context that contains itself": saved(lambda: scaled(2, 2, context={"f": in_itself()})),
    "a state that contains itself": saved(in_itself),
    "a snapshot of a class that copies its inner tensors": in_a_snapshot,
    "an export of a wrapped tensor": lambda folder: async_ckpt.export_hf({"w": scaled(2, 2)}, folder / "hf").result(),
    "a mean of a wrapped tensor": with_a_mean,
    "a folder name without the step in decimal digits": lambda _: async_ckpt.Naming(step_format="step-{:x}"),
}


def pattern(message: str) -> str:
    """A regular expression of a message, in which `…` stands for any text."""
    return ".+".join(map(re.escape, message.split("…")))


def test_each_refusal_of_a_state_has_a_row():
    assert [what for what, _ in rows("### In a state")] == [*REFUSED]


@pytest.mark.parametrize("what", REFUSED)
def test_each_refusal_of_a_state_says_what_its_row_says(what, tmp_path):
    message = dict(rows("### In a state"))[what]
    with pytest.raises((async_ckpt.CheckpointError, ValueError)) as caught:
        REFUSED[what](tmp_path)
    assert re.fullmatch(pattern(message), str(caught.value))


def restored(tensor: torch.Tensor, folder: Path) -> None:
    with AsyncCheckpointer(folder / "run") as ckpt:
        ckpt.save({"w": torch.ones(2, 50)}, 1).result()
        ckpt.restore({"w": tensor})


def pulled(tensor: torch.Tensor, folder: Path) -> None:
    module = nn.Linear(50, 2, bias=False)
    with async_ckpt.Publisher(folder / "root") as publisher, async_ckpt.Subscriber(folder / "root") as subscriber:
        publisher.publish(module, 1).result()
        module.weight.data = tensor
        subscriber.pull(module)


def published(tensor: torch.Tensor, folder: Path) -> None:
    with async_ckpt.Publisher(folder / "root") as publisher:
        publisher.publish({"w": tensor}, 1)


@pytest.mark.parametrize("num_bytes", [0, 4, 396])
@pytest.mark.parametrize(
    "use",
    [
        lambda tensor, folder: async_ckpt.save({"w": tensor}, folder / "x.tar"),
        lambda tensor, folder: async_ckpt.snapshot({"w": tensor}),
        lambda tensor, folder: async_ckpt.export_hf({"w": tensor}, folder / "hf"),
        lambda tensor, folder: async_ckpt.wrap(torch.save)({"w": tensor}, folder / "x.pt"),
        restored,
        pulled,
        published,
    ],
)
def test_a_tensor_whose_storage_ends_before_its_last_element_is_neither_read_nor_filled(use, num_bytes, tmp_path):
    tensor = torch.ones(2, 50)
    tensor.untyped_storage().resize_(num_bytes)
    size = f"{num_bytes} bytes" if num_bytes else "zero"

    try:
        with pytest.raises(async_ckpt.CheckpointError, match=rf"freed \(resized to {size}\); gather or unshard it"):
            use(tensor, tmp_path)
    finally:
        tensor.untyped_storage().resize_(400)  # pytest prints the tensor of a failed test


def test_a_view_of_the_front_of_a_storage_that_was_cut_is_saved(tmp_path):
    tensor = torch.arange(100.0)
    tensor.untyped_storage().resize_(40)

    async_ckpt.save(
        {"w": tensor[:10], "expanded": tensor[9:10].expand(500), "none": tensor[:0]}, tmp_path / "x.tar"
    ).result()

    assert async_ckpt.load(tmp_path / "x.tar")["w"].tolist() == [*range(10)]


def texts() -> Iterator[str]:
    """The strings of the package, with `…` for what is put into them."""
    for path in (REPOSITORY / "async_ckpt").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_each_refusal_of_several_ranks_and_of_a_trainer_is_as_its_row_says_and_has_a_test():
    """They are provoked where the ranks and the framework are; of the message, a test has three words or more."""
    known = {re.sub("…+", "…", text) for text in texts()}
    for what, message, test in rows("### On several ranks, and in trainers"):
        assert any(message in text for text in known), what
        tested = (REPOSITORY / "tests" / test).read_text(encoding="utf-8")
        words = message.split(" ")
        assert any(" ".join(words[at : at + 3]) in tested for at in range(len(words) - 2)), what
