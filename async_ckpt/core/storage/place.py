"""Places: a path or URL, and the options of the client for it.

In: a user's arguments; functions of wings and users that make storages from URLs. Out: a storage, made without any
request. Knows nothing of: what is stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from ..host import process as _  # noqa: F401 - notices forks from now on, even before the first store
from ..spec import Keep, flag, keep_of, seconds_above_0, whole_count, with_article
from .interface import Storage
from .local import LocalStorage
from .store_facts import SECRET_NAME
from .url import (
    SCHEMES,
    StrPath,
    local_path,
    parent_and_name,
    place_and_name,
    refuse_chain,
    scheme_of,
    shown,
    text_of,
)
from .volatile import is_elsewhere, is_volatile

Engine = Literal["obstore", "fsspec", "s3fs"]
Maker: TypeAlias = Callable[[str, Mapping[str, Any] | None], Storage]
"""A function that returns the storage of a URL, given the URL and the options of its `Place`."""

# Storages of the wing `stores`, imported at the first use: `import async_ckpt` imports no client.
_OBSTORE: Final = ("async_ckpt.stores.s3.store", "ObjectStorage")
_FSSPEC: Final = ("async_ckpt.stores.fsspec.store", "FsspecStorage")

_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]+")
_makers: dict[str, Maker] = {}

# Options that only the places of a run have.
_OF_RUNS: Final = ("keep", "every", "volatile", "compression")
_DEADLINE: Final = "deadline_seconds"
_MAPPINGS: Final = frozenset({"client_options", "retry_config", "client_kwargs", "config_kwargs"})
# Options that name the location of a store: not secret.
_WHERE: Final = re.compile("endpoint|region|profile", re.IGNORECASE)


def register_storage(scheme: str, make: Maker) -> None:
    """Use a storage of your own for `Place("scheme://…")`, everywhere in this process.

        register_storage("mem", lambda url, options: MyStorage(url, **(options or {})))
        async_ckpt.save(state, "mem://folder/x.ackpt.tar")

    `async_ckpt.testing.StorageContract` tests whether a storage keeps the promises of `Storage`.

    Args:
        scheme: in lower case, without "://". A function that was registered for this scheme before is replaced.
        make: a function of a URL and the options of its `Place`, or None. It returns a `Storage` whose root is the URL,
            makes no request, and raises ValueError for an invalid URL.

    Raises TypeError if `make` is not callable, and ValueError for a scheme that is invalid or has a client already.
    """
    if not callable(make):
        raise TypeError(f"make must be a function of a URL and its options, got {make!r:.100}")
    if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):
        raise ValueError(
            f'scheme must be lower-case letters and digits such as "mem", without "://", got {scheme!r:.100}'
        )
    if scheme == "file" or scheme in SCHEMES:
        raise ValueError(f"{scheme}:// has a client already; choose another scheme")
    _makers[scheme] = make


@dataclass(frozen=True, repr=False)
class Place:
    """A path or URL with the options of its client. Every function that takes a path or URL also takes a Place.

        minio = Place("s3://bucket/run", options={"endpoint": "http://minio:9000", "region": "us-east-1"})
        AsyncCheckpointer(["runs/a", minio])

    Args:
        url: a path or URL.
        options: of the client: endpoint, region, credentials, timeouts.
        engine: the client: "obstore" (the default for s3, gs and az) or "fsspec" (the default for all other URLs; for
            s3 also called "s3fs").
        fs: an fsspec filesystem to use as it is; `url` is then a path on it, or its URL.
        keep: the retention at this place of an AsyncCheckpointer; by default, the `keep` of the AsyncCheckpointer.
        every: at a further place of an AsyncCheckpointer, copy only the steps that are multiples of this, and the last.
        volatile: whether a reboot loses the data, as in a RAM disk. A save to a volatile place is done only once the
            step is at the next place that is not volatile, if there is one. By default, tmpfs and ramfs are volatile.
        compression: at a further place of an AsyncCheckpointer, "zstd" compresses steps block by block while they are
            copied there. All functions that read checkpoints can read them. Needs zstandard and numpy.

    Raises TypeError and ValueError for invalid arguments, such as `options` for a local path.
    """

    url: StrPath
    _: KW_ONLY
    options: Mapping[str, Any] | None = None
    engine: Engine | None = None
    fs: Any = None
    keep: int | Keep | None = None
    every: int | None = None
    volatile: bool | None = None
    compression: Literal["zstd"] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.url, Place):
            raise TypeError("a Place is made from a path or URL, not from another Place")
        text_of(self.url)
        if self.options is not None:
            _check_options(self.options)
        if self.engine not in (None, "obstore", "fsspec", "s3fs"):
            raise ValueError(f'engine must be "obstore", "fsspec" or "s3fs", got {self.engine!r}')
        keep_of(self.keep)
        if self.every is not None:
            object.__setattr__(self, "every", whole_count("every", self.every))
        if self.volatile is not None:
            object.__setattr__(self, "volatile", flag("volatile", self.volatile))
        if self.compression is not None and self.compression != "zstd":
            raise ValueError(f'compression of a place must be "zstd" or None, got {self.compression!r:.100}')
        if self.fs is not None and not (hasattr(self.fs, "protocol") and callable(getattr(self.fs, "open", None))):
            raise TypeError(f'fs must be a filesystem of fsspec, such as fsspec.filesystem("s3"), got {self.fs!r:.100}')
        if self.fs is not None and (self.engine is not None or (self.options or {}).keys() - {_DEADLINE}):
            raise ValueError(
                f"{self!r}: fs= is used as it is set up; leave out engine=, and all options= except {_DEADLINE}"
            )
        if self.is_local and (self.options or self.engine is not None):
            raise ValueError(f"{self!r}: options= and engine= are for URLs; leave them out for a local path")

    @property
    def text(self) -> str:
        """The path or URL as text, secrets included. Messages use `shown`."""
        return text_of(self.url)

    @property
    def shown(self) -> str:
        """The path or URL without secrets."""
        return shown(self.text)

    @property
    def open_options(self) -> dict[str, Any] | None:
        """The options that are not secret: numbers, and the location of the store."""
        return None if self.options is None else {k: v for k, v in self.options.items() if _printable(k, v) == v}

    @property
    def is_volatile(self) -> bool:
        """Whether a reboot loses the data at this place."""
        if self.volatile is None:
            return self.is_local and is_volatile(local_path(self.text))
        return self.volatile

    @property
    def outlives(self) -> Literal["process", "reboot", "machine"]:
        """The worst event that steps here survive: the end of a process, a reboot, or the loss of this machine."""
        if self.is_volatile:
            return "process"
        return "reboot" if self.is_local and not is_elsewhere(local_path(self.text)) else "machine"

    @property
    def is_local(self) -> bool:
        """Whether this is a path on this machine, or its `file://` URL."""
        return self.fs is None and scheme_of(self.text) in (None, "file")

    def storage(self) -> Storage:
        """A storage whose root is this place. Raises TypeError, ValueError; ImportError for a missing package."""
        scheme = scheme_of(self.text)
        if self.is_local:
            return LocalStorage(local_path(self.text))
        if self.fs is None:
            refuse_chain(self.text)
        own = _makers.get(scheme or "") if self.fs is None else None
        if own is not None:
            if self.engine is not None:
                raise ValueError(f"{self!r}: {scheme}:// has a storage of its own; leave out engine=")
            return own(self.text, self.options)
        if self.engine == "s3fs" and scheme not in ("s3", "s3a", None):
            raise ValueError(f'engine="s3fs" is for s3:// URLs; {scheme}:// has its own')
        if self.fs is None and (self.engine == "obstore" or (self.engine is None and scheme in SCHEMES)):
            return _loaded(*_OBSTORE)(self.text, self.options)
        return _loaded(*_FSSPEC)(self.text, self.options, fs=self.fs)

    def object(self) -> tuple[Storage, str]:
        """The storage that contains this object, and its name there. Raises ValueError if the object has no name."""
        parent, name = parent_and_name(self.url, fs=self.fs)
        return replace(self, url=parent).storage(), name

    def inside(self) -> tuple[Storage, str]:
        """The storage that contains this object or folder, and its name there, which is empty for a bucket or disk."""
        parent, name = place_and_name(self.url, fs=self.fs)
        return replace(self, url=parent).storage(), name

    def __repr__(self) -> str:
        arguments = [repr(self.shown)]
        if self.options is not None:
            arguments.append(f"options={ {name: _printable(name, value) for name, value in self.options.items()}!r}")
        if self.engine is not None:
            arguments.append(f"engine={self.engine!r}")
        if self.fs is not None:
            arguments.append(f"fs=<{type(self.fs).__qualname__}>")
        of_run = {name: getattr(self, name) for name in _OF_RUNS}
        arguments += [f"{name}={value!r}" for name, value in of_run.items() if value is not None]
        return f"Place({', '.join(arguments)})"


def _check_options(options: Any) -> None:
    """Raise TypeError and ValueError for options that no client takes."""
    if not isinstance(options, Mapping):
        raise TypeError(
            f'options must be a mapping such as {{"region": "us-east-1"}}, got {type(options).__qualname__}'
        )
    if not all(isinstance(name, str) for name in options):
        raise TypeError("the names of options must be strings")
    for name in _MAPPINGS & options.keys():
        if not isinstance(options[name], Mapping | None):
            raise TypeError(
                f'options["{name}"] must be a mapping, got {with_article(type(options[name]).__qualname__)}'
            )
    if (seconds := options.get(_DEADLINE)) is not None:
        with suppress(ValueError):
            seconds = float(seconds) if isinstance(seconds, str) else seconds
        seconds_above_0(f'options["{_DEADLINE}"]', seconds)


def _loaded(module: str, name: str) -> Callable[..., Storage]:
    """A storage class of the wing `stores`. The class of _FSSPEC also takes a filesystem, as `fs`."""
    maker: Callable[..., Storage] = getattr(import_module(module), name)
    return maker


def _printable(name: str, value: Any) -> Any:
    """The form of an option that may be printed: numbers and locations as they are, and "…" for possible secrets."""
    if SECRET_NAME.search(name):
        return "…"
    if isinstance(value, str):
        return shown(value) if _WHERE.search(name) else "…"
    return value if value is None or isinstance(value, int | float) else "…"


Anywhere: TypeAlias = StrPath | Place


def place_of(where: Anywhere) -> Place:
    """The Place for a path, a URL or a Place."""
    return where if isinstance(where, Place) else Place(where)


def written_at(where: Anywhere) -> Place:
    """The Place of something that is not a run. Raises ValueError if it has options of the places of a run."""
    place = place_of(where)
    if any(getattr(place, name) is not None for name in _OF_RUNS):
        raise ValueError(
            f"{place!r}: keep=, every=, volatile= and compression= are for the places of an AsyncCheckpointer; leave "
            "them out here"
        )
    return place


def local_place(where: Anywhere, advice: str = "give a local path") -> Path:
    """The path of a place on this machine. Raises ValueError, with `advice`, for any other place."""
    place = place_of(where)
    if not place.is_local:
        raise ValueError(f"{place.shown} is not a local path; {advice}")
    return local_path(place.text)


def storage_at(where: Anywhere) -> Storage:
    """The storage whose root is this folder, bucket prefix or fsspec URL."""
    return place_of(where).storage()
