"""`follow`: what it pulls and tells, what it remembers, and how it lives with engines that do not do as they are told."""

import gc
import json
import logging
import os
import shutil
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from disks import mounted, needs_mount
from engine_servers import (
    EngineServer,
    Following,
    PlainServer,
    SGLangServer,
    VLLMServer,
    following,
    publish,
    status_in,
    versions_in,
    weights_of,
)
from racing import until

import async_ckpt
from async_ckpt.following import VLLM, EngineError, Post, Program, SGLang
from async_ckpt.weights.following import follower
from async_ckpt.weights.publishing.subscriber import Subscriber

SERVERS: list[tuple[type[EngineServer], Any]] = [(SGLangServer, SGLang), (VLLMServer, VLLM), (PlainServer, Post)]
KINDS = pytest.mark.parametrize(("server", "kind"), SERVERS, ids=["sglang", "vllm", "post"])
TALKING = pytest.mark.parametrize(("server", "kind"), SERVERS[:2], ids=["sglang", "vllm"])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_MAX_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(follower, "_CHECK_SECONDS", 0.05)


@KINDS
def test_an_engine_loads_each_version_as_a_whole(server, kind, root, into, publisher, tmp_path):
    with server() as engine, following(root, into, kind(engine.url), status=tmp_path / "status.json") as sidecar:
        for version in (1, 2, 3):
            publish(publisher, version)
            engine.wait_for(version)
        assert sidecar.end() == 3

    assert engine.versions == [1, 2, 3]
    status = status_in(tmp_path / "status.json")
    assert (status["weight_version"], status["newest"], status["error"]) == (3, 3, None)
    assert 0 <= status["age_seconds"] < 600


def test_sglang_is_told_the_folder_the_version_and_to_flush_its_cache(root, into, publisher):
    publish(publisher, 7)
    with SGLangServer() as engine:
        async_ckpt.follow(root, into, SGLang(engine.url + "/"), once=True)

    body = {"model_path": str(into), "load_format": "auto", "weight_version": "7", "flush_cache": True}
    assert engine.asked == [("/update_weights_from_disk", {**body, "abort_all_requests": False})]


def test_vllm_is_paused_while_it_loads_and_resumes_with_the_number_of_the_version(root, into, publisher):
    publish(publisher, 7)
    with VLLMServer() as engine:
        async_ckpt.follow(root, into, VLLM(engine.url, abort_requests=True), once=True)

    assert engine.asked == [
        ("/pause?mode=abort", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(into)}}),
        ("/update_weight_version", {"new_version": "7"}),
        ("/resume", None),
    ]


def test_a_vllm_that_cannot_load_stays_paused_until_it_has_loaded_a_version(root, into, publisher, tmp_path):
    publish(publisher, 1)
    with VLLMServer() as engine:
        engine.refuses = 500
        with following(root, into, VLLM(engine.url), status=tmp_path / "status.json"):
            until(lambda: "stays paused" in (status_in(tmp_path / "status.json").get("error") or ""))
            assert engine.is_paused
            engine.refuses = None
            engine.wait_for(1)
            until(lambda: not engine.is_paused)


def test_a_program_is_run_with_the_version_and_the_folder(root, into, publisher, tmp_path):
    publish(publisher, 3)
    script = "import os, pathlib; pathlib.Path({!r}).write_text(os.environ['ASYNC_CKPT_VERSION'] + os.environ['ASYNC_CKPT_FOLDER'])"
    program = Program([sys.executable, "-c", script.format(str(tmp_path / "ran"))])

    assert async_ckpt.follow(root, into, program, once=True) == 3

    assert (tmp_path / "ran").read_text() == f"3{into}"


def test_a_function_is_an_engine_and_what_it_raises_is_a_no(root, into, publisher):
    publish(publisher, 1)
    seen: list[tuple[Path, int]] = []

    def load(folder: Path, version: int) -> None:
        seen.append((folder, version))
        if len(seen) < 3:
            raise RuntimeError("not yet")

    assert async_ckpt.follow(root, into, load, once=True, poll_seconds=0.02) == 1
    assert seen == [(into, 1)] * 3


def test_without_an_engine_the_folder_follows(root, into, publisher):
    publish(publisher, 1, 2)

    async_ckpt.follow(root, into, once=True)

    assert versions_in(into) == {2.0}


def test_a_key_is_sent_to_the_engine_and_shown_nowhere(root, into, publisher, caplog, tmp_path):
    publish(publisher, 1)
    with SGLangServer(key="secret-of-the-test") as engine, caplog.at_level(logging.INFO):
        with following(root, into, SGLang(engine.url, key="wrong"), status=tmp_path / "s"):
            until(lambda: "401" in (status_in(tmp_path / "s").get("error") or ""))
        async_ckpt.follow(root, into, SGLang(engine.url, key="secret-of-the-test"), once=True, status=tmp_path / "s")

    assert engine.versions == [1]
    assert "secret-of-the-test" not in caplog.text + (tmp_path / "s").read_text()


# What is remembered.


@KINDS
def test_a_sidecar_that_starts_again_tells_an_engine_nothing_twice(server, kind, root, into, publisher):
    publish(publisher, 1)
    with server() as engine:
        for _ in range(2):
            async_ckpt.follow(root, into, kind(engine.url), once=True)

    assert engine.versions == [1]


@TALKING
def test_an_engine_that_was_started_again_is_told_again(server, kind, root, into, publisher):
    publish(publisher, 1)
    with server() as engine, following(root, into, kind(engine.url)):
        engine.wait_for(1)
        engine.stop()
        engine.start()
        engine.wait_for(1)

    assert engine.versions == [1, 1]


def test_an_engine_that_was_started_again_while_no_sidecar_ran_is_told_again(root, into, publisher):
    publish(publisher, 1)
    with SGLangServer() as engine:
        async_ckpt.follow(root, into, SGLang(engine.url), once=True)
        engine.stop()
        engine.start()
        async_ckpt.follow(root, into, SGLang(engine.url), once=True)

    assert engine.versions == [1, 1]


def test_a_record_that_cannot_be_read_counts_as_none(root, into, publisher):
    publish(publisher, 1)
    with PlainServer() as engine:
        async_ckpt.follow(root, into, Post(engine.url), once=True)
        (record,) = (into / ".weight_sync").glob("follow.*.json")
        late = record.read_bytes().replace(b'"at": 0.0', b'"at": 1' + b"0" * 400)  # larger than any float
        assert late != record.read_bytes()
        for damaged in (
            b"",
            b"{",
            b"[1]",
            b'{"told": [1]}',
            b'{"told": [-1, ""], "loading": null}',
            b"\xff" * 100,
            late,
        ):
            record.write_bytes(damaged)
            async_ckpt.follow(root, into, Post(engine.url), once=True)

    assert engine.versions == [1] * 8


# Engines that do not do as they are told.


def test_an_engine_that_was_down_loads_the_newest_version_only(root, into, publisher, tmp_path):
    with SGLangServer() as engine:
        engine.stop()
        with following(root, into, SGLang(engine.url), status=tmp_path / "s"):
            for version in (1, 2, 3):
                publish(publisher, version)
                until(lambda wanted=float(version): versions_in(into) == {wanted})
                until(lambda: "does not answer" in (status_in(tmp_path / "s").get("error") or ""))
            engine.start()
            engine.wait_for(3)
            until(lambda: status_in(tmp_path / "s")["error"] is None)

    assert engine.versions == [3]
    assert "does not answer" in status_in(tmp_path / "s")["last_error"]["error"]


@KINDS
@pytest.mark.parametrize("status", [400, 500, 503, 302])
def test_an_engine_that_refuses_is_asked_again(server, kind, status, root, into, publisher, tmp_path):
    publish(publisher, 1)
    with server() as engine:
        engine.refuses = status
        with following(root, into, kind(engine.url), status=tmp_path / "s"):
            until(lambda: f"answered {status}" in (status_in(tmp_path / "s").get("error") or ""))
            publish(publisher, 2)
            until(lambda: status_in(tmp_path / "s")["newest"] == 2)
            assert engine.loaded == []
            engine.refuses = None
            engine.wait_for(2)

    assert engine.versions[-1] == 2


@TALKING
def test_an_engine_whose_yes_is_not_seen_afterwards_is_asked_again(server, kind, root, into, publisher, tmp_path):
    publish(publisher, 1)
    with server() as engine:
        engine.takes_silently = True
        with following(root, into, kind(engine.url), status=tmp_path / "s"):
            until(lambda: "says that it has 'default'" in (status_in(tmp_path / "s").get("error") or ""))
            assert status_in(tmp_path / "s")["weight_version"] is None
            engine.takes_silently = False
            engine.wait_for(1)
            until(lambda: status_in(tmp_path / "s")["weight_version"] == 1)


def test_an_engine_that_hangs_is_left_after_its_time_and_asked_again(root, into, publisher, tmp_path):
    publish(publisher, 1)
    with PlainServer() as engine:
        engine.hangs = threading.Event()
        with following(root, into, Post(engine.url, answer_seconds=0.3), status=tmp_path / "s"):
            until(lambda: "has not answered in time" in (status_in(tmp_path / "s").get("error") or ""))
            publish(publisher, 2)
            until(lambda: versions_in(into) == {2.0})  # it does not hold the folder for ever
            engine.hangs.set()
            until(lambda: 2 in engine.taken)


def test_an_engine_that_sends_a_byte_now_and_then_has_not_answered(root, into, publisher, tmp_path):
    publish(publisher, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = threading.Event()

        def drip() -> None:
            while not gone.is_set():
                client, _ = server.accept()
                with client:
                    try:
                        client.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                        while not gone.wait(0.02):
                            client.sendall(b"x")
                    except OSError:
                        pass

        threading.Thread(target=drip, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with following(root, into, Post(url, answer_seconds=0.3), status=tmp_path / "s"):
            until(lambda: "has not answered in time" in (status_in(tmp_path / "s").get("error") or ""))
        gone.set()


@pytest.mark.parametrize("reply", [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n[1]"])
def test_an_answer_that_says_nothing_is_a_no(reply, root, into, publisher, tmp_path):
    publish(publisher, 1)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.recv(65536)
                    client.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with following(root, into, SGLang(url), status=tmp_path / "s"):
            until(lambda: (status_in(tmp_path / "s").get("error") or "").startswith(url))
            assert status_in(tmp_path / "s")["weight_version"] is None
        server.shutdown(socket.SHUT_RDWR)


def test_a_program_that_is_at_work_for_too_long_is_killed_with_its_group(root, into, publisher, tmp_path):
    publish(publisher, 1)
    (tmp_path / "inner.py").write_text(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    )
    outer = f"import subprocess, sys; subprocess.run([sys.executable, {str(tmp_path / 'inner.py')!r}])"
    with following(root, into, Program([sys.executable, "-c", outer], answer_seconds=3), status=tmp_path / "s"):
        until(lambda: "it took too long" in (status_in(tmp_path / "s").get("error") or ""))
        pid = int((tmp_path / "pid").read_text())
        until(lambda: not is_running(pid))


def is_running(pid: int) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# One folder, several engines.


def test_sidecars_of_one_folder_pull_once_and_tell_each_its_own_engine(root, into, publisher, caplog):
    caplog.set_level(logging.INFO, "async_ckpt")
    with (
        SGLangServer() as a,
        VLLMServer() as b,
        PlainServer() as c,
        following(root, into, SGLang(a.url)),
        following(root, into, VLLM(b.url)),
        following(root, into, Post(c.url)),
    ):
        for version in range(1, 7):
            publish(publisher, version)
            for engine in (a, b, c):
                engine.wait_for(version)
    pulls = [record.getMessage() for record in caplog.records if record.getMessage().startswith("pulled")]

    assert len(pulls) == 6
    for engine in (a, b, c):
        assert engine.versions == [1, 2, 3, 4, 5, 6]


def test_nobody_pulls_while_an_engine_loads(root, into, publisher, gate, caplog, monkeypatch):
    monkeypatch.setattr("async_ckpt.core.host.waits._FIRST_SECONDS", 0.1)
    publish(publisher, 1)
    with SGLangServer() as slow, PlainServer() as other:
        slow.between = gate.passed
        with following(root, into, SGLang(slow.url)), following(root, into, Post(other.url)):
            gate.wait_reached()
            other.wait_for(1)  # engines load side by side
            publish(publisher, 2)
            until(lambda: "or an engine that loads from it" in caplog.text)
            assert versions_in(into) == {1.0}
            gate.open()
            slow.wait_for(2)
            other.wait_for(2)

    assert slow.versions == [1, 2]
    assert other.versions == [1, 2]


def test_loads_that_follow_each_other_do_not_keep_a_pull_waiting(root, into, publisher):
    """Engines that always fail hold the folder almost all the time; the pull has its turn all the same."""
    publish(publisher, 1)
    hang = threading.Event()
    with PlainServer() as one, PlainServer() as other, PlainServer() as good:
        one.hangs = other.hangs = hang
        with (
            following(root, into, Post(one.url, answer_seconds=0.4)),
            following(root, into, Post(other.url, answer_seconds=0.3)),
            following(root, into, Post(good.url)),
        ):
            good.wait_for(1)
            for version in (2, 3):
                publish(publisher, version)
                good.wait_for(version)
            hang.set()

    assert good.versions == [1, 2, 3]


def test_a_second_sidecar_for_the_same_engine_and_folder_is_refused(root, into, publisher, monkeypatch):
    monkeypatch.setattr("async_ckpt.weights.following.shared_folder._CLAIM_SECONDS", 0.1)
    publish(publisher, 1)
    with SGLangServer() as engine, following(root, into, SGLang(engine.url)):
        engine.wait_for(1)
        with pytest.raises(async_ckpt.errors.DestinationBusyError, match="another sidecar"):
            async_ckpt.follow(root, into, SGLang(engine.url), once=True)


# Roots that change.


def test_a_root_that_is_set_back_takes_the_engine_back(root, into, publisher):
    publish(publisher, 10, 20, 30)
    with SGLangServer() as engine, following(root, into, SGLang(engine.url)):
        engine.wait_for(30)
        with async_ckpt.Publisher(root, on_rollback="retire") as again:
            again.publish({name: tensor + 0.5 for name, tensor in weights_of(20).items()}, 20).result()
            until(lambda: engine.loaded[-1] == {20.5})

            engine.wait_for(20)

    assert engine.loaded[0] == {30.0}  # maybe 10 on the way, which is the newest for a moment


def test_a_version_that_is_published_again_with_other_weights_is_loaded_again(root, into, publisher):
    publish(publisher, 1, 2)
    with SGLangServer() as engine, following(root, into, SGLang(engine.url)):
        engine.wait_for(2)
        with async_ckpt.Publisher(root, on_rollback="retire") as again:
            again.publish({name: tensor + 0.5 for name, tensor in weights_of(2).items()}, 2).result()
        until(lambda: engine.loaded[-1] == {2.5})

    assert engine.loaded[0] == {2.0}


def test_a_version_that_is_damaged_is_told_to_nobody_and_the_next_one_is(root, into, publisher, tmp_path):
    publish(publisher, 1)
    with SGLangServer() as engine, following(root, into, SGLang(engine.url), status=tmp_path / "s"):
        engine.wait_for(1)
        with async_ckpt.Publisher(tmp_path / "aside", encoding=None) as aside:
            publish(aside, 2)
        (file,) = (tmp_path / "aside" / "weight_v000002").glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
        os.rename(tmp_path / "aside" / "weight_v000002", root / "weight_v000002")
        until(lambda: (status_in(tmp_path / "s").get("error") or "") != "")
        publish(publisher, 3)
        engine.wait_for(3)

    assert engine.versions == [1, 3]


def test_a_version_that_never_becomes_whole_is_not_there(root, into, publisher, bucket, s3):
    place = async_ckpt.Place(f"s3://{bucket}/weights", options=s3.options)
    with async_ckpt.Publisher(place) as remote:
        publish(remote, 1)
        place.storage().replace("weight_v000002/files.00000000/model.safetensors", bytes(100))
        with SGLangServer() as engine:
            assert async_ckpt.follow(place, into, SGLang(engine.url), once=True) == 1


def test_a_root_that_is_gone_for_too_long_ends_it(root, into, publisher, tmp_path):
    publish(publisher, 1)
    with SGLangServer() as engine:
        sidecar = Following(root, into, SGLang(engine.url), patience_seconds=0.3)
        sidecar.start()
        engine.wait_for(1)
        shutil.rmtree(root)
        sidecar.join()
        with pytest.raises(async_ckpt.StorageUnavailableError, match=r"no version, for more than 0\.3 s"):
            sidecar.end()
    (tmp_path / "file").touch()
    with pytest.raises(async_ckpt.StorageUnavailableError, match="a file"):
        async_ckpt.follow(tmp_path / "file", into, patience_seconds=0.1, poll_seconds=0.02)


def test_a_root_that_comes_back_in_time_is_followed_further(root, into, publisher, tmp_path):
    publish(publisher, 1)
    with SGLangServer() as engine, following(root, into, SGLang(engine.url), status=tmp_path / "s"):
        engine.wait_for(1)
        os.rename(root, tmp_path / "away")
        until(lambda: status_in(tmp_path / "s")["newest"] is None)
        os.rename(tmp_path / "away", root)
        publish(publisher, 2)
        engine.wait_for(2)


# The machine.


@needs_mount
def test_a_full_disk_keeps_the_version_that_is_there_until_there_is_room(root, tmp_path):
    with (
        mounted(tmp_path / "disk", "size=1m") as disk,
        async_ckpt.Publisher(root, encoding=None) as publisher,
        SGLangServer() as engine,
    ):
        publish(publisher, 1, items=5000)
        into = disk / "model"
        with following(root, into, SGLang(engine.url), status=tmp_path / "s"):
            engine.wait_for(1)
            (disk / "ballast").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize))
            publish(publisher, 2, items=5000)
            until(lambda: "free" in (status_in(tmp_path / "s").get("error") or ""))
            assert versions_in(into) == {1.0}
            (disk / "ballast").unlink()
            engine.wait_for(2)

    assert engine.versions == [1, 2]


def test_the_folder_may_be_deleted_at_any_time(root, into, publisher):
    publish(publisher, 1)
    with SGLangServer() as engine, following(root, into, SGLang(engine.url)):
        engine.wait_for(1)
        os.rename(into, into.parent / "away")  # a sidecar that looks at it does not make it again meanwhile
        shutil.rmtree(into.parent / "away")
        publish(publisher, 2)
        engine.wait_for(2)

    assert engine.versions == [1, 2]


def test_memory_descriptors_and_threads_do_not_grow_with_versions(root, into):
    num = 500 if os.environ.get("ASYNC_CKPT_MATRICES") == "all" else 40
    with (
        async_ckpt.Publisher(root, anchor_every=10, keep=3) as publisher,
        VLLMServer() as engine,
        following(root, into, VLLM(engine.url), status=into.parent / "s"),
    ):
        counts = []
        for version in range(1, num + 1):
            publish(publisher, version)
            engine.wait_for(version)
            if version % 10 == 0:
                until(lambda: threading.active_count() <= counts[0][0] if counts else True)
                gc.collect()
                counts.append((threading.active_count(), len(os.listdir("/proc/self/fd")), resident()))
    threads, descriptors, memory = (list(column) for column in zip(*counts, strict=True))

    assert max(threads) <= threads[0] + 2  # of the server, which are about to end
    assert max(descriptors) <= descriptors[0] + 3  # connections of the server that are about to be closed
    assert memory[-1] - memory[0] < 40e6
    assert sorted(os.listdir(into / ".weight_sync")) == sorted(set(os.listdir(into / ".weight_sync")))
    assert len(os.listdir(into / ".weight_sync")) == 6


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Wrong arguments.


@pytest.mark.parametrize("url", ["127.0.0.1:30000", "ftp://x", "http://", "", "http:///x", "http://user:pass@x:1"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="URL of an engine"):
        SGLang(url)
    with pytest.raises(ValueError, match="URL of an engine"):
        Post(url)


def test_a_program_that_is_not_there_is_refused(tmp_path):
    for command in ("no-such-program --x", "", [str(tmp_path)]):
        with pytest.raises(ValueError, match="is not a program here"):
            Program(command)


def test_a_folder_inside_the_root_or_around_it_is_refused(root, tmp_path, publisher):
    publish(publisher, 1)
    (tmp_path / "link").symlink_to(root)
    for folder in (root, root / "model", root.parent, tmp_path / "link" / "model"):
        with pytest.raises(ValueError, match="inside each other"):
            async_ckpt.follow(root, folder, once=True)
        with pytest.raises(ValueError, match="inside each other"):
            async_ckpt.follow(Subscriber(root), folder, once=True)


def test_a_folder_with_other_files_is_refused_and_left_as_it_is(root, into, publisher):
    publish(publisher, 1)
    into.mkdir()
    (into / "mine").touch()
    with pytest.raises(FileExistsError):
        async_ckpt.follow(root, into, once=True)
    assert os.listdir(into) == ["mine"]


@pytest.mark.parametrize("value", [0, -1, float("nan"), True, "1", None])
def test_times_that_are_none_are_refused(value, root, into):
    for name in ("poll_seconds", "patience_seconds"):
        with pytest.raises(ValueError, match=name):
            async_ckpt.follow(root, into, **{name: value})
    with pytest.raises(ValueError, match="answer_seconds"):
        Post("http://x", answer_seconds=value)


@pytest.mark.parametrize("engine", ["http://127.0.0.1:30000", SGLang, int])
def test_what_is_no_engine_is_refused(engine, root, into):
    with pytest.raises(TypeError, match="engine must be"):
        async_ckpt.follow(root, into, engine)


@pytest.mark.parametrize(
    "url", ["http://x:port", "http://x:0", "http://[::1", "http://x/a b", "http://x/\xe9", "http://x/\n"]
)
def test_a_url_that_cannot_be_requested_is_refused(url):
    with pytest.raises(ValueError, match="is not the URL of an engine"):
        Post(url)


def test_an_engine_with_a_wrong_key_or_time_is_refused():
    with pytest.raises(ValueError, match="printable ASCII"):
        SGLang("http://x", key=3)
    with pytest.raises(ValueError, match="answer_seconds must be"):
        SGLang("http://x", answer_seconds=0)


def test_a_host_that_cannot_exist_does_not_answer():
    with pytest.raises(EngineError, match="does not answer"):
        SGLang(f"http://{'a' * 70}").version()


def test_a_status_that_cannot_be_written_is_told_of_at_once(root, into, tmp_path):
    with pytest.raises(OSError, match="no-such"):
        async_ckpt.follow(root, into, once=True, status=tmp_path / "no-such" / "s")


def test_the_status_says_what_is_done_before_a_pull_and_a_load(root, into, publisher, tmp_path, monkeypatch):
    publish(publisher, 5)
    file, seen = tmp_path / "status.json", []
    pull = Subscriber.pull

    def pull_and_look(*args: Any) -> Any:
        seen.append(status_in(file)["doing"])
        return pull(*args)

    monkeypatch.setattr(Subscriber, "pull", pull_and_look)
    async_ckpt.follow(root, into, lambda *_: seen.append(status_in(file)["doing"]), once=True, status=file)
    assert [(doing["part"], doing["weight_version"]) for doing in seen] == [("pull", 5), ("load", 5)]
    assert seen[0]["since"] <= seen[1]["since"] <= status_in(file)["written_at"]
    assert status_in(file)["doing"] is None


@TALKING
def test_a_server_of_whole_models_is_not_told_of_an_adapter(server, kind, root, into, tmp_path):
    adapter, config = {"base_model.model.0.lora_A.weight": torch.ones(2, 8)}, tmp_path / "config"
    adapter["base_model.model.0.lora_B.weight"] = torch.ones(8, 2)
    config.mkdir()
    (config / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "target_modules": ["0"]}))
    with async_ckpt.Publisher(root) as publisher:
        publisher.publish(adapter, 1, config_folder=config).result()
    status = tmp_path / "status.json"
    with server() as engine, following(root, into, kind(engine.url), status=status):
        until(lambda: "has an adapter" in str(status_in(status).get("error")))
    assert "--exec" in status_in(status)["error"]
    assert engine.asked == []


def test_the_status_is_whole_whenever_it_is_read(root, into, publisher, tmp_path):
    publish(publisher, 1)
    written: set[float] = set()

    def is_written_often() -> bool:
        written.update(json.loads((tmp_path / "s").read_text())["written_at"] for _ in range(20))
        return len(written) > 20

    with PlainServer() as engine, following(root, into, Post(engine.url), status=tmp_path / "s", poll_seconds=0.001):
        engine.wait_for(1)
        until(is_written_often)
    assert os.listdir(tmp_path).count("s") == 1
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_the_status_is_not_written_to_what_a_link_of_another_user_leads_to(root, into, publisher, tmp_path):
    publish(publisher, 1)
    (tmp_path / "theirs").write_text("theirs")
    for name in (f".status.json.{os.getpid()}.tmp", "status.json"):
        (tmp_path / name).symlink_to("theirs")
    async_ckpt.follow(root, into, once=True, status=tmp_path / "status.json")

    assert (tmp_path / "theirs").read_text() == "theirs"
    assert not (tmp_path / "status.json").is_symlink()
