"""Changes of a training right after save: the checkpoint has the bytes of the instant, or the save fails by name.

In: a bench. Out: rows by name. Knows nothing of: clocks.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch

from async_ckpt import AsyncCheckpointer, TornSnapshotError

from .gpu_bench import Accelerator, Bench, Found, on_stream
from .limits import MIB

_BUSY_SECONDS: Final = 0.05
_NUM_SMALL: Final = 16
_NUM_LARGE: Final = 4
_NUM_ADDED: Final = 20
_PATIENCE_SECONDS: Final = 30.0
_EQUAL: Final = "equal"
_TORN: Final = "TornSnapshotError"
_WRONG: Final = "WRONG BYTES"


class Scene:
    """A state on the device with large and small tensors, and an optimizer of the large ones."""

    def __init__(self, device: Accelerator, large_bytes: int, *, on_other: bool) -> None:
        self.device, self.other = device, device.stream()
        with on_stream(device, self.other) if on_other else nullcontext():
            large = [torch.rand(large_bytes // 4, device=device.kind) for _ in range(_NUM_LARGE)]
            small = [torch.rand(64 + n, device=device.kind) for n in range(_NUM_SMALL)]
        if on_other:
            device.module.current_stream().wait_stream(self.other)
        self.parameters = [torch.nn.Parameter(tensor) for tensor in large]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        self.state: dict[str, Any] = {f"large.{n}": p for n, p in enumerate(self.parameters)}
        self.state |= {f"small.{n}": tensor for n, tensor in enumerate(small)}

    def shapes(self) -> list[torch.Size]:
        return [parameter.shape for parameter in self.parameters]

    def scribble(self, shapes: list[torch.Size]) -> None:
        """Have free memory overwritten, in blocks of these shapes."""
        kept = [torch.full(shape, -1.0, device=self.device.kind) for shape in shapes]
        kept.clear()

    @torch.no_grad()
    def write(self) -> None:
        for tensor in self.state.values():
            tensor.neg_()  # exact: a second call restores the values

    def write_on_other(self) -> None:
        self.other.wait_stream(self.device.module.current_stream())
        with on_stream(self.device, self.other):
            self.write()

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def write_data(self) -> None:
        for parameter in self.parameters:
            parameter.data.neg_()

    def replace_data(self) -> None:
        """Replace `.data`, like FSDP1 on every unshard."""
        for parameter in self.parameters:
            parameter.data = torch.full_like(parameter.data, -1.0)
        self.scribble(self.shapes())

    def drop(self) -> None:
        shapes = self.shapes()
        self.optimizer.param_groups.clear()
        self.parameters.clear()
        self.state.clear()
        self.scribble(shapes)

    def resize(self) -> None:
        """Resize to 0, like FSDP with its full parameters."""
        shapes = self.shapes()
        for parameter in self.parameters:
            self.device.resize(parameter, 0)
        self.scribble(shapes)

    def resize_on_other(self) -> None:
        """Resize on the stream that allocated the tensors and allocates the next ones, like FSDP's unshard stream."""
        with on_stream(self.device, self.other):
            self.resize()


# The change, whether the save is guarded, and whether another stream has allocated the state.
TRAPS: Final[dict[str, tuple[Callable[[Scene], None], bool, bool]]] = {
    "written to": (Scene.write, False, False),
    "written to on another stream": (Scene.write_on_other, False, False),
    "dropped, its memory written to": (Scene.drop, False, False),
    "resize_(0), its memory written to": (Scene.resize, False, False),
    "another stream's, resize_(0), its memory written to there": (Scene.resize_on_other, False, True),
    "guarded, stepped": (Scene.step, True, False),
    "guarded, written to through .data": (Scene.write_data, True, False),
    "guarded, .data replaced, its memory written to": (Scene.replace_data, True, False),
    "guarded, resize_(0), its memory written to": (Scene.resize, True, False),
    "guarded, another stream's, resize_(0), its memory written to there": (Scene.resize_on_other, True, True),
}


def _large_bytes(bench: Bench) -> int:
    """A size that is large enough for a guard to defer the tensor."""
    return max(MIB, bench.gib(1 / 16))


def traps(bench: Bench) -> Mapping[str, Found]:
    outcomes: dict[str, list[str]] = {name: [] for name in TRAPS}
    for number in bench.rounds():
        bench.device.forget()
        for at, name in enumerate(TRAPS):
            outcomes[name].append(_outcome(bench, name, bench.setting.folder / f"{number}-{at}"))
    all_of_them = [outcome for found in outcomes.values() for outcome in found]
    kept = sum(outcome in (_EQUAL, _TORN) for outcome in all_of_them)
    wrong = [name for name, found in outcomes.items() if not {*found} <= {_EQUAL, _TORN}]
    note = f"not: {'; '.join(wrong)}" if wrong else ""
    return {"gpu_traps": Found([(kept, len(all_of_them))], note, {"outcomes": outcomes})}


def _outcome(bench: Bench, name: str, folder: Path) -> str:
    does, guarded, on_other = TRAPS[name]
    scene = Scene(bench.device, _large_bytes(bench), on_other=on_other)
    wanted = {path: tensor.detach().cpu().neg() for path, tensor in scene.state.items()}
    with AsyncCheckpointer(folder) as ckpt:
        ckpt.prewarm(scene.state)
        bench.device.synchronize()
        bench.device.busy(_BUSY_SECONDS)
        scene.write()  # operations that are enqueued before save belong to the instant
        handle = ckpt.save(scene.state, 1, guard=scene.optimizer if guarded else None)
        does(scene)
        outcome = _told(ckpt, handle.exception(), wanted)
    bench.device.synchronize()  # the next scene may get this memory while the other stream still writes
    return outcome


def _told(ckpt: AsyncCheckpointer, error: BaseException | None, wanted: Mapping[str, torch.Tensor]) -> str:
    if error is not None:
        return _TORN if isinstance(error, TornSnapshotError) else repr(error)
    found = ckpt.load()
    return _EQUAL if all(torch.equal(found[name], tensor) for name, tensor in wanted.items()) else _WRONG


# --- graphs ---------------------------------------------------------------------------------------------------


def graphs(bench: Bench) -> Mapping[str, Found]:
    """A capture during staging, on the saving thread or on another one, and a replay right after save."""
    bench.device.require("CUDAGraph")
    cases: dict[str, Callable[[_Case], Any]] = {
        "captured by the thread that has saved": _Case.capture_here,
        "captured by another thread during the call of save": _Case.capture_elsewhere,
        "replayed right after save, writing to the state": _Case.replay,
    }
    outcomes: dict[str, list[str]] = {name: [] for name in cases}
    for _ in bench.rounds():
        bench.device.forget()
        for name, does in cases.items():
            outcomes[name].append(_Case(bench).outcome(does))
    all_of_them = [outcome for found in outcomes.values() for outcome in found]
    wrong = [name for name, found in outcomes.items() if {*found} != {_EQUAL}]
    note = f"not: {'; '.join(wrong)}" if wrong else ""
    pair = (all_of_them.count(_EQUAL), len(all_of_them))
    return {"gpu_graphs": Found([pair], note, {"outcomes": outcomes})}


class _Case:
    """A graph that adds to tensors, and a save of a state."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.module = bench, bench.device.module
        self.scene = Scene(bench.device, _large_bytes(bench), on_other=False)
        self.counted = torch.zeros(1024, device=bench.device.kind)
        self.graph = self.module.CUDAGraph()
        self._folder = Path(tempfile.mkdtemp(dir=bench.setting.folder))

    def outcome(self, does: Callable[[_Case], Any]) -> str:
        wanted = {path: tensor.detach().cpu() for path, tensor in self.scene.state.items()}
        # With so little memory, copies are enqueued and waited for during the capture.
        self.ckpt = AsyncCheckpointer(self._folder, host_bytes=max(16 * MIB, self.bench.gib(1 / 8)))
        try:
            with self.ckpt as ckpt:
                does(self)
                self.graph.replay()
                error = self.handle.exception()
                self.bench.device.synchronize()
                if not bool((self.counted == 2 * _NUM_ADDED).all()):
                    return "the graph replayed something else"
                return _told(ckpt, error, wanted)
        except Exception as failure:
            return repr(failure)

    def save(self, guard: Any = None) -> None:
        self.handle = self.ckpt.save(self.scene.state, 1, guard=guard)

    def capture(self, mode: str, tensors: Sequence[torch.Tensor], meanwhile: Callable[[], Any]) -> None:
        self.bench.device.synchronize()
        with torch.no_grad(), self.module.graph(self.graph, capture_error_mode=mode):
            for number in range(_NUM_ADDED):
                for tensor in tensors:
                    tensor.add_(2)
                if number == _NUM_ADDED // 2:
                    meanwhile()

    def capture_here(self) -> None:
        self.save(self.scene.optimizer)
        # Waits for all deferred copies, which may have ended before.
        self.capture("global", [self.counted], lambda: self.handle.wait_staged(_PATIENCE_SECONDS))

    def capture_elsewhere(self) -> None:
        begun, saved = threading.Event(), threading.Event()
        errors: list[Exception] = []

        def meanwhile() -> None:
            begun.set()
            saved.wait(_PATIENCE_SECONDS)

        def capture() -> None:
            try:
                self.capture("thread_local", [self.counted], meanwhile)
            except Exception as error:
                errors.append(error)
                begun.set()

        thread = threading.Thread(target=capture)
        thread.start()
        begun.wait(_PATIENCE_SECONDS)
        try:
            self.save(self.scene.optimizer)
        finally:
            saved.set()
            thread.join()
        if errors:
            raise errors[0]

    def replay(self) -> None:
        self.capture("global", [self.counted, *self.scene.parameters], lambda: None)
        self.bench.device.busy(_BUSY_SECONDS)
        self.save()
