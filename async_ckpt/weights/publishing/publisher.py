"""`Publisher`: publishes the weights of one instant as a version, whole or as a difference, for rollout engines.

In: a model, its state dict, or a snapshot. Out: versions at a root, each with a handle.
Knows nothing of: readers, checkpoints.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, Literal, Self

from ... import SaveHandle
from ...errors import ClosedError, NotCommittedError, UnsupportedStateError
from ...plumbing import (
    captured,
    compressed,
    guards,
    hf_weights,
    ledger,
    loops,
    places,
    process,
    rendezvous,
    shared_memory,
    spec,
    waits,
    worlds,
)
from ...plumbing import timing as clock
from ..delta import ENCODINGS, MAX_VERSION, Encoding, stays_inside
from ..hf_checks import refuse_unreadable
from .delta_base import DeltaPolicy
from .in_memory.offer import MemoryOffer
from .of_ranks.pieces import own_slices
from .of_ranks.root_versions import RootVersions
from .publication import Publication
from .series import VersionSeries

# By root: counts the publishers of spread models there, which are created in the same order on each rank.
_publisher_numbers: Final[process.OnceInProcess[str, Iterator[int]]] = process.OnceInProcess(
    lambda _: itertools.count()
)
_ADVICE: Final = "publish a sharded model from all ranks, at the same root"


class Publisher:
    """Adds versions of a model's weights at a root, in the background, for rollout engines to follow.

        with async_ckpt.Publisher("/shared/weights", anchor_every=20, keep=5) as publisher:
            with async_ckpt.snapshot({"model": model, "optimizer": optimizer}, guard=optimizer) as snap:
                ckpt.save(snap, step=step)
                publisher.publish(snap["model"], version=step, config_folder="base-model")

    A version is a Hugging Face folder `weight_v000120`. One of `anchor_every` versions is an anchor, which contains all
    weights. The others are deltas: the differences between each changed tensor and its bytes in an earlier version. A
    version becomes visible when all of its files are durable. A new publisher begins with an anchor, also at a root
    that another publisher has used. A root is for one model, and for one publisher at a time: the newest.

    If the model is spread over ranks (FSDP2, HSDP, tensor parallelism), all ranks create a publisher and call `publish`
    with the model itself. Each rank publishes its slices without waiting for other ranks. A version is complete when
    all ranks have published it, and only a `Subscriber` reads it. Under DDP, only rank 0 publishes.

    Args:
        root: the place to publish to: a folder, URL or Place. All readers must have access to it.
        anchor_every: one of this many versions is an anchor. A new reader reads the newest anchor and the deltas
            after it.
        encoding: how a delta encodes the difference: "xor", or "overwrite" (positions and values, which can be applied
            twice). None publishes anchors only. Deltas need a second copy of the weights in host memory, and the
            package zstandard.
        keep: how many of the newest versions to keep, with all versions that they are built on. None keeps all.
        acknowledged: a function that returns the newest version that every reader has applied, or None. `publish` calls
            it. Deltas are then against that version, so a reader needs no other version to apply them. Without this
            function they are against the newest durable version.
        on_rollback: "retire" deletes all versions with the same or a higher number than a new one, just before the new
            one becomes visible. So a training that continues from an earlier checkpoint can publish the same numbers
            again, and readers return to them. By default such a version raises StepExistsError or StepBehindError.
        host_bytes: the most host memory for the weights that deltas are against, together with snapshots that are
            open or still being read; by default half of the free memory.
        local: whether to lend the newest version, in memory, to every `Subscriber` of the same host and user, which
            then can pull it before it is durable. This needs another copy of the weights in host memory, and up to two
            more while readers are slow. Each rank of a spread model lends its slices, and readers on the same host as
            all ranks join them.

    Raises ValueError for `local` on systems other than Linux.
    """

    def __init__(
        self,
        root: places.Anywhere,
        *,
        anchor_every: int = 20,
        encoding: Encoding | None = "xor",
        keep: int | None = None,
        acknowledged: Callable[[], int | None] | None = None,
        on_rollback: Literal["retire"] | None = None,
        host_bytes: int | None = None,
        local: bool = False,
    ) -> None:
        if encoding not in (None, *ENCODINGS):
            raise ValueError(f'encoding must be "xor", "overwrite" or None, got {encoding!r:.100}')
        if acknowledged is not None and not callable(acknowledged):
            raise TypeError(f"acknowledged must be a function without arguments, got {acknowledged!r:.100}")
        if on_rollback not in (None, "retire"):
            raise ValueError(f'on_rollback must be None or "retire", got {on_rollback!r:.100}')
        if encoding is not None:
            compressed.zstandard_package()  # fail here rather than at the first delta
        self._place = places.written_at(root)
        if not isinstance(local, bool):
            raise TypeError(f"local must be True or False, got {local!r:.100}")
        if local and not shared_memory.CAN_SHARE:
            raise ValueError("local=True needs Linux; leave it out, and readers take versions from the root")
        self._new_series = partial(
            VersionSeries,
            self._place,
            deltas=DeltaPolicy(
                encoding,
                spec.whole_count("anchor_every", anchor_every),
                follows=acknowledged is None,
                max_bytes=None if host_bytes is None else spec.whole_bytes("host_bytes", host_bytes),
            ),
            keep=None if keep is None else spec.whole_count("keep", keep),
            retires=on_rollback == "retire",
        )
        self._offer = MemoryOffer(host_bytes) if local else None
        if self._offer is not None:  # if the caller never calls `close`
            weakref.finalize(self, _close_soon, loops.get_loop().soon, self._offer).atexit = False
        self._root = self._place.storage()
        self._series: VersionSeries | None = None  # made by the first publication; under _lock
        self._lock = threading.Lock()
        self._acknowledged = acknowledged
        self._pending: list[Publication] = []  # replaced as a whole, under _lock
        self._is_closed = False
        self._pid = os.getpid()

    def publish(
        self,
        state_or_snapshot: Any,
        version: int,
        config_folder: str | os.PathLike[str] | None = None,
        *,
        guard: Any = None,
    ) -> SaveHandle:
        """Publish the weights as a version. Returns a handle at once, and the weights may change from then on.

            handle = publisher.publish(model, version=step)

        Names are as in `export_hf`. A snapshot is not copied again. Versions are published in the order of the calls.
        `handle.result()` is the report; its `step` is the version, and its `num_bytes` is the number of bytes written.

        Args:
            state_or_snapshot: a module, a flat mapping of names to tensors, or either of them in a snapshot.
            version: a number below 10**18 and above that of every version at the root, such as the training step.
            config_folder: as for `export_hf`; its files are in anchors only.
            guard: as for `save`.

        If the model has a LoRA adapter, only the adapter is published, in the files that PEFT writes. The weights and
        scales of a quantised model are published as in its checkpoints.

        Raises UnsupportedStateError for a model that cannot be published, such as a model with several active adapters,
        or one that is quantised by a method whose weights in memory differ from those in its checkpoints. The handle
        raises StepExistsError or StepBehindError for a version that is not newer, StateMismatchError for another model
        or adapter than before, ClosedError if another publisher has taken the root, PeerFailedError if rank 0 has not
        made the same call or has failed in it, MemoryError, StorageFullError and StorageUnavailableError. After a
        failure the earlier versions are unchanged, and the next delta is against one of them.
        """
        self._refuse_if_forked()
        if self._is_closed:
            raise ClosedError(f"{self!r}: create a new one")
        spans = clock.Spans()
        number: int | None = None
        call: rendezvous.RankCall | None = None
        try:
            number = spec.whole_step(version, what="version")
            if number > MAX_VERSION:
                raise ValueError(f"version must be below 10**18, got {number}; give the training step")
            config_files = {} if config_folder is None else _config_files(places.local_place(config_folder))
            held = state_or_snapshot if isinstance(state_or_snapshot, captured.SnapshotView) else None
            guards.refuse_guard([held] if held is not None else [], guard)
            weights = hf_weights.weights_of(state_or_snapshot, config_files)
            refuse_unreadable(state_or_snapshot, weights)
            spread = weights.is_spread
            call = self._channel.call(number) if spread else None
            weights, slices = own_slices(weights) if spread else (weights, {})
            if spread and worlds.world_of().rank:
                weights, config_files = weights._replace(files={}), {}  # rank 0 publishes the small files
            series = self._get_series(spread=spread)
            if spread is not (series.channel is not None):
                raise UnsupportedStateError(
                    f"{self!r} has published {'a whole model' if spread else 'a sharded model'} before; "
                    "create another Publisher, with its own root",
                    path="",
                )
            base = None if self._acknowledged is None else self._acknowledged()
            base = None if base is None else spec.whole_step(base, what="what acknowledged() returns")
            weights = weights._replace(files={**weights.files, **config_files})
            publication = Publication(
                series,
                number,
                weights,
                slices=slices,
                call=call,
                acknowledged=base,
                held=held,
                optimizers=guards.unwrapped(guard),
                spans=spans,
            )
            handle = publication.begin()
        except BaseException as error:  # reported to the other ranks
            if call is not None:
                call.fail(error)
            elif not hf_weights.Weights.looks_whole(state_or_snapshot):
                self._channel.fail(error, number)
            raise
        finally:
            spans.called()
        with self._lock:
            running = [other for other in self._pending if not other.handle.done()]
            self._pending = [*running, publication]
        return handle

    @cached_property
    def _channel(self) -> rendezvous.Channel:
        """The channel for the calls of all ranks. Each rank must create its publishers in the same order."""
        root = self._root.locate("")
        key = hashlib.blake2b(f"{root}/{next(_publisher_numbers(root))}".encode(), digest_size=8).hexdigest()
        return rendezvous.Channel(f"publish/{key}", _ADVICE)

    def _get_series(self, *, spread: bool) -> VersionSeries:
        """The series of versions, created by the first publication on any thread."""
        with self._lock:
            if self._series is None:
                self._series = self._new_series(channel=self._channel if spread else None, offer=self._offer)
            return self._series

    def wait_readable(self, version: int, timeout: float | None = None) -> None:
        """Wait until a `Subscriber` can pull a version of this publisher.

            publisher.publish(model, version=step)
            publisher.wait_readable(step)  # then notify the engines

        With `local=True`, a version can be pulled as soon as it is lent in memory, and otherwise when it is durable. If
        the model is spread over ranks, this waits until that is true on all ranks, for half an hour by default.
        `timeout` is in seconds. Raises TimeoutError, the error of a version that has failed, PeerFailedError if it has
        failed on another rank, and NotCommittedError for a version that was never published.
        """
        self._refuse_if_forked()
        found = next((one for one in reversed(self._pending) if one.version == version), None)
        if found is not None:
            wait = waits.Wait("for readers", waits.ENDS_THE_WAIT)

            def progress() -> str:
                is_here = found.readable.done()
                return f"all ranks to publish version {version}" if is_here else ledger.progress_of([found.handle])

            if not waits.wait_for(found.readable_of_all, timeout, lambda: wait.goes_on(progress)):
                why = ": not all ranks have published it" if found.readable.done() else f" after {timeout} s"
                raise TimeoutError(f"version {version} cannot be read yet{why}")
            found.readable.result(0.0)
            error = found.readable_of_all.exception(0.0)
            if error is not None and not (found.has_failed or version in self.versions()):
                raise error
            if found.has_failed:
                found.handle.result(0.0)
        elif version not in self.versions():
            root = self._root.locate("")
            raise NotCommittedError(f"{root}: there is no version {version}", path=root, step=version)

    def versions(self) -> list[int]:
        """The versions at the root, ascending.

        publisher.versions()  # [100, 101, 102]
        """
        self._refuse_if_forked()
        return [*RootVersions(self._place).sizes()]

    def close(self) -> None:
        """Wait for running publications, and free the memory. May be called again.

        publisher.close()  # leaving the `with` block does it

        Errors are raised by the handles only.
        """
        if os.getpid() != self._pid:
            return  # it belongs to the parent process
        self._is_closed = True
        self._wait()
        self._pending = []
        if self._offer is not None:
            self._offer.close()
        if self._series is not None:
            self._series.base.close()

    def _refuse_if_forked(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError("this Publisher belongs to the parent process; make one in this process")

    def _wait(self) -> None:
        """Wait until all publications have ended, and old versions are deleted."""
        wait = waits.Wait("to close a Publisher", waits.ENDS_THE_WAIT)
        for one in self._pending:
            waits.wait_for(one.handle, goes_on=partial(wait.goes_on, lambda: self._root.locate("")))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Publisher {self._root.locate('')}{' (closed)' if self._is_closed else ''}>"


def _close_soon(soon: Callable[[Callable[[], None]], None], offer: MemoryOffer) -> None:
    """Close an offer on the library's thread: a garbage collection may run on a thread that holds any lock."""
    with suppress(ClosedError):  # the interpreter is exiting
        soon(offer.close)


def _config_files(folder: Path) -> dict[str, bytes]:
    """The small files to publish with the weights. Raises ValueError for a name that some places cannot store."""
    files = hf_weights.files_of(folder)
    for name in files:
        if not stays_inside(name) or not name.isprintable():
            raise ValueError(f"config_folder {folder} has a file that is called {name!a}; rename it")
    return files
