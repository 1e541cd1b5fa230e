"""Whether a folder survives a reboot or the loss of this machine, and how many bytes can be written to it.

In: a folder. Out: answers from the mount table, if the system has one, and from the limits of memory.
Knows nothing of: the content of the folder.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Final

from ..host.limits import free_memory_bytes
from ..spec import MIB
from .disk import free_bytes_at

_MOUNTS: Final = Path("/proc/self/mountinfo")  # proc(5), "mountinfo"
_IN_MEMORY: Final = frozenset({"tmpfs", "ramfs"})
# File systems on other machines. Most kinds of FUSE are object stores or shared file systems.
_ELSEWHERE: Final = r"nfs\d?|cifs|smb3?|ceph|lustre|gpfs|beegfs|9p|afs|pvfs2|glusterfs|wekafs|fuse\..*"
_ESCAPED: Final = r"\\(\d{3})"

# The part of the free memory that is left to the training: a sixteenth, and at least this many bytes.
_LEFT_FREE: Final = 16
_LEFT_BYTES: Final = 64 * MIB

_log = logging.getLogger("async_ckpt")
_warned: set[str] = set()


def is_volatile(folder: Path) -> bool:
    """Whether a folder, which may not exist yet, is in memory. Warns once of a folder in a container's own layer."""
    kind = file_system(folder)
    if kind == "overlay" and str(folder) not in _warned:
        _warned.add(str(folder))
        _log.warning("%s lies in a layer of a container and vanishes with it; give a mounted folder", folder)
    return kind in _IN_MEMORY


def is_in_memory(folder: Path) -> bool:
    """Whether a folder, which may not exist yet, is in memory, so that only this machine sees it."""
    return file_system(folder) in _IN_MEMORY


def free_bytes_in(folder: Path) -> int | None:
    """The bytes that can still be written to a folder; None if unknown.

    In memory, at most the bytes that the machine or the control group can spare: a process that uses more is killed.
    """
    free = free_bytes_at(folder)
    if free is None or not is_in_memory(folder):
        return free
    spare = free_memory_bytes()
    return min(free, max(0, spare - max(spare // _LEFT_FREE, _LEFT_BYTES)))


def is_elsewhere(folder: Path) -> bool:
    """Whether a folder, which may not exist yet, is on disks of other machines."""
    return re.fullmatch(_ELSEWHERE, file_system(folder)) is not None


def file_system(folder: Path) -> str:
    """The type of the file system that contains a folder; empty if the system has no mount table."""
    try:
        lines = _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return ""
    found, kind = "", ""
    wanted = f"{os.path.realpath(folder)}/"  # unlike `Path.resolve`, it takes links that lead back to themselves
    for line in lines:
        before, _, after = line.partition(" - ")
        point = re.sub(_ESCAPED, lambda match: chr(int(match[1], 8)), before.split(" ", 5)[4]).rstrip("/") + "/"
        if len(point) >= len(found) and wanted.startswith(point):  # of two mounts at one point, the later one counts
            found, kind = point, after.split(" ", 1)[0]
    return kind
