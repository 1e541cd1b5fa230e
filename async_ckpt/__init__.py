"""Checkpoints for PyTorch training that never block.

handle = async_ckpt.save(state, "out/x.tar")      # returns at once; handle.result() when it is durable
state = async_ckpt.load("out/x.tar")

with async_ckpt.AsyncCheckpointer("runs/a", keep_last=3, guard=optimizer) as ckpt:
    start = ckpt.restore({"model": model, "optimizer": optimizer})
    ckpt.save({"model": model, "optimizer": optimizer, "rng": async_ckpt.RngState()}, step=100)
"""

from .checkpointer import AsyncCheckpointer
from .commit.naming import Tracker
from .errors import (
    CheckpointError,
    ClosedError,
    CorruptCheckpointError,
    FormatVersionError,
    NotCommittedError,
    PeerFailedError,
    SaveAbandonedError,
    StateMismatchError,
    StepBehindError,
    StepExistsError,
    StorageFullError,
    StorageUnavailableError,
    TornSnapshotError,
    UnsupportedStateError,
    UntrustedObjectError,
)
from .functional import load, release, save
from .handle import SaveHandle
from .report import Destination, Progress, SaveReport
from .state.rng import RngState

__version__ = "0.1.0"

__all__ = [
    "AsyncCheckpointer",
    "CheckpointError",
    "ClosedError",
    "CorruptCheckpointError",
    "Destination",
    "FormatVersionError",
    "NotCommittedError",
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
    "UnsupportedStateError",
    "UntrustedObjectError",
    "load",
    "release",
    "save",
]
