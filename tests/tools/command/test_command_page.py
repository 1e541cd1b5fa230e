"""The pages of the command: their calls write what they show, documents have the keys that are named, and the picture is theirs.

Also the example of each command's help, which is run here beside the runs of the page.
"""

import json
import re
import runpy
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run_command

from async_ckpt.testing import moto_server
from async_ckpt.tools.command.main import app

CONSOLE = runpy.run_path(str(Path(__file__).parents[3] / ".ci/console.py"))
PAGE = "".join(page.read_text("utf-8") for page in CONSOLE["PAGES"])
DOCUMENTS = CONSOLE["DOCS"].joinpath("scripts.md").read_text("utf-8")
CALLS = [
    (call, output, bool(match[1]))
    for match in CONSOLE["BLOCK"].finditer(PAGE)
    for call, output in CONSOLE["calls_of"](match[2])
]
WORDS = sorted(command.callback.__name__ for command in app.registered_commands if command.callback)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What the calls of the page write, in its order, in a folder that stays the current one."""
    folder = tmp_path_factory.mktemp("page").resolve()
    with CONSOLE["made_runs"](PAGE, folder):
        yield [CONSOLE["lasting"](CONSOLE["output_of"](call), str(folder)) for call, _, _ in CALLS]


@pytest.mark.parametrize("number", range(len(CALLS)), ids=[call for call, _, _ in CALLS])
def test_a_call_writes_what_the_page_shows(outputs, number):
    _, shown, is_of_one_machine = CALLS[number]
    want, have = CONSOLE["lasting"](shown).splitlines(), outputs[number].splitlines()
    if is_of_one_machine:
        assert have[:1] == want[:1]
        assert len(have) > 3
    else:
        assert have == want


def test_the_page_shows_every_command():
    assert sorted({shlex.split(call)[1] for call, _, _ in CALLS if call.startswith("async-ckpt ")}) == WORDS


def test_the_picture_is_drawn_from_the_page():
    assert CONSOLE["PICTURE"].read_text("utf-8") == CONSOLE["drawn"](PAGE)


def keys_of(value: Any) -> set[str]:
    """All keys of a document, but for those of a user's own values, and of events, which are on a page of their own."""
    if isinstance(value, list):
        return {key for inner in value for key in keys_of(inner)}
    if not isinstance(value, dict):
        return set()
    inner = {key for name, one in value.items() if name not in ("record", "value", "saves") for key in keys_of(one)}
    return inner | {*value}


@pytest.mark.parametrize(
    "call",
    [
        "ls runs/a",
        "ls runs",
        "ls weights",
        "page runs/a -o json.html",
        "inspect runs/a --stats",
        "verify runs/a",
        "verify old.pt",
        "diff runs/a/step_00000300 runs/a/step_00000400",
        "cp runs/a json",
        "prune runs/a --keep last=1 --dry-run",
        "repair runs/a",
        "convert old.pt json.tar",
        "watch runs/a --once",
        "bench runs --size 1MB --tensors 2",
        "doctor",
    ],
)
def test_the_page_names_every_key_of_a_document(outputs, call):
    document = json.loads(run_command(*shlex.split(call), "--json").stdout)
    assert document.pop("version") == 1
    kind = document.pop("kind")
    (row,) = re.findall(rf"^\| `.*` \| `{kind}` \| (.*) \|$", DOCUMENTS, re.M)
    assert keys_of(document) - {*re.findall(r"`(\w+)`", row)} == set()


@pytest.mark.parametrize(
    "call",
    [
        "ls nowhere",
        "page runs/a -o old.pt",
        "inspect runs/a typo",
        "verify nowhere",
        "diff runs/a nowhere",
        "cp runs/a runs/a",
        "prune runs/a",
        "repair runs/a --unretire 100",
        "extract runs/a --select typo --to x.pt",
        "convert runs/a x.safetensors",
        "bench runs --size large",
    ],
)
def test_an_error_is_one_line_on_stderr_and_nothing_on_stdout(outputs, call):
    ended = run_command(*shlex.split(call), "--json")
    assert ended.returncode in (1, 2)
    assert ended.stdout == ""
    assert re.fullmatch(r"async-ckpt: .*\n", ended.stderr)


@pytest.fixture(scope="module")
def store() -> Iterator[None]:
    """A store that `s3://bucket` leads to."""
    with moto_server() as server, pytest.MonkeyPatch.context() as patch:
        server.make_bucket("bucket")
        patch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        for name in ("region", "access_key_id", "secret_access_key"):
            patch.setenv(f"AWS_{name.upper()}", server.options[name])
        yield


@pytest.mark.parametrize("word", WORDS)
def test_the_example_of_a_command_works(outputs, store, word):
    shutil.copy("old.pt", "model.pt")
    (example,) = re.findall(r"Example: async-ckpt (.*)", run_command(word, "--help").stdout)
    ended = run_command(*shlex.split(example))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


def test_a_command_is_described_in_one_line_of_the_list(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = run_command("--help").stdout.partition("Commands:")[2].splitlines()
    assert [line for line in lines if line.endswith("...")] == []
    assert len(lines) - 1 == len(WORDS)
