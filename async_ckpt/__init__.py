"""Checkpoints for PyTorch training that never block.

handle = async_ckpt.save(state, "out/x.tar")      # returns at once; handle.result() when it is durable
state = async_ckpt.load("out/x.tar")

with async_ckpt.AsyncCheckpointer("runs/a", keep=3, guard=optimizer) as ckpt:
    start = ckpt.restore({"model": model, "optimizer": optimizer})
    ckpt.save({"model": model, "optimizer": optimizer, "rng": async_ckpt.RngState()}, step=100)
"""

from .around import files
from .around.export import export_hf
from .around.pack import pack, pack_folder
from .around.unpack import extract, unpack
from .around.wrap import wrap
from .checkpointer import AsyncCheckpointer
from .errors import (
    CheckpointError,
    ClosedError,
    CorruptCheckpointError,
    DestinationBusyError,
    FormatVersionError,
    NotCommittedError,
    NothingWrittenError,
    NotUnchangedError,
    PeerFailedError,
    SaveAbandonedError,
    StateMismatchError,
    StepBehindError,
    StepExistsError,
    StorageFullError,
    StorageUnavailableError,
    TornSnapshotError,
    UnsafeArchiveError,
    UnsupportedStateError,
    UntrustedObjectError,
)
from .oneoff import load, release, save, verify
from .report import Destination, Progress, SaveReport, VerifyReport
from .runs.naming import Naming, Tracker
from .runs.retention import Keep
from .saving.handle import SaveHandle
from .saving.policy import Due
from .state.rng import RngState
from .storage.compressed import Zstd

__version__ = "0.1.0"

__all__ = [
    "AsyncCheckpointer",
    "CheckpointError",
    "ClosedError",
    "CorruptCheckpointError",
    "Destination",
    "DestinationBusyError",
    "Due",
    "FormatVersionError",
    "Keep",
    "Naming",
    "NotCommittedError",
    "NotUnchangedError",
    "NothingWrittenError",
    "PeerFailedError",
    "Progress",
    "RngState",
    "SaveAbandonedError",
    "SaveHandle",
    "SaveReport",
    "StateMismatchError",
    "StepBehindError",
    "StepExistsError",
    "StorageFullError",
    "StorageUnavailableError",
    "TornSnapshotError",
    "Tracker",
    "UnsafeArchiveError",
    "UnsupportedStateError",
    "UntrustedObjectError",
    "VerifyReport",
    "Zstd",
    "export_hf",
    "extract",
    "files",
    "load",
    "pack",
    "pack_folder",
    "release",
    "save",
    "unpack",
    "verify",
    "wrap",
]
