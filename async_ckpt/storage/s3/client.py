"""Requests to a bucket through obstore: made again while the store is away, refused in plain words.

In: keys, and what is asked of them. Out: answers. Knows nothing of: segments, and of what objects are for.
"""

from __future__ import annotations

import errno
import secrets
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final, Literal, TypeAlias, TypeVar

from ... import spans
from ...errors import StorageFullError, StorageUnavailableError
from ...host.calls import StuckError, WatchedCall
from ...host.process import in_forked_child, never_end
from ...spans import TIMEKEEPER, Timekeeper
from ...spec import KIB
from .. import retry, stores
from ..url import hidden, split_bucket
from . import answers, runtime
from .aws import AwsSetup

T = TypeVar("T")
_Kind: TypeAlias = Literal["small", "part", "many"]

# A request that takes longer is taken for hung. Eight parts of 32 MiB in that time need 1.5 MB/s; where even that
# fails, the next attempt sends half as many at once.
_PART_SECONDS: Final = 180.0
_SMALL_SECONDS: Final = 30.0
# A request that takes so many times as long as its own timeout does not end by it: obstore's threads are stuck.
_STUCK_TIMES: Final = 4
# A read comes in pieces of about this size: larger ones are copied together first, which doubles the cost.
_READ_BYTES: Final = 256 * KIB
# How long it may take to abort what a failed upload has left open.
_ABORT_SECONDS: Final = 10.0


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class GivenUpError(Exception):
    """Ends an upload from within: obstore aborts one whose iterator raises, and must never be cancelled."""


class Client:
    """One bucket, or all below a prefix in it. Making one sends no request. From any thread.

    `options` are obstore's, with or without `aws_` before them, or fsspec's; besides `client_options`,
    `retry_config` (for one part's requests), `credential_provider`, `profile` and `deadline_seconds`.
    """

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, timer: Timekeeper = TIMEKEEPER
    ) -> None:
        self.timer = timer
        self.scheme, self.bucket, self.prefix = split_bucket(url)
        self.url = "/".join(filter(None, (f"{self.scheme}://{self.bucket}", self.prefix)))
        runtime.require(self.url)
        self.options = dict(options or {})
        rest = {key: value for key, value in self.options.items() if value is not None}
        self.deadline_seconds = float(rest.pop("deadline_seconds", retry.OBJECT_SECONDS))
        self._client_options = dict(rest.pop("client_options", {}))
        self._retry_config = dict(rest.pop("retry_config", {}))
        self._provider = rest.pop("credential_provider", None)
        self._aws = AwsSetup(rest) if self.scheme == "s3" else None
        self._config = self._aws.config if self._aws else rest
        if self._aws and self._aws.endpoint.startswith("http:"):
            self._client_options.setdefault("allow_http", True)
        self._lock = threading.Lock()
        self._stores: dict[_Kind, Any] = {}  # under _lock
        # One by one is what all servers know.
        self._one_by_one = {"aws_disable_bulk_delete": True} if self._aws else {}
        self._deletes_many = True  # until it has refused to
        self._answered = False  # the bucket is there, so a 404 is about the key
        self._store()  # options that it does not take are refused here
        _clients.add(self)

    @property
    def is_known(self) -> bool:
        """Whether this is S3 itself, Google or Azure, which are known to obey conditions."""
        return not (self._aws and self._aws.endpoint)

    def locate(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    def delete(self, path: str) -> None:
        import obstore

        with suppress(FileNotFoundError):
            self.ask(path, lambda store: obstore.delete(store, self.key(path)))

    def delete_many(self, paths: Sequence[str]) -> bool:
        """Delete objects, up to a thousand by one request. False where the store may not know such: some may be gone."""
        import obstore

        if not self._deletes_many:
            return False
        keys = [self.key(path) for path in paths]
        try:
            self.persist(
                lambda: self.ask_once(paths[0], lambda store: obstore.delete(store, keys), kind="many")
            )
        except (FileNotFoundError, StorageUnavailableError):
            self._deletes_many = False
        return self._deletes_many

    def key(self, path: str) -> str:
        """The key of an object, or of a folder without the slash behind it."""
        key = "/".join(filter(None, (self.prefix, path)))
        num_bytes = len(key.encode())
        if num_bytes > stores.MAX_KEY_BYTES:
            raise StorageUnavailableError(
                stores.too_long(self.locate(path), num_bytes),
                path=self.locate(path),
            )
        return key

    def ask(self, path: str, request: Callable[[Any], T]) -> T:
        """Make a small request, again and again while the store is away."""
        return self.persist(lambda: self.ask_once(path, request))

    def ask_once(
        self,
        path: str,
        request: Callable[[Any], T],
        *,
        kind: _Kind = "small",
        num_bytes: int = 0,
        call: WatchedCall | None = None,
    ) -> T:
        """Foreign errors become ours once, here; raised where obstore's own, whose text may hold keys, is forgotten.

        `call` watches the request; one that lends memory, or sends several requests, has made its own.
        """
        runtime.start(self.locate(path))
        store, call = self._store(kind), call or self.watched(kind)
        refusal: Exception
        try:
            result = call.run(lambda: request(store))
        except GivenUpError:
            raise
        except StuckError as error:
            refusal = StorageUnavailableError(
                f"{self.locate(path)}: a request has not ended for {call.stuck_seconds:.0f} s, long after its own timeout: "
                "obstore's threads are stuck, or whatever gives it credentials is; start this process again",
                path=self.locate(path),
            )
            refusal.__cause__ = error
        except Exception as error:
            refusal = self._translated(path, error, num_bytes)
        else:
            self._answered = True
            return result
        if getattr(refusal, "code", "") in answers.EXPIRED:
            self._renew(store)
        raise refusal

    def ask_watched(
        self,
        path: str,
        request: Callable[[Any, WatchedCall], T],
        *,
        kind: _Kind = "small",
        stuck_seconds: float | None = None,
    ) -> T:
        """The same as `ask` for a request that says that it gets on, or that lends memory."""

        def attempt() -> T:
            call = WatchedCall(stuck_seconds or self._stuck_seconds(kind))
            return self.ask_once(path, lambda store: request(store, call), kind=kind, call=call)

        return self.persist(attempt)

    def watched(self, kind: _Kind) -> WatchedCall:
        """A watched call for a request of this kind."""
        return WatchedCall(self._stuck_seconds(kind))

    def _stuck_seconds(self, kind: _Kind) -> float:
        """How long a request may stand still. What is told of timeouts and retries by the user is theirs to set."""
        is_set = self._client_options.keys() & {"timeout", "connect_timeout"} or self._retry_config
        longest = self.deadline_seconds if is_set or kind != "small" else retry.REQUEST_SECONDS
        return max(_STUCK_TIMES * self._timeout_seconds(kind), min(longest, self.deadline_seconds))

    def _timeout_seconds(self, kind: _Kind) -> float:
        return min(_PART_SECONDS if kind == "part" else _SMALL_SECONDS, self.deadline_seconds)

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

        def get(store: Any, call: WatchedCall) -> bool:
            result = obstore.get(store, self.key(path), options=options)
            at = 0
            for chunk in result.stream(min_chunk_size=_READ_BYTES):
                with call.lent():
                    target[at : at + len(chunk)] = memoryview(chunk)
                at += len(chunk)
            return at == len(target) and (not e_tag or result.meta["e_tag"] == e_tag)

        return self.ask_watched(path, get, kind="part")

    def list(self, folder: str) -> Any:
        import obstore

        # By as many requests as there are pages, of which obstore tells only the end.
        return self.ask_watched(
            folder,
            lambda store, _: obstore.list_with_delimiter(store, self.key(folder) or None),
            stuck_seconds=self._stuck_seconds("many"),
        )

    def put(self, path: str, data: bytes) -> str:
        import obstore

        put = self.ask(path, lambda store: obstore.put(store, self.key(path), data, use_multipart=False))
        return version_of(put)

    def persist(self, call: Callable[[], T]) -> T:
        seconds = min(self.deadline_seconds, retry.REQUEST_SECONDS)
        return retry.persist(call, deadline_seconds=seconds, timer=self.timer)

    def now(self) -> Any:
        """The store's clock: the time that it gives to an object written just now."""
        with self.probe() as path:
            return self.head(path)["last_modified"]

    @contextmanager
    def probe(self) -> Iterator[str]:
        path = f".async_ckpt-probe-{secrets.token_hex(8)}"
        self.put(path, b"probe")
        try:
            yield path
        finally:
            with suppress(StorageUnavailableError):
                self.delete(path)

    def abort_uploads(self, path: str) -> None:
        """Abort what failed attempts at an object may have left open: an answer was lost, or an abort was."""
        if self.scheme == "s3":
            # Else the sweep, or a lifecycle rule, does it.
            with suppress(ImportError, StorageUnavailableError):
                from ..fsspec.store import abort_stale_uploads

                ever = spans.from_now(stores.ORPHAN_SECONDS)
                options = {**self.options, "deadline_seconds": _ABORT_SECONDS}
                abort_stale_uploads(self.bucket, self.key(path), older_than=ever, options=options, exact=True)

    def _store(self, kind: _Kind = "small") -> Any:
        """A client: one for parts, whose requests it makes again itself, one for all that is small, and one to delete many."""
        with self._lock:
            store = self._stores.get(kind)
        if store is None:
            store = self._make_store(kind)
            with self._lock:
                store = self._stores.setdefault(kind, store)
        return store

    def _make_store(self, kind: _Kind) -> Any:
        try:
            from obstore.store import S3Store, from_url
        except ImportError:
            raise ImportError(f'{self.scheme}:// needs obstore; pip install "async_ckpt[s3]"') from None

        seconds = self._timeout_seconds(kind)
        clients: Any = {"timeout": f"{seconds * 1000:.0f}ms", "connect_timeout": "10s"} | self._client_options
        retries: Any = {"max_retries": 0}
        if kind == "part":
            retries = {"max_retries": 10, "retry_timeout": spans.duration(seconds)} | self._retry_config
        provider = self._provider or (self._aws.provider if self._aws else None)
        settings: Any = {
            "config": self._config if kind == "many" else {**self._config, **self._one_by_one},
            "client_options": clients,
            "retry_config": retries,
            **({"credential_provider": provider} if provider else {}),
        }
        try:
            if self._aws:
                return S3Store(self.bucket, **settings)
            return from_url(f"{self.scheme}://{self.bucket}", **settings)
        except Exception as error:
            problem = self.scrubbed(str(error).partition("\n")[0])
        raise ValueError(f"options of {self.url}: {problem}")

    def _begin_anew(self) -> None:
        """In a forked child: what this client has is the parent's, connections and locks among it."""
        for store in self._stores.values():
            never_end(store)
        self._lock, self._stores = threading.Lock(), {}
        if self._aws:
            self._aws.renew()

    def _renew(self, store: Any) -> None:
        """These keys are over: the next request is made with what is found then where they come from."""
        with self._lock:
            if store in self._stores.values():
                self._stores = {}
        if self._aws:
            self._aws.renew()

    def _translated(self, path: str, error: Exception, num_bytes: int = 0) -> Exception:
        where, name, answer = self.locate(path), type(error).__name__, answers.Answer.of(error)
        advice = answers.ADVICE.get(answer.code) or answers.ADVICE.get(str(answer.status), stores.AWAY)
        if answer.status == 404 and name == "GenericError":
            advice = stores.NO_BUCKET  # of a listing
        if advice is not stores.NO_BUCKET and answer.code not in answers.CONFLICTS:
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
            advice = stores.NO_KEYS
        reason = self.scrubbed(answer.reason)
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

    def scrubbed(self, text: str) -> str:
        known = {str(value) for key, value in self._config.items() if stores.SECRET_NAME.search(key)}
        for secret in known | (self._aws.known if self._aws else set()):
            if len(secret) > 3:
                text = text.replace(secret, "***")
        return hidden(text)


def version_of(meta: Any) -> str:
    """The text that changes with every write: the e-tag, and where the store counts generations that too."""
    return " ".join(filter(None, (meta["e_tag"], meta["version"])))


@in_forked_child
def _forget() -> None:
    for client in list(_clients):
        client._begin_anew()
