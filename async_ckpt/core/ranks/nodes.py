"""The places of a run at which each node has its own folder, and the rank that answers for each node.

In: the runs at the places, on each rank. Out: storages of all nodes together, where ranks see different folders. Knows
nothing of: saves.

All ranks meet once, at their first save or restore. Rank 0 puts a file at each place on disk. A rank that does not see
that file puts one with the same name. On each node one rank is the first to do so, and answers for the node from then
on. The folders of all nodes of a run contain the same mark, which distinguishes them from folders that another run has
left.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeAlias

from ...errors import CheckpointError, PeerFailedError, StorageUnavailableError
from ..fields import count, parsed, table
from ..host.waits import SHARED_SECONDS
from ..runs.manifest import Archive, Manifest
from ..runs.manifest import parse as parse_manifest
from ..runs.receipts import broken_folders
from ..runs.roots import Roots
from ..runs.run import Run
from ..storage.interface import Storage
from ..storage.local import LocalStorage
from ..storage.node_folders import HERE, AllNodes, NodeFolder, OneOfNodes
from ..storage.served_folders import NodeServer, Peer, own_hosts
from ..timing import TIMEKEEPER, monotonic
from .meeting import Meeting, in_words
from .store import quietly

_LOOK_SECONDS: Final = 0.05
_MARK: Final = r"\.async_ckpt-nodes-[0-9a-f]{16}"

_log = logging.getLogger("async_ckpt")


# Copies an archive from place to place, verified: `loading.catch_up.send_archive`.
SendArchive: TypeAlias = Callable[[Storage, Run, str, Archive], None]


class RunNodes:
    """The nodes of one checkpointer, as this rank knows them. The checkpointer creates it."""

    def __init__(self, meeting: Meeting, roots: Roots, send: SendArchive) -> None:
        self._meeting, self._runs, self._send = meeting, roots.runs, send
        self._has_met = False
        self._failure: CheckpointError | None = None  # why the meeting failed; it is not repeated
        self._key = b""  # proves to other nodes that a request comes from this start
        self._server: NodeServer | None = None

    def meet(self) -> None:
        """Find out, once, at which places each node has its own folder. All ranks call this, and wait for each other.

        Raises PeerFailedError, and StorageUnavailableError if this place has the checkpoints of another run.
        """
        world = self._meeting.world
        if self._failure is not None:
            raise self._failure
        if self._has_met or world.is_one or len(self._runs) == 1:
            return
        self._has_met = True
        disks = {n: run for n, run in enumerate(self._runs) if isinstance(run.storage, LocalStorage)}
        try:
            if world.rank == 0:
                self._lead(disks)
            else:
                self._join(disks)
        except BaseException as error:
            text = f"rank 0 could not find the places of each node ({error!r:.300}); start all ranks again"
            self._failure = error if isinstance(error, CheckpointError) else PeerFailedError(text, rank=world.rank)
            raise

    def hang_up(self) -> None:
        """Close the connections to other nodes, which cost a thread there. The next request opens one again."""
        for run in self._runs:
            if isinstance(run.storage, AllNodes | OneOfNodes):
                run.storage.close()

    def close(self) -> None:
        """Stop answering other nodes, and reading from them."""
        self.hang_up()
        if self._server is not None:
            self._server.close()

    # --- rank 0 -----------------------------------------------------------------------------------------------

    def _lead(self, disks: Mapping[int, Run]) -> None:
        messages, answer = self._meeting.messages(), dict[str, Any]()
        try:
            claimed = [n for n, run in disks.items() if self._may_claim(run)]
            secret = secrets.token_hex(32)
            self._key = bytes.fromhex(secret)
            messages.send("nodes/claimed", json.dumps({"claimed": claimed, "key": secret}))
            ranks = range(1, self._meeting.world.size)
            texts = self._meeting.receive(
                [f"nodes/{rank}" for rank in ranks], "the disks of the other ranks", of_ranks=True
            )
            others = dict(zip(ranks, map(json.loads, texts), strict=True))
            spread = {n: leads for n in claimed if (leads := self._leads(n, others))}
            for n in disks:
                self._look(n, {rank: self._peer(others[rank], f"own/{n}", rank) for rank in spread.get(n, ())})
            answer = {"leads": spread}
            if spread:
                self._serve(spread)
                answer["others"] = {rank: others[rank] for ranks in spread.values() for rank in ranks}
                answer["others"][0] = self._address()
        except BaseException as error:
            answer = {"error": in_words(error)}
            raise
        finally:
            quietly(lambda: messages.send("nodes/all", json.dumps(answer)))

    def _leads(self, number: int, others: Mapping[int, Mapping[str, Any]]) -> list[int]:
        """The ranks that answer for the other nodes at a place; empty if all ranks see the same folder."""
        found = {rank: one["leads"].get(str(number)) for rank, one in others.items()}
        unable = [rank for rank, lead in found.items() if lead is None]
        if unable:
            self._refuse(number, f"rank {unable[0]} can neither see nor write the files of the other ranks there")
            return []
        return sorted({*found.values()} - {0})

    def _refuse(self, number: int, why: str) -> None:
        run = self._runs[number]
        run.refusal = f"{run.storage.locate('')}: {why}, so no step is saved at this place"
        _log.warning("%s", run.refusal)

    def _look(self, number: int, peers: Mapping[int, Peer]) -> None:
        """Have rank 0 see the folders of all nodes at a place, except for steps that are not whole, and for nodes that
        hold another run. Their folders are neither read nor changed.

        Raises StorageUnavailableError if this node holds another run.
        """
        run = self._runs[number]
        strangers, mark = _strangers(run, peers) if peers else ((), "")
        if strangers:
            rank = 0 if HERE in strangers else strangers[0]
            self._refuse(number, f"on the node of rank {rank} the folder has checkpoints of another run; move it away")
        if HERE in strangers:
            raise StorageUnavailableError(run.refusal, path=run.storage.locate(""))
        peers = {rank: peer for rank, peer in peers.items() if rank not in strangers}
        nodes = AllNodes(run.storage.locate(""), peers, self._number_of, mark)
        disk = run.storage
        run.root.read_from(nodes)
        self._leave_out_broken(run, nodes)
        if not (peers or nodes.left_out):
            run.root.read_from(disk)

    def _leave_out_broken(self, run: Run, nodes: AllNodes) -> None:
        """Leave out the newest steps that are not whole, unless another place has them: a node may be new."""
        for step in reversed(run.root.relist().steps):
            path, folder = run.root.manifest_path(step), run.folder(step)
            found = _manifests(nodes, path)
            why = ""
            for rank, manifest in found:
                nodes.prefer(path, rank)
                why = broken_folders(nodes, {folder: manifest}).get(folder, "")
                if not why or any(_has(other, manifest) for other in self._runs if other is not run):
                    return
            if why:
                nodes.left_out[path] = why
                _log.warning("%s: step %d is skipped because it is not whole: %s", nodes.locate(""), step, why)
            elif nodes.exists(path):  # it is damaged
                return

    def _number_of(self, storage: Storage) -> int:
        return next(n for n, run in enumerate(self._runs) if run.storage is storage)

    # --- another rank -----------------------------------------------------------------------------------------

    def _join(self, disks: Mapping[int, Run]) -> None:
        messages, rank = self._meeting.messages(), self._meeting.world.rank
        (text,) = self._meeting.receive(["nodes/claimed"], "the disks of rank 0")
        claimed = json.loads(text)
        self._key = bytes.fromhex(claimed["key"])
        leads = {n: self._lead_at(disks[n]) for n in claimed["claimed"] if n in disks}
        own = [n for n, lead in leads.items() if lead == rank]
        if own:
            self._serve(own)
        messages.send(f"nodes/{rank}", json.dumps({"leads": leads} | (self._address() if own else {})))
        (text,) = self._meeting.receive(["nodes/all"], "what rank 0 knows of the disks of all ranks")
        answer = json.loads(text)
        if "error" in answer:
            raise PeerFailedError(f"rank 0 cannot use a place of the run: {answer['error']}", rank=0)
        for n, ranks in ((int(n), ranks) for n, ranks in answer["leads"].items()):
            others = {other: answer["others"][str(other)] for other in (0, *ranks)}
            peers = {  # the node of rank 0 is the one that rank 0 calls HERE
                other or HERE: self._peer(about, f"own/{n}", other)
                for other, about in others.items()
                if other != leads[n]
            }
            run, decider = self._runs[n], self._peer(others[0], f"all/{n}", 0)
            run.root.read_from(OneOfNodes(run.storage.locate(""), peers, decider))

    # --- the claim to a folder --------------------------------------------------------------------------------

    @property
    def _claim_path(self) -> str:
        return f"world.{self._meeting.token()}.json"

    def _claim(self, run: Run) -> None:
        """Claim the folder that this node sees at a place. Raises FileExistsError if a rank has claimed it before."""
        world = self._meeting.world
        claim = {"rank": world.rank, "world_size": world.size, "nonce": secrets.token_hex(8)}
        run.storage.put_new(self._claim_path, json.dumps(claim).encode())

    def _may_claim(self, run: Run) -> bool:
        """Claim a place for rank 0. False if that fails, which its first save reports."""
        with suppress(CheckpointError, OSError):
            with suppress(FileExistsError):  # a put may arrive though it was answered with an error
                self._claim(run)
            return True
        return False

    def _lead_at(self, run: Run) -> int | None:
        """The rank that was the first to claim the folder which this rank sees; None if that is unknown."""
        deadline = monotonic() + SHARED_SECONDS
        with suppress(CheckpointError, OSError, ValueError, KeyError):  # the claim may be damaged
            while monotonic() < deadline:
                try:
                    self._claim(run)
                except FileExistsError:
                    with suppress(FileNotFoundError):  # a shared folder may hide it for a while
                        return count(table(parsed(run.storage.read(self._claim_path)[0]))["rank"])
                    TIMEKEEPER.sleep(_LOOK_SECONDS)
                else:
                    return self._meeting.world.rank
        return None

    # --- both -------------------------------------------------------------------------------------------------

    def _serve(self, numbers: Collection[int]) -> None:
        """Answer requests for the folders of this node, and on rank 0 for the folders of all nodes."""
        folders: dict[str, Storage] = {}
        for n in numbers:
            storage = self._runs[n].storage
            folders[f"own/{n}"] = NodeFolder(storage.locate(""), partial(self._copy, n))
            folders[f"all/{n}"] = storage
        self._server = NodeServer(self._key, folders)

    def _copy(self, place: int, path: str, to: int, num_bytes: int, digest: str) -> None:
        """Copy an archive from the disk of this node to another place."""
        source = LocalStorage(self._runs[place].storage.locate(""))
        self._send(source, self._runs[to], path, Archive(path.rpartition("/")[2], num_bytes, digest))

    def _address(self) -> dict[str, Any]:
        assert self._server is not None
        return {"hosts": own_hosts(self._meeting.start.connection.address), "port": self._server.port}

    def _peer(self, about: Mapping[str, Any], folder: str, rank: int) -> Peer:
        """The folder of this name that a rank answers for, from that rank's own description."""
        hosts, store = [str(host) for host in about["hosts"]], self._meeting.start.connection.address
        if rank == 0 and store is not None:
            hosts.append(store[0])  # usually on the node of rank 0
        return Peer(hosts, int(about["port"]), folder, self._key, f"rank {rank} on {hosts[0]}")


def _strangers(run: Run, peers: Mapping[int, Peer]) -> tuple[list[int], str]:
    """The nodes whose folders have the steps of another run, and the mark of this run."""
    existing = {HERE: run.storage.existing} | {rank: partial(peer.ask, "existing") for rank, peer in peers.items()}
    names = {HERE: run.storage.names("")} | {rank: peer.ask("names", "") for rank, peer in peers.items()}
    marks = Counter(name for listed in names.values() for name in listed if re.fullmatch(_MARK, name))
    mark = max(marks, key=lambda name: (marks[name], name in names[HERE]), default="")
    strangers = []
    for rank, listed in names.items():
        steps = [step for step in map(run.root.step_of, listed) if step >= 0]
        is_known = mark in listed if mark else rank == HERE  # without a mark, there was only one node so far
        if not is_known and existing[rank]([run.root.manifest_path(step) for step in steps]):
            strangers.append(rank)
    return strangers, mark or f".async_ckpt-nodes-{secrets.token_hex(8)}"


def _manifests(nodes: AllNodes, path: str) -> list[tuple[int, Manifest]]:
    """The distinct manifests of one step that nodes have: the latest start first, replacing before replaced."""
    found: dict[str, tuple[int, Manifest]] = {}
    for rank in nodes.having(path):
        with suppress(CheckpointError, FileNotFoundError):
            manifest = parse_manifest(nodes.read_at(rank, path)[0], path=path)
            found.setdefault(manifest.attempt, (rank, manifest))
    return sorted(found.values(), key=lambda one: (one[1].start, len(one[1].replaces)), reverse=True)


def _has(run: Run, manifest: Manifest) -> bool:
    """True if a place has exactly this commit."""
    there = run.committed(manifest.step)
    return there is not None and there.attempt == manifest.attempt
