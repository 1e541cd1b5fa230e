"""Child processes, forked from a warm one, and what the operating system does to them."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from racing import PATIENCE, until

import async_ckpt
from async_ckpt.core.storage.local import LocalSink

# Imports once, then forks a child for each job. The child leaves the loop and runs the job as its main program, so
# that it ends like any other: exit hooks, tracebacks and status are the interpreter's own. Behind the last hook, the
# interpreter would clear all modules, and libtorch its tables of operators, for three times as long as forking and ending
# take together: a child that has come to its end does so only if it is asked to.
_NURSERY = """
import ctypes, gc, json, os, select, signal, sys, weakref
gc.disable()  # none of this goes
import importlib
import torch, async_ckpt, children, states
for more in sys.argv[1:]:
    importlib.import_module(more)
import torch._inductor  # two seconds, which the first optimizer of every child would take otherwise
for name in sys.argv[1:]:
    __import__(name)
children._know_stores()
from async_ckpt.core.host import waits
for of_torch in list(weakref.finalize._registry):
    of_torch.atexit = False  # it would take hundreds of operators back, one by one
waits._FIRST_SECONDS = 60.0  # on a slow machine anything may take long enough to be told of, which is no failure
gc.freeze()  # nor need every child look through it
gc.enable()
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
os.environ.update(order["env"])
if sys.platform == "linux" and not order["whole_exit"]:
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # is called first of all that was registered, with the status
sys.argv = ["train.py", *order["arguments"]]
code = compile(order["code"], "train.py", "exec")
children._ends_whole = order["whole_exit"]
for name in ("importlib", "more", "line", "order", "child", "number", "name", "flags", "opened", "libc", "of_torch"):
    globals().pop(name, None)
exec(code)
__import__("children")._end()
"""

_ends_whole = True


def _know_stores() -> None:
    """Import the clients of stores, and read what each of them would read."""
    with contextlib.suppress(ImportError):
        import botocore.session
        from clients import read_services_once

        for name in ("obstore.store", "s3fs", "tenacity"):
            importlib.import_module(name)
        read_services_once()
        session = botocore.session.Session()
        session.create_client("s3", "us-east-1", aws_access_key_id="none", aws_secret_access_key="none")


def _end() -> None:
    """The end of a child that has run its job to the end, as the interpreter does it; see `_NURSERY`."""
    if _ends_whole:
        return
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        stream.flush()
    os._exit(0)


_MODULE = """
import runpy, sys
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
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

    def wait_for_line(self, text: str, stream: str = "out") -> None:
        """Return when the child has printed this there, or on the stream `err`."""
        until(lambda: text in (self._folder / stream).read_text())

    def ended(self, patience: float = PATIENCE) -> Ended:
        told = self._nursery.ask({"wait": self.pid, "patience": patience})
        out, err = ((self._folder / name).read_text() for name in ("out", "err"))
        assert not told["hung"], f"the child did not end\n{out}\n{err}"
        return Ended(told["status"], out, err)


def forks_on_purpose() -> None:
    """For a script that forks while it has threads, of which Python 3.12 and later warn: what becomes of it is tested."""
    warnings.filterwarnings("ignore", r".*multi-threaded, use of fork\(\)", DeprecationWarning)


_ROOT = Path(async_ckpt.__file__).parents[1]


class Nursery:
    """Runs scripts in processes of their own, at the price of a fork each. These have imported `modules`, too, and were
    started with `env` besides their own.
    """

    def __init__(self, folder: Path, *modules: str, env: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, "-c", _NURSERY, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=_ROOT,  # that of the test which happens to be the first may go with it
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(
                    [str(Path(__file__).parent), str(_ROOT), os.environ.get("PYTHONPATH", "")]
                ),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
                **(env or {}),
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

    def start(
        self,
        code: str,
        *arguments: object,
        stdin: str = os.devnull,
        env: Mapping[str, str] | None = None,
        whole_exit: bool = False,
    ) -> Child:
        """`whole_exit`: what the interpreter and C++ destroy behind the last exit hook is destroyed, too."""
        folder = self._folder / f"child-{next(self._numbers)}"
        folder.mkdir()
        for name in ("out", "err"):
            (folder / name).touch()
        order = {
            "code": textwrap.dedent(code),
            "arguments": [str(argument) for argument in arguments],
            "stdin": stdin,
            "env": dict(env or {}),
            "whole_exit": whole_exit,
            "out": str(folder / "out"),
            "err": str(folder / "err"),
        }
        return Child(self, folder, self.ask(order))

    def run(self, code: str, *arguments: object, whole_exit: bool = False) -> Ended:
        return self.start(code, *arguments, whole_exit=whole_exit).ended()

    def out_of(self, code: str, *arguments: object, whole_exit: bool = False) -> str:
        """What a script prints that ends well, and complains of nothing."""
        ended = self.run(code, *arguments, whole_exit=whole_exit)
        assert (ended.status, ended.err) == (0, ""), f"{ended.out}\n{ended.err}"
        return ended.out

    def start_module(self, name: str, *arguments: object, env: Mapping[str, str] | None = None) -> Child:
        """As `python -m` would."""
        return self.start(_MODULE, name, *arguments, env=env)


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


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(number: int, die: Callable[[], None] = _die) -> Callable[[], int]:
    """From now on, die at the `number`-th call that changes the disk, a write half done. Returns the count so far."""
    write, pwrite = os.write, os.pwrite
    lock = threading.RLock()  # dying may change the disk, too
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
            die()

    watch_disk(before)
    return lambda: count


def die_at_request(number: int, die: Callable[[], None] = _die) -> Callable[[], int]:
    """From now on, die ahead of the `number`-th call that changes something in an object store. Returns the count so far."""
    from async_ckpt.stores.s3.sink import ObjectSink
    from async_ckpt.stores.s3.store import ObjectStorage

    lock, count = threading.Lock(), 0

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                is_last = count == number
            if is_last:
                die()
            return real(*arguments, **options)

        return call

    for owner, names in (
        (ObjectStorage, ("create", "put_new", "replace", "delete", "delete_many")),
        (ObjectSink, ("write", "finish")),
    ):
        for name in names:
            setattr(owner, name, watched(getattr(owner, name)))
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
