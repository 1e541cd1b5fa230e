"""Mutants of the device code: each changes one line of it, and the device tests must notice.

`python tests/support/mutants_device.py` runs the tests against every mutant, in a copy of the package, and keeps the test that noticed
each in tests/matrices/reports/mutants_device.json. It exits with 1 if a mutant survives, or if the text of one is not in the code
exactly once. `--only word` runs those whose description has the word.

The test that is known to notice a mutant is run first; if it passes, all device tests are.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "tests" / "matrices" / "reports" / "mutants_device.json"
# Where mutants are made.
CODE = (
    "core/staging/*.py",
    "core/backends/*.py",
    "core/host/pool.py",
    "core/host/process.py",
    "core/saving/attempt.py",
)
# What must notice them, in this order; a file that is named like the mutated one comes first.
TESTS = (
    "core/staging/test_device_order.py", "core/staging/test_device_faults.py", "core/staging/test_gpu.py", "core/staging/test_guard_storage.py",
    "core/staging/test_guard.py", "core/staging/test_snapshot.py", "core/backends/test_backends.py", "core/host/test_pool.py",
    "core/staging/test_device_operations.py", "core/staging/test_host_copy.py", "core/staging/test_guard_containers.py",
    "core/staging/test_device_fuzz.py",
)  # fmt: skip
_FIRST = {
    "guard": "core/staging/test_guard.py", "tripwires": "core/staging/test_guard_storage.py", "held_snapshot": "core/staging/test_snapshot.py",
    "pool": "core/host/test_pool.py", "backend": "core/backends/test_backends.py", "cuda": "core/backends/test_backends.py",
    "__init__": "core/backends/test_backends.py",
}  # fmt: skip
# With `--cuda`, these notice them: torch's own code for CUDA over the simulated runtime of tests/cuda, which is there already.
OF_CUDA = (
    "cuda/test_gpu_order.py", "core/staging/test_gpu.py", "cuda/test_gpu_faults.py", "cuda/test_gpu_forks.py",
    "core/state/test_gpu_rng.py", "face/dcp/test_gpu_dcp_stager.py",
)  # fmt: skip
LIMIT_SECONDS = 600.0
SURVIVED = "survived"
TOO_LONG = "no end in time"
CRASHED = "the interpreter crashed"


class Mutant(NamedTuple):
    """One change: `old` is in the device code exactly once, and becomes `new`."""

    what: str  # is wrong with it; its name
    old: str
    new: str

    def place(self) -> Path:
        """The file that it changes, within the package."""
        found = [path for path in code() if self.old in path.read_text(encoding="utf-8")]
        if len(found) != 1 or found[0].read_text(encoding="utf-8").count(self.old) != 1:
            raise LookupError(f"the text of {self.what!r} is not in the device code exactly once: {self.old!r}")
        return found[0].relative_to(ROOT)


MUTANTS = [
    # --- the order of copies and training
    Mutant(
        "copies do not wait for training", "self.side.wait_stream(self._backend.current_stream(self.device))", "pass"
    ),
    Mutant("training does not wait for copies", "stream.wait_stream(self.side)", "pass"),
    Mutant(
        "the end of a stall is recorded before the wait",
        "        stream.wait_stream(self.side)\n        after.record(stream)\n",
        "        after.record(stream)\n        stream.wait_stream(self.side)\n",
    ),
    Mutant("waits that are not over count as stall", "if after.query():", "if True:"),
    Mutant("the stall of a broken device fails the save", "_counting, suppress(RuntimeError),", "_counting,"),
    Mutant(
        "copies follow the training of the first device only",
        "for device in devices:\n                device.follow_training()",
        "for device in devices[:1]:\n                device.follow_training()",
    ),
    Mutant(
        "training waits for the copies of the first device only",
        "for device in devices:\n                    device.hold_training()",
        "for device in devices[:1]:\n                    device.hold_training()",
    ),
    Mutant(
        "training does not follow the copies of a save that failed in its call",
        "            finally:  # also after the copies",
        "            except ZeroDivisionError:\n                raise\n            else:  # not behind the copies",
    ),
    Mutant(
        "a guarded step waits on the first device only",
        "for device in devices.values():\n                    device.hold_training()",
        "for device in list(devices.values())[:1]:\n                    device.hold_training()",
    ),
    Mutant("nobody waits for the event of a copy", "            event.synchronize()\n", "            pass\n"),
    # --- memory of devices
    Mutant("two threads enqueue at once", "self.lock = threading.Lock()", "self.lock = threading.Semaphore(99)"),
    Mutant("a scratch buffer that is too small is used", "self._scratch.numel() < num_bytes", "False"),
    Mutant(
        "a device without memory for scratch fails the save",
        "except RuntimeError:  # out of memory; a broken device raises at the next call as well",
        "except KeyError:",
    ),
    Mutant("scratch has no bound", "SCRATCH_BYTES: Final = 32 * MIB", "SCRATCH_BYTES: Final = 4096 * MIB"),
    Mutant("small tensors are copied one by one", "PACK_BELOW: Final = 256 * KIB", "PACK_BELOW: Final = 0 * KIB"),
    # --- memory of the host
    Mutant("a box is lent twice", "                self._boxes.remove(box)\n", ""),
    Mutant("samples are read before they are copied", "self._device.wait(self._event)", "pass"),
    Mutant(
        "a device is quiet before its copies have ended",
        "mark().synchronize()\n        except",
        "mark()\n        except",
    ),
    Mutant(
        "a broken device is quiet",
        "        except RuntimeError:\n            return False\n        return True\n",
        "        except RuntimeError:\n            return True\n        return True\n",
    ),
    Mutant(
        "a failed save asks no device whether it is quiet", "quiet = self._source.are_devices_quiet()", "quiet = True"
    ),
    Mutant(
        "memory that a device may write to is lent again",
        "                        lease.leak()",
        "                        lease.release()",
    ),
    Mutant(
        "a segment is not known to be enqueued to", "                job.is_enqueued = True\n", "                pass\n"
    ),
    Mutant("a segment is handed on before its copies have ended", "        if not job.events:\n", "        if True:\n"),
    Mutant(
        "a failed save does not wait for the threads that fill",
        "        while self._num_filling:\n            try:\n",
        "        while False:\n            try:\n",
    ),
    Mutant("a box that is not page-locked is lent again", "        if box.pinned:", "        if True:"),
    Mutant("segments are not page-locked", "pin = next(iter(devices), None)", "pin = None"),
    Mutant(
        "a copy in memory is given back while a device writes to it", "        self._buffer.leak()\n", "        pass\n"
    ),
    # --- which bytes
    Mutant("strided tensors are copied as they lie", "dense = i in self.deferred or is_dense(tensor)", "dense = True"),
    Mutant("deferred tensors on devices are read as they are later", "self._dense, self.aliases)", "self._dense, {})"),
    Mutant(
        "deferred tensors on the host are read as they are later",
        "aliases = self.aliases if late else {}",
        "aliases = {}",
    ),
    Mutant("headers are left out", "for at, data in job.literals:", "for at, data in ():"),
    Mutant(
        "each segment is a copy of its own", "if (target + length, number, source + length) == piece[:3]:", "if False:"
    ),
    Mutant("small tensors are read where they lie later", "self._pointers[i] = place\n", "pass\n"),
    Mutant("small tensors of any layout are copied as they lie", "is_on_host(tensor) and is_dense(tensor):", "True:"),
    Mutant("a call copies any number of small tensors", "if len(small) == _MAX_SMALL:", "if False:"),
    Mutant("a call copies small tensors of any size in all", "left -= num_bytes", "left -= 0"),
    Mutant(
        "small tensors of a held snapshot come later", "if deferred and copies_small else ()", "if deferred else ()"
    ),
    Mutant(
        "a call waits for segments of literals",
        "goes = goes or [LATER if may_be_late else NOW]",
        "goes = goes or [NOW]",
    ),
    Mutant(
        "conjugated tensors are dense",
        "tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())",
        "tensor.is_contiguous()",
    ),
    # --- the guard
    Mutant("no step waits", "self._pending.add(hold)", "pass"),
    Mutant(
        "a step does not wait until all is enqueued",
        "                while not self.is_lifted:\n",
        "                while False:\n",
    ),
    Mutant("the wait of a step is not counted", "sum(now - since for since in self._waiting_since)", "0.0"),
    Mutant("each save registers a hook", "        _gates[optimizer] = gate  # last", "        pass  # last"),
    Mutant("strided tensors are deferred", "        and is_dense(tensor)\n", ""),
    Mutant(
        "a tensor of just 1 MiB is not deferred", "tensor.nbytes >= DEFERRED_BYTES", "tensor.nbytes > DEFERRED_BYTES"
    ),
    # --- tripwires
    Mutant("samples meet only some bytes of an item", "SAMPLE_BYTES - 1) | 1", "SAMPLE_BYTES - 1) & ~7"),
    Mutant(
        "samples of the first device only are compared",
        "for device, second in self._after.items():",
        "for device, second in list(self._after.items())[:1]:",
    ),
    Mutant("counters count after data was replaced", " and self._owner.data_ptr() == self.alias.address", ""),
    Mutant("samples are not compared", "if before[sample] != after[sample]:", "if False:"),
    Mutant("counters of writes are not compared", "return versions != self._versions and", "return False and"),
    Mutant(
        "no second samples are taken",
        "for device, tensors in self._on.items():\n            with",
        "for device, tensors in ():\n            with",
    ),
    Mutant(
        "what the counters show is forgotten",
        "torn = self._gone.union(*self._moved.values())",
        "torn = set(self._gone)",
    ),
    Mutant(
        "counters are looked at after the step",
        "        if (tripwires := self._tripwires) is not None:\n            tripwires.look_at_versions()\n        self",
        "        self",
    ),
    # --- held snapshots
    Mutant(
        "the stall of a snapshot is that of the call alone",
        "self._call_seconds + self._copy.snapshot.stall_seconds",
        "self._call_seconds",
    ),
    Mutant(
        "a closed snapshot keeps its memory",
        "if self._release.detach() is not None:",
        "if self._release.detach() is None:",
    ),
    Mutant("a closed snapshot can be read", "        self._source.close()\n", ""),
    Mutant("a guard beside a snapshot is not refused", "    if completions and guard:\n", "    if False:\n"),
    # --- accelerators
    Mutant("a tensor is at each device of its kind", "device.index in (None, tensor.device.index)", "True"),
    Mutant("a forked child asks for the accelerator", "None if is_in_bad_fork() or not", "None if not"),
    Mutant("memory of Ascend is not mapped", '"npu": 2}', '"npu": 0}'),
    # --- the pool
    Mutant("leases are served in any order", "while self._waiting[0] != order or not (", "while not ("),
    Mutant("the budget is passed", "at_once, self._max_segments - self._num_segments))", "at_once))"),
    Mutant("leaked memory is not counted", "            self._num_leaked += 1\n", ""),
    Mutant("memory that was written off is unmapped", "        segment.memory.leak()\n", ""),
    Mutant("segments apart are lent as a run", "if run and run[-1].end != segment.begin:", "if False:"),
    Mutant("refused page-locking is tried again", "if self._pin_refused or memory.pinned:", "if memory.pinned:"),
    Mutant("one user of two ends a lease", "            last = self._count == 0\n", "            last = True\n"),
]


# Those that only the tests of tests/cuda notice.
OF_CUDA_ALONE = [
    Mutant(
        "nobody looks for memory that is gone at the end", "torn = self._source.gone_from_devices()", "torn = set()"
    ),
    Mutant("memory that is gone may be anybody's", "or not ((device := devices[i]) and device.has_order(at))", ""),
    Mutant("memory of any stream is the training's", 'bool(part["stream"] == stream.cuda_stream)', "True"),
    Mutant(
        "samples need memory of their own on the device",
        "(joined := self._side.scratch(num_bytes)) is None:",
        "(joined := torch.empty(num_bytes, dtype=torch.uint8, device=self.device)) is None:",
    ),
    Mutant(
        "a strided tensor needs memory of the device",
        "except RuntimeError:  # out of memory; if the device",
        "except KeyError:  #",
    ),
    Mutant(
        "conjugated items are copied as they lie", "return found.neg() if block.is_neg() else found", "return found"
    ),
    # --- a forked child
    Mutant(
        "a forked child ends the events of its parent", "ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))", "None"
    ),
    Mutant("a forked child ends the side stream of its parent", "            never_end(made)\n", "            pass\n"),
    # --- captures and streams
    Mutant(
        "a captured step takes an event into its graph",
        "            if is_capturing():\n                self.completion",
        "            if False:\n                self.completion",
    ),
    Mutant("a save during a capture is not refused", "if device is not None and is_capturing():", "if False:"),
    Mutant("the stream of copies waits for the default stream", "_NON_BLOCKING: Final = 1", "_NON_BLOCKING: Final = 0"),
    Mutant(
        "the refusal of a stream is left to the next launch",
        "        runtime.cudaGetLastError()\n    return",
        "        pass\n    return",
    ),
    # --- refusals
    Mutant(
        "a refusal of memory is left to the next launch",
        "                    self.forget_refusal()\n",
        "                    pass\n",
    ),
    Mutant(
        "memory is not known to be registered",
        "            if code != 0:  # if 0, the call succeeded, and only the switch back to the previous device failed\n",
        "            if True:\n",
    ),
    Mutant("a thread of the library breaks a capture", "mode = ctypes.c_int(_THREAD_LOCAL)", "mode = ctypes.c_int(0)"),
]
# What the tests of tests/cuda have nothing of: tensors on the host, other accelerators, the bookkeeping of memory.
NOT_OF_CUDA = frozenset(
    {
        "deferred tensors on the host are read as they are later",
        "headers are left out",
        "small tensors are read where they lie later",
        "small tensors of any layout are copied as they lie",
        "a call copies any number of small tensors",
        "a call copies small tensors of any size in all",
        "small tensors of a held snapshot come later",
        "a call waits for segments of literals",
        "a tensor of just 1 MiB is not deferred",
        "each save registers a hook",
        "the wait of a step is not counted",
        "a closed snapshot keeps its memory",
        "a closed snapshot can be read",
        "a guard beside a snapshot is not refused",
        "a tensor is at each device of its kind",
        "memory of Ascend is not mapped",
        "leases are served in any order",
        "the budget is passed",
        "leaked memory is not counted",
        "segments apart are lent as a run",
        "one user of two ends a lease",
        "strided tensors are deferred",
        "the stall of a snapshot is that of the call alone",
        "refused page-locking is tried again",
        # torch's own CUDA code answers a forked child without the runtime.
        "a forked child asks for the accelerator",
        # Memory that a broken device has registered is not unregistered, and so it stays without them, too.
        "memory that was written off is unmapped",
        "a copy in memory is given back while a device writes to it",
        # They cost time or memory, and no byte is another.
        "scratch has no bound",
        "small tensors are copied one by one",
        "each segment is a copy of its own",
    }
)


def code() -> list[Path]:
    return [path for pattern in CODE for path in sorted((ROOT / "async_ckpt").glob(pattern))]


# --- running them ------------------------------------------------------------------------------------------------


class Copy:
    """A copy of the package and its tests, in which one mutant at a time is alive."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self._options = folder, options  # of pytest
        ignored = shutil.ignore_patterns("__pycache__", ".*_cache")
        for part in ("async_ckpt", "tests", "examples"):
            shutil.copytree(ROOT / part, folder / part, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, folder / name)

    def notices(self, mutant: Mutant, known: str | None) -> str:
        """The test that notices a mutant, by first trying the one that is known to; or SURVIVED."""
        place = mutant.place()
        text = (ROOT / place).read_text(encoding="utf-8").replace(mutant.old, mutant.new)
        found = self.failing([known], place, text) if known not in (None, CRASHED) else SURVIVED
        return found if found != SURVIVED else self.failing(_tests_for(place), place, text)

    def failing(self, tests: Iterable[str], place: Path, text: str) -> str:
        """The first test that fails while the file at this place of the copy has this text; or SURVIVED."""
        target = self.folder / place
        target.write_text(text, encoding="utf-8")
        try:
            return self.first_failing(list(tests))
        finally:
            shutil.copyfile(ROOT / place, target)

    def first_failing(self, tests: list[str]) -> str:
        """The first test that fails; or SURVIVED. In a forked child: torch takes longer to import than most of these tests."""
        log = self.folder / "log"
        child = multiprocessing.get_context("fork").Process(target=self._run_tests, args=(tests, log))
        child.start()
        child.join(LIMIT_SECONDS)
        if (status := child.exitcode) is None:
            assert child.pid is not None
            os.killpg(child.pid, signal.SIGKILL)
            child.join()
            return TOO_LONG
        told = log.read_text(encoding="utf-8", errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+\.py(?:::\w+)?)", told, flags=re.MULTILINE)
        if failed:
            return failed.group(1)
        if status > 0 and "while loading conftest" not in told:  # else it cannot even be imported
            sys.exit(f"pytest did not run {' '.join(tests)}: {told[-2000:]}")
        return SURVIVED if status == 0 else CRASHED

    def _run_tests(self, tests: list[str], log: Path) -> None:
        os.setsid()
        os.chdir(self.folder)
        with log.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.path[:] = [path for path in sys.path if not path.startswith(str(ROOT / "tests"))]
        import pytest

        options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", *self._options]
        os._exit(pytest.main([*options, *(f"tests/{test}" for test in tests)]))


def _tests_for(place: Path) -> Iterator[str]:
    first = _FIRST.get(place.stem)
    if first:
        yield first
    yield from (test for test in TESTS if test != first)


def _import_for_all() -> None:
    """What the tests import, but for the package: each fork has it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/conftest.py has it, and before torch looks
    for name in ("pytest", "numpy", "torch", "torch._inductor", "torch.optim", "torch.distributed.tensor"):
        importlib.import_module(name)


def _turn_to_cuda() -> None:
    """Run the tests marked gpu, in children that have used no device yet: torch counts devices by NVML."""
    global TESTS
    TESTS = OF_CUDA
    _FIRST.clear()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    MUTANTS[:] = [*OF_CUDA_ALONE, *(mutant for mutant in MUTANTS if mutant.what not in NOT_OF_CUDA)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="a word in the description of a mutant")
    parser.add_argument("--cuda", action="store_true", help="by the tests of tests/cuda; keeps nothing")
    options = parser.parse_args()
    if options.cuda:
        _turn_to_cuda()
    chosen = [mutant for mutant in MUTANTS if options.only in mutant.what]
    for mutant in chosen:
        mutant.place()
    known: dict[str, str] = {} if options.cuda else json.loads(KEPT.read_text(encoding="utf-8"))
    _import_for_all()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Copy(Path(folder) / "house", *(("-m", "gpu") if options.cuda else ()))
        if (failing := copy.first_failing(list(TESTS))) != SURVIVED:
            sys.exit(f"without any mutant {failing} fails; mend it first")
        for mutant in chosen:
            known[mutant.what] = copy.notices(mutant, known.get(mutant.what))
            print(f"{mutant.what}: {known[mutant.what]}", flush=True)
    if not options.cuda:
        kept = {mutant.what: known[mutant.what] for mutant in MUTANTS if mutant.what in known}
        KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    survivors = [mutant.what for mutant in chosen if known[mutant.what] == SURVIVED]
    print(f"{len(chosen)} mutants, {len(survivors)} survived: {', '.join(survivors) or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
