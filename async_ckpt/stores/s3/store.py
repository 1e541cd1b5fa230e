"""S3, Google Cloud Storage and Azure, through obstore.

In: segments, which are sent without a copy. Out: objects that appear whole or not at all.
Knows nothing of: what is in the objects. It never creates buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from ...errors import StorageUnavailableError
from ...plumbing import Storage, bulk, store_facts, threads, timing, urls
from ..conditions import NEVER, Conditions, Form
from ..proven.place_proof import prove
from ..proven.range_reader import RangeReader
from ..watched_calls import WatchedCall
from . import error_translation
from .client import PAGE_KEYS, Client, version_of
from .sink import ObjectSink, plan_upload

# Fewer objects are read or deleted one by one, which all servers support.
_LEAST_MANY: Final = 8
_PAGES_AT_ONCE: Final = 16

_log = logging.getLogger("async_ckpt")


class ObjectStorage(Storage):
    """A bucket, or everything below a prefix in it. Creating one sends no request. Thread-safe.

    `options` are the options of obstore, with or without the prefix `aws_`, or of fsspec; and also `client_options`,
    `retry_config` (for the requests of one part), `credential_provider`, `profile` and `deadline_seconds`.
    """

    remote = True
    in_order = True

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, timer: timing.Timekeeper = timing.TIMEKEEPER
    ) -> None:
        self._client = Client(url, options, timer)
        self.url = self._client.settings.url
        self._conditions = Conditions(
            self._put_if,
            lambda path: version_of(self._client.head(path)),
            self._client.probe,
            lambda error: getattr(error, "status", None) in error_translation.UNSUPPORTED_STATUSES,
            # Servers with the API of S3 that are not S3 itself are tested once.
            are_obeyed=True if self._client.settings.obeys_conditions else None,
            never=f"{NEVER} 1" if self._client.settings.scheme == "gs" else NEVER,
        )

    def __repr__(self) -> str:
        return f"<ObjectStorage {self.url}>"

    def locate(self, path: str) -> str:
        return self._client.locate(path)

    # --- archives ---------------------------------------------------------------------------------------------

    def part_segments(self, num_bytes: int, segment_bytes: int) -> int:
        return store_facts.part_segments(num_bytes, segment_bytes)

    def create(
        self,
        path: str,
        *,
        num_bytes: int,
        segment_bytes: int,
        max_segments: int | None = None,
        exact: bool = True,  # noqa: ARG002
    ) -> ObjectSink:
        self._client.key(path)
        plan = plan_upload(num_bytes, segment_bytes, max_segments=max_segments)
        return ObjectSink(self._client, path, num_bytes, plan)

    def prove(self, *, for_run: bool = False) -> None:
        prove(self, self._client.known, for_run=for_run, timer=self._client.timer)

    def open(self, path: str) -> RangeReader:
        client, meta = self._client, self._client.head(path)
        etag: str | None = meta["e_tag"]
        fetch, fetch_whole = partial(client.fetch, path, etag), partial(client.fetch_whole, path, etag)
        return RangeReader(meta["size"], self.locate(path), client.known, self.url, fetch, fetch_whole)

    # --- small objects ----------------------------------------------------------------------------------------

    def read(self, path: str) -> tuple[bytes, str]:
        import obstore

        def get(store: Any, _: WatchedCall) -> tuple[bytes, str]:
            result = obstore.get(store, self._client.key(path))
            return bytes(result.bytes()), version_of(result.meta)

        return self._client.ask(path, get)

    def read_many(self, paths: Sequence[str]) -> dict[str, tuple[bytes, str] | None]:
        try:
            there, unknown = self._client.find(paths)
        except StorageUnavailableError:
            return {}  # a later read of these objects raises this error, or waits for the store
        asked = [path for path in paths if path in there or path in {*unknown}]
        contents = dict.fromkeys({*paths} - {*asked})
        return contents | self._client.get_many(asked) if len(asked) >= _LEAST_MANY else contents

    def put_new(self, path: str, data: bytes) -> None:
        self._client.key(path)
        if self._has_conditions():
            self._conditions.create(path, data)
            return
        if self.exists(path):
            raise FileExistsError(f"{self.locate(path)} exists already")
        self._client.put(path, data)

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str | None:
        if version is not None:
            if self._has_conditions():
                if (new_version := self._conditions.replace(path, data, version)) is not None:
                    return new_version
                self._client.known.log_once(
                    self.url,
                    "the store refuses every put that is to replace one version only, so two writers could overwrite "
                    "each other; use only one writer",
                )
            if not self._conditions.is_there(path, version):
                raise FileExistsError(f"{self.locate(path)} was replaced by another writer")
        return self._client.put(path, data)

    def move(self, path: str, to: str) -> None:
        import obstore

        self._client.ask(path, lambda store, _: obstore.copy(store, self._client.key(path), self._client.key(to)))
        self.delete(path)

    def delete(self, path: str) -> None:
        self._client.delete(path)

    def delete_many(self, paths: Sequence[str]) -> None:
        if len(paths) < _LEAST_MANY or not self._client.delete_many(paths):
            bulk.delete(self, paths)

    def delete_all(self, path: str) -> None:
        self.delete_many([*(f"{path}/{below}" for below in self.sizes(path)), path])

    def remove_if_empty(self, folder: str) -> bool:  # noqa: ARG002
        return False  # there are no folders

    def names(self, folder: str) -> list[str]:
        listing = self._client.list(folder)
        paths = {*listing["common_prefixes"], *(meta["path"] for meta in listing["objects"])}
        paths.discard(self._client.key(folder))  # an empty object by which consoles mark a folder
        return sorted({path.rpartition("/")[2] for path in paths} - {""})

    def listed(self, folder: str, names: Collection[str]) -> set[str]:
        if len(names) <= PAGE_KEYS or self._client.settings.scheme != "s3":
            return super().listed(folder, names)
        paths = [f"{folder}/{name}" if folder else name for name in sorted(names)]
        found: list[str] = []

        def look(some: Sequence[str]) -> None:
            found.extend(self.existing(some))

        pages = [partial(look, paths[at : at + PAGE_KEYS]) for at in range(0, len(paths), PAGE_KEYS)]
        threads.run_together("look", pages, max_threads=_PAGES_AT_ONCE)  # one listing sends its pages in turn
        return {path.rpartition("/")[2] for path in found}

    def sizes(self, folder: str) -> dict[str, int]:
        import obstore
        from obstore.exceptions import InvalidPathError

        key = self._client.key(folder)

        def list_all(store: Any, call: WatchedCall) -> dict[str, int]:
            sizes_by_key: dict[str, int] = {}
            for page in obstore.list(store, key or None):
                call.moved()
                if page and all(meta["path"] in sizes_by_key for meta in page):
                    raise store_facts.endless_listing(self.locate(folder))
                sizes_by_key.update((meta["path"], meta["size"]) for meta in page if meta["path"] != key)
            return sizes_by_key

        try:
            sizes_by_key = self._client.ask(folder, list_all)
        except StorageUnavailableError as error:
            if not isinstance(error.__cause__, InvalidPathError):
                raise
            raise urls.unusable_name(self.locate(folder), str(error.__cause__)) from error
        below = f"{folder}/" if folder else ""
        sizes = {path.removeprefix(f"{key}/"): size for path, size in sizes_by_key.items()}
        # An empty object whose key ends in a slash may mark a folder. obstore hides the slash: there is no such object.
        empty = [f"{below}{path}" for path, size in sizes.items() if not size]
        placeholders = {*empty} - {*bulk.existing(self, empty)}
        return {path: size for path, size in sorted(sizes.items()) if f"{below}{path}" not in placeholders}

    def exists(self, path: str) -> bool:
        try:
            self._client.head(path)
        except FileNotFoundError:
            return False
        return True

    def existing(self, paths: Sequence[str]) -> list[str]:
        there, unknown = self._client.find(paths)
        there.update(bulk.existing(self, unknown))
        return [path for path in paths if path in there]

    # --- leftovers of dead writers ----------------------------------------------------------------------------

    def sweep(
        self,
        folder: str,
        names: list[str],
        *,
        delete: bool = False,
        decided: bool = False,
        of_ranks: bool = False,  # noqa: ARG002
    ) -> list[str]:
        if not decided or not names:
            return []
        try:
            limit = self._client.now() - store_facts.ORPHAN_SECONDS
            listed = self._client.list(folder)["objects"]
        except StorageUnavailableError as error:  # without the store's clock there is no proof
            _log.debug("no leftovers were deleted: %s", error)
            return []
        written = {meta["path"].rpartition("/")[2]: meta["last_modified"].timestamp() for meta in listed}
        dead = [name for name in names if name in written and written[name] < limit]
        for name in dead if delete else ():
            self.delete(f"{folder}/{name}" if folder else name)
        return dead

    def sweep_uploads(self) -> list[str]:
        """Abort stale uploads through s3fs, since obstore does not list uploads."""
        if self._client.settings.scheme != "s3":
            return []  # Azure deletes unfinished uploads by itself, Google by a lifecycle rule
        try:
            from ..fsspec.store import abort_stale_uploads

            settings, limit = self._client.settings, self._client.now() - store_facts.ORPHAN_SECONDS
            prefix = settings.prefix and f"{settings.prefix}/"
            return abort_stale_uploads(settings.bucket, prefix, before=limit, options=settings.options)
        except (ImportError, StorageUnavailableError, NotImplementedError) as error:
            _log.warning(
                "%s: unfinished uploads of killed processes cannot be swept (%s); set a lifecycle rule on the bucket "
                "that aborts incomplete multipart uploads",
                self.url,
                self._client.settings.scrub(str(error)),
            )
            return []

    # --- conditions -------------------------------------------------------------------------------------------

    def _put_if(self, path: str, data: bytes, version: str | None, form: Form) -> str:
        """Create an object, or replace one version of it. Returns the new version.

        Raises FileExistsError if the store refuses, unless an earlier try has succeeded.
        """
        mode: Any = "create"
        if version is not None:
            etag, _, generation = version.partition(" ")
            mode = {"e_tag": form(etag)} | ({"version": generation} if generation else {})
        unsure = False  # an earlier try had no response, and may have succeeded

        def put() -> str:
            nonlocal unsure
            try:
                return self._client.put_once(path, data, mode)
            except FileExistsError:
                with suppress(FileNotFoundError):
                    content, present = self.read(path) if unsure else (None, "")
                    if content == data:
                        return present
                raise
            except StorageUnavailableError:
                unsure = True
                raise

        return self._client.persist(put)

    def _has_conditions(self) -> bool:
        """Whether the store obeys the conditions of a put. Tested at the first call."""
        has = self._conditions.are_obeyed()
        if not has:
            self._client.known.log_once(
                self.url,
                "the store has no conditional puts, so it cannot keep two writers from committing the same step; use "
                "only one writer",
            )
        return has
