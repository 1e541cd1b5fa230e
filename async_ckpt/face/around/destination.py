"""The destination of a wrapped function: which of its arguments is the path, and what exists there.

In: a function and a call of it. Out: the destination, and the other arguments. Knows nothing of: what is written.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from ...core.spec import with_article
from ...core.state.plain import method_of
from ...core.storage.interface import Storage
from ...core.storage.locks import refuse_in_running
from ...core.storage.place import Anywhere, Place, storage_at, written_at
from ...errors import IsAFolderError
from .scratch import refuse_current

# The usual names of the argument that says where to write.
_NAMES: Final = {
    "destination", "dest", "path", "filename", "file_path", "filepath", "fname", "file", "f", "fp",
    "save_directory", "save_dir", "save_path", "output_dir", "output_path", "out_dir", "out_path",
    "ckpt_dir", "ckpt_path", "checkpoint_dir", "checkpoint_path", "checkpoint_id", "local_path",
    "folder", "directory", "dir", "out", "target",
}  # fmt: skip
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Functions that take an open file in place of a path, and the suffix that they add to a path without it.
TAKE_FILES: Final = {
    ("torch.serialization", "save"): "",
    ("numpy", "save"): ".npy",
    ("numpy", "savez"): ".npz",
    ("numpy", "savez_compressed"): ".npz",
}
# Functions that read, and are wrapped by mistake.
_READ: Final = {
    ("torch.serialization", "load"), ("torch.jit._serialization", "load"), ("torch.export", "load"),
    ("torch.distributed.checkpoint.state_dict_loader", "load"), ("numpy", "load"), ("json", "load"),
    ("_pickle", "load"),
    ("safetensors.torch", "load_file"), ("safetensors.torch", "load_model"), ("safetensors.numpy", "load_file"),
    ("async_ckpt.face.oneoff", "load"), ("async_ckpt.face.run_reader", "RunReader.load"),
    ("async_ckpt.face.checkpointer", "AsyncCheckpointer.restore"), ("async_ckpt.face.oneoff", "verify"),
    ("async_ckpt.face.around.unpack", "unpack"), ("async_ckpt.face.around.unpack", "extract"),
}  # fmt: skip
_OPEN: Final = {("io", "open"), ("_io", "open"), ("async_ckpt.files", "open_file")}
# Functions that take only an open file; those that write bytes can write to ours.
_TAKE_ONLY_FILES: Final = {
    ("json", "dump"): "text",
    ("pickle", "dump"): "bytes",
    ("_pickle", "dump"): "bytes",
}
# Names that may also mean what is written, such as a file's content or a training target.
_AMBIGUOUS: Final = {"target", "out", "f", "fp", "file"}


class WrapOptions(NamedTuple):
    """The options of one wrapped function."""

    name: str  # for messages
    streams: bool  # the function writes to an open file
    suffix: str  # the suffix that the function adds to a path
    scratch: str | os.PathLike[str] | None
    whole_folder: bool  # replace an existing folder, including files that were not written again


class BoundCall(NamedTuple):
    """A call whose destination is known; `make` returns the arguments with another destination."""

    given: Anywhere
    others: dict[str | int, Any]
    names: dict[str | int, str]
    make: Callable[[dict[str | int, Any], Any], tuple[list[Any], dict[str, Any]]]


class DestinationFinder:
    """Finds the argument of a function that is the destination. `wrap` creates one for each function."""

    def __init__(self, fn: Callable[..., Any], declared: str | int | None) -> None:
        self._name = name_of(fn)
        self._declared = declared
        self._takes_file = suffix_of(fn) is not None
        self._parameters: Mapping[str, inspect.Parameter] = {}
        self._signature: inspect.Signature | None = None
        with contextlib.suppress(ValueError, TypeError):  # some built-in functions have no signature
            self._signature = inspect.signature(fn)
            self._parameters = self._signature.parameters
        self._positional = [p.name for p in self._parameters.values() if p.kind in _POSITIONAL]
        is_name = isinstance(declared, str)
        is_number = isinstance(declared, int) and not isinstance(declared, bool) and declared >= 0
        if not (declared is None or is_name or is_number):
            raise TypeError(f"destination must be the name or the position of an argument, got {declared!r:.100}")
        if isinstance(declared, int) and declared < len(self._positional):
            self._declared = self._positional[declared]  # by its name, so that a caller may pass it as a keyword, too
        elif declared is not None and self._signature is not None:
            takes_more = inspect.Parameter.VAR_KEYWORD if is_name else inspect.Parameter.VAR_POSITIONAL
            if declared not in self._parameters and takes_more not in [p.kind for p in self._parameters.values()]:
                raise TypeError(f"{self._name} has no argument {declared!r}; it has {', '.join(self._parameters)}")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BoundCall:
        if self._signature is not None:
            self._signature.bind(*args, **kwargs)  # a wrong call raises now, not in the background
        values: dict[str | int, Any] = dict(enumerate(args))
        values.update(kwargs)
        names: dict[str | int, str] = {
            key: key if isinstance(key, str) else f"argument {key}" for key in values
        } | dict(enumerate(self._positional[: len(args)]))
        key, given = self._find(values, names)
        num_args, keywords = len(args), [*kwargs] if key in values else [*kwargs, str(key)]
        others = {k: value for k, value in values.items() if k != key}

        def make(others: dict[str | int, Any], destination: Any) -> tuple[list[Any], dict[str, Any]]:
            values = {**others, key: destination}
            return [values[i] for i in range(num_args)], {k: values[k] for k in keywords}

        return BoundCall(given, others, names, make)

    def _find(self, values: Mapping[str | int, Any], names: Mapping[str | int, str]) -> tuple[str | int, Anywhere]:
        """The destination's key, and its value. Raises TypeError if the destination is missing or ambiguous."""
        defaults: dict[str | int, Any] = {
            p.name: p.default
            for p in self._parameters.values()
            if p.kind in _BY_NAME and p.name not in names.values() and p.default is not p.empty
        }
        all_values = {**values, **defaults}
        if self._declared is not None:
            for key, value in all_values.items():
                if self._declared in (key, names.get(key)):
                    return key, self._checked(value)
            raise TypeError(f"{self._name} was called without its destination {self._declared!r}")
        usual = [key for key in values if names[key] in _NAMES]
        named = [key for key in usual if names[key] in self._parameters]
        if not any(_is_path(values[key]) or hasattr(values[key], "write") for key in named):
            for key in named:
                self._refuse_swapped(names[key], values[key], [v for k, v in values.items() if k != key])
        for candidates in (
            [key for key in usual if names[key] in self._parameters and _is_path(values[key])],
            [key for key in usual if _is_path(values[key])],
            [key for key in usual if hasattr(values[key], "write")],  # `_checked` refuses it by its type
            [key for key in values if _is_path(values[key])],
            [name for name in defaults if name in _NAMES and _is_path(defaults[name])],
        ):
            if len(candidates) == 1:
                return candidates[0], self._checked(all_values[candidates[0]])
            if candidates:
                break
        if candidates:
            raise TypeError(
                f"several of the arguments of {self._name} may be the path that it writes to; "
                'name it: wrap(fn, destination="its name")'
            )
        raise TypeError(
            f"{self._name} was given no path to write to; write a function that takes one, such as "
            'def save(state, path): ..., and pass the path to what wrap returns: wrap(save)(state, "out/x")'
        )

    def _refuse_swapped(self, parameter: str, value: Any, others: list[Any]) -> None:
        # For a function that takes files, any other value is a mistake; for others the argument may not be the
        # destination.
        is_mistake = self._takes_file or (parameter not in _AMBIGUOUS and _is_state(value))
        if is_mistake and any(map(_is_path, others)):
            order = ", ".join(self._positional[:2])
            raise TypeError(
                f"the arguments of {self._name} are swapped: {parameter} must be a path, but is "
                f"{with_article(type(value).__qualname__)}; call {self._name}({order})"
            )

    def _checked(self, value: Any) -> Anywhere:
        if not _is_path(value):
            raise TypeError(
                f"{self._name} was given {with_article(type(value).__qualname__)} to write to; "
                "a wrapped function needs a path, a URL or a Place"
            )
        return value  # type: ignore[no-any-return]


class OutputPath(NamedTuple):
    """The destination of one call: its full path or URL, and its storage and name there."""

    path: str
    storage: Storage
    name: str

    @property
    def parent(self) -> Path:
        """The folder that contains a local destination."""
        return Path(self.path).parent

    @property
    def is_folder(self) -> bool:
        return not self.storage.remote and Path(self.path).is_dir()


def output_path(given: Anywhere, options: WrapOptions) -> OutputPath:
    """The destination of a call. Raises ValueError, IsADirectoryError, StorageUnavailableError if it is unusable."""
    place = written_at(given)
    storage, name = place.object()
    if name in ("", ".."):
        raise ValueError(f"{place.shown} names no file or folder that could be replaced; give a name")
    if storage.remote and "?" in name:  # the query may hold a key, which the function's messages would show
        raise ValueError(f"{place.shown}: a function cannot write to a URL with a query; leave it out")
    if options.streams and not name.endswith(options.suffix):
        name += options.suffix
    if not storage.remote and os.path.islink(storage.locate(name)):
        parent, name = os.path.split(os.path.realpath(storage.locate(name)))
        storage = storage_at(parent)
    output = OutputPath(storage.locate(name), storage, name)
    if options.streams and output.is_folder:
        raise IsAFolderError(f"{output.path} is a folder; give the path of a file")
    if output.is_folder:
        refuse_current(output.path)
    if not storage.remote:
        refuse_in_running(output.parent)
    return output


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike | Place)


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping | torch.Tensor) or method_of(value, "state_dict") is not None


def suffix_of(fn: Callable[..., Any]) -> str | None:
    """The suffix that a function adds to a path, if it is known to take open files; else None."""
    return TAKE_FILES.get(_known_as(fn))


def why_not_wrapped(fn: Callable[..., Any], *, streams: bool) -> str | None:
    """The reason why a known function cannot be wrapped; None for all others. Looks into partials and methods."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    known, name = _known_as(getattr(fn, "__func__", fn)), name_of(fn)
    if known in _READ:
        return (
            f"{name} reads, and wrap is for functions that write; call it directly, once the handle of the save is done"
        )
    if known in _OPEN:
        return f"{name} opens a file; wrap the function that writes to it"
    file_kind = _TAKE_ONLY_FILES.get(known)
    if file_kind == "text" or (file_kind == "bytes" and not streams):
        return (
            f"{name} writes to an open {'text ' if file_kind == 'text' else ''}file, not to a path; wrap a function "
            f"that opens the path itself{'' if file_kind == 'text' else ', or pass file_object=True'}"
        )
    return None


def _known_as(fn: Callable[..., Any]) -> tuple[str, str]:
    """The module and name of a function, if they refer to it; functools.wraps copies both to other functions."""
    module, name = getattr(fn, "__module__", None) or "", getattr(fn, "__qualname__", "")
    target: Any = sys.modules.get(module)
    for part in name.split("."):
        target = getattr(target, part, None)
    return (module, name) if target is fn else ("", "")


def name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    if inspect.ismethod(fn) and not isinstance(owner, type):  # its class may have inherited the method
        return f"{type(owner).__qualname__}.{fn.__name__}"
    return str(getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__qualname__)
