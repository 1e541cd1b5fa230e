"""Pythons that start no thread once they exit, as 3.12.0 and 3.12.1: what is under way then is still saved."""

import subprocess
import sys
import textwrap
import threading

import pytest
from racing import PATIENCE, until
from states import assert_is_state, open_run

import async_ckpt
from async_ckpt.core.host import threads

# As in those Pythons, from the moment on that the first exit hook runs. The writes wait for that moment.
HEAD = """
import os, sys, threading, torch, async_ckpt
from async_ckpt.core.host import threads
from children import hold_writes
from states import open_run, state_at

root = sys.argv[1]
go = hold_writes()
threads._reserve.run_all(())

def exits():
    def start(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = start
    go.set()

def begin(target):
    target()
    threading._register_atexit(exits)
"""


def test_the_last_save_of_a_python_that_starts_no_thread_any_more_is_committed(tmp_path, nursery):
    body = HEAD + "begin(lambda: open_run(root).save(state_at(1, 30), step=1))"
    nursery.out_of(body, tmp_path)
    with open_run(tmp_path) as ckpt:
        assert_is_state(ckpt.load(1), 1, 30)


def test_what_is_packed_and_exported_last_is_there_without_new_threads(tmp_path, nursery):
    body = """
    def last():
        with async_ckpt.pack(root + "/x.tar") as folder:
            for number in range(100):
                (folder / str(number)).write_bytes(os.urandom(100_000))
        async_ckpt.wrap(torch.save)(state_at(1, 5), root + "/x.pt")
        async_ckpt.save(state_at(1, 5), root + "/y.tar")
    begin(last)
    """
    nursery.out_of(HEAD + textwrap.dedent(body), tmp_path)
    assert_is_state(async_ckpt.load(tmp_path / "y.tar"), 1, 5)
    async_ckpt.files.extract(tmp_path / "x.tar", tmp_path / "out")
    assert len(list((tmp_path / "out").iterdir())) == 100
    assert (tmp_path / "x.pt").exists()


def no_thread(thread):
    raise RuntimeError("no thread")


def until_idle(reserve):
    until(lambda: not reserve._num_waiting)


def test_the_reserve_is_filled_by_those_pythons_only():
    threads.prepare_for_exit()

    assert (threads._reserve._num_threads > 0) == ((3, 12, 0) <= sys.version_info < (3, 12, 2))


def test_a_thread_of_the_reserve_does_what_another_would_have_done(monkeypatch):
    reserve = threads.Crew("reserve", 1)
    monkeypatch.setattr(threads, "_reserve", reserve)
    reserve.run_all(())
    until_idle(reserve)
    monkeypatch.setattr(threads.LibraryThread, "start", no_thread)
    names, told = [], []
    monkeypatch.setattr(threading, "excepthook", told.append)
    for number in range(3):  # it comes back
        ran = threads.start_thread(str(number), lambda: names.append(threading.current_thread().name))
        ran.join()
        assert not ran.is_alive()
        until_idle(reserve)
    threads.start_thread("fails", lambda: 1 / 0).join()
    until_idle(reserve)
    with pytest.raises(RuntimeError, match="no thread"):
        threads.start_thread("daemon", lambda: None, daemon=True)
    reserve.stop()
    with pytest.raises(RuntimeError, match="no thread"):
        threads.start_thread("late", lambda: None)

    assert names == ["async_ckpt-0", "async_ckpt-1", "async_ckpt-2"]
    assert [hook.exc_type for hook in told] == [ZeroDivisionError]


@pytest.mark.parametrize(
    "call", ["async_ckpt.save({}, sys.argv[1] + '/x')", "async_ckpt.AsyncCheckpointer(sys.argv[1])"]
)
def test_a_first_use_while_the_interpreter_exits_says_that_it_is_too_late(tmp_path, call):
    body = f"""
    import atexit, sys, torch
    import async_ckpt

    def last():
        try:
            {call}
        except async_ckpt.ClosedError as error:
            print(error)

    atexit.register(last)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(body), tmp_path], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("the interpreter is exiting; async_ckpt must be used for the first time before")


@pytest.mark.parametrize("call", ["async_ckpt.save({}, path)", "async_ckpt.wrap(torch.save)({}, path)"])
def test_a_thread_that_outlives_the_main_thread_gets_an_error_and_the_process_ends(tmp_path, call):
    body = f"""
    import sys, threading

    exits = threading.Event()
    threading._register_atexit(exits.set)  # the first one is called last

    import torch
    import async_ckpt

    path, imported = sys.argv[1] + "/x", (async_ckpt.save, async_ckpt.wrap)

    def outlive():
        exits.wait()
        try:
            {call}
        except async_ckpt.ClosedError as error:
            print(error)

    threading.Thread(target=outlive).start()
    """
    command = [sys.executable, "-c", textwrap.dedent(body), tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout == "the interpreter is exiting; a save must begin before that\n"
