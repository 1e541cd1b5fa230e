"""`progress=True`: a bar for each save, drawn by the real tqdm; what goes wrong with it harms no save."""

import io
import os
import re
import sys
import termios
from contextlib import suppress
from typing import Any

import pytest
from racing import Call, Gate, until
from scripted_disk import scripted
from states import open_run, state_at
from tqdm.auto import tqdm

from async_ckpt import StorageFullError
from async_ckpt.core.saving import ledger


class Screen(io.StringIO):
    """What stderr is: a terminal, or not."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def drawn(self) -> list[str]:
        """What was drawn, one over the other."""
        return [line for line in re.split(r"[\r\n]+", self.getvalue()) if line.strip()]


def screen_of(monkeypatch: pytest.MonkeyPatch, **kind: Any) -> Screen:
    """To be made in the test itself: between fixtures and tests, pytest replaces stderr."""
    made = Screen(**{"is_terminal": True, **kind})
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_a_bar_follows_a_save_to_its_end(tmp_path, monkeypatch):
    screen = screen_of(monkeypatch)
    with open_run(tmp_path, progress=True) as ckpt, scripted(ckpt) as disk:
        stop = disk.stop("write", times=1)
        ckpt.save(state_at(1, 11), step=1)
        stop.wait_reached()
        until(lambda: any(line.startswith("step 1:  64%|") for line in screen.drawn))
        disk.release_all()
        ckpt.wait()

        assert screen.drawn[0].startswith("step 1:   0%|")
        assert re.match(r"step 1: 100%\|[█#]+\| 11\.5M/11\.5M \[.*B/s\]", screen.drawn[-1])
        assert screen.getvalue().endswith("\n")


def test_each_save_has_a_bar_of_its_own(tmp_path, monkeypatch):
    screen = screen_of(monkeypatch)
    with open_run(tmp_path, progress=True) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step=step)
            ckpt.wait()

    assert [step for step in (1, 2) if any(line.startswith(f"step {step}: 100%") for line in screen.drawn)] == [
        1,
        2,
    ]


def test_without_a_terminal_only_the_beginning_and_the_end_are_drawn(tmp_path, monkeypatch):
    file = screen_of(monkeypatch, is_terminal=False)
    with open_run(tmp_path, progress=True) as ckpt, scripted(ckpt) as disk:
        # Three segments, each written after several drawings.
        stops = [disk.stop("write", times=1) for _ in range(2)]
        handle = ckpt.save(state_at(1, 11), step=1)
        stops[0].wait_reached()
        until(lambda: bool(file.drawn))
        disk.release_all()
        handle.result()
        ckpt.wait()

    assert len(file.drawn) == 2
    assert file.drawn[0].startswith("step 1:   0%")
    assert file.drawn[1].startswith("step 1: 100%")


def test_a_real_terminal_is_drawn_on(tmp_path, monkeypatch):
    main, terminal = os.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    with open(terminal, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with open_run(tmp_path, progress=True) as ckpt:
            ckpt.save(state_at(1), step=1)
    drawn = b""
    with open(main, "rb", buffering=0) as screen, suppress(OSError):  # at the end of what was drawn
        while part := screen.read(1 << 16):
            drawn += part

    assert b"\rstep 1: 100%|" in drawn


def test_a_save_that_fails_says_so_in_its_bar(tmp_path, monkeypatch):
    screen = screen_of(monkeypatch)
    full = StorageFullError("the disk is full", path="/ckpt", needed_bytes=2, free_bytes=1)
    ckpt = open_run(tmp_path, progress=True)
    with scripted(ckpt) as disk:
        disk.fail("write", error=full)
        ckpt.save(state_at(1), step=1)
        with pytest.raises(StorageFullError):
            ckpt.close()

    assert re.search(r"step 1:   0%.*failed\]", screen.drawn[-1])


def test_a_skipped_save_has_no_bar(tmp_path, monkeypatch):
    screen = screen_of(monkeypatch)
    with open_run(tmp_path, progress=True, on_overlap="skip") as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        ckpt.save(state_at(1), step=1)
        ckpt.save(state_at(2), step=2)
        disk.release_all()

    assert not [line for line in screen.drawn if "step 2" in line]


class Broken(Screen):
    """A screen that fails after so many writes."""

    def __init__(self, error: Exception, after: int) -> None:
        super().__init__(is_terminal=True)
        self._error, self._left = error, after

    def write(self, text: str) -> int:
        self._left -= 1
        if self._left < 0:
            raise self._error
        return super().write(text)


@pytest.mark.parametrize("error", [OSError("nobody reads it"), ValueError("it is closed")])
@pytest.mark.parametrize("after", [0, 2])
def test_a_screen_that_fails_costs_no_save(tmp_path, monkeypatch, error, after):
    monkeypatch.setattr(sys, "stderr", Broken(error, after))
    with open_run(tmp_path, progress=True) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        assert ckpt.steps() == [1]
    screen = screen_of(monkeypatch)
    assert list(tqdm([1, 2], desc="training")) == [1, 2]  # nor does it stop the bars of the training
    assert screen.drawn[-1].startswith("training: 100%")


def test_a_line_that_the_training_writes_by_tqdm_stands_above_the_bar(tmp_path, monkeypatch):
    screen = screen_of(monkeypatch)
    with open_run(tmp_path, progress=True) as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        ckpt.save(state_at(1), step=1)
        until(lambda: bool(screen.drawn))
        tqdm.write("loss 0.5", file=sys.stderr)
        disk.release_all()

    lines = re.split(r"[\r\n]+", screen.getvalue())
    assert lines[lines.index("loss 0.5") - 1].strip() == ""  # cleared


def test_without_a_stderr_there_is_no_bar(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with open_run(tmp_path, progress=True) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        assert ckpt.steps() == [1]


class Stopped(Screen):
    """A terminal that takes nothing before a gate is open."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(is_terminal=True)
        self._gate = gate

    def write(self, text: str) -> int:
        self._gate.passed()
        return super().write(text)


def test_a_terminal_that_takes_nothing_holds_up_no_save(tmp_path, monkeypatch, gate):
    monkeypatch.setattr(ledger, "_LAST_DRAWING_SECONDS", 0.0)
    monkeypatch.setattr(sys, "stderr", Stopped(gate))
    with open_run(tmp_path, progress=True) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step=step).result()
        gate.wait_reached()
        ckpt.wait()
        assert ckpt.steps() == [1, 2]
    gate.open()
    until(lambda: not tqdm._instances)  # each is closed


def test_who_waits_for_the_save_writes_below_its_bar(tmp_path, monkeypatch, gate):
    monkeypatch.setattr(ledger, "_LAST_DRAWING_SECONDS", 60.0)
    monkeypatch.setattr(sys, "stderr", screen := Stopped(gate))
    with open_run(tmp_path, progress=True) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        waiter = Call(ckpt.wait)
        waiter.wait_until_inside("wait_for")
        assert waiter.is_alive()
        gate.open()
        waiter.outcome()
        assert screen.drawn[-1].startswith("step 1: 100%")


def test_a_process_that_ends_draws_its_bars_to_the_end(tmp_path, nursery):
    script = """
    import sys
    from states import open_run, state_at
    ckpt = open_run(sys.argv[1], progress=True)
    ckpt.save(state_at(1, 5), step=1)
    """
    ended = nursery.run(script, tmp_path / "run")

    assert ended.status == 0
    assert ended.err.splitlines()[-1].startswith("step 1: 100%|")


def test_tqdm_starts_no_thread_for_a_bar(tmp_path, nursery):
    script = """
    import sys, threading
    from states import open_run, state_at
    with open_run(sys.argv[1], progress=True) as ckpt:
        ckpt.save(state_at(1), step=1)
    print(*sorted({type(thread).__name__ for thread in threading.enumerate()}))
    """
    ended = nursery.run(script, tmp_path / "run")

    assert ended.out == "LibraryThread _MainThread\n"


def test_without_tqdm_it_says_what_to_install(tmp_path, monkeypatch):
    modules: dict[str, Any] = {"tqdm": None, "tqdm.auto": None}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    with pytest.raises(ImportError, match=r"pip install \"async_ckpt\[progress\]\""):
        open_run(tmp_path, progress=True)
    open_run(tmp_path).close()
