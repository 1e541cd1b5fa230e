"""The tensors of a version on the host of a receiver: in the memory of the sender, or in a folder of this host.

In: the root of a publisher, and a version. Out: its tensors by name, while they are used. Knows nothing of: verl.

The memory of the sender is mapped, not copied. On other hosts, one folder serves all receivers: the first one pulls
into it, and all map its files. A receiver holds a shared lock on the folder while it reads, so that no pull changes the
files.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from ... import Place, load
from ...errors import (
    ClosedError,
    CorruptCheckpointError,
    NotCommittedError,
    PeerFailedError,
    StorageUnavailableError,
)
from ...plumbing import backends, disk, timing
from ...weights.following.shared_folder import SharedFolder
from ...weights.publishing.in_memory.borrow import PublisherMemory
from ...weights.publishing.live_weights import new_crew
from ...weights.publishing.subscriber import Subscriber
from ...weights.publishing.versions import Versions
from .blocking_calls import off_loop
from .sync_line import Address, ReceiverLine, SentVersion

Item = tuple[str, torch.Tensor]
Tensors = Mapping[str, torch.Tensor]

# How many times to pull a version that other processes replace at once by another version.
_TRIES: Final = 10


class WeightReceiver:
    """The receiver of one worker. One coroutine at a time uses it.

    `folder` is this host's folder, by default inside the folder for temporary files.
    """

    def __init__(self, root: Place, folder: str | None, timeout_seconds: float) -> None:
        self._root, self._given, self._timeout_seconds = root, folder, timeout_seconds
        self._line: ReceiverLine | None = None
        self._last: SentVersion | None = None  # received last, perhaps in part
        self._versions = Versions(root.storage())
        self._subscriber = Subscriber(root)
        self._memory = PublisherMemory()  # of the sender

    def connect(self, address: Address) -> None:
        """Connect to the sender for one sync. Raises PeerFailedError."""
        self.hang_up()
        self._line = ReceiverLine(address, self._timeout_seconds)

    def hang_up(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None

    async def receive(self, number: int | None) -> AsyncIterator[Item]:
        """The tensors of the version that the sender announces. Raises PeerFailedError for another `number`."""
        line = self._line
        if line is None:
            raise RuntimeError("receive_weights was called outside of a sync; call init_process_group before")
        version = SentVersion(*await line.wait_for("version"))
        if number not in (None, version.number):
            raise PeerFailedError(
                f"rank 0 of the training has sent version {version.number}, but {number} was expected; call "
                "update_weights with the same global_steps everywhere",
                rank=0,
            )
        self._last = version
        async for item in self._tensors(version, lambda: line.wait_for("durable")):
            yield item

    async def again(self) -> AsyncIterator[Item]:
        """The tensors of the version that was received last. Raises NotCommittedError if there is none."""
        if self._last is None:
            raise NotCommittedError("no weights were received yet; call receive_weights before", path=self._root.shown)
        async for item in self._tensors(self._last, _nothing_to_wait_for):
            yield item

    async def _tensors(self, version: SentVersion, durable: Callable[[], Awaitable[Any]]) -> AsyncIterator[Item]:
        device = backends.accelerator()
        async with self._opened(version, durable) as tensors:
            for name, tensor in tensors.items():
                yield name, tensor if device is None else tensor.to(device)

    @asynccontextmanager
    async def _opened(self, version: SentVersion, durable: Callable[[], Awaitable[Any]]) -> AsyncIterator[Tensors]:
        """The tensors of a version, compared with their checksums. They must not be written to.

        If the version is not in memory, `durable` waits until it is at the root.
        """
        with ExitStack() as stack:
            tensors = await off_loop(partial(stack.enter_context, self._in_memory(version)))
            if tensors is None:
                await durable()
                tensors = await off_loop(partial(stack.enter_context, self._in_folder(version)))
            yield tensors

    @contextmanager
    def _in_memory(self, version: SentVersion) -> Iterator[Tensors | None]:
        with self._memory.borrowed(version.token, version.number) as found:
            if found is None:
                yield None
                return
            crew = new_crew()
            try:
                found.read(crew)
            except CorruptCheckpointError:
                yield None
                return
            finally:
                crew.stop()
            yield {name: tensor.whole() for name, tensor in found.tensors.items()}

    @contextmanager
    def _in_folder(self, version: SentVersion) -> Iterator[Tensors]:
        folder = _default_folder(self._versions.root) if self._given is None else Path(self._given).absolute()
        shared, deadline = SharedFolder(folder, "verl"), timing.TIMEKEEPER.now() + self._timeout_seconds
        for _ in range(_TRIES):
            if self._versions.owner_token(fresh=True) != version.token:
                raise ClosedError(
                    f"{self._versions.root}: another training has taken this root; give each training a root of its own"
                )
            self._subscriber.pull(folder, version.number)
            with shared.loading(lambda: timing.TIMEKEEPER.now() > deadline) as turn:
                if turn is None:
                    raise TimeoutError(
                        f"another process has been pulling into {folder} for {self._timeout_seconds:g} s; see what it "
                        "does"
                    )
                held = shared.held()
                if held is not None and held.version == version.number:
                    yield load(folder, mmap=True, verify=False)
                    return
        raise StorageUnavailableError(
            f"{folder}: other processes pull other versions into it; give this training another folder (cache)",
            path=str(folder),
        )


async def _nothing_to_wait_for() -> None:
    return None


def _default_folder(root: str) -> Path:
    """A folder of this user, the same for all processes of the host that follow this root.

    Raises StorageUnavailableError if another user owns it or may write to it, and so could change the weights.
    """
    user = os.getuid() if hasattr(os, "getuid") else 0
    parent = Path(tempfile.gettempdir(), f"async_ckpt-weights-{user}")
    with disk.translated(parent):
        with suppress(FileExistsError):
            os.mkdir(parent, 0o700)
        status = os.lstat(parent)
    if hasattr(os, "getuid") and (status.st_uid != user or status.st_mode & 0o022 or parent.is_symlink()):
        raise StorageUnavailableError(
            f"{parent} belongs to another user, or others may write to it; give a folder of your own (cache)",
            path=str(parent),
        )
    return parent / hashlib.sha256(root.encode()).hexdigest()[:16]
