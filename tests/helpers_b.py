"""What several tests share: states that are a function of their step, a disk that stops at named points, child processes.

In: what a test wants to happen, and where. Out: exactly that. Knows nothing of: how a save works.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from async_ckpt import AsyncCheckpointer
from async_ckpt.host.threads import running_future
from async_ckpt.storage.local import LocalSink, LocalStorage

MIB = 1 << 20
SEGMENT = 4 * MIB
# Long enough for any machine; reached only when a test fails.
PATIENCE = 60.0


# --- states ---------------------------------------------------------------------------------------------------


def weight(step: int, mib: int = 1) -> torch.Tensor:
    """`mib` MiB whose every item depends on the step."""
    return torch.arange(mib * MIB // 4, dtype=torch.int32).mul_(2 * step + 1).add_(step)


def state_at(step: int, mib: int = 1) -> dict[str, Any]:
    return {
        "model": {"weight": weight(step, mib), "bias": torch.full((3,), float(step)), "none": torch.empty(0)},
        "step": step,
        "note": f"step {step}",
    }


def assert_is_state(state: dict[str, Any], step: int, mib: int = 1) -> None:
    want = state_at(step, mib)
    assert state["step"] == step
    assert state["note"] == want["note"]
    for name, tensor in want["model"].items():
        assert torch.equal(state["model"][name], tensor), f"{name} of step {step} differs"


def open_run(root: str | os.PathLike[str], **options: Any) -> AsyncCheckpointer:
    options.setdefault("segment_bytes", SEGMENT)
    return AsyncCheckpointer(root, **options)


# --- threads --------------------------------------------------------------------------------------------------


class Thrown(Exception):
    """What a test throws, and recognises again."""


class Gate:
    """A point in a function where it waits for the test."""

    def __init__(self) -> None:
        self._reached, self._go = threading.Event(), threading.Event()

    def passed(self) -> None:
        self._reached.set()
        assert self._go.wait(PATIENCE), "the test has left a function waiting"

    def wait_reached(self) -> None:
        assert self._reached.wait(PATIENCE), "nobody came"

    def open(self) -> None:
        self._go.set()


class Call(threading.Thread):
    """A call on another thread; `outcome()` waits for it, and raises what it raised."""

    def __init__(self, fn: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._fn = fn
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._fn()
        except BaseException as error:
            self._error = error

    def outcome(self) -> Any:
        self.join(PATIENCE)
        assert not self.is_alive(), "the call does not return"
        if self._error is not None:
            raise self._error
        return self._value

    def wait_until_inside(self, function: str) -> None:
        """Return when the thread is inside of a function of this name, or when its call has ended."""
        until(lambda: not self.is_alive() or function in _functions_of(self.ident))


def _functions_of(ident: int | None) -> set[str]:
    """The functions that a thread is in.

    Not by sys._current_frames: a collection of garbage inside of it waits for ever for a lock that it holds itself.
    """
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)  # of 100 threads at most, the newest ones first
        file.seek(0)
        told = file.read()
    names: set[str] = set()
    for part in re.split(r"^(?:Current thread|Thread) ", told, flags=re.MULTILINE):
        if part and int(part.split()[0], 16) == ident:
            names.update(re.findall(r"^  File .* in (\S+)$", part, flags=re.MULTILINE))
    return names


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that no event tells of."""
    pause = threading.Event()
    for _ in range(int(PATIENCE / 0.002)):
        if condition():
            return
        pause.wait(0.002)
    raise AssertionError("what was waited for did not come")


# --- a disk that follows a script -----------------------------------------------------------------------------


class Stop:
    """A point of the script: whoever comes by waits there for the test, or fails."""

    def __init__(self, call: str, path: str, *, error: BaseException | None = None, times: int | None = None):
        self.call, self.path = call, path
        self._error, self._times = error, times
        self._reached = threading.Event()
        self._released = threading.Event()
        if error is not None:
            self._released.set()

    def wait_reached(self) -> None:
        assert self._reached.wait(PATIENCE), f"nobody came to {self.call} {self.path}"

    @property
    def reached(self) -> bool:
        return self._reached.is_set()

    def release(self, error: BaseException | None = None) -> None:
        self._error = error
        self._released.set()

    def takes(self, call: str, path: str) -> bool:
        """Whether this call stops here. Once used up, it lets everything pass."""
        if call != self.call or self.path not in path or self._times == 0:
            return False
        if self._times is not None:
            self._times -= 1
        return True

    def meet(self) -> None:
        self._reached.set()
        assert self._released.wait(PATIENCE), f"the test left {self.call} {self.path} waiting"
        if self._error is not None:
            raise self._error


class ScriptedStorage(LocalStorage):
    """The local disk, with stops before the calls that a test names. Leaving the block lets everyone go."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        super().__init__(root)
        self.calls: list[tuple[str, str]] = []
        self.sinks: list[ScriptedSink] = []
        self._stops: list[Stop] = []
        self._lock = threading.Lock()

    def stop(self, call: str, path: str = "", *, times: int | None = None) -> Stop:
        """Hold the calls of this name whose path contains `path`."""
        self._stops.append(Stop(call, path, times=times))
        return self._stops[-1]

    def fail(self, call: str, path: str = "", *, error: BaseException, times: int | None = 1) -> Stop:
        """Fail such calls instead: the first `times`, or all."""
        self._stops.append(Stop(call, path, error=error, times=times))
        return self._stops[-1]

    def release_all(self) -> None:
        for stop in self._stops:
            if not stop._released.is_set():
                stop.release()

    def __enter__(self) -> ScriptedStorage:
        return self

    def __exit__(self, *_: object) -> None:
        self.release_all()

    def pass_by(self, call: str, path: str) -> None:
        with self._lock:
            self.calls.append((call, path))
            stops = [stop for stop in self._stops if stop.takes(call, path)]
        for stop in stops:
            stop.meet()

    def create(self, path: str, *, num_bytes: int, **sizes: Any) -> Any:
        self.pass_by("create", path)
        self.sinks.append(ScriptedSink(self, path, super().create(path, num_bytes=num_bytes, **sizes)))
        return self.sinks[-1]

    def read(self, path: str) -> tuple[bytes, str]:
        self.pass_by("read", path)
        return super().read(path)

    def open(self, path: str) -> Any:
        self.pass_by("open", path)
        return super().open(path)

    def put_new(self, path: str, data: bytes) -> None:
        self.pass_by("put_new", path)
        super().put_new(path, data)

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str | None:
        self.pass_by("replace", path)
        return super().replace(path, data, version=version)

    def move(self, path: str, to: str) -> None:
        self.pass_by("move", path)
        super().move(path, to)

    def delete(self, path: str) -> None:
        self.pass_by("delete", path)
        super().delete(path)


class ScriptedSink:
    """One file of a scripted disk."""

    num_retries = 0
    retryable = False

    def __init__(self, storage: ScriptedStorage, path: str, sink: LocalSink) -> None:
        self._storage, self._path, self._sink = storage, path, sink
        self.failed = running_future()

    def write(self, offset: int, data: memoryview, lease: Any = None) -> None:
        self._storage.pass_by("write", self._path)
        self._sink.write(offset, data, lease)

    @property
    def num_bytes(self) -> int:
        return self._sink.num_bytes

    def finish(self, num_bytes: int | None = None) -> None:
        self._storage.pass_by("finish", self._path)
        self._sink.finish(num_bytes)

    def abort(self) -> None:
        self._storage.pass_by("abort", self._path)
        self._sink.abort()

    def close(self) -> None:
        self._storage.pass_by("close", self._path)
        self._sink.close()

    def give_up(self) -> None:
        self._sink.give_up()

    def relieve(self) -> bool:
        return self._sink.relieve()


def scripted(ckpt: AsyncCheckpointer) -> ScriptedStorage:
    """Put a checkpointer on a scripted disk. The one place in the tests that reaches into its parts."""
    disk = ScriptedStorage(ckpt.root)
    ckpt._roots.runs[0]._root.storage = disk
    return disk


# --- folders --------------------------------------------------------------------------------------------------


def names_below(root: str | os.PathLike[str]) -> list[str]:
    """Every file below a folder."""
    top = Path(root)
    return sorted(str(path.relative_to(top)) for path in top.rglob("*") if not path.is_dir())


def leftovers(root: str | os.PathLike[str]) -> list[str]:
    """Files below a run's root that no commit accounts for."""
    rows = []
    for name in names_below(root):
        path = Path(root, name)
        named = path.with_name("manifest.json")
        alive = named.exists() and any(
            archive["name"] == path.name for archive in json.loads(named.read_text())["archives"]
        )
        if not alive and path.name not in ("manifest.json", "latest", "checkpoints.jsonl"):
            rows.append(name)
    return rows


def footprint(root: str | os.PathLike[str]) -> dict[str, tuple[int, int, int, int]]:
    """All that a change on storage would show in: mode, inode, size, time of every file and folder."""
    top = Path(root)
    found = {}
    for path in [top, *top.rglob("*")]:
        stat = path.lstat()
        found[str(path.relative_to(top))] = (stat.st_mode, stat.st_ino, stat.st_size, stat.st_mtime_ns)
    return found


# --- child processes ------------------------------------------------------------------------------------------

# Imports once, then forks a child for each job. The child leaves the loop and runs the job as its main program, so
# that it ends like any other: exit hooks, tracebacks and status are the interpreter's own.
_NURSERY = """
import gc, json, os, select, signal, sys
import torch, async_ckpt, helpers_b
gc.freeze()  # what is here already need not be looked through by every child
while True:
    line = sys.stdin.readline()
    if not line:
        os._exit(0)
    order = json.loads(line)
    if "wait" in order:
        watch = os.pidfd_open(order["wait"])
        hung = not select.select([watch], [], [], order["patience"])[0]
        if hung:
            os.kill(order["wait"], signal.SIGKILL)
        os.close(watch)
        status = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        print(json.dumps({"status": status, "hung": hung}), flush=True)
        continue
    child = os.fork()
    if child == 0:
        break
    print(child, flush=True)
for number, name, flags in [(0, order["stdin"], os.O_RDONLY), (1, order["out"], os.O_WRONLY | os.O_CREAT),
                            (2, order["err"], os.O_WRONLY | os.O_CREAT)]:
    opened = os.open(name, flags, 0o666)
    os.dup2(opened, number)
    os.close(opened)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["train.py", *order["arguments"]]
code = compile(order["code"], "train.py", "exec")
for name in ("line", "order", "child", "number", "name", "flags", "opened"):
    globals().pop(name, None)
exec(code)
"""


@dataclass(frozen=True)
class Ended:
    """How a child ended: its exit status, negative for a signal."""

    status: int
    out: str
    err: str


class Child:
    """A process that runs a script of the test."""

    def __init__(self, nursery: Nursery, folder: Path, pid: int) -> None:
        self._nursery, self._folder, self.pid = nursery, folder, pid

    def send(self, signum: int) -> None:
        os.kill(self.pid, signum)

    def wait_for_line(self, text: str) -> None:
        """Return when the child has printed this."""
        until(lambda: text in (self._folder / "out").read_text())

    def ended(self) -> Ended:
        told = self._nursery.ask({"wait": self.pid, "patience": PATIENCE})
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        assert not told["hung"], f"the child did not end\n{out}\n{err}"
        return Ended(told["status"], out, err)


class Nursery:
    """Runs scripts in processes of their own, at the price of a fork each."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])]),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()

    def ask(self, order: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, code: str, *arguments: object, stdin: str = os.devnull) -> Child:
        folder = self._folder / f"child-{next(self._numbers)}"
        folder.mkdir()
        for name in ("out", "err"):
            (folder / name).touch()
        order = {
            "code": textwrap.dedent(code),
            "arguments": [str(argument) for argument in arguments],
            "stdin": stdin,
            "out": str(folder / "out"),
            "err": str(folder / "err"),
        }
        return Child(self, folder, self.ask(order))

    def run(self, code: str, *arguments: object) -> Ended:
        return self.start(code, *arguments).ended()


# --- for use in a child ---------------------------------------------------------------------------------------

_CALLS = ("open", "pwrite", "write", "fsync", "replace", "link", "unlink", "mkdir", "rmdir")


def watch_disk(before: Callable[[str, tuple[Any, ...]], None]) -> None:
    """In this process, call `before` ahead of every system call that changes the disk."""

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if name != "open" or arguments[1] & os.O_CREAT:
                before(name, arguments)
            return real(*arguments, **options)

        return call

    for name in _CALLS:
        setattr(os, name, watched(name, getattr(os, name)))


def die_at(number: int) -> Callable[[], int]:
    """From now on, die at the `number`-th call that changes the disk, a write half done. Returns the count so far."""
    write, pwrite = os.write, os.pwrite
    lock = threading.Lock()
    count = 0

    def before(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        with lock:
            count += 1
            if count != number:
                return
            if name == "write":
                write(arguments[0], arguments[1][: len(arguments[1]) // 2])
            elif name == "pwrite":
                half = len(arguments[1]) // 2 // 4096 * 4096
                pwrite(arguments[0], arguments[1][:half], arguments[2])
            os.kill(os.getpid(), signal.SIGKILL)

    watch_disk(before)
    return lambda: count


def hold_writes() -> threading.Event:
    """In this process, let no archive be written to before the event is set."""
    go = threading.Event()
    write = LocalSink.write

    def held(self: LocalSink, offset: int, data: memoryview, lease: Any) -> None:
        go.wait()
        write(self, offset, data, lease)

    LocalSink.write = held  # type: ignore[method-assign]
    return go


def allow_tracing() -> None:
    """Let any process of this user trace this one, where the kernel asks for that."""
    import ctypes

    pr_set_ptracer, anyone = 0x59616D61, ctypes.c_ulong(-1)
    ctypes.CDLL(None).prctl(pr_set_ptracer, anyone, 0, 0, 0)


# --- faults in system calls -----------------------------------------------------------------------------------


def why_no_strace() -> str | None:
    """The reason why no process can be traced here, or None."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(
        ["strace", "-f", "-o", os.devnull, "-e", "trace=none", "true"], capture_output=True, check=False
    )
    return None if tried.returncode == 0 else "strace may not trace processes here"


@contextlib.contextmanager
def injected(child: Child, *faults: str, paths: tuple[str, ...] = ()) -> Iterator[None]:
    """While the block runs, the child's system calls fail as told: `pwrite64:error=EIO:when=1`, and so on."""
    command = ["strace", "-f", "-p", str(child.pid), "-o", os.devnull]
    for fault in faults:
        command += ["-e", f"inject={fault}"]
    for path in paths:
        command += ["-P", path]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert tracer.stderr is not None
    try:
        told = ""
        while "attached" not in told:
            line = tracer.stderr.readline()
            assert line, f"strace did not attach: {told}"
            told += line
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.communicate(timeout=PATIENCE)


def matches(request: Any) -> str:
    """What the condition of a put names, as it was sent."""
    return request.headers.get("if-match", "")


def as_ceph(proxy: Any) -> Any:
    """Ceph's gateway compares the e-tag with the header as it is, and so takes it without quotes alone."""
    return proxy.answer(
        "PreconditionFailed", kind="put_object", where=lambda request: matches(request).startswith('"')
    )
