"""The figures of the command `async-ckpt`: waiting times at a terminal, rates of reading and copying, and memory.

In: a setting. Out: figures by name. Knows nothing of: how they are printed.

Seconds are those of a process from start to end, with its output piped and its code compiled. Rates are those of the
work of a command, in a process that has imported its modules and parsed its arguments: importing torch takes as long as
reading some GB, and the row of `--help` shows the time of typer. The bare reader and copier do the same work with as
many threads, past the page cache. The bare copy is as durable: the file is synced, then renamed, then its folder is
synced. Memory is the peak of a process beyond its memory after the imports, and includes its reads of mapped files.
"""

from __future__ import annotations

import io
import itertools
import shutil
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from async_ckpt import AsyncCheckpointer, Place
from async_ckpt.core.runs.manifest import NAME as MANIFEST
from async_ckpt.core.runs.manifest import Archive, Manifest, SaveTimes
from async_ckpt.core.runs.naming import STEP_FORMAT, TRACKER
from async_ckpt.stores.s3.store import ObjectStorage
from async_ckpt.tools.command.copying import copy_place
from async_ckpt.tools.command.soundness import verify_place

from . import probe
from .browser import MISSING, Chromium, opened, program
from .limits import MIB, NUM_READERS, READ_BYTES, WarmMemory, drop_cache, seconds_of
from .restarts import step_on_disk
from .run_events import events_of_run, write_history
from .setting import Setting, elapsed, side_by_side
from .store_server import options_for, store_server
from .table import Figure, Target, fixed
from .workloads import small_tensors, tensors

PACKAGES: Final = ("typer", "rich", "obstore")
_MEMORY_MIB: Final = 256
_LATENCY_SECONDS: Final = 0.01
_USUAL_STEPS: Final = 50
_RANK_TENSORS: Final = 1000
_PUTS_IN_FLIGHT: Final = 32


def without_work(setting: Setting) -> dict[str, Figure]:
    """The time of every command before it does any work."""
    root = setting.folder / "run"
    for step in range(1, _USUAL_STEPS + 1):
        _write(root, _files_of(step))
    help_ = probe.command(["--help"], setting.few_rounds)
    ls = probe.command(["ls", str(root)], setting.few_rounds)
    _require(ls.num_lines == _USUAL_STEPS + 1, "ls shows a row for each step")
    importing = [name for name, told in (("--help", help_), ("ls", ls)) if told.needs_torch]
    title = f"ls of a run of {_USUAL_STEPS} steps on the disk"
    return {
        "command_help": fixed("--help", "s", help_.seconds, 0.3),
        "command_ls": fixed(title, "s", ls.seconds, 0.5),
        "command_torch": Figure(
            "of these two, those that import torch", "", "fixed", Target("≤", 0.0), [(len(importing), 1)], ", ".join(importing)
        ),
    }  # fmt: skip


def long_runs(setting: Setting) -> dict[str, Figure]:
    """`ls` of a run with thousands of steps."""
    count, root = setting.listed_steps, setting.folder / "run"
    for step in range(1, count + 1):
        _write(root, _files_of(step))
    on_disk = probe.command(["ls", str(root)], setting.few_rounds)
    with store_server(latency=_LATENCY_SECONDS) as endpoint:
        there = ObjectStorage("s3://bucket/run", options_for(endpoint))
        files = (file for step in range(1, count + 1) for file in _files_of(step))
        seconds_of((partial(there.replace, *file) for file in files), _PUTS_IN_FLIGHT)
        store = ["--endpoint", endpoint, "--anonymous", "--region", "us-east-1"]
        in_store = probe.command(["ls", "s3://bucket/run", *store], setting.few_rounds)
    for told in (on_disk, in_store):
        _require(told.num_lines == count + 1, "ls shows a row for each step")
    title = f"ls of a run of {count:,} steps"
    far = f"{title} in a bucket that answers after {_LATENCY_SECONDS * 1e3:.0f} ms"
    return {
        "command_ls_many": fixed(f"{title} on the disk", "s", on_disk.seconds, 1.0),
        "command_ls_store": fixed(far, "s", in_store.seconds, 3.0),
    }


def pages(setting: Setting) -> dict[str, Figure]:
    """The page of a run with thousands of saves: writing it, and drawing its pictures in a browser."""
    count, root = setting.listed_steps, setting.folder / "run"
    for step in range(1, count + 1):
        _write(root, _files_of(step))
    write_history(root, events_of_run(count, every=1))
    file = setting.folder / "run.html"
    call = ["page", str(root), "-o", str(file), "--overwrite"]
    told = probe.command(call, setting.few_rounds)
    peak = probe.command_peak_bytes("page.run_page", call) / MIB
    title = f"page of a run of {count:,} steps"
    return {
        "command_page": fixed(title, "s", told.seconds, 5.0),
        "command_page_memory": fixed("its memory, beyond that of the imports", "MiB", [peak], _MEMORY_MIB),
        "command_page_bytes": fixed("its file", "MB", [file.stat().st_size / 1e6], 1.0),
        "command_page_browser": fixed(
            "its pictures in Chromium, from the navigation until all are drawn",
            "s",
            _drawing_seconds(file, setting),
            1.0,
            "" if program() else MISSING,
        ),
    }


def _drawing_seconds(file: Path, setting: Setting) -> list[float]:
    """Seconds until a browser has drawn a page; empty without a browser."""
    found = program()
    if found is None:
        return []
    seconds = []
    with Chromium(found, setting.folder / "profile") as browser:
        for _ in range(setting.few_rounds + 1):
            with opened(browser, file) as page:
                seconds.append(page.drawn_seconds)
    return seconds[1:]  # the first starts the browser's own processes


def many_ranks(setting: Setting) -> dict[str, Figure]:
    """`inspect` of a step that hundreds of ranks have saved, each with a part of every tensor."""
    count = setting.inspected_ranks
    step = step_on_disk(setting.folder / "run", count, _RANK_TENSORS)
    told = probe.command(["inspect", str(step)], setting.few_rounds)
    _require(told.num_lines == _RANK_TENSORS + 2, "inspect shows a row for each tensor")
    alone = probe.python("import torch", setting.few_rounds)
    pairs = list(zip(told.seconds, alone, strict=True))
    own = [max(0.0, seconds - by_torch) for seconds, by_torch in pairs]
    title = f"inspect of a step of {count} ranks and {_RANK_TENSORS:,} tensors"
    return {
        "command_inspect": fixed(title, "s", told.seconds, 1.0),
        "command_inspect_torch": Figure("the same beside Python alone", "s", "import torch", None, pairs),
        "command_inspect_own": fixed("the same without the import of torch", "s", own, 1.0),
    }


def reading(setting: Setting) -> dict[str, Figure]:
    archive = _saved(setting.folder / "run", {"model": tensors(setting.state_bytes)}, num_steps=1)[0]
    num_bytes = archive.stat().st_size
    ring = WarmMemory(NUM_READERS * READ_BYTES, READ_BYTES)

    def rate(read: Callable[[], float]) -> float:
        drop_cache(archive)
        return num_bytes / read() / 1e9

    pairs = side_by_side(
        setting.rounds,
        lambda: rate(lambda: _called(verify_place, Place(setting.folder / "run"), base=None, as_json=False)),
        lambda: rate(lambda: ring.read_seconds(archive)),
    )
    title, limit = f"verify of {num_bytes / 1e9:.2g} GB on the disk", "O_DIRECT read, same threads"
    return {"command_verify": Figure(title, "GB/s", limit, Target("≥", 0.85), pairs)}


def copying(setting: Setting) -> dict[str, Figure]:
    root = setting.folder / "run"
    archive = _saved(root, {"model": tensors(setting.state_bytes)}, num_steps=1)[0]
    num_bytes, copies = archive.stat().st_size, map(str, itertools.count())
    ring = WarmMemory(NUM_READERS * READ_BYTES, READ_BYTES)
    cp = partial(copy_place, ranges=(), latest=False, best=None, overwrite=False, as_json=False)

    def rate(copy: Callable[[Path], float]) -> float:
        drop_cache(archive)
        target = setting.folder / next(copies)
        try:
            return num_bytes / copy(target) / 1e9
        finally:
            shutil.rmtree(target)

    pairs = side_by_side(
        setting.rounds,
        lambda: rate(lambda target: _called(cp, Place(root), Place(target))),
        lambda: rate(lambda target: ring.transfer_seconds(archive, target / archive.name)),
    )
    limit = "O_DIRECT read and write + fsync, same threads"
    title = f"cp of {num_bytes / 1e9:.2g} GB from the disk to the disk"
    return {"command_cp": Figure(title, "GB/s", limit, Target("≥", 0.85), pairs)}


def memory(setting: Setting) -> dict[str, Figure]:
    """The memory of each command that reads whole tensors, for small and large checkpoints, and for many tensors."""
    states: dict[str, Callable[[], dict[str, torch.Tensor]]] = {
        f"{num_bytes / 1e9:.2g} GB": partial(tensors, num_bytes) for num_bytes in setting.read_bytes
    }
    states[f"{setting.num_small:,} tensors"] = partial(small_tensors, setting.num_small)
    peaks: dict[str, dict[str, float]] = {}
    for name, make in states.items():
        root = setting.folder / "run"
        first, second = _saved(root, {"model": make()}, {"model": make()}, num_steps=2)
        for title, module, arguments in _readers(root, first.parent, second.parent, setting.folder):
            peaks.setdefault(title, {})[name] = probe.command_peak_bytes(module, [*map(str, arguments)]) / MIB
            shutil.rmtree(setting.folder / "out", ignore_errors=True)
        shutil.rmtree(root)
    return {
        f"command_memory_{number}": fixed(
            f"memory of {title}, beyond that of the imports",
            "MiB",
            [max(by_state.values())],
            _MEMORY_MIB,
            ", ".join(f"{peak:.0f} MiB for {state}" for state, peak in by_state.items()),
        )
        for number, (title, by_state) in enumerate(peaks.items())
    }


def _readers(root: Path, first: Path, second: Path, folder: Path) -> Iterator[tuple[str, str, list[Any]]]:
    """The commands, with the modules that do their work."""
    out = folder / "out"
    yield "verify", "soundness", ["verify", first]
    yield "cp", "copying", ["cp", root, out, "--latest"]
    yield "inspect --stats", "inspection", ["inspect", first, "--stats"]
    yield "diff of two steps", "comparing.diffing", ["diff", first, second]
    yield "extract to safetensors", "conversion", ["extract", first, "--to", out / "x.safetensors"]
    yield "convert to an archive", "conversion", ["convert", first, out / "x.tar"]
    yield "convert to a file of torch.save", "conversion", ["convert", first, out / "x.pt"]


# --- runs ---------------------------------------------------------------------------------------------------------


def _saved(root: Path, *states: Any, num_steps: int) -> list[Path]:
    """The archives of a new run with these states."""
    with AsyncCheckpointer(root) as checkpointer:
        for step, state in zip(range(1, num_steps + 1), states, strict=True):
            checkpointer.save(state, step).result()
    return sorted(root.glob("step_*/*.tar"))


def _files_of(step: int) -> Iterator[tuple[str, bytes]]:
    """The files of a committed step with an unreadable archive, and the tracker, which names the last step."""
    attempt, folder = f"{step:08x}", STEP_FORMAT.format(step)
    archive = Archive(f"rank_00000.{attempt}.tar", 5, "0" * 32)
    record, times = {"loss": 1 / step, "epoch": step // 100}, SaveTimes(1.5, 0.002)
    made = Manifest(step, attempt, 1, 1e9 + step, (archive,), record=record, times=times)
    yield f"{folder}/{archive.name}", b"bytes"
    yield f"{folder}/{MANIFEST}", made.dump()
    yield TRACKER, folder.encode()


def _write(root: Path, files: Iterator[tuple[str, bytes]]) -> None:
    for name, data in files:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


# --- measuring ----------------------------------------------------------------------------------------------------


def _called(work: Callable[..., None], *arguments: Any, **options: Any) -> float:
    """Seconds that the work of a command takes in this process. Raises an error if the status is not 0."""
    with redirect_stdout(io.StringIO()):
        return elapsed(partial(work, *arguments, **options))


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"expected: {what}")


MEASURES: Final[dict[str, Callable[[Setting], dict[str, Figure]]]] = {
    "command_without_work": without_work,
    "command_long_runs": long_runs,
    "command_pages": pages,
    "command_many_ranks": many_ranks,
    "command_reading": reading,
    "command_copying": copying,
    "command_memory": memory,
}
