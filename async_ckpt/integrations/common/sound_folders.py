"""The folder of a checkpoint that a training resumes from: one whose files are as they were saved.

In: the path or URL of a checkpoint, and those beside it. Out: a local folder, or an error that names the damaged file
and the newest sound checkpoint. Knows nothing of: what is loaded, and frameworks.

All ranks meet, so that each takes the same folder. The ranks of a node compare a share of the files each: together
they read each file once.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ...errors import CorruptCheckpointError
from ...files import local_read_dir
from ...plumbing import file_digests
from .joint_errors import meet
from .run_folders import is_url


@contextmanager
def sound_folder(checkpoint: Any, newest_first: Callable[[], Sequence[str]]) -> Iterator[Any]:
    """A local folder of a checkpoint whose files are as they were saved. Every rank calls this.

    With True it is the newest one that is sound: damaged ones are skipped with a warning. `newest_first` lists the
    paths or URLs of all checkpoints. True stays True if there is none, and what is no path stays as it is.

    Raises CorruptCheckpointError, before anything is loaded.
    """
    candidates: Sequence[Any] = (meet(newest_first)[0] or [True]) if checkpoint is True else [checkpoint]
    first: CorruptCheckpointError | None = None
    for candidate in candidates:
        with local(candidate) as folder:
            error = damage_in(folder)
            if error is None:
                yield folder
                return
        first = first or error
        if checkpoint is True:
            warnings.warn(f"{candidate} is skipped: {error}", RuntimeWarning, stacklevel=4)
    assert first is not None
    sound = None if checkpoint is True else _newest_sound(checkpoint, meet(newest_first)[0])
    other = "no other checkpoint there is sound" if sound is None else f"the newest sound checkpoint is {sound}"
    raise _advised(first, f"{other}; ")


def check(folder: Any) -> None:
    """Raise CorruptCheckpointError if a file of a folder is not as it was saved. Every rank calls this."""
    if (error := damage_in(folder)) is not None:
        raise _advised(error)


def damage_in(folder: Any) -> CorruptCheckpointError | None:
    """The damage of a local folder, the same on every rank; None if it is sound, or has no digests."""
    if not isinstance(folder, str | os.PathLike):
        return None
    rank, num_ranks = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))

    def compare() -> CorruptCheckpointError | None:
        try:
            if rank < num_ranks:
                file_digests.compare_folder(folder, share=rank, num_shares=num_ranks)
        except CorruptCheckpointError as error:
            return error
        return None

    return next((error for error in meet(compare) if error is not None), None)


@contextmanager
def local(checkpoint: Any) -> Iterator[Any]:
    """The checkpoint to load, with a local folder in place of a URL."""
    if is_url(checkpoint):
        with local_read_dir(checkpoint) as folder:
            yield str(folder)
    else:
        yield checkpoint


def _newest_sound(damaged: Any, checkpoints: Sequence[str]) -> str | None:
    for checkpoint in checkpoints:
        if os.path.basename(checkpoint) != os.path.basename(str(damaged).rstrip("/")):
            with local(checkpoint) as folder:
                if damage_in(folder) is None:
                    return checkpoint
    return None


def _advised(error: CorruptCheckpointError, other: str = "") -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{error}; {other}nothing was loaded. If the file was changed on purpose, delete "
        f"{file_digests.DIGESTS}*.json beside it",
        path=error.path,
    )
