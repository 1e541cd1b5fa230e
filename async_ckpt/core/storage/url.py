"""Paths and URLs as text: their parts, and the form that messages may show.

In: a user's paths and URLs. Out: schemes, buckets, parents and names; text for messages. Knows nothing of: storages.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from ...errors import CorruptCheckpointError, StorageUnavailableError

StrPath = str | os.PathLike[str]

SCHEMES: Final = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"} | {
    name: name for name in ("az", "azure", "abfs", "abfss", "adl")
}

_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")
# A chained URL of fsspec, which is one filesystem on another.
_CHAIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(?:://[^:]*)?::.*:/")
# Control characters and halves of surrogate pairs.
_NOT_IN_KEYS: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
# A key or password with fewer characters may be a common word, or a part of one.
_LONG_SECRET: Final = 8
_URL_IN_TEXT: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")


def parent_and_name(path: StrPath, *, fs: Any = None) -> tuple[str, str]:
    """The place that contains an object, and its name there. Raises ValueError if the object has no name."""
    text = text_of(path)
    parent, name = place_and_name(text, fs=fs)
    scheme, _, rest = text.partition("://")
    if fs is None and scheme.lower() in SCHEMES and rest.startswith("/"):
        raise ValueError(f"{shown(text)} names no bucket; write {scheme}://bucket{rest}")
    if _is_far(text, fs) and (not name or text.endswith("/")):
        bucket_url = shown(text).rstrip("/")
        example = f"{bucket_url}//bucket/x.tar" if bucket_url.endswith(":") else f"{bucket_url}/x.tar"
        raise ValueError(f"{shown(text)} names no object; give a name in it, such as {example}")
    return parent, name


def place_and_name(path: StrPath, *, fs: Any = None) -> tuple[str, str]:
    """The place that contains an object or folder, and its name there, which is empty for a whole bucket or disk.

    With `fs`, the path is on that filesystem.
    """
    text = text_of(path)
    if not _is_far(text, fs):
        local = local_path(text)
        return str(local.parent), local.name
    if fs is None and scheme_of(text) in SCHEMES:
        _refuse_query(text)
        _refuse_key(shown(text), text.rstrip("/").rpartition("/")[2])
    start = text.index("://") + len("://") if scheme_of(text) else 0
    parent, slash, name = text[start:].rstrip("/").rpartition("/")
    if not start:
        parent = parent or slash  # the root of the filesystem
    return (text[:start] + parent, name) if parent else (text, "")


def _is_far(text: str, fs: Any) -> bool:
    return fs is not None or scheme_of(text) not in (None, "file")


def scheme_of(text: str) -> str | None:
    """The scheme of a URL in lower case; None for a path."""
    match = _URL.match(text)
    return match[1].lower() if match and match[2] else None


def split_bucket(url: str) -> tuple[str, str, str]:
    """The scheme, bucket and prefix of a URL. Messages about a malformed URL show no part that may be a password."""
    scheme, _, rest = url.partition("://")
    scheme = scheme.lower()
    scheme = SCHEMES.get(scheme, scheme)
    if scheme not in SCHEMES.values():
        raise ValueError(f"{scheme}:// is not an object store; known are {', '.join(sorted(SCHEMES))}")
    bucket, _, prefix = rest.partition("/")
    user, _, host = bucket.rpartition("@")
    printable = f"{scheme}://{shown(url).partition('://')[2].partition('/')[0]}"
    if not host:
        raise ValueError(f"{printable} names no bucket; write {scheme}://bucket/prefix")
    if (user or ":" in bucket) and (scheme in ("s3", "gs") or ":" in bucket):
        raise ValueError(
            f"{printable}: a URL must not contain keys or a port; write {scheme}://bucket/prefix, and give these in "
            "Place(url, options=…)"
        )
    _refuse_query(url)
    prefix = prefix.strip("/")
    _refuse_key(f"{printable}/{prefix}", prefix)
    return scheme, bucket, prefix


def refuse_chain(text: str) -> None:
    """Raise ValueError for a chained URL of fsspec, one filesystem on another, which has no parent and no name."""
    if _CHAIN.match(text):
        raise ValueError(f"{shown(text)} is a chain of filesystems; pass Place(path, fs=…) instead")


def _refuse_query(url: str) -> None:
    """Raise ValueError for a URL with a query or fragment, which may be a signature."""
    if "?" in url or "#" in url:
        raise ValueError(
            f"{shown(url)}: the URL of a store must not contain ? or #; give what follows in Place(url, options=…)"
        )


def _refuse_key(printable: str, key: str) -> None:
    """Raise ValueError for a key that some client or server refuses, or changes."""
    if key and any(part in ("", ".", "..") for part in key.split("/")):
        raise ValueError(f"{printable}: a key must not have an empty part, or one that is . or ..")
    if _NOT_IN_KEYS.search(key):
        raise ValueError(f"{printable!a}: a key must not have control characters, or halves of surrogate pairs")


def shown(text: str) -> str:
    """A URL without user, password, query and fragment. A path is returned as it is."""
    slashes = "://" if "://" in text else ":/"
    if slashes == ":/" and not _URL.match(text):  # a path; a URL that was turned into a Path has one slash
        return text
    scheme, _, rest = text.partition(slashes)
    user, _, place = rest.rpartition("@")
    if ":" not in user:  # no password; an @ may be part of a name
        place = rest.rpartition("@")[2] if "@" in rest.partition("/")[0] else rest
    host = place.partition("/")[0]
    if scheme.lower() in SCHEMES and ":" in host:  # in no bucket's name: a port, or keys without their @
        place = host.partition(":")[0]
    return f"{scheme}{slashes}{re.split('[?#]', place, maxsplit=1)[0]}"


def starred(text: str, secrets: Iterable[str]) -> str:
    """A foreign text without these secrets, and without the secrets in its URLs.

    A short secret may be part of other words, so it is replaced only where it is a whole word.
    """
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        if len(secret) >= _LONG_SECRET:
            text = text.replace(secret, "***")
        else:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text)
    return without_secrets(text)


def without_secrets(text: str) -> str:
    """A foreign text, such as a client's error, with the secrets removed from the URLs in it."""
    return _URL_IN_TEXT.sub(lambda url: shown(url[0]), text)


def unusable_name(place: str, problem: str) -> CorruptCheckpointError:
    """The error about an object whose name cannot be requested, or is not a valid path below a folder."""
    return CorruptCheckpointError(
        f"{place} has an object that cannot be a file below it: {problem}; rename or delete that object", path=place
    )


def text_of(path: StrPath) -> str:
    """A path as text. Raises TypeError and ValueError for anything else."""
    # The file system path of a cloudpathlib path is that of a copy in a cache, so its URI is used.
    as_uri = None if isinstance(path, str | PurePath) else getattr(path, "as_uri", None)
    if as_uri is None and not isinstance(path, str | os.PathLike):
        raise TypeError(f"expected a path or URL, not {type(path).__qualname__}; pass a string or a Path")
    text = os.fspath(path) if as_uri is None else as_uri()
    if not isinstance(text, str):
        raise TypeError("a path must be str, not bytes")
    text = str.__str__(text)  # `str` of an enum with string values is its name
    if not text:
        raise ValueError("the path is empty")
    if "\0" in text:
        raise ValueError(f"{text!r:.300} is no path: it has a null character")
    match = _URL.match(text)
    if match and not match[2] and match[1] in SCHEMES and isinstance(path, str):
        raise ValueError(f"{shown(text)} has one slash too few; write {shown(text.replace(':/', '://', 1))}")
    if match and not match[2] and not isinstance(path, str):
        # A Path turns two slashes into one. The URL of a bucket has no other double slashes that could be lost.
        if match[1] in SCHEMES:
            return text.replace(":/", "://", 1)
        raise ValueError(f"{shown(text)} was a URL: a Path turns two slashes into one; pass it as a string")
    return text


def local_path(text: str) -> Path:
    """The path on this machine for a path or a `file://` URL.

    Raises StorageUnavailableError, and ValueError for `~name` of an unknown user.
    """
    refuse_chain(text)
    if scheme_of(text) == "file":
        text = unquote(urlsplit(text).path)
    if not text:
        raise ValueError("the path is empty")
    try:
        path = Path(text).expanduser().absolute()
    except RuntimeError as error:  # `~name` of an unknown user
        raise ValueError(
            f"{text:.300}: {error}; write the path in full, or ./{text:.300} if its name begins so"
        ) from error
    try:
        path.is_dir()
    except OSError as error:  # a name that is too long, or a file system that does not answer
        raise StorageUnavailableError(f"{text:.300}: {error.strerror}", path=text) from error
    return path
