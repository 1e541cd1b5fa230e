"""Every word of `async-ckpt`, one after the other, on runs of one and of four ranks, on disks and in stores, piped and in a terminal."""

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from buckets import Bucket
from commands import in_terminal, run_command, store_options
from slices import ALL, some

import async_ckpt
from async_ckpt import Place

STEPS = """
ckpt = open_run(here.root)
for step in (1, 2, 3):
    state = {"model": {"w": torch.arange(30000.0) + step, "b": torch.ones(7)}, "own": here.rank, "step": step}
    ckpt.save(state, step, record={"loss": 1 / step}, per_rank="own").result()
ckpt.close()
"""
STYLE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Session:
    """The words that somebody types, each of which ends with the status that is expected."""

    def __init__(self, at: tuple[str, ...], *, in_a_terminal: bool) -> None:
        self.at, self.in_a_terminal = at, in_a_terminal

    def __call__(self, word: str, *arguments: Any, status: int = 0) -> str:
        line = [word, *arguments, *(self.at if any("s3://" in str(one) for one in arguments) else ())]
        if self.in_a_terminal:
            return STYLE.sub(b"", in_terminal(*line, columns=120, status=status)).decode()
        ended = run_command(*line)
        assert (ended.returncode, "Traceback" in ended.stderr) == (status, False), ended.stderr
        return ended.stdout


def chosen(size: int) -> tuple[str, ...]:
    """The value that a file of one process gets of what each rank has for itself."""
    return ("--from-rank", "own=2") if size > 1 else ()


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if request.param == "disk":
        yield Place(tmp_path / "there")
        return
    server = request.getfixturevalue("s3" if request.param == "moto" else "rclone")
    bucket = Bucket(server)
    server.make_bucket(bucket)
    for name, key in store_options(server.options)[1].items():
        monkeypatch.setenv(name, key)
    yield bucket.place("there")


PLACES = [(size, place) for place, size in product(("disk", "moto", "rclone"), (1, 4))]
PIPED = [pytest.param(*one, False, id="{}-{}-pipe".format(*one)) for one in PLACES]
# A minute each: a terminal has a process for each word, and it imports torch.
IN_TERMINALS = [pytest.param(*one, True, id="{}-{}-terminal".format(*one)) for one in PLACES]


@pytest.mark.parametrize(
    ("size", "place", "in_a_terminal"), [*some(PIPED, 5), *(IN_TERMINALS if ALL else ())], indirect=["place"]
)
def test_every_word(request, worlds, tmp_path, size, place, in_a_terminal):
    worlds.run(size, STEPS)
    at = store_options(place.options)[0] if place.options else ()
    call, run = Session(at, in_a_terminal=in_a_terminal), f"{place.text}/run"

    assert "3 steps, 1 to 3, sound" in call("verify", worlds.root)
    call("cp", worlds.root, run)
    assert steps_in(call("ls", run)) == [1, 2, 3]
    if "rclone" not in request.node.name:  # which answers a request for a range with the whole object
        read(call, size, place, tmp_path)
    call("prune", run, "--keep", "last=1", "--yes")
    call("repair", run, "--apply")
    assert steps_in(call("ls", run)) == [3]
    call("doctor", run)
    if not in_a_terminal:
        assert json.loads(call("ls", run, "--json"))["steps"][0]["step"] == 3


def steps_in(listed: str) -> list[int]:
    head, *rows = [line.split()[0] for line in listed.splitlines() if line.strip()]
    assert head == "step"
    return [*map(int, rows)]


def read(call: Session, size: int, place: Place, folder: Path) -> None:
    run, copy, file = f"{place.text}/run", f"{place.text}/copy", f"{place.text}/x.tar"
    assert "30000" in call("inspect", run, "model")
    assert "30002" in call("inspect", f"{run}/step_00000003", "model.w", "--stats")
    assert "3 steps, 1 to 3, sound" in call("verify", run)
    assert "model.w" in call("diff", f"{run}/step_00000001", f"{run}/step_00000002", status=1)

    call("cp", run, copy, "--best", "loss:max")
    assert steps_in(call("ls", copy)) == [1]
    assert "sound" in call("verify", f"{copy}/step_00000001")
    call("extract", run, "--select", "model", "--to", folder / "x.safetensors")
    call("convert", f"{run}/step_00000002", folder / "x.pt", *chosen(size))
    call("convert", folder / "x.pt", file, "--as", "archive")
    assert async_ckpt.load(Place(file, options=place.options))["step"] == 2
    assert "4 equal in every bit, 0 different" in call("diff", folder / "x.pt", file)
    assert torch.equal(torch.load(folder / "x.pt")["model"]["w"], torch.arange(30000.0) + 2)
    call("bench", f"{place.text}/bench", "--size", "1MB")
