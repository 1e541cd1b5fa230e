"""`make bench-gpu`: whatever becomes of one part, the others are measured, and what was measured is kept.

That each part runs is seen in `make bench-check`, on the simulated device.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable

import pytest

from benchmarks import __main__, gpu, gpu_bench
from benchmarks.gpu import Part
from benchmarks.gpu_bench import Bench, CannotMeasureError, Found
from benchmarks.table import Figure


class Device:
    """As much of one as the command itself asks for."""

    def forget(self) -> None: ...


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # there are none, and it takes long to import


@pytest.fixture(autouse=True)
def _signals_as_before():
    """The command handles SIGTERM for the rest of its process, which is that of the tests behind this one."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def rows_of(tmp_path, monkeypatch):
    """Runs the command with these parts, a row of its name for each; returns the rows that are kept."""
    monkeypatch.setattr(gpu_bench, "here", Device)

    def run(*options: str, seconds: float = 1.0, **measures: Callable[[Bench], Found]):
        def part(name: str) -> Part:
            figure = Figure(f"title of {name}", "s", "limit", None, [])
            return Part(seconds, lambda bench: {name: measures[name](bench)}, {name: figure})

        monkeypatch.setattr(gpu, "_parts", lambda: {name: part(name) for name in measures})
        try:
            __main__.main(["gpu", "--quick", "--dir", str(tmp_path / "disk"), "--out", str(tmp_path), *options])
        finally:
            rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["figures"]
        return rows

    return run


def measured(bench: Bench) -> Found:
    return Found([(2.0, 1.0)], "a note", {"sample": 2.0})


def test_without_an_accelerator_every_row_says_that_it_was_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_bench, "here", lambda: None)
    __main__.main(["gpu", "--quick", "--dir", str(tmp_path / "disk"), "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["figures"]

    assert {"gpu_pending", "gpu_copy_48", "gpu_traps"} <= {*rows}
    assert {row["note"] for row in rows.values()} == {"not measured on a GPU"}
    assert not any("pairs" in row for row in rows.values())


def test_a_row_keeps_its_samples_and_their_details(rows_of):
    row = rows_of(one=measured)["one"]

    assert row["pairs"] == [[2.0, 1.0]]
    assert (row["note"], row["details"]) == ("a note", {"sample": 2.0})


def test_an_error_is_kept_with_its_traceback_and_the_next_part_goes_on(rows_of):
    def breaks(bench: Bench) -> Found:
        raise RuntimeError("it broke")

    rows = rows_of(first=breaks, second=measured)

    assert rows["first"]["note"] == "failed: RuntimeError: it broke"
    assert "in breaks" in rows["first"]["details"]["traceback"]
    assert rows["second"]["pairs"] == [[2.0, 1.0]]


def test_what_the_machine_lacks_is_no_failure(rows_of):
    def lacks(bench: Bench) -> Found:
        raise CannotMeasureError("not installed")

    row = rows_of(one=lacks)["one"]

    assert row["note"] == "not measured: not installed"
    assert "details" not in row


def test_a_part_that_does_not_fit_in_the_time_that_is_left_is_not_run(rows_of):
    rows = rows_of("--seconds", "10", seconds=60, one=measured)

    assert rows["one"]["note"].endswith("s were left, and it may take 60 s")
    assert "pairs" not in rows["one"]


def test_a_part_that_does_not_end_is_ended_and_the_next_one_goes_on(rows_of, monkeypatch):
    monkeypatch.setattr(gpu, "_GRACE_SECONDS", 0.05)
    waits: list[Bench] = []

    def hangs(bench: Bench) -> Found:
        waits.append(bench)
        threading.Event().wait(60)
        raise AssertionError("nobody has ended it")

    rows = rows_of(seconds=0.05, first=hangs, second=measured)

    assert len(waits) == 1
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert rows["first"]["note"].startswith("failed: OutOfTimeError")
    assert rows["second"]["pairs"] == [[2.0, 1.0]]


def test_what_is_killed_has_kept_a_whole_table(rows_of, tmp_path):
    def killed(bench: Bench) -> Found:
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        rows_of(first=measured, second=killed, third=measured)
    rows = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["figures"]

    assert rows["first"]["pairs"] == [[2.0, 1.0]]
    assert {rows[name]["note"] for name in ("second", "third")} == {"not run: the command had ended before"}


def test_no_round_is_begun_that_does_not_fit_but_the_first_is(tmp_path, monkeypatch):
    seconds = iter([0.0, 4.0, 4.0, 8.0, 8.0])
    monkeypatch.setattr(gpu_bench, "perf_counter", lambda: next(seconds))
    setting = gpu_bench.Setting(tmp_path, few_rounds=3)

    assert list(Bench(setting, Device(), ends_at=9.0).rounds()) == [0, 1]


def test_the_command_of_the_device_tests_is_printed_at_the_end(rows_of, capsys):
    assert rows_of(one=measured)["one"]["pairs"] == [[2.0, 1.0]]
    assert capsys.readouterr().out.splitlines()[-1].startswith("The tests of the device: python -m pytest -m gpu")
