"""Where a wrapped function writes: which of its arguments is the path, and what stands there.

In: a function and a call of it. Out: the place, and the tensors. Knows nothing of: what is written.
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

from ..spec import with_article
from ..storage.interface import Storage
from ..storage.place import Anywhere, Place, storage_at, written_at
from ..storage.scratch import refuse_in_running

# What functions that write call the argument that says where.
_NAMES: Final = {
    "destination", "dest", "path", "filename", "file_path", "filepath", "fname", "file", "f", "fp",
    "save_directory", "save_dir", "save_path", "output_dir", "output_path", "out_dir", "out_path",
    "ckpt_dir", "ckpt_path", "checkpoint_dir", "checkpoint_path", "checkpoint_id", "local_path",
    "folder", "directory", "dir", "out", "target",
}  # fmt: skip
_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
# Functions that take an open file where they take a path, and the ending that they add to a path without it.
TAKE_FILES: Final = {
    ("torch.serialization", "save"): "",
    ("numpy", "save"): ".npy",
    ("numpy", "savez"): ".npz",
    ("numpy", "savez_compressed"): ".npz",
}
# Functions that somebody wraps who has read too fast.
_READ: Final = {
    ("torch.serialization", "load"), ("torch.jit._serialization", "load"), ("torch.export", "load"),
    ("torch.distributed.checkpoint.state_dict_loader", "load"), ("numpy", "load"), ("json", "load"), ("_pickle", "load"),
    ("safetensors.torch", "load_file"), ("safetensors.torch", "load_model"), ("safetensors.numpy", "load_file"),
    ("async_ckpt.oneoff", "load"), ("async_ckpt.loading.reading", "RunReader.load"),
    ("async_ckpt.checkpointer", "AsyncCheckpointer.restore"), ("async_ckpt.oneoff", "verify"),
    ("async_ckpt.around.unpack", "unpack"), ("async_ckpt.around.unpack", "extract"),
}  # fmt: skip
_OPEN: Final = {("io", "open"), ("_io", "open"), ("async_ckpt.files", "open_file")}
# Functions that take an open file alone; those that write bytes may have the one that we give them.
_TAKE_ONLY_FILES: Final = {
    ("json", "dump"): "text",
    ("pickle", "dump"): "bytes",
    ("_pickle", "dump"): "bytes",
}
# Names that may as well be those of what is written, such as a file's content or a training target.
_AMBIGUOUS: Final = {"target", "out", "f", "fp", "file"}


class Options(NamedTuple):
    name: str
    streams: bool
    ending: str
    scratch: str | os.PathLike[str] | None


class Bound(NamedTuple):
    """A call whose destination is known: `make` gives the arguments with another one in its place."""

    given: Anywhere
    others: dict[str | int, Any]
    names: dict[str | int, str]
    make: Callable[[dict[str | int, Any], Any], tuple[list[Any], dict[str, Any]]]


class Finder:
    """Knows which argument of a function is the destination."""

    def __init__(self, fn: Callable[..., Any], said: str | int | None) -> None:
        self._name = name_of(fn)
        self._said = said
        self._takes_file = ending_of(fn) is not None
        self._parameters: Mapping[str, inspect.Parameter] = {}
        self._signature: inspect.Signature | None = None
        with contextlib.suppress(ValueError, TypeError):  # of some built-in functions nothing is known
            self._signature = inspect.signature(fn)
            self._parameters = self._signature.parameters
        self._positional = [p.name for p in self._parameters.values() if p.kind in _POSITIONAL]
        if isinstance(said, int) and said < len(self._positional):
            self._said = self._positional[said]  # so it may be given by name as well
        elif isinstance(said, str) and self._signature is not None:
            kinds = [p.kind for p in self._parameters.values()]
            if said not in self._parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
                raise TypeError(
                    f"{self._name} has no argument {said!r}; it has {', '.join(self._parameters)}"
                )

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Bound:
        if self._signature is not None:
            self._signature.bind(*args, **kwargs)  # a wrong call is an error now, not in the background
        values: dict[str | int, Any] = dict(enumerate(args))
        values.update(kwargs)
        names: dict[str | int, str] = {
            key: key if isinstance(key, str) else f"argument {key}" for key in values
        } | dict(enumerate(self._positional[: len(args)]))
        key, given = self._find(values, names)
        num_args, keywords = len(args), [*kwargs] if key in values else [*kwargs, str(key)]
        others = {k: value for k, value in values.items() if k != key}

        def make(others: dict[str | int, Any], where: Any) -> tuple[list[Any], dict[str, Any]]:
            both = {**others, key: where}
            return [both[i] for i in range(num_args)], {k: both[k] for k in keywords}

        return Bound(given, others, names, make)

    def _find(
        self, values: Mapping[str | int, Any], names: Mapping[str | int, str]
    ) -> tuple[str | int, Anywhere]:
        """The destination's key, and its value. Raises TypeError when it cannot be told."""
        defaults: dict[str | int, Any] = {
            p.name: p.default
            for p in self._parameters.values()
            if p.kind in _BY_NAME and p.name not in names.values() and p.default is not p.empty
        }
        both = {**values, **defaults}
        if self._said is not None:
            for key, value in both.items():
                if self._said in (key, names.get(key)):
                    return key, self._checked(value)
            raise TypeError(f"{self._name} was called without its destination {self._said!r}")
        called_so = [key for key in values if names[key] in _NAMES]
        named = [key for key in called_so if names[key] in self._parameters]
        if not any(_is_path(values[key]) or hasattr(values[key], "write") for key in named):
            for key in named:
                self._refuse_swapped(names[key], values[key], [v for k, v in values.items() if k != key])
        for candidates in (
            [key for key in called_so if names[key] in self._parameters and _is_path(values[key])],
            [key for key in called_so if _is_path(values[key])],
            [key for key in called_so if hasattr(values[key], "write")],  # to be refused by what it is
            [key for key in values if _is_path(values[key])],
            [name for name in defaults if name in _NAMES and _is_path(defaults[name])],
        ):
            if len(candidates) == 1:
                return candidates[0], self._checked(both[candidates[0]])
            if candidates:
                break
        many = "several" if candidates else "none"
        raise TypeError(
            f"which argument of {self._name} says where it writes? {many} of them may; "
            'name it: wrap(fn, destination="its name")'
        )

    def _refuse_swapped(self, parameter: str, value: Any, others: list[Any]) -> None:
        # To a function that takes files, anything else is a mistake; of any other the argument may not be the destination.
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


class OutPath(NamedTuple):
    """Where it is to appear."""

    path: str
    storage: Storage
    name: str

    @property
    def parent(self) -> Path:
        """The folder of a local destination."""
        return Path(self.path).parent

    @property
    def is_folder(self) -> bool:
        return not self.storage.remote and Path(self.path).is_dir()


def out_path(given: Anywhere, options: Options) -> OutPath:
    """Raises ValueError, IsADirectoryError and StorageUnavailableError for what cannot be written to."""
    place = written_at(given)
    storage, name = place.object()
    if name in ("", ".."):
        raise ValueError(f"{place.shown} names no file or folder that could be replaced; give it a name")
    if storage.remote and "?" in name:  # the function's own messages would show what may be a key
        raise ValueError(f"{place.shown}: a function cannot write to a URL with a query; leave it out")
    if options.streams and not name.endswith(options.ending):
        name += options.ending
    if not storage.remote and os.path.islink(storage.locate(name)):
        parent, name = os.path.split(os.path.realpath(storage.locate(name)))
        storage = storage_at(parent)
    where = OutPath(storage.locate(name), storage, name)
    if options.streams and where.is_folder:
        raise IsADirectoryError(f"{where.path} is a folder; give the path of a file")
    if where.is_folder and Path.cwd().is_relative_to(os.path.realpath(where.path)):
        raise ValueError(
            f"{where.path} is the current folder of this process, and would be replaced; give a folder inside it"
        )
    if not storage.remote:
        refuse_in_running(where.parent)
    return where


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike | Place)


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping | torch.Tensor) or hasattr(value, "state_dict")


def ending_of(fn: Callable[..., Any]) -> str | None:
    """The suffix of a path that is given to this function, if it is one that takes open files; else None."""
    return TAKE_FILES.get(_known_as(fn))


def why_not_wrapped(fn: Callable[..., Any], *, streams: bool) -> str | None:
    """Why a function that is known cannot be wrapped, also a method, or with some of its arguments given; else None."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    known, name = _known_as(getattr(fn, "__func__", fn)), name_of(fn)
    if known in _READ:
        return f"{name} reads, and wrap is for functions that write; call it as it is, once the handle of the save is done"
    if known in _OPEN:
        return f"{name} opens a file; wrap the function that writes to it"
    takes = _TAKE_ONLY_FILES.get(known)
    if takes == "text" or (takes == "bytes" and not streams):
        return (
            f"{name} writes to an open {'text ' if takes == 'text' else ''}file, not to a path; wrap a function that opens the "
            f"path itself{'' if takes == 'text' else ', or pass file_object=True'}"
        )
    return None


def _known_as(fn: Callable[..., Any]) -> tuple[str, str]:
    """Module and name, if it is really the one that goes by them: what functools.wraps makes does, too."""
    module, name = getattr(fn, "__module__", None) or "", getattr(fn, "__qualname__", "")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return (module, name) if found is fn else ("", "")


def name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    if inspect.ismethod(fn) and not isinstance(owner, type):  # which may have inherited it
        return f"{type(owner).__qualname__}.{fn.__name__}"
    return str(getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None) or type(fn).__qualname__)
