"""The folder of a model as the Hugging Face ecosystem reads it: shards, their index, and small files beside them.

In: weights by name, copied to the host, and small files. Out: a folder on disk or in a store, which appears as a
whole. Knows nothing of: models, the names of their weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from ...core.host.loop import off_loop
from ...core.staging.guard import Optimizers
from ...core.state.captured import SnapshotView
from ...core.storage.disk import free_bytes_at, full, translated
from ...core.storage.interface import Storage
from ...core.storage.local import LocalStorage
from ...core.timing import Spans
from ...errors import OccupiedError
from .copy_save import WeightsSave
from .hf_weights import ADAPTER_CONFIG, Weights
from .scratch import Scratch, publish
from .shards import INDEX, Shard, index_of, shards_of


class ExportRequest(NamedTuple):
    """The arguments of one `export_hf` call except the weights, and the spans that time it."""

    storage: Storage  # of the folder to write
    config_files: Mapping[str, bytes]
    max_shard_bytes: int
    spans: Spans
    check: Callable[[], None] = lambda: None  # called before anything is replaced; raises to prevent it


class Export(WeightsSave):
    """The save of one export. Created on the caller's thread, and run on the library's loop; its blocking methods run
    on helper threads.
    """

    def __init__(
        self,
        request: ExportRequest,
        weights: Weights,
        *,
        held: SnapshotView | None = None,
        optimizers: Optimizers = (),
        after: Sequence[Future[None]] = (),
    ) -> None:
        super().__init__(
            request.storage.locate(""), weights, held=held, optimizers=optimizers, spans=request.spans, after=after
        )
        self._storage, self._max_shard_bytes = request.storage, request.max_shard_bytes
        self._check_others = request.check
        self._small_files = {**weights.files, **request.config_files}
        self._total_bytes += sum(map(len, self._small_files.values()))
        self._shard_names: set[str] = set()  # written so far

    async def _write(self) -> None:
        await off_loop(self._write_folder)

    def failed(self, error: BaseException) -> None:
        self._release_weights()
        self._small_files.clear()
        super().failed(error)

    async def tidy(self) -> None:
        self._small_files.clear()
        await super().tidy()

    # --- blocking, on helper threads --------------------------------------------------------------------------

    def _write_folder(self) -> None:
        self._check_others()
        if self._weights.stem == "model" and self._storage.exists(ADAPTER_CONFIG):
            raise OccupiedError(
                f"{self.path} holds an adapter ({ADAPTER_CONFIG}), which would be loaded in place of the model; "
                "delete it, or give another folder"
            )
        place = self._write_weights()
        self._release_weights()
        for name, data in sorted(self._small_files.items()):
            if not (place.remote and name == self._weights.last):
                place.replace(name, data)
            self._num_bytes += len(data)

    def _write_weights(self) -> Storage:
        """Write the shards. Returns the storage for the other files."""
        weights = self._weights
        shards = shards_of(weights._replace(tensors=weights.as_published(weights.tensors)), self._max_shard_bytes)
        if len(shards) > 1:
            self._small_files[INDEX] = index_of(shards)
        self._total_bytes = sum(shard.num_bytes for shard in shards) + sum(map(len, self._small_files.values()))
        place = self._open_target()
        for shard in shards:
            self._write_file(place, shard.name, shard.num_bytes, self._pieces(shard))
            self._shard_names.add(shard.name)
        return place

    def _open_target(self) -> Storage:
        """The storage to write to: a scratch folder beside a local destination, or the destination in a store."""
        if self._storage.remote:
            self._hide_previous_model()
            return self._storage
        path = Path(self.path)
        free = free_bytes_at(path.parent)
        if free is not None and free < self._total_bytes:
            raise full(path, self._total_bytes, free)
        self._scratch = Scratch(path.parent, path.name)
        return LocalStorage(self._scratch.folder)

    def _hide_previous_model(self) -> None:
        """Make sure that the previous model cannot be loaded while its files are replaced one by one."""
        last = self._weights.last
        if self._storage.exists(last):
            if last not in self._small_files:  # to be written again with the new weights
                self._small_files[last] = self._storage.read(last)[0]
                self._total_bytes += len(self._small_files[last])
            self._storage.delete(last)

    def _pieces(self, shard: Shard) -> Iterator[memoryview]:
        """The bytes of a shard, from front to back. The next piece may overwrite this one's memory."""
        return shard.pieces()

    def _commit(self) -> None:
        self._check_others()
        weights, storage = self._weights, self._storage
        if self._scratch is not None:
            with translated(Path(self.path)):
                publish(self._scratch.folder, Path(self.path), replaced=weights.is_own)
            return
        for name in storage.names(""):
            if weights.is_own(name) and name not in self._shard_names | set(self._small_files):
                storage.delete(name)  # shards of the previous model, which would be loaded first
        if weights.last in self._small_files:
            storage.replace(weights.last, self._small_files[weights.last])
