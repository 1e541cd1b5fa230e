"""`wrap`: any function that writes to a path, made to return at once.

In: a function. Out: a function with the same arguments that returns a handle.
Knows nothing of: the content of its output.

The tensors in the arguments are copied to the host, the function runs in the background on the copies, and its output
appears at the caller's path once it is complete and durable.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, ParamSpec, Self, overload

import torch

from ...core.backends import current_device, on_device
from ...core.host.loop import off_loop
from ...core.host.process import in_forked_child
from ...core.report import Progress
from ...core.saving.handle import SaveHandle
from ...core.spec import GIB, MIB, flag, with_article
from ...core.staging.guard import Optimizers, refuse_guard, unwrapped
from ...core.state.captured import tree_of
from ...core.storage.bulk import Parcel, copy
from ...core.storage.disk import translated
from ...core.storage.interface import Sink
from ...core.storage.local import LocalStorage
from ...core.storage.place import local_place, place_of
from ...core.storage.sequential import Appender
from ...core.timing import Spans
from ...errors import DestinationBusyError, NothingWrittenError, UnsupportedStateError
from .arguments import closure_of, deep_copied, tensors_in
from .copy_save import CopySave
from .destination import (
    BoundCall,
    DestinationFinder,
    OutputPath,
    WrapOptions,
    name_of,
    output_path,
    suffix_of,
    why_not_wrapped,
)
from .scratch import Scratch, publish, refuse_misfit, sync_all
from .streams import AppenderFile

P = ParamSpec("P")

# A function's output may be twice as large as the tensors, and this much larger. A still larger upload may run out of
# parts.
_LIMIT_BYTES: Final = GIB
# The largest file that is uploaded in one request.
_SMALL_BYTES: Final = MIB
# Many threads, since most of them wait for the store.
_NUM_WRITERS: Final = 8


class _ToDecorate:
    """The default of `fn`, for `@wrap(...)`, which gets its function later."""

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
    whole_folder: bool = False,
) -> Callable[P, SaveHandle]: ...


@overload
def wrap(
    *,
    destination: str | int | None = None,
    guard: Any = None,
    file_object: bool | None = None,
    scratch: str | os.PathLike[str] | None = None,
    whole_folder: bool = False,
) -> Callable[[Callable[P, Any]], Callable[P, SaveHandle]]: ...


def wrap(
    fn: Callable[..., Any] = _TO_DECORATE,
    /,
    *,
    destination: str | int | None = None,
    guard: Any = None,
    file_object: bool | None = None,
    scratch: str | os.PathLike[str] | None = None,
    whole_folder: bool = False,
) -> Any:
    """Make a function that writes to a path run in the background. The wrapped function takes the same arguments and
    returns a SaveHandle.

        save = async_ckpt.wrap(torch.save)
        handle = save(model.state_dict(), "out/x.pt")

    It can also be used as a decorator, `@wrap` or `@wrap(...)`. The arguments, and the object of a method, are deep
    copies, so the originals may change as soon as the call returns. Globals, and all other objects that the function
    uses, are not copied. The function runs on a separate thread, one call after the other, and its tensors are on the
    CPU. It gets a path in an empty folder beside the destination. The file or folder that it writes there is made
    durable and then moved to the destination. If the destination is an existing folder, files that were not written
    again are kept, unless `whole_folder` is True. If the function raises an exception, the handle raises it, and
    nothing becomes visible. At a URL, files appear one by one, those that end in ".json" last.

    A snapshot (`async_ckpt.snapshot`) among the arguments is not copied again: the function gets the plain state in it,
    and must not write to its tensors.

    Copying a module or an optimizer takes longer than copying its `state_dict()`. Work that holds the GIL, such as
    pickling, slows down training; the benchmark "wrapped" measures how much.

    Args:
        fn: a function that writes to a path.
        destination: the name or position of the argument that is the path to write to. By default it is recognized by
            its name (`path`, `f`, `filename`, `save_directory`, …), or it is the only argument that is a path. A
            symbolic link is followed.
        guard: as for `save`. With it, no argument may be a snapshot or contain one.
        file_object: True if the function also accepts an open file. Its output is then streamed without a temporary
            file. This is the default for `torch.save` and numpy's functions.
        scratch: the folder for temporary files if the destination is a URL; by default the system's temp folder.
        whole_folder: replace an existing local folder as a whole, including the files in it that were not written
            again.

    Raises TypeError if `fn` is not a function, or if it reads, such as `torch.load`.

    A call of the wrapped function raises TypeError if the destination cannot be determined, DestinationBusyError while
    an earlier call writes to the same destination, UnsupportedStateError if an argument cannot be copied or the
    function closes over tensors, and the errors of `save` for a destination that cannot be written to.
    """
    if fn is _TO_DECORATE:
        return partial(
            wrap,
            destination=destination,
            guard=guard,
            file_object=file_object,
            scratch=scratch,
            whole_folder=whole_folder,
        )
    _refuse_uncallable(fn)
    suffix = suffix_of(fn)
    streams = suffix is not None if file_object is None else flag("file_object", file_object)
    if why := why_not_wrapped(fn, streams=streams):
        raise TypeError(why)
    folder = None if scratch is None else local_place(scratch)
    options = WrapOptions(name_of(fn), streams, suffix or "", folder, flag("whole_folder", whole_folder))
    find = DestinationFinder(fn, destination)
    optimizers = unwrapped(guard)  # a wrong guard raises here rather than at the first save

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> SaveHandle:
        bound = find(args, kwargs)
        reservation = _Reservation(output_path(bound.given, options))
        with reservation:
            reservation.handle = _Call(fn, bound, options, optimizers, reservation).begin()
        return reservation.handle

    return wrapped


def _refuse_uncallable(fn: Any) -> None:
    if not callable(fn) or isinstance(fn, staticmethod):  # its copy, and the call of its object, would fail later
        given = "None" if fn is None else with_article(type(fn).__qualname__)
        raise TypeError(
            f"wrap takes a function, not {given}; pass the function itself and call what wrap returns: "
            "wrap(torch.save)(state, path)"
        )
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_kind(called) for is_kind in kinds for called in (fn, fn.__call__)):  # of an object, its method
        raise TypeError(f"{name_of(fn)} writes only when it is awaited or iterated; wrap a plain function that does so")


_busy: dict[str, SaveHandle | None] = {}  # by destination; None while a call begins
_busy_lock = threading.Lock()


class _Reservation:
    """A destination, reserved from the beginning of one call until its handle is done.

    Created on the caller's thread; its spans measure the call. Raises DestinationBusyError.
    """

    def __init__(self, output: OutputPath) -> None:
        self.output = output
        self.spans = Spans()
        self.handle: SaveHandle | None = None
        self._key = output.path if output.storage.remote else os.path.realpath(output.path)
        with _busy_lock:
            for other in [key for key, handle in _busy.items() if handle is not None and handle.done()]:
                del _busy[other]
            if self._key in _busy:
                raise DestinationBusyError(
                    f"{output.path} is still being written by an earlier save; wait for its handle, or give each save "
                    "its own name",
                    path=output.path,
                )
            _busy[self._key] = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.spans.called()
        with _busy_lock:
            if self.handle is None:
                del _busy[self._key]
            else:
                _busy[self._key] = self.handle


@in_forked_child
def _forget_parent() -> None:
    """Forget the parent's calls in a forked child, and replace the lock: the thread that holds it may be missing."""
    global _busy_lock
    _busy.clear()
    _busy_lock = threading.Lock()


class _Call(CopySave):
    """The save of one call of a wrapped function. Created on the caller's thread, and run on the library's loop; the
    function itself runs on a helper thread.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        bound: BoundCall,
        options: WrapOptions,
        optimizers: Optimizers,
        reservation: _Reservation,
    ) -> None:
        _refuse_closed_over(fn, options.name)
        given = {bound.names[key]: value for key, value in bound.others.items()}
        names, tensors, held = tensors_in({options.name: fn, **given})
        refuse_guard(held, optimizers)
        in_held = [tensor for part in held for tensor in tensors_in({"": tree_of(part)})[1]]
        super().__init__(
            reservation.output.path,
            tensors,
            names,
            after=[snapshot.completion for snapshot in held],
            num_tensors=len(tensors) + len(in_held),
            optimizers=optimizers,
            spans=reservation.spans,
        )
        self.output_path, self._options = reservation.output, options
        self._host_bytes = self.copy.num_bytes + sum(tensor.nbytes for tensor in in_held)
        # Only copies: a handle may live long, and must not keep the caller's objects alive.
        self._arguments: tuple[Callable[..., Any], dict[str | int, Any]] | None
        try:
            self._arguments = deep_copied(
                (fn, bound.others), tensors, self.copy.tensors, held, function_name=options.name
            )
        except BaseException:
            self.copy.release()
            raise
        self._make = bound.make
        url = place_of(bound.given).url
        self._as_given: Callable[[str], Any] = type(url) if isinstance(url, Path) else str
        self._grad_mode = torch.is_grad_enabled()
        # The background thread works on the caller's device.
        self._device = current_device()
        self._written: list[Path] = []  # complete files in the scratch folder, durable on this disk

    @property
    def progress(self) -> Progress:
        done = self._out.num_bytes if self._out else self._num_bytes
        total = max(self._host_bytes, done)  # a function's output may exceed its tensors
        return Progress(total, self._host_bytes if self.staged.done() else 0, done)

    async def _write(self) -> None:
        await off_loop(self._stream if self._options.streams else self._fill_scratch)
        self.copy.release()
        if self.output_path.storage.remote and not self._options.streams:
            await off_loop(self._upload)

    def failed(self, error: BaseException) -> None:
        self._arguments = None
        super().failed(error)

    def _leave(self, scratch: Scratch, error: BaseException) -> None:
        if self._written:  # the function has returned; there may be no other copy of its output
            scratch.keep()
            error.add_note(f"async_ckpt: what {self._options.name} wrote is kept in {scratch.folder}")
        else:
            scratch.remove()

    # --- blocking, on helper threads --------------------------------------------------------------------------

    def _call(self, destination: Any) -> None:
        """Call the function, once."""
        self._check()
        assert self._arguments is not None
        (fn, others), self._arguments = self._arguments, None
        args, kwargs = self._make(others, destination)
        with torch.set_grad_enabled(self._grad_mode), on_device(self._device):
            try:
                fn(*args, **kwargs)
            except BaseException as error:
                _clear_frames(error)
                raise
            finally:
                del fn, others, args, kwargs

    def _stream(self) -> None:
        """Stream the output into the sink as the function writes it."""
        output = self.output_path
        self._out = Appender(output.storage, output.name, limit_bytes=2 * self._host_bytes + _LIMIT_BYTES)
        try:
            with AppenderFile(self._out) as file:
                self._call(file)
        except BaseException:
            self._out.check()  # raises the sink's error, even if the function has replaced it
            raise
        self._num_bytes = self._out.num_bytes
        if not self._num_bytes:
            raise NothingWrittenError(f"{self._options.name} wrote nothing; {self.path} is left as it was")

    def _fill_scratch(self) -> None:
        """Run the function with a path in a scratch folder."""
        output, options = self.output_path, self._options
        beside = Path(options.scratch or tempfile.gettempdir()) if output.storage.remote else output.parent
        self._scratch = Scratch(beside.absolute(), output.name)
        folder = self._scratch.folder
        inner = folder / output.name
        if output.is_folder:
            with translated(inner):
                inner.mkdir()  # the function expects a folder
        self._call(self._as_given(str(inner)))
        self._scratch.make_links_relative()
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
        elif not self.output_path.storage.remote:
            with translated(self.output_path.parent, passing=(FileExistsError, IsADirectoryError)):
                targets = {path: self.output_path.parent / path.name for path in self._written}
                for path, target in targets.items():  # check all of them before the first is visible
                    refuse_misfit(path, target)
                for path, target in targets.items():
                    publish(path, target, replaced=lambda _: self._options.whole_folder)

    def _upload(self) -> None:
        """Copy the files to the store. Files that refer to others (config, index) come last."""
        assert self._scratch is not None
        written, storage = LocalStorage(self._scratch.folder), self.output_path.storage
        sizes = written.sizes("")
        for are_last in (False, True):
            names = sorted(name for name in sizes if name.endswith(".json") is are_last)
            large = [name for name in names if sizes[name] > _SMALL_BYTES]
            copy(
                [Parcel(partial(written.open, name), name, sizes[name]) for name in large],
                storage,
                background=True,
                num_threads=_NUM_WRITERS,
                check=self._check,
                finished=self._uploaded,
            )
            for name in sorted({*names} - {*large}):
                self._check()
                storage.replace(name, written.read(name)[0])

    def _uploaded(self, sink: Sink) -> None:
        self._num_retries += sink.num_retries
        sink.close()


def _clear_frames(error: BaseException) -> None:
    """Clear the frames of a traceback: a failed handle may live long, and must not keep the copies alive."""
    chain: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is not None and link not in chain:
            chain.append(link)
            todo += [link.__cause__, link.__context__]
    for link in chain:
        traceback.clear_frames(link.__traceback__)


def _refuse_closed_over(fn: Callable[..., Any], name: str) -> None:
    names = tensors_in(closure_of(fn))[0]
    if names:
        raise UnsupportedStateError(
            f"{name} uses {names[0]} of the function that it was defined in, which may change while it runs; "
            "make it an argument",
            path=name,
        )


def _refuse_open_files(folder: Path, name: str) -> None:
    """Raise NothingWrittenError if this process has a file in the folder open for writing: buffered data would be lost.

    A garbage collection would not help: it may close a file without writing Python's buffer.
    """
    still = _open_files(folder)
    if still:
        raise NothingWrittenError(
            f"{name} left {', '.join(still)} open, so its content may be incomplete; close it before returning"
        )


def _open_files(folder: Path) -> list[str]:
    """The names of files below a folder that this process has open for writing."""
    names = []
    inside = os.path.realpath(folder) + os.sep
    with contextlib.suppress(OSError):  # without /proc, open files are not known
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{fd}")
                if target.startswith(inside) and _may_write(fd):
                    names.append(os.path.basename(target))
    return sorted(names)


def _may_write(fd: str) -> bool:
    """True if a file descriptor is open for writing; see proc(5)."""
    info = Path(f"/proc/self/fdinfo/{fd}").read_text()
    flags = next(line for line in info.splitlines() if line.startswith("flags:"))
    return int(flags.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
