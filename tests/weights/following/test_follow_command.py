"""`async-ckpt follow`: its options, what it prints, and its exit status."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from commands import run_command
from engine_servers import PlainServer, SGLangServer, VLLMServer, publish, status_in, versions_in

import async_ckpt


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with async_ckpt.Publisher(tmp_path / "root") as publisher:
        publish(publisher, 1, 2)
    return tmp_path / "root"


def test_a_version_is_pulled_and_loaded_and_each_event_is_a_line(root, tmp_path):
    with SGLangServer() as engine:
        ended = run_command("follow", root, "--into", tmp_path / "model", "--sglang", engine.url, "--once")

    assert (ended.returncode, ended.stderr) == (0, "")
    pulled, loaded, last = ended.stdout.splitlines()
    assert pulled.startswith("pulled version 2 from an anchor: 2 versions")
    assert loaded.startswith(f"version 2 loaded by sglang {engine.url} in ")
    assert last.startswith("ended; version 2 for 0 s, newest 2; no error")


def test_with_json_each_event_is_a_document_in_a_line(root, tmp_path):
    with VLLMServer() as engine:
        given = ("--into", tmp_path / "model", "--vllm", engine.url, "--once", "--json", "--status", tmp_path / "s")
        ended = run_command("follow", root, *given)

    documents = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [one["kind"] for one in documents] == ["pulled", "told", "ended"]
    assert all(one["version"] == 1 for one in documents)
    assert all(one["weight_version"] == 2 for one in documents)
    assert documents[-1]["engine"] == status_in(tmp_path / "s")["engine"] == f"vllm {engine.url}"


def test_a_program_and_a_post_are_engines_too(root, tmp_path):
    program = [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    ended = run_command("follow", root, "--into", tmp_path / "a", "--exec", shlex.join(program), "--once")
    assert ended.returncode == 0
    assert (tmp_path / "ran").exists()

    with PlainServer() as engine:
        run_command("follow", root, "--into", tmp_path / "b", "--post", f"{engine.url}/reload?x=1", "--once")
    assert engine.asked == [("/reload?x=1", {"version": 2, "folder": str(tmp_path / "b")})]


def test_the_key_of_the_engine_comes_from_the_environment(root, tmp_path):
    with SGLangServer(key="k") as engine:
        given = ("--into", tmp_path / "model", "--sglang", engine.url, "--once")
        ended = run_command("follow", root, *given, ASYNC_CKPT_ENGINE_KEY="k")

    assert ended.returncode == 0
    assert engine.versions == [2]


def test_requests_are_aborted_on_demand(root, tmp_path):
    with SGLangServer() as engine:
        given = ("--into", tmp_path / "model", "--sglang", engine.url, "--once", "--abort-requests")
        run_command("follow", root, *given)

    assert engine.asked[0][1]["abort_all_requests"] is True


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--into", "{tmp}/m", "--sglang", "127.0.0.1:30000"], "is not the URL of an engine"),
        (["--into", "{tmp}/m", "--vllm", "localhost"], "is not the URL of an engine"),
        (["--into", "{tmp}/m", "--post", "ftp://x"], "is not the URL of an engine"),
        (["--into", "{tmp}/m", "--sglang", ""], "is not the URL of an engine"),
        (["--into", "{tmp}/m", "--sglang", "http://a:1", "--vllm", "http://b:1"], "a sidecar serves one engine"),
        (["--into", "{tmp}/m", "--exec", "true", "--post", "http://b:1"], "a sidecar serves one engine"),
        (["--into", "{tmp}/m", "--exec", "no-such-program"], "is not a program here"),
        (["--into", "{tmp}/m", "--exec", "'"], "No closing quotation"),
        (["--into", "{tmp}/m", "--abort-requests"], "--abort-requests is for"),
        (["--into", "{tmp}/root/model"], "inside each other"),
        (["--into", "{tmp}"], "inside each other"),
        (["--into", "s3://bucket/model"], "not a local path"),
        ([], "--into is missing"),
        (["--into", "{tmp}/m", "--poll", "0"], "poll_seconds must be"),
        (["--into", "{tmp}/m", "--patience", "nan"], "patience_seconds must be"),
        (["--into", "{tmp}/m", "--exec", "true", "--answer-within", "-1"], "answer_seconds must be"),
    ],
)
def test_wrong_calls_end_with_one_line_and_status_2(options, said, root, tmp_path):
    ended = run_command("follow", root, *[option.format(tmp=tmp_path) for option in options], "--once")

    assert (ended.returncode, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert ended.stderr.startswith("async-ckpt: ")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(("folder", "said"), [("file", "is a file"), ("mine", "belong to no version")])
def test_a_folder_that_versions_cannot_be_pulled_into_is_refused(folder, said, root, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    ended = run_command("follow", root, "--into", tmp_path / folder, "--once")

    assert ended.returncode == 74
    assert said in ended.stderr


def test_a_root_that_is_not_there_ends_it_with_the_status_of_storages(tmp_path):
    given = ("--into", tmp_path / "model", "--patience", 0.2, "--poll", 0.05, "--json")
    ended = run_command("follow", tmp_path / "root", *given)

    assert ended.returncode == 74
    assert "there is no version, for more than 0.2 s" in ended.stderr


def test_a_status_that_cannot_be_written_is_told_of_at_once(root, tmp_path):
    given = ("--into", tmp_path / "model", "--status", tmp_path / "no" / "s", "--once")

    assert run_command("follow", root, *given).returncode == 74


def test_names_in_the_answer_of_an_engine_reach_the_terminal_escaped(root, tmp_path):
    class Rude(PlainServer):
        def answer(self, method, path, body):  # type: ignore[no-untyped-def]
            self.refuses = None if self.asked[1:] else 500
            return (500, {"error": "\x1b[31m\x07"}) if self.refuses else super().answer(method, path, body)

    with Rude() as engine:
        ended = run_command("follow", root, "--into", tmp_path / "m", "--post", engine.url, "--once", "--poll", 0.1)

    assert ended.returncode == 0
    assert "\\x1b[31m\\x07" in ended.stderr
    assert "\x1b" not in ended.stderr
    assert versions_in(tmp_path / "m") == {2.0}
