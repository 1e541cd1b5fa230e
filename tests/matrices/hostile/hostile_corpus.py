"""The inputs that are kept: for each target those that met lines of the library which no smaller one met, in `corpus/<target>.zip`.

In: inputs. Out: the same from a file. Knows nothing of: what they mean.
"""

import io
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from .hostile_target import Target

CORPUS = Path(__file__).parent / "corpus"
SOUND, FAULT = "sound", "fault"
"""How the names of inputs begin that the library itself has written, and of those that have once shown a fault of it. All stay."""
BESIDE = "beside"
"""Files that lie beside an input, such as those that an index names."""


def path_of(name: str) -> Path:
    return CORPUS / f"{name.replace(' ', '-')}.zip"


def kept(name: str) -> dict[str, bytes]:
    """The inputs of a target by their names in the file."""
    path = path_of(name)
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def keep(name: str, inputs: Mapping[str, bytes]) -> None:
    """Write the inputs of a target; equal inputs make equal files."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for key, data in inputs.items():
            archive.writestr(zipfile.ZipInfo(key), data, zipfile.ZIP_DEFLATED, 9)
    CORPUS.mkdir(exist_ok=True)
    path_of(name).write_bytes(out.getvalue())


def fewest(sound: Iterable[bytes], inputs: Iterable[bytes], run: Callable[[bytes], Any], most: int) -> list[bytes]:
    """The smallest inputs that together meet all lines of the library that any of them meets and no sound one does; at most so many."""
    met: set[Any] = set().union(*(lines_of(data, run) for data in sound))
    chosen: list[bytes] = []
    for data in sorted(set(inputs), key=lambda one: (len(one), one)):
        lines = lines_of(data, run)
        if lines - met:
            met |= lines
            chosen.append(data)
    return chosen[:most]


def lines_of(data: bytes, run: Callable[[bytes], Any]) -> set[Any]:
    """The lines of the library that one input meets, and what they lead to next."""
    lines: set[Any] = set()

    def in_frame(frame: FrameType, event: str, argument: Any) -> Any:
        lines.add((frame.f_code.co_name, frame.f_lineno))
        return in_frame

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        return in_frame(frame, event, argument) if "/async_ckpt/" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run(data)
    finally:
        sys.settrace(before)
    return lines


def inputs_of(target: Target) -> list[bytes]:
    return [*kept(target.name).values()] or [b""]
