"""The proof that a place can be saved to: a tiny object is written, replaced, listed, read in part, and deleted.

In: a storage. Out: nothing, or an error about the ability that the place lacks. Knows nothing of: clients.

A store may acknowledge every byte of a checkpoint, and still be unable to return it. So the first save of a process
tests this before it is reported as done. If a storage has a workaround for a missing ability, the test uses it, too.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from ...errors import StorageUnavailableError
from ...plumbing import Storage, store_facts, timing
from .client_facts import ClientFacts

_OLD: Final = b"0123456789 written by async_ckpt to see what can be done here"
_NEW: Final = b"This replaces what was written before, and is deleted at once."
_PART: Final = (5, 23)
# The waits for a listing that is out of date, about three seconds in all.
_LISTING_WAITS: Final = (0.1, 0.2, 0.4, 0.8, 1.6)


def prove(storage: Storage, known: ClientFacts, *, for_run: bool, timer: timing.Timekeeper = timing.TIMEKEEPER) -> None:
    """Prove, once per process, that a place can be saved to.

    A place for single objects must return a part of an object. A place for a run must also replace a small object, and
    list it within seconds. A probe that cannot be deleted is logged, but the place is accepted.
    Raises StorageUnavailableError if the place fails the proof, or is unavailable.
    """
    if known.serves_runs or (known.serves_files and not for_run):
        return
    name = store_facts.probe_name()
    try:
        if for_run:
            _prove_creation(storage, name)
        storage.replace(name, _NEW)
        _prove_reads(storage, name, replaced=for_run)
        if for_run:
            _prove_listing(storage, name, timer)
    except BaseException:
        with suppress(StorageUnavailableError):
            storage.delete(name)
        raise
    try:
        storage.delete(name)
    except StorageUnavailableError as error:
        known.log_once(
            storage.locate(""),
            f"the probe {name} ({len(_NEW)} bytes) could not be deleted with these credentials ({error}); old steps "
            "and leftovers of killed processes cannot be deleted either",
        )
    known.serves_files = True
    known.serves_runs = for_run or known.serves_runs


def _prove_creation(storage: Storage, name: str) -> None:
    try:
        storage.put_new(name, _OLD)
    except FileExistsError as error:
        raise _useless(storage, "an object with a new name cannot be created, as if it existed") from error


def _prove_reads(storage: Storage, name: str, *, replaced: bool) -> None:
    """Read a part of the probe. Raises StorageUnavailableError if the bytes are wrong."""
    begin, end = _PART
    part = bytearray(end - begin)
    try:
        with storage.open(name) as reader:
            num_bytes = reader.num_bytes
            reader.read_into(begin, memoryview(part))
    except (FileNotFoundError, EOFError) as error:
        raise _useless(storage, "an object that was written just now cannot be read") from error
    if replaced and (num_bytes != len(_NEW) or part == _OLD[begin:end]):
        raise _useless(storage, "an object that was replaced still has its old content")
    if part != _NEW[begin:end]:
        raise _useless(storage, "reading a part of an object returns other bytes")


def _prove_listing(storage: Storage, name: str, timer: timing.Timekeeper) -> None:
    """List the probe. Raises StorageUnavailableError if it is not listed in time."""
    for seconds in _LISTING_WAITS:
        if name in storage.names(""):
            return
        timer.sleep(seconds)
    # Some servers hide names that begin with a dot, but only probes and temp files have such names.
    shown = name.removeprefix(".")
    storage.replace(shown, _NEW)
    try:
        is_listed = shown in storage.names("")
    finally:
        with suppress(StorageUnavailableError):
            storage.delete(shown)
    if not is_listed:
        raise _useless(
            storage, "an object that was written seconds ago is not listed, so committed steps would be overlooked"
        )


def _useless(storage: Storage, reason: str) -> StorageUnavailableError:
    shown = storage.locate("")
    return StorageUnavailableError(
        f"{shown}: {reason}; save to another place, or use another client: Place(url, engine=…), or Place(path, fs=…) "
        "with its caches turned off",
        path=shown,
    )
