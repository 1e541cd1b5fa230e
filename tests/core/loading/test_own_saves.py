"""A restore, and all that reads, sees what this checkpointer has been given to save; `steps` says what is committed by now."""

import asyncio
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from racing import Call, Gate, until
from scripted_disk import ScriptedStorage, scripted
from states import assert_is_state, open_run, save, state_at, weight

from async_ckpt import AsyncCheckpointer, NotCommittedError, StorageUnavailableError
from async_ckpt.core.staging import snapshot as stager

GONE = StorageUnavailableError("the disk is gone", path="/ckpt")


def record(step: int) -> dict[str, Any]:
    return {"loss": 1 / step}


def filled(ckpt: AsyncCheckpointer, **how: Any) -> Any:
    """The step that a restore takes, once what it fills is that step's."""
    live = state_at(9)
    step = ckpt.restore(live, **how)
    if step is not None:
        assert_is_state(live, step)
    return step


def loaded(ckpt: AsyncCheckpointer, *step: int) -> int:
    state = ckpt.load(*step)
    assert_is_state(state, state["step"])
    return int(state["step"])


# Each says which step is the newest that it sees.
READERS: dict[str, Callable[[AsyncCheckpointer], Any]] = {
    "restore": filled,
    "load": loaded,
    "latest": lambda ckpt: ckpt.latest(),
    "best": lambda ckpt: ckpt.best("loss", mode="min"),
    "records": lambda ckpt: max(ckpt.records()),
}
OF_A_STEP: dict[str, Callable[[AsyncCheckpointer, int], Any]] = {
    "restore": lambda ckpt, step: filled(ckpt, step=step),
    "load": loaded,
}


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[AsyncCheckpointer]:
    with open_run(tmp_path / "run") as opened:
        opened.save(state_at(1), 1, record=record(1)).result()
        yield opened


@pytest.fixture
def disk(ckpt: AsyncCheckpointer) -> Iterator[ScriptedStorage]:
    with scripted(ckpt) as made:
        yield made


def waiting(call: Callable[[], Any]) -> Call:
    """A call on another thread that waits for a save."""
    made = Call(call)
    made.wait_until_inside("wait_for_decisions")
    assert made.is_alive()
    return made


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_reads_waits_for_the_save_that_is_under_way_and_sees_it(ckpt, disk, read):
    disk.stop("put_new", "step_00000002")
    handle = ckpt.save(state_at(2), 2, record=record(2))
    reader = waiting(lambda: read(ckpt))

    assert ckpt.steps() == [1]
    disk.release_all()
    assert reader.outcome() == 2
    assert handle.done()


@pytest.mark.parametrize("read", OF_A_STEP.values(), ids=OF_A_STEP)
def test_a_step_that_is_just_being_saved_is_read_once_it_is_committed(ckpt, disk, read):
    disk.stop("write")
    ckpt.save(state_at(2), 2)
    of_new, of_old = waiting(lambda: read(ckpt, 2)), waiting(lambda: read(ckpt, 1))
    disk.release_all()

    assert of_new.outcome() == 2
    assert of_old.outcome() == 1


def test_the_first_save_of_a_run_is_restored_and_not_none(tmp_path):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        disk.stop("put_new")
        ckpt.save(state_at(1), 1)
        reader = waiting(lambda: filled(ckpt))
        disk.release_all()
        assert reader.outcome() == 1


def test_a_step_that_is_being_overwritten_is_read_as_it_is_afterwards(ckpt, disk):
    disk.stop("replace", "manifest.json")
    ckpt.save(state_at(5), 1, overwrite=True)
    reader = waiting(lambda: loaded(ckpt, 1))
    disk.release_all()
    assert reader.outcome() == 5


def test_all_saves_that_are_under_way_are_waited_for(tmp_path):
    with open_run(tmp_path, max_in_flight=3) as ckpt, scripted(ckpt) as disk:
        disk.stop("finish")
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step)
        reader = waiting(ckpt.latest)
        disk.release_all()
        assert reader.outcome() == 3


# --- saves that fail ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("waits", [True, False], ids=["under way", "failed before"])
def test_what_reads_goes_on_without_a_save_that_fails_and_warns_of_it_by_name(ckpt, disk, read, waits):
    disk.fail("finish", "step_00000002", error=GONE)
    stop = disk.stop("write", "step_00000002")
    handle = ckpt.save(state_at(2), 2, record=record(2))

    def seen() -> Any:
        with pytest.warns(
            RuntimeWarning, match=r"continues without step 2 \(.*was not saved: .*the disk is gone"
        ) as told:
            found = read(ckpt)
        assert [one.filename for one in told] == [__file__] * len(told)
        return found

    if waits:
        reader = waiting(seen)
        stop.release()
        assert reader.outcome() == 1
    else:
        stop.release()
        until(handle.done)
        assert seen() == 1
    with pytest.raises(StorageUnavailableError, match="the disk is gone"):
        ckpt.wait()


def test_a_failure_that_somebody_was_told_of_is_no_warning_again(ckpt, disk):
    disk.fail("finish", "step_00000002", error=GONE)
    assert ckpt.save(state_at(2), 2).exception() is GONE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ckpt.latest() == 1
        disk.fail("finish", "step_00000003", error=GONE)
        until(ckpt.save(state_at(3), 3).done)
        with pytest.warns(RuntimeWarning, match="step 3"):
            assert ckpt.latest() == 1
        assert ckpt.latest() == 1
        assert ckpt.save(state_at(4), 4).result().status == "committed"
    with pytest.raises(StorageUnavailableError):
        ckpt.wait()


def test_where_nothing_was_ever_committed_nothing_is_restored_and_that_is_told(tmp_path):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        disk.fail("finish", error=GONE)
        handle = ckpt.save(state_at(1), 1)
        with pytest.warns(RuntimeWarning, match="continues without step 1"):
            assert ckpt.restore(state_at(9)) is None
        assert handle.exception() is GONE


# --- what is not waited for -----------------------------------------------------------------------------------


def test_the_saves_of_another_checkpointer_are_not_waited_for(ckpt, disk, tmp_path):
    disk.stop("write")
    handle = ckpt.save(state_at(2), 2)
    with open_run(tmp_path / "run") as other:
        assert [other.latest(), filled(other), loaded(other)] == [1, 1, 1]
    assert not handle.done()


def test_a_save_that_is_skipped_is_not_waited_for_but_the_one_that_it_was_skipped_for_is(tmp_path):
    with open_run(tmp_path, on_overlap="skip") as ckpt, scripted(ckpt) as disk:
        disk.stop("write")
        ckpt.save(state_at(1), 1)
        assert ckpt.save(state_at(2), 2).result().status == "skipped"
        reader = waiting(ckpt.latest)
        disk.release_all()
        assert reader.outcome() == 1


def test_a_further_place_is_not_waited_for(tmp_path):
    with open_run([tmp_path / "a", tmp_path / "b"]) as ckpt, scripted(ckpt, 1) as far:
        far.stop("write")
        handle = ckpt.save(state_at(1), 1)
        assert filled(ckpt) == 1
        assert handle.done()
        assert not (tmp_path / "b" / "step_00000001" / "manifest.json").exists()


def test_retention_and_what_else_comes_after_a_commit_are_not_waited_for(tmp_path):
    with open_run(tmp_path, keep=1) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), 1).result()
        stop = disk.stop("delete")
        ckpt.save(state_at(2), 2)
        assert ckpt.latest() == 2
        stop.wait_reached()


def test_a_forked_child_does_not_wait_for_what_its_parent_saves(nursery, tmp_path):
    ended = nursery.run(
        """
        import os, sys
        from scripted_disk import scripted
        from states import open_run, state_at
        ckpt = open_run(sys.argv[1])
        ckpt.save(state_at(1), 1).result()
        with scripted(ckpt) as disk:
            stop = disk.stop("write")
            ckpt.save(state_at(2), 2)
            stop.wait_reached()
            child = os.fork()
            if child == 0:
                live = state_at(9)
                os.write(1, f"{ckpt.latest()} {ckpt.restore(live)} {live['step']}".encode())
                os._exit(0)
            os.waitpid(child, 0)
        ckpt.close()
        """,
        tmp_path,
    )
    assert ended.out == "1 1 1"


# --- who waits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_callback_is_refused_at_once_what_it_would_have_to_wait_for(ckpt, disk, read):
    told: list[BaseException] = []
    gate = Gate()

    def callback(_: object) -> None:
        gate.passed()
        try:
            read(ckpt)
        except RuntimeError as error:
            told.append(error)

    disk.stop("write", "step_00000003")
    handle = ckpt.save(state_at(2), 2, record=record(2))
    handle.add_done_callback(callback)
    gate.wait_reached()
    ckpt.save(state_at(3), 3, record=record(3))
    gate.open()
    until(lambda: bool(told))
    assert "step 3" in str(told[0])
    assert "another thread" in str(told[0])


def test_a_callback_reads_where_nothing_is_under_way(ckpt):
    told: list[Any] = []
    ckpt.save(state_at(2), 2).add_done_callback(lambda _: told.append([ckpt.latest(), filled(ckpt)]))
    until(lambda: bool(told))
    assert told == [[2, 2]]


def test_whoever_asks_on_the_thread_that_tells_of_a_failed_copy_gets_an_answer(ckpt, disk):
    answers: list[Any] = []

    def look(_: object) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the save may have failed by then
            try:
                answers.append(ckpt.latest())
            except RuntimeError as error:
                answers.append(error)

    disk.fail("create", "step_00000002", error=GONE)
    optimizer = torch.optim.SGD([torch.nn.Parameter(weight(1, 8).float())])
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate()
        fill = stager.Snapshot._fill_later
        patch.setattr(stager.Snapshot, "_fill_later", lambda *a: (gate.passed(), fill(*a)))
        handle = ckpt.save({"p": optimizer.param_groups[0]["params"]}, 2, guard=optimizer)
        handle.staging_completion.add_done_callback(look)
        gate.wait_reached()
        gate.open()
        assert handle.exception() is GONE
    until(lambda: bool(answers))


def test_ctrl_c_ends_the_wait_and_not_the_save(nursery, tmp_path):
    ended = nursery.run(
        """
        import os, signal, sys, threading
        from racing import until, _functions_of
        from scripted_disk import scripted
        from states import open_run, state_at
        ckpt = open_run(sys.argv[1])
        main = threading.get_ident()
        with scripted(ckpt) as disk:
            disk.stop("write")
            handle = ckpt.save(state_at(1), 1)

            def interrupt():
                until(lambda: "wait_for_decisions" in _functions_of(main))
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt).start()
            try:
                ckpt.restore(state_at(9))
            except KeyboardInterrupt:
                print("interrupted", handle.done())
        print(handle.result().status, ckpt.restore(state_at(9)))
        """,
        tmp_path,
    )
    assert ended.out.split() == ["interrupted", "False", "committed", "1"], ended.err


def test_after_close_what_was_given_up_is_not_waited_for(ckpt, disk, monkeypatch):
    monkeypatch.setattr("async_ckpt.core.host.waits.ABANDON_SECONDS", 0.0)
    stop = disk.stop("put_new")
    handle = ckpt.save(state_at(2), 2)
    stop.wait_reached()
    reader = waiting(ckpt.latest)
    monkeypatch.setattr("async_ckpt.core.saving.saver.wait_for_saves", interrupting)
    with pytest.raises(KeyboardInterrupt):
        ckpt.close()

    assert reader.outcome() == 1
    assert [filled(ckpt), loaded(ckpt)] == [1, 1]
    assert not handle.done()
    disk.release_all()
    handle.exception()


def interrupting(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_closed_checkpointer_reads(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), 1)
    assert [ckpt.latest(), filled(ckpt), loaded(ckpt)] == [1, 1, 1]


def test_a_loop_of_asyncio_may_ask_in_a_thread(ckpt, disk):
    async def ask() -> Any:
        disk.stop("write")
        handle = ckpt.save(state_at(2), 2)
        asked = asyncio.create_task(asyncio.to_thread(ckpt.latest))
        await asyncio.sleep(0)
        disk.release_all()
        await handle
        return await asked

    assert asyncio.run(ask()) == 2


# --- what follows from it -------------------------------------------------------------------------------------


def test_a_restore_of_an_older_step_knows_that_the_one_under_way_lies_ahead(tmp_path):
    with open_run(tmp_path, on_rollback="retire") as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), 1).result()
        disk.stop("put_new", "step_00000003")
        ckpt.save(state_at(3), 3)
        reader = waiting(lambda: filled(ckpt, step=1))
        disk.release_all()
        assert reader.outcome() == 1
        ckpt.save(state_at(2), 2)
        assert list(ckpt.records()) == [1, 2]


def test_a_step_that_a_save_under_way_takes_out_of_the_run_is_not_read_any_more(tmp_path):
    with open_run(tmp_path, on_rollback="retire") as ckpt, scripted(ckpt) as disk:
        save(ckpt, 1, 2, 3)
        ckpt.restore(state_at(9), 1)
        disk.stop("put_new", "step_00000002")
        disk.stop("replace", "step_00000002")
        ckpt.save(state_at(5), 2, overwrite=True)
        reader = waiting(lambda: loaded(ckpt, 3))
        disk.release_all()
        with pytest.raises(NotCommittedError):
            reader.outcome()
        assert ckpt.latest() == 2


def test_a_restore_leaves_alone_what_a_guarded_save_still_copies(tmp_path, monkeypatch):
    gate = Gate()
    fill = stager.Snapshot._fill_later
    p = torch.nn.Parameter(weight(1, 8).float(), requires_grad=False)
    with open_run(tmp_path) as ckpt:
        ckpt.save({"p": p}, 1).result()
        with torch.no_grad():
            p.add_(1)
        new = p.clone()
        monkeypatch.setattr(stager.Snapshot, "_fill_later", lambda *a: (gate.passed(), fill(*a)))
        ckpt.save({"p": p}, 2, guard=torch.optim.SGD([p]))
        gate.wait_reached()
        reader = Call(lambda: ckpt.restore({"p": p}, 1))
        reader.wait_until_inside("wait_for")
        assert torch.equal(p, new)
        gate.open()
        assert reader.outcome() == 1
        assert torch.equal(p, weight(1, 8).float())
        assert torch.equal(ckpt.load(2)["p"], new)
