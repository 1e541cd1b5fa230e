"""The tools of the tests do what they promise: faults strike, servers die with their owner, the contract finds out."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from racing import PATIENCE, Call, until
from states import MIB

import async_ckpt
from async_ckpt.core.storage.local import LocalSink, LocalStorage
from async_ckpt.testing import FaultyProxy, StorageContract, moto_server, rclone_server
from async_ckpt.testing.servers import Server

BODY = os.urandom(MIB)


class Upstream(ThreadingHTTPServer):
    """A tiny server that remembers what arrived. It answers a PUT with what it was sent, a GET with BODY."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.arrived: list[tuple[str, str, bytes]] = []  # whole requests
        self.cut: list[int] = []  # bytes that arrived of the others
        self.hosts: list[str | None] = []
        self.endpoint = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_) -> None:
        pass  # cut connections are the subject here


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_PUT(self) -> None:
        body = self.read_body()
        self.server.arrived.append((self.command, self.path, body))
        if "chunked-answer" in self.path:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in (body[:10], body[10:]):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.answer(body)

    do_POST = do_PATCH = do_DELETE = do_PUT  # noqa: N815

    def do_GET(self) -> None:
        self.server.arrived.append((self.command, self.path, b""))
        if "unframed" in self.path:
            self.send_response(200)
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(BODY)
            self.close_connection = True
        elif "missing" in self.path:
            self.send_error(404)
        else:
            self.answer(BODY)

    do_HEAD = do_GET  # noqa: N815

    def answer(self, body: bytes) -> None:
        self.server.hosts.append(self.headers["Host"])
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline().split(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body
        want = int(self.headers.get("Content-Length", 0))
        body = b""
        try:
            while len(body) < want and (piece := self.rfile.read1(want - len(body))):
                body += piece
        finally:
            if len(body) < want:
                self.server.cut.append(len(body))
        if len(body) < want:
            raise ConnectionResetError
        return body

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def upstream():
    with Upstream() as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01], daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(PATIENCE)


@pytest.fixture
def proxy(upstream):
    with FaultyProxy(upstream.endpoint) as proxy:
        yield proxy


def connect(proxy: FaultyProxy) -> http.client.HTTPConnection:
    url = urlsplit(proxy.endpoint)
    return http.client.HTTPConnection(url.hostname, url.port, timeout=PATIENCE)


def ask(proxy: FaultyProxy, method: str = "GET", target: str = "/b/k", body=None, **headers) -> tuple[int, bytes]:
    """One request on a connection of its own."""
    with contextlib.closing(connect(proxy)) as connection:
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


CUT = (ConnectionError, http.client.HTTPException)


# --- without a fault -------------------------------------------------------------------------------------------


def test_everything_passes_and_is_recorded(proxy, upstream):
    assert ask(proxy, "PUT", "/b/k?partNumber=1&uploadId=u", BODY) == (200, BODY)
    assert ask(proxy, "GET", "/b/k") == (200, BODY)
    assert ask(proxy, "HEAD", "/b/k") == (200, b"")
    assert ask(proxy, "GET", "/b/missing")[0] == 404

    assert [(r.method, r.target, r.status) for r in proxy.requests] == [
        ("PUT", "/b/k?partNumber=1&uploadId=u", 200),
        ("GET", "/b/k", 200),
        ("HEAD", "/b/k", 200),
        ("GET", "/b/missing", 404),
    ]
    assert upstream.arrived[0] == ("PUT", "/b/k?partNumber=1&uploadId=u", BODY)
    assert proxy.count() == 4
    assert proxy.count(kind="get_object") == proxy.count(method="GET") == 2
    assert proxy.count(target="partNumber") == proxy.count(where=lambda request: request.num_bytes == MIB) == 1


def test_one_connection_serves_many_requests(proxy, upstream):
    with contextlib.closing(connect(proxy)) as connection:
        connection.request("HEAD", "/b/k")
        connection.getresponse().read()
        first = connection.sock
        for _ in range(3):
            connection.request("PUT", "/b/k", b"abc")
            assert connection.getresponse().read() == b"abc"
        assert connection.sock is first

    assert len(upstream.arrived) == 4


def test_chunks_pass_in_both_directions(proxy, upstream):
    pieces = [b"a", b"b" * 70_000, b"c" * 300_000]
    with contextlib.closing(connect(proxy)) as connection:
        for _ in range(2):  # on one connection: their ends are found
            connection.request("PUT", "/b/chunked-answer", iter(pieces), encode_chunked=True)
            assert connection.getresponse().read() == b"".join(pieces)

    assert [body for _, _, body in upstream.arrived] == [b"".join(pieces)] * 2
    assert proxy.requests[0].num_bytes is None


def test_an_answer_that_ends_with_its_connection_passes(proxy):
    assert ask(proxy, "GET", "/b/unframed") == (200, BODY)


def test_a_client_that_waits_for_leave_to_send_gets_it(proxy, upstream):
    with Waiting(proxy) as client:
        assert client.line().startswith(b"HTTP/1.1 100")
        client.send(BODY)
        assert client.line().startswith(b"HTTP/1.1 200")

    assert upstream.arrived == [("PUT", "/b/k", BODY)]


def test_the_host_that_the_client_named_is_passed_on(proxy, upstream):
    ask(proxy, Host="bucket.example:9")

    assert upstream.hosts == ["bucket.example:9"]


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        ("POST", "/b/a/k?uploads", "create_multipart_upload"),
        ("POST", "/b/k?uploads=", "create_multipart_upload"),
        ("PUT", "/b/k?uploadId=u&partNumber=3", "upload_part"),
        ("POST", "/b/k?uploadId=u", "complete_multipart_upload"),
        ("DELETE", "/b/k?uploadId=u", "abort_multipart_upload"),
        ("GET", "/b?uploads&prefix=a/b", "list_multipart_uploads"),
        ("GET", "/b/?list-type=2&prefix=a/b", "list_objects"),
        ("PUT", "/b/k", "put_object"),
        ("GET", "/b/k%3Fuploads", "get_object"),
        ("DELETE", "/b/k", "delete_object"),
        ("POST", "/b?delete", "delete_objects"),
        ("HEAD", "/b", "head_bucket"),
        ("PATCH", "/b", "other"),
    ],
)
def test_the_calls_of_s3_are_told_apart(proxy, method, target, kind):
    ask(proxy, method, target)

    assert [request.kind for request in proxy.requests] == [kind]


def test_large_bodies_stream_through(proxy, upstream):
    assert ask(proxy, "PUT", body=BODY * 24) == (200, BODY * 24)


# --- faults ----------------------------------------------------------------------------------------------------


def test_a_server_that_refuses_is_gone_until_it_is_back(proxy, upstream):
    with contextlib.closing(connect(proxy)) as connection:
        connection.request("HEAD", "/b/k")
        connection.getresponse().read()
        refusal = proxy.refuse()
        with pytest.raises(ConnectionResetError):
            connection.sock.recv(1)
    for _ in range(3):
        with pytest.raises(ConnectionRefusedError):
            ask(proxy)
    refusal.clear()

    assert ask(proxy) == (200, BODY)
    assert proxy.count() == 2


@pytest.mark.parametrize("after_bytes", [0, 1, 100_000, MIB - 1])
def test_a_request_is_cut(proxy, upstream, after_bytes):
    fault = proxy.cut_request(after_bytes, times=1)
    with pytest.raises(CUT):
        ask(proxy, "PUT", body=BODY)
    assert ask(proxy, "PUT", body=BODY) == (200, BODY)

    assert fault.hits == 1
    assert len(upstream.arrived) == 1
    if after_bytes:
        until(lambda: bool(upstream.cut))
        assert upstream.cut[0] <= after_bytes
    assert [request.status for request in proxy.requests] == [None, 200]


def test_a_request_that_is_shorter_than_the_cut_passes(proxy):
    fault = proxy.cut_request(MIB)

    assert ask(proxy, "PUT", body=BODY) == (200, BODY)
    assert fault.hits == 0


@pytest.mark.parametrize("after_bytes", [0, 1, 100_000, MIB - 1])
def test_a_response_is_cut(proxy, upstream, after_bytes):
    proxy.cut_response(after_bytes, times=1)
    with contextlib.closing(connect(proxy)) as connection:
        connection.request("GET", "/b/k")
        answer = connection.getresponse()
        assert answer.status == 200
        received = bytearray()
        with pytest.raises(CUT):
            receive(answer, received)

    assert BODY.startswith(received)
    assert len(received) <= after_bytes
    assert ask(proxy) == (200, BODY)


def receive(answer: http.client.HTTPResponse, received: bytearray) -> None:
    """As much as comes; `read` takes an early end for the end."""
    while piece := answer.read(1000):
        received += piece
    if len(received) < MIB:
        raise http.client.IncompleteRead(received)


def test_a_response_is_lost_and_what_was_asked_is_done(proxy, upstream):
    fault = proxy.lose_response(method="PUT", times=1)
    with pytest.raises(CUT):
        ask(proxy, "PUT", body=BODY)

    assert upstream.arrived == [("PUT", "/b/k", BODY)]
    assert fault.hits == 1
    assert proxy.requests[0].status is None


def test_a_request_is_acknowledged_and_lost(proxy, upstream):
    proxy.lose(method="PUT")
    with contextlib.closing(connect(proxy)) as connection:
        connection.request("PUT", "/b/k", b"hello")
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("ETag")) == (200, '"5d41402abc4b2a76b9719d911017c592"')
        answer.read()
        connection.request("GET", "/b/k")  # and the connection goes on
        assert connection.getresponse().read() == BODY
    proxy.lose(kind="complete_multipart_upload")
    status, xml = ask(proxy, "POST", "/b/a%20%26/k?uploadId=u", b"<parts/>")
    assert status == 200
    assert b"<Key>a &amp;/k</Key>" in xml
    assert b"<ETag>" in xml

    assert [method for method, _, _ in upstream.arrived] == ["GET"]


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("SlowDown", 503),
        ("InternalError", 500),
        ("AccessDenied", 403),
        ("ExpiredToken", 400),
        ("RequestTimeTooSkewed", 403),
        ("PermanentRedirect", 301),
    ],
)
def test_an_error_is_answered_in_the_words_of_s3(proxy, upstream, code, status):
    proxy.answer(code, times=2)
    got, xml = ask(proxy, "PUT", body=BODY)
    assert got == status
    assert f"<Code>{code}</Code>".encode() in xml
    assert ask(proxy, "HEAD") == (status, b"")

    assert upstream.arrived == []
    assert ask(proxy)[0] == 200
    assert [request.status for request in proxy.requests] == [status, status, 200]


def test_an_error_may_come_with_another_status(proxy):
    proxy.answer("ExpiredToken", status=403)

    assert ask(proxy)[0] == 403


def test_a_client_that_waits_for_leave_to_send_is_answered_instead(proxy, upstream):
    proxy.answer("SlowDown")
    with Waiting(proxy) as client:
        assert client.line().startswith(b"HTTP/1.1 503")

    assert upstream.arrived == []


def test_a_request_is_held_until_the_fault_is_cleared(proxy, upstream):
    fault = proxy.delay(None, method="PUT")
    call = Call(lambda: ask(proxy, "PUT", body=BODY))
    fault.wait()
    assert ask(proxy) == (200, BODY)  # others pass by
    assert [method for method, _, _ in upstream.arrived] == ["GET"]
    fault.clear()

    assert call.outcome() == (200, BODY)
    assert ask(proxy, "PUT", body=b"x") == (200, b"x")


def test_a_request_is_delayed(proxy):
    fault = proxy.delay(0.01)

    assert ask(proxy) == (200, BODY)
    assert fault.hits == 1


def test_a_request_that_meets_a_fault_while_it_is_added_is_delayed_too(proxy, monkeypatch):
    in_loop = FaultyProxy._in_loop

    def add_and_ask(self: FaultyProxy, coroutine: Any) -> Any:
        monkeypatch.setattr(FaultyProxy, "_in_loop", in_loop)
        result = in_loop(self, coroutine)  # the fault strikes from now on
        assert ask(proxy) == (200, BODY)
        return result

    monkeypatch.setattr(FaultyProxy, "_in_loop", add_and_ask)
    assert proxy.delay(0.01).hits == 1


def test_a_throttled_body_arrives_whole_and_in_many_steps(proxy):
    fault = proxy.throttle(16 * MIB)

    assert ask(proxy, "PUT", body=BODY) == (200, BODY)
    assert fault.hits == 1


def test_a_black_hole_takes_all_and_never_answers(proxy, upstream):
    fault = proxy.black_hole(times=1)
    with contextlib.closing(connect(proxy)) as connection:
        connection.request("PUT", "/b/k", BODY)
        fault.wait()
        assert ask(proxy) == (200, BODY)
        connection.sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            connection.sock.recv(1)

    assert [method for method, _, _ in upstream.arrived] == ["GET"]
    assert proxy.requests[0].status is None


# --- the script ------------------------------------------------------------------------------------------------


def test_a_fault_strikes_only_what_it_is_meant_for_and_as_often_as_it_was_told(proxy):
    fault = proxy.answer("SlowDown", method="PUT", target=r"partNumber=7\b", times=2)
    proxy.answer("AccessDenied", where=lambda request: request.headers.get("x-mark") == "1")

    assert ask(proxy, "PUT", "/b/k?partNumber=70", b"")[0] == 200
    assert ask(proxy, "GET", "/b/k?partNumber=7")[0] == 200
    statuses = [ask(proxy, "PUT", "/b/k?partNumber=7&uploadId=u", b"")[0] for _ in range(3)]
    assert statuses == [503, 503, 200]
    assert ask(proxy, **{"X-Mark": "1"})[0] == 403
    assert fault.hits == 2
    assert "struck 2 of 2" in repr(fault)


def test_faults_strike_in_the_order_in_which_they_were_added(proxy):
    proxy.answer("SlowDown", times=1)
    proxy.answer("InternalError", times=2)

    assert [ask(proxy)[0] for _ in range(4)] == [503, 500, 500, 200]


def test_a_script_may_be_cleared_and_cleared_again(proxy):
    faults = [proxy.answer("SlowDown"), proxy.refuse(), proxy.refuse()]
    proxy.clear()
    proxy.clear()
    for fault in faults:
        fault.clear()

    assert ask(proxy) == (200, BODY)


def test_many_threads_may_use_and_script_it_at_once(proxy, upstream):
    def go(number: int) -> None:
        fault = proxy.answer("SlowDown", target=f"/b/{number}$", times=1)
        assert ask(proxy, "PUT", f"/b/{number}", BODY)[0] == 503
        assert ask(proxy, "PUT", f"/b/{number}", BODY) == (200, BODY)
        assert fault.hits == 1

    for call in [Call(lambda number=number: go(number)) for number in range(12)]:
        call.outcome()

    assert proxy.count() == 24
    assert len(upstream.arrived) == 12


def test_a_predicate_that_fails_fails_the_block(upstream):
    with pytest.raises(ZeroDivisionError), FaultyProxy(upstream.endpoint) as proxy:  # noqa: PT012
        proxy.answer("SlowDown", where=lambda _: bool(1 / 0))
        with pytest.raises(CUT):
            ask(proxy)


def test_a_server_that_is_not_there_is_a_cut_connection():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with FaultyProxy(f"http://127.0.0.1:{nobody.getsockname()[1]}") as proxy, pytest.raises(CUT):
            ask(proxy)


def test_the_proxy_ends_with_its_block_whatever_is_under_way(upstream):
    with FaultyProxy(upstream.endpoint) as proxy:
        holes = [proxy.black_hole(method="PUT"), proxy.delay(None, method="GET")]
        calls = [Call(lambda: ask(proxy, "PUT", body=BODY)), Call(lambda: ask(proxy))]
        for hole in holes:
            hole.wait()
    for call in calls:
        with pytest.raises(CUT):
            call.outcome()

    with pytest.raises(ConnectionRefusedError):
        ask(proxy)
    assert "faulty-proxy" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="with"):
        proxy.refuse()


class Waiting:
    """A client that asks for leave before it sends its MIB."""

    def __init__(self, proxy: FaultyProxy) -> None:
        url = urlsplit(proxy.endpoint)
        self._socket = socket.create_connection((url.hostname, url.port), PATIENCE)
        self._file = self._socket.makefile("rb")
        self.send(b"PUT /b/k HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n" % len(BODY))

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def line(self) -> bytes:
        """The first line of the next answer; the rest of its head is skipped."""
        first = self._file.readline()
        while self._file.readline().strip():
            pass
        return first

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()
        self._socket.close()


# --- servers ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["moto", "rclone"])
def make_server(request, tmp_path):
    return moto_server if request.param == "moto" else lambda: rclone_server(tmp_path)


def test_a_server_keeps_what_it_is_given(make_server):
    with make_server() as server:
        server.make_bucket("bucket")
        assert server.keys("bucket") == server.uploads("bucket") == []
        server.client.put_object(Bucket="bucket", Key="a/ü +%", Body=b"data")
        upload = server.client.create_multipart_upload(Bucket="bucket", Key="begun")
        assert server.keys("bucket") == ["a/ü +%"]
        assert server.uploads("bucket") == ["begun"]
        server.client.abort_multipart_upload(Bucket="bucket", Key="begun", UploadId=upload["UploadId"])
        assert server.uploads("bucket") == []


def test_the_secret_key_is_not_shown(s3):
    assert s3.options["secret_access_key"] not in repr(s3)


def test_rclone_refuses_another_key(rclone):
    rclone.make_bucket("refused")
    forged = Server(rclone.endpoint, {**rclone.options, "secret_access_key": "another"}, rclone.pid)
    with contextlib.closing(forged.client), pytest.raises(forged.client.exceptions.ClientError):
        forged.keys("refused")


def test_signatures_hold_through_the_proxy(rclone):
    rclone.make_bucket("signed")
    with FaultyProxy(rclone.endpoint) as proxy:
        through = Server(proxy.endpoint, {**rclone.options, "endpoint": proxy.endpoint}, rclone.pid)
        with contextlib.closing(through.client):
            through.client.put_object(Bucket="signed", Key="k", Body=BODY)

    assert rclone.keys("signed") == ["k"]


def test_moto_knows_when_an_upload_was_begun(s3):
    s3.make_bucket("dated")
    s3.client.put_object(Bucket="dated", Key="now", Body=b"")
    now = s3.client.head_object(Bucket="dated", Key="now")["LastModified"]
    s3.client.create_multipart_upload(Bucket="dated", Key="begun")
    (upload,) = s3.client.list_multipart_uploads(Bucket="dated")["Uploads"]

    assert abs((upload["Initiated"] - now).total_seconds()) < PATIENCE


def test_two_servers_stand_side_by_side(make_server):
    with make_server() as one, make_server() as other:
        assert one.endpoint != other.endpoint
        assert answers(one.endpoint)
        assert answers(other.endpoint)
    assert not answers(one.endpoint)


def test_a_server_that_cannot_start_says_why(tmp_path, monkeypatch):
    if os.name != "posix":
        pytest.skip("a script stands in for the server")
    broken = tmp_path / "rclone"
    broken.write_text("#!/bin/sh\necho the reason >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda *_, **__: str(broken))
    with pytest.raises(RuntimeError, match="the reason"), rclone_server(tmp_path):
        pass


OWNER = """
import sys
from async_ckpt.testing import moto_server, rclone_server
with moto_server() as moto, rclone_server(sys.argv[1]) as rclone:
    print(moto.endpoint, moto.pid, rclone.endpoint, rclone.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="processes are looked up in /proc")
def test_servers_die_with_their_owner_even_when_it_is_killed(tmp_path):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(async_ckpt.__file__).parents[1],
    )
    with owner:
        moto, moto_pid, rclone, rclone_pid = owner.stdout.readline().split()
        assert answers(moto)
        assert answers(rclone)
        owner.send_signal(signal.SIGKILL)
    for endpoint, pid in [(moto, moto_pid), (rclone, rclone_pid)]:
        until(lambda endpoint=endpoint: not answers(endpoint))
        until(lambda pid=pid: not Path("/proc", pid).exists())


def answers(endpoint: str) -> bool:
    try:
        with urlopen(endpoint + "/"):
            return True
    except OSError as error:
        return hasattr(error, "code") and error.close() is None  # an HTTP status is an answer


# --- the contract ----------------------------------------------------------------------------------------------


class Broken(LocalStorage):
    """A disk whose sinks are of a broken kind."""

    def __init__(self, root, sink) -> None:
        super().__init__(root)
        self._sink = sink

    def create(self, path, **options):
        sink = super().create(path, **options)
        sink.__class__ = self._sink
        sink.later = []
        return sink


class WritesLate(LocalSink):
    """It reads the memory after it has let go of it."""

    def write(self, offset, data, lease=None) -> None:
        self.later.append((offset, data))

    def finish(self, num_bytes=None) -> None:
        for offset, data in self.later:
            super().write(offset, data)
        super().finish(num_bytes)


class KeepsMemory(LocalSink):
    def write(self, offset, data, lease=None) -> None:
        super().write(offset, data)
        lease.retain()


class ReleasesTwice(LocalSink):
    def write(self, offset, data, lease=None) -> None:
        super().write(offset, data)
        lease.release()


class ShowsEarly(LocalSink):
    def write(self, offset, data, lease=None) -> None:
        super().write(offset, data)
        self._target.touch()


class LeavesTraces(LocalSink):
    def abort(self) -> None:
        self.close()


@pytest.mark.parametrize(
    ("sink", "test"),
    [
        (WritesLate, "test_segments_may_come_in_any_order_one_after_the_other"),
        (KeepsMemory, "test_all_memory_is_back_when_an_object_is_finished"),
        (ReleasesTwice, "test_all_memory_is_back_when_an_object_is_finished"),
        (ShowsEarly, "test_an_object_appears_when_it_is_finished_and_not_before"),
        (LeavesTraces, "test_an_abort_leaves_the_object_that_was_there_before"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_contract_finds_out_a_sink_that_breaks_it(tmp_path, sink, test):
    getattr(StorageContract(), test)(LocalStorage(tmp_path / "sound"))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(StorageContract(), test)(Broken(tmp_path / "broken", sink))


def test_the_contract_finds_out_a_put_that_overwrites(tmp_path):
    class Overwrites(LocalStorage):
        def put_new(self, path, data) -> None:
            self.replace(path, data)

    with pytest.raises(AssertionError):
        StorageContract().test_of_many_writers_that_put_a_new_object_exactly_one_wins(Overwrites(tmp_path))
