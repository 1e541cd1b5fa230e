"""Asynchronous checkpoints for PyTorch training.

    handle = async_ckpt.save(state, "out/x.ackpt.tar")      # returns at once; handle.result() when it is durable
    state = async_ckpt.load("out/x.ackpt.tar")

    with async_ckpt.AsyncCheckpointer("runs/a", keep=3, guard=optimizer) as ckpt:
        start = ckpt.restore({"model": model, "optimizer": optimizer})
        ckpt.save({"model": model, "optimizer": optimizer, "rng": async_ckpt.RngState()}, step=100)

`help` of a name says all about it: `help(async_ckpt.save)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from . import errors
from .core.garbage import no_collection
from .errors import (
    CheckpointError,
    CorruptCheckpointError,
    NotCommittedError,
    StepExistsError,
    StorageFullError,
    StorageUnavailableError,
    TornSnapshotError,
)

__version__ = "0.1.0"

__all__ = [
    "AsyncCheckpointer", "CheckpointError", "CorruptCheckpointError", "Due", "Ema", "HeldSnapshot", "Keep", "Naming",
    "NonFinite", "NotCommittedError", "PerRank", "Place", "Publisher", "PullReport", "RngState", "SaveHandle",
    "SaveReport", "StepExistsError", "StorageFullError", "StorageUnavailableError", "Subscriber",
    "TornSnapshotError", "VerifyReport", "Zstd", "errors", "export_hf", "files", "follow", "history", "inspect",
    "load", "merge", "pack", "release", "save", "sharded", "snapshot", "unpack", "verify", "wrap",
]  # fmt: skip


if TYPE_CHECKING:  # for type checkers, which take any name of a module with a `__getattr__`
    from . import files as files  # noqa: I001 - one import of errors, not one for each
    from .face.checkpointer import AsyncCheckpointer as AsyncCheckpointer
    from .face.oneoff import load as load, release as release, save as save, snapshot as snapshot, verify as verify
    from .core.report import PullReport as PullReport, SaveReport as SaveReport, VerifyReport as VerifyReport
    from .core.runs.naming import Naming as Naming
    from .core.saving.finite import NonFinite as NonFinite
    from .core.saving.handle import SaveHandle as SaveHandle
    from .core.saving.policy import Due as Due
    from .core.slicing.sharded import sharded as sharded
    from .core.spec import Ema as Ema, Keep as Keep
    from .core.staging.held_snapshot import HeldSnapshot as HeldSnapshot
    from .core.state.per_rank import PerRank as PerRank
    from .core.state.rng import RngState as RngState
    from .core.storage.compressed import Zstd as Zstd
    from .core.storage.place import Place as Place
    from .face.states.inspected import inspect as inspect
    from .face.run_history import history as history
    from .face.around.export import export_hf as export_hf
    from .face.around.merge import merge as merge
    from .face.around.pack import pack as pack
    from .face.around.unpack import unpack as unpack
    from .face.around.wrap import wrap as wrap
    from .errors import (
        ClosedError as ClosedError, ConflictError as ConflictError, DestinationBusyError as DestinationBusyError,
        ForeignFileError as ForeignFileError, FormatVersionError as FormatVersionError,
        IsAFolderError as IsAFolderError, NoGoodStepError as NoGoodStepError, NotAFolderError as NotAFolderError,
        NotFoundError as NotFoundError, NothingWrittenError as NothingWrittenError,
        NotUnchangedError as NotUnchangedError, OccupiedError as OccupiedError, PeerFailedError as PeerFailedError,
        SaveAbandonedError as SaveAbandonedError, StateMismatchError as StateMismatchError,
        RunTakenError as RunTakenError, StepBehindError as StepBehindError, UnsafeArchiveError as UnsafeArchiveError,
        UnsupportedStateError as UnsupportedStateError, UntrustedObjectError as UntrustedObjectError,
        UsageError as UsageError,
    )  # fmt: skip
    from .weights.following.follower import follow as follow
    from .weights.publishing.publisher import Publisher as Publisher
    from .weights.publishing.subscriber import Subscriber as Subscriber
else:
    # Imported when they are first asked for: most programs need a few of them, and `async-ckpt ls` needs no torch.
    _NAMES = {
        ".face.checkpointer": "AsyncCheckpointer",
        ".core.saving.policy": "Due",
        ".core.staging.held_snapshot": "HeldSnapshot",
        ".core.slicing.sharded": "sharded",
        ".core.spec": "Ema Keep",
        ".core.runs.naming": "Naming",
        ".core.state.per_rank": "PerRank",
        ".core.storage.place": "Place",
        ".core.report": "PullReport SaveReport VerifyReport",
        ".core.state.rng": "RngState",
        ".core.saving.finite": "NonFinite",
        ".core.saving.handle": "SaveHandle",
        ".core.storage.compressed": "Zstd",
        ".face.run_history": "history",
        ".face.states.inspected": "inspect",
        ".face.oneoff": "load release save snapshot verify",
        ".weights.publishing.publisher": "Publisher",
        ".weights.publishing.subscriber": "Subscriber",
        ".face.around.export": "export_hf",
        ".files": "files",
        ".weights.following.follower": "follow",
        ".face.around.merge": "merge",
        ".face.around.pack": "pack",
        ".face.around.unpack": "unpack",
        ".face.around.wrap": "wrap",
    }
    _LATER = {name: home for home, names in _NAMES.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        """Import the names that are imported late, and the errors that are not listed above, such as `ClosedError`."""
        if name in _LATER:
            with no_collection():  # all that is made stays, and would set off a full collection of what torch has made
                module = import_module(_LATER[name], __name__)
            value = globals()[name] = getattr(module, name, module)  # files is the module itself
            return value
        if name.endswith("Error") and hasattr(errors, name):
            return getattr(errors, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", *(name for name in vars(errors) if name.endswith("Error"))})
