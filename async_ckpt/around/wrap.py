"""`wrap`: any function that writes to a path, made to return at once.

In: a function. Out: the same one, which returns a handle. Knows nothing of: what it writes, and how.

The tensors in the arguments are copied to the host, the function runs in the background on the copies, and what it
wrote appears under the name that it was given when all of it is durable.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import os
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, ParamSpec, Self, overload

import torch

from ..backends import current_device, on_device
from ..errors import DestinationBusyError, NothingWrittenError, UnsupportedStateError
from ..format.tarball import WholeFile
from ..host.loop import OffLoop
from ..host.process import in_forked_child
from ..host.threads import running_future
from ..report import Progress
from ..saving.copy_save import CopySave
from ..saving.default import files_saver
from ..saving.handle import SaveHandle
from ..saving.save import new_life
from ..saving.story import Attempt, story
from ..saving.targets import FileTarget
from ..spans import Spans
from ..spec import GIB, MIB, with_article
from ..staging.files import FilesImage, source_of
from ..staging.guard import Optimizers, unwrapped
from ..staging.held_snapshot import refuse_guard
from ..state.captured import tree_of
from ..storage.disk import translated
from ..storage.local import LocalStorage
from ..storage.locks import temps_of
from ..storage.place import local_place, place_of
from ..storage.scratch import Scratch, publish, refuse_misfit, sync_all
from ..storage.sequential import Appender
from .arguments import closed_over, copied, tensors_in
from .where import Bound, Finder, Options, OutPath, ending_of, name_of, out_path, why_not_wrapped

P = ParamSpec("P")

# A pickle may be this much longer than its tensors, and what a function makes of them twice as long; beyond that a
# store may run out of parts.
_LIMIT_BYTES: Final = GIB
# What goes to a store in one request.
_SMALL_BYTES: Final = MIB


class _ToDecorate:
    """Stands for the function that the decorator with arguments will be given."""

    def __repr__(self) -> str:
        return "the decorated one"


_TO_DECORATE: Final[Any] = _ToDecorate()


@overload
def wrap(
    fn: Callable[P, Any],
    /,
    *,
    destination: str | int | None = None,
    guard: Any = None,
    file_object: bool | None = None,
    scratch: str | os.PathLike[str] | None = None,
) -> Callable[P, SaveHandle]: ...


@overload
def wrap(
    *,
    destination: str | int | None = None,
    guard: Any = None,
    file_object: bool | None = None,
    scratch: str | os.PathLike[str] | None = None,
) -> Callable[[Callable[P, Any]], Callable[P, SaveHandle]]: ...


def wrap(
    fn: Callable[..., Any] = _TO_DECORATE,
    /,
    *,
    destination: str | int | None = None,
    guard: Any = None,
    file_object: bool | None = None,
    scratch: str | os.PathLike[str] | None = None,
) -> Any:
    """Make a function that writes to a path run in the background. The result takes the same arguments and returns a
    SaveHandle.

        save = async_ckpt.wrap(torch.save)
        handle = save(model.state_dict(), "out/x.pt")

    It can also be used as a decorator, `@wrap` or `@wrap(...)`. The arguments, and the object of a method, are copied
    deeply, so they may change as soon as the call returns. Globals and anything else that the function uses are not
    copied. The function runs on a separate thread, one call after the other, and its tensors are on the CPU. It is given
    a path in an empty folder beside the destination. The file or folder that it writes there is made durable and then
    moved to the destination. If the destination is an existing folder, files that were not written again are kept. If
    the function raises an exception, the handle raises it, and nothing becomes visible. At a URL, files appear one by
    one; those that end in ".json" come last.

    A snapshot (`async_ckpt.snapshot`) among the arguments is not copied again: the function is given the plain state in
    it, and must not write to its tensors.

    Copying a module or an optimizer takes longer than copying its `state_dict()`. Work that holds the GIL, such as
    pickling, slows down training; the benchmark "wrapped" measures how much.

    Args:
        fn: a function that writes to a path.
        destination: the name or position of the argument that says where to write. By default it is recognized by its
            name (`path`, `f`, `filename`, `save_directory`, …), or it is the only argument that is a path. A symbolic
            link is followed.
        guard: as for `save`. With it, no argument may be a snapshot or contain one.
        file_object: whether the function also accepts an open file. Its output is then streamed without a temporary
            file. `torch.save` and numpy's functions are known to do so.
        scratch: the folder for temporary files if the destination is a URL; by default the system's temp folder.

    Raises TypeError if `fn` is not a function, or one that reads, such as `torch.load`.

    Calling the result raises TypeError if the destination cannot be determined, DestinationBusyError while an earlier
    call writes to the same destination, UnsupportedStateError if an argument cannot be copied or the function closes
    over tensors, and the errors of `save` for a destination that cannot be written to.
    """
    if fn is _TO_DECORATE:
        return functools.partial(
            wrap, destination=destination, guard=guard, file_object=file_object, scratch=scratch
        )
    _refuse_what_cannot_be_called(fn)
    ending = ending_of(fn)
    streams = file_object if file_object is not None else ending is not None
    if why := why_not_wrapped(fn, streams=streams):
        raise TypeError(why)
    beside = None if scratch is None else local_place(scratch)
    options = Options(name_of(fn), streams, ending or "", beside)
    find = Finder(fn, destination)
    optimizers = unwrapped(guard)  # refused now rather than at the first save

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> SaveHandle:
        bound = find(args, kwargs)
        where = out_path(bound.given, options)
        with _Reservation(where) as reserved:
            call = _Call(fn, bound, where, options, optimizers, reserved.spans, reserved.called)
            reserved.handle = call.begin()
        return reserved.handle

    return wrapped


def _refuse_what_cannot_be_called(fn: Any) -> None:
    if not callable(fn):
        given = "None" if fn is None else with_article(type(fn).__qualname__)
        raise TypeError(
            f"wrap takes a function, not {given}; pass the function itself and call what wrap returns: "
            "wrap(torch.save)(state, path)"
        )
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise TypeError(
            f"{name_of(fn)} does not write when it is called, but when it is awaited or gone through; "
            "wrap a plain function that does that"
        )


_busy: dict[str, SaveHandle | None] = {}
_busy_lock = threading.Lock()


def _reserve(where: OutPath) -> str:
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


class _Reservation:
    """A destination, for as long as one call takes to begin, and then until its handle is done."""

    def __init__(self, where: OutPath) -> None:
        self.spans = Spans()
        self.called: Future[float] = running_future()  # resolved when the caller has its handle
        self.handle: SaveHandle | None = None
        self._key = _reserve(where)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.called.set_result(self.spans.total())
        with _busy_lock:
            if self.handle is None:
                del _busy[self._key]
            else:
                _busy[self._key] = self.handle


@in_forked_child
def _forget_parent() -> None:
    """In a forked child: its parent's calls are not its own, and who held the lock is not here to release it."""
    global _busy_lock
    _busy.clear()
    _busy_lock = threading.Lock()


class _Call(CopySave):
    """One call."""

    def __init__(
        self,
        fn: Callable[..., Any],
        bound: Bound,
        where: OutPath,
        options: Options,
        optimizers: Optimizers,
        spans: Spans,
        called: Future[float],
    ) -> None:
        _refuse_closed_over(fn, options.name)
        given = {bound.names[key]: value for key, value in bound.others.items()}
        names, tensors, held = tensors_in({options.name: fn, **given})
        refuse_guard(held, optimizers)
        in_held = [tensor for part in held for tensor in tensors_in({"": tree_of(part)})[1]]
        super().__init__(
            where.path,
            tensors,
            names,
            after=[one.completion for one in held],
            num_tensors=len(tensors) + len(in_held),
            optimizers=optimizers,
            spans=spans,
            called=called,
        )
        self.out_path, self._options = where, options
        self._host_bytes = self.copy.num_bytes + sum(tensor.nbytes for tensor in in_held)
        # Only of copies: a handle may be kept for long, and must not keep what the caller has let go of.
        self._arguments: tuple[Callable[..., Any], dict[str | int, Any]] | None
        try:
            self._arguments = copied((fn, bound.others), tensors, self.copy.tensors, held, what=options.name)
        except BaseException:
            self.copy.release()
            raise
        self._make = bound.make
        url = place_of(bound.given).url
        self._as_given: Callable[[str], Any] = type(url) if isinstance(url, Path) else str
        self._grad_mode = torch.is_grad_enabled()
        # Work in the background is for the device that the caller works on.
        self._device = current_device()
        self._attempt: Attempt | None = None
        self._written: list[Path] = []  # complete, and durable on this disk

    @property
    def progress(self) -> Progress:
        done = self._out.num_bytes if self._out else self._num_bytes
        total = max(self._host_bytes, done)  # what a function makes of tensors may be longer
        return Progress(total, self._host_bytes if self.staged.done() else 0, done)

    def give_up(self, error: BaseException) -> None:
        super().give_up(error)
        if self._attempt is not None:
            self._attempt.drain.fail(error)

    async def _write(self, off_loop: OffLoop) -> None:
        await off_loop(self._stream if self._options.streams else self._fill_scratch)
        self.copy.release()
        if self.out_path.storage.remote and not self._options.streams:
            await self._upload(off_loop)

    def failed(self, error: BaseException) -> None:
        self._arguments = None
        super().failed(error)

    def _leave(self, scratch: Scratch, error: BaseException) -> None:
        if self._written:  # the function has done its part, and what it wrote may be all that there is
            scratch.keep()
            error.add_note(f"async_ckpt: what {self._options.name} wrote is kept in {scratch.folder}")
        else:
            scratch.remove()

    # --- blocking, on helper threads --------------------------------------------------------------------------

    def _call(self, where: Any) -> None:
        """The function itself, once."""
        self._check()
        assert self._arguments is not None
        (fn, others), self._arguments = self._arguments, None
        args, kwargs = self._make(others, where)
        with (
            torch.set_grad_enabled(self._grad_mode),
            on_device(self._device),
        ):
            try:
                fn(*args, **kwargs)
            except BaseException as error:
                _clear_frames(error)
                raise
            finally:
                del fn, others, args, kwargs

    def _stream(self) -> None:
        """Into the sink, as it is written."""
        where = self.out_path
        if not where.storage.remote:
            names = temps_of(where.name, where.storage.names(""))
            where.storage.sweep("", names, delete=True)
        self._out = Appender(where.storage, where.name, limit_bytes=2 * self._host_bytes + _LIMIT_BYTES)
        try:
            with _File(self._out) as file:
                self._call(file)
        except BaseException:
            self._out.check()  # what the sink met, whatever the function has made of it
            raise
        self._num_bytes = self._out.num_bytes
        if not self._num_bytes:
            raise NothingWrittenError(f"{self._options.name} wrote nothing; {self.path} is left as it was")

    def _fill_scratch(self) -> None:
        """Into a folder of its own."""
        where, options = self.out_path, self._options
        beside = Path(options.scratch or tempfile.gettempdir()) if where.storage.remote else where.parent
        self._scratch = Scratch(beside.absolute(), where.name)
        folder = self._scratch.folder
        inner = folder / where.name
        if where.is_folder:
            inner.mkdir()  # it expects one
        self._call(self._as_given(str(inner)))
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
        elif not self.out_path.storage.remote:
            with translated(self.out_path.parent, passing=(FileExistsError, IsADirectoryError)):
                targets = {path: self.out_path.parent / path.name for path in self._written}
                for path, target in targets.items():  # all of them, before the first is visible
                    refuse_misfit(path, target)
                for path, target in targets.items():
                    publish(path, target)

    async def _upload(self, off_loop: OffLoop) -> None:
        assert self._scratch is not None
        root = self._scratch.folder
        # What says that a model is there (config, index) comes when all that it speaks of is there.
        names = await off_loop(lambda: [*LocalStorage(root).sizes("")])
        for name in sorted(names, key=lambda name: (name.endswith(".json"), name)):
            await self._upload_file(root / name, name, off_loop)

    async def _upload_file(self, path: Path, name: str, off_loop: OffLoop) -> None:
        storage, source = self.out_path.storage, source_of(path)
        if source.num_bytes <= _SMALL_BYTES:
            await off_loop(lambda: storage.replace(name, path.read_bytes()))
            return
        files, target = FilesImage(WholeFile(source.num_bytes), [source]), FileTarget(storage, name)
        saver = files_saver()
        attempt, fill = await off_loop(lambda: saver.files_attempt(files, target, Spans()))
        self._attempt = attempt
        self._check()
        with saver.relieved_by(attempt.drain):
            fill.begin()
            await story(attempt, None, off_loop, new_life())
        self._num_retries += attempt.report(0.0).retries


class _File(io.RawIOBase):
    """The file that a function writes to, from front to back."""

    def __init__(self, out: Appender) -> None:
        super().__init__()
        self._out = out

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.closed:
            raise ValueError("the function has returned, and what it wrote is complete")
        view = memoryview(data).cast("B")
        self._out.append(view)
        return len(view)

    def tell(self) -> int:
        return self._out.num_bytes


def _clear_frames(error: BaseException) -> None:
    """A failed handle may be kept for long: let go of the copies that its traceback has in its frames."""
    chain: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        next_one = todo.pop()
        if next_one is not None and next_one not in chain:
            chain.append(next_one)
            todo += [next_one.__cause__, next_one.__context__]
    for one in chain:
        traceback.clear_frames(one.__traceback__)


def _refuse_closed_over(fn: Callable[..., Any], name: str) -> None:
    names = tensors_in(closed_over(fn))[0]
    if names:
        raise UnsupportedStateError(
            f"{name} uses {names[0]} of the function that it was defined in, which may change while it runs; "
            "make it an argument",
            path=name,
        )


def _refuse_open_files(folder: Path, name: str) -> None:
    """Raise when this process can still write to a file there: what it holds back would be missing.

    Nor would a collection of garbage help: it may close a file without what Python has buffered for it.
    """
    still = _open_files(folder)
    if still:
        raise NothingWrittenError(
            f"{name} left {', '.join(still)} open, so its content may be incomplete; close it before returning"
        )


def _open_files(folder: Path) -> list[str]:
    """The files below a folder that this process has open for writing."""
    found = []
    inside = os.path.realpath(folder) + os.sep
    with contextlib.suppress(OSError):  # no /proc there: then it cannot be told
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith(inside) and _may_write(fd):
                    found.append(os.path.basename(target))
    return sorted(found)


def _may_write(fd: str) -> bool:
    """See proc(5); opened for reading only is 0."""
    told = Path(f"/proc/self/fdinfo/{fd}").read_text()
    flags = next(line for line in told.splitlines() if line.startswith("flags:"))
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
