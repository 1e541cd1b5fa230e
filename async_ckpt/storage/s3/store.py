"""S3, Google Cloud Storage and Azure, through obstore.

In: segments, which are the parts of a multipart upload without a copy. Out: objects that appear whole or not at all.
Knows nothing of: what is in the objects. No bucket is ever made.

What obstore was seen to do, and this file builds on: a put from an iterator asks for the next buffer on the calling
thread, holds no more than the parts in flight and the one being gathered, and lets go of a buffer when its part has
been answered for; a weak reference tells. Where the iterator raises, or a part fails for good, it aborts the upload.
"""

from __future__ import annotations

import errno
import logging
import re
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from ...errors import StorageFullError, StorageUnavailableError
from ...host.threads import Crew, LibraryThread, start_thread
from ...spans import monotonic
from ...spec import KIB, MIB
from .. import retry
from ..conditions import Conditions, Form
from ..place import split_bucket, unusable_name
from . import answers
from .aws import AwsSetup

if TYPE_CHECKING:
    from ..base import Held

T = TypeVar("T")

# Long after any writer of it can still be alive, by the store's clock.
ORPHAN_SECONDS: Final = 86400.0
# S3 refuses smaller parts, except for the last, and a 10,001st one; all three stores refuse longer keys.
_MIN_PART_BYTES: Final = 5 * MIB
_MAX_PARTS: Final = 10_000
_MAX_KEY_BYTES: Final = 1024
# More do not make one host faster, and each holds a segment.
_MAX_PARTS_IN_FLIGHT: Final = 8
# A request that takes longer is taken for hung. Eight parts of 32 MiB in that time need 1.5 MB/s; where even that
# fails, the next attempt sends half as many at once.
_PART_SECONDS: Final = 180.0
_SMALL_SECONDS: Final = 30.0
# A read comes in pieces of about this size: larger ones are copied together first, which doubles the cost.
_READ_BYTES: Final = 256 * KIB
_HEADS_IN_FLIGHT: Final = 16
# How long the buffers of an upload that was broken off may take to be let go of before its thread ends without them.
_LET_GO_SECONDS: Final = 10.0

_SECRET: Final = re.compile(r"key|secret|token|password|sas|credential", re.IGNORECASE)

_log = logging.getLogger("async_ckpt")


class ObjectStorage:
    """A bucket, or all below a prefix in it. Making one sends no request.

    `options` are obstore's, with or without `aws_` before them, or fsspec's; besides `client_options`,
    `retry_config` (for one part's requests), `credential_provider`, `profile` and `deadline_seconds`.
    """

    remote = True
    in_order = True

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self._scheme, self._bucket, self._prefix = split_bucket(url)
        self.url = "/".join(filter(None, (f"{self._scheme}://{self._bucket}", self._prefix)))
        self._options = dict(options or {})
        rest = {key: value for key, value in self._options.items() if value is not None}
        self.deadline_seconds = float(rest.pop("deadline_seconds", retry.OBJECT_SECONDS))
        self._client_options = dict(rest.pop("client_options", {}))
        self._retry_config = dict(rest.pop("retry_config", {}))
        self._provider = rest.pop("credential_provider", None)
        self._aws = AwsSetup(rest) if self._scheme == "s3" else None
        self._config = self._aws.config if self._aws else rest
        if self._aws and self._aws.endpoint.startswith("http:"):
            self._client_options.setdefault("allow_http", True)
        self._lock = threading.Lock()
        self._stores: dict[bool, Any] = {}  # under _lock
        self._answered = False  # the bucket is there, so a 404 is about the key
        self._said = False  # that no put replaces one version only; under _lock
        # S3 itself, Google and Azure are known to obey conditions; other servers that speak S3 are asked, once.
        self._conditional: bool | None = None if self._aws and self._aws.endpoint else True
        self._conditions = Conditions()
        self._store()  # options that it does not take are refused here

    def __repr__(self) -> str:
        return f"<ObjectStorage {self.url}>"

    def locate(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    # --- archives ---------------------------------------------------------------------------------------------

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        smallest = max(_MIN_PART_BYTES, -(-num_bytes // _MAX_PARTS))
        return min(-(-smallest // segment_bytes), max(1, -(-num_bytes // segment_bytes)))

    def create(
        self,
        path: str,
        *,
        num_bytes: int,
        segment_bytes: int,
        max_segments: int | None = None,
        exact: bool = True,  # noqa: ARG002
    ) -> ObjectSink:
        self.key(path)
        part_segments = self.part_segments(num_bytes, segment_bytes)
        num_parts = _MAX_PARTS_IN_FLIGHT
        if max_segments is not None:
            num_parts = max(1, min(num_parts, max_segments // part_segments - 1))
        return ObjectSink(self, path, num_bytes, segment_bytes, part_segments, num_parts)

    def open(self, path: str) -> ObjectReader:
        return ObjectReader(self, path)

    # --- small objects ----------------------------------------------------------------------------------------

    def read(self, path: str) -> tuple[bytes, str]:
        import obstore

        def get(store: Any) -> tuple[bytes, str]:
            result = obstore.get(store, self.key(path))
            return bytes(result.bytes()), _version(result.meta)

        return self.ask(path, get)

    def put_new(self, path: str, data: bytes) -> None:
        self.key(path)
        if self._has_conditions():
            self._put_if(path, data, "create")
            return
        if self.exists(path):
            raise FileExistsError(f"{self.locate(path)} exists already")
        self._put(path, data)

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str | None:
        if version is not None:
            made = self._put_over(path, data, version) if self._has_conditions() else None
            if made is not None:
                return made
            if not self._is_there(path, version):
                raise FileExistsError(f"{self.locate(path)} was replaced by another writer")
        return self._put(path, data)

    def move(self, path: str, to: str) -> None:
        import obstore

        self.ask(path, lambda store: obstore.copy(store, self.key(path), self.key(to)))
        self.delete(path)

    def delete(self, path: str) -> None:
        import obstore

        with suppress(FileNotFoundError):
            self.ask(path, lambda store: obstore.delete(store, self.key(path)))

    def remove_if_empty(self, folder: str) -> bool:  # noqa: ARG002
        return False  # there are no folders

    def names(self, folder: str) -> list[str]:
        found = self._list(folder)
        paths = {*found["common_prefixes"], *(meta["path"] for meta in found["objects"])}
        paths.discard(self.key(folder))  # an empty object that consoles put there, to show a folder
        return sorted({path.rpartition("/")[2] for path in paths} - {""})

    def sizes(self, folder: str) -> dict[str, int]:
        import obstore
        from obstore.exceptions import InvalidPathError

        key = self.key(folder)

        def list_all(store: Any) -> dict[str, int]:
            pages = obstore.list(store, key or None)
            return {meta["path"]: meta["size"] for page in pages for meta in page if meta["path"] != key}

        try:
            found = self.ask(folder, list_all)
        except StorageUnavailableError as error:
            if not isinstance(error.__cause__, InvalidPathError):
                raise
            raise unusable_name(self.locate(folder), str(error.__cause__)) from error
        below = f"{folder}/" if folder else ""
        sizes = {path.removeprefix(f"{key}/"): size for path, size in found.items()}
        # obstore shows no slash at the end: what is empty may only stand for a folder, and then is not there by its name.
        empty = [f"{below}{path}" for path, size in sizes.items() if not size]
        gone = {*empty} - {*self.existing(empty)}
        return {path: size for path, size in sorted(sizes.items()) if f"{below}{path}" not in gone}

    def exists(self, path: str) -> bool:
        try:
            self.head(path)
        except FileNotFoundError:
            return False
        return True

    def existing(self, paths: Sequence[str]) -> list[str]:
        found: dict[str, bool] = {}

        def look(path: str) -> None:
            found[path] = self.exists(path)

        if paths:
            crew = Crew("head", min(_HEADS_IN_FLIGHT, len(paths)))
            try:
                crew.run_all([partial(look, path) for path in paths])
            finally:
                crew.stop()
        return [path for path in paths if found[path]]

    # --- what dead writers left -------------------------------------------------------------------------------

    def sweep(
        self, folder: str, names: list[str], *, delete: bool = False, decided: bool = False
    ) -> list[str]:
        if not decided or not names:
            return []
        limit = retry.before(self._now(), ORPHAN_SECONDS)
        written = {
            meta["path"].rpartition("/")[2]: meta["last_modified"] for meta in self._list(folder)["objects"]
        }
        dead = [name for name in names if name in written and written[name] < limit]
        for name in dead if delete else ():
            self.delete(f"{folder}/{name}" if folder else name)
        return dead

    def sweep_uploads(self) -> list[str]:
        """By s3fs, since obstore lists no uploads."""
        if self._scheme != "s3":
            return []  # there, what is unfinished goes by itself
        try:
            from ..fsspec.store import abort_stale_uploads

            limit = retry.before(self._now(), ORPHAN_SECONDS)
            prefix = self._prefix and f"{self._prefix}/"
            return abort_stale_uploads(self._bucket, prefix, older_than=limit, options=self._options)
        except (ImportError, StorageUnavailableError, NotImplementedError) as error:
            _log.warning(
                "%s: unfinished uploads of killed processes cannot be swept (%s); set a lifecycle rule on the bucket "
                "that aborts incomplete multipart uploads",
                self.url,
                self._scrubbed(str(error)),
            )
            return []

    def abort_uploads(self, path: str) -> None:
        """Abort what failed attempts at an object may have left open: an answer was lost, or an abort was."""
        if self._scheme == "s3":
            # Else the sweep, or a lifecycle rule, does it.
            with suppress(ImportError, StorageUnavailableError):
                from ..fsspec.store import abort_stale_uploads

                ever = retry.from_now(ORPHAN_SECONDS)
                options = {**self._options, "deadline_seconds": _LET_GO_SECONDS}
                abort_stale_uploads(
                    self._bucket, self.key(path), older_than=ever, options=options, exact=True
                )

    # --- requests ---------------------------------------------------------------------------------------------

    def key(self, path: str) -> str:
        """The key of an object, or of a folder without the slash behind it."""
        key = "/".join(filter(None, (self._prefix, path)))
        num_bytes = len(key.encode())
        if num_bytes > _MAX_KEY_BYTES:
            raise StorageUnavailableError(
                f"{self.locate(path):.100}…: a key of {num_bytes:,} bytes, and stores take {_MAX_KEY_BYTES:,}; shorten it",
                path=self.locate(path),
            )
        return key

    def ask(self, path: str, request: Callable[[Any], T]) -> T:
        """Make a small request, again and again while the store is away."""
        return self._persist(lambda: self.ask_once(path, request))

    def ask_once(
        self, path: str, request: Callable[[Any], T], *, part: bool = False, num_bytes: int = 0
    ) -> T:
        """Foreign errors become ours once, here; raised where obstore's own, whose text may hold keys, is forgotten."""
        store = self._store(part=part)
        try:
            result = request(store)
        except _GivenUpError:
            raise
        except Exception as error:
            refusal = self._translated(path, error, num_bytes)
        else:
            self._answered = True
            return result
        if getattr(refusal, "code", "") in answers.EXPIRED:
            self._renew(store)
        raise refusal

    def head(self, path: str) -> Any:
        """Size, e-tag and time of an object."""
        import obstore

        key = self.key(path)

        def ask(store: Any) -> Any:
            try:
                return obstore.head(store, key)
            except Exception as error:
                # The answer to a HEAD has no body and so no reason; the answer to a listing has.
                missing = isinstance(error, FileNotFoundError)
                if not (missing and self._answered):
                    try:
                        obstore.list_with_delimiter(store, key)
                        self._answered = True
                    except Exception as reason:
                        if not missing or answers.Answer.of(reason).status == 404:
                            raise
                raise

        return self.ask(path, ask)

    def fetch(self, path: str, offset: int, target: memoryview, e_tag: str | None) -> bool:
        """Fill `target`; False, or FileExistsError, when the object is another one by now."""
        import obstore

        options: Any = {"range": (offset, offset + len(target))} | ({"if_match": e_tag} if e_tag else {})

        def get(store: Any) -> bool:
            result = obstore.get(store, self.key(path), options=options)
            at = 0
            for chunk in result.stream(min_chunk_size=_READ_BYTES):
                target[at : at + len(chunk)] = memoryview(chunk)
                at += len(chunk)
            return at == len(target) and (not e_tag or result.meta["e_tag"] == e_tag)

        return self._persist(lambda: self.ask_once(path, get, part=True))

    def _list(self, folder: str) -> Any:
        import obstore

        return self.ask(folder, lambda store: obstore.list_with_delimiter(store, self.key(folder) or None))

    def _put(self, path: str, data: bytes) -> str:
        import obstore

        put = self.ask(path, lambda store: obstore.put(store, self.key(path), data, use_multipart=False))
        return _version(put)

    def _put_if(self, path: str, data: bytes, mode: Any) -> str:
        """Put on a condition; the version. FileExistsError where it does not hold, unless that is our own doing."""
        import obstore

        unsure = False  # an earlier try had no answer, and may have come through

        def put() -> str:
            nonlocal unsure
            try:
                return _version(
                    self.ask_once(path, lambda store: obstore.put(store, self.key(path), data, mode=mode))
                )
            except FileExistsError:
                with suppress(FileNotFoundError):
                    there, version = self.read(path) if unsure else (None, "")
                    if there == data:
                        return version
                raise
            except StorageUnavailableError:
                unsure = True
                raise

        return self._persist(put)

    def _put_over(self, path: str, data: bytes, version: str) -> str | None:
        """Put over this version and no other. None when the store refuses every such put, which is said once."""
        made = self._conditions.replace(
            lambda form: self._put_if(path, data, _matching(version, form)),
            is_there=partial(self._is_there, path, version),
            accepts=self._accepts,
        )
        if made is None:
            with self._lock:
                first, self._said = not self._said, True
            if first:
                _log.warning(
                    "%s: the store refuses every put that is to replace one version only, so two writers could "
                    "overwrite each other; let only one write",
                    self.url,
                )
        return made

    def _is_there(self, path: str, version: str) -> bool:
        try:
            return _version(self.head(path)) == version
        except FileNotFoundError:
            return False

    def _accepts(self, form: Form) -> bool:
        """Whether a put over a version that is there is obeyed, on an object made for that."""
        with self._probe() as path:
            try:
                self._put_if(path, b"accepted", _matching(_version(self.head(path)), form))
            except FileExistsError:
                return False
        return True

    def _persist(self, call: Callable[[], T]) -> T:
        return retry.persist(call, deadline_seconds=min(self.deadline_seconds, retry.REQUEST_SECONDS))

    def _has_conditions(self) -> bool:
        """Whether the store obeys the conditions of a put. The first time, that is tried out."""
        if self._conditional is None:
            obeyed = self._try_conditions()
            with self._lock:
                first, self._conditional = self._conditional is None, obeyed
            if first and not obeyed:
                _log.warning(
                    "%s: the store has no conditional puts, so two writers that commit one step in the same moment "
                    "are not told apart; let only one write",
                    self.url,
                )
        return bool(self._conditional)

    def _try_conditions(self) -> bool:
        """Two puts that must be refused, on an object made for that."""
        import obstore

        modes: tuple[Any, ...] = ("create", {"e_tag": '"00000000000000000000000000000000"'})
        with self._probe() as path:
            key = self.key(path)
            for mode in modes:
                try:
                    self.ask(path, partial(lambda mode, store: obstore.put(store, key, b"", mode=mode), mode))
                except FileExistsError:
                    continue
                except StorageUnavailableError as error:
                    if getattr(error, "status", None) not in answers.LACKS:
                        raise
                return False
        return True

    def _now(self) -> Any:
        """The store's clock: the time that it gives to an object written just now."""
        with self._probe() as path:
            return self.head(path)["last_modified"]

    @contextmanager
    def _probe(self) -> Iterator[str]:
        path = f".async_ckpt-probe-{secrets.token_hex(8)}"
        self._put(path, b"probe")
        try:
            yield path
        finally:
            with suppress(StorageUnavailableError):
                self.delete(path)

    def _store(self, *, part: bool = False) -> Any:
        """A client: one for parts, whose requests it makes again itself, and one for all that is small."""
        with self._lock:
            store = self._stores.get(part)
        if store is None:
            store = self._make_store(part=part)
            with self._lock:
                store = self._stores.setdefault(part, store)
        return store

    def _make_store(self, *, part: bool) -> Any:
        try:
            from obstore.store import S3Store, from_url
        except ImportError:
            raise ImportError(f'{self._scheme}:// needs obstore; pip install "async_ckpt[s3]"') from None

        seconds = min(_PART_SECONDS if part else _SMALL_SECONDS, self.deadline_seconds)
        clients: Any = {"timeout": f"{seconds * 1000:.0f}ms", "connect_timeout": "10s"} | self._client_options
        retries: Any = {"max_retries": 0}
        if part:
            retries = {"max_retries": 10, "retry_timeout": retry.duration(seconds)} | self._retry_config
        provider = self._provider or (self._aws.provider if self._aws else None)
        settings: Any = {
            "config": self._config,
            "client_options": clients,
            "retry_config": retries,
            **({"credential_provider": provider} if provider else {}),
        }
        try:
            if self._aws:
                return S3Store(self._bucket, **settings)
            return from_url(f"{self._scheme}://{self._bucket}", **settings)
        except Exception as error:
            problem = self._scrubbed(str(error).partition("\n")[0])
        raise ValueError(f"storage_options of {self.url}: {problem}")

    def _renew(self, store: Any) -> None:
        """These keys are over: the next request is made with what is found then where they come from."""
        with self._lock:
            if store in self._stores.values():
                self._stores = {}
        if self._aws:
            self._aws.renew()

    def _translated(self, path: str, error: Exception, num_bytes: int = 0) -> Exception:
        where, name, answer = self.locate(path), type(error).__name__, answers.Answer.of(error)
        advice = answers.ADVICE.get(answer.code) or answers.ADVICE.get(str(answer.status), answers.AWAY)
        if answer.status == 404 and name == "GenericError":
            advice = answers.NO_BUCKET  # of a listing
        if advice is not answers.NO_BUCKET and answer.code not in answers.CONFLICTS:
            if isinstance(error, FileNotFoundError):
                return FileNotFoundError(errno.ENOENT, "there is no such object", where)
            if name in ("AlreadyExistsError", "PreconditionError"):
                return FileExistsError(errno.EEXIST, "another writer was first", where)
        if name == "NotSupportedError":
            answer = replace(answer, status=501)
        again = (
            answer.status in answers.AGAIN
            or answer.code in answers.AGAIN_CODES | answers.CONFLICTS
            or answer.unheard
        )
        if answer.code in answers.EXPIRED:
            again = self._provider is not None or (self._aws is not None and not self._aws.given)
        if answer.region:
            advice = f"{advice}; it is in {answer.region}"
        if answer.keyless:
            advice = answers.NO_KEYS
        reason = self._scrubbed(answer.reason)
        message = f"{where}: {reason}; {advice}"
        refusal: StorageUnavailableError
        if answer.status == answers.FULL:
            refusal = StorageFullError(message, path=where, needed_bytes=num_bytes, free_bytes=None)
        else:
            refusal = StorageUnavailableError(
                message, path=where, status=answer.status, code=answer.code, transient=again
            )
        refusal.__cause__ = type(error)(reason)  # all but what an answer may echo of our headers
        return refusal

    def _scrubbed(self, text: str) -> str:
        known = {str(value) for key, value in self._config.items() if _SECRET.search(key)}
        for secret in known | (self._aws.known if self._aws else set()):
            if len(secret) > 3:
                text = text.replace(secret, "***")
        return text


class _GivenUpError(Exception):
    """Ends an upload from within: obstore aborts one whose iterator raises, and must never be cancelled."""


@dataclass(slots=True)
class _Piece:
    data: memoryview
    lease: Held
    num_views: int = 0  # how often the upload holds it


class ObjectSink:
    """One object on its way up: a thread of its own sends the segments in file order, as they come.

    A segment stays on loan until the object is finished, so that all can be sent again if an attempt fails, or until
    it has been sent and its memory is needed elsewhere; never less long than the upload looks at it. Who has asked
    for memory while all was being sent gets that of the next segment that has been, without asking again.
    """

    def __init__(
        self,
        storage: ObjectStorage,
        path: str,
        num_bytes: int,
        segment_bytes: int,
        part_segments: int,
        num_parts: int,
    ) -> None:
        self.num_retries = 0
        self.retryable = True
        self._storage, self._path, self.num_bytes = storage, path, num_bytes
        self._segment_bytes, self._part_segments, self._num_parts = segment_bytes, part_segments, num_parts
        self._is_multipart = num_bytes > segment_bytes
        self._changed = threading.Condition()
        self._num_segments = -(-num_bytes // segment_bytes)  # or fewer, as `finish` may say; under _changed
        self._pieces: dict[int, _Piece] = {}  # what is on loan; under _changed, like all below
        self._num_arrived = 0
        self._next = 0  # the first segment that this attempt has not asked for
        self._all_written = False
        self._is_wanted = False  # somebody waits for memory: the next segment that has been sent is let go of
        self._given_up = False
        self._over = False  # the thread has ended, or is about to: nothing more is sent
        self._error: BaseException | None = None
        self._before: str | None = None  # e-tag of what was there under the name
        self._has_looked = False
        self._e_tag: str | None = None  # of ours, once the store has acknowledged it
        self._finished = False
        self._moved_at = monotonic()
        self._thread: LibraryThread | None = None

    # --- from any thread --------------------------------------------------------------------------------------

    def write(self, offset: int, data: memoryview, lease: Held) -> None:
        lease.retain()
        with self._changed:
            refused = self._over or self._given_up
            if not refused:
                self._pieces[offset // self._segment_bytes] = _Piece(data, lease)
                self._num_arrived += 1
                if self._thread is None:
                    self._thread = start_thread("upload", self._run)
                self._changed.notify_all()
        if refused:
            lease.release()
            raise self._failure()

    def relieve(self) -> bool:
        with self._changed:
            idle = [number for number in self._idle() if number < self._next]
            self._is_wanted = not idle
            if not idle:
                return False
            self.retryable = False
            piece = self._pieces.pop(min(idle))
        piece.lease.release()
        return True

    def finish(self, num_bytes: int | None = None) -> None:
        with self._changed:
            if num_bytes is not None:
                self.num_bytes = num_bytes
                self._num_segments = max(1, -(-num_bytes // self._segment_bytes))
            self._all_written = self._num_arrived == self._num_segments
            self._changed.notify_all()
        if not self._all_written and not self._over:
            self.abort()
            raise StorageUnavailableError(
                f"{self._where}: {self._num_arrived} segments arrived of {self._num_segments}",
                path=self._where,
            )
        if self._thread is not None:
            self._thread.join()  # it ends by its deadlines
        if self._error is not None:
            raise self._failure()
        self._finished = True

    def give_up(self) -> None:
        with self._changed:
            self._given_up = True  # from here on nothing more is taken
            leases = [self._pieces.pop(number).lease for number in self._idle()]
            self._changed.notify_all()
        for lease in leases:
            lease.release()

    def abort(self) -> None:
        if self._finished:
            return
        self.give_up()
        if self._thread is not None:
            self._thread.join()
        e_tag, self._e_tag = self._e_tag, None
        if e_tag is not None:  # it came through after all; what stood there before is gone already
            with suppress(StorageUnavailableError, FileNotFoundError):
                if self._storage.head(self._path)["e_tag"] == e_tag:
                    self._storage.delete(self._path)

    def close(self) -> None:
        """There is nothing left to close: the thread has ended, and all is given back."""

    def _idle(self) -> list[int]:
        """Segments that the upload is not looking at; under _changed."""
        return [number for number, piece in self._pieces.items() if not piece.num_views]

    def _failure(self) -> BaseException:
        if self._error is None or isinstance(self._error, _GivenUpError):
            return StorageUnavailableError(f"{self._where}: the upload was given up", path=self._where)
        return self._error

    @property
    def _where(self) -> str:
        return self._storage.locate(self._path)

    def __repr__(self) -> str:
        state = "finished" if self._finished else f"{self._next}/{self._num_segments} segments sent"
        return f"<ObjectSink {self._where} {state}>"

    # --- on the thread of the upload --------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            retry.persist(
                self._attempt,
                deadline_seconds=self._storage.deadline_seconds,
                since=lambda: self._moved_at,
                on_retry=self._count_retry,
                sleep=self._pause,
            )
        except BaseException as failure:
            error = failure
        with self._changed:
            self._error, self._over = error, True
            leases = [self._pieces.pop(number).lease for number in self._idle()]
        for lease in leases:
            lease.release()
        # Also where it could not be made again as a whole, which the cause of the error tells.
        broke_off = error is not None and any(map(retry.is_transient, (error, error.__cause__ or error)))
        if self._is_multipart and (self.num_retries or broke_off):
            self._storage.abort_uploads(self._path)
        with self._changed:  # requests that were broken off let go a moment later, in `_let_go`
            self._changed.wait_for(lambda: not self._pieces, _LET_GO_SECONDS)

    def _attempt(self) -> None:
        if self._given_up:
            raise _GivenUpError
        try:
            if self._is_multipart and not self.num_retries:
                start_thread("look", self._look_before)
            result = self._storage.ask_once(self._path, self._send, part=True, num_bytes=self.num_bytes)
            self._verify(result)
        except FileNotFoundError:
            raise StorageUnavailableError(f"{self._where}: {answers.NO_BUCKET}", path=self._where) from None
        except StorageUnavailableError as error:
            with self._changed:
                self._next, retryable = 0, self.retryable
            if retry.is_transient(error) and not retryable:
                raise StorageUnavailableError(
                    f"{error}; it cannot be sent again as a whole: memory was needed elsewhere",
                    path=self._where,
                ) from error
            raise

    def _send(self, store: Any) -> Any:
        import obstore

        key, body = self._storage.key(self._path), self._segments()
        if not self._is_multipart:
            self._wait_for(lambda: self._all_written)
        return obstore.put(
            store,
            key,
            body if self._is_multipart else self._take(0),
            use_multipart=self._is_multipart,
            chunk_size=self._segment_bytes * self._part_segments,
            max_concurrency=max(
                1, self._num_parts >> self.num_retries
            ),  # a store in trouble is asked for less
        )

    def _segments(self) -> Iterator[memoryview]:
        number = 0
        while self._is_there(number):
            yield self._take(number)
            number += 1
        # obstore completes the object when this ends.
        self._wait_for(lambda: self._all_written and self._has_looked)

    def _is_there(self, number: int) -> bool:
        """Wait for a segment. False when the object has ended before it."""
        self._wait_for(lambda: number in self._pieces or number >= self._num_segments)
        return number < self._num_segments

    def _look_before(self) -> None:
        """See what is there under the name, while the first parts are on their way; a thread of its own."""
        try:
            with suppress(FileNotFoundError, StorageUnavailableError):
                self._before = self._storage.head(self._path)["e_tag"]
        finally:
            with self._changed:
                self._has_looked = True
                self._changed.notify_all()

    def _take(self, number: int) -> memoryview:
        """The segment, once it is there, as a view whose end says that the upload has let go of the memory."""
        with self._changed:
            piece = self._pieces[number]
            piece.num_views += 1
            self._next, self._moved_at = number + 1, monotonic()
            view = piece.data[:]
        weakref.finalize(view, self._let_go, number).atexit = False
        return view

    def _let_go(self, number: int) -> None:
        """Called on one of obstore's threads."""
        with self._changed:
            self._moved_at = monotonic()
            piece = self._pieces[number]
            piece.num_views -= 1
            wanted = self._is_wanted and number < self._next
            released = (wanted or self._over or self._given_up) and not piece.num_views
            if released:
                del self._pieces[number]
                if wanted:
                    self.retryable = self._is_wanted = False
            self._changed.notify_all()
        if released:
            piece.lease.release()

    def _wait_for(self, happened: Callable[[], bool]) -> None:
        """Wait for the writers, who end in `finish` or `abort`."""
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or happened())
            if self._given_up:
                raise _GivenUpError

    def _verify(self, result: Any) -> None:
        """What is acknowledged must be there. Some servers have another e-tag for it then, but no old one."""
        self._e_tag = result["e_tag"]
        try:
            found = self._storage.head(self._path)
        except FileNotFoundError:
            found = {"size": "nothing", "e_tag": None}
        ours = found["e_tag"] == self._e_tag or (self._is_multipart and found["e_tag"] != self._before)
        if found["size"] != self.num_bytes or not ours:
            raise StorageUnavailableError(
                f"{self._where}: the store acknowledged {self.num_bytes:,} bytes and lost them: {found['size']} with "
                f"e-tag {found['e_tag']} is there; find out what it does with what it is given",
                path=self._where,
                transient=True,
            )
        self._e_tag = found["e_tag"]

    def _count_retry(self, error: BaseException) -> None:
        self.num_retries += 1
        _log.warning("sent again: %s", error)

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._given_up, seconds)


class ObjectReader:
    """One object as it was when it was opened."""

    def __init__(self, storage: ObjectStorage, path: str) -> None:
        self._storage, self._path = storage, path
        meta = storage.head(path)
        self.num_bytes: int = meta["size"]
        self._e_tag: str | None = meta["e_tag"]

    def read_into(self, offset: int, target: memoryview) -> None:
        where = self._storage.locate(self._path)
        if offset + len(target) > self.num_bytes:
            raise EOFError(f"{where} ends at byte {self.num_bytes:,}")
        if not target:
            return
        try:
            whole = self._storage.fetch(self._path, offset, target, self._e_tag)
        except FileExistsError:
            whole = False
        if not whole:
            raise StorageUnavailableError(
                f"{where} was replaced while it was being read; load it again", path=where
            )

    def close(self) -> None:
        """Nothing is held between reads."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _matching(version: str, form: Form) -> Any:
    """The mode of a put that replaces this version only."""
    e_tag, _, generation = version.partition(" ")
    return {"e_tag": form(e_tag)} | ({"version": generation} if generation else {})


def _version(meta: Any) -> str:
    """What changes with every write: the e-tag, and where the store counts generations that too."""
    return " ".join(filter(None, (meta["e_tag"], meta["version"])))
