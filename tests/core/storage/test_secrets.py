"""What a URL may hold besides an address - a password, a token - is read by nobody, whatever is called with it."""

import gc
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import async_ckpt
from async_ckpt import AsyncCheckpointer, Place, files

SECRET = "".join(["sEc", "ReT/42"])  # in two, since a traceback shows this line too

URLS: list[Any] = [
    f"s3://bucket/x.tar?token={SECRET}",
    f"s3://AKIA:{SECRET}@bucket/x.tar",
    f"s3://AKIA:{SECRET}/x.tar",
    f"gs://bucket/x.tar#{SECRET}",
    f"az://container/x?sig={SECRET}",
    f"nowhere://me:{SECRET}@host/x.tar?token={SECRET}",
    f"memory://x/y.tar?token={SECRET}",
    f"simplecache::http://me:{SECRET}@localhost:1/x",
    f"file://me:{SECRET}@host/nothing/x?{SECRET}",
    Path(f"foo://me:{SECRET}@host/x.tar"),
]

CALLS: dict[str, Callable[[Any], Any]] = {
    "save": lambda url: async_ckpt.save({"a": torch.ones(2)}, url).result(),
    "load": async_ckpt.load,
    "verify": async_ckpt.verify,
    "run": lambda url: AsyncCheckpointer(["near", url]).load(),
    "restore": lambda url: AsyncCheckpointer(url).restore({}),
    "trace": lambda url: AsyncCheckpointer("near", trace=url),
    "pack": lambda url: async_ckpt.pack(url),
    "scratch of pack": lambda url: async_ckpt.pack("x.tar", scratch=url),
    "pack_folder": lambda url: files.pack_folder(url, "x.tar"),
    "unpack": lambda url: async_ckpt.unpack(url).__enter__(),
    "extract": lambda url: files.extract(url, "out"),
    "extract to it": lambda url: files.extract("x.tar", url),
    "wrap": lambda url: async_ckpt.wrap(torch.save)({}, url).result(),
    "wrap, swapped": lambda url: async_ckpt.wrap(torch.save)(url, {}),
    "wrap, by a path": lambda url: async_ckpt.wrap(lambda path: Path(path).write_text("x"))(url).result(),
    "scratch of wrap": lambda url: async_ckpt.wrap(torch.save, scratch=url),
    "export_hf": lambda url: async_ckpt.export_hf({"w": torch.ones(2)}, url).result(),
    "config_folder": lambda url: async_ckpt.export_hf({"w": torch.ones(2)}, "hf", config_folder=url),
    "local_read_dir": lambda url: files.local_read_dir(url).__enter__(),
    "local_read_files": lambda url: files.local_read_files(url, ["a"], missing="error").__enter__(),
    "upload": lambda url: files.upload_directory("folder", url),
    "upload it": lambda url: files.upload_directory(url, "memory://x"),
    "download": lambda url: files.download_directory("memory://x", url),
    "download it": lambda url: files.download_directory(url, "down"),
    "remove": files.remove,
    "open": lambda url: files.open_file(url).read(),
    "append": lambda url: files.open_file(url, "a"),
    "keep=": lambda url: async_ckpt.save({}, Place(url, keep=3)),
    "options=": lambda url: Place(url, options={"secret": SECRET, "nope": SECRET}).storage(),
}


def all_told(outcome: Any) -> str:
    """Whatever a person could come to read of how a call ended, causes and attributes included."""
    if isinstance(outcome, BaseException):
        return "".join(traceback.format_exception(outcome)) + repr(outcome) + repr(vars(outcome))
    return f"{outcome!r} {outcome}"


def outcome_of(call: Callable[[Any], Any], url: Any) -> Any:
    try:
        return call(url)
    except Exception as error:
        return error


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("name", CALLS)
def test_nobody_reads_the_secret_of_a_url(name, tmp_path, monkeypatch, caplog, recwarn):
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG, logger="async_ckpt")
    (tmp_path / "folder").mkdir()
    for url in URLS:
        told = all_told(outcome_of(CALLS[name], url))
        assert SECRET not in told, told[-2000:]
    gc.collect()
    told = [caplog.text, *(str(warning.message) for warning in recwarn)]
    told += [str(path) for path in tmp_path.rglob("*")]
    assert not [text for text in told if SECRET.partition("/")[0] in text]


class Refusing(BaseHTTPRequestHandler):
    """Says no; some clients repeat the URL in their errors."""

    def do_GET(self) -> None:
        self.send_error(404 if "missing" in self.path else 403)

    do_HEAD = do_GET  # noqa: N815 - so it is looked up

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def host() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_nor_does_a_client_give_it_away(host):
    pytest.importorskip("aiohttp")
    for url in (f"http://{host}/missing/x.tar?token={SECRET}", f"http://me:{SECRET}@{host}/x.tar?t={SECRET}"):
        for call in (async_ckpt.load, async_ckpt.verify, files.exists, CALLS["open"]):
            told = all_told(outcome_of(call, url))
            assert SECRET not in told, told[-2000:]


def test_a_url_of_a_store_with_a_query_is_refused_by_one_off_saves_as_by_runs():
    url = f"s3://bucket/x.tar?token={SECRET}"
    for call in ("save", "load", "run", "pack", "wrap", "export_hf"):
        refused = outcome_of(CALLS[call], url)
        assert isinstance(refused, ValueError)
        assert "s3://bucket/x.tar: the URL of a store must not contain ? or #" in str(refused)
