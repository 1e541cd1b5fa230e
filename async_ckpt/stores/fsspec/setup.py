"""Creation of filesystems of fsspec: their class, their options, and one instance for each process.

In: a scheme, a URL, options of fsspec or obstore. Out: a filesystem. Knows nothing of: objects.
"""

from __future__ import annotations

import difflib
import inspect
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Final

from ...plumbing import process, urls
from ..s3.aws_settings import parse_endpoint
from ..s3.azure_google_settings import adlfs_options, gcsfs_options
from .error_advice import InheritedError, chain

# Filesystems with one connection, where threads would receive each other's responses, which paramiko drops.
ONE_AT_A_TIME: Final = frozenset({"sftp", "ssh", "ftp"})
_OURS: Final = frozenset({"deadline_seconds", "client_options", "retry_config", "credential_provider"})
_S3_NAMES: Final = {
    "access_key_id": "key",
    "secret_access_key": "secret",
    "session_token": "token",
    "endpoint": "endpoint_url",
    "default_region": "region",
    "region_name": "region",
    "skip_signature": "anon",
}
# Options of obstore that s3fs does not have.
_OBSTORE_ONLY: Final = frozenset(
    {
        "allow_http",
        "unsigned_payload",
        "conditional_put",
        "copy_if_not_exists",
        "disable_tagging",
        "checksum_algorithm",
    }
)


# Functions that translate options of obstore into options of the filesystem, by the scheme.
_OPTIONS_OF: Final = {"gs": gcsfs_options, **dict.fromkeys(("az", "azure", "abfs", "abfss"), adlfs_options)}

_makers: weakref.WeakSet[OncePerProcess] = weakref.WeakSet()
# Filesystems by their ids, since equal filesystems may be different objects.
_alive: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class OncePerProcess:
    """A filesystem that is made at the first call; a forked child makes its own. Thread-safe."""

    def __init__(self, make: Callable[[], Any], *, one_at_a_time: bool) -> None:
        self._make = make
        self._one_at_a_time = one_at_a_time
        self.begin_anew()
        _makers.add(self)

    def begin_anew(self) -> None:
        self._filesystem: Any = None
        # Both are held during foreign calls: a waiting thread needs the new filesystem, or the connection in use.
        self._making, self._using = threading.Lock(), threading.RLock()

    def __call__(self) -> Any:
        with self._making:
            if self._filesystem is None:
                self._filesystem = self._make()
                with suppress(TypeError):  # a user's class without weak references
                    _alive[id(self._filesystem)] = self._filesystem
            return self._filesystem

    def turn(self) -> AbstractContextManager[Any]:
        """A lock to be held while the filesystem is used."""
        return self._using if self._one_at_a_time else nullcontext()


@process.in_forked_child
def _forget() -> None:
    """In a forked child, make new filesystems, since connections and event loops belong to the parent."""
    for fs in list(_alive.values()):
        process.never_end(fs)
    for maker in list(_makers):
        maker.begin_anew()


def maker_of(fs: Any) -> Callable[[], Any]:
    """A function that returns a user's filesystem; in a forked child, a copy if its connections are the parent's."""
    made_in = getattr(fs, "_pid", os.getpid())  # filesystems with an event loop have a _pid

    def make() -> Any:
        # True if it has an event loop, or only one connection.
        is_bound = getattr(fs, "async_impl", False) or protocol_of(fs) in ONE_AT_A_TIME
        return _remake(fs) if is_bound and os.getpid() != made_in else fs

    return make


def _remake(fs: Any) -> Any:
    """A copy of a filesystem with connections of this process, made by pickling."""
    process.never_end(fs)
    try:
        return pickle.loads(pickle.dumps(fs))  # the bytes were pickled in the same line  # nosec B301
    except Exception as error:
        raise InheritedError(f"fs={type(fs).__qualname__} belongs to the parent of this process") from error


def protocol_of(fs: Any) -> str:
    return fs.protocol if isinstance(fs.protocol, str) else str(fs.protocol[0])


def class_and_maker(scheme: str, url: str, options: Mapping[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """The class for a scheme, and a function that makes an instance that is not shared and keeps no listings."""
    kind = _class_of(scheme)
    if hasattr(kind, "call_s3"):
        kwargs = _for_s3fs(options, known=set(inspect.signature(kind.__init__).parameters))
    else:
        kwargs = {key: value for key, value in options.items() if key not in _OURS}
        if (translated := _OPTIONS_OF.get(urls.SCHEMES.get(scheme, scheme))) is not None:
            kwargs = translated(kwargs)
        kwargs = {**kind._get_kwargs_from_urls(url), **kwargs}

    def make() -> Any:
        provider = options.get("credential_provider") if hasattr(kind, "call_s3") else None
        fs = kind(**kwargs | (_credentials(provider) if provider else {}), skip_instance_cache=True)
        fs.dircache.use_listings_cache = False  # some constructors refuse this option
        return fs

    return kind, make


def _class_of(scheme: str) -> Any:
    try:
        from fsspec import (  # type: ignore[import-untyped]
            available_protocols,
            get_filesystem_class,
        )
    except ImportError as error:
        raise ImportError(f'{scheme}:// needs fsspec: pip install "async_ckpt[fsspec]"') from error
    try:
        return get_filesystem_class(scheme)
    except ValueError:
        similar = difflib.get_close_matches(scheme, available_protocols(), n=3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(f'{name}://' for name in similar)}?"
            if similar
            else ("there are local paths, s3://, gs://, az:// and what fsspec.available_protocols() lists")
        )
        raise ValueError(f"{scheme}:// is not a known scheme; {hint}") from None
    except ImportError as error:
        missing = next((e.name for e in chain(error) if isinstance(e, ImportError) and e.name), "")
        package = '"async_ckpt[fsspec]"' if scheme in ("s3", "s3a") else missing.partition(".")[0]
        raise ImportError(f"{scheme}:// needs a package that is missing ({error}): pip install {package}") from error


def _for_s3fs(options: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Options of s3fs, from options of s3fs or obstore. Raises ValueError for any other option."""
    kwargs: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        name = name.lower().removeprefix("aws_")
        name = _S3_NAMES.get(name, name)
        if name == "region":
            name, value = "client_kwargs", {"region_name": value}
        elif name == "virtual_hosted_style_request":
            name, value = "config_kwargs", {"s3": {"addressing_style": "virtual" if _is_true(value) else "path"}}
        if name in ("client_kwargs", "config_kwargs"):
            kwargs[name] = {**kwargs.get(name, {}), **value}
        elif name == "anon":
            kwargs["anon"] = _is_true(value)
        elif name in known or name == "profile":
            kwargs[name] = value
        elif name not in _OURS | _OBSTORE_ONLY:
            raise ValueError(f"options has {name!r}, which is not an option of s3fs or obstore")
    if kwargs.get("endpoint_url"):
        parse_endpoint(str(kwargs["endpoint_url"]))
    return kwargs


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")


def _credentials(provider: Callable[[], Any]) -> dict[str, Any]:
    """The current keys of a credential provider of obstore. s3fs never renews them: use its `session` for that."""
    from fsspec.asyn import get_loop, sync  # type: ignore[import-untyped]

    credentials = provider()
    if inspect.isawaitable(credentials):
        awaitable = credentials

        async def wait() -> Any:
            return await awaitable

        credentials = sync(get_loop(), wait)
    return {
        "key": credentials["access_key_id"],
        "secret": credentials["secret_access_key"],
        "token": credentials.get("token"),
    }


_turns: dict[tuple[int, str], threading.Lock] = {}


def turn(url: str) -> threading.Lock:
    """A lock for the writers of this process to a root without conditional writes.

    It is held during the write. Each root has its own lock, so a place that hangs delays only its own writers.
    """
    return _turns.setdefault((os.getpid(), url), threading.Lock())
