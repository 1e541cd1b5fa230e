"""Random trainings on simulated devices: states, streams, guards, budgets; what is saved loads back as it was at the call.

`python tests/support/fuzz_device.py 10000` runs as many, `--seed 7` begins elsewhere; `tests/core/staging/test_device_fuzz.py` runs some. A
scenario is a function of its seed but for the order in which threads come.
"""

import argparse
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from accelerators import Simulated
from scripted_disk import scripted
from states import MIB, bits_of, open_run

from async_ckpt import AsyncCheckpointer, SaveHandle, StorageUnavailableError

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
DEVICES = ["sim:0", "sim:0", "sim:1", "cpu"]
# Bytes: scalars and nothing, what is packed, what is copied alone, what is deferred, more than a segment.
SIZES = [0, 8, 72, 4000, 40_000, 300_000, MIB, MIB + 64, 5 * MIB]


class Item:
    """One tensor of the state, and what is in it by program order."""

    def __init__(self, draw: random.Random, generator: torch.Generator, device: str) -> None:
        self._generator = generator
        dtype = draw.choice(DTYPES)
        items = draw.choices(SIZES, weights=[1, 3, 3, 3, 3, 2, 3, 2, 3])[0] // dtype.itemsize
        self.whole = torch.empty(items, dtype=dtype, device=device)
        self.value = torch.empty(items, dtype=dtype)
        self.view = draw.choice(["whole", "whole", "whole", "transposed", "strided", "offset", "tail"])
        self.scribble()

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """What the state has of it."""
        if self.view == "transposed" and whole.numel() % 4 == 0:
            return whole.view(4, -1).t()
        if self.view == "strided":
            return whole[::3]
        if self.view == "offset":
            return whole[whole.numel() // 5 :]
        if self.view == "tail":
            return whole[: whole.numel() // 2]
        return whole

    def scribble(self) -> None:
        """Other bytes, written to in the order of the current stream."""
        noise = torch.randint(0, 255, (self.value.nbytes,), dtype=torch.uint8, generator=self._generator)
        if self.value.dtype == torch.bool:
            noise &= 1
        self.value = noise.view(self.value.dtype)
        with torch.no_grad():
            self.whole.copy_(self.value)


class Scribbler(torch.optim.Optimizer):
    """An optimizer that only writes: to its parameters, and to a moment of each."""

    def __init__(self, items: list[Item]) -> None:
        self.items = items
        self.params = [torch.nn.Parameter(item.whole, requires_grad=False) for item in items]
        super().__init__(self.params, {})

    def step(self, closure: Any = None) -> None:
        for item in self.items:
            item.scribble()


class Training:
    """A state on some devices, and what may happen to it."""

    def __init__(self, draw: random.Random, device: Simulated) -> None:
        self.draw, self.device = draw, device
        self.generator = torch.Generator().manual_seed(draw.getrandbits(32))
        self.items = {f"t{n}": self._item() for n in range(draw.randint(1, 7))}
        chosen = [item for item in self.items.values() if draw.random() < 0.7]
        self.optimizer = Scribbler(chosen) if chosen and draw.random() < 0.6 else None
        self.guarded = set(chosen) if self.optimizer else set()
        self.replaced: list[Any] = []

    def _item(self) -> Item:
        where = self.draw.choice(DEVICES)
        if where == "cpu" or self.draw.random() < 0.7:
            return Item(self.draw, self.generator, where)
        other = self.device.stream(int(where[-1]))
        with self.device.module.stream(other):
            made = Item(self.draw, self.generator, where)
        self.device.module.current_stream(where).wait_stream(other)
        return made

    def state(self) -> dict[str, Any]:
        own = dict(zip(self.optimizer.items, self.optimizer.params, strict=True)) if self.optimizer else {}
        state = {name: item.of(own.get(item, item.whole)) for name, item in self.items.items()}
        # A parameter itself, as those have it who save no `state_dict`, and else what it is now.
        return {name: t if isinstance(t, torch.nn.Parameter) else t.detach() for name, t in state.items()}

    def values(self) -> dict[str, torch.Tensor]:
        return {name: item.of(item.value).clone() for name, item in self.items.items()}

    def go_on(self) -> None:
        """What a training does right after `save`."""
        for name in list(self.items):
            item, chance = self.items[name], self.draw.random()
            if item in self.guarded:
                continue
            if chance < 0.6:
                item.scribble()
            elif chance < 0.8:  # freed, and its memory wanted by others
                where = item.whole.device
                self.items[name] = Item(self.draw, self.generator, str(where))
                del item
                for _ in range(2):
                    torch.full((300_000,), 0xEE, dtype=torch.uint8, device=where)
        if self.optimizer is not None:
            self._move_parameters(self.optimizer)
            self.optimizer.step()

    def _move_parameters(self, optimizer: Scribbler) -> None:
        """To other memory, as FSDP does, or to another device; what is saved is what was there."""
        for item, param in zip(optimizer.items, optimizer.params, strict=True):
            if self.draw.random() < 0.4:
                where = param.device if param.device.type == "cpu" else self.draw.choice(DEVICES[:3])
                moved = param.data.to(where, copy=True)
                if param.device.type != "cpu":  # it may come from another stream, and be freed now
                    param.data.record_stream(self.device.module.current_stream(param.device))
                param.data = item.whole = moved


def run(seed: int, root: Path) -> list[str]:
    """What went wrong in the scenario of this seed."""
    draw = random.Random(seed)
    device = Simulated(draw.choice(["early", "late", seed]))
    with device.here(), ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* was not saved", RuntimeWarning)  # disks fail on purpose
        try:
            wrong = list(_training(draw, device, root, stack))
        except Exception as error:
            wrong = [repr(error)]
    return [f"seed {seed}: {told}" for told in (*wrong, *device.sim.races, *device.sim.scheduler.failures)]


def _training(draw: random.Random, device: Simulated, root: Path, stack: ExitStack) -> Iterator[str]:
    options: dict[str, Any] = {"max_in_flight": draw.choice([1, 1, 2, 3])}
    tight = draw.random() < 0.4
    if tight:
        options["host_bytes"] = draw.choice([16, 24, 32]) * MIB
    ckpt = stack.enter_context(open_run(root, **options))
    training = Training(draw, device)
    if draw.random() < 0.3:
        stack.enter_context(device.module.stream(_following(device)))
    if draw.random() < 0.3:
        ckpt.prewarm(training.state())
    wanted: dict[int, dict[str, torch.Tensor]] = {}
    handles: list[SaveHandle] = []
    disk = stack.enter_context(scripted(ckpt)) if draw.random() < 0.3 else None
    for step in range(draw.randint(1, 3)):
        if draw.random() < 0.5:
            device.busy(draw.randint(0, 1))
        wanted[step] = training.values()
        # With a small budget, or others in flight, `save` itself may wait for the device.
        ahead = not tight and step == 0 and draw.random() < 0.5
        if disk is not None and draw.random() < 0.5:  # it meets this save, or an earlier one that is not done
            disk.fail(draw.choice(["create", "write", "finish"]), error=StorageUnavailableError("gone", path="/ckpt"))
        with device.ahead() if ahead else ExitStack():
            guard = training.optimizer
            handles.append(ckpt.save(training.state(), step=step, guard=guard))
            training.go_on()
    for step, handle in enumerate(handles):
        if disk is not None and isinstance(handle.exception(), StorageUnavailableError):
            del wanted[step]
        else:
            handle.result()
    if wanted:
        yield from _compared(draw, ckpt, wanted, training)


def _following(device: Simulated) -> Any:
    """A stream of the training's, after all that it has enqueued on others."""
    other = device.stream(0)
    other.wait_stream(device.module.current_stream(0))
    return other


def _compared(
    draw: random.Random,
    ckpt: AsyncCheckpointer,
    wanted: dict[int, dict[str, torch.Tensor]],
    training: Training,
) -> Iterator[str]:
    for step, values in wanted.items():
        where = draw.choice(["cpu", "cpu", "sim:0", "sim:1"])
        yield from _differing(f"step {step}", ckpt.load(step, map_location=where), values)
    last = max(wanted)
    if all(item.whole.numel() or not item.value.numel() for item in training.items.values()):
        live = training.state()
        shapes = {name: tensor.shape for name, tensor in live.items()}
        if shapes == {name: tensor.shape for name, tensor in wanted[last].items()} and all(
            live[name].dtype == wanted[last][name].dtype for name in live
        ):
            ckpt.restore(live, step=last)
            yield from _differing(f"restored {last}", live, wanted[last])


def _differing(told: str, found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> Iterator[str]:
    for name, value in wanted.items():
        if not torch.equal(bits_of(found[name].cpu()), bits_of(value)):
            yield f"{told}: {name} has wrong bytes"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("scenarios", type=int)
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    options = parser.parse_args()
    num_wrong = 0
    shm = Path("/dev/shm")
    top = Path(tempfile.mkdtemp(prefix="fuzz-", dir=shm if shm.is_dir() else None))
    try:
        for seed in range(options.seed, options.seed + options.scenarios):
            wrong = run(seed, top / str(seed))
            shutil.rmtree(top / str(seed), ignore_errors=True)
            num_wrong += bool(wrong)
            for told in wrong:
                print(told, flush=True)
            if (seed + 1 - options.seed) % 500 == 0:
                print(f"{seed + 1 - options.seed} scenarios, {num_wrong} wrong", flush=True)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    print(f"{options.scenarios} scenarios, {num_wrong} with wrong bytes, a race or an error")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
