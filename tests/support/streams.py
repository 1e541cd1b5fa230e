"""A stream of versions as slime's trainer writes it: numpy, zstandard and xxhash, and nothing of this library.

By the description of its protocol: version 0 is the engine's own model, which is in no folder of the stream; each version is a delta
against the one before, and its index is written last. A training that begins again begins with version 1, in an empty folder.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash
import zstandard
from safetensors.numpy import save_file

INDEX = "model.safetensors.index.json"
Weights = dict[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().copy()


def checksum(data: Any, how: str) -> str:
    if how == "adler32":
        return f"{zlib.adler32(data.tobytes()):08x}"
    if how == "blake3":
        import blake3

        return str(blake3.blake3(data.tobytes()).hexdigest())
    return xxhash.xxh3_128_hexdigest(data.tobytes())


class Stream:
    """What was published, by its number."""

    def __init__(
        self,
        root: Path,
        base: Mapping[str, torch.Tensor],
        *,
        encoding: str = "xor",
        checksums: str = "xxh3-128",
    ) -> None:
        self.root, self.encoding, self.checksums = root, encoding, checksums
        self.were: dict[int, Weights] = {0: {name: tensor.clone() for name, tensor in base.items()}}

    def folder(self, version: int) -> Path:
        return self.root / f"weight_v{version:06d}"

    def publish(self, changed: Mapping[str, torch.Tensor]) -> int:
        """One more version, in which these tensors are others."""
        version = max(self.were) + 1
        old, new = (
            self.were[version - 1],
            {**self.were[version - 1], **{n: t.clone() for n, t in changed.items()}},
        )
        frames, sums = {}, {}
        for name, tensor in changed.items():
            now, before = raw(tensor), raw(old[name])
            if (now != before).any():
                frames[name] = numpy.frombuffer(self._frame(now, before), numpy.uint8)
                sums[name] = checksum(now, self.checksums)
        self.folder(version).mkdir(parents=True)
        file = "model-00000-of-00001.safetensors"
        if frames:
            save_file(frames, self.folder(version) / file, metadata=sums)
        told = {
            "version": f"{version:06d}", "base_version": f"{version - 1:06d}", "delta_encoding": self.encoding,
            "compression_format": "zstd", "checksum_format": self.checksums,
        }  # fmt: skip
        index = {"metadata": told, "weight_map": dict.fromkeys(frames, file)}
        (self.folder(version) / INDEX).write_text(json.dumps(index))
        self.were[version] = new
        return version

    def _frame(self, now: Any, before: Any) -> bytes:
        plain = now ^ before
        if self.encoding == "overwrite":
            at = numpy.flatnonzero(plain).astype("<u4")
            count = numpy.array([at.size], "<u4")
            plain = numpy.concatenate([count.view(numpy.uint8), at.view(numpy.uint8), now[at]])
        return zstandard.ZstdCompressor(level=1).compress(plain.tobytes())
