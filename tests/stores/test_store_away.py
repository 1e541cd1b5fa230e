"""A store that is away, loses what it has acknowledged, or is read in trouble; and processes that end meanwhile."""

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from buckets import ENGINES, PART, OnServer, archive_of, no_memory_is_lent, through
from faulty import AWAY, BIG, FORBIDDEN, NO_RETRIES, SOON, TROUBLE, Far, failure
from racing import PATIENCE, Call, until
from slices import some
from states import MIB, assert_is_state, leftovers, open_run, state_at

from async_ckpt import AsyncCheckpointer, Place, StorageUnavailableError
from async_ckpt.core.saving import mover
from async_ckpt.core.storage import store_facts
from async_ckpt.errors import ConflictError

pytestmark = pytest.mark.usefixtures("nobody_waits")


# --- a store that is away -------------------------------------------------------------------------------------


def test_a_store_that_is_away_for_the_whole_deadline_fails_the_save(far):
    with far.run(options=SOON | NO_RETRIES) as ckpt, far.unharmed(ckpt):
        far.proxy.refuse()
        handle = ckpt.save(state_at(2, BIG), step=2)
        failure(handle.result, AWAY)
        failure(ckpt.steps, AWAY)


def test_a_store_that_goes_away_in_the_middle_fails_the_save(obstore):
    """An upload that cannot be aborted, since the store is away, is the one thing that may be left: it is swept."""
    with obstore.run(options=SOON | NO_RETRIES) as ckpt:
        before = obstore.bucket.keys()
        held = obstore.proxy.delay(None, kind="upload_part", target=r"partNumber=2\b")
        handle = ckpt.save(state_at(2, BIG), step=2)
        held.wait()
        away = obstore.proxy.refuse()
        failure(handle.result, AWAY)
        no_memory_is_lent(ckpt)
        away.clear()
        held.clear()
        assert obstore.bucket.keys() == before
        ckpt.save(state_at(3), step=3).result()
        assert ckpt.steps() == [1, 3]


def test_a_store_that_comes_back_in_time_has_only_cost_time(obstore):
    """The upload that was cut off may have been left open, since it could not be aborted either."""
    with obstore.run(options=NO_RETRIES) as ckpt:
        held = obstore.proxy.delay(None, kind="upload_part", target=r"partNumber=2\b", times=1)
        handle = ckpt.save(state_at(2, BIG), step=2)
        held.wait()
        away = obstore.proxy.refuse()
        away.clear()
        held.clear()
        assert handle.result().retries > 0
        obstore.goes_on(ckpt, 1, 2)


@pytest.fixture
def both(obstore: Far, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Far, Any, AsyncCheckpointer]]:
    """A disk, and behind it a store that is reached through the proxy; it has step 1."""
    monkeypatch.setattr(mover, "_FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(mover, "_PAUSE_SECONDS", 0.05)
    roots = [tmp_path, obstore.place(**SOON, **NO_RETRIES)]
    with open_run(roots, segment_bytes=PART) as ckpt:
        assert ckpt.restore(state_at(0, 1)) == 1
        yield obstore, tmp_path, ckpt


@pytest.mark.filterwarnings("ignore:a root does not answer")
def test_a_save_is_committed_on_disk_while_the_store_is_away_and_copied_once_it_is_back(both):
    far, disk, ckpt = both
    away = far.proxy.refuse()
    handle = ckpt.save(state_at(2, BIG), step=2)
    assert handle.result().path.startswith(str(disk))
    ckpt.wait()
    assert ckpt.metrics()["places_behind"] == 1
    assert ckpt.steps() == [2]
    assert_is_state(ckpt.load(), 2, BIG)
    no_memory_is_lent(ckpt)
    away.clear()
    assert handle.at(far.place(**SOON, **NO_RETRIES)).result(PATIENCE) == 2
    assert ckpt.steps() == [1, 2]
    with far.direct.run() as alone:
        assert alone.steps() == [1, 2]
        assert_is_state(alone.load(2), 2, BIG)
    until(lambda: far.direct.read("latest") == b"step_00000002\n")
    assert leftovers(disk) == []


def test_a_store_that_is_away_for_long_holds_no_memory_and_gets_the_newest_step(obstore, tmp_path, monkeypatch):
    monkeypatch.undo()  # by the clock, too, it is not given up meanwhile
    monkeypatch.setattr(mover, "_PAUSE_SECONDS", 0.05)
    far = obstore.place(deadline_seconds=3600.0, **NO_RETRIES)
    with open_run([tmp_path, far], segment_bytes=PART, max_in_flight=3) as ckpt:
        assert ckpt.restore(state_at(0, 1)) == 1
        away = obstore.proxy.refuse()
        handles = [ckpt.save(state_at(step, BIG), step=step) for step in (2, 3)]
        assert [handle.result().status for handle in handles] == ["committed"] * 2
        no_memory_is_lent(ckpt)
        away.clear()
        assert handles[1].at(far).result(PATIENCE) == 3
    with obstore.direct.run() as alone:
        assert alone.steps() in ([1, 3], [1, 2, 3])  # the copy of step 2 may have begun before step 3 was there


def test_a_day_without_the_store_takes_no_more_memory_or_disk_than_an_hour_and_then_it_gets_the_newest(
    obstore, tmp_path, monkeypatch
):
    monkeypatch.setattr(mover, "_FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(mover, "_PAUSE_SECONDS", 0.05)
    far = obstore.place(**SOON, **NO_RETRIES)
    with open_run([tmp_path, far], keep=2, segment_bytes=PART) as ckpt:
        assert ckpt.restore(state_at(0, 1)) == 1
        away = obstore.proxy.refuse()
        held, mapped = [], []
        for step in range(2, 98):  # a save each quarter of an hour
            ckpt.save(state_at(step, 1), step=step).result()
            ckpt.wait()
            held.append(len([*tmp_path.glob("step_*/*.tar")]))
            mapped.append(ckpt._saver.pool.num_bytes)
        assert max(held) <= 4  # keep + 2
        assert max(mapped) == max(mapped[:4])
        no_memory_is_lent(ckpt)
        assert ckpt.metrics()["places_behind"] == 1
        away.clear()
        last = ckpt.save(state_at(98, 1), step=98)
        assert last.at(far).result(PATIENCE) == 98
        ckpt.wait()
    with obstore.direct.run() as alone:
        before, newest = alone.steps()
        assert before in (1, 96, 97)  # where the store comes back, the copy of one before may have begun
        assert newest == 98
        assert_is_state(alone.load(), 98)
    assert open_run(tmp_path).steps() == [97, 98]


@pytest.mark.filterwarnings("ignore:a root does not answer")
def test_a_store_that_was_away_is_caught_up_when_asked(both):
    far, disk, ckpt = both
    away = far.proxy.refuse()
    ckpt.save(state_at(2, BIG), step=2).result()
    ckpt.wait()
    with pytest.raises(StorageUnavailableError):
        ckpt.catch_up()
    away.clear()
    ckpt.catch_up()
    assert ckpt.catch_up() == {str(disk): [], far.url: []}
    with far.direct.run() as alone:
        assert_is_state(alone.load(), 2, BIG)
    with open_run(disk) as alone:
        assert alone.steps() == [1, 2]


def test_a_store_that_is_away_is_no_reason_to_begin_anew_on_an_empty_disk(obstore, tmp_path):
    with obstore.direct.run() as before:
        before.save(state_at(5), step=5).result()
    with open_run([tmp_path, obstore.place(**SOON, **NO_RETRIES)], segment_bytes=PART) as ckpt:
        away = obstore.proxy.refuse()
        for ask in (ckpt.latest, ckpt.steps, ckpt.load, lambda: ckpt.restore(state_at(0, 1))):
            failure(ask, "no step is committed at the roots that answer, .*leave it out of the roots")
        handle = ckpt.save(state_at(6, 1), step=6)
        handle.result()
        with pytest.warns(RuntimeWarning, match="a root does not answer"):
            assert ckpt.latest() == 6
        away.clear()
        with pytest.raises(ConflictError, match="step 5 there was saved"):  # what this run has not gone on from
            handle.at(obstore.place(**SOON, **NO_RETRIES)).result(PATIENCE)
        with pytest.warns(RuntimeWarning, match="step 6 is not at"):
            ckpt.close()


def test_a_store_that_is_slow_or_throttled_holds_up_no_save(both):
    far, _, ckpt = both
    held = far.proxy.delay(None, kind="create_multipart_upload", times=1)
    throttled = far.proxy.throttle(64 * MIB, kind="upload_part")
    handles = [ckpt.save(state_at(step, BIG), step=step) for step in (2, 3)]
    assert [handle.result().status for handle in handles] == ["committed"] * 2
    held.clear()
    assert handles[1].at(far.place(**SOON, **NO_RETRIES)).result(PATIENCE) == 3
    throttled.clear()
    with far.direct.run() as alone:
        assert alone.latest() == 3
        assert_is_state(alone.load(3), 3, BIG)
    no_memory_is_lent(ckpt)


def test_a_handle_of_a_save_in_memory_fails_as_one_at_the_store_alone_would_and_the_step_follows(obstore, tmp_path):
    far = obstore.place(**SOON, **NO_RETRIES)
    with open_run([Place(tmp_path, volatile=True), far], segment_bytes=PART) as ckpt:
        assert ckpt.restore(state_at(0, 1)) == 1
        away = obstore.proxy.refuse()
        handle = ckpt.save(state_at(2, BIG), step=2)
        error = failure(handle.result, "step 2 is not at .*it is copied once the place answers")
        assert "which a reboot erases" in error.__notes__[0]
        no_memory_is_lent(ckpt)
        away.clear()
        assert handle.at(far).result(PATIENCE) == 2
    assert_is_state(obstore.direct.load(), 2, BIG)


# --- a store that lies ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mib", "kind"), [(1, "put_object"), (BIG, "complete_multipart_upload")])
def test_an_archive_that_the_store_acknowledges_and_loses_is_no_checkpoint(far, mib, kind):
    with far.run(options=SOON | NO_RETRIES) as ckpt, far.unharmed(ckpt):
        fault = far.proxy.lose(kind=kind, target=r"\.tar")
        failure(lambda: ckpt.save(state_at(2, mib), step=2).result(), "acknowledged .* bytes but")
        assert fault.hits > 0


@pytest.mark.parametrize(("mib", "kind"), [(1, "put_object"), (BIG, "complete_multipart_upload")])
def test_an_archive_that_is_lost_once_is_sent_again(obstore, mib, kind):
    with obstore.run(options=NO_RETRIES) as ckpt:
        fault = obstore.proxy.lose(kind=kind, target=r"\.tar", times=1)
        report = ckpt.save(state_at(2, mib), step=2).result()
        assert (fault.hits, report.retries) == (1, 1)
        assert_is_state(ckpt.load(2), 2, mib)
        assert obstore.bucket.uploads() == []
        obstore.goes_on(ckpt, 1, 2)


def test_an_archive_that_the_store_loses_is_copied_again(both):
    far, _, ckpt = both
    lost = far.proxy.lose(kind="complete_multipart_upload", times=1)
    handle = ckpt.save(state_at(2, BIG), step=2)
    assert handle.at(far.place(**SOON, **NO_RETRIES)).result(PATIENCE) == 2
    assert lost.hits == 1
    with far.direct.run() as alone:
        assert_is_state(alone.load(2), 2, BIG)


# --- reading --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("far", "trouble"),
    some([("obstore", "SlowDown"), ("obstore", "cut before"), ("obstore", "cut inside")], 3)
    + some([("s3fs", "SlowDown"), ("s3fs", "cut inside")], 2),
    indirect=["far"],
)
def test_reading_goes_on_after_trouble(far, trouble):
    with far.direct.run() as ckpt:
        ckpt.save(state_at(2, 18), step=2).result()
    with far.run() as ckpt:
        make = TROUBLE.get(trouble, lambda proxy, **match: proxy.cut_response(100_000, **match))
        faults = [
            make(far.proxy, times=1, kind="get_object", target=r"\.tar"),
            make(far.proxy, times=1, kind="list_objects") if trouble != "cut inside" else None,
        ]
        assert_is_state(ckpt.load(), 2, 18)
        assert all(fault.hits == 1 for fault in faults if fault)
        make(far.proxy, times=2, kind="get_object", target=r"\.tar")
        live = state_at(0, 18)
        assert ckpt.restore(live) == 2
        assert_is_state(live, 2, 18)


def test_reading_from_a_store_that_is_away_is_an_error(obstore):
    with obstore.run(options=SOON | NO_RETRIES) as ckpt:
        obstore.proxy.refuse()
        live = state_at(0)
        for call in (lambda: ckpt.load(1), lambda: ckpt.restore(live)):
            failure(call, AWAY)
        assert_is_state(live, 0)
        obstore.proxy.clear()
        assert ckpt.restore(live) == 1


def test_an_archive_that_is_replaced_while_it_is_read_is_not_mixed_up(far):
    name = archive_of(far.direct.names(), 1)
    with far.run() as ckpt:
        held = far.proxy.delay(None, kind="get_object", target=r"\.tar", times=1)
        call = Call(ckpt.load)
        held.wait()
        far.bucket.write([f"runs/a/{name}"], far.direct.read(name)[::-1])
        held.clear()
        with pytest.raises(StorageUnavailableError, match=r"replaced.*load it again"):
            call.outcome()


def test_with_two_roots_a_store_that_is_away_is_read_around(both):
    far, _, ckpt = both
    assert ckpt.save(state_at(2), step=2).at(far.place(**SOON, **NO_RETRIES)).result(PATIENCE) == 2
    away = far.proxy.refuse()
    with pytest.warns(RuntimeWarning, match="does not answer"):
        assert ckpt.latest() == 2
    with pytest.warns(RuntimeWarning, match="does not answer"):
        assert_is_state(ckpt.load(2), 2)
    away.clear()


# --- commits --------------------------------------------------------------------------------------------------


def test_a_commit_whose_answer_is_lost_is_a_commit(far):
    with far.run() as ckpt:
        fault = far.proxy.lose_response(kind="put_object", target="manifest.json", times=1)
        assert ckpt.save(state_at(2), step=2).result().status == "committed"
        assert fault.hits == 1
        far.goes_on(ckpt, 1, 2)


def test_an_overwrite_whose_answer_is_lost_is_an_overwrite(far):
    with far.run() as ckpt:
        fault = far.proxy.lose_response(kind="put_object", target="manifest.json", times=1)
        assert ckpt.save(state_at(5), step=1, overwrite=True).result().status == "committed"
        assert fault.hits == 1
        ckpt.wait()
        assert_is_state(ckpt.load(1), 5)
        far.goes_on(ckpt, 1)


def test_an_overwrite_that_fails_leaves_the_step_that_was_there(far):
    with far.run() as ckpt, far.unharmed(ckpt):
        far.proxy.answer("AccessDenied", kind="put_object", target="manifest.json")
        failure(lambda: ckpt.save(state_at(5, BIG), step=1, overwrite=True).result(), FORBIDDEN)


def test_one_writer_in_each_of_two_processes_and_one_step(bucket, s3, nursery, proxy):
    """Both are held at the commit, so that neither knows of the other."""
    script = """
        import json, sys
        import async_ckpt
        from states import open_run, state_at
        place = async_ckpt.Place(sys.argv[1], options=json.loads(sys.argv[2]))
        with open_run(place, segment_bytes=8 << 20) as ckpt:
            try:
                ckpt.save(state_at(int(sys.argv[3])), step=1).result()
            except async_ckpt.StepExistsError:
                print("exists")
            except async_ckpt.RunTakenError:
                print("taken")
            else:
                print("committed")
    """
    held = proxy.delay(None, kind="put_object", target="manifest.json")
    options = json.dumps(through(proxy, bucket))
    children = [nursery.start(script, bucket.url("run"), options, number) for number in (10, 11)]
    until(lambda: held.hits >= 2)
    held.clear()
    ends = [child.ended() for child in children]
    assert [end.err for end in ends] == ["", ""]
    outcomes = [end.out.strip() for end in ends]
    # The one that began first is not told that it has committed, since the other has the run by then.
    assert sorted(outcomes) in (["committed", "exists"], ["exists", "taken"], ["committed", "taken"])
    winner = 10 + outcomes.index("committed" if "committed" in outcomes else "taken")
    with open_run(bucket.place("run")) as ckpt:
        assert_is_state(ckpt.load(1), winner)
    assert len([key for key in bucket.keys() if key.endswith(".tar")]) == 1  # noqa: SIM118


# --- the end of the process -----------------------------------------------------------------------------------


SAVE = """
    import json, sys
    import async_ckpt
    from states import open_run, state_at
    place = async_ckpt.Place(sys.argv[1], options=json.loads(sys.argv[2]), engine=sys.argv[3])
    ckpt = open_run(place, segment_bytes=8 << 20)
    ckpt.save(state_at(2, 9), step=2)
"""


@pytest.mark.parametrize("engine", ENGINES)
def test_a_script_that_ends_at_once_has_saved(bucket, s3, nursery, engine):
    nursery.out_of(SAVE, bucket.url("runs/a"), json.dumps(s3.options), engine)
    place = OnServer(bucket, engine)
    assert_is_state(place.load(), 2, 9)
    assert len(place.names()) == 4


def test_a_script_whose_save_fails_at_its_end_says_so_and_has_a_status(bucket, proxy, nursery):
    proxy.answer("AccessDenied", kind="upload_part")
    ended = nursery.run(SAVE, bucket.url("runs/a"), json.dumps(through(proxy, bucket)), "obstore")
    assert ended.status == 75
    assert "step 2" in ended.err
    assert "AccessDenied" in ended.err
    assert (bucket.keys(), bucket.uploads()) == ([], [])


def test_a_process_that_is_killed_in_the_middle_of_an_upload_leaves_only_what_is_swept(far, nursery, monkeypatch):
    held = far.proxy.delay(None, kind="upload_part", target=r"partNumber=2\b")
    child = nursery.start(SAVE, far.url, json.dumps(far.options()), far.engine)
    held.wait()
    child.send(signal.SIGKILL)
    assert child.ended().status == -signal.SIGKILL
    far.proxy.clear()
    assert not any("step_00000002" in key for key in far.bucket.keys())  # noqa: SIM118
    assert len(far.bucket.uploads()) == 1
    far.bucket.begin_upload("runs/ab/of/another/run")

    with far.run() as ckpt:
        assert ckpt.steps() == [1]
        assert_is_state(ckpt.load(), 1)
        ckpt.save(state_at(2), step=2).result()
        ckpt.wait()
    assert len(far.bucket.uploads()) == 2  # not yet old

    monkeypatch.setattr(store_facts, "ORPHAN_SECONDS", -3600.0)
    with far.run() as ckpt:
        ckpt.save(state_at(3), step=3).result()
        ckpt.wait()
        assert ckpt.steps() == [1, 2, 3]
    assert far.bucket.uploads() == ["runs/ab/of/another/run"]


def test_an_archive_that_was_never_committed_is_swept_once_it_is_old(far, nursery, monkeypatch):
    held = far.proxy.black_hole(kind="put_object", target="manifest.json")
    child = nursery.start(SAVE, far.url, json.dumps(far.options()), far.engine)
    held.wait()
    child.send(signal.SIGKILL)
    child.ended()
    far.proxy.clear()
    orphan = archive_of(far.direct.names(), 2)
    for seconds, stays in ((86400.0, True), (-3600.0, False)):
        monkeypatch.setattr(store_facts, "ORPHAN_SECONDS", seconds)
        with far.run() as ckpt:
            ckpt.save(state_at(3), step=3, overwrite=True).result()
            ckpt.wait()
            assert ckpt.steps() == [1, 3]
        assert (orphan in far.direct.names()) == stays


LAST = """
    import json, sys
    import async_ckpt
    from async_ckpt import Place
    from async_ckpt.core.host import waits
    from async_ckpt.core.saving import exit as end, signals
    from async_ckpt.core.saving.mover import Mover
    from states import open_run, state_at
    say = end.log_to_stderr
    end.log_to_stderr = lambda line: (print(" has waited " in line, flush=True), say(line))
    waits._FIRST_SECONDS, waits.FINISH_SECONDS, waits.ANSWER_SECONDS = 0.0, 3600.0, float(sys.argv[4])
    far = Place(sys.argv[2], options=json.loads(sys.argv[3]))
    ckpt = open_run([Place(sys.argv[1], volatile=sys.argv[5] == "memory"), far], segment_bytes=8 << 20)
    if sys.argv[6] == "moved":
        Mover.may_follow = lambda *_: False
    ckpt.save(state_at(2, 9), step=2).committed.result()
"""


@pytest.mark.parametrize("way", ["moved", "in the pass"])
def test_a_process_does_not_stay_for_a_store_that_is_down_if_a_disk_has_the_step(obstore, tmp_path, nursery, way):
    obstore.proxy.refuse()
    ended = nursery.run(LAST, tmp_path, obstore.url, json.dumps(obstore.options()), 0.5, "disk", way, whole_exit=True)
    assert ended.status == 0, ended.err
    assert f"step 2 is not at {obstore.url}, which has no step yet" in ended.err
    assert f"`async-ckpt move {tmp_path}" in ended.err
    assert open_run(tmp_path).steps() == [2]


def test_ctrl_c_ends_the_wait_for_a_store_and_names_what_it_lacks(obstore, tmp_path, nursery):
    obstore.proxy.refuse()
    child = nursery.start(LAST, tmp_path, obstore.url, json.dumps(obstore.options()), 3600, "disk", "moved")
    child.wait_for_line("True\n")
    child.send(signal.SIGINT)
    ended = child.ended()
    assert ended.status == 0, ended.err
    assert f"async_ckpt: step 2 is not at {obstore.url}" in ended.err


def test_a_last_step_in_memory_alone_is_waited_for_at_the_end(obstore, tmp_path, nursery):
    away = obstore.proxy.refuse()
    child = nursery.start(LAST, tmp_path, obstore.url, json.dumps(obstore.options()), 0, "memory", "moved")
    child.wait_for_line("True\n")
    away.clear()
    ended = child.ended()
    assert ended.status == 0, ended.err
    assert_is_state(obstore.direct.load(), 2, 9)
