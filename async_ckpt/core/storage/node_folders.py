"""A place where each node has its own folder, as one storage with the objects of all nodes.

In: the folder of this node, and peers that answer for the folders of other nodes. Out: one storage for all of these
folders. Knows nothing of: ranks, steps.

One process, the decider, asks all nodes which objects exist, and makes changes at all nodes. All other processes ask
the decider, and write only to their own node. Archives are read from the node that has them.
"""

from __future__ import annotations

import secrets
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from ...errors import StorageUnavailableError
from ..host.threads import run_together, running_future, start_thread
from ..timing import TIMEKEEPER
from .interface import Reader, Storage
from .local import LocalStorage
from .served_folders import Peer, PeerReader, SilentPeerError

T = TypeVar("T")
A = TypeVar("A")
# A function that copies a file of this node to another place: path, number of the place, size, digest.
Send = Callable[[str, int, int, str], None]

HERE: Final = -1  # stands for this node
_MAX_REQUESTS: Final = 32
_LOOK_SECONDS: Final = 0.2  # between two checks whether a copy is complete


class _OwnFolder(LocalStorage):
    """The folder of this node, with the requests that are made to one node."""

    def size(self, path: str) -> int | None:
        """The size of a file; None if it does not exist."""
        with suppress(FileNotFoundError, NotADirectoryError):
            target = self.root / path
            return target.stat().st_size if target.is_file() else None
        return None

    def sweep(
        self, folder: str, names: list[str], *, delete: bool = False, decided: bool = False, of_ranks: bool = False
    ) -> list[str]:
        here = {*self.names(folder)}  # `names` has the names of all nodes
        names = [name for name in names if name in here]
        return super().sweep(folder, names, delete=delete, decided=decided, of_ranks=of_ranks)


class NodeFolder(_OwnFolder):
    """The folder of this node, for the requests of other nodes."""

    def __init__(self, root: str, send: Send) -> None:
        super().__init__(root)
        self._send, self._sent = send, dict[str, Future[None]]()
        self._lock = threading.Lock()  # guards _sent

    def send(self, name: str, path: str, number: int, num_bytes: int, digest: str) -> bool:
        """Copy a file to another place in the background, once for each `name`. Returns whether the copy is complete.

        Raises the error of the copy.
        """
        with self._lock:
            is_new = name not in self._sent
            sent = self._sent.setdefault(name, running_future())
        if is_new:
            start_thread("send", partial(self._run, sent, path, number, num_bytes, digest), daemon=True)
        if not sent.done():
            return False
        with self._lock:
            self._sent.pop(name, None)
        sent.result()
        return True

    def _run(self, done: Future[None], *arguments: Any) -> None:
        try:
            self._send(*arguments)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)


class _OfNodes(LocalStorage):
    """The folder of this node, and peers for the folders of other nodes."""

    remote = True

    def __init__(self, root: str, peers: Mapping[int, Peer]) -> None:
        """`peers` are keyed by the ranks that answer for their nodes."""
        super().__init__(root)
        self._here, self._peers = _OwnFolder(root), peers

    def open(self, path: str) -> Reader:  # type: ignore[override]
        try:
            return self._here.open(path)
        except FileNotFoundError:
            rank = self.where(path)
            peer = None if rank is None else self._peers.get(rank)
            num_bytes = None if peer is None else peer.ask("size", path)
            if peer is None or num_bytes is None:
                raise
            return PeerReader(peer, path, num_bytes)

    @abstractmethod
    def where(self, path: str) -> int | None:
        """The node that has a file: HERE, or the rank that answers for it; None if no node has the file."""

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()


class AllNodes(_OfNodes):
    """The folders of all nodes, in the decider. Thread-safe."""

    def __init__(
        self, root: str, peers: Mapping[int, Peer], number_of: Callable[[Storage], int], mark: str = ""
    ) -> None:
        """`number_of` returns the number of a place of the run; `mark` names a file to be written at all nodes.

        Without `peers`, all ranks share one folder.
        """
        super().__init__(root, peers)
        self.remote, self.num_nodes = bool(peers), 1 + len(peers)
        self._number_of = number_of
        self._nodes: dict[str, int] = {}  # of archives, whose names are never reused
        self._chosen: dict[str, int] = {}
        self.left_out: dict[str, str] = {}  # manifests that do not count, and why
        self._mark = mark  # empty once it is written

    # --- requests to all nodes --------------------------------------------------------------------------------

    def prefer(self, path: str, rank: int) -> None:
        """Read this object from one node, since its content differs between nodes."""
        self._chosen[path] = rank

    def where(self, path: str) -> int | None:
        if self._here.exists(path):
            return HERE
        if path not in self._nodes:
            sizes = self._ask_all("size", path)
            found = next((rank for rank in self._peers if sizes[rank] is not None), None)
            if found is None:
                return None
            self._nodes[path] = found
        return self._nodes[path]

    def names(self, folder: str) -> list[str]:
        names = {*self._here.names(folder)}.union(*self._ask_all("names", folder).values())
        hidden = {path.rpartition("/")[2] for path in self.left_out if path.rpartition("/")[0] == folder}
        return sorted(names - hidden)

    def sizes(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for sizes in (*self._ask_all("sizes", folder).values(), self._here.sizes(folder)):
            found |= sizes
        return dict(sorted(found.items()))

    def exists(self, path: str) -> bool:
        return bool(self.existing([path]))

    def existing(self, paths: Sequence[str]) -> list[str]:
        wanted = [path for path in paths if path not in self.left_out]
        found = {*self._here.existing(wanted)}
        missing = [path for path in wanted if path not in found]
        if missing:
            found.update(*self._ask_all("existing", missing).values())
        return [path for path in wanted if path in found]

    def read(self, path: str) -> tuple[bytes, str]:
        if path in self.left_out:
            raise FileNotFoundError(path)
        chosen = self._chosen.get(path, HERE)
        for rank in dict.fromkeys((chosen, HERE, *self._peers)):
            with suppress(FileNotFoundError):
                data, version = self.read_at(rank, path)
                return data, f"{rank}/{version}"
        raise FileNotFoundError(path)

    def read_at(self, rank: int, path: str) -> tuple[bytes, str]:
        """The content and version of an object at one node. Raises FileNotFoundError."""
        data, version = self._here.read(path) if rank == HERE else self._peers[rank].ask("read", path)
        return data, version

    def having(self, path: str) -> list[int]:
        """The nodes that have an object, this one first."""
        there = self._ask_all("size", path)
        return [HERE] * self._here.exists(path) + [rank for rank in self._peers if there[rank] is not None]

    def free_bytes(self) -> int | None:
        """The free bytes of the node with the least free space; None if a node does not answer."""
        with suppress(StorageUnavailableError):
            free = [self._here.free_bytes(), *self._ask_all("free_bytes").values()]
            return min((one for one in free if one is not None), default=None)
        return None

    def hold(self, path: str) -> Callable[[], None]:
        return self._here.hold(path) if self._here.exists(path) else super(LocalStorage, self).hold(path)

    def is_held(self, path: str) -> bool:
        return self._here.is_held(path) or any(self._ask_all("is_held", path).values())

    # --- changes, at all nodes --------------------------------------------------------------------------------

    def prove(self, *, for_run: bool = False) -> None:  # noqa: ARG002
        if self._mark:
            self.replace(self._mark, b"")
            self._mark = ""

    def put_new(self, path: str, data: bytes) -> None:
        if path not in self.left_out:
            if self.exists(path):
                raise FileExistsError(path)
            self._here.put_new(path, data)
        self.replace(path, data)

    def replace(self, path: str, data: bytes, *, version: str | None = None) -> str | None:
        rank, _, at = (version or f"{HERE}/").partition("/")
        if version is not None and int(rank) != HERE:
            self._peers[int(rank)].ask("replace", path, data, version=at)
            at = ""
        new = self._here.replace(path, data, version=at or None)
        self._ask_all("replace", path, data)
        self.left_out.pop(path, None)
        self._chosen.pop(path, None)
        return f"{HERE}/{new}"

    def settle(self, path: str) -> None:
        if self._here.exists(path):
            self._here.settle(path)
        self._ask_all("settle", path, ranks=[rank for rank in self.having(path) if rank != HERE])

    def move(self, path: str, to: str) -> None:
        nodes = self.having(path)
        if not nodes:
            raise FileNotFoundError(path)
        if HERE in nodes:
            self._here.move(path, to)
        self._ask_all("move", path, to, ranks=[rank for rank in nodes if rank != HERE])

    def delete_many(self, paths: Sequence[str]) -> None:
        self._here.delete_many(paths)
        self._ask_all("delete_many", [*paths])

    def delete_all(self, path: str) -> None:
        self._here.delete_all(path)
        self._ask_all("delete_all", path)

    def remove_if_empty(self, folder: str) -> bool:
        return self._here.remove_if_empty(folder) & all(self._ask_all("remove_if_empty", folder).values())

    def sweep(
        self, folder: str, names: list[str], *, delete: bool = False, decided: bool = False, of_ranks: bool = False
    ) -> list[str]:
        options: dict[str, Any] = {"delete": delete, "decided": decided, "of_ranks": of_ranks}
        swept = {*self._here.sweep(folder, names, **options)}
        swept.update(*self._ask_all("sweep", folder, names, **options).values())
        return [name for name in names if name in swept]

    def sender(
        self, path: str, to: Storage, num_bytes: int, digest: str
    ) -> Callable[[Callable[[], None]], None] | None:
        rank = self.where(path)
        if rank is None or rank == HERE:
            return None
        name = secrets.token_hex(8)  # a new name, or the result of an earlier try would be returned

        def send(check: Callable[[], None]) -> None:
            while not self._peers[rank].ask("send", name, path, self._number_of(to), num_bytes, digest):
                check()
                TIMEKEEPER.sleep(_LOOK_SECONDS)

        return send

    def _ask_all(
        self, method: str, *arguments: Any, ranks: Collection[int] | None = None, **options: Any
    ) -> dict[int, Any]:
        """The answers of `ranks`, by default of all other nodes, which are asked in parallel. Raises their errors."""
        answers: dict[int, Any] = {}

        def ask(rank: int) -> None:
            answers[rank] = self._peers[rank].ask(method, *arguments, **options)

        chosen = self._peers if ranks is None else ranks
        run_together("nodes", [partial(ask, rank) for rank in chosen], max_threads=_MAX_REQUESTS)
        return answers


class OneOfNodes(_OfNodes):
    """The folder of this node, in a process that asks the decider about all nodes. Thread-safe.

    If the decider does not answer, only the objects of this node are known.
    """

    def __init__(self, root: str, peers: Mapping[int, Peer], decider: Peer) -> None:
        super().__init__(root, peers)
        self._decider = decider

    def where(self, path: str) -> int | None:
        rank: int | None = self._decider.ask("where", path)
        return rank

    def names(self, folder: str) -> list[str]:
        return self._ask_decider("names", self._here.names, folder)

    def sizes(self, folder: str) -> dict[str, int]:
        return self._ask_decider("sizes", self._here.sizes, folder)

    def exists(self, path: str) -> bool:
        return self._ask_decider("exists", self._here.exists, path)

    def existing(self, paths: Sequence[str]) -> list[str]:
        return self._ask_decider("existing", self._here.existing, [*paths])

    def read(self, path: str) -> tuple[bytes, str]:
        data, version = self._ask_decider("read", self._here.read, path)
        return data, version

    def _ask_decider(self, method: str, here: Callable[[T], A], argument: T) -> A:
        try:
            answer: A = self._decider.ask(method, argument)
            return answer
        except SilentPeerError:
            return here(argument)

    def close(self) -> None:
        super().close()
        self._decider.close()
