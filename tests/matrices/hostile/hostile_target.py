"""A parser that takes bytes from outside, as the hostile inputs meet it: one function, and the errors that it may raise.

In: bytes. Out: nothing, or one of the documented errors. Knows nothing of: where the bytes come from, who looks on.

An input that begins with `!` is given to the parser as it is. Any other input is what lies behind the outermost check: the
target puts it together with the right lengths, checksums and digests first, or nearly all inputs would be refused by those.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Form = Literal["json", "lines", "pickle", "tar", "words", "bytes"]
AS_IS = b"!"


@dataclass(frozen=True, slots=True)
class Target:
    """One parser. `errors` are those that its documentation names."""

    name: str
    run: Callable[[bytes], object]
    errors: tuple[type[BaseException], ...]
    form: Form
    """How inputs are changed: by their tree of JSON, their instructions, their words …"""
    seeds: Callable[[], list[bytes]]
    """Inputs that the parser accepts, or nearly."""
    share: int = 4
    """Of all inputs, in relation to the shares of the other targets: parsers that open files take longer."""
    max_bytes: int = 4096
    reads_anywhere: bool = False
    """Whether a path in the input is the user's own, which the parser may look at."""


def unwrapped(data: bytes) -> bytes | None:
    """The bytes that a parser is to be given as they are; None if they have to be sealed first."""
    return data[1:] if data.startswith(AS_IS) else None


class Scratch:
    """The only folder in which a target may read and write: in memory, one for each process."""

    folder = Path()

    @classmethod
    def begin(cls, inside: Path | None = None) -> Path:
        memory = Path("/dev/shm")
        cls.folder = Path(tempfile.mkdtemp(prefix="hostile-", dir=inside or (memory if memory.is_dir() else None)))
        return cls.folder

    @classmethod
    def end(cls) -> None:
        shutil.rmtree(cls.folder, ignore_errors=True)

    @classmethod
    def emptied(cls) -> Path:
        """The folder `input` in it, empty."""
        inner = cls.folder / "input"
        shutil.rmtree(inner, ignore_errors=True)
        inner.mkdir()
        return inner

    @classmethod
    def file(cls, data: bytes, name: str = "x") -> Path:
        path = cls.folder / name
        path.write_bytes(data)
        return path
