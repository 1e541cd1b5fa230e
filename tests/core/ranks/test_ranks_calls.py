"""What a training calls, on several ranks: `save` with all its options, `close`, and nothing of torch.distributed for it."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import states
import torch
from rank_oracle import run_of, saved
from rank_states import numbered
from rank_worlds import Worlds
from states import open_run, records

import async_ckpt
from async_ckpt import load


def steps_of(worlds: Worlds) -> list[int]:
    """The committed steps; each is whole."""
    steps = open_run(worlds.root).steps()
    for step in steps:
        assert torch.equal(saved(worlds.root, step).tensors["model.cut"], numbered(41, 3) + step)
    return steps


COUNTED = """
import time
from racing import until
from torch.distributed import distributed_c10d as c10d
from async_ckpt.core.ranks import heartbeats

heartbeats._INTERVAL_SECONDS = 1000.0  # from look to look of rank 0 at who is started again
asked, called = [], []

class Counted(dist.PrefixStore):
    def __getattribute__(self, name):
        if name != "underlying_store" and not name.startswith("__"):
            asked.append((name, time.monotonic()))
        return super().__getattribute__(name)

def count(name, real):
    def call(*arguments, **options):
        called.append(name)
        return real(*arguments, **options)
    return call

state = {"cut": spread(41, 3), "whole": numbered(300)}
store = Counted("", c10d._get_default_store())
c10d._get_default_store = lambda: store
for name in c10d.__all__:
    real = getattr(c10d, name)
    if callable(real) and not isinstance(real, type):
        for module in (dist, c10d):
            setattr(module, name, count(name, real))
with open_run(here.root) as ckpt:
    ckpt.save(state, 0).result()
    dist.get_rank()
    is_counted = bool(asked) and bool(called)
    until(lambda: time.monotonic() - asked[-1][1] > 2)  # rank 0 has seen that all are there
    asked.clear(), called.clear()
    for step in range(1, 101):
        ckpt.save(state, step)
    ckpt.wait()
    here.tell([is_counted, asked, called])
"""


def test_after_the_first_a_save_asks_nothing_of_the_process_group_or_its_store(worlds):
    """The library has a connection of its own to the store's server."""
    for one in worlds.run(2, COUNTED):
        assert one.told == [[True, [], []]]
    assert open_run(worlds.root).steps() == list(range(101))


PREWARMED = """
asked = []

class Counted:
    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        def ask(*arguments):
            asked.append(str(arguments))
            return getattr(self._store, name)(*arguments)
        return ask

from torch.distributed import distributed_c10d as c10d
store = Counted(c10d._get_default_store())
c10d._get_default_store = lambda: store
state = small(0) | {"own": torch.full((4,), here.rank)}
with open_run(here.root, max_in_flight=2) as ckpt:
    if "{fails}" and here.rank == 1:
        try:
            ckpt.prewarm(state | {"bad": lambda: 0})
        except Exception as error:
            here.tell(type(error).__name__)
    else:
        ckpt.prewarm(state, per_rank="own")
    met = len(asked)
    first = [ckpt.save(small(step) | {"own": torch.full((4,), here.rank)}, step, per_rank=["own"]) for step in (1, 2)]
    met_again = [one for one in asked[met:] if "structure" in one or "classes" in one or "token" in one]
    here.tell([met > 0, met_again, [handle.result().status for handle in first]])
"""


def test_ranks_that_have_prewarmed_do_not_wait_for_each_other_in_the_first_save(worlds):
    """Each takes its share at once; only whether the root is shared is still to be found out, in the background."""
    for one in worlds.run(2, PREWARMED.replace("{fails}", "")):
        assert one.told[0][0]
        assert one.told[0][2] == ["committed"] * 2
        assert one.told[0][1] == []
    for step in (1, 2):
        sizes = [path.stat().st_size for path in (worlds.root / f"step_{step:08d}").glob("rank_*")]
        assert sum(sizes) < 1.5 * 1_200_000  # "whole" is divided


def test_a_rank_that_could_not_prewarm_writes_all_that_it_holds(worlds):
    first, second = worlds.run(2, PREWARMED.replace("{fails}", "yes"))

    assert second.told[0] == "UnsupportedStateError"
    assert [told[2] for told in (first.told[-1], second.told[-1])] == [["committed"] * 2] * 2


def test_the_group_may_be_gone_before_a_save_has_ended_and_for_those_after_it(worlds):
    script = """
    ckpt = open_run(here.root)
    first, second = small(1), small(2)
    if here.rank == 1:
        here.at("write", lambda: here.hear("gone-0", "gone-1"), step=1)
    handle = ckpt.save(first, 1)
    dist.destroy_process_group()
    here.meet("gone")
    here.tell(handle.result().status)
    here.save(ckpt, second, 2)
    ckpt.close()
    """
    for one in worlds.run(2, script):
        assert one.told == ["committed", {"step": 2, "status": "committed"}]
    assert steps_of(worlds) == [1, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_closes_first_takes_part_in_what_it_has_begun(worlds, rank):
    script = f"""
    ckpt = open_run(here.root)
    here.save(ckpt, small(1), 1)
    if here.rank != {rank}:
        here.at("write", lambda: here.hear("closing"), step=2)
    handle = ckpt.save(small(2), 2)
    here.say("closing")
    if here.rank == {rank}:
        ckpt.close()
        here.tell(handle.done())
    else:
        here.hear("closing")
        handle.result()
        ckpt.close()
    """
    ended = worlds.run(2, script)

    assert ended[rank].told[1:] == [True]
    assert steps_of(worlds) == [1, 2]


def test_a_save_after_close_is_told_to_the_others(worlds):
    script = """
    ckpt = open_run(here.root)
    here.save(ckpt, small(1), 1)
    if here.rank == 1:
        ckpt.close()
    here.save(ckpt, small(2), 2)
    """
    first, second = worlds.run(2, script)

    assert second.saves[1]["error"] == "ClosedError"
    assert "rank 1: ClosedError" in first.saves[1]["text"] or "rank 1: it has closed" in first.saves[1]["text"]
    assert steps_of(worlds) == [1]


WRONG_RESTORES = {"strict": 3, "verify": "x", "step": "x", "marked": "bad", "broadcast": 3}


@pytest.mark.parametrize("name", WRONG_RESTORES)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_restore_on_one_rank_fails_on_all_and_the_next_one_works(worlds, rank, name):
    script = f"""
    with open_run(here.root) as ckpt:
        here.save(ckpt, small(1), 1)
        wrong = {{{name!r}: {WRONG_RESTORES[name]!r}}} if here.rank == {rank} else {{}}
        try:
            first = ckpt.restore(small(0), **wrong)
        except Exception as error:
            first = f"{{type(error).__name__}}: {{error}}"
        here.save(ckpt, small(2), 2)
        here.tell([first, ckpt.restore(small(0))])
    """
    firsts, seconds = zip(*(told[-1] for told in worlds.told(2, script)), strict=True)

    assert seconds == (2, 2)
    assert firsts[rank].startswith(("TypeError", "ValueError"))
    assert firsts[1 - rank] == f"PeerFailedError: restore() has failed on rank {rank}: {firsts[rank]}"


@pytest.mark.parametrize(("rank", "ends"), [(0, "Ctrl-C"), (0, "late"), (1, "late")])
def test_a_restore_of_one_rank_alone_fails_and_takes_no_step_from_a_later_one_of_all(worlds, rank, ends):
    script = f"""
    import contextlib, signal, threading
    from async_ckpt.core.ranks import meeting
    steps, target = [], small(0)  # by collectives
    with open_run(here.root) as ckpt:
        here.save(ckpt, small(1), 1)
        if here.rank == {rank}:
            patience = meeting.PEER_CALL_SECONDS
            meeting.PEER_CALL_SECONDS = 0.1 if {ends!r} == "late" else patience
            wait = ckpt._ranks.meeting.receive
            if {ends!r} == "Ctrl-C":
                def interrupted(*what, **how):
                    signal.raise_signal(signal.SIGINT)
                    return wait(*what, **how)
                ckpt._ranks.meeting.receive = interrupted
            try:
                steps.append(ckpt.restore(target))
            except BaseException as error:
                here.tell(f"{{type(error).__name__}}: {{error}}")
            ckpt._ranks.meeting.receive, meeting.PEER_CALL_SECONDS = wait, patience
        here.meet("alone")
        for step in (2, 3):
            here.save(ckpt, small(step), step)
            with contextlib.suppress(async_ckpt.PeerFailedError):
                steps.append(ckpt.restore(target))
    here.tell(steps)
    """
    told = worlds.told(2, script)

    (alone,) = [line for line in told[rank] if isinstance(line, str)]
    assert alone.startswith("KeyboardInterrupt" if ends == "Ctrl-C" else "PeerFailedError: waited 0 s for ")
    assert [one[-1] for one in told] == [[2, 3], [2, 3]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_wrong_question_of_one_rank_leaves_none_waiting_and_the_next_ones_are_answered(worlds, rank):
    script = f"""
    from async_ckpt import Due
    def asked(step):
        try:
            return ckpt.should_save(step)
        except Exception as error:
            return f"{{type(error).__name__}}: {{error}}"
    with open_run(here.root, due=Due(seconds=1000, every=3)) as ckpt:
        here.tell([asked(1), asked(-1 if here.rank == {rank} else 2), asked(3), asked(4)])
    """
    firsts = [one[-1] for one in worlds.told(2, script)]

    assert firsts[rank][1].startswith("ValueError")
    assert firsts[1 - rank][1] == (
        False if rank else f"PeerFailedError: should_save() has failed on rank 0: {firsts[0][1]}"
    )
    assert [[*answers[:1], *answers[2:]] for answers in firsts] == [[False, True, False]] * 2


def test_a_forked_child_of_a_rank_is_no_rank_and_reads_steps_by_number(worlds):
    script = """
    import children
    from async_ckpt import ClosedError, Due
    children.forks_on_purpose()
    target = small(0)
    with open_run(here.root, due=Due(seconds=1000)) as ckpt:
        here.save(ckpt, small(1), 1)
        child = os.fork()
        if not child:
            there = open_run(here.root)  # inherits the process group
            calls = [
                lambda: ckpt.restore(target),
                lambda: ckpt.restore(target, strict=3),
                lambda: there.restore(target),
                lambda: there.save(target, 2),
                lambda: ckpt.save(target, "x"),
                lambda: ckpt.should_save(2),
                lambda: there.prewarm(target),
                lambda: ckpt.restore(target, 1),
            ]
            for call in calls:
                try:
                    here.tell(call())
                except Exception as error:
                    here.tell(type(error).__name__)
            os._exit(0)
        os.waitpid(child, 0)
        here.save(ckpt, small(2), 2)
        here.tell(ckpt.restore(target))
    """
    for told in worlds.told(2, script):
        assert told[1:-2] == ["ClosedError", "ValueError", *["ClosedError"] * 5, 1]
        assert (told[-2]["status"], told[-1]) == ("committed", 2)


def test_a_step_that_is_committed_is_refused_to_all_and_replaced_with_overwrite(worlds):
    script = """
    with open_run(here.root) as ckpt:
        here.save(ckpt, small(2), 1)
        here.save(ckpt, small(1), 1)
        here.save(ckpt, small(1), 1, overwrite=True)
        here.save(ckpt, small(0), 0)
    """
    first, second = worlds.run(2, script)

    assert [one.get("error") for one in first.saves] == [None, "StepExistsError", None, "StepBehindError"]
    assert [one.get("error") for one in second.saves] == [None, "PeerFailedError", None, "PeerFailedError"]
    assert "rank 0: StepExistsError" in second.saves[1]["text"]
    assert "if every rank saves to" not in first.saves[1]["text"]  # as they should
    assert steps_of(worlds) == [1]
    files = {path.name for path in (worlds.root / "step_00000001").iterdir()}
    assert files == {"manifest.json", *run_of(worlds.root).manifest(1).own_names}


def test_retention_leaves_nothing_of_old_steps(worlds):
    """Nor of one that had failed before."""
    script = """
    with open_run(here.root, keep=1) as ckpt:
        for attempt, step in enumerate((1, 2, 2, 3, 4)):
            if here.rank == 1 and attempt == 1:
                here.at("write", lambda: here.fail(OSError("broken")) if not here.is_said("tried") else None)
            here.save(ckpt, small(step), step)
            here.meet(f"{attempt}")
            if attempt == 1:
                here.say("tried")
    """
    ended = worlds.run(2, script)

    assert ["status" in save for save in ended[0].saves] == [True, False, True, True, True]
    assert steps_of(worlds) == [4]
    assert sorted(path.name for path in worlds.root.glob("step*")) == ["step_00000004"]
    assert [one.err for one in ended] == ["", ""]


def test_several_saves_may_be_under_way_while_the_state_changes_and_one_fails(worlds):
    script = """
    with open_run(here.root, max_in_flight=3) as ckpt:
        handles = []
        for step in range(12):
            state = small(step)
            if step >= 5:
                state["new"] = spread(7, 7)
            if step == 8 and here.rank == 1:
                state["lost"] = torch.empty(3, device="meta")
            try:
                handles.append(ckpt.save(state, step))
            except Exception as error:
                here.tell(f"{step}: {error}")
        for handle in handles:
            if handle.exception() is not None:
                here.tell(f"{handle.step}: {handle.exception()}")
    """
    for one in worlds.run(2, script):
        (failed,) = one.told
        assert failed.startswith("8: ")
        assert "lost: a meta tensor has no values" in failed
    assert steps_of(worlds) == [*range(8), 9, 10, 11]
    assert torch.equal(saved(worlds.root, 11).tensors["new"], numbered(7, 7))


def test_two_checkpointers_of_one_training_do_not_mix(worlds):
    script = """
    a, b = open_run(here.root), open_run(here.root + "/other", max_in_flight=2)
    for step in (1, 2, 3):
        a.save(small(step), step), b.save(small(0), step)
    a.close(), b.close()
    """
    worlds.run(2, script)

    assert steps_of(worlds) == [1, 2, 3]
    assert [saved(worlds.root / "other", step).states[0]["step"] for step in (1, 2, 3)] == [0, 0, 0]


def test_what_a_folder_shows_late_is_waited_for(worlds):
    """As NFS, which may hide for a minute what other machines have written."""
    script = """
    from async_ckpt.core.storage.local import LocalStorage
    num_hidden, names = 3, LocalStorage.names

    def late(storage, path):
        global num_hidden
        found = names(storage, path)
        if "step_00000001" in path and num_hidden:
            num_hidden -= 1
            return [name for name in found if "rank_00001" not in name]
        return found

    if here.rank == 0:
        LocalStorage.names = late
    states = [small(step) for step in range(3)]
    with open_run(here.root) as ckpt:
        here.save(ckpt, states[1], 1)
        here.save(ckpt, states[2], 2)
    here.tell(num_hidden)
    """
    first, second = worlds.run(2, script)

    assert [save.get("status") for one in (first, second) for save in one.saves] == ["committed"] * 4
    assert first.told[-1] == 0
    assert steps_of(worlds) == [1, 2]


@pytest.mark.parametrize(("busy", "second"), [(0, "skipped"), (1, "committed")])
def test_ranks_skip_a_save_when_rank_0_does_and_else_wait(worlds, busy, second):
    script = f"""
    with open_run(here.root, on_overlap="skip") as ckpt:
        if here.rank == {busy}:
            here.at("after verdict" if here.rank == 0 else "decision", lambda: here.hear("second"), step=1)
        states = small(1), small(2)
        first = ckpt.save(states[0], 1)
        if here.rank != {busy}:
            first.result()
            here.say("committed")
        here.hear("committed")
        handle = ckpt.save(states[1], 2)
        here.say("second") if here.rank == 0 else None
        here.tell([first.result().status, handle.result().status])
    """
    for one in worlds.run(2, script):
        assert one.told == [["committed", second]]


LEAVING = """
import signal
from async_ckpt import Due
with open_run(here.root, due=Due(signals=True)) as ckpt:
    for step in range(1, 6):
        for signum in [one for rank, at, one in {sent} if (rank, at) == (here.rank, step)]:
            signal.raise_signal(signum)
        here.meet(f"step {{step}}")  # as the collectives of a training do
        is_due = ckpt.should_save(step)
        handle = ckpt.save(small(step), step) if is_due or step == {saved} else None
        here.tell([is_due, ckpt.preempted])
        if is_due:
            here.tell(handle.result().status)
            break
"""


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("step", [1, 3])
def test_a_signal_at_any_rank_makes_a_save_due_on_all_at_the_same_step(worlds, rank, step):
    """A rank tells of it at its next `should_save`: rank 0 may have answered there already."""
    first, *others = worlds.run(3, LEAVING.format(sent=[(rank, step, int(signal.SIGTERM))], saved=0))

    (*before, due, status) = first.told
    assert all(one.told == first.told for one in others)
    assert (before, due, status) == ([[False, False]] * len(before), [True, True], "committed")
    assert len(before) + 1 in ([step] if rank == 0 else [step, step + 1])


@pytest.mark.parametrize("seed", range(3))
def test_signals_at_several_ranks_at_any_step_beside_a_save_make_one_save_due(worlds, seed):
    dice = random.Random(seed)
    sent = [
        (dice.randrange(3), dice.randint(2, 4), int(dice.choice([signal.SIGTERM, signal.SIGUSR1]))) for _ in range(2)
    ]
    sent = list(
        {(rank, signum): (rank, step, signum) for rank, step, signum in sent}.values()
    )  # a second one would end it
    first, *others = worlds.run(3, LEAVING.format(sent=sent, saved=1))

    assert all(one.told == first.told for one in others)
    assert first.told[-2:] == [[True, True], "committed"]
    earliest = min(step for _, step, _ in sent)
    assert steps_of(worlds)[0] == 1
    assert steps_of(worlds)[1:] in ([earliest], [earliest + 1])


def test_all_ranks_save_after_the_interval_that_rank_0_has_measured(worlds):
    """Its clock and its saves decide. The others hear of the interval with the answer."""
    script = """
    from async_ckpt import Due
    from async_ckpt.core.saving.interval import SaveCost
    with open_run(here.root, due=Due(overhead=0.5, at_most=1e-6 if here.rank == 0 else 3600)) as ckpt:
        for step in range(1, 4):
            here.tell([ckpt.should_save(step), *ckpt.interval()[:2]])
            if here.rank == 0 and step == 1:
                ckpt._policy._durations.interval.add(SaveCost(900.0, 0.0, 1800.0))
    """
    first, second = worlds.run(2, script)

    assert first.told == [[True, 1e-6, "at_most"], [False, 1800.0, "durable"], [False, 1800.0, "durable"]]
    assert second.told == first.told


def test_record_and_driver_are_those_of_rank_0(worlds):
    script = """
    with open_run(here.root) as ckpt:
        here.save(ckpt, small(1), 1, record={"loss": float(here.rank)}, driver={"loader": here.rank} )
    """
    worlds.run(2, script)

    assert records(worlds.root)[0]["loss"] == 0.0
    assert open_run(worlds.root).load(1)["loader"] == 0


TORCHRUN = """
import os, sys
import torch.distributed as dist
from async_ckpt import AsyncCheckpointer
from rank_states import small

dist.init_process_group("gloo")
with AsyncCheckpointer(sys.argv[1]) as ckpt:
    start = ckpt.restore(small(0))
    ckpt.save(small(1), 1).result()
    print(f"{dist.get_rank()}: {start} {ckpt.steps()}", flush=True)
dist.destroy_process_group()
"""


def test_a_training_that_torchrun_starts_needs_nothing_said(worlds, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    folders = [Path(states.__file__).parent, Path(async_ckpt.__file__).parents[1]]
    done = subprocess.run(
        [*command, script, worlds.root],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env={
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
        },
    )

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0: None [1]", "1: None [1]"]
    assert steps_of(worlds) == [1]
    assert json.loads((worlds.root / "step_00000001/manifest.json").read_text())["world_size"] == 2


def test_ranks_borrow_the_same_though_some_know_of_a_commit_sooner(worlds):
    script = """
    import asyncio
    from async_ckpt.core.ranks.agreement import Agreement

    receive = Agreement.receive

    async def late(agreed, *arguments):
        while here.rank and agreed._joint.step == 1 and not here.is_said("second"):
            await asyncio.sleep(0.01)
        return await receive(agreed, *arguments)

    Agreement.receive = late
    with open_run(here.root, max_in_flight=2) as ckpt:
        frozen = spread(9, 9)
        states = [{**small(step), "frozen": {"t": frozen}} for step in range(5)]
        first = ckpt.save(states[1], 1)
        if here.rank == 0:
            first.result()
            here.say("first")
        here.hear("first")
        second = ckpt.save(states[2], 2, unchanged=["frozen"])
        here.meet("called")
        here.say("second")
        first.result(), second.result()
        here.tell([ckpt.save(states[step], step, unchanged=["frozen"]).result().step for step in (3, 4)])
    """
    assert worlds.told(2, script) == [[[3, 4]]] * 2
    assert steps_of(worlds) == [1, 2, 3, 4]
    lent = {step: {one.step for one in run_of(worlds.root).manifest(step).elsewhere} for step in (2, 3, 4)}
    assert lent[2] == set()
    assert lent[3] == {1}
    assert lent[4] <= {1, 2}
    assert torch.equal(load(worlds.root, select="frozen")["frozen"]["t"], numbered(9, 9))
