"""`make bench-gpu`: measurements on an accelerator, the most important ones first, within the given time.

In: a setting. Out: rows by name, one part after the other. Knows nothing of: how a part measures.

The parts are independent: the error of one is stored with its row, and the next one begins. A part that needs more than
the remaining time is not run, and a part that takes longer than its share is ended. If it cannot be ended, the process
is ended; the results of the earlier parts are stored by then. Only torch and xxhash are needed.

How rows are measured: *copies pending* counts copies of 4 KiB behind a busy kernel until one call takes more than 50
ms; *from the device to the host* is `save` until all is staged, compared with a copy to 1 GiB of pinned memory; *steps
during a save* are synchronized one by one, and compared with as many others; for *saves of their instant*, the training
changes, drops, resizes or replaces the state right after the call, and the save has the bytes of that instant or fails
with TornSnapshotError; *operations enqueued* come from torch's profiler.
"""

from __future__ import annotations

import faulthandler
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Final, NamedTuple

from . import gpu_bench, gpu_copies, gpu_first, gpu_training, gpu_traps
from .candidates import CANDIDATES
from .gpu_bench import Accelerator, Bench, CannotMeasureError, Found
from .setting import Setting
from .table import Figure, Row, Target

PACKAGES: Final = ("safetensors", "torch_checkpointing", "nvidia-resiliency-ext")
PEERS: Final = ("dcp_async", "dcp_async_cached", "torch_checkpointing", "resiliency")
NOT_MEASURED: Final = "not measured on a GPU"
# The seconds that a part may run beyond its time. After that, it is ended, and after as long again, the process is.
_GRACE_SECONDS: Final = 25.0
# A part begins if at least this share of its seconds is left. With less time it makes fewer rounds, down to one.
_WORTH_BEGINNING: Final = 0.5
_TESTS: Final = ("-m", "pytest", "-m", "gpu")
CLOSING: Final = f"The tests of the device: {shlex.join(('python', *_TESTS))}"


class Part(NamedTuple):
    """Rows that are measured together, in `seconds` at most."""

    seconds: float
    measure: Callable[[Bench], Mapping[str, Found]]
    rows: Mapping[str, Figure]


class OutOfTimeError(Exception):
    """A part has taken too long."""


def _row(title: str, unit: str, limit: str, target: Target | None = None) -> Figure:
    return Figure(title, unit, limit, target, [])


def _copy_rows(num_gib: int) -> dict[str, Figure]:
    title = f"{num_gib} GiB from the device to the host by a save"
    return {f"gpu_copy_{num_gib}": _row(title, "GB/s", "copy_ to pinned memory", Target("≥", 0.9))}


def _call_rows(kind: str, call: str) -> dict[str, Figure]:
    of = f"{call} of 1,024 tensors of 4 MiB"
    enqueued = Target("≤", 1.0) if kind == "unguarded" else None
    return {
        f"gpu_call_{kind}": _row(f"{of}: the call", "ms", "20 µs per tensor and segment", Target("≤", 1.0)),
        f"gpu_call_cpu_{kind}": _row(
            f"{of}: its thread's processor time per tensor", "µs", "fixed", Target("≤", 1.0)
        ),
        f"gpu_operations_{kind}": _row(
            f"{of}: operations enqueued until it is staged", "", "one per tensor and 128 MiB", enqueued
        ),
    }  # fmt: skip


def _beside_rows(name: str) -> dict[str, Figure]:
    title, at_most = CANDIDATES[name].title, Target("≤", 1.0)
    return {
        f"gpu_lost_{name}": _row("training seconds lost to a save(guard=) of GPT-2", "s", title, at_most),
        f"gpu_stall_{name}": _row("stall of save(guard=) of GPT-2", "s", title),
        f"gpu_total_{name}": _row("call to durable, beside the training of GPT-2", "s", title, at_most),
    }


def _first_rows() -> dict[str, Figure]:
    at_most = {"cold": 2.0, "second": 1.2, "prewarmed": 1.2, "restored": 1.2}
    titles = {
        "cold": "first save of 7 GiB, neither restored nor prewarmed",
        "second": "the second one after it",
        "prewarmed": "first save of 7 GiB after prewarm",
        "restored": "first save of 7 GiB after restore",
    }
    return {
        f"gpu_first_{name}_{what}": _row(f"{titles[name]}: {told}", unit, "a later one", Target("≤", at_most[name]))
        for name in gpu_first.FIRSTS
        for what, told, unit in (("stall", "stall", "ms"), ("total", "call to durable", "s"))
    }


def _parts() -> dict[str, Part]:
    pending = "those that saves have under way at most"
    once = Target("≥", 1.0)
    return {
        "gpu_latency": Part(20, gpu_copies.latency, {
            "gpu_pending": _row("copies pending on a busy stream before a call blocks", "", pending, once),
            "gpu_pending_behind": _row("the same on a stream that waits for a busy one", "", pending, once),
            "gpu_enqueue": _row("the first copy_ behind a busy kernel", "µs", "fixed"),
        }),
        "gpu_pinning": Part(20, gpu_copies.pinning, {
            "gpu_pinning_run": _row("longest call of the training while a thread page-locks 1 GiB, 128 MiB at once as saves do", "ms", "a time as long without", None),
            "gpu_pinning_whole": _row("the same all at once", "ms", "a time as long without", None),
        }),
        "gpu_copy_1": Part(20, partial(gpu_copies.copies, num_gib=1), _copy_rows(1)),
        "gpu_copy_16": Part(75, partial(gpu_copies.copies, num_gib=16), _copy_rows(16)),
        "gpu_inflation": Part(25, partial(gpu_training.inflation, guarded=True), {
            "gpu_inflation_guarded": _row("steps of GPT-2 during a save(guard=)", "s", "as many others", Target("≤", 1.03)),
        }),
        "gpu_inflation_unguarded": Part(25, partial(gpu_training.inflation, guarded=False), {
            "gpu_inflation_unguarded": _row("steps of GPT-2 during a save", "s", "as many others"),
        }),
        "gpu_traps": Part(40, gpu_traps.traps, {
            "gpu_traps": _row("saves of their instant, or failed by name, whatever training did next", "", "saves", once),
        }),
        "gpu_graphs": Part(30, gpu_traps.graphs, {
            "gpu_graphs": _row("graphs captured or replayed beside a save, both right", "", "saves", once),
        }),
        **{
            f"gpu_beside_{name}": Part(30, partial(gpu_training.beside, name=name), _beside_rows(name))
            for name in PEERS
        },
        "gpu_first": Part(80, gpu_first.first, _first_rows()),
        "gpu_restore": Part(60, gpu_first.restore, {
            "gpu_restore_cold": _row("restore of 7 GiB onto the device, verified, cold", "s", "torch.load(mmap=True), copy_", Target("≤", 1.0)),
            "gpu_restore_warm": _row("the same, the files in the page cache", "s", "torch.load(mmap=True), copy_", Target("≤", 1.0)),
        }),
        # It may leave a profiler behind that slows down calls.
        "gpu_calls": Part(60, gpu_copies.calls, {
            **_call_rows("unguarded", "save"), **_call_rows("guarded", "save(guard=)"),
        }),
        # Last, since the disk may need a minute for each.
        "gpu_copy_48": Part(90, partial(gpu_copies.copies, num_gib=48), _copy_rows(48)),
    }  # fmt: skip


def measures() -> dict[str, Callable[[Setting], Mapping[str, Row]]]:
    """The parts, in order. Their time begins now.

    A first measure returns all rows without results, so that an interrupted command leaves a complete table.
    """
    begin = perf_counter()
    parts = _parts()

    def plan(_: Setting) -> Mapping[str, Row]:
        note = NOT_MEASURED if gpu_bench.here() is None else "not run: the command had ended before"
        return {name: row for part in parts.values() for name, row in _all(part, note).items()}

    return {"gpu": plan, **{name: partial(_run, part, begin) for name, part in parts.items()}}


def _all(part: Part, note: str, **details: Any) -> dict[str, Row]:
    return {name: replace(row, note=note, details=details) for name, row in part.rows.items()}


def _run(part: Part, begin: float, setting: Setting) -> Mapping[str, Row]:
    """The rows of a part with their results, or with the reason why there are none."""
    device = gpu_bench.here()
    if device is None:
        return _all(part, NOT_MEASURED)
    left = begin + setting.gpu_seconds - perf_counter()
    if left < part.seconds * _WORTH_BEGINNING:
        return _all(part, f"not run: {max(0.0, left):.0f} s were left, and it may take {part.seconds:.0f} s")
    seconds = min(part.seconds, left)
    try:
        setting.folder.mkdir(parents=True, exist_ok=True)
        with _ended_after(seconds):
            found = part.measure(Bench(setting, device, perf_counter() + seconds))
    except CannotMeasureError as error:
        return _all(part, f"not measured: {error}")
    except Exception as error:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        return _all(part, f"failed: {type(error).__name__}: {error}", traceback=traceback.format_exc())
    finally:
        _forget(device)
    return {
        name: replace(row, pairs=found[name].pairs, note=found[name].note, details=dict(found[name].details))
        for name, row in part.rows.items()
    }


def _forget(device: Accelerator) -> None:
    try:
        device.forget()
    except RuntimeError:
        pass  # the device is broken; the next part will report it


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the part when its time is long over, or end the process if that does not end the part.

    Only on the main thread.
    """

    def end(*_: Any) -> None:
        raise OutOfTimeError(f"not done after {seconds + _GRACE_SECONDS:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds + _GRACE_SECONDS)
        # `sys.stderr` may be replaced by a stream without a file descriptor, which faulthandler cannot write to.
        faulthandler.dump_traceback_later(seconds + 2 * _GRACE_SECONDS, exit=True, file=sys.__stderr__ or 2)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        faulthandler.cancel_dump_traceback_later()
