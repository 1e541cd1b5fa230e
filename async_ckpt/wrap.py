"""`wrap`: any function that writes to a path, made to return at once.

In: a function. Out: the same one, which returns a handle. Knows nothing of: what it writes, and how.

The tensors in the arguments are copied to the host, the function runs in the background on the copies, and what it
wrote appears under the name that it was given when all of it is durable.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import io
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, NamedTuple, ParamSpec, overload

import torch

from .errors import DestinationBusyError, NothingWrittenError
from .format.tarball import WholeFile
from .functional import FileTarget, host_memory
from .handle import SaveHandle
from .pack import files_saver
from .report import Destination, Progress, SaveReport
from .save import OffLoop, SaveJob, run_save
from .saver import Files
from .snapshot.crew import running_future
from .snapshot.files import source_of
from .snapshot.guard import Optimizers, unwrapped
from .snapshot.host_copy import HostCopy
from .spans import Spans, monotonic
from .spec import GIB, MIB
from .state.arguments import copied, tensors_in
from .storage.append import Appender
from .storage.base import Storage
from .storage.local import temps_of, translated
from .storage.scratch import Scratch, publish, sync_all
from .storage.url import Engine, parent_and_name, storage_at
from .worker import get_worker

P = ParamSpec("P")

# A pickle may be this much longer than its tensors, and what a function makes of them twice as long; beyond that a
# store may run out of parts.
_LIMIT_BYTES: Final = GIB
# What goes to a store in one request.
_SMALL_BYTES: Final = MIB

# What functions that write call the argument that says where, the most telling first.
_NAMES: Final = (
    "destination", "dest", "path", "filename", "file_path", "filepath", "fname", "file", "f", "fp",
    "save_directory", "save_dir", "save_path", "output_dir", "output_path", "out_dir", "out_path",
    "ckpt_dir", "ckpt_path", "checkpoint_dir", "checkpoint_path", "checkpoint_id", "local_path",
    "folder", "directory", "dir", "out", "target",
)  # fmt: skip
# Functions that take an open file where they take a path, and the ending that they add to a path without it.
_TAKE_FILES: Final = {
    ("torch.serialization", "save"): "",
    ("numpy", "save"): ".npy",
    ("numpy", "savez"): ".npz",
    ("numpy", "savez_compressed"): ".npz",
}


@overload
def wrap(
    fn: Callable[P, Any],
    /,
    *,
    destination: str | int | None = None,
    guard: Any = None,
    file_object: bool | None = None,
    scratch: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
) -> Callable[P, SaveHandle]: ...


@overload
def wrap(
    fn: None = None,
    /,
    *,
    destination: str | int | None = None,
    guard: Any = None,
    file_object: bool | None = None,
    scratch: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
) -> Callable[[Callable[P, Any]], Callable[P, SaveHandle]]: ...


def wrap(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    destination: str | int | None = None,
    guard: Any = None,
    file_object: bool | None = None,
    scratch: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, Any] | None = None,
    engine: Engine | None = None,
    fs: Any = None,
) -> Any:
    """Any function that writes to a path, with the same arguments, and a SaveHandle as its result, at once.

    Also as a decorator, `@wrap` or `@wrap(...)`. The arguments may change as soon as the call returns. The function runs
    on a thread of its own, one such call after the other; its tensors are then on the CPU. It gets a path in an empty
    folder beside the destination; what it writes there, a file or a folder, is made durable and takes its place at
    once. An existing folder keeps what was not written again. When it raises, the handle carries that, and nothing
    is visible. At a URL, files appear one by one, and those that end in ".json" last.

    Args:
        fn: any function that writes to a path.
        destination: which argument says where: its name, or its position. By default the one that is called so
            (`path`, `f`, `filename`, `save_directory`, …), or the only one that is a path.
        guard: as for `save`.
        file_object: the function also takes an open file: it is streamed, without a temporary one. Known of
            `torch.save` and numpy's functions.
        scratch: where it writes what goes to a URL; by default in the system's temp folder.
        storage_options: what the client of a URL needs; see AsyncCheckpointer, for the next two as well.
        engine: which client that is.
        fs: an fsspec filesystem to use instead.

    The call raises TypeError when the destination cannot be told, DestinationBusyError while an earlier call writes to
    the same one, UnsupportedStateError for arguments that cannot be copied.
    """
    place = {"storage_options": storage_options, "engine": engine, "fs": fs}
    if fn is None:
        return functools.partial(
            wrap, destination=destination, guard=guard, file_object=file_object, scratch=scratch, **place
        )
    if not callable(fn):
        raise TypeError(
            f"wrap takes a function, not a {type(fn).__qualname__}; write wrap(torch.save)(state, path)"
        )
    ending = _TAKE_FILES.get((getattr(fn, "__module__", ""), getattr(fn, "__name__", "")))
    streams = file_object if file_object is not None else ending is not None
    options = _Options(_name_of(fn), streams, ending or "", scratch, place)
    find = _Finder(fn, destination)
    optimizers = unwrapped(guard)  # refused now rather than at the first save

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> SaveHandle:
        bound = find(args, kwargs)
        where = _where(bound.path, options)
        spans, called = Spans(), running_future()
        key = _reserve(where)
        handle: SaveHandle | None = None
        try:
            handle = _Call(fn, bound, where, options, optimizers, spans, called).begin()
            return handle
        finally:
            called.set_result(spans.total())
            with _busy_lock:
                if handle is None:
                    del _busy[key]
                else:
                    _busy[key] = handle

    return wrapped


class _Options(NamedTuple):
    name: str
    streams: bool
    ending: str
    scratch: str | os.PathLike[str] | None
    place: dict[str, Any]


class _Bound(NamedTuple):
    """A call whose destination is known: `make` gives the arguments with another one in its place."""

    path: str
    others: dict[str, Any]
    make: Callable[[dict[str, Any], Any], tuple[tuple[Any, ...], dict[str, Any]]]
    as_given: Callable[[str], Any]


class _Finder:
    """Knows which argument of a function is the destination."""

    def __init__(self, fn: Callable[..., Any], said: str | int | None) -> None:
        self._name = _name_of(fn)
        self._said = said
        self._signature: inspect.Signature | None = None
        with contextlib.suppress(ValueError, TypeError):  # of some built-in functions nothing is known
            self._signature = inspect.signature(fn)
        if isinstance(said, str) and self._signature is not None:
            kinds = [p.kind for p in self._signature.parameters.values()]
            if said not in self._signature.parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
                raise TypeError(
                    f"{self._name} has no argument {said!r}; it has {', '.join(self._signature.parameters)}"
                )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Bound:
        if self._signature is not None:
            self._signature.bind(*args, **kwargs)  # a wrong call is an error now, not in the background
        values: dict[str | int, Any] = dict(enumerate(args))
        values.update(kwargs)
        key = self._find(values, self._names_of(len(args)))
        given = values[key]
        as_given: Callable[[str], Any] = type(given) if isinstance(given, Path) else str
        others = {_label(k): v for k, v in values.items() if k != key}

        def make(others: dict[str, Any], where: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            both = {k: where if k == key else others[_label(k)] for k in values}
            return tuple(both[i] for i in range(len(args))), {k: both[k] for k in kwargs}

        return _Bound(os.fspath(given), others, make, as_given)

    def _names_of(self, num_positional: int) -> dict[str | int, str]:
        """What the positional arguments are called."""
        if self._signature is None:
            return {}
        positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in self._signature.parameters.values() if p.kind in positional]
        return dict(enumerate(names[:num_positional]))

    def _find(self, values: dict[str | int, Any], names: dict[str | int, str]) -> str | int:
        if self._said is not None:
            for key in values:
                if self._said in (key, names.get(key)):
                    return self._checked(key, values[key])
            raise TypeError(f"{self._name} was called without its destination {self._said!r}")
        by_name = {names.get(key, key): key for key in values}
        for name in _NAMES:
            if name in by_name and (
                _is_path(values[by_name[name]]) or hasattr(values[by_name[name]], "write")
            ):
                return self._checked(by_name[name], values[by_name[name]])
        paths = [key for key, value in values.items() if _is_path(value)]
        if len(paths) != 1:
            many = "none" if not paths else "several"
            raise TypeError(
                f"which argument of {self._name} says where it writes? {many} of them are paths; "
                'say so: wrap(fn, destination="its name")'
            )
        return paths[0]

    def _checked(self, key: str | int, value: Any) -> str | int:
        if not _is_path(value):
            raise TypeError(
                f"{self._name} was given a {type(value).__qualname__} to write to; a wrapped function needs a path or URL"
            )
        return key


class _Where(NamedTuple):
    """Where it is to appear."""

    path: str
    storage: Storage
    name: str

    @property
    def parent(self) -> Path:
        """Of a local destination."""
        return Path(self.path).parent

    @property
    def is_folder(self) -> bool:
        return not self.storage.remote and Path(self.path).is_dir()


def _where(path: str, options: _Options) -> _Where:
    parent, name = parent_and_name(path, fs=options.place["fs"])
    storage = storage_at(parent, **options.place)
    if options.streams and not name.endswith(options.ending):
        name += options.ending
    where = _Where(storage.locate(name), storage, name)
    if options.streams and where.is_folder:
        raise IsADirectoryError(f"{where.path} is a folder; give the path of a file")
    return where


_busy: dict[str, SaveHandle | None] = {}
_busy_lock = threading.Lock()


def _reserve(where: _Where) -> str:
    """One call at a time to one destination. Raises DestinationBusyError."""
    key = where.path if where.storage.remote else os.path.realpath(where.path)
    with _busy_lock:
        for other in [k for k, handle in _busy.items() if handle is not None and handle.done()]:
            del _busy[other]
        if key in _busy:
            raise DestinationBusyError(
                f"{where.path} is still being written by an earlier save; wait for its handle, or give each its own name",
                path=where.path,
            )
        _busy[key] = None
    return key


def _forget_parent() -> None:
    """In a forked child: its parent's calls are not its own, and who held the lock is not here to release it."""
    global _busy_lock
    _busy.clear()
    _busy_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)


class _Call:
    """The errand of one call."""

    def __init__(
        self,
        fn: Callable[..., Any],
        bound: _Bound,
        where: _Where,
        options: _Options,
        optimizers: Optimizers,
        spans: Spans,
        called: Future[float],
    ) -> None:
        self._fn, self._bound, self._where, self._options = fn, bound, where, options
        self._spans, self._called = spans, called
        self.path = where.path
        names, tensors = tensors_in(bound.others)
        self._num_tensors = len(tensors)
        crew = get_worker().copiers
        self._copy = HostCopy(
            tensors, names, optimizers=optimizers, memory=host_memory, crew=crew, clock=monotonic
        )
        self.staged = self._copy.completion
        self._host_bytes = self._copy.num_bytes
        try:
            self._others = copied(bound.others, tensors, self._copy.tensors, what=options.name)
        except BaseException:
            self._copy.let_go()
            raise
        # Work in the background is for the device that the caller works on.
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._scratch: Scratch | None = None
        self._out: Appender | None = None
        self._job: SaveJob | None = None
        self._written: list[Path] = []  # complete, and durable on this disk
        self._num_bytes = 0
        self._num_retries = 0
        self._given_up: BaseException | None = None

    def begin(self) -> SaveHandle:
        """On the caller's thread: from now on the arguments may change."""
        try:
            handle = files_saver().take_on(self)
        except BaseException:
            self._copy.let_go()
            raise
        self._copy.begin()
        return handle

    @property
    def progress(self) -> Progress:
        done = self._out.num_bytes if self._out else self._num_bytes
        return Progress(self._host_bytes, self._host_bytes if self.staged.done() else 0, done)

    def give_up(self, error: BaseException) -> None:
        self._given_up = error
        if self._out is not None:
            self._out.fail(error)
        if self._job is not None:
            self._job.drain.fail(error)

    async def run(self, turn: Future[None] | None, off_loop: OffLoop) -> SaveReport:
        await asyncio.wrap_future(self.staged)
        if turn is not None:
            await asyncio.wrap_future(turn)
        with self._spans.span("write"):
            await off_loop(self._stream if self._options.streams else self._write)
            self._copy.let_go()
            if self._where.storage.remote and not self._options.streams:
                await self._upload(off_loop)
        if self._given_up is not None:
            raise self._given_up
        with self._spans.span("commit"):
            await off_loop(self._commit)
        return self._report(await asyncio.wrap_future(self._called))

    def failed(self, error: BaseException) -> None:
        self._others = {}
        self._copy.let_go()
        if self._out is not None:
            self._out.abort()
        if self._scratch is None:
            return
        if self._written:  # the function has done its part, and what it wrote may be all that there is
            self._scratch.keep()
            error.add_note(f"async_ckpt: what {self._options.name} wrote is kept in {self._scratch.folder}")
        else:
            self._scratch.remove()

    async def afterwards(self, off_loop: OffLoop) -> None:
        if self._scratch is not None:
            await off_loop(self._scratch.remove)

    # --- blocking, on helper threads --------------------------------------------------------------------------

    def _call(self, where: Any) -> None:
        """The function itself, once."""
        if self._given_up is not None:
            raise self._given_up
        others, self._others = self._others, {}
        args, kwargs = self._bound.make(others, where)
        with contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device):
            self._fn(*args, **kwargs)

    def _stream(self) -> None:
        """Into the sink, as it is written."""
        where = self._where
        if not where.storage.remote:
            names = temps_of(where.name, where.storage.names(""))
            where.storage.sweep("", names, delete=True)
        self._out = Appender(where.storage, where.name, limit_bytes=2 * self._host_bytes + _LIMIT_BYTES)
        with _File(self._out) as file:
            self._call(file)
        self._num_bytes = self._out.num_bytes
        if not self._num_bytes:
            raise NothingWrittenError(f"{self._options.name} wrote nothing; {self.path} is left as it was")

    def _write(self) -> None:
        """Into a folder of its own."""
        where, options = self._where, self._options
        beside = Path(options.scratch or tempfile.gettempdir()) if where.storage.remote else where.parent
        self._scratch = Scratch(beside.absolute(), where.name)
        folder = self._scratch.folder
        inner = folder / where.name
        if where.is_folder:
            inner.mkdir()  # it expects one
        self._call(self._bound.as_given(str(inner)))
        with translated(folder):
            written = sorted(folder.iterdir())
            if not written or (written == [inner] and inner.is_dir() and not any(inner.iterdir())):
                raise NothingWrittenError(
                    f"{options.name} wrote nothing to the path that it was given; {self.path} is left as it was"
                )
            _refuse_open_files(folder, options.name)
            self._num_bytes = sum(sync_all(path) for path in written)
        self._written = written

    def _commit(self) -> None:
        if self._out is not None:
            self._out.finish()
            self._out.sink.close()
            self._num_retries = self._out.sink.num_retries
        elif not self._where.storage.remote:
            with translated(self._where.parent, passing=(FileExistsError, IsADirectoryError)):
                for path in self._written:
                    publish(path, self._where.parent / path.name)

    async def _upload(self, off_loop: OffLoop) -> None:
        assert self._scratch is not None
        root = self._scratch.folder
        # What says that a model is there (config, index) comes when all that it speaks of is there.
        for path in sorted(_files_below(root), key=lambda path: (path.suffix == ".json", path)):
            await self._upload_file(path, path.relative_to(root).as_posix(), off_loop)

    async def _upload_file(self, path: Path, name: str, off_loop: OffLoop) -> None:
        storage, source = self._where.storage, source_of(path)
        if source.num_bytes <= _SMALL_BYTES:
            await off_loop(lambda: storage.replace(name, path.read_bytes()))
            return
        files, target = Files(WholeFile(source.num_bytes), [source]), FileTarget(storage, name)
        saver = files_saver()
        job, fill = await off_loop(lambda: saver.files_job(files, target, Spans(), self._called))
        self._job = job
        if self._given_up is not None:
            raise self._given_up
        with saver.relieved_by(job.drain):
            fill.begin()
            report = await run_save(job, off_loop)
        self._num_retries += report.retries

    def _report(self, call_seconds: float) -> SaveReport:
        seconds, total = self._spans.seconds, self._spans.total()
        there = Destination(self.path, self._num_bytes, total, self._num_retries)
        return SaveReport(
            status="committed",
            step=None,
            path=self.path,
            num_bytes=self._num_bytes,
            num_tensors=self._num_tensors,
            stall_seconds=call_seconds + self._copy.snapshot.stall_seconds,
            stage_seconds=self._copy.snapshot.stage_seconds,
            write_seconds=seconds["write"],
            commit_seconds=seconds["commit"],
            total_seconds=total,
            retries=self._num_retries,
            destinations=(there,),
        )


class _File(io.RawIOBase):
    """What a function writes to, from front to back."""

    def __init__(self, out: Appender) -> None:
        super().__init__()
        self._out = out

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._out.append(view)
        return len(view)

    def tell(self) -> int:
        return self._out.num_bytes


def _files_below(folder: Path) -> list[Path]:
    """Links are followed: a store has none."""
    return [path for path in folder.rglob("*") if path.is_file()]


def _refuse_open_files(folder: Path, name: str) -> None:
    """Raise when this process still has a file open there: what it holds back would be missing."""
    if _open_files(folder):
        gc.collect()  # one that nobody refers to any more is closed by that
    still = _open_files(folder)
    if still:
        raise NothingWrittenError(
            f"{name} left {', '.join(still)} open, so nobody knows whether all of it is written; close it before returning"
        )


def _open_files(folder: Path) -> list[str]:
    found = []
    with contextlib.suppress(OSError):  # no /proc there: then it cannot be told
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith(f"{folder}{os.sep}"):
                    found.append(os.path.basename(target))
    return sorted(found)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _label(key: str | int) -> str:
    return f"argument {key}" if isinstance(key, int) else key


def _name_of(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or repr(fn))
