"""Values and arrays that are plain data, and the way of a state into an archive and back."""

import math
import struct
from collections import deque
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import torch

import async_ckpt


def round_trip(state: Any, path: Path, **how: Any) -> Any:
    async_ckpt.save(state, path).result()
    return async_ckpt.load(path, **how)


VALUES = [
    0, -1, 2**63, -(2**64), 2**1000, True, False, None,
    0.0, -0.0, 0.1, 1e308, 5e-324, math.inf, -math.inf, math.nan,
    struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0],
    "", "text", "ünïcödé 😀 \x00 \u2028 \"quoted\" \\", "\ud800", "a\udfffb",
    b"", b"\x00\xff", bytes(4095), bytes(4096), bytes(range(256)) * 40,
    1j, complex(-0.0, math.nan), complex(math.inf, -0.0),
    torch.Size([]), torch.Size([2, 0, 3]), torch.float32, torch.bfloat16, torch.float8_e4m3fn,
    torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"),
    Path("a/b"), Path("/"), Path(), Path("a\udcff"), PurePath("x"), PurePosixPath("//a/../ü"), PureWindowsPath("C:\\a/b"),
    date(1, 1, 1), date(9999, 12, 31), datetime(2024, 2, 29, 1, 2, 3, 456789), datetime(2024, 10, 27, 2, 30, fold=1),
    datetime(2024, 2, 29, tzinfo=UTC), datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=45))), datetime.min, datetime.max,
    time(), time(23, 59, 59, 999999, fold=1), time(1, tzinfo=timezone(-timedelta(seconds=1), "odd \ud800")),
    UTC, timezone(timedelta(0), "Z"), ZoneInfo("America/Argentina/Buenos_Aires"), ZoneInfo("Etc/GMT+5"),
    timedelta.min, timedelta.max, timedelta(microseconds=-1), Decimal("-0.10"), Decimal("1e999999"), Decimal("-Infinity"), Decimal("sNaN123"),
    Fraction(-1, 3), Fraction(0), Fraction(2**4000, 3), UUID(int=0), UUID(int=2**128 - 1),
    range(3), range(0), range(10, -2**80, -3), slice(None), slice(1, None, -2), slice(-(2**70), 5),
    deque(), deque([1, (2, [3])]), deque(["a"], maxlen=1), deque(maxlen=0), deque([deque([1.5], 2)], 10**18),
    set(), {1, 2.5, "text", None, 1j, b"bytes", (1, (2, "x")), 2**70, Path("x")}, frozenset({frozenset({date(2024, 2, 29)}), frozenset()}),
]  # fmt: skip

grid = np.arange(24.0).reshape(4, 6)
read_only = np.arange(5)
read_only.flags.writeable = False
ARRAYS = {
    "float64": grid,
    "float16": np.arange(5, dtype="f2"),
    "bool": np.array([True, False]),
    "uint16": np.arange(5, dtype="u2"),
    "complex64": np.array([1j, 2], "c8"),
    "longdouble": np.array([1, 2], np.longdouble),
    "0-d": np.array(3.5),
    "0-d datetime": np.array("2024-02-29", "M8[D]"),
    "empty": np.empty((0, 3), "i4"),
    "empty structured": np.empty(0, [("a", "f4")]),
    "fortran": np.asfortranarray(grid),
    "strided": grid[::2, ::-3],
    "transposed": grid.T,
    "broadcast": np.broadcast_to(np.arange(3), (2, 3)),
    "read-only": read_only,
    "big-endian": np.arange(5, dtype=">f8"),
    "big-endian int": np.arange(5, dtype=">u2"),
    "datetime64": np.array(["2024-01-01", "NaT"], "M8[ns]"),
    "timedelta64": np.array([1, -1], "m8[s]"),
    "unicode": np.array(["a", "", "ünï😀"]),
    "bytes": np.array([b"ab", b"\x00c"]),
    "void": np.array([b"abc", b"d\x00\x00"], "V3"),
    "structured": np.array([(1, 2.5, "x")], [("i", "<i4"), ("f", ">f8"), ("s", "U3")]),
    "nested structured": np.zeros((2, 2), [("a", [("b", "i2"), ("c", "f4", (2, 3))]), ("d", "S2")]),
    "padded structured": np.ones(3, np.dtype({"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [0, 8]})),
    "nan payload": np.array([0x7FF8000000000123], "u8").view("f8"),
}  # fmt: skip
