"""Weights from one process into a module of another on the same host: in memory, and by other common ways.

In: a setting. Out: figures by name, and a table of all ways. Knows nothing of: rollout engines.

All ways take turns, round by round. The reader is another process, whose module was touched before. The clock begins at
the call of the sender, and ends when the reader reports that its module is filled.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist

import async_ckpt
from async_ckpt import Publisher, Subscriber
from async_ckpt.core.host.limits import free_memory_bytes

from .apart import Apart, Channel, begun
from .publishing import Model, Weights, lost_beside, weights_of
from .setting import Setting
from .table import Figure, Row, Target, shown

PACKAGES: Final = ("safetensors",)
_SHARED_MEMORY: Final = Path("/dev/shm")


class _Sent(NamedTuple):
    """Seconds of one transfer."""

    held: float
    """The time of the sender's thread, for which a training would wait."""
    whole: float


@dataclass(frozen=True, slots=True)
class Way:
    """A line of the table of all ways."""

    title: str
    num_bytes: int
    sent: list[_Sent]
    memcpy: list[float]

    GROUP: ClassVar = "ways"
    HEAD: ClassVar = ["way", "seconds", "GB/s", "of one memcpy", "training waits, seconds"]

    def as_dict(self) -> dict[str, Any]:
        return {"title": self.title, "num_bytes": self.num_bytes, "sent": [list(one) for one in self.sent]}

    def cells(self) -> list[str]:
        whole, held = (median(one[i] for one in self.sent) for i in (1, 0))
        ratio = median(one.whole / copied for one, copied in zip(self.sent, self.memcpy, strict=True))
        rate = self.num_bytes / whole / 1e9
        return [self.title, shown(whole), shown(rate), shown(ratio), shown(held)]


def _read(channel: Channel, folder: Path, kinds: Mapping[str, tuple[int, ...]]) -> None:
    """The reader, which fills its module on request."""
    from safetensors.torch import load_file

    torch.set_num_threads(os.cpu_count() or 1)
    model = Model({name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in kinds.items()})
    tensors = dict(model.named_buffers())
    for tensor in tensors.values():
        tensor.zero_()
    lent, stored = Subscriber(folder / "lent"), Subscriber(folder / "stored")
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=1, world_size=2)
    channel.send("ready")
    with suppress(EOFError):
        while True:
            word, *arguments = channel.receive()
            if word == "lent":
                assert lent.pull(model, *arguments).from_memory
            elif word == "stored":
                stored.pull(model, *arguments)
            elif word == "safetensors":
                model.load_state_dict(load_file(*arguments))
            elif word == "torch":
                model.load_state_dict(torch.load(*arguments, weights_only=True))
            else:
                for tensor in tensors.values():
                    dist.broadcast(tensor, src=0)
            channel.send(word)


class _Sender:
    """This process, with the weights, and all ways to send them to the reader."""

    def __init__(self, weights: Weights, folder: Path, reader: Apart, stack: ExitStack) -> None:
        self._weights, self._folder, self._reader = weights, folder, reader
        self._versions = itertools.count(1)
        self._lent = stack.enter_context(Publisher(folder / "lent", encoding=None, keep=1, local=True))
        self._stored = stack.enter_context(Publisher(folder / "stored", encoding=None, keep=1))
        self._copies = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def memcpy(self) -> _Sent:
        begin = perf_counter()
        for name, tensor in self._weights.items():
            self._copies[name].copy_(tensor)
        seconds = perf_counter() - begin
        return _Sent(seconds, seconds)

    def _told(self, begin: float, *word: object) -> _Sent:
        held = perf_counter() - begin
        self._reader.send(word)
        self._reader.receive()
        return _Sent(held, perf_counter() - begin)

    def lent(self) -> _Sent:
        return self._publish(self._weights)

    def lent_snapshot(self) -> _Sent:
        with async_ckpt.snapshot(self._weights) as snap:
            snap.completion.result()
            return self._publish(snap)

    def _publish(self, weights: Any) -> _Sent:
        version, begin = next(self._versions), perf_counter()
        self._lent.publish(weights, version)
        held = perf_counter() - begin
        self._lent.wait_readable(version)
        sent = self._told(begin, "lent", version)._replace(held=held)
        self._lent._wait()
        return sent

    def stored(self) -> _Sent:
        version, begin = next(self._versions), perf_counter()
        handle = self._stored.publish(self._weights, version)
        held = perf_counter() - begin
        handle.result()
        sent = self._told(begin, "stored", version)._replace(held=held)
        self._stored._wait()
        return sent

    def safetensors(self) -> _Sent:
        from safetensors.torch import save_file

        return self._by_file("safetensors", save_file)

    def torch(self) -> _Sent:
        return self._by_file("torch", torch.save)

    def _by_file(self, word: str, save: Callable[[Weights, str], object]) -> _Sent:
        path = str(_SHARED_MEMORY / f"async_ckpt_benchmark.{os.getpid()}")
        begin = perf_counter()
        try:
            save(self._weights, path)
            return self._told(begin, word, path)
        finally:
            os.remove(path)

    def broadcast(self) -> _Sent:
        begin = perf_counter()
        self._reader.send(("broadcast",))
        for tensor in self._weights.values():
            dist.broadcast(tensor, src=0)
        held = perf_counter() - begin
        self._reader.receive()
        return _Sent(held, perf_counter() - begin)


def one_host(setting: Setting) -> dict[str, Row]:
    """All ways, one after the other in each round."""
    # Memory for two pools with two copies each, a file, the reader's module, and a reserve.
    size_bytes = min(setting.state_bytes, free_memory_bytes() // 16)
    weights = {name.replace(".", "_"): tensor for name, tensor in weights_of(size_bytes).items()}
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    folder = setting.folder
    folder.mkdir(parents=True)
    kinds = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    with begun(_read, folder, kinds) as reader, ExitStack() as stack:
        dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=0, world_size=2)
        stack.callback(dist.destroy_process_group)
        reader.receive()
        sender = _Sender(weights, folder, reader, stack)
        ways = {
            "one memcpy": sender.memcpy,
            "memory, of a snapshot that is there": sender.lent_snapshot,
            "memory, with the copy of the weights": sender.lent,
            "a version on the disk, durable": sender.stored,
            "safetensors: save_file and load_file in /dev/shm": sender.safetensors,
            "torch.save and torch.load in /dev/shm": sender.torch,
            "gloo broadcast": sender.broadcast,
        }
        sent: dict[str, list[_Sent]] = {title: [] for title in ways}
        for number in range(setting.rounds + 1):  # the first round touches memory, and does not count
            order = list(ways.items())
            for title, send in order if number % 2 else reversed(order):
                sent[title].append(send())
    memcpy, snapshot, copy, _, safetensors, *_ = ways
    copied = [one.whole for one in sent[memcpy][1:]]
    rows: dict[str, Row] = {
        f"one_host_way_{i}": Way(title, num_bytes, sent[title][1:], copied) for i, title in enumerate(ways)
    }
    whole = {title: [one.whole for one in found[1:]] for title, found in sent.items()}
    size = f"{num_bytes / 1e9:.2g} GB to a module of another process, in memory"
    return {
        "one_host_files": Figure(
            size, "s", safetensors, Target("≤", 0.5), list(zip(whole[copy], whole[safetensors], strict=True))
        ),
        "one_host_memcpy": Figure(
            f"{size}, of a snapshot that is there",
            "s",
            "one memcpy",
            Target("≤", 1.3),
            list(zip(whole[snapshot], copied, strict=True)),
        ),
        **rows,
    }


def beside_saves(setting: Setting) -> dict[str, Figure]:
    title = "training seconds lost to a save and a version that is lent, of one snapshot"
    return {"one_host_beside": lost_beside(setting, title, encoding=None, local=True)}


MEASURES: Final[dict[str, Callable[[Setting], Mapping[str, Row]]]] = {
    "one_host": one_host,
    "one_host_beside": beside_saves,
}
