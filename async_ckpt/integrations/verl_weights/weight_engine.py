"""`AsyncCkptEngine`: a checkpoint engine of verl that sends the weights of a training to rollouts as versions.

In: the calls of verl's `CheckpointEngineManager`, on all ranks of the training and in all workers of rollouts. Out: a
version for each sync, and its tensors in the rollouts. Knows nothing of: how versions are written and read.

One sync is `prepare`, `build_topology`, `init_process_group`, `send_weights` with `receive_weights`, and `finalize`.
Rank 0 of the training sends. The other ranks only take part in the export, which is collective.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, NamedTuple

import torch

from ... import Place
from ...plumbing import spec
from ...weights.publishing.folder_replica import boot_id
from ..common.framework_checks import TESTED, require, require_names, version_of
from .sync_line import Address
from .weight_receiver import WeightReceiver
from .weight_sender import WeightSender

BACKEND: Final = "async_ckpt"
# The methods of engines, as verl's manager and workers call them.
_METHODS: Final = frozenset(
    ("prepare", "build_topology", "init_process_group", "finalize", "send_weights", "receive_weights", "get_weights")
)

_verl: Final = require("verl")
_base: Final[Any] = import_module("verl.checkpoint_engine.base")
require_names(_verl, _base, ["CheckpointEngineRegistry", "CheckpointEngineWithCache", "ensure_async_iterator"])
CheckpointEngineRegistry: Any = _base.CheckpointEngineRegistry
CheckpointEngineWithCache: Any = _base.CheckpointEngineWithCache
require_names(_verl, CheckpointEngineRegistry, ["register", "get", "new"])


class _Sync(NamedTuple):
    """The role of this worker in the current sync."""

    role: str  # "sender", "exporter" or "receiver"
    address: Address
    num_elsewhere: int  # receivers on other hosts than the sender


class AsyncCkptEngine(CheckpointEngineWithCache):  # type: ignore[misc]
    """Sends weights to rollouts as versions at a root: through memory on one host, through files or a store elsewhere.

    verl creates it for `backend=async_ckpt`, with the arguments in `engine_kwargs.async_ckpt`.

    Args:
        bucket_size: the size in bytes of a buffer in host memory for the weights of the first sync; set by verl.
        root: the place of the versions, as for a `Publisher`: a path that all hosts see, or a URL.
        is_master: whether this is rank 0 of the training; set by verl.
        local: whether rollouts on the host of rank 0 get weights from its memory. By default wherever this is possible,
            which is on Linux.
        cache: a folder on each host that has rollouts but not rank 0; they pull versions into it. By default, a folder
            for each root inside the folder for temporary files.
        options: options of the client of a URL, such as its endpoint.
        publisher: options of the `Publisher`: anchor_every, keep (by default 5), encoding and host_bytes.
        timeout_seconds: the longest wait of the sender for its root, and of a receiver for the sender.

    Raises ValueError and TypeError for arguments that are not valid.
    """

    def __init__(
        self,
        bucket_size: int,
        root: str | None = None,
        *,
        is_master: bool = False,
        local: bool | None = None,
        cache: str | None = None,
        options: Mapping[str, Any] | None = None,
        publisher: Mapping[str, Any] | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        if root is None:
            raise ValueError(
                "async_ckpt needs a root for its versions: "
                "actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.async_ckpt.root=/shared/weights"
            )
        place = Place(root, options=dict(options)) if options else Place(root)
        self._root, self._timeout_seconds = place.shown, spec.seconds_above_0("timeout_seconds", timeout_seconds)
        self._sync: _Sync | None = None
        self._sender = self._receiver = None
        if is_master:
            self._sender = WeightSender(place, _own_address(), bucket_size, local=local, options=dict(publisher or {}))
        else:
            self._receiver = WeightReceiver(place, cache, self._timeout_seconds)

    def prepare(self) -> dict[str, Any]:
        """Begin a sync. `build_topology` gets the results of all workers."""
        self._sync = None
        return {
            "root": self._root,
            "host": _host(),
            "address": None if self._sender is None else tuple(self._sender.begin()),
        }

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """The arguments of `init_process_group` for the ranks of the training, and for the workers of rollouts.

        Raises ValueError if the first worker is not rank 0 of the training, or workers have different roots.
        """
        if len(metadata) != actor_wg_world_size + rollout_world_size or not metadata or not metadata[0]["address"]:
            raise ValueError(
                f"{len(metadata)} workers called prepare, but {actor_wg_world_size} training ranks (rank 0 first) and "
                f"{rollout_world_size} rollout workers were expected; check how the workers are created"
            )
        if len(roots := {facts["root"] for facts in metadata}) > 1:
            raise ValueError(f"the workers have different roots: {', '.join(sorted(roots))}; give all the same root")
        sender, receivers = metadata[0], metadata[actor_wg_world_size:]
        num_elsewhere = sum(receiver["host"] != sender["host"] for receiver in receivers)

        def arguments(roles: list[str]) -> dict[str, list[Any]]:
            alike = {"address": sender["address"], "num_elsewhere": num_elsewhere}
            return {"role": roles, **{name: [value] * len(roles) for name, value in alike.items()}}

        of_training = ["sender", *["exporter"] * (actor_wg_world_size - 1)]
        return arguments(of_training), arguments(["receiver"] * rollout_world_size)

    def init_process_group(self, role: str, address: tuple[str, int, str], num_elsewhere: int) -> None:
        """Join the sync. No process group is created: receivers connect to rank 0 of the training.

        Raises PeerFailedError if rank 0 cannot be reached.
        """
        self._sync = _Sync(role, Address(*address), num_elsewhere)
        if role == "receiver":
            self._receiving("init_process_group").connect(self._sync.address)

    def finalize(self) -> None:
        """End the sync."""
        self._sync = None
        if self._receiver is not None:
            self._receiver.hang_up()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Send the weights of the model. Called on all ranks of the training. Returns figures for a logger.

        The version has the number `global_steps`, or the next free one. It replaces versions with the same or a higher
        number, which are from before the training was set back. Returns when all receivers can read the version. If all
        of them are on this host, it may not be durable yet; if it cannot become durable, a warning is logged. Raises
        the errors of `Publisher.publish` and its handle, TimeoutError, and RuntimeError outside of a sync.
        """
        sync = self._in_sync("send_weights")
        if sync.role == "exporter":
            async for _ in _base.ensure_async_iterator(weights):
                pass
            return {}
        if self._sender is None:
            raise RuntimeError("send_weights was called in a worker that receives; rank 0 of the training sends")
        return await self._sender.send(
            sync.address,
            _base.ensure_async_iterator(weights),
            global_steps,
            durably=sync.num_elsewhere > 0,
            timeout_seconds=self._timeout_seconds,
        )

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The names and tensors of the model that are sent in this sync.

        A tensor is on the accelerator of this process, if there is one. Otherwise it is a view of shared memory, which
        must not be written to, and which is valid until the iteration ends. Raises PeerFailedError if the sender has
        failed or died, or sends another version than `global_steps`; ClosedError if another training has taken the
        root; NotCommittedError, CorruptCheckpointError, StorageUnavailableError, StorageFullError and TimeoutError. All
        errors are raised before the first tensor.
        """
        self._in_sync("receive_weights")
        async for pair in self._receiving("receive_weights").receive(global_steps):
            yield pair

    async def get_weights(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """The names and tensors of the version that was received last, again, at any later time.

        They are read from the memory of the sender while that version is its newest, otherwise from the folder of this
        host, or from the root. Raises the errors of `receive_weights`, and NotCommittedError if there is no version.
        """
        async for pair in self._receiving("get_weights").again():
            yield pair

    def _in_sync(self, method: str) -> _Sync:
        if self._sync is None:
            raise RuntimeError(f"{method} was called outside of a sync; call prepare and init_process_group before")
        return self._sync

    def _receiving(self, method: str) -> WeightReceiver:
        if self._receiver is None:
            raise RuntimeError(f"{method} was called on rank 0 of the training, which sends; call it in rollouts")
        return self._receiver


def _own_address() -> str:
    """The address of this host in the cluster."""
    return str(import_module("ray.util").get_node_ip_address()).strip("[]")


def _host() -> str:
    """A text that is equal for two processes that can share memory: host name, user, boot and network namespace."""
    parts = [socket.gethostname(), str(os.geteuid()) if hasattr(os, "geteuid") else ""]
    with suppress(OSError):
        parts += [boot_id(), os.readlink("/proc/self/ns/net")]
    return " ".join(parts)


def _refuse_other_methods() -> None:
    """Raise RuntimeError if this version of verl requires other methods of an engine."""
    required = frozenset(CheckpointEngineWithCache.__abstractmethods__)
    if required == _METHODS:
        return
    unknown, missing = sorted(required - _METHODS), sorted(_METHODS - required)
    change = f"{unknown[0]} is new" if unknown else f"{missing[0]} is gone"
    raise RuntimeError(
        f"verl {version_of(_verl)}: the interface of checkpoint engines has changed ({change}), and async_ckpt does "
        f"not support the new one; install verl {' to '.join(TESTED['verl'])}, or use another checkpoint_engine.backend"
    )


_refuse_other_methods()
CheckpointEngineRegistry.register(BACKEND)(AsyncCkptEngine)
