"""The savings of `unchanged="auto"` in a LoRA training, and its cost for a training in which every tensor changes.

In: a setting. Out: figures by name. Knows nothing of: how an unchanged tensor is recognized.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final, TypeAlias

from async_ckpt import SaveHandle

from .apart import result_of
from .candidates import CANDIDATES
from .compare import Contender, measured, noise_of, pairs_of
from .figures import Saves, one_thread, slowed
from .setting import Setting, side_by_side
from .table import Figure, Row, Target, above_noise
from .workloads import Lora, Training

_NUM_SAVES: Final = 10
# How many calls are timed in each round, since they take milliseconds.
_CALLS: Final = 5
# Steps from one save to the next, which outlast a save.
_STEPS: Final = 8
_OURS: Final = "ours_keeping"
_ALL_KEPT: Final = "ours_guarded"  # it keeps all steps that are not deleted
_PEERS: Final = ("torch_checkpointing", "moonclip")
# The largest shares of the seconds that other ways lose.
_MOST_OF: Final = {"torch_checkpointing": Target("≤", 0.1), "moonclip": None}

_Pairs: TypeAlias = list[tuple[float, float]]


class Whole(Saves):
    """Saves that write everything."""

    def begin(self) -> SaveHandle:
        return self.checkpointer.save(self._state, next(self._steps), unchanged=())


def bytes_of_ten(setting: Setting) -> dict[str, Row]:
    """Each way keeps ten saves, in a new process."""
    names = [name for name in (_ALL_KEPT, *_PEERS) if not CANDIDATES[name].why_not()]
    kept = {name: result_of(_kept_bytes, name, setting.frozen_bytes, setting.folder / name) for name in names}
    ours, base, adapter = kept[_ALL_KEPT]
    limits = {"the base and ten adapters": base + _NUM_SAVES * adapter}
    limits |= {CANDIDATES[name].title: kept[name][0] for name in names[1:]}
    title = f"bytes on the disk of {_NUM_SAVES} saves {_what(base)}, none deleted"
    return {
        f"unchanged_bytes_{number}" if number else "unchanged_bytes": Figure(
            title, "MB", name, None if number else Target("≤", 1.1), [(ours / 1e6, limit / 1e6)]
        )
        for number, (name, limit) in enumerate(limits.items())
    }


def _kept_bytes(name: str, num_bytes: int, folder: Path) -> tuple[int, int, int]:
    """The bytes of ten saves on the disk, of the base, and of the adapter with its optimizer."""
    folder.mkdir(parents=True)
    subject = Lora(num_bytes)
    candidate = CANDIDATES[name](folder, subject)
    candidate.prewarm()
    for number in range(1, _NUM_SAVES + 1):
        subject.forward_backward()
        with candidate.stepping():
            subject.optimizer_step()
        candidate.save(number)
        candidate.wait()
    files = {path.stat().st_ino: path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file()}
    candidate.close()
    shutil.rmtree(folder)
    moments = (part for state in subject.optimizer.state.values() for part in state.values())
    adapter = sum(tensor.nbytes for tensor in (*subject.adapter.values(), *moments))
    return sum(files.values()), subject.base_bytes, adapter


def beside_others(setting: Setting) -> dict[str, Row]:
    nothing: list[float] = []
    contenders = measured(setting, "lora_training", [_OURS, *_PEERS], setting.frozen_bytes, nothing)
    noise = noise_of(nothing)
    ours = contenders[_OURS]
    assert ours.results, ours.why_not
    what = f"training seconds lost to one guarded save {_what(setting.frozen_bytes)}"

    def held(name: str, other: Contender) -> Figure:
        if not other.results:
            return Figure(what, "s", other.candidate.title, _MOST_OF[name], [], other.why_not)
        pairs = above_noise(pairs_of(ours, other, "lost"))
        return Figure(what, "s", other.candidate.title, _MOST_OF[name], pairs, noise=noise.seconds)

    figures = {f"unchanged_lost_{name}": held(name, contenders[name]) for name in _PEERS}
    return {**figures, "no_save": noise}


@one_thread()
def adapter_alone(setting: Setting) -> dict[str, Row]:
    subject = Lora(setting.frozen_bytes)
    adapter = {"model": subject.adapter, "optimizer": subject.optimizer}
    one = Saves(setting.folder / "auto", subject.state, guard=subject.optimizer)
    other = Saves(setting.folder / "adapter", adapter, guard=subject.optimizer)
    with one.checkpointer, other.checkpointer:
        windows = side_by_side(
            2 * setting.compare_rounds, partial(slowed, subject, one), partial(slowed, subject, other)
        )
        calls = _calls(setting, subject, one, other)
    noise = median(window.noise for pair in windows for window in pair)
    what = _what(subject.base_bytes)
    lost = f"training seconds lost to one guarded save {what}"
    lost_pairs = above_noise((ours.lost, other.lost) for ours, other in windows)
    return {
        "unchanged_lost": Figure(
            lost, "s", "the adapter alone", Target("≤", 1.3), lost_pairs, _off(noise), noise=noise
        ),
        "unchanged_call": Figure(f"the call of such a save {what}", "ms", "the adapter alone", None, calls),
    }


@one_thread()
def every_tensor_changes(setting: Setting) -> dict[str, Row]:
    subject = Training(setting.frozen_bytes, batch=4)
    one = Saves(setting.folder / "looks", subject.state, guard=subject.optimizer)
    other = Whole(setting.folder / "whole", subject.state, guard=subject.optimizer)
    with one.checkpointer, other.checkpointer:
        pairs = side_by_side(
            2 * setting.compare_rounds, partial(_seconds, subject, one), partial(_seconds, subject, other)
        )
        calls = _calls(setting, subject, one, other)
    what = "of a training in which every tensor changes"
    return {
        "unchanged_no_use": Figure(
            f"{_STEPS} steps and a guarded save {what}", "s", "unchanged=()", Target("≤", 1.01), pairs
        ),
        "unchanged_no_use_call": Figure(f"the call of a guarded save {what}", "ms", "unchanged=()", None, calls),
    }


def _seconds(subject: Training, saves: Saves) -> float:
    begin = perf_counter()
    handle = saves.begin()
    for _ in range(_STEPS):
        subject.step()
    seconds = perf_counter() - begin
    saves.end(handle)
    return seconds


def _calls(setting: Setting, subject: Training, one: Saves, other: Saves) -> _Pairs:
    return side_by_side(setting.compare_rounds, partial(_call, one, subject), partial(_call, other, subject))


def _call(saves: Saves, subject: Training) -> float:
    """The shortest of a few calls, in ms."""
    shortest = float("inf")
    for _ in range(_CALLS):
        subject.step()
        begin = perf_counter()
        handle = saves.begin()
        shortest = min(shortest, perf_counter() - begin)
        saves.end(handle)
    return 1e3 * shortest


def _what(base_bytes: int) -> str:
    return f"of LoRA over a base of {base_bytes / 1e9:.2g} GB"


def _off(noise: float) -> str:
    return f"as many steps without a save are off by {noise * 1e3:.0f} ms"


MEASURES: Final = {
    "bytes_of_ten": bytes_of_ten,
    "adapter_alone": adapter_alone,
    "every_tensor_changes": every_tensor_changes,
    "beside_others": beside_others,
}
PACKAGES: Final = ("torch_checkpointing", "moonclip")
