"""The transfer engines `async_ckpt` of vLLM: one in a training, and one in each worker of an engine.

In: a WeightSource, or the place of stored weights. Out: an engine that has them. Knows nothing of: snapshots.

A worker always receives a place: a step or a version that all hosts see, or a safetensors file of at most
`bucket_bytes` in memory that the processes of a host share. The training writes such a file, waits until all workers
have read it, and deletes it before it writes the next one. The next training deletes the file of a killed one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Final

from ...plumbing import backends, disk, hf_shards, hf_weights, scratches, spec
from ..common.framework_checks import require
from ..common.held_weights import in_buckets
from ..common.stored_weights import StoredWeights
from .loaded_tensors import HandedOn
from .registration import NAME

_transfer: Final[Any] = import_module("vllm.distributed.weight_transfer")
_base: Final[Any] = import_module("vllm.distributed.weight_transfer.base")
_SCRATCH: Final = "async_ckpt-weights"


@dataclass
class ReceiverInit(_base.WeightTransferInitInfo):  # type: ignore[misc]
    """The settings that a worker receives once. It pulls versions into `folder` unless an update names another."""

    folder: str | None = None


@dataclass
class StoredUpdate(_base.WeightTransferUpdateInfo):  # type: ignore[misc]
    """One update: the arguments of `StoredWeights`, or in `failed` the reason why the training sends no more."""

    weights: dict[str, Any] | None = None
    failed: str | None = None

    def __post_init__(self) -> None:
        if (self.weights is None) == (self.failed is None):
            raise ValueError("an update needs either weights=, or failed=, the reason why the training failed")


@dataclass
class SenderInit(_base.TrainerInitInfo):  # type: ignore[misc]
    """The arguments of a training's engine, on every rank.

        SenderInit(rank=0)

    `rank`, a field of vLLM's class, is the rank of the training process. Rank 0 communicates with the engine.

    Args:
        buckets: a folder in memory that the workers also see, for the weights of snapshots.
        bucket_bytes: the size of a file there; a larger tensor has a file of its own.
        folder: the folder on the workers' hosts into which they pull published versions.
    """

    backend: ClassVar[str] = NAME
    buckets: str = "/dev/shm"  # a place of memory, in which buckets have random names  # nosec B108
    bucket_bytes: int = 1024 * spec.MIB
    folder: str | None = None

    def __post_init__(self) -> None:
        self.bucket_bytes = spec.whole_bytes("bucket_bytes", self.bucket_bytes)


# --- in a worker of an engine -------------------------------------------------------------------------------------


class StoredWeightsEngine(_transfer.WeightTransferEngine):  # type: ignore[misc]
    """The receiving side: it loads the weights at the place that an update names into the worker's model."""

    init_info_cls = ReceiverInit
    update_info_cls = StoredUpdate

    def __init__(self, *arguments: Any, **options: Any) -> None:
        require("vllm")
        super().__init__(*arguments, **options)
        self._folder: str | None = None

    def init_transfer_engine(self, init_info: ReceiverInit) -> None:
        """Store the settings that the training sends once."""
        self._folder = init_info.folder

    def start_weight_update(self) -> None:
        """Prepare the layers to receive weights as they are stored."""
        _loader("reload").initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights of an update, and wait for the device. Raises the errors of `receive_weights`."""
        self.receive_weights(self.parse_update_info(update_info))
        if not backends.is_host(self.device):
            backends.backend_of(self.device).current_stream(self.device).synchronize()

    def receive_weights(self, update_info: StoredUpdate) -> None:
        """Load the weights of one place.

        Raises StateMismatchError if they do not fit the model, the errors of `StoredWeights.tensors`, and RuntimeError
        if the training has failed during an update.
        """
        try:
            self._load(update_info)
        except BaseException as error:
            try:
                self._give_up()
            except Exception as failure:
                error.add_note(f"async_ckpt: the layers have changed: {failure}; start the engine again")
            raise

    def _load(self, update_info: StoredUpdate) -> None:
        if update_info.weights is None:
            raise RuntimeError(
                f"the training has failed in the middle of an update of the weights: {update_info.failed}; the model "
                "has a mix of old and new weights until the next update is complete"
            )
        weights = StoredWeights.of({"folder": self._folder} | update_info.weights)
        handed_on = HandedOn()
        in_part = _loader("mtp_validation").disable_mtp_completeness_check
        with handed_on.into(self.model, weights), in_part():
            self.model.load_weights(handed_on.each(weights.tensors()))

    def _give_up(self) -> None:
        """Return waiting layers to their old weights. Otherwise, the next update would load what they hold."""
        layerwise = _loader("reload.layerwise")
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            info.load_numel = 0
            info.loaded_weights.clear()
        self.finish_weight_update()

    def finish_weight_update(self) -> None:
        """Have the layers process the weights that they have received."""
        _loader("reload").finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: the engine holds no resources."""


def _loader(name: str) -> Any:
    """A module of vLLM's model loader, imported where an engine is used."""
    return import_module(f"vllm.model_executor.model_loader.{name}")


# --- in a training ------------------------------------------------------------------------------------------------


class SnapshotSender(_transfer.TrainerWeightTransferEngine):  # type: ignore[misc]
    """The sending side, made by vLLM's `WeightTransferTrainerFactory.trainer_init` on every rank of a training.

    engine = WeightTransferTrainerFactory.trainer_init(SenderInit(rank=0), client=client, source=source)
    engine.send_weights(version=1200)  # from the source
    engine.send_weights(StoredWeights("s3://bucket/weights", version=1200), version=1200)
    """

    init_info_cls = SenderInit

    def __init__(self, init_info: SenderInit, *, client: Any, source: Any = None) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        self._init = init_info

    @classmethod
    def trainer_init(cls, init_info: SenderInit, *, client: Any, source: Any = None) -> SnapshotSender:
        """Create the engine, and initialize the workers. Every rank calls this.

        Raises TypeError for a source without `iter_full`.
        """
        require("vllm")
        if source is not None and not source.implements_iter_full():
            raise TypeError(f"whole tensors are sent, and {type(source).__name__} has no iter_full")
        engine = cls(init_info, client=client, source=source)
        if engine.is_sender:
            client.init_weight_transfer_engine({"folder": init_info.folder})
        return engine

    def send_weights(self, weights: StoredWeights | None = None, *, version: int | str | None = None) -> None:
        """Send new weights to the engine, and return when it has loaded them. Every rank calls this.

        engine.send_weights(version=1200)

        After an error, the engine may have a mix of old and new weights: send them again before it generates.

        Args:
            weights: a place that the hosts of all workers see; by default the weights of the source are sent.
            version: the engine's name for the new weights, such as the training step.

        Raises NotCommittedError and other errors for a place where nothing is complete, before the engine is contacted;
        ClosedError and TornSnapshotError for a snapshot; StorageFullError if a bucket does not fit; and the errors of
        the client, also if the engine has died.
        """
        if weights is not None:
            if self.is_sender:
                weights.check()
                self._update([{k: v for k, v in asdict(weights).items() if v is not None}], version)
        elif self.source is None:
            raise ValueError("there are no weights to send: this engine was made without a source")
        elif self.is_sender:
            self._send(version)
        else:
            for _ in self.source.iter_full():
                pass  # the gathers of the sender need this rank

    def _send(self, version: int | str | None) -> None:
        with ExitStack() as stack:
            files = self._files(stack)
            first = next(files, None)  # the source may fail here, before the engine is contacted
            if first is None:
                raise ValueError("the source has no weights")
            self._update(chain([first], files), version)

    def _files(self, stack: ExitStack) -> Iterator[dict[str, Any]]:
        """Updates with one file each. A file exists until the next update is requested."""
        scratch = stack.enter_context(scratches.Scratch(Path(self._init.buckets), _SCRATCH))
        items = ((name, tensor.detach().cpu().contiguous()) for name, tensor in self.source.iter_full())
        for number, bucket in enumerate(in_buckets(items, self._init.bucket_bytes)):
            path = scratch.folder / f"bucket-{number:05d}.safetensors"
            (shard,) = hf_shards.shards_of(hf_weights.Weights("model", dict(bucket), {}, {}, dict), sys.maxsize)
            bucket.clear()
            with disk.translated(path, needed_bytes=shard.num_bytes), path.open("wb") as file:
                for data in shard.pieces():
                    file.write(data)
            del shard
            yield {"path": str(path)}
            path.unlink(missing_ok=True)

    def _update(self, places: Iterable[dict[str, Any]], version: int | str | None) -> None:
        self._start()
        try:
            for place in places:
                self.client.update_weights({"weights": place, "failed": None})
        except BaseException as error:
            # A worker that has not failed waits for more weights, and would refuse the next update.
            self._end(f"{type(error).__name__}: {error}")
            raise
        if version is None:
            self.client.finish_weight_update()
        else:
            self.client.finish_weight_update(weight_version=str(version))

    def _start(self) -> None:
        try:
            self.client.start_weight_update()
        except Exception:
            # A training that was killed may have left an update open, which an error ends.
            self._end("it was started again")
            self.client.start_weight_update()

    def _end(self, why: str) -> None:
        """End an update by an error in the workers, if they can be reached."""
        with suppress(Exception):
            self.client.update_weights({"weights": None, "failed": why})
