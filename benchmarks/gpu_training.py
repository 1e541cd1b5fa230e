"""The cost of a save for a training on the device, and the costs of other ways to save for the same training.

In: a bench. Out: rows by name. Knows nothing of: how copies are enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch

from .candidates import CANDIDATES, tensors_of
from .gpu_bench import Bench, CannotMeasureError, Found, Saves
from .setting import elapsed
from .table import NOISE_SECONDS
from .trial import Trial
from .workloads import Gpt2, State, Training

_MODELS: Final[dict[str, Callable[[int, str], Training]]] = {
    "gpt2": lambda num_bytes, kind: Gpt2(num_bytes, batch=8, length=512, device=kind),
    "linear": lambda num_bytes, kind: Training(num_bytes, batch=1, device=kind),
}


def _training(bench: Bench) -> Training:
    return _MODELS[bench.setting.gpu_model](bench.gib(2), bench.device.kind)


def inflation(bench: Bench, *, guarded: bool) -> Mapping[str, Found]:
    """The steps of a training from the call of save until it is durable, and as many steps without a save."""
    training = _training(bench)
    kind = "guarded" if guarded else "unguarded"

    def step() -> None:
        training.step()
        bench.device.synchronize()

    options = {"guard": training.optimizer if guarded else None}
    pairs: list[tuple[float, float]] = []
    saved: list[dict[str, Any]] = []
    with Saves(bench.setting.folder / "run", training.state, options) as saves:
        saves.checkpointer.prewarm(saves.state)
        saves.end(saves.begin())
        for _ in bench.rounds():
            others = [elapsed(step) for _ in range(bench.setting.gpu_steps)]
            begin = perf_counter()
            handle = saves.begin()
            during = [perf_counter() - begin + elapsed(step)]
            while not handle.done():
                during.append(elapsed(step))
            report = saves.end(handle)
            others += [elapsed(step) for _ in range(bench.setting.gpu_steps)]
            usual = median(others) * len(during)
            pairs.append((sum(during), usual))
            saved.append({"seconds": report.total_seconds, "num_bytes": report.num_bytes, "steps": during})
    lost = median(during - usual for during, usual in pairs)
    note = f"{lost * 1e3:.1f} ms lost to a save of {report.num_bytes / 1e9:.2f} GB"
    return {f"gpu_inflation_{kind}": Found(pairs, note, {"saves": saved})}


def beside(bench: Bench, name: str) -> Mapping[str, Found]:
    """This library and another way to save, in turn, in this process, during the same training."""
    why_not = CANDIDATES[name].why_not()
    if why_not:
        raise CannotMeasureError(why_not)
    subject = _training(bench)
    trials = []
    for candidate in ("ours_guarded", name):
        folder = bench.setting.folder / candidate
        folder.mkdir(parents=True)
        trials.append(Trial(CANDIDATES[candidate], subject, folder))
    try:
        for trial in trials:
            trial.candidate.prewarm()
            trial.while_training()  # the first save differs from all others
        results = [[trial.while_training() for trial in trials] for _ in bench.rounds()]
        same = [_brings_back(trial) for trial in trials]
    finally:
        for trial in trials:
            trial.candidate.close()
    if not all(same):
        raise CannotMeasureError("void, for what it brought back is not what was saved")
    found = {}
    for value, least in (("lost", NOISE_SECONDS), ("stall", 0.0), ("total", 0.0)):
        pairs = [(max(ours[value], least), max(theirs[value], least)) for ours, theirs in results]
        found[f"gpu_{value}_{name}"] = Found(pairs, details={"configuration": CANDIDATES[name].configuration})
    return found


def _brings_back(trial: Trial) -> bool:
    """Whether a save during the training restores the values at the call."""
    wanted = {path: tensor.clone() for path, tensor in _tensors(trial).items()}
    trial.while_training()
    trial.bring_back(trial.number)
    found = _tensors(trial)
    return all(torch.equal(found[path], tensor) for path, tensor in wanted.items())


def _tensors(trial: Trial) -> State:
    return dict(tensors_of(trial.subject.state_dict()))
