"""`async-ckpt watch`: the status of a run by what is on storage, on narrow terminals, and whatever the run looks like."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import documented, in_terminal, run_command
from states import open_run, save, save_into, state_at

from async_ckpt import Place, StorageUnavailableError
from async_ckpt.core import timing
from async_ckpt.core.events.log import NAME, EventLog
from async_ckpt.core.runs.manifest import Archive, Manifest
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.tools.command.live import watch
from async_ckpt.tools.command.live.run_status import RunStatus, RunWatch
from async_ckpt.tools.command.live.watch import lines_of, sparkline

NOW = 1_800_000_000.0
ATTEMPT = "0123abcd"


def write_step(root: Path, step: int, created: float, num_bytes: int = 1000) -> None:
    """The manifest of a step, and an archive of that size, which nobody reads."""
    folder = root / f"step_{step:08d}"
    folder.mkdir(parents=True)
    made = Manifest(step, ATTEMPT, 1, created, (Archive(f"rank_00000.{ATTEMPT}.tar", num_bytes, "0" * 32),))
    (folder / "manifest.json").write_bytes(made.dump())
    (folder / made.archives[0].name).write_bytes(bytes(num_bytes))


def write_run(root: Path, steps: int, *, age: float = 10.0, every: float = 100.0, **facts: object) -> None:
    """A run that has saved so many steps, the last one `age` seconds before NOW."""
    times = [NOW - age - every * (steps - step) for step in range(1, steps + 1)]
    clock = iter(times)
    log = EventLog(LocalStorage(root), lambda: next(clock))
    for step, created in enumerate(times, 1):
        write_step(root, step, created)
        seen = {name: value(step) if callable(value) else value for name, value in facts.items()}
        log.note("save", step, num_bytes=1000, total_seconds=0.5, stall_seconds=step / 1000, **seen)
    log.write()


def look(root: Path, now: float = NOW) -> RunStatus:
    return RunWatch(Place(root), lambda: now).look()


def test_a_status_has_the_newest_step_its_age_the_usual_time_and_the_trend(tmp_path):
    write_run(tmp_path, 12)

    status = look(tmp_path)

    assert (status.step, status.created, status.age_seconds, status.usual_seconds) == (12, NOW - 10, 10, 100)
    assert [one["step"] for one in status.saves] == list(range(12, 2, -1))
    assert status.stalls == tuple(step / 1000 for step in range(1, 13))
    assert status.bandwidths == (2000.0,) * 12
    assert status.free_bytes
    assert status.warnings == ()
    assert status.under_way is None


def test_the_lines_fit_into_sixty_columns_and_say_all_of_it(tmp_path):
    write_run(tmp_path, 12)
    log = EventLog(LocalStorage(tmp_path), lambda: NOW - 5)
    log.note("failed", 13, error="StorageFullError", message="\x1b[31m" + "it is full " * 30)
    log.write()

    lines = lines_of([look(tmp_path)], 60)

    assert max(map(len, lines)) <= 60
    text = "\n".join(lines)
    assert "step 12, 10 s ago; a save every 2 min" in text
    assert "stall      ▁▂▂▃▄▄▅▅▆▇▇█  12.0 ms" in text
    assert "\x1b" not in text
    assert re.search(r"^  13 +5 s +failed: StorageFullError: \\x1b\[31mit is", text, re.M)
    assert re.search(r"^  12 +10 s +1.0 kB", text, re.M)


@pytest.mark.parametrize("columns", [60, 200])
def test_once_in_a_terminal_is_as_wide_as_the_terminal(tmp_path, columns):
    save_into(tmp_path, 1, 2, 3)
    lines = in_terminal("watch", tmp_path, "--once", columns=columns).decode().splitlines()

    assert max(map(len, lines)) <= columns
    assert sum(bool(re.search(r"\b[kMG]?B/s", line)) for line in lines) == 4  # how fast is the machine's


def test_a_terminal_is_drawn_anew_without_being_cleared_until_ctrl_c(tmp_path):
    save_into(tmp_path, 1)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "async_ckpt", "watch", str(tmp_path), "--interval", "0.05"]
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    written = b""
    while written.count(b"step 1, ") < 3:
        written += os.read(ours, 65536)
    child.send_signal(signal.SIGINT)
    try:
        while piece := os.read(ours, 65536):
            written += piece
    except OSError:
        pass  # the child has closed it
    assert child.wait(60) == 130
    os.close(ours)
    assert written.count(b"\x1b[2J") <= 1
    assert b"\x1b[?1049h" in written  # a screen of its own,
    assert b"\x1b[?1049l" in written  # which is left at the end
    assert b"Traceback" not in written


WRITER = """
import sys
from async_ckpt.core.storage.local import LocalStorage
sink = LocalStorage(sys.argv[1]).create("step_00000002/rank_00000.0123abcd.tar", num_bytes=16 << 20)
for piece in range(4):
    sys.stdin.readline()
    sink.write(piece << 22, memoryview(b"x" * (4 << 20)))
    print("written", flush=True)
"""


def test_a_step_that_another_process_writes_is_seen_with_its_bytes_and_rate(tmp_path):
    write_step(tmp_path, 1, NOW - 20)
    child = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdin=-1, stdout=-1, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    now = [NOW]
    looks = RunWatch(Place(tmp_path), lambda: now[0])
    seen = []
    for _ in range(2):
        child.stdin.write("go\n")
        child.stdin.flush()
        child.stdout.readline()
        seen.append(looks.look().under_way)
        now[0] += 2
    child.kill()
    child.communicate()

    first, second = seen
    assert first is not None
    assert second is not None
    assert (first.step, first.num_bytes, first.total_bytes, first.bytes_per_second) == (2, 4 << 20, 16 << 20, None)
    assert (second.num_bytes, second.bytes_per_second) == (8 << 20, float(2 << 20))
    assert looks.look().under_way is None  # its writer is dead
    assert "step 2 under way: 8.4 MB of 16.8 MB, 2.1 MB/s" in lines_of([RunStatus("x", NOW, under_way=second)], 60)


def test_a_step_of_ranks_is_seen_by_the_archives_that_are_whole(tmp_path):
    write_step(tmp_path, 1, NOW - 20)
    (tmp_path / "step_00000002").mkdir()
    (tmp_path / "step_00000002" / f"rank_00001.{ATTEMPT}.tar").write_bytes(b"x" * 500)

    status = look(tmp_path)

    assert status.step == 1
    assert status.under_way is not None
    assert (status.under_way.step, status.under_way.num_bytes, status.under_way.total_bytes) == (2, 500, None)


@pytest.mark.parametrize(
    ("facts", "now", "said"),
    [
        ({}, NOW + 300, "step 12 is 310 s old; a save was usual every 100.0 s"),
        ({"every": 1.0}, NOW + 40, ""),  # not yet a minute
        ({}, NOW + 280, ""),
        ({}, NOW - 100, "step 12 was committed 90 s from now, by the clock of its writer"),
        ({"free_bytes": lambda step: 10**15 - step * 10**13}, NOW, "are free, and each save takes"),
        ({"free_bytes": lambda step: 10**15 + step}, NOW, ""),
    ],
)  # fmt: skip
def test_a_status_warns_of_an_old_step_and_of_a_disk_that_fills(tmp_path, facts, now, said):
    write_run(tmp_path, 12, **facts)

    warnings = look(tmp_path, now).warnings

    assert len(warnings) == bool(said)
    assert all(said in warning for warning in warnings)


def test_a_status_warns_of_failures_as_long_as_they_are_among_the_last_saves(tmp_path):
    write_run(tmp_path, 3)
    log = EventLog(LocalStorage(tmp_path), lambda: NOW)
    for step in (4, 5):
        log.note("failed", step, error="PeerFailedError", message="rank 3 is gone")
    log.write()
    assert look(tmp_path).warnings == ("2 saves have failed of the last 5: step 5: PeerFailedError: rank 3 is gone",)
    for step in range(6, 16):
        log.note("save", step)
    log.write()
    assert look(tmp_path).warnings == ()


def test_a_run_without_a_history_is_shown_by_its_manifests(tmp_path):
    for step in range(1, 13):
        write_step(tmp_path, step, NOW - 1000 + 50 * step)

    status = look(tmp_path, NOW - 395)

    assert (status.step, status.age_seconds, status.usual_seconds) == (12, 5, 50)
    assert [one["step"] for one in status.saves] == list(range(12, 2, -1))
    assert status.stalls == ()


def test_the_newest_step_is_what_the_manifests_say_and_not_the_history(tmp_path):
    write_run(tmp_path, 3)
    (tmp_path / "step_00000003" / "manifest.json").write_text("{}")

    status = look(tmp_path)

    assert status.step == 2
    assert any("step_00000003 cannot be read" in warning for warning in status.warnings)


def test_a_step_that_a_rollback_has_retired_is_the_newest_no_more(tmp_path):
    with open_run(tmp_path, on_rollback="retire") as ckpt:
        save(ckpt, 1, 2, 3)
        looks = RunWatch(Place(tmp_path), lambda: NOW)
        assert looks.look().step == 3
        ckpt.save(state_at(2), step=2, overwrite=True).result()
        ckpt.wait()

        status = looks.look()

    assert status.step == 2
    assert status.under_way is None


def test_folders_of_other_programs_are_no_steps(tmp_path):
    write_run(tmp_path, 2)
    for name in ("version_7", "logs2024", "run-99"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_bytes(b"x")
    (tmp_path / "checkpoints.jsonl").write_bytes(b'{"step": 9}\n' * 100_000)

    status = look(tmp_path)

    assert status.step == 2
    assert status.under_way is None


def test_a_run_that_has_begun_is_waited_for_and_nothing_is_refused(tmp_path):
    (tmp_path / "start-00000001.5f3a9c01.0.json").write_text("{}")

    assert look(tmp_path).warnings == ("nothing is committed yet",)
    assert run_command("watch", tmp_path, "--once").returncode == 1
    (tmp_path / "empty").mkdir()
    assert run_command("watch", tmp_path / "empty", "--once").returncode == 1
    assert run_command("watch", tmp_path / "away", "--once").stderr.startswith("async-ckpt: ")
    for interval in ("0", "inf"):
        assert run_command("watch", tmp_path, "--once", "--interval", interval).returncode == 2


def test_a_document_has_what_the_lines_have(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1, record={"<b>": None}).result()

    told = documented("watch", tmp_path, "--once")

    assert (told["kind"], told["step"], told["warnings"]) == ("status", 1, [])
    assert told["saves"][0]["record"] == {"<b>": None}
    json.dumps(told, allow_nan=False)


class Looks:
    """The time between looks: it passes at once, and Ctrl-C comes after some of them."""

    def __init__(self, times: int) -> None:
        self.seconds: list[float] = []
        self._times = times

    def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)
        if len(self.seconds) == self._times:
            raise KeyboardInterrupt


def test_a_store_is_asked_at_most_twice_a_second(s3, bucket, proxy, monkeypatch):
    place = Place(f"s3://{bucket}/run", options={**s3.options, "endpoint": proxy.endpoint})
    save_into(place, *range(3))
    looks = Looks(5)
    monkeypatch.setattr(timing, "TIMEKEEPER", looks)
    before = []
    look = RunWatch.look

    def counting(self: RunWatch) -> RunStatus:
        before.append(len(proxy.requests))
        return look(self)

    monkeypatch.setattr(RunWatch, "look", counting)
    with pytest.raises(KeyboardInterrupt):
        watch.show([place], once=False, interval=0.01, older=None, as_json=True)
    asked = [later - earlier for earlier, later in zip(before, [*before[1:], len(proxy.requests)], strict=True)]

    assert all(number <= 2 * seconds for number, seconds in zip(asked, looks.seconds, strict=True)), (
        asked,
        looks.seconds,
    )
    assert asked[-1] == 3


def test_a_bucket_that_answers_slowly_is_shown_all_the_same(s3, bucket, proxy):
    place = Place(f"s3://{bucket}/run", options={**s3.options, "endpoint": proxy.endpoint})
    save_into(place, 1)
    proxy.delay(0.3)

    status = RunWatch(place, lambda: NOW).look()

    assert (status.step, len(status.saves)) == (1, 1)
    assert status.num_requests >= 3


def test_the_usual_time_is_that_between_saves_for_which_the_clock_went_on(tmp_path):
    log = EventLog(LocalStorage(tmp_path), iter([NOW - 900, NOW - 800, NOW - 5000, NOW - 4890, NOW - 4790]).__next__)
    for step in range(1, 6):
        write_step(tmp_path, step, NOW - 4790 if step == 5 else NOW)
        log.note("save", step)
    log.write()

    assert look(tmp_path).usual_seconds == 100


def test_a_storage_that_stops_answering_is_a_warning_and_the_last_status_stays(tmp_path, monkeypatch, capsys):
    write_run(tmp_path, 2)
    monkeypatch.setattr(timing, "TIMEKEEPER", Looks(3))
    look, times = RunWatch.look, []

    def failing(self: RunWatch) -> RunStatus:
        times.append(1)
        if len(times) == 2:
            raise StorageUnavailableError("gone", path="x")
        return look(self)

    monkeypatch.setattr(RunWatch, "look", failing)
    with pytest.raises(KeyboardInterrupt):
        watch.show([Place(tmp_path)], once=False, interval=1, older=None, as_json=False)

    first, second, third = (text for text in capsys.readouterr().out.split(f"{tmp_path}\n") if text)
    assert "! the storage does not answer: gone" in second
    assert "step 2, " in first
    assert "step 2, " in second
    assert "does not answer" not in third


def test_nothing_is_changed(tmp_path):
    write_run(tmp_path, 2)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    look(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert (tmp_path / NAME) in before


def test_a_sparkline_goes_from_the_least_to_the_greatest():
    assert sparkline([1, 2, 3, 8], 10) == "▁▂▃█"
    assert sparkline([5, 5], 10) == "▁▁"
    assert sparkline([9, 1, 2], 2) == "▁█"
