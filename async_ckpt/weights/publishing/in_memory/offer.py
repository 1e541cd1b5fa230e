"""The newest version of a publisher, lent in shared memory to processes of this host and user.

In: weights on the host. Out: a loan, by a name. Knows nothing of: roots, readers, other ranks.

Weights in shared memory are lent without a copy; other weights are copied to shared memory once. A version is not
overwritten while a process reads it, and the publisher does not wait for readers: the next version is in other memory.
While readers have two earlier versions, no third version is lent, and readers pull from the root. So a slow, stopped or
stuck reader only costs memory.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import torch

from ....plumbing import backends, kept_memory, leaf_names, limits, threads
from ....plumbing import memory as host_memory
from ...delta import checksum, identity_of
from ...lent import LentTensor, LentVersion, dump_lent
from ..difference import checksum_of
from ..live_weights import copy_all, regions_in
from .fd_passing import Giver, Handout

_MAX_LOANS: Final = 2
# Each buffer has a descriptor, and a message can have 253 descriptors.
_MAX_BUFFERS: Final = 64
_MAX_THREADS: Final = 8

_log: Final = logging.getLogger("async_ckpt")


class MemoryOffer:
    """The version that a publisher lends. Created and owned by a `Publisher`.

    Only the publication whose turn it is calls `offer`, on a helper thread. Until `close`, copies are made in shared
    memory. If memory is short for a snapshot, the lent version is withdrawn, and the snapshot uses its memory.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._giver: Giver | None = None
        self._has_warned = False
        self._is_closed = False
        kept_memory.host_memory().share(self.withdraw)

    def offer(
        self,
        name: str,
        version: LentVersion,
        tensors: Mapping[str, torch.Tensor],
        check: Callable[[], None],
        *,
        num_ranks: int = 0,
    ) -> Mapping[str, str] | None:
        """Lend a version with these tensors in place of the previous one. Returns the checksums of all tensors.

        `version` does not contain the positions of its tensors yet. For a model that is spread over ranks, `tensors`
        are those of this rank, and `num_ranks` is the number of ranks. Returns None if nothing is lent: after a warning
        if the tensors cannot be, or after `close`.
        """
        crew = threads.Crew("offer", min(_MAX_THREADS, limits.num_cpus()), background=True)
        try:
            if self._giver is None:
                self._giver = Giver(name)
            if self._is_closed:  # the publisher was dropped while this version was published
                self._giver.close()
                return None
            if self._giver.num_loans >= _MAX_LOANS:
                raise OSError(f"{_MAX_LOANS} earlier versions are still being read; end readers that are stuck")
            shared = self._in_shared_memory(tensors, crew)
            checksums = _checksums(shared, crew, check)
            self._giver.put(_loan(version, shared, checksums, num_ranks))
        except (OSError, MemoryError, RuntimeError) as error:
            check()
            self.withdraw()
            if not self._has_warned:
                _log.warning(
                    "version %d cannot be read from memory (%s); readers on this host take it from the root",
                    version.version,
                    error,
                )
            self._has_warned = True
            return None
        except BaseException:
            self.withdraw()
            raise
        finally:
            crew.stop()
        self._has_warned = False
        return checksums

    def _in_shared_memory(self, tensors: Mapping[str, torch.Tensor], crew: threads.Crew) -> dict[str, torch.Tensor]:
        """The tensors, all dense and in shared memory."""
        homes = {name: _home(tensor) for name, tensor in tensors.items()}
        used: Counter[host_memory.HostBuffer] = Counter()
        for name, home in homes.items():
            if home is not None:
                used[home] += tensors[name].nbytes
        # A buffer is lent as a whole. If most of it is an optimizer's state, copying the weights needs less memory.
        kept = {home for home, num_bytes in used.most_common(_MAX_BUFFERS) if 2 * num_bytes >= home.num_bytes}
        others = [name for name, home in homes.items() if home not in kept and tensors[name].numel()]
        return {**tensors, **(self._copied({name: tensors[name] for name in others}, crew) if others else {})}

    def _copied(self, tensors: Mapping[str, torch.Tensor], crew: threads.Crew) -> dict[str, torch.Tensor]:
        regions = regions_in({name: tensor.nbytes for name, tensor in tensors.items()}, self._allocate)
        copy_all(tensors, regions, crew)
        return {name: regions[name].view(tensor.dtype).view(tensor.shape) for name, tensor in tensors.items()}

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        memory = kept_memory.host_memory().lend(num_bytes, max_bytes=self._max_bytes, shared=True)
        if host_memory.shared_buffer_of(memory.data_ptr(), num_bytes) is None:
            raise OSError("the system has no shared memory")
        return memory

    def withdraw(self) -> None:
        """Lend nothing until the next version. Earlier loans continue. May be called from any thread."""
        if self._giver is not None:
            self._giver.put(None)

    def close(self) -> None:
        """Stop lending. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._giver is not None:
            self._giver.close()
        kept_memory.host_memory().unshare(self.withdraw)


def _home(tensor: torch.Tensor) -> host_memory.HostBuffer | None:
    """The shared buffer that contains a tensor; None if the tensor has to be copied."""
    if not tensor.numel() or not backends.is_dense(tensor) or tensor.data_ptr() % tensor.element_size():
        return None
    return host_memory.shared_buffer_of(tensor.data_ptr(), tensor.nbytes)


def _checksums(tensors: Mapping[str, torch.Tensor], crew: threads.Crew, check: Callable[[], None]) -> dict[str, str]:
    checksums = dict.fromkeys(tensors, "")

    def add(name: str) -> None:
        check()
        checksums[name] = checksum_of(tensors[name])

    crew.run_all(partial(add, name) for name in sorted(tensors, key=lambda name: -tensors[name].nbytes))
    return checksums


def _loan(
    version: LentVersion, tensors: Mapping[str, torch.Tensor], checksums: Mapping[str, str], num_ranks: int
) -> Handout:
    buffers: dict[host_memory.HostBuffer, int] = {}
    rows = {}
    for name, tensor in tensors.items():
        number, begin = 0, 0
        home = host_memory.shared_buffer_of(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else None
        if home is not None:
            number, begin = buffers.setdefault(home, len(buffers)), tensor.data_ptr() - home.address
        rows[name] = LentTensor(
            leaf_names.dtype_name(tensor.dtype), tuple(tensor.shape), number, begin, checksums[name]
        )
    identity = identity_of(checksums)
    data = dump_lent(replace(version, identity=identity, tensors=rows))
    table = host_memory.HostBuffer(len(data), shared=True)
    table.view[:] = data
    fds = [buffer.fd for buffer in (table, *buffers) if buffer.fd is not None]
    # The tensors, not their buffers, keep the memory from being reused for the next copy.
    message = f"{version.version} {identity} {checksum(data)} {num_ranks} {version.slices.start}".encode()
    return Handout(message, tuple(fds), (table, list(tensors.values())))
