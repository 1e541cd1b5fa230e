"""checkpoint-engine: the weights of a held snapshot in its ParameterServer, and updates that cannot hang.

In: a ParameterServer, and a part of a snapshot. Out: a checkpoint registered there, and engines that have its weights.
Knows nothing of: transports, devices.

The server broadcasts the tensors that each rank has registered, so each tensor is registered by only one rank. The
ranks divide the tensors by size, the largest first, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from ..errors import PeerFailedError
from ..plumbing import captured, spec, timing, waits
from .common.framework_checks import require, require_names
from .common.held_weights import HeldTensor, SnapshotWeights

# The events of a ZMQ socket.
_READABLE: Final = 1
_WRITABLE: Final = 2
# Some are private: the rank, the number of ranks, and the socket to the engine beside this rank.
_USED: Final = (
    "register_checkpoint", "unregister_checkpoint", "gather_metas", "update",
    "_rank", "_world_size", "_bind_zmq_socket",
)  # fmt: skip


def register_checkpoint(
    server: Any, name: str, view: captured.SnapshotView, *, use_shared_memory_pool: bool = False
) -> list[str]:
    """Register the weights of a snapshot with a ParameterServer of checkpoint-engine. Every rank calls this.

        register_checkpoint(server, f"step-{step}", snap["model"])
        server.gather_metas(f"step-{step}")

    The server copies this rank's share to its own memory; after the call, the snapshot may be closed. Sharded tensors
    are gathered, one at a time.

    Args:
        server: a ParameterServer with the ranks that hold the weights.
        name: the name of the checkpoint. It must not be registered already.
        view: the part of the snapshot that is the model.
        use_shared_memory_pool: as for the server: its memory is kept for the next checkpoint of the same shapes.

    Returns the names of the tensors that this rank has registered. Raises TypeError unless `view` is a part of a
    snapshot, ClosedError, TornSnapshotError, UnsupportedStateError, RuntimeError for a server that lacks a name that is
    used here, and the errors of the server.
    """
    _check(server)
    weights = SnapshotWeights(view)
    mine = set(share_of(weights.tensors, server._rank, server._world_size))
    named = {tensor_name: tensor.contiguous() for tensor_name, tensor in weights.whole() if tensor_name in mine}
    server.register_checkpoint(
        name,
        named_tensors=named,
        use_shared_memory_pool=use_shared_memory_pool and bool(named),
        use_inplace_pin_memory=False,
    )
    return sorted(named)


def share_of(tensors: Sequence[HeldTensor], rank: int, world_size: int) -> list[str]:
    """The names of the tensors that a rank registers. Each tensor has one owner, and all owners have similar sizes."""
    loads = [0] * world_size
    mine = []
    for tensor in sorted(tensors, key=lambda tensor: -tensor.num_bytes):
        owner = loads.index(min(loads))
        loads[owner] += tensor.num_bytes
        if owner == rank:
            mine.append(tensor.name)
    return mine


def update(
    server: Any,
    name: str,
    req_func: Callable[[list[tuple[str, str]]], None],
    *,
    timeout_seconds: float = 600.0,
    ranks: list[int] | None = None,
) -> None:
    """Call `server.update`, but raise an error if the engine stops answering. Every rank calls this.

        update(server, "step-1200", lambda sockets: ask_engine(dict(sockets)), timeout_seconds=120)

    By itself, the server waits for its engine forever. Here it stops waiting as soon as `req_func` has failed, or when
    the engine has not answered for `timeout_seconds`, the time that it may take for one bucket.

    Args:
        server: a ParameterServer, after its `gather_metas`.
        name: the name of the checkpoint.
        req_func: as for the server: it makes the engine call checkpoint-engine's `update_weights_from_ipc`, and returns
            when that call has returned.
        timeout_seconds: the limit for each answer of the engine, and for each operation among the ranks.
        ranks: as for the server.

    Raises PeerFailedError if the engine does not answer, with the error of `req_func` as its cause, and RuntimeError if
    an engine refuses the weights. The engine may then have some old and some new weights: update it again.
    """
    _check(server)
    timeout_seconds = spec.seconds_above_0("timeout_seconds", timeout_seconds)
    watched = _WatchedEngine(req_func, timeout_seconds, server._rank)
    bind = server._bind_zmq_socket

    def bind_watched() -> Any:
        socket, paths = bind()
        return watched.around(socket), paths

    server._bind_zmq_socket = bind_watched
    try:
        server.update(name, watched.ask, timeout=timing.duration(timeout_seconds), ranks=ranks)
    finally:
        server._bind_zmq_socket = bind
    if watched.error is not None:
        raise watched.gave_up() from watched.error


def _check(server: Any) -> None:
    package = require("checkpoint_engine")
    require_names(package, server, _USED)


class _WatchedEngine:
    """The request to one engine, and the socket for its answers, in place of the server's own."""

    def __init__(self, req_func: Callable[[list[tuple[str, str]]], None], timeout_seconds: float, rank: int) -> None:
        self._req_func, self._timeout_seconds, self._rank = req_func, timeout_seconds, rank
        self._socket: Any = None
        self.error: BaseException | None = None  # raised by `req_func`; written by the server's thread for it

    def around(self, socket: Any) -> _WatchedEngine:
        self._socket = socket
        return self

    def ask(self, paths: list[tuple[str, str]]) -> None:
        """Call `req_func`. Runs on the server's thread for it."""
        try:
            self._req_func(paths)
        except BaseException as error:
            self.error = error

    def recv(self) -> bytes:
        """The answer of the engine. Raises PeerFailedError."""
        self._await(_READABLE)
        answer: bytes = self._socket.recv()
        return answer

    def send_pyobj(self, value: Any) -> None:
        """Send a value once an engine is ready to take it. Raises PeerFailedError."""
        self._await(_WRITABLE)
        self._socket.send_pyobj(value)

    def _await(self, event: int) -> None:
        deadline = timing.TIMEKEEPER.now() + self._timeout_seconds
        while not self._socket.poll(1000 * waits.LIVENESS_SECONDS, event):
            if self.error is not None or timing.TIMEKEEPER.now() > deadline:
                raise self.gave_up() from self.error

    def gave_up(self) -> PeerFailedError:
        why = f"it has not answered for {self._timeout_seconds:g} s"
        if self.error is not None:
            why = f"the request to it failed ({type(self.error).__name__}: {self.error})"
        return PeerFailedError(
            f"the engine beside rank {self._rank} has not taken the weights: {why}; it may have a mix of old and new "
            "ones, so restart it, or update it again",
            rank=self._rank,
        )

    def close(self) -> None:
        # Messages that a dead engine has not fetched must not keep the process from exiting.
        self._socket.close(linger=0)
