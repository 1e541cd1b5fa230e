"""Saves of trainers, by our plug-ins and by the frameworks themselves: the cost of a save for the training.

In: a setting. Out: figures by name. Knows nothing of: how a plug-in saves.

Under each framework, the same model trains by the same steps, and the ways to save take turns: a bare
`AsyncCheckpointer`, the plug-in in its layouts, and the framework.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple

import torch

from .figures import Saves, Trains, Window, one_thread, slowed
from .limits import sync
from .setting import Setting
from .table import Figure, Target, above_noise

PACKAGES: Final = ("transformers", "accelerate", "pytorch_lightning")
_VOCABULARY: Final = 50257
_LENGTH: Final = 16


class Gpt2:
    """GPT-2 with 124 million parameters under AdamW, by Transformers' own class, or a small one for toys."""

    def __init__(self, setting: Setting) -> None:
        transformers: Any = import_module("transformers")
        is_toy = setting.training_bytes < 2**30
        shape: dict[str, Any] = (
            {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000} if is_toy else {"vocab_size": _VOCABULARY}
        )
        self.model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, use_cache=False))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, _unchanged)
        self.tokens = torch.randint(shape["vocab_size"], (1, _LENGTH))
        self.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()


class Way:
    """One way to save, repeatedly, each time into a new folder or file, which is deleted afterwards."""

    def __init__(
        self,
        save: Callable[[int], object],
        wait: Callable[[], Any],
        path: Callable[[int], Path],
        *,
        is_durable: bool = True,
    ) -> None:
        """`save` begins save number N, or makes a complete save that is not synced. `path` maps N to its path."""
        self._save, self._wait, self._path_of, self._is_durable = save, wait, path, is_durable
        self._number, self._began = 0, 0.0

    @property
    def _path(self) -> Path:
        return self._path_of(self._number)

    def begin(self) -> Future[Any]:
        self._number += 1
        self._began = perf_counter()
        handle = self._save(self._number)
        if isinstance(handle, Future):
            return handle
        ended: Future[Any] = Future()
        ended.set_result(None)
        return ended

    def end(self, handle: Future[Any]) -> Took:
        handle.result()
        seconds = perf_counter() - self._began
        self._wait()
        self._delete()
        return Took(seconds)

    def durable_seconds(self) -> float:
        """Seconds from the call until everything is durable."""
        handle = self.begin()
        handle.result()
        if not self._is_durable:
            sync(self._path)
        seconds = perf_counter() - self._began
        self._wait()
        self._delete()
        return seconds

    def _delete(self) -> None:
        if self._path.is_dir():
            shutil.rmtree(self._path)
        else:
            self._path.unlink()


class Took(NamedTuple):
    """The seconds of a save, from the call until it is durable, or until a framework has written it."""

    total_seconds: float


class Costs(NamedTuple):
    """The costs of the saves of one way."""

    windows: list[Window]
    durable: list[float]


def compared(setting: Setting, subject: Trains, ways: Mapping[str, Way | Saves]) -> dict[str, Costs]:
    """Measure all ways in turn, repeatedly. The first turn allocates memory, and does not count."""
    costs = {name: Costs([], []) for name in ways}
    with one_thread():
        for number in range(setting.few_rounds + 1):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                window, seconds = slowed(subject, ways[name]), ways[name].durable_seconds()
                if number:
                    costs[name].windows.append(window)
                    costs[name].durable.append(seconds)
    return costs


def figures_of(name: str, costs: Mapping[str, Costs]) -> dict[str, Figure]:
    """The figures of one framework. The keys of `costs` are "plain", "own", and the layouts of the plug-in."""
    plain, own = costs["plain"], costs["own"]
    rows = {}
    for layout, of in layouts_of(costs).items():
        limit = 1.25 if layout in ("archive", "async_ckpt") else 1.6
        what = f"{name}, layout {layout!r}"
        lost = _lost(of)
        note = f"{_milliseconds(lost)}; as many steps without a save are off by {_milliseconds([w.noise for w in of.windows])}"
        key = f"{name}_{layout}"
        rows[f"{key}_beside_plain"] = Figure(
            f"{what}: training seconds lost to a save", "s", "AsyncCheckpointer, same state", Target("≤", limit),
            _pairs(lost, _lost(plain)), note,
        )  # fmt: skip
        rows[f"{key}_beside_own"] = Figure(
            f"{what}: training seconds lost to a save", "s", f"the save of {name} itself", Target("≤", 1 / 8),
            _pairs(lost, _lost(own)),
        )  # fmt: skip
        rows[f"{key}_durable"] = Figure(
            f"{what}: call to durable", "s", f"the save of {name} itself, then fsync", Target("≤", 1.2),
            _pairs(of.durable, own.durable),
        )  # fmt: skip
    return rows


def beside_asynchronous(name: str, mode: str, costs: Mapping[str, Costs], own: Costs | str) -> dict[str, Figure]:
    """The cost of the layouts compared with the framework's own asynchronous save, or why it is not known."""
    rows = {}
    for layout, of in layouts_of(costs).items():
        pairs = [] if isinstance(own, str) else _pairs(_lost(of), _lost(own))
        rows[f"{name}_{layout}_beside_{mode.replace(' ', '_')}"] = Figure(
            f"{name}, layout {layout!r}: training seconds lost to a save", "s",
            f"the asynchronous save of {name} itself, {mode}", Target("≤", 1), pairs, own if isinstance(own, str) else "",
        )  # fmt: skip
    return rows


def layouts_of(costs: Mapping[str, Costs]) -> dict[str, Costs]:
    """The costs of the plug-in's layouts, without "plain" and the framework's own."""
    return {name: of for name, of in costs.items() if name.partition(" ")[0] not in ("plain", "own")}


def _lost(of: Costs) -> list[float]:
    return [window.lost for window in of.windows]


def _pairs(measured: list[float], limit: list[float]) -> list[tuple[float, float]]:
    return above_noise(zip(measured, limit, strict=True))


def _milliseconds(values: list[float]) -> str:
    return f"{median(values) * 1e3:.0f} ms"


def _unchanged(_: int) -> float:
    return 1.0


# --- Transformers ---------------------------------------------------------------------------------------------------


def transformers(setting: Setting) -> dict[str, Figure]:
    from transformers import Trainer

    from async_ckpt.integrations.transformers import AsyncCheckpointing

    class InBackground(AsyncCheckpointing):
        pass

    class Archived(AsyncCheckpointing):
        layout = "archive"

    subject = Gpt2(setting)
    folder = setting.folder / "transformers"
    plain = Saves(folder / "plain", subject.state, guard=subject.optimizer)
    with plain.checkpointer:
        ways: dict[str, Way | Saves] = {"plain": plain}
        for name, kind in (("own", Trainer), ("archive", Archived), ("transformers", InBackground)):
            ways[name] = _way_of_trainer(kind, folder / name, subject)
        return figures_of("transformers", compared(setting, subject, ways))


def _way_of_trainer(kind: type[Any], folder: Path, subject: Gpt2) -> Way:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    data: Any = [{"input_ids": subject.tokens[0], "labels": subject.tokens[0]}]
    trainer = kind(subject.model, arguments, train_dataset=data, optimizers=(subject.optimizer, subject.scheduler))
    trainer.train()

    def save(_: int) -> object:
        trainer.state.global_step += 1
        trainer._save_checkpoint(subject.model, None)
        return getattr(getattr(trainer, "_pending", None), "handle", None)

    is_durable = hasattr(trainer, "wait_for_checkpoint")
    wait = trainer.wait_for_checkpoint if is_durable else _nothing
    return Way(save, wait, lambda _: folder / f"checkpoint-{trainer.state.global_step}", is_durable=is_durable)


# --- Lightning ------------------------------------------------------------------------------------------------------


def lightning(setting: Setting) -> dict[str, Figure]:
    """Measured inside both trainings, since Lightning's Trainer saves asynchronously only while it trains."""
    from async_ckpt.integrations.lightning import AsyncTarCheckpointIO

    subject, folder = Gpt2(setting), setting.folder / "lightning"
    plain = Saves(folder / "plain", subject.state, guard=subject.optimizer)
    checkpoints = AsyncTarCheckpointIO()
    found: dict[str, Figure] = {}

    def measure(own: Any, ours: Any) -> None:
        ways: dict[str, Way | Saves] = {"plain": plain}
        ways["own"] = _way_of_lightning(own, folder / "own", lambda: None)
        ways["file"] = _way_of_lightning(ours, folder / "file", lambda: checkpoints._saves._queue._queued[-1].ended)
        found.update(figures_of("lightning", compared(setting, subject, ways)))

    def train_ours(own: Any) -> None:
        options = {"plugins": [checkpoints], "callbacks": [checkpoints.callback()]}
        _fit_lightning(subject, lambda ours: measure(own, ours), **options)

    with plain.checkpointer:
        _fit_lightning(subject, train_ours)
    return found


def _fit_lightning(
    subject: Gpt2, inside: Callable[[Any], None], *, callbacks: Sequence[Any] = (), **options: Any
) -> None:
    """Train by Lightning for one step, then call a function with its Trainer."""
    pl: Any = import_module("pytorch_lightning")

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = subject.model

        def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
            return self.model(tokens, labels=tokens).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return subject.optimizer

    class Inside(pl.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            inside(trainer)

    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = pl.Trainer(accelerator="cpu", max_steps=1, callbacks=[*callbacks, Inside()], **quiet, **options)
    data: Any = [subject.tokens[0]]
    trainer.fit(Module(), torch.utils.data.DataLoader(data))


def _way_of_lightning(trainer: Any, folder: Path, handle: Callable[[], Any]) -> Way:
    def path(number: int) -> Path:
        return folder / f"{number}.ckpt"

    def save(number: int) -> object:
        trainer.save_checkpoint(path(number))
        return handle()

    is_durable = trainer.strategy.checkpoint_io.__class__.__name__ == "AsyncTarCheckpointIO"
    return Way(save, _nothing, path, is_durable=is_durable)


# --- accelerate -----------------------------------------------------------------------------------------------------


def accelerate(setting: Setting) -> dict[str, Figure]:
    accelerator_of: Any = import_module("accelerate").Accelerator

    from async_ckpt.integrations.accelerate import AsyncState

    subject, folder = Gpt2(setting), setting.folder / "accelerate"
    accelerator = accelerator_of(cpu=True)
    accelerator.prepare(subject.model, subject.optimizer)
    archived, as_accelerate = AsyncState(accelerator), AsyncState(accelerator, layout="accelerate")
    plain = Saves(folder / "plain", subject.state, guard=subject.optimizer)
    with plain.checkpointer, archived, as_accelerate:
        ways: dict[str, Way | Saves] = {"plain": plain}
        ways["own"] = _way_of_accelerate(accelerator.save_state, _nothing, folder / "own", is_durable=False)
        ways["archive"] = _way_of_accelerate(archived.save_state, archived.wait, folder / "archive")
        ways["accelerate"] = _way_of_accelerate(as_accelerate.save_state, as_accelerate.wait, folder / "accelerate")
        return figures_of("accelerate", compared(setting, subject, ways))


def _way_of_accelerate(
    save_state: Callable[[str], object], wait: Callable[[], Any], folder: Path, *, is_durable: bool = True
) -> Way:
    def path(number: int) -> Path:
        return folder / f"step-{number}"

    return Way(lambda number: save_state(str(path(number))), wait, path, is_durable=is_durable)


def _nothing() -> None:
    pass


MEASURES: Final = {"transformers": transformers, "lightning": lightning, "accelerate": accelerate}
