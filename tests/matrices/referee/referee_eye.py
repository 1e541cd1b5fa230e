"""The eye of the referee with what it does not see by itself: links, syncs, writes and cuts of open files.

In: the variables by which ckpt-chaos arms a process. Out: an event for each call that changes a file below the watched folder,
at one of which the process ends. Knows nothing of: trainings, verdicts.

ckpt-chaos 0.1.8 sees what CPython audits among `open`, `rename`, `remove`, `mkdir`, `rmdir` and `rmtree`, and `torch.save` and
`save_file` of safetensors.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from ckpt_chaos import inject
from ckpt_chaos.targets.common import arm_from_env

BY_NAME: Final = ("link", "symlink", "truncate")
"""Calls whose last path is what they make or change."""
BY_DESCRIPTOR: Final = ("fsync", "fdatasync", "pwrite", "pwritev", "write", "writev", "ftruncate", "posix_fallocate")


def open_eye(*, wide: bool) -> None:
    """Arm this process, if the referee asks for it; `wide` adds the calls above. The rank is that of the environment."""
    if not os.environ.get("CKPT_CHAOS_WATCH"):
        return
    arm_from_env(int(os.environ.get("RANK", "0")), lazy=True)
    if wide:
        for name in BY_NAME:
            _see(name, _last_path)
        for name in BY_DESCRIPTOR:
            _see(name, lambda arguments, _: _path_of(arguments[0]))


def _last_path(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> str:
    path = os.fspath(next(one for one in reversed(arguments) if isinstance(one, str | os.PathLike)))
    folder = options.get("dst_dir_fd", options.get("dir_fd"))
    return path if folder is None else os.path.join(_path_of(folder), path)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _see(name: str, path_of: Callable[[tuple[Any, ...], Mapping[str, Any]], Any]) -> None:
    real = getattr(os, name)

    def seen(*arguments: Any, **options: Any) -> Any:
        path = path_of(arguments, options)
        if inject._under(path):
            inject._event(f"os.{name}", path, tornable=False)
        return real(*arguments, **options)

    setattr(os, name, seen)
