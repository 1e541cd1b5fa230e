"""The folder of a model as the Hugging Face ecosystem reads it: shards, their index, and what lies beside them.

In: weights by name, copied to the host, and small files. Out: a folder on disk or in a store, which appears as a whole.
Knows nothing of: models, how weights are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from ..host.loop import OffLoop
from ..report import Progress
from ..saving.copy_save import CopySave
from ..spans import Spans
from ..staging.guard import Optimizers
from ..state.captured import SnapshotView
from ..storage.disk import free_bytes_at, full, translated
from ..storage.interface import Storage
from ..storage.local import LocalStorage
from ..storage.scratch import Scratch, publish
from .hub import ADAPTER_CONFIG, Weights
from .shards import INDEX, Shard, index_of, shards_of


class Asked(NamedTuple):
    """The user's wishes, beside the weights: where the folder is to be, small files that go into it, and the size of
    the others; and since when.
    """

    storage: Storage
    beside: Mapping[str, bytes]
    max_shard_bytes: int
    spans: Spans
    called: Future[float]
    check: Callable[[], None] = lambda: None
    """Called before anything is replaced; raises where it must not be after all."""


class Export(CopySave):
    """One export."""

    def __init__(
        self,
        asked: Asked,
        weights: Weights,
        *,
        held: SnapshotView | None = None,
        optimizers: Optimizers = (),
        after: Sequence[Future[None]] = (),
    ) -> None:
        """`after` are other copies of it that come before its own is complete."""
        names, tensors = list(weights.tensors), list(weights.tensors.values())
        super().__init__(
            asked.storage.locate(""),
            [] if held is not None else tensors,
            [] if held is not None else names,
            after=[*after, *([] if held is None else [held.completion])],
            num_tensors=len(tensors),
            optimizers=optimizers,
            spans=asked.spans,
            called=asked.called,
        )
        self._storage, self._max_shard_bytes = asked.storage, asked.max_shard_bytes
        self._check_others = asked.check
        self._small = {**weights.files, **asked.beside}
        self._total_bytes = sum(map(len, self._small.values())) + sum(tensor.nbytes for tensor in tensors)
        self._shard_names: set[str] = set()  # written
        copies = tensors if held is not None else self.copy.tensors
        self._weights = weights._replace(tensors=dict(zip(names, copies, strict=True)))

    @property
    def progress(self) -> Progress:
        staged = self._total_bytes if self.staged.done() else 0
        return Progress(self._total_bytes, staged, self._num_bytes)

    async def _write(self, off_loop: OffLoop) -> None:
        await off_loop(self._write_folder)

    def failed(self, error: BaseException) -> None:
        self._let_go()
        self._small.clear()
        super().failed(error)

    async def afterwards(self, off_loop: OffLoop) -> None:
        self._small.clear()
        await super().afterwards(off_loop)

    # --- blocking, on helper threads --------------------------------------------------------------------------

    def _write_folder(self) -> None:
        self._check_others()
        if self._weights.stem == "model" and self._storage.exists(ADAPTER_CONFIG):
            raise FileExistsError(
                f"{self.path} holds an adapter ({ADAPTER_CONFIG}), which would be loaded in place of the model; "
                "delete it, or give another folder"
            )
        place = self._write_weights()
        self._let_go()
        for name, data in sorted(self._small.items()):
            if not (place.remote and name == self._weights.last):
                place.replace(name, data)
            self._num_bytes += len(data)

    def _write_weights(self) -> Storage:
        """Returns where the other files go, too."""
        weights = self._weights
        shards = shards_of(
            weights._replace(tensors=weights.as_published(weights.tensors)), self._max_shard_bytes
        )
        if len(shards) > 1:
            self._small[INDEX] = index_of(shards)
        self._total_bytes = sum(shard.num_bytes for shard in shards) + sum(map(len, self._small.values()))
        place = self._place()
        for shard in shards:
            self._write_file(place, shard.name, shard.num_bytes, self._pieces(shard))
            self._shard_names.add(shard.name)
        return place

    def _place(self) -> Storage:
        """Beside the folder that it will be, or where it stays."""
        if self._storage.remote:
            self._hide_the_one_before()
            return self._storage
        path = Path(self.path)
        free = free_bytes_at(path.parent)
        if free is not None and free < self._total_bytes:
            raise full(path, self._total_bytes, free)
        self._scratch = Scratch(path.parent, path.name)
        return LocalStorage(self._scratch.folder)

    def _hide_the_one_before(self) -> None:
        """The folder that stands there must not be loaded while its files are replaced one by one."""
        last = self._weights.last
        if self._storage.exists(last):
            if last not in self._small:  # it stays that of the new weights
                self._small[last] = self._storage.read(last)[0]
                self._total_bytes += len(self._small[last])
            self._storage.delete(last)

    def _pieces(self, shard: Shard) -> Iterator[memoryview]:
        """The bytes of a file, from front to back; each piece may be overwritten when the next is asked for."""
        yield from (view for _, view in shard.pieces())

    def _let_go(self) -> None:
        """The optimizers of the copies, and of the model."""
        self._weights = self._weights._replace(tensors={}, as_published=dict)
        self.copy.release()

    def _commit(self) -> None:
        self._check_others()
        weights, storage = self._weights, self._storage
        if self._scratch is not None:
            with translated(Path(self.path)):
                publish(self._scratch.folder, Path(self.path), replaced=weights.is_own)
            return
        for name in storage.names(""):
            if weights.is_own(name) and name not in self._shard_names | set(self._small):
                storage.delete(name)  # shards of the one before, which would be loaded first
        if weights.last in self._small:
            storage.replace(weights.last, self._small[weights.last])
