"""Memory on the NUMA node that a GPU is attached to: copies from it cross no link between processors.

In: a device, an address range. Out: a preference that the kernel keeps when it gives the pages.
Knows nothing of: segments, pinning.

Best effort, on Linux alone: if the node is not known, or the kernel refuses, memory lies where it would lie anyway.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Final

import torch

from ..backends import backend_of
from ..spec import align_up

# See mbind(2): among C libraries, only libnuma has a function for this call.
_MBIND: Final = {"x86_64": 237, "aarch64": 235}.get(platform.machine())
_MPOL_PREFERRED: Final = 1
_NODES_PER_WORD: Final = 8 * ctypes.sizeof(ctypes.c_ulong)


@cache
def node_of(device: torch.device) -> int | None:
    """The NUMA node next to a device; None if the machine does not report it."""
    address = backend_of(device).bus_address(device)
    return None if address is None else _node_at(Path(f"/sys/bus/pci/devices/{address}/numa_node"))


def _node_at(path: Path) -> int | None:
    try:
        node = int(path.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not report it


def prefer_node(address: int, num_bytes: int, node: int) -> bool:
    """Take the pages of an untouched range from this node, as long as it has free ones. False if that is refused."""
    if _MBIND is None or sys.platform != "linux":
        return False
    words = (ctypes.c_ulong * (node // _NODES_PER_WORD + 1))()
    words[node // _NODES_PER_WORD] = 1 << node % _NODES_PER_WORD
    page = os.sysconf("SC_PAGE_SIZE")
    begin = address // page * page
    length = align_up(address + num_bytes - begin, page)
    code = ctypes.CDLL(None).syscall(
        ctypes.c_long(_MBIND),
        ctypes.c_void_p(begin),
        ctypes.c_ulong(length),
        ctypes.c_int(_MPOL_PREFERRED),
        words,
        ctypes.c_ulong(len(words) * _NODES_PER_WORD + 1),
        ctypes.c_uint(0),
    )
    return int(code) == 0
