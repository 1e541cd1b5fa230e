"""The difference between two states of one tensor, byte by byte.

In: a tensor and the bytes that it had. Out: a frame; and from a frame the new bytes, in place of the old ones.
Knows nothing of: names, versions, where frames come from.

Tensors are processed in pieces that fit the processor's cache, so that memory is read once. Bytes are compared, not
values, so a NaN is equal to itself, and differs from a NaN with other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import xxhash

from ...plumbing import compressed, device, hf_shards, spec
from ..delta import (
    COUNT_BYTES,
    MAX_OVERWRITTEN_BYTES,
    OUR_CHECKSUMS,
    POSITION_BYTES,
    Encoding,
    new_hash,
)

_PIECE_BYTES: Final = spec.MIB
# The number of positions processed at once: as int64 indices they need eight times the memory of the bytes there.
_NUM_AT_ONCE: Final = 2**18
# The level that other writers of this format use.
_LEVEL: Final = 1
# An xor is mostly zeros, between single items without matches. A small hash table, which stays in the first-level
# cache, finds as many matches, and all of them are near. Frames are a fifth smaller, and a quarter faster to compute.
_XOR_PARAMETERS: Final = {"window_log": 17, "hash_log": 10}


class WrongBaseError(ValueError):
    """A frame is damaged, or was not made for these bytes."""


def checksum_of(tensor: torch.Tensor, checksum_format: str = OUR_CHECKSUMS) -> str:
    """The checksum of a tensor's bytes in dense order."""
    digest = new_hash(checksum_format)
    for _, block in device.dense_blocks(tensor, 0, tensor.nbytes):
        digest.update(hf_shards.view_of(block))
    return str(digest.hexdigest())


def encode(new: torch.Tensor, base: torch.Tensor, encoding: Encoding) -> tuple[bytes, str] | None:
    """A frame, and the checksum of the new bytes; None if no byte has changed. `base` is dense, of dtype uint8.

    Raises ValueError for a tensor that is too large for the encoding.
    """
    if all(torch.equal(piece, base[at : at + len(piece)]) for at, piece in _pieces(new)):
        return None
    if encoding == "xor":
        return _encode_xor(new, base)
    if new.nbytes > MAX_OVERWRITTEN_BYTES:
        raise ValueError(
            f'it has {new.nbytes:,} bytes, and encoding="overwrite" can address {MAX_OVERWRITTEN_BYTES:,}; use "xor"'
        )
    return _encode_overwrite(new, base)


def apply(
    data: memoryview,
    region: torch.Tensor,
    encoding: Encoding,
    wanted: str,
    checksum_format: str = OUR_CHECKSUMS,
) -> Callable[[], None]:
    """Turn the base's bytes into the new ones, in place. Returns a function that restores the old ones.

    Raises WrongBaseError if the result does not have the wanted checksum, or if the frame is damaged. The region then
    has its old bytes.
    """
    return (_apply_xor if encoding == "xor" else _apply_overwrite)(data, region, wanted, checksum_format)


def _pieces(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for begin, block in device.dense_blocks(tensor, 0, tensor.nbytes):
        for at in range(0, block.numel(), _PIECE_BYTES):
            yield begin + at, block[at : at + _PIECE_BYTES]


# --- xor ----------------------------------------------------------------------------------------------------------


def _encode_xor(new: torch.Tensor, base: torch.Tensor) -> tuple[bytes, str]:
    library = compressed.zstandard_package()
    parameters = library.ZstdCompressionParameters.from_level(_LEVEL, source_size=new.nbytes, **_XOR_PARAMETERS)
    compressor = library.ZstdCompressor(compression_params=parameters).compressobj(size=new.nbytes)
    digest, scratch, out = xxhash.xxh3_128(), torch.empty(_PIECE_BYTES, dtype=torch.uint8), []
    for at, piece in _pieces(new):
        changed = scratch[: len(piece)]
        torch.bitwise_xor(piece, base[at : at + len(piece)], out=changed)
        out.append(compressor.compress(hf_shards.view_of(changed)))
        digest.update(hf_shards.view_of(piece))
    out.append(compressor.flush())
    return b"".join(out), digest.hexdigest()


def _apply_xor(data: memoryview, region: torch.Tensor, wanted: str, checksum_format: str) -> Callable[[], None]:
    digest, num_done = new_hash(checksum_format), 0
    try:
        for piece in _unpacked(data):
            part = region[num_done : num_done + len(piece)]
            if len(part) < len(piece):
                raise WrongBaseError("the frame is longer than the tensor")
            torch.bitwise_xor(part, piece, out=part)
            num_done += len(piece)
            digest.update(hf_shards.view_of(part))
        if num_done < len(region):
            raise WrongBaseError("the frame is shorter than the tensor")
        if digest.hexdigest() != wanted:
            raise WrongBaseError("the new bytes do not have the checksum that they should")
    except BaseException:
        _xor_again(data, region[:num_done])
        raise
    return lambda: _xor_again(data, region)


def _xor_again(data: memoryview, region: torch.Tensor) -> None:
    """Undo a change by applying it again."""
    at = 0
    for piece in _unpacked(data) if len(region) else ():
        part = region[at : at + len(piece)]
        torch.bitwise_xor(part, piece[: len(part)], out=part)
        at += len(part)
        if at == len(region):
            break


def _unpacked(data: memoryview) -> Iterator[torch.Tensor]:
    """The decompressed bytes of a frame, in pieces. Each piece is overwritten by the next."""
    library: Any = compressed.zstandard_package()
    scratch = torch.empty(_PIECE_BYTES, dtype=torch.uint8)
    view = hf_shards.view_of(scratch)
    with library.ZstdDecompressor().stream_reader(data) as reader:
        while True:
            try:
                num_read = reader.readinto(view)
            except library.ZstdError as error:
                raise WrongBaseError(f"the frame is damaged ({error})") from error
            if not num_read:
                return
            yield scratch[:num_read]


# --- overwrite ----------------------------------------------------------------------------------------------------


def overwritten_bytes(new: torch.Tensor, base: torch.Tensor) -> int:
    """The size of an overwrite frame before compression; 0 if no byte has changed."""
    count = sum(int(torch.count_nonzero(piece != base[at : at + len(piece)])) for at, piece in _pieces(new))
    return COUNT_BYTES + (POSITION_BYTES + 1) * count if count else 0


def _encode_overwrite(new: torch.Tensor, base: torch.Tensor) -> tuple[bytes, str]:
    """Compress positions as they are found: they may need eight times the memory of the values, which are kept."""
    num_bytes = overwritten_bytes(new, base)
    count = (num_bytes - COUNT_BYTES) // (POSITION_BYTES + 1)
    compressor = compressed.zstandard_package().ZstdCompressor(level=_LEVEL).compressobj(size=num_bytes)
    digest, values = xxhash.xxh3_128(), []
    out = [compressor.compress(count.to_bytes(COUNT_BYTES, "little"))]
    for at, piece in _pieces(new):
        inner = torch.nonzero(piece != base[at : at + len(piece)]).flatten()
        low = (inner + at).view(torch.uint8).view(-1, 8)[:, :POSITION_BYTES].reshape(-1)
        out.append(compressor.compress(hf_shards.view_of(low)) if len(low) else b"")
        values.append(piece[inner])
        digest.update(hf_shards.view_of(piece))
    out += [compressor.compress(hf_shards.view_of(part)) for part in values if len(part)]
    out.append(compressor.flush())
    return b"".join(out), digest.hexdigest()


def _apply_overwrite(data: memoryview, region: torch.Tensor, wanted: str, checksum_format: str) -> Callable[[], None]:
    positions, values = _overwritten(data, len(region))
    # All old values are read before the first change, because a damaged frame may contain a position twice.
    old = [region[indices] for indices, _ in _changes(positions, values)]
    for indices, new in _changes(positions, values):
        region[indices] = new
    del positions, values

    def undo() -> None:
        again = _changes(*_overwritten(data, len(region)))
        for (indices, _), values in zip(again, old, strict=True):
            region[indices] = values

    if checksum_of(region, checksum_format) != wanted:
        undo()
        raise WrongBaseError("the new bytes do not have the checksum that they should")
    return undo


def _changes(positions: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Positions as indices, and their values, in batches that limit the memory of the indices."""
    for at in range(0, len(positions), _NUM_AT_ONCE):
        indices = positions[at : at + _NUM_AT_ONCE].to(torch.int64) & (MAX_OVERWRITTEN_BYTES - 1)
        yield indices, values[at : at + _NUM_AT_ONCE]


def _overwritten(data: memoryview, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions and values in a frame. Raises WrongBaseError if they do not fit a tensor of `num_bytes`."""
    plain, size = torch.empty(COUNT_BYTES, dtype=torch.uint8), 0
    count: int | None = None
    for piece in _unpacked(data):
        while len(piece):
            if size == len(plain):
                raise WrongBaseError("the frame is longer than the tensor, or than it says")
            part = piece[: len(plain) - size]
            plain[size : size + len(part)] = part
            size, piece = size + len(part), piece[len(part) :]
            if count is None and size == COUNT_BYTES:
                count = int.from_bytes(bytes(plain.tolist()), "little")
                if count > num_bytes:
                    raise WrongBaseError("the frame does not hold as many positions and values as it says")
                head, plain = plain, torch.empty(COUNT_BYTES + (POSITION_BYTES + 1) * count, dtype=torch.uint8)
                plain[:COUNT_BYTES] = head
    if count is None or size != len(plain):
        raise WrongBaseError("the frame does not hold as many positions and values as it says")
    begin = COUNT_BYTES + POSITION_BYTES * count
    positions, values = plain[COUNT_BYTES:begin].view(torch.int32), plain[begin:]
    if any(int(indices.max()) >= num_bytes for indices, _ in _changes(positions, values)):
        raise WrongBaseError("the frame has positions outside of the tensor")
    return positions, values
