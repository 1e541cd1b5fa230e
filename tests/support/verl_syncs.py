"""Workers of a training and of rollouts, each a process with verl's registry and our engine, and what verl's manager has
them do.

Above is what a test has; below what each process runs. The manager itself asks for Ray: `test_verl_weights.py` runs that.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

os.environ.setdefault("VERL_LOGGING_LEVEL", "ERROR")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from verl.checkpoint_engine.base import CheckpointEngineRegistry

import torch
from children import Nursery, die_at
from racing import PATIENCE

from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.integrations.verl_weights import AsyncCkptEngine, weight_engine
from async_ckpt.weights.publishing.in_memory import borrow
from async_ckpt.weights.publishing.publication import Publication

BUCKET_BYTES = 4096


def weights_at(step: int, dtype: torch.dtype = torch.bfloat16, *, num_rows: int = 300) -> dict[str, torch.Tensor]:
    """The weights after a step, which changes a few items of each. One tensor is larger than a bucket."""
    random = torch.Generator().manual_seed(1)
    shapes = {"embed.weight": (num_rows, 64), "layers.0.weight": (24, 24), "norm": (24,), "scale": (), "none": (0, 8)}
    weights = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}
    weights["router.bias"] = torch.randn(7, generator=random)
    for tensor in weights.values():
        if tensor.numel():
            tensor.view(-1)[step % tensor.numel()] = step + 0.5
    return weights


def exported(step: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, torch.Tensor]]:
    """As an engine exports weights: the memory of each is overwritten once the next one is asked for."""
    for name, tensor in weights_at(step, dtype).items():
        given = tensor.t().contiguous().t() if tensor.dim() == 2 else tensor
        yield name, given
        if given.numel():
            given.fill_(float("nan"))


def digest(weights: Mapping[str, torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().contiguous()
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        whole.update(tensor.view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return whole.hexdigest()


class Died(Exception):
    """A worker has ended in the middle of a call."""


class Worker:
    """One process. `ask` makes a call there, `answer` waits for its result."""

    def __init__(self, nursery: Nursery, folder: Path, arguments: dict[str, Any]) -> None:
        address = str(folder / f"w{os.urandom(4).hex()}")
        with Listener(address, "AF_UNIX") as listener:
            self._child = nursery.start(f"__import__('verl_syncs').main({address!r})")
            self._connection: Connection = listener.accept()
        self.is_alive = True
        self._connection.send(arguments)
        assert self.answer() == "made"

    def ask(self, what: str, *arguments: Any, **options: Any) -> None:
        try:
            self._connection.send((what, arguments, options))
        except BrokenPipeError:
            pass  # said by `answer`

    def answer(self) -> Any:
        """The result. Raises what the call raised, as a RuntimeError, and Died."""
        try:
            assert self._connection.poll(PATIENCE), "the worker does not answer"
            kind, result = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self.is_alive = False
            raise Died from None
        if kind == "error":
            raise RuntimeError(result)
        return result

    def call(self, what: str, *arguments: Any, **options: Any) -> Any:
        self.ask(what, *arguments, **options)
        return self.answer()

    def kill(self) -> None:
        self._child.send(signal.SIGKILL)
        self.is_alive = False

    def end(self) -> str:
        """End it; what it has written to stderr."""
        self._connection.close()
        return self._child.ended().err


class Job:
    """The workers of one training: `senders` ranks, and rollouts."""

    def __init__(
        self,
        nursery: Nursery,
        folder: Path,
        *,
        senders: int = 2,
        receivers: int = 2,
        root: object = None,
        **engine: Any,
    ) -> None:
        root = folder / "root" if root is None else root
        self._nursery, self._folder, self._engine = (
            nursery,
            folder,
            {"bucket_size": BUCKET_BYTES, "root": str(root), **engine},
        )
        self.all: list[Worker] = []
        self.senders = [self.made(is_master=rank == 0) for rank in range(senders)]
        self.receivers = [self.made() for _ in range(receivers)]

    def made(self, **engine: Any) -> Worker:
        worker = Worker(self._nursery, self._folder, {**self._engine, **engine})
        self.all.append(worker)
        return worker

    def prepare(self) -> None:
        """What the manager does before weights are sent."""
        workers = [*self.senders, *self.receivers]
        for worker in workers:
            worker.ask("prepare")
        metadata = [worker.answer() for worker in workers]
        for group, arguments in zip(
            (self.senders, self.receivers),
            AsyncCkptEngine.build_topology(len(self.senders), len(self.receivers), metadata),
            strict=True,
        ):
            for number, worker in enumerate(group):
                worker.ask("init_process_group", **{name: values[number] for name, values in arguments.items()})
        for worker in workers:
            worker.answer()

    def sync(self, step: int | None, given: int | None = None, **options: Any) -> list[Any]:
        """A whole sync. Returns the digests of the receivers, and the error of each worker that had one."""
        self.prepare()
        return self.transferred(step, given, **options)

    def transferred(self, step: int | None, given: int | None = None, **options: Any) -> list[Any]:
        for worker in self.senders:
            worker.ask("send", step if given is None else given, step, **options)
        for worker in self.receivers:
            worker.ask("receive", step)
        ends = [outcome(worker) for worker in [*self.senders, *self.receivers]]
        for worker in [*self.senders, *self.receivers]:
            if worker.is_alive:
                worker.ask("finalize")
                outcome(worker)
        errors = [str(end) for end in ends if isinstance(end, Exception)]
        return errors or ends[len(self.senders) :]

    def replace_dead(self) -> None:
        self.senders = [w if w.is_alive else self.made(is_master=n == 0) for n, w in enumerate(self.senders)]
        self.receivers = [w if w.is_alive else self.made() for w in self.receivers]

    def end(self) -> list[str]:
        return [worker.end() for worker in self.all]


def outcome(worker: Worker) -> Any:
    try:
        return worker.answer()
    except (RuntimeError, Died) as error:
        return error


@contextmanager
def job(nursery: Nursery, folder: Path, **options: Any) -> Iterator[Job]:
    made = Job(nursery, folder, **options)
    try:
        yield made
    except BaseException:
        for worker in made.all:
            worker.kill()
        raise
    finally:
        made.end()


# --- in the process of a worker -----------------------------------------------------------------------------------


class _Served:
    def __init__(self, arguments: dict[str, Any]) -> None:
        tempfile.tempdir = arguments.pop("temporary", None)
        self.engine = CheckpointEngineRegistry.new("async_ckpt", **arguments)
        self._dies_at: int | None = None
        self._is_mortal = True

    async def send(self, content: int, step: int | None, dtype: str = "bfloat16", fails_at: int | None = None) -> Any:
        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for number, (name, tensor) in enumerate(exported(content, getattr(torch, dtype))):
                if number == fails_at:
                    name, tensor = "twice", tensor.to_sparse() if tensor.numel() else tensor
                yield name, tensor

        return await self.engine.send_weights(weights(), global_steps=step)

    async def receive(self, step: int | None) -> str:
        return await self._taken(self.engine.receive_weights(global_steps=step))

    async def get(self) -> str:
        return await self._taken(self.engine.get_weights())

    async def _taken(self, weights: Any) -> str:
        taken: dict[str, torch.Tensor] = {}
        async for name, tensor in weights:
            taken[name] = tensor.clone()
            if len(taken) == self._dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return digest(taken)

    async def die_at_tensor(self, number: int) -> None:
        self._dies_at = number

    async def die_at_call(self, number: int) -> None:
        """Die at that call that changes the disk, counted from now on."""
        self._calls = die_at(number, lambda: os.kill(os.getpid(), signal.SIGKILL) if self._is_mortal else None)

    async def live_on(self) -> None:
        """Die no more."""
        self._is_mortal, self._dies_at = False, None

    async def hold_disk(self) -> None:
        """From now on nothing more is published durably."""
        self._held = threading.Event()

        def held(real: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                self._held.wait()
                return real(*arguments, **options)

            return call

        Publication._begin_folder = held(Publication._begin_folder)  # type: ignore[method-assign]

    async def release_disk(self) -> None:
        self._held.set()

    async def wait_durable(self) -> None:
        """Wait until all that was sent is durable."""
        publisher = self.engine._sender._publisher
        await asyncio.get_running_loop().run_in_executor(None, publisher._wait)

    async def be_elsewhere(self) -> None:
        """Be on another host: with another name, and without the memory of this one."""
        weight_engine._host = lambda: "elsewhere"  # type: ignore[assignment]
        borrow.received = lambda _: nullcontext(None)  # type: ignore[assignment]

    async def refuse_disk(self) -> None:
        """From now on nothing can be written."""

        def full(*_: Any, **__: Any) -> Any:
            raise OSError(errno.EIO, "the disk is broken")

        for name in ("create", "replace", "put_new"):
            setattr(LocalStorage, name, full)

    async def num_descriptors(self) -> int:
        return len(os.listdir("/proc/self/fd"))


async def _serve(connection: Connection) -> None:
    served = _Served(connection.recv())
    connection.send(("ok", "made"))
    while True:
        try:
            what, arguments, options = await asyncio.get_running_loop().run_in_executor(None, connection.recv)
        except EOFError:
            return
        try:
            called = getattr(served, what, None) or getattr(served.engine, what)
            result = called(*arguments, **options)
            if asyncio.iscoroutine(result):
                result = await result
            connection.send(("ok", result))
        except Exception as error:
            connection.send(("error", f"{type(error).__name__}: {error}"))


def main(address: str) -> None:
    torch.set_num_threads(1)
    asyncio.run(_serve(Client(address, "AF_UNIX")))
