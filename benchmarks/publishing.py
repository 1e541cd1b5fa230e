"""The cost of published weights, compared with a save of the same snapshot, with the disk, and with other ways.

In: a setting. Out: figures by name. Knows nothing of: rollout engines.

The weights are bf16, and 1 % of their items change from version to version, as in a step of reinforcement learning.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, Final, Protocol

import torch

import async_ckpt
from async_ckpt import AsyncCheckpointer, Publisher, SaveReport, Subscriber
from async_ckpt.weights.publishing.difference import apply, encode

from .figures import one_thread, slowed
from .limits import SEGMENT_BYTES, WarmMemory, torch_save, whole_pages
from .setting import Setting, side_by_side
from .table import Figure, Target, above_noise
from .workloads import Training, tensors

Weights = dict[str, torch.Tensor]

PACKAGES: Final = ("zstandard", "safetensors")
_SHARE: Final = 0.01


def weights_of(num_bytes: int) -> Weights:
    """Matrices in bf16."""
    return {name: tensor.bfloat16() for name, tensor in tensors(2 * num_bytes).items()}


def change(weights: Weights) -> None:
    """Flip the last bit of random items of each tensor."""
    for tensor in weights.values():
        bits = tensor.view(torch.int16).view(-1)
        where = torch.randint(len(bits), (int(len(bits) * _SHARE),))
        bits[where] ^= 1


class Model(torch.nn.Module):
    """The weights as a module, which versions are pulled into."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        for name, tensor in weights.items():
            self.register_buffer(name.replace(".", "_"), torch.empty_like(tensor))


def full_versions(setting: Setting) -> dict[str, Figure]:
    """The bandwidth of an anchor of a held snapshot, compared with writing its bytes to the disk."""
    weights = weights_of(setting.state_bytes)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    warm = WarmMemory(whole_pages(num_bytes), SEGMENT_BYTES)
    versions = itertools.count(1)
    setting.folder.mkdir(parents=True)
    with (
        Publisher(setting.folder / "weights", encoding=None, keep=1) as publisher,
        async_ckpt.snapshot(weights) as snap,
    ):
        snap.completion.result()

        def publish() -> float:
            begin = perf_counter()
            publisher.publish(snap, next(versions)).result()
            seconds = perf_counter() - begin
            publisher._wait()
            return num_bytes / seconds / 1e9

        publish()
        pairs = side_by_side(
            setting.rounds,
            publish,
            lambda: num_bytes / warm.write_seconds(setting.folder / "raw", whole_pages(num_bytes)) / 1e9,
        )
    title = f"bandwidth of a full version of {num_bytes / 1e9:.2g} GB, from a snapshot to the disk"
    limit = "O_DIRECT pwrite + fsync"
    return {"publish_full": Figure(title, "GB/s", limit, Target("≥", 0.85), pairs)}


def deltas(setting: Setting) -> dict[str, Figure]:
    """The bytes of a delta, and the rates of one core."""
    weights = weights_of(setting.state_bytes // 2)
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    sizes, encoded, applied = [], [], []
    with one_thread():
        for _ in range(setting.rounds):
            base = {name: tensor.view(torch.uint8).flatten().clone() for name, tensor in weights.items()}
            change(weights)
            begin = thread_time()
            frames = {name: encode(tensor, base[name], "xor") for name, tensor in weights.items()}
            encoded.append(num_bytes / (thread_time() - begin) / 1e9)
            begin = thread_time()
            for name, made in frames.items():
                assert made is not None
                apply(memoryview(made[0]), base[name], "xor", made[1])
            applied.append(num_bytes / (thread_time() - begin) / 1e9)
            sizes.append(sum(len(made[0]) for made in frames.values() if made is not None))
    what = f"{num_bytes / 1e9:.2g} GB of bf16, of which {_SHARE:.0%} of the items have changed"
    return {
        "publish_bytes": Figure(
            f"bytes of a delta of {what}", "MB", "the weights", Target("≤", 0.05), [(size / 1e6, num_bytes / 1e6) for size in sizes]
        ),
        "publish_encode": Figure(
            "encoding that, on one core: xor, zstd, checksum", "GB/s", "wanted", Target("≥", 1), [(rate, 1.0) for rate in encoded]
        ),
        "publish_apply": Figure(
            "applying that, on one core: zstd, xor, checksum", "GB/s", "wanted", Target("≥", 1), [(rate, 0.8) for rate in applied]
        ),
    }  # fmt: skip


def handed_over(setting: Setting) -> dict[str, Figure]:
    """From the weights of one process to a module of another, by way of the disk."""
    weights = weights_of(setting.state_bytes // 2)
    model = Model(weights)
    named = {name.replace(".", "_"): tensor for name, tensor in weights.items()}
    folder = setting.folder
    folder.mkdir(parents=True)
    versions = itertools.count(1)
    figures: dict[str, Figure] = {}
    with (
        Publisher(folder / "full", encoding=None, keep=1) as full,
        Publisher(folder / "delta", anchor_every=10**6, keep=1) as delta,
        Subscriber(folder / "full") as from_full,
        Subscriber(folder / "delta") as from_delta,
    ):

        def ours(publisher: Publisher, subscriber: Subscriber) -> float:
            change(named)
            begin = perf_counter()
            publisher.publish(named, next(versions)).result()
            subscriber.pull(model)
            seconds = perf_counter() - begin
            publisher._wait()
            return seconds

        def by_torch() -> float:
            change(named)
            begin = perf_counter()
            torch_save(named, folder / "x.pt")
            model.load_state_dict(torch.load(folder / "x.pt", weights_only=True))
            return perf_counter() - begin

        def by_safetensors() -> float:
            from safetensors.torch import load_file, save_file

            change(named)
            begin = perf_counter()
            save_file(named, folder / "x.safetensors")
            with open(folder / "x.safetensors", "rb+") as file:
                os.fsync(file.fileno())
            model.load_state_dict(load_file(folder / "x.safetensors"))
            return perf_counter() - begin

        ways = {"full": lambda: ours(full, from_full), "delta": lambda: ours(delta, from_delta)}
        others = {
            "torch.save + fsync, torch.load": by_torch,
            "safetensors save_file + fsync, load_file": by_safetensors,
        }
        for measure in (*ways.values(), *others.values()):
            measure()
        for way, measured in ways.items():
            for limit, other in others.items():
                title = (
                    f"a {'full version' if way == 'full' else 'delta'}: published, durable, and in a module of another"
                )
                pairs = side_by_side(setting.few_rounds, measured, other)
                figures[f"publish_{way}_{limit.split('.')[0].split()[0]}"] = Figure(title, "s", limit, None, pairs)
    return figures


class More(Protocol):
    """Further work on the weights of a snapshot, besides its save."""

    def begin(self, snap: Any, step: int) -> Future[Any]: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


class Publishing:
    """Publish versions of the weights."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self._publisher = Publisher(folder, **{"anchor_every": 10**6, "keep": 1, **options})

    def begin(self, snap: Any, step: int) -> Future[Any]:
        return self._publisher.publish(snap["rollout"], step)

    def wait(self) -> None:
        self._publisher._wait()

    def close(self) -> None:
        self._publisher.close()


class Encoding:
    """The work that no delta can avoid: one thread encodes such weights against others, and keeps nothing."""

    def __init__(self, weights: Weights) -> None:
        self._bases = {name: tensor.view(torch.uint8).flatten().clone() for name, tensor in weights.items()}
        self._weights = {name: tensor.clone() for name, tensor in weights.items()}
        change(self._weights)
        self._thread = ThreadPoolExecutor(1)

    def begin(self, *_: Any) -> Future[Any]:
        return self._thread.submit(self._encode)

    def _encode(self) -> None:
        for name, tensor in self._weights.items():
            encode(tensor, self._bases[name], "xor")

    def wait(self) -> None:
        """Return at once: no work follows."""

    def close(self) -> None:
        self._thread.shutdown()


class Beside:
    """Saves of one snapshot each, with further work on it. For `slowed`."""

    def __init__(self, subject: Training, weights: Weights, folder: Path, more: More | None = None) -> None:
        self._subject, self._weights, self._more = subject, weights, more
        self._checkpointer = AsyncCheckpointer(folder / "run", keep=1)
        self._steps = itertools.count(1)

    def begin(self) -> Beside:
        change(self._weights)
        state = {**self._subject.state, "rollout": self._weights}
        step = next(self._steps)
        with async_ckpt.snapshot(state, guard=self._subject.optimizer) as snap:
            self._save = self._checkpointer.save(snap, step)
            self._others = [] if self._more is None else [self._more.begin(snap, step)]
        return self

    def done(self) -> bool:
        return all(handle.done() for handle in (self._save, *self._others))

    def end(self, _: Beside) -> SaveReport:
        for handle in self._others:
            handle.result()
        report = self._save.result()
        self._checkpointer.wait()
        if self._more is not None:
            self._more.wait()
        return report

    def lost(self) -> float:
        """Seconds that steps lose while they overlap all of this work, compared with as many others."""
        return slowed(self._subject, self).lost

    def close(self) -> None:
        self._checkpointer.close()
        if self._more is not None:
            self._more.close()


def beside_saves(setting: Setting) -> dict[str, Figure]:
    with _trained(setting) as (subject, weights):
        folder = setting.folder
        published = Beside(subject, weights, folder / "both", Publishing(folder / "weights"))
        alone = Beside(subject, weights, folder / "alone")
        to_save = _lost(setting, published, alone)
        encoded = Beside(subject, weights, folder / "encoded", Encoding(weights))
        again = Beside(subject, weights, folder / "again", Publishing(folder / "weights_again"))
        to_limit = _lost(setting, again, encoded)
    title = "training seconds lost to a save and a delta of one snapshot"
    limit = "the save, and a thread that encodes such a delta and keeps nothing"
    return {
        "publish_beside": Figure(title, "s", "the save alone", None, to_save),
        "publish_beside_limit": Figure("the same", "s", limit, Target("≤", 1.1), to_limit),
    }


def lost_beside(setting: Setting, title: str, **options: Any) -> Figure:
    """A training that publishes its weights from the snapshot of its checkpoint, compared with one that only saves it.

    `options` are those of the publisher.
    """
    with _trained(setting) as (subject, weights):
        both = Beside(subject, weights, setting.folder / "both", Publishing(setting.folder / "weights", **options))
        alone = Beside(subject, weights, setting.folder / "alone")
        return Figure(title, "s", "the save alone", Target("≤", 1.1), _lost(setting, both, alone))


@contextmanager
def _trained(setting: Setting) -> Iterator[tuple[Training, Weights]]:
    """A training on one thread, with a core free, and its weights in bf16."""
    with one_thread():
        subject = Training(setting.training_bytes * 3 // 4, batch=32)
        yield subject, {name: p.detach().bfloat16() for name, p in subject.model.named_parameters()}


def _lost(setting: Setting, measured: Beside, limit: Beside) -> list[tuple[float, float]]:
    """The seconds that a training loses to each of both. Closes them afterwards."""
    try:
        for warmed in (measured, limit):
            warmed.lost()
        return above_noise(side_by_side(2 * setting.rounds, measured.lost, limit.lost))
    finally:
        measured.close()
        limit.close()


MEASURES: Final[dict[str, Callable[[Setting], dict[str, Figure]]]] = {
    "publish_beside": beside_saves,
    "publish_full": full_versions,
    "publish_delta": deltas,
    "publish_handed_over": handed_over,
}
