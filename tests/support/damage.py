"""An archive to damage, what is put in it, and how it is refused."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from archives import assemble, parsed_index, read_index

import async_ckpt
from async_ckpt import CheckpointError
from async_ckpt.core.format import index, tar

STATE: dict[str, Any] = {
    "m": {
        "w": torch.arange(10.0), "tied": None, "b": torch.ones(3, dtype=torch.bfloat16), "z": torch.tensor([1j]),
        "a": np.arange(3, dtype=">i2"),
    },
    "seen": bytearray(b"12"),
    "n": -1.5,
}  # fmt: skip
STATE["m"]["tied"] = STATE["m"]["w"]


def assert_refused(path: Path, kind: type[CheckpointError] = CheckpointError, **how: Any) -> CheckpointError:
    with pytest.raises(kind) as caught:
        async_ckpt.load(path, **how)
    assert str(path) in str(caught.value)
    assert caught.value.path == str(path)
    return caught.value


NUM_LIES = int(os.environ.get("ASYNC_CKPT_FUZZ", "600"))


def refusal(read: Callable[[], None]) -> Exception | None:
    try:
        read()
    except Exception as error:
        return error
    return None


def objects_swapped(path: Path, pickled: bytes) -> None:
    """The archive with another `objects.pt`, its size and digests made right."""
    honest = parsed_index(path)
    data = path.read_bytes()
    told = honest.member(index.OBJECTS)
    assert told is not None
    raw = read_index(path)
    raw["members"][-1][1] = len(pickled)
    between = data[honest.members[0].data.offset - tar.BLOCK : told.data.offset - tar.BLOCK]
    between += tar.header(index.OBJECTS, len(pickled), mtime=0) + pickled + bytes(tar.padding_after(len(pickled)))
    path.write_bytes(assemble(json.dumps(raw).encode(), between))


def torch_saved(value: Any, **how: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **how)
    return buffer.getvalue()
