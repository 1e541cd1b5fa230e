"""Rank 0 of the training: it publishes the weights of a sync as a version, and notifies the receivers.

In: the export of a model, tensor by tensor. Out: a version at a root, and in memory. Knows nothing of: verl, receivers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Any, Final

import torch

from ... import Place, SaveHandle
from ...plumbing import shared_memory, timing
from ...weights.publishing.publisher import Publisher
from ...weights.publishing.versions import Versions
from .blocking_calls import off_loop
from .gathered import GatheredWeights
from .sync_line import Address, SenderLine, SentVersion

# The options of a Publisher that a configuration may set, with their defaults.
_OPTIONS: Final = {"anchor_every": 20, "keep": 5, "encoding": "xor", "host_bytes": None}

_log: Final = logging.getLogger("async_ckpt")


class WeightSender:
    """The sender of one training, which owns its publisher. Used by the coroutine of one sync at a time.

    `address` is the address of this host; `bucket_bytes` is the size of a buffer in the first sync.
    """

    def __init__(
        self, root: Place, address: str, bucket_bytes: int, *, local: bool | None, options: Mapping[str, Any]
    ) -> None:
        if unknown := sorted(options.keys() - _OPTIONS.keys()):
            raise ValueError(f"publisher has no option {unknown[0]!r}; there are {', '.join(_OPTIONS)}")
        self._root, self._local = root, shared_memory.CAN_SHARE if local is None else local
        self._options: dict[str, Any] = {**_OPTIONS, **options}
        Publisher(root, local=self._local, **self._options).close()  # raises for options that are not valid
        self._publisher: Publisher | None = None  # created when the dtypes of the weights are known
        self._versions = Versions(root.storage())
        self._room_bytes = bucket_bytes
        self._line = SenderLine(address)

    def begin(self) -> Address:
        """Begin a sync. Returns the address that its receivers connect to."""
        return self._line.begin()

    async def send(
        self, address: Address, weights: AsyncIterator[tuple[str, torch.Tensor]], version: int | None, *,
        durably: bool, timeout_seconds: float,
    ) -> dict[str, float]:  # fmt: skip
        """Publish the weights, and notify the receivers of the sync, also of an error. Returns figures.

        Returns when a receiver on this host can read the version; with `durably`, when all receivers can.
        """
        begun = timing.monotonic()
        try:
            gathered = await self._gather(weights)
            gathered_at = timing.monotonic()
            async with asyncio.timeout(timeout_seconds):
                handle = await self._publish(address, gathered, version, timeout_seconds)
                if durably:
                    await handle
        except TimeoutError as error:
            late = TimeoutError(
                f"{self._root.shown}: no receiver can read the weights after {timeout_seconds:g} s; see whether the "
                "root is slow, or raise timeout_seconds"
            )
            self._line.send(address, {"error": str(late)})
            raise late from error
        except BaseException as error:
            self._line.send(address, {"error": f"{type(error).__name__}: {error}"})
            raise
        return {
            "async_ckpt/num_bytes": float(gathered.num_bytes),
            "async_ckpt/gather_seconds": gathered_at - begun,
            "async_ckpt/publish_seconds": timing.monotonic() - gathered_at,
        }

    async def _gather(self, weights: AsyncIterator[tuple[str, torch.Tensor]]) -> GatheredWeights:
        """Copy all weights to host memory. After an error, the export still runs to its end, since it is collective."""
        gathered = GatheredWeights(self._room_bytes, shared=self._local, max_bytes=self._options["host_bytes"])
        failed = None
        async for name, tensor in weights:
            try:
                if failed is None:
                    gathered.add(name, tensor)
            except Exception as error:
                failed = error
                gathered.drop()
        if failed is not None:
            raise failed
        self._room_bytes = gathered.room_for_all
        return gathered

    async def _publish(
        self, address: Address, gathered: GatheredWeights, version: int | None, timeout_seconds: float
    ) -> SaveHandle:
        """Publish weights as a version, and notify the receivers once it can be read on this host."""
        publisher = self._publisher = self._publisher or self._new_publisher(gathered)
        number = max(await off_loop(publisher.versions), default=-1) + 1 if version is None else version
        handle = publisher.publish(gathered.snapshot(), number)
        await off_loop(lambda: publisher.wait_readable(number, timeout_seconds))
        token = await off_loop(lambda: self._versions.owner_token(fresh=True))
        self._line.send(address, {"version": SentVersion(number, token)})
        handle.add_done_callback(partial(_report_durable, self._line, address))
        return handle

    def _new_publisher(self, gathered: GatheredWeights) -> Publisher:
        # Where nearly every byte changes, a delta saves nothing, and the base of deltas would take memory.
        encoding = self._options["encoding"] if gathered.change_little else None
        options = {**self._options, "encoding": encoding}
        return Publisher(self._root, local=self._local, on_rollback="retire", **options)


def _report_durable(line: SenderLine, address: Address, handle: Any) -> None:
    error = handle.exception()
    if error is None:
        line.send(address, {"durable": True})
    else:
        _log.warning("the weights that were sent last are not at the root: %s", error)
        line.send(address, {"error": f"{type(error).__name__}: {error}"})
