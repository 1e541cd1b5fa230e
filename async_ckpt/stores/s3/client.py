"""Requests to a bucket through obstore: repeated while the store is unavailable, with errors in plain words.

In: keys, and requests about them. Out: responses, and errors of this library. Knows nothing of: segments.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from posixpath import basename, commonpath, dirname
from typing import IO, Any, Final, TypeVar

from ...errors import StorageUnavailableError
from ...plumbing import spec, store_facts, threads, timing, waits
from .. import retry
from ..proven.client_facts import known_of
from ..proven.range_reader import NoRangesError, ReplacedError
from ..watched_calls import StuckError, WatchedCall
from . import error_translation
from .bucket_clients import Connections
from .settings import BucketSettings, Kind
from .upload_memory import GivenUpError

T = TypeVar("T")

# A read comes in pieces of about this size: larger pieces are first joined by a copy, which doubles the cost.
_READ_BYTES: Final = 256 * spec.KIB
# The number of small objects that are read at a time: the latency of the requests matters, not the sizes.
_MANY_READERS: Final = 128
# The most keys that a page of a listing has in S3.
PAGE_KEYS: Final = 1000
# Pages come one after another. A page that answers for fewer objects is no better than a request for each object.
_LEAST_DECIDED: Final = 4
_MOST_PAGES: Final = 32


class Client:
    """One bucket, or everything below a prefix in it. `options` are those of BucketSettings. Thread-safe.

    An ObjectStorage creates and owns a client; its sinks and readers share it. Creating a client sends no request.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, timer: timing.Timekeeper = timing.TIMEKEEPER
    ) -> None:
        self.timer = timer
        self.settings = BucketSettings(url, options)
        self.locate, self.key = self.settings.locate, self.settings.key
        self._connections = Connections(self.settings)
        self.known = known_of(self.settings.identity)
        self._deletes_many = True  # until the store refuses it
        self._has_answered = False  # if True, the bucket exists, and a 404 is about the key

    def delete(self, path: str) -> None:
        import obstore

        with suppress(FileNotFoundError):
            self.ask(path, lambda store, _: obstore.delete(store, self.key(path)))

    def delete_many(self, paths: Sequence[str]) -> bool:
        """Delete objects, up to a thousand per request. Returns False if a request failed; some may be deleted then."""
        import obstore

        if not self._deletes_many:
            return False
        keys = [self.key(path) for path in paths]
        try:
            self.persist(lambda: self.ask_once(paths[0], lambda store, _: obstore.delete(store, keys), kind="many"))
        except (FileNotFoundError, StorageUnavailableError):
            self._deletes_many = False
        return self._deletes_many

    def ask(
        self,
        path: str,
        request: Callable[[Any, WatchedCall], T],
        *,
        kind: Kind = "small",
        stuck_seconds: float | None = None,
    ) -> T:
        """Make a request, and repeat it while the store is unavailable."""
        return self.persist(lambda: self.ask_once(path, request, kind=kind, stuck_seconds=stuck_seconds))

    def ask_once(
        self,
        path: str,
        request: Callable[[Any, WatchedCall], T],
        *,
        kind: Kind = "small",
        num_bytes: int = 0,
        stuck_seconds: float | None = None,
    ) -> T:
        """Make one request. Only this method translates obstore's errors.

        The translated error is raised outside of the `except` block, since the text of obstore's error may contain
        keys. A request that fills lent memory, or consists of several requests, reports progress to its WatchedCall.
        """
        store = self._connections.store(kind, self.locate(path))
        call = WatchedCall(stuck_seconds or self.settings.stuck_seconds(kind))
        refusal: Exception
        try:
            result = call.run(lambda: request(store, call))
        except GivenUpError:
            raise
        except StuckError as error:
            refusal = StorageUnavailableError(
                f"{self.locate(path)}: a request has not ended for {call.stuck_seconds:.0f} s, long after its own "
                "timeout: obstore's threads or its credential provider are stuck; restart this process",
                path=self.locate(path),
            )
            refusal.__cause__ = error
        except BaseException as error:
            if not (isinstance(error, Exception) or error_translation.is_panic(error)):
                raise
            refusal = error_translation.translate(error, path, self.settings, num_bytes)
        else:
            self._has_answered = True
            return result
        if getattr(refusal, "code", "") in error_translation.EXPIRED_CODES:
            self._connections.renew(store)
        raise refusal

    def head(self, path: str) -> Any:
        """The size, e-tag and time of an object."""
        import obstore

        key = self.key(path)

        def ask(store: Any, _: WatchedCall) -> Any:
            try:
                return obstore.head(store, key)
            except Exception as error:
                # The response to a HEAD has no body and so no reason; the response to a listing has one.
                missing = isinstance(error, FileNotFoundError)
                if not (missing and self._has_answered):
                    try:
                        obstore.list_with_delimiter(store, key)
                        self._has_answered = True
                    except Exception as reason:
                        if not missing or error_translation.ErrorResponse.of(reason).status == 404:
                            raise
                raise

        return self.ask(path, ask)

    def find(self, paths: Sequence[str]) -> tuple[set[str], list[str]]:
        """Look for objects in pages of a listing, as long as a page answers for more objects than a few requests would.

        Returns the paths that exist, and the paths that are still unknown. An object may exist although a page does not
        show it: servers differ in the order of keys, and in where a page begins. See `_left_out`.
        """
        path_of = {self.key(path): path for path in paths}
        missing, there = {*path_of}, set[str]()
        if len(missing) < 2 or self.settings.scheme != "s3":  # other stores list from the beginning
            return there, [*path_of.values()]
        first, final = min(missing), max(missing)
        folder = commonpath(map(dirname, missing))
        # Not after the folder of the first key, if possible: SeaweedFS would leave out the whole folder.
        after = dirname(first) if basename(first[:-1]) in ("", ".", "..") else first[:-1]
        while len(missing) > 1:
            try:
                page = self._page(path_of[first], folder, after)
            except StorageUnavailableError as error:
                if getattr(error, "status", None) in error_translation.UNSUPPORTED_STATUSES:
                    break
                raise
            found = {key for key in missing if page.get(key)}  # an empty object may mark a folder of this name
            decided = found | _left_out(page, missing)
            missing -= decided
            there |= {path_of[key] for key in found}
            last = next(reversed(page), "")
            is_through = len(page) < PAGE_KEYS or last >= final or last == after
            if is_through or len(decided) < _LEAST_DECIDED or len(missing) > _MOST_PAGES * len(decided):
                break
            after = last
        return there, [path_of[key] for key in sorted(missing)]

    def _page(self, path: str, folder: str, after: str) -> dict[str, int]:
        """The next keys in a folder, and the sizes of their objects, from one request. Errors show `path`."""
        import obstore

        def list_one(store: Any, _: WatchedCall) -> dict[str, int]:
            pages = obstore.list(store, folder or None, offset=after, chunk_size=PAGE_KEYS)
            return {meta["path"]: meta["size"] for page in islice(pages, 1) for meta in page}

        return self.ask(path, list_one)

    def get_many(self, paths: Sequence[str]) -> dict[str, tuple[bytes, str] | None]:
        """The contents and versions of small objects; None for a missing object. After an error, some are left out.

        Each thread makes its requests within one watched call: one for each request would cost three times as much.
        """
        import obstore

        contents: dict[str, tuple[bytes, str] | None] = {}
        waiting = deque(paths)

        def get_some(store: Any, call: WatchedCall) -> None:
            while waiting:
                try:
                    path = waiting.popleft()
                except IndexError:  # another thread has taken the last path
                    return
                try:
                    result = obstore.get(store, self.key(path))
                    contents[path] = bytes(result.bytes()), version_of(result.meta)
                except FileNotFoundError:
                    if not self._has_answered:  # perhaps the bucket is missing
                        raise
                    contents[path] = None
                call.moved()

        def work() -> None:
            try:
                self.ask_once(paths[0], get_some)
            except (FileNotFoundError, StorageUnavailableError):
                waiting.clear()  # a later read of the other objects raises this error, or waits for the store

        threads.run_together("read", [work] * min(_MANY_READERS, len(paths)), max_threads=_MANY_READERS)
        return contents.copy()  # a stuck thread may still add to it

    def fetch(self, path: str, etag: str | None, offset: int, target: memoryview) -> None:
        """Fill `target`. Raises ReplacedError, and NoRangesError if a part of the object cannot be read."""
        import obstore

        options: Any = {"range": (offset, offset + len(target))} | ({"if_match": etag} if etag else {})

        def get(store: Any, call: WatchedCall) -> bool:
            result = obstore.get(store, self.key(path), options=options)
            at = 0
            for chunk in result.stream(min_chunk_size=_READ_BYTES):
                with call.lent():
                    target[at : at + len(chunk)] = memoryview(chunk)
                at += len(chunk)
            return at == len(target) and (not etag or result.meta["e_tag"] == etag)

        try:
            is_same = self.ask(path, get, kind="part")
        except FileExistsError:
            is_same = False
        except StorageUnavailableError as error:
            if getattr(error, "code", "") != error_translation.NO_RANGE:
                raise
            raise NoRangesError from error
        if not is_same:
            raise ReplacedError

    def fetch_whole(self, path: str, etag: str | None, file: IO[bytes]) -> None:
        """Write an object to a file. Raises ReplacedError."""
        import obstore

        def get(store: Any, call: WatchedCall) -> None:
            result = obstore.get(store, self.key(path))
            if etag and result.meta["e_tag"] != etag:
                raise obstore.exceptions.PreconditionError("replaced")
            file.seek(0)
            file.truncate()
            for chunk in result.stream(min_chunk_size=_READ_BYTES):
                with call.ours():
                    file.write(memoryview(chunk))

        try:
            self.ask(path, get, kind="whole")
        except FileExistsError as error:
            raise ReplacedError from error

    def list(self, folder: str) -> Any:
        import obstore

        # Makes a request for each page, but obstore reports only the end.
        return self.ask(
            folder,
            lambda store, _: obstore.list_with_delimiter(store, self.key(folder) or None),
            stuck_seconds=self.settings.stuck_seconds("many"),
        )

    def put(self, path: str, data: bytes) -> str:
        return self.persist(lambda: self.put_once(path, data))

    def put_once(self, path: str, data: bytes, mode: Any = "overwrite") -> str:
        """Put an object by one request, which may be conditional. Returns its version.

        Raises FileExistsError if another writer was first.
        """
        import obstore

        key = self.key(path)
        try:
            return version_of(
                self.ask_once(path, lambda store, _: obstore.put(store, key, data, mode=mode, use_multipart=False))
            )
        except FileNotFoundError:  # a put needs the bucket, but not the object
            shown = self.locate(path)
            raise StorageUnavailableError(f"{shown}: {store_facts.NO_BUCKET}", path=shown) from None

    def persist(self, call: Callable[[], T]) -> T:
        seconds = min(self.settings.deadline_seconds, waits.REQUEST_SECONDS)
        return retry.persist(call, deadline_seconds=seconds, timer=self.timer)

    def now(self) -> float:
        """The time of the store's clock, in seconds since the epoch, from an object written just now."""
        with self.probe() as path:
            return float(self.head(path)["last_modified"].timestamp())

    @contextmanager
    def probe(self) -> Iterator[str]:
        """A small object that exists within the block."""
        path = store_facts.probe_name()
        self.put(path, b"probe")
        try:
            yield path
        finally:
            with suppress(StorageUnavailableError):
                self.delete(path)

    def abort_uploads(self, path: str) -> None:
        """Abort uploads of an object that failed attempts may have left open, since a response or an abort was lost."""
        if self.settings.scheme == "s3":
            # If this fails, the sweep or a lifecycle rule aborts them.
            with suppress(ImportError, StorageUnavailableError):
                from ..fsspec.store import abort_stale_uploads

                options = {**self.settings.options, "deadline_seconds": waits.ABORT_SECONDS}
                abort_stale_uploads(self.settings.bucket, self.key(path), options=options, exact=True)


def _left_out(page: Mapping[str, int], keys: Iterable[str]) -> set[str]:
    """The subset of `keys` that does not exist, since the page shows a later key of the same folder.

    Servers list folders in different orders, but all list the keys of one folder together and in order. Exceptions are
    directory buckets, and keys with characters beyond ASCII.
    """
    last_in: dict[str, str] = {}
    for key in page:
        folder = dirname(key)
        if last_in.get(folder, "") > key:
            return set()
        last_in[folder] = key
    return {key for key in keys if key.isascii() and key not in page and last_in.get(dirname(key), "") > key}


def version_of(meta: Any) -> str:
    """The version of an object: its e-tag, and its generation if the store has generations."""
    return " ".join(filter(None, (meta["e_tag"], meta["version"])))
