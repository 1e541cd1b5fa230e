"""The folder of a checkpoint from which a training resumes: one whose files have not changed since the save.

In: the path or URL of a checkpoint, and those beside it. Out: a local folder, or an error that names the damaged file
and the newest undamaged checkpoint. Knows nothing of: the content of the files, frameworks.

All ranks meet, so that they take the same folder. The ranks of a node share the comparison, so that each file is read
once.
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
    """A local folder of a checkpoint whose files have not changed since the save. Every rank calls this.

    If `checkpoint` is True, the newest undamaged one: damaged ones are skipped with a warning. `newest_first` lists the
    paths or URLs of all checkpoints. Yields True if there is none, and any other value that is not a path unchanged.

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
    """Raise CorruptCheckpointError if a file of a folder has changed since the save. Every rank calls this."""
    if (error := damage_in(folder)) is not None:
        raise _advised(error)


def damage_in(folder: Any) -> CorruptCheckpointError | None:
    """The damage of a local folder, the same on every rank; None if it is undamaged, or has no digests."""
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
