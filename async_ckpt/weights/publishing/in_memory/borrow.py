"""A version borrowed from the memory of its publisher, on the same host.

In: the token of a publisher. Out: tensors in its memory, compared with their checksums.
Knows nothing of: roots, the tensors' destination.

If a model is spread over ranks, each rank lends its slices. A version can be borrowed when all ranks lend it. While
some ranks already lend the next version and others do not yet, no version can be borrowed, and readers wait briefly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final, NamedTuple

import torch

from ....errors import CorruptCheckpointError
from ....plumbing import hf_shards, shared_memory, threads, timing, waits
from ...delta import checksum
from ...lent import LentVersion, loan_of_rank, parse_lent, table_bytes
from ..difference import checksum_of
from ..live_weights import PullResult
from ..of_ranks.pieces import TensorPiece, sliced_tensors
from ..of_ranks.root_versions import identity_of_ranks
from .fd_passing import received

# Ranks publish within moments of each other, unless one of them still writes the version before.
AGREEMENT_SECONDS: Final = 5.0
_FIRST_LOOK_SECONDS: Final = 0.002
_LOOK_SECONDS: Final = 0.1
_NOTHING: Final = torch.empty(0, dtype=torch.uint8, device="cpu")

_log: Final = logging.getLogger("async_ckpt")


class BorrowedVersion:
    """A version in the memory of its publisher, which does not overwrite it as long as it is borrowed.

    Created by `PublisherMemory.borrowed`, and used inside its block by one thread. `tensors` must not be written to.
    """

    def __init__(self, identity: str, parts: Sequence[tuple[LentVersion, list[torch.Tensor]]]) -> None:
        """`parts` are the tables of all ranks, each with its buffers.

        Raises ValueError if they do not cover whole tensors.
        """
        first, _ = parts[0]
        self.number, self.identity, self.adapter = first.version, identity, first.adapter
        self.files: Mapping[str, bytes] = first.files
        sliced = sliced_tensors([lent.slices_of_tensors for lent, _ in parts])
        self.kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in sliced.items()}
        self.tensors = {name: tensor.pieced(partial(_bytes_in, parts)) for name, tensor in sliced.items()}

    def read(self, crew: threads.Crew) -> PullResult:
        """Compare all bytes with their checksums. Raises CorruptCheckpointError."""

        def compare(name: str, piece: TensorPiece) -> None:
            if checksum_of(piece.values) != piece.checksum:
                raise CorruptCheckpointError(
                    f"version {self.number}, in the memory of its publisher: the bytes of {name!a:.200} are not "
                    "those that were published",
                    path="",
                    tensors=(name,),
                )

        pieces = [(name, piece) for name, tensor in self.tensors.items() for piece in tensor.pieces]
        crew.run_all(partial(compare, *one) for one in sorted(pieces, key=lambda one: -one[1].values.nbytes))
        return PullResult(None, 1, sum(piece.values.nbytes for _, piece in pieces))


def _bytes_in(
    parts: Sequence[tuple[LentVersion, list[torch.Tensor]]], rank: int, name: str
) -> tuple[torch.Tensor, str]:
    """The bytes of a rank's tensor in its buffer, and their checksum."""
    lent, buffers = parts[rank]
    place = lent.tensors[name]
    data = buffers[place.buffer][place.begin :] if place.num_bytes else _NOTHING
    return data[: place.num_bytes], place.checksum


class PublisherMemory:
    """The memory of a publisher, or of all its ranks, as seen by one reader.

    Any thread may call `newest`. Only one thread at a time may use the other methods.
    """

    def __init__(self) -> None:
        self._maps: list[shared_memory.ReadOnlyMaps] = []  # of each rank
        # The publisher's token and the last version that all ranks lent at the same time; replaced as a whole.
        self._agreed: tuple[str, tuple[int, str]] | None = None

    def newest(self, token: str, at_root: int | None) -> tuple[int, str] | None:
        """The lent version, which counts as the newest, and the identity of its weights; None if no version is lent.

        `at_root` is the newest version at the root. While the ranks change to the next version, the version that they
        lent before remains the newest until it is at the root.
        """
        with _loans(token) as loans:
            agreed = _version_of(loans)
        if agreed is not None or not loans:
            self._agreed = None if agreed is None else (token, agreed)
            return agreed
        before = self._agreed
        if before is None or before[0] != token or (at_root is not None and at_root >= before[1][0]):
            return None
        return before[1]

    @contextmanager
    def borrowed(self, token: str, version: int | None = None) -> Iterator[BorrowedVersion | None]:
        """The version that the publisher with this token lends, until the end of the block.

        None if the publisher lends no version, another version than the wanted one, or one that cannot be used.
        """
        deadline, pauses = (
            timing.TIMEKEEPER.now() + AGREEMENT_SECONDS,
            waits.growing_pauses(_FIRST_LOOK_SECONDS, _LOOK_SECONDS),
        )
        while True:
            with _loans(token) as loans:
                newest = max((loan.version for loan in loans), default=None)
                is_coming = bool(loans) and _version_of(loans) is None and version in (None, newest)
                if not is_coming or timing.TIMEKEEPER.now() > deadline:
                    yield self._found(loans, version)
                    return
            timing.TIMEKEEPER.sleep(next(pauses))

    def _found(self, loans: Sequence[_ReceivedLoan], version: int | None) -> BorrowedVersion | None:
        agreed = _version_of(loans)
        if not loans:
            self.drop()
        if agreed is None or version not in (None, agreed[0]):
            return None
        self._maps = [*self._maps, *(shared_memory.ReadOnlyMaps() for _ in loans[len(self._maps) :])][: len(loans)]
        try:
            parts = [_mapped(loan, maps) for loan, maps in zip(loans, self._maps, strict=True)]
            return BorrowedVersion(agreed[1], parts)
        except (OSError, ValueError, IndexError) as error:
            _log.warning("version %d in the memory of its publisher cannot be used: %s", agreed[0], error)
            return None

    def drop(self) -> None:
        """Unmap all buffers."""
        self._maps = []


class _ReceivedLoan(NamedTuple):
    """The message about a lent version, with the descriptors of its memory."""

    version: int
    identity: str  # of the slices, if the model is spread over ranks
    digest: str  # of the table
    num_ranks: int  # over which the model is spread; 0 for a whole model
    start: str  # of all ranks; empty for a whole model
    fds: list[int]


@contextmanager
def _loans(token: str) -> Iterator[list[_ReceivedLoan]]:
    """The loans of a publisher, one from each of its ranks, until the end of the block.

    Empty if one of them lends nothing.
    """
    with ExitStack() as stack:
        loans: list[_ReceivedLoan] = []
        while token and len(loans) < (loans[0].num_ranks or 1 if loans else 1):
            found = stack.enter_context(received(loan_of_rank(token, len(loans))))
            loan = None if found is None else _parsed(*found)
            if loan is None:
                loans = []
                break
            loans.append(loan)
        yield loans


def _version_of(loans: Sequence[_ReceivedLoan]) -> tuple[int, str] | None:
    """The common version of these loans, and the identity of its weights; None if there is no common version."""
    if len({(loan.version, loan.num_ranks, loan.start) for loan in loans}) != 1:
        return None
    first = loans[0]
    if not first.num_ranks:
        return first.version, first.identity
    return first.version, identity_of_ranks(loan.identity for loan in loans)


def _mapped(loan: _ReceivedLoan, maps: shared_memory.ReadOnlyMaps) -> tuple[LentVersion, list[torch.Tensor]]:
    """The table of a loan, and its mapped buffers. Raises OSError, ValueError, IndexError."""
    table, buffers = shared_memory.map_shared(loan.fds[0]), maps.of(loan.fds[1:])
    data = hf_shards.view_of(table)
    if checksum(data[: table_bytes(data)]) != loan.digest:
        raise ValueError("its table is not the one that was published")
    return parse_lent(data, [len(buffer) for buffer in buffers]), buffers


def _parsed(message: bytes, fds: list[int]) -> _ReceivedLoan | None:
    match message.decode(errors="replace").split(" "):
        case [version, identity, digest, num_ranks, start] if version.isdecimal() and num_ranks.isdecimal():
            return _ReceivedLoan(int(version), identity, digest, int(num_ranks), start, fds)
    return None
