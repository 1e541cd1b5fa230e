"""A receiver of published weights as engines have one: numpy, zstandard and xxhash, and nothing of this library.

It does what the file protocol asks of a receiver, by the description of slime's: it locks the local checkpoint for the host,
keeps a marker of the version that was applied, begins with the newest full version that is not above the target, applies
deltas in place in the order of their numbers, compares every tensor that it has changed with its checksum, and refuses gaps.
"""

import fcntl
import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import xxhash
import zstandard

INDEX = "model.safetensors.index.json"


class Refused(Exception):
    pass


def pull(local: Path, source: Path, target: int, base: Path | None = None) -> None:
    """Bring a local checkpoint up to a version. `base` is the model that deltas without a full version begin with."""
    sync = local / ".weight_sync"
    sync.mkdir(parents=True, exist_ok=True)
    with open(sync / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        applied = _applied(sync)
        begin = target
        while begin > (applied or 0) and _delta_of(source, begin) is not None:
            begin -= 1
        if applied is None or begin > applied:
            whole = base if begin == 0 else _folder(source, begin)
            assert whole is not None
            _become(local, whole)
            _mark(sync, begin)
        else:
            begin = applied
        for version in range(begin + 1, target + 1):
            _apply(local, _folder(source, version), sync, version)


def _folder(source: Path, version: int) -> Path:
    return source / f"weight_v{version:06d}"


def _applied(sync: Path) -> int | None:
    marker = sync / "state.json"
    return int(json.loads(marker.read_text())["version"]) if marker.exists() else None


def _mark(sync: Path, version: int) -> None:
    (sync / "state.json").write_text(json.dumps({"version": f"{version:06d}"}))


def _delta_of(source: Path, version: int) -> dict[str, Any] | None:
    """What the index of a delta says; None for a full version."""
    folder = _folder(source, version)
    if not folder.is_dir():
        raise Refused(f"{folder} is missing")
    index = folder / INDEX
    told = json.loads(index.read_text())["metadata"] if index.exists() else {}
    return told if "delta_encoding" in told else None


def _become(local: Path, whole: Path) -> None:
    files = [path for path in whole.iterdir() if path.is_file()]
    for path in local.iterdir():
        if path.is_file() and path.name not in {file.name for file in files}:
            path.unlink()
    for file in files:
        shutil.copyfile(file, local / file.name)


def _header(path: Path) -> tuple[dict[str, Any], dict[str, str], int]:
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + size])
    metadata = table.pop("__metadata__", {})
    return table, metadata, 8 + size


def _apply(local: Path, folder: Path, sync: Path, version: int) -> None:
    told = json.loads((folder / INDEX).read_text())["metadata"]
    if int(told["base_version"]) != _applied(sync) or int(told["version"]) != version:
        raise Refused(f"{folder} does not follow {_applied(sync)}")
    if told["compression_format"] != "zstd" or told["checksum_format"] != "xxh3-128":
        raise Refused(f"{folder} is written otherwise")
    there = {}
    for path in local.glob("*.safetensors"):
        table, _, begin = _header(path)
        for name, row in table.items():
            there[name] = (
                path,
                begin + row["data_offsets"][0],
                row["data_offsets"][1] - row["data_offsets"][0],
            )
    for path in sorted(folder.glob("*.safetensors")):
        table, checksums, begin = _header(path)
        data = path.read_bytes()
        for name, row in table.items():
            first, last = row["data_offsets"]
            frame = zstandard.ZstdDecompressor().decompress(data[begin + first : begin + last])
            where, at, size = there[name]
            region = numpy.memmap(where, numpy.uint8, "r+", at, size)
            plain = numpy.frombuffer(frame, numpy.uint8)
            if told["delta_encoding"] == "xor":
                region ^= plain
            else:
                count = int.from_bytes(frame[:4], "little")
                positions = numpy.frombuffer(frame, "<u4", count, 4)
                region[positions] = plain[4 + 4 * count :]
            if xxhash.xxh3_128_hexdigest(region.tobytes()) != checksums[name]:
                raise Refused(f"{name} of {folder} does not have its checksum")
            region.flush()
    _mark(sync, version)
