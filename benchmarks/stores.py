"""The figures of object stores: uploads and restores, compared with the bare client, and with other ways to upload.

In: a setting. Out: figures and peers by name. Knows nothing of: how they are printed.

The store is another process on loopback that discards its data, so that the figures show the client. The measurements
are of all threads of this process, from the call until the checkpoint is committed.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from functools import partial
from time import process_time
from typing import Any, Final

import obstore
from obstore.store import S3Store

from async_ckpt import Place
from async_ckpt.testing.servers import Server, moto_server, rclone_server

from . import probe
from .figures import Saves
from .limits import MIB, SEGMENT_BYTES, WarmMemory, digest, seconds_of
from .peers import PEERS, Given
from .setting import Setting, elapsed, side_by_side
from .store_server import options_for, store_server
from .table import Cost, Figure, Peer, Row, Target, fixed
from .workloads import tensors

PACKAGES: Final = ("obstore", "s3fs", "boto3", "s3torchconnector")
_BUCKET: Final = "bucket"
_PARTS_IN_FLIGHT: Final = 8
_READ_BYTES: Final = 8 * MIB
_NUM_READERS: Final = 12
# The client's own buffers, threads and connections.
_OVERHEAD_BYTES: Final = 64 * MIB
# The bandwidth of a common link.
_GIGABITS: Final = 10
_GB: Final = 1e9


def upload(setting: Setting) -> dict[str, Row]:
    with store_server() as endpoint:
        pairs = _beside_raw(options_for(endpoint), setting.store_bytes, setting.rounds)
        with_copy = _beside_raw(options_for(endpoint), setting.store_bytes, setting.rounds, copies=True)
    with store_server(gigabits=_GIGABITS) as endpoint:
        by_link = _beside_raw(options_for(endpoint), setting.store_bytes, setting.rounds)
    gigabytes = setting.store_bytes / _GB

    put = "obstore.put of as many bytes, parts alike"

    def figure(title: str, pairs: list[tuple[Cost, Cost]], limit: str, target: Target | None) -> Figure:
        rates = [(gigabytes / ours.seconds, gigabytes / raw.seconds) for raw, ours in pairs]
        return Figure(title, "GB/s", limit, target, rates)

    processor = [(ours.processor_seconds, limit.processor_seconds) for limit, ours in with_copy]
    title, copied, target = (
        "upload by save, from the call until committed",
        f"memmove, digests, and {put}",
        Target("≥", 0.9),
    )
    return {
        "upload": figure(f"{title}, to a store faster than memory is copied", pairs, put, None),
        "upload_limit": figure("the same", with_copy, copied, target),
        "upload_link": figure(f"{title}, through {_GIGABITS} Gbit/s", by_link, put, target),
        "upload_cpu": Figure("client CPU per GB uploaded", "s", copied, Target("≤", 1.2), processor),
        "raw": Peer("obstore.put", "bytes ready in memory, parts of 32 MiB, 8 at once", pairs),
        "raw_link": Peer("obstore.put", f"the same through {_GIGABITS} Gbit/s", by_link),
    }


def download(setting: Setting) -> dict[str, Row]:
    state = {"model": tensors(setting.store_bytes)}
    with store_server(keep=True) as endpoint:
        options = options_for(endpoint)
        saves = Saves(_run(options), state)
        store = _client(options)
        listed = (item for page in obstore.list(store, "run/") for item in page)
        path, num_bytes = next((i["path"], i["size"]) for i in listed if i["path"].endswith(".tar"))
        starts = range(0, num_bytes, _READ_BYTES)
        ends = [min(start + _READ_BYTES, num_bytes) for start in starts]
        reads = [
            partial(obstore.get_range, store, path, start=start, end=end)
            for start, end in zip(starts, ends, strict=True)
        ]

        def pairs(raw: Callable[[], object]) -> list[tuple[float, float]]:
            return side_by_side(
                setting.rounds,
                lambda: num_bytes / elapsed(lambda: saves.checkpointer.restore(state)) / _GB,
                lambda: num_bytes / elapsed(raw) / _GB,
            )

        with saves.checkpointer:
            together = pairs(lambda: obstore.get_ranges(store, path, starts=starts, ends=ends))
            one_by_one = pairs(lambda: seconds_of(reads, _NUM_READERS))
    title = "restore in place from a store, verified"
    threads = f"obstore.get_range of the same ranges, {_NUM_READERS} threads"
    return {
        "download": Figure(title, "GB/s", "obstore.get_ranges of the same ranges", Target("≥", 0.85), together),
        "download_threads": Figure("the same", "GB/s", threads, None, one_by_one),
    }


def upload_memory(setting: Setting) -> dict[str, Row]:
    with store_server() as endpoint:
        root = f"s3://{_BUCKET}/memory"
        peaks = [
            probe.beyond_segments(root, options_for(endpoint), setting.store_bytes) for _ in range(setting.few_rounds)
        ]
    title = "memory beyond state and segments while uploading"
    return {"upload_memory": fixed(title, "MiB", [peak / MIB for peak in peaks], _OVERHEAD_BYTES / MIB)}


def peers(setting: Setting) -> dict[str, Row]:
    """Other ways to the same store. None of them copies a snapshot or makes digests, and each blocks the training."""
    setting.folder.mkdir(parents=True, exist_ok=True)
    state = {"model": tensors(setting.store_bytes)}
    num_bytes = setting.store_bytes
    rows: dict[str, Row] = {}
    with store_server() as endpoint:
        given = Given(endpoint, f"{_BUCKET}/peer", _warm(num_bytes), state, setting.folder)
        saves = Saves(_run(options_for(endpoint)), state)
        with saves.checkpointer:
            for name, peer in PEERS.items():
                if not peer.installed:
                    rows[name] = Peer(peer.title, "not installed here", [])
                    continue
                pairs = _beside(saves, peer.begin(given), num_bytes, setting.few_rounds)
                rows[name] = Peer(peer.title, peer.configuration, pairs)
    return rows


def real_servers(setting: Setting) -> dict[str, Row]:
    """Real servers. Their costs are on the same cores as the client's."""
    rows: dict[str, Row] = {}

    def measure(name: str, server: Server) -> None:
        server.make_bucket(_BUCKET)
        pairs = _beside_raw(server.options, setting.served_bytes, setting.few_rounds)
        rows[name] = Peer(
            f"obstore.put to {name}",
            f"{setting.served_bytes // MIB} MiB, the server on the same cores",
            pairs,
        )

    with moto_server() as server:
        measure("moto", server)
    (setting.folder / "rclone").mkdir(parents=True)
    with rclone_server(setting.folder / "rclone") as server:
        measure("rclone", server)
    return rows


def _beside_raw(
    options: Mapping[str, str], num_bytes: int, rounds: int, *, copies: bool = False
) -> list[tuple[Cost, Cost]]:
    """Pairs (obstore.put, save) of as many bytes, with the same parts and concurrency.

    With `copies`, the bytes of the state are copied before the put, and digests are made during it.
    """
    state = {"model": tensors(num_bytes)}
    saves = Saves(_run(options, "run-copied" if copies else "run"), state)
    store, memory = _client(options), WarmMemory(num_bytes, SEGMENT_BYTES)

    def put() -> None:
        obstore.put(
            store,
            "raw",
            map(memoryview, memory.pieces),
            use_multipart=True,
            chunk_size=SEGMENT_BYTES,
            max_concurrency=_PARTS_IN_FLIGHT,
        )

    def copy_and_put() -> None:
        memory.copy_seconds(list(state["model"].values()))
        seconds_of([put, *(partial(digest, memoryview(piece)) for piece in memory.pieces)], num_threads=2)

    with saves.checkpointer:
        return _beside(saves, copy_and_put if copies else put, num_bytes, rounds)


def _beside(saves: Saves, theirs: Callable[[], object], num_bytes: int, rounds: int) -> list[tuple[Cost, Cost]]:
    """Pairs (another way, save). A first, untimed transfer opens connections and warms memory, as a first save does."""
    theirs()
    return side_by_side(
        rounds,
        lambda: _cost(num_bytes, partial(elapsed, theirs)),
        lambda: _cost(num_bytes, saves.durable_seconds),
    )


def _cost(num_bytes: int, transfer: Callable[[], float]) -> Cost:
    """The cost of a transfer that returns its own seconds."""
    processor = process_time()
    seconds = transfer()
    return Cost(seconds, (process_time() - processor) / num_bytes * _GB)


def _warm(num_bytes: int) -> mmap.mmap:
    return WarmMemory(num_bytes, num_bytes).pieces[0]


def _run(options: Mapping[str, str], path: str = "run") -> Place:
    return Place(f"s3://{_BUCKET}/{path}", options=options)


def _client(options: Mapping[str, str]) -> S3Store:
    """A client of obstore, configured as by the library for a store on loopback."""
    settings: Any = dict(options)
    return S3Store(_BUCKET, client_options={"allow_http": True}, unsigned_payload=True, **settings)


MEASURES: Final[dict[str, Callable[[Setting], dict[str, Row]]]] = {
    "upload": upload,
    "download": download,
    "upload_memory": upload_memory,
    "peers": peers,
    "real_servers": real_servers,
}
