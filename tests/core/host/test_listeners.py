"""Operations, told to listeners: all of them, each once, and no listener costs a save anything."""

import logging
import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path

import pytest
import torch
from racing import PATIENCE, Gate, Thrown, until
from scripted_disk import scripted
from states import open_run, save_into, state_at

import async_ckpt
from async_ckpt import NotCommittedError, StorageUnavailableError
from async_ckpt.core.host import operations
from async_ckpt.core.host.operations import Ended, Listening, listen, under_way

GONE = StorageUnavailableError("the disk is gone", path="/ckpt")

Listen = Callable[[Callable[[Ended], None]], Listening]


@pytest.fixture
def listening() -> Iterator[Listen]:
    """`listen`, for the time of a test."""
    begun: list[Listening] = []

    def begin(listener: Callable[[Ended], None]) -> Listening:
        begun.append(listen(listener))
        return begun[-1]

    yield begin
    for one in begun:
        one.close()


@pytest.fixture
def told(listening: Listen) -> Callable[[], list[Ended]]:
    """All that has ended so far, as a listener is told."""
    seen: list[Ended] = []
    mine = listening(seen.append)

    def all_told() -> list[Ended]:
        assert mine.flush(PATIENCE)
        return seen

    return all_told


def test_each_kind_of_operation_is_told_with_its_run_its_step_and_its_report(tmp_path, told):
    run, weights = str(tmp_path / "run"), str(tmp_path / "weights")
    model = torch.nn.Linear(4, 4)
    with open_run(run) as ckpt:
        assert ckpt.restore({"model": model}) is None
        saved = ckpt.save({"model": model}, step=7).result()
        ckpt.restore({"model": model})
    exported = async_ckpt.save({"model": model}, tmp_path / "x.tar").result()
    with async_ckpt.Publisher(f"{weights}/", encoding=None) as publisher:
        published = publisher.publish(model, version=3).result()
    pulled = async_ckpt.Subscriber(weights).pull(tmp_path / "pulled")

    assert [(e.kind, e.run, e.step, e.report) for e in told()] == [
        ("restore", run, None, None),
        ("save", run, 7, saved),
        ("restore", run, 7, None),
        ("save", "", None, exported),
        ("publish", weights, 3, published),
        ("pull", weights, 3, pulled),
    ]
    assert {e.outcome for e in told()} == {"done"}


def test_a_run_at_several_roots_is_told_with_all_of_them_and_goes_by_the_first(tmp_path, told):
    roots = [str(tmp_path / "a"), str(tmp_path / "b")]
    save_into(roots, 1)

    (ended,) = told()
    assert (ended.roots, ended.run) == (tuple(roots), roots[0])


def test_the_parts_of_a_save_lie_within_it(tmp_path, told):
    save_into(tmp_path, 1)

    (ended,) = told()
    parts = {part.name: part for part in ended.phases}
    assert set(parts) == {"call", "stage", "write", "commit"}
    for part in parts.values():
        assert ended.begin <= part.begin <= part.end <= ended.end
    assert parts["call"].begin == ended.begin
    assert parts["write"].end <= parts["commit"].begin
    assert ended.seconds == ended.end - ended.begin


def test_a_save_that_fails_is_told_with_its_error_as_text(tmp_path, told):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        disk.fail("write", error=GONE)
        assert ckpt.save(state_at(1), step=1).exception() is GONE

    (ended,) = told()
    assert (ended.outcome, ended.error_type, ended.error) == ("failed", "StorageUnavailableError", str(GONE))
    assert ended.report is None
    assert "commit" not in {part.name for part in ended.phases}


def test_an_error_whose_text_raises_is_told_by_its_type(tmp_path, told):
    class MuteError(Exception):
        def __str__(self) -> str:
            raise Thrown

    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        disk.fail("write", error=MuteError())
        assert isinstance(ckpt.save(state_at(1), step=1).exception(), MuteError)

    assert [(e.error_type, e.error) for e in told()] == [("MuteError", "")]


def test_a_restore_that_raises_has_failed(tmp_path, told):
    with open_run(tmp_path) as ckpt, pytest.raises(NotCommittedError):
        ckpt.restore(state_at(1), step=5)

    assert [(e.kind, e.outcome, e.error_type) for e in told()] == [("restore", "failed", "NotCommittedError")]


def test_a_skipped_save_is_told_as_such(tmp_path, told):
    with open_run(tmp_path, on_overlap="skip") as ckpt, scripted(ckpt) as disk:
        stop = disk.stop("write")
        first = ckpt.save(state_at(1), step=1)
        assert ckpt.save(state_at(2), step=2).result().status == "skipped"
        stop.release()
        first.result()

    assert [(e.step, e.outcome) for e in told()] == [(2, "skipped"), (1, "done")]


def test_an_operation_is_under_way_until_it_is_told(tmp_path):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        stop = disk.stop("write")
        handle = ckpt.save(state_at(1), step=1)
        until(lambda: [o.kind for o in under_way() if o.run == str(tmp_path)] == ["save"])
        stop.release()
        handle.result()

        assert [o for o in under_way() if o.run == str(tmp_path)] == []


def test_a_listener_sees_the_context_variables_of_the_call(tmp_path, told):
    request = ContextVar("request", default="")
    token = request.set("of the training")
    with open_run(tmp_path) as ckpt:
        handle = ckpt.save(state_at(1), step=1)
        request.reset(token)
        handle.result()

    assert [e.context[request] for e in told()] == ["of the training"]


def test_a_listener_that_raises_is_logged_once_and_called_again(tmp_path, listening, caplog):
    calls = []

    def listener(ended: Ended) -> None:
        calls.append(ended.step)
        raise Thrown

    broken = listening(listener)
    with caplog.at_level(logging.ERROR, logger="async_ckpt"), open_run(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(state_at(step), step=step).result()
        assert broken.flush(PATIENCE)

    assert calls == [1, 2]
    (line,) = caplog.records
    assert "raised; saves are not affected" in line.message
    assert line.exc_info is not None
    assert line.exc_info[0] is Thrown


def test_a_listener_that_hangs_holds_up_no_save_and_no_other_listener(tmp_path, listening, told):
    gate = Gate()
    hanging = listening(lambda _: gate.passed())
    with open_run(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step).result()
        gate.wait_reached()

        assert [e.step for e in told()] == [1, 2, 3]
    assert not hanging.flush(0.0)
    gate.open()
    assert hanging.flush(PATIENCE)


def test_a_listener_that_hangs_is_told_of_a_bounded_number_of_operations(tmp_path, listening, caplog, monkeypatch):
    monkeypatch.setattr(operations, "_MAX_QUEUED", 2)
    gate, calls = Gate(), []

    def listener(ended: Ended) -> None:
        gate.passed()
        calls.append(ended.step)

    hanging = listening(listener)
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        gate.wait_reached()
        for step in range(2, 6):
            ckpt.save(state_at(step), step=step).result()
        gate.open()
        assert hanging.flush(PATIENCE)
        ckpt.save(state_at(6), step=6).result()
        assert hanging.flush(PATIENCE)

    assert calls == [1, 2, 3, 6]
    assert [record.message for record in caplog.records if "does not return" in record.message] != []
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1


def test_a_closed_listener_is_called_no_more(tmp_path, listening):
    seen: list[Ended] = []
    closed = listening(seen.append)
    closed.close()
    closed.close()
    save_into(tmp_path, 1)

    assert closed.flush(0.0)
    assert seen == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")
def test_a_forked_child_has_no_listeners_and_may_have_its_own(tmp_path, nursery):
    script = """
    import os, sys, warnings
    from async_ckpt.core.host.operations import listen
    from states import open_run, state_at
    warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads

    def hear(who):
        seen = []
        return listen(seen.append), seen

    parents, seen = hear("parent")
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        assert parents.flush(60) and seen == []
    else:
        own, heard = hear("child")
        open_run(sys.argv[1]).save(state_at(1), step=1).result()
        ok = own.flush(60) and [e.step for e in heard] == [1] and seen == []
        os._exit(not ok)
    """
    nursery.out_of(_dedented(script), tmp_path / "run")


@pytest.mark.parametrize("is_closed", [True, False])
def test_the_interpreter_waits_at_its_exit_until_listeners_know_of_the_last_save(tmp_path, nursery, is_closed):
    script = f"""
    import atexit, sys
    from async_ckpt.core.host.operations import listen
    from states import open_run, state_at

    seen = []
    listen(lambda ended: seen.append(ended.step))
    atexit.register(lambda: print(seen))  # as an exporter flushes what it has
    ckpt = open_run(sys.argv[1])
    ckpt.save(state_at(1), step=1)
    {"ckpt.close()" if is_closed else ""}
    """
    assert nursery.out_of(_dedented(script), tmp_path / "run", whole_exit=True) == "[1]\n"


def test_a_listener_that_hangs_does_not_keep_the_interpreter_from_its_end(tmp_path, nursery):
    script = """
    import sys, threading
    from async_ckpt.core.host import waits
    from async_ckpt.core.host.operations import listen
    from states import open_run, state_at

    waits.LISTENERS_SECONDS = 0.1
    listen(lambda ended: threading.Event().wait())
    open_run(sys.argv[1]).save(state_at(1), step=1)
    """
    nursery.out_of(_dedented(script), tmp_path / "run", whole_exit=True)
    assert Path(tmp_path / "run" / "latest").exists()


def _dedented(script: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in script.splitlines())


def test_a_listener_is_told_what_the_time_of_a_training_went_to_if_it_asks_for_that(tmp_path):
    told: list[Ended] = []
    listening = listen(told.append, hears_all=True)
    try:
        save_into(tmp_path, 1)
        assert listening.flush(PATIENCE)
    finally:
        listening.close()

    assert [one.kind for one in told] == ["save", "train"]
    assert told[-1].parts["stall"] == told[0].report.stall_seconds > 0
    assert told[-1].seconds == pytest.approx(sum(told[-1].parts.values()), abs=1e-3)
