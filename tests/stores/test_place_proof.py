"""The first save at a place proves what it needs there; what a client lacks is worked around, or the save is refused."""

import http.server
import logging
import threading
from collections.abc import Iterator
from functools import partial
from io import UnsupportedOperation

import pytest
import torch
from buckets import ENGINES, through
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from states import SEGMENT, assert_is_state, open_run, save, save_into, state_at

import async_ckpt
from async_ckpt import Place, Publisher, StorageFullError, StorageUnavailableError
from async_ckpt.stores.proven import place_proof, range_reader

PROBE = ".async_ckpt-probe-"


def at(bucket, proxy, path, engine="obstore"):
    return Place(bucket.url(path), options=through(proxy, bucket, deadline_seconds=20), engine=engine)


def of_probes(proxy):
    return [request.kind for request in proxy.requests if PROBE in request.target]


# --- requests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_place_is_proved_once_in_a_process_by_few_requests(bucket, proxy, engine):
    place = at(bucket, proxy, "runs/a", engine)
    with open_run(place, segment_bytes=SEGMENT) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt.wait()
        # Two puts, the reading of a part, and the deletion; the conditions of puts, on a probe of their own; and the
        # store's clock.
        asked = of_probes(proxy)
        assert len(asked) <= 5 + 4 + 3
        assert asked.count("get_object") == 1
        save(ckpt, 2, 3)
    for name in ("runs/b", "runs/c"):
        save_into(at(bucket, proxy, name, engine), 1)
    assert of_probes(proxy).count("get_object") == 1
    assert not [key for key in bucket.server.keys(bucket) if PROBE in key]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_single_archive_needs_less_than_a_run(bucket, proxy, engine):
    for number in range(3):
        async_ckpt.save(state_at(1), at(bucket, proxy, f"{number}.tar", engine)).result()
    assert of_probes(proxy) == ["put_object", "head_object", "get_object", "delete_object"]
    assert not proxy.count(kind="list_objects")


def test_loading_proves_nothing(bucket, proxy):
    async_ckpt.save(state_at(1), bucket.place("x.tar")).result()
    assert_is_state(async_ckpt.load(at(bucket, proxy, "x.tar")), 1)
    assert of_probes(proxy) == []


# --- what is refused ------------------------------------------------------------------------------------------


def test_a_store_that_replaces_nothing_is_refused_before_a_save_is_acknowledged(bucket, proxy):
    size = str(len(place_proof._NEW))
    proxy.lose(kind="put_object", where=lambda request: request.headers.get("content-length") == size)
    with open_run(at(bucket, proxy, "runs/a")) as ckpt, pytest.raises(StorageUnavailableError, match="its old content"):
        ckpt.save(state_at(1), step=1).result()
    assert bucket.keys() == []


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_where_a_new_object_exists_already_is_refused_in_words(bucket, proxy, engine):
    size = str(len(place_proof._OLD))
    proxy.answer(
        "PreconditionFailed", kind="put_object", where=lambda request: request.headers.get("content-length") == size
    )
    with open_run(at(bucket, proxy, "runs/a", engine)) as ckpt:
        with pytest.raises(StorageUnavailableError, match="an object with a new name cannot be created"):
            ckpt.save(state_at(1), step=1).result()
        proxy.clear()
        assert ckpt.save(state_at(2), step=2).result().status == "committed"
    assert PROBE not in " ".join(bucket.keys())


def test_credentials_that_may_not_delete_save_all_the_same(bucket, proxy, caplog):
    """They are given on purpose where nobody is to delete checkpoints."""
    proxy.answer("AccessDenied", kind="delete_object")
    with caplog.at_level(logging.WARNING, "async_ckpt"), open_run(at(bucket, proxy, "runs/a")) as ckpt:
        for step in (1, 2):
            assert ckpt.save(state_at(step), step=step).result().status == "committed"
    (line,) = [record.message for record in caplog.records if "could not be deleted" in record.message]
    assert f"{PROBE}" in line


def test_a_place_that_was_away_is_proved_by_the_next_save(bucket, proxy):
    place = Place(bucket.url("x.tar"), options=through(proxy, bucket, deadline_seconds=1))
    fault = proxy.answer("AccessDenied", kind="get_object")
    with pytest.raises(StorageUnavailableError, match="AccessDenied"):
        async_ckpt.save(state_at(1), place).result()
    fault.clear()
    async_ckpt.save(state_at(1), place).result()
    assert_is_state(async_ckpt.load(place), 1)


class Odd(DirFileSystem):
    """A folder of this machine by a filesystem that lacks something."""

    protocol = "odd"

    def __init__(self, folder, lacks):
        super().__init__(str(folder), LocalFileSystem())
        self.lacks = lacks
        self.listed = {}

    def mv(self, path1, path2, *args, **kwargs):
        if "replacing" in self.lacks and self.exists(path2):
            raise FileExistsError(path2)
        if "renaming" in self.lacks and self.exists(path2):
            return self.rm_file(path1)  # and says nothing
        return super().mv(path1, path2, *args, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        if "ranges" in self.lacks:
            return super().cat_file(path)
        if "part" in self.lacks and end is not None:
            return super().cat_file(path, start=0, end=end - start)
        return super().cat_file(path, start=start, end=end, **kwargs)

    def open(self, path, mode="rb", *args, **kwargs):
        file = super().open(path, mode, *args, **kwargs)
        if "seeking" in self.lacks and mode == "rb":
            file.seek = refuse_to_seek
        return file

    def ls(self, path, detail=True, **kwargs):
        if "listing" in self.lacks:  # it shows what was there when it was first asked
            return self.listed.setdefault((path, detail), [])
        return super().ls(path, detail, **kwargs)


def refuse_to_seek(*_):
    raise UnsupportedOperation("this file is read from front to back")


@pytest.fixture
def odd(tmp_path):
    (tmp_path / "served" / "run").mkdir(parents=True)
    (tmp_path / "served" / "one").mkdir()
    return lambda *lacks: Place("run", fs=Odd(tmp_path / "served", lacks))


@pytest.mark.parametrize(
    ("lack", "reason"), [("renaming", "its old content"), ("part", "returns other bytes"), ("listing", "is not listed")]
)
def test_a_client_that_cannot_be_worked_around_is_refused(odd, lack, reason, monkeypatch):
    monkeypatch.setattr(place_proof, "_LISTING_WAITS", (0.0,))
    place = odd(lack)
    with open_run(place) as ckpt, pytest.raises(StorageUnavailableError, match=reason):
        ckpt.save(state_at(1), step=1).result()
    assert not [name for name in place.fs.fs.find(f"{place.fs.path}") if "manifest" in name or PROBE in name]


def test_a_single_archive_needs_no_listing_and_no_replacement(odd):
    fs = odd("listing", "renaming").fs
    async_ckpt.save(state_at(1), Place("one/x.tar", fs=fs)).result()
    assert_is_state(async_ckpt.load(Place("one/x.tar", fs=fs)), 1)


# --- what is worked around ------------------------------------------------------------------------------------


def test_where_a_rename_replaces_nothing_the_old_file_goes_first(odd, caplog):
    place = odd("replacing")
    with caplog.at_level(logging.WARNING, "async_ckpt"), open_run(place, keep=2) as ckpt:
        save(ckpt, 1, 2, 3)
        ckpt.save(state_at(9), step=3, overwrite=True).result()
        ckpt.wait()
    assert place.fs.cat_file("run/latest") == b"step_00000003\n"
    assert len(place.fs.cat_file("run/checkpoints.jsonl").splitlines()) == 2
    assert not [name for name in place.fs.find("run") if "tmp" in name or "probe" in name]
    with open_run(place) as ckpt:
        assert_is_state(ckpt.load(), 9)
    assert len([record for record in caplog.records if "is renamed first" in record.message]) == 1


def test_the_old_file_is_there_again_when_the_new_one_does_not_follow(odd):
    place = odd("replacing")
    storage = place.storage()
    storage.replace("latest", b"old")
    renames = []

    def mv(path1, path2, **_):
        renames.append(path2)
        if place.fs.exists(path2) or (path2 == "run/latest" and len(renames) == 3):
            raise OSError("not now")
        DirFileSystem.mv(place.fs, path1, path2)

    place.fs.mv = mv
    with pytest.raises(StorageUnavailableError, match="not now"):
        storage.replace("latest", b"new")
    assert storage.read("latest")[0] == b"old"
    assert storage.names("") == ["latest"]


@pytest.mark.parametrize("lacks", [("ranges",), ("ranges", "seeking")])
def test_a_client_that_ignores_ranges_is_read_all_the_same(odd, lacks, caplog, scratch):
    with caplog.at_level(logging.WARNING, "async_ckpt"), open_run(odd(*lacks), segment_bytes=SEGMENT) as ckpt:
        save(ckpt, 1, 2, mib=9)
        assert_is_state(ckpt.load(), 2, 9)
    place = odd(*lacks)
    assert_is_state(async_ckpt.load(place), 2, 9)
    live = state_at(0, 9)
    with open_run(place) as ckpt:
        assert ckpt.restore(live) == 2
    assert_is_state(live, 2, 9)
    lines = [record for record in caplog.records if "whole objects" in record.message]
    assert len(lines) == (1 if "seeking" in lacks else 0)


def test_an_object_that_does_not_fit_beside_is_refused_with_its_size(odd, monkeypatch):
    place = odd("ranges", "seeking")
    async_ckpt.save(state_at(1), Place("one/x.tar", fs=place.fs)).result()
    monkeypatch.setattr(range_reader.shutil, "disk_usage", lambda _: range_reader.shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(StorageFullError, match="TMPDIR") as full:
        async_ckpt.load(Place("one/x.tar", fs=place.fs))
    assert full.value.free_bytes == 1


def test_an_object_that_is_replaced_while_it_is_copied_is_told_of(odd):
    storage = odd("ranges", "seeking").storage()
    storage.replace("x", b"a" * 100)
    with storage.open("x") as reader:
        storage.replace("x", b"b" * 101)
        with pytest.raises(StorageUnavailableError, match="replaced"):
            reader.read_into(10, memoryview(bytearray(10)))


@pytest.fixture
def plain_server(tmp_path) -> Iterator[str]:
    """Python's own server of files, which knows no ranges."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_archive_behind_a_web_server_without_ranges_is_loaded(plain_server, archive):
    async_ckpt.save(state_at(1, 9), archive).result()
    assert_is_state(async_ckpt.load(Place(f"{plain_server}/{archive.name}")), 1, 9)


# --- all writers ----------------------------------------------------------------------------------------------


def _pack(place, tmp_path):
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "x.txt").write_text("x")
    async_ckpt.files.pack_folder(tmp_path / "files", place).result()


def _publish(place, _):
    with Publisher(place) as publisher:
        publisher.publish({"w": torch.ones(3)}, 1).result()


def _export(place, _):
    async_ckpt.export_hf({"w": torch.ones(3)}, place).result()


def _save(place, _):
    async_ckpt.save({"w": torch.ones(3)}, place).result()


@pytest.mark.parametrize("write", [_pack, _publish, _export, _save])
def test_whoever_writes_first_proves_the_place(odd, write, tmp_path):
    fs = odd("part").fs
    with pytest.raises(StorageUnavailableError, match="returns other bytes"):
        write(Place("one/x.tar" if write in (_pack, _save) else "one", fs=fs), tmp_path)
    assert not [name for name in fs.find("one") if name.endswith((".tar", ".safetensors", "index.json"))]
