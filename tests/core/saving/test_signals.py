"""Signals that ask a process to leave: real ones, in processes of their own."""

import signal
import textwrap
from concurrent.futures import Future

import pytest
from states import assert_is_state, leftovers, open_run, state_at

from async_ckpt import Due, StorageFullError
from async_ckpt.core.report import SaveReport
from async_ckpt.core.saving.policy import SavePolicy
from async_ckpt.core.saving.signals import signals_of

# What each script begins with. `tell` sends a signal to the process itself, whose handlers have run when it returns.
HEAD = """
import os, signal, sys, threading, warnings
from signal import SIG_DFL, SIG_IGN, SIGTERM, SIGUSR1, SIGUSR2, getsignal
import torch
from async_ckpt import AsyncCheckpointer, Due
from async_ckpt.core.storage.local import LocalSink
from states import open_run, state_at

torch.set_num_threads(1)  # a forked child whose parent has used OpenMP hangs in torch itself
warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of forks beside threads
root = sys.argv[1]

def tell(signum):
    signal.raise_signal(signum)

def on_thread(fn):
    thread = threading.Thread(target=fn)
    thread.start()
    thread.join()

def open_(name="run", signals=True, **options):
    return open_run(root + "/" + name, due=Due(signals=signals), **options)

def theirs(signum, frame):
    print("theirs", flush=True)
"""


def script(body: str) -> str:
    return HEAD + textwrap.dedent(body)


def run(nursery, tmp_path, body: str, *, ends_by: int = 0) -> str:
    """What a script prints, which ends as it should."""
    ended = nursery.run(script(body), tmp_path)
    assert ended.status == -ends_by, ended.err
    assert ended.err == ""
    return ended.out


TRAIN = """
import itertools
with open_() as ckpt:
    for step in itertools.count(1):
        if ckpt.should_save(step):
            ckpt.save(state_at(step, 5), step)
            if ckpt.preempted:
                break
        print("step", flush=True)
        threading.Event().wait(0.001)
print("left", flush=True)
"""


# --- the first signal, and the second ------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_loop_that_is_sent_a_signal_saves_leaves_and_ends_with_success(tmp_path, nursery, signum):
    child = nursery.start(script(TRAIN), tmp_path)
    child.wait_for_line("step\n")
    child.send(signum)
    ended = child.ended()

    assert (ended.status, ended.err) == (0, "")
    assert ended.out.endswith("left\n")
    with open_run(tmp_path / "run") as ckpt:
        (step,) = ckpt.steps()
        assert_is_state(ckpt.load(), step, 5)
    assert leftovers(tmp_path / "run") == []


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_ends_the_process_by_that_signal(tmp_path, nursery, signum):
    body = """
    ckpt = open_()
    print("training", flush=True)
    while not ckpt.preempted:
        threading.Event().wait(0.001)
    print("preempted", flush=True)
    threading.Event().wait()
    """
    child = nursery.start(script(body), tmp_path)
    child.wait_for_line("training\n")
    child.send(signum)
    child.wait_for_line("preempted\n")
    child.send(signum)

    assert child.ended().status == -signum


def test_each_signal_is_deferred_once(tmp_path, nursery):
    body = "ckpt = open_(); tell(SIGUSR1); tell(SIGTERM); print('here', flush=True); tell(SIGUSR1)"

    assert run(nursery, tmp_path, body, ends_by=signal.SIGUSR1) == "here\n"


def test_without_signals_the_first_one_ends_the_process(tmp_path, nursery):
    body = "ckpt = open_run(root, due=Due(every=2)); assert not ckpt.preempted; tell(SIGTERM)"

    run(nursery, tmp_path, body, ends_by=signal.SIGTERM)


def test_a_signal_during_a_save_leaves_it_be_and_it_is_the_last_one(tmp_path, nursery):
    body = """
    from async_ckpt.core.saving import saver
    capture = saver.capture

    def interrupted(*arguments, **options):
        tell(SIGTERM)
        return capture(*arguments, **options)

    with open_() as ckpt:
        assert not ckpt.should_save(1)
        saver.capture = interrupted
        ckpt.save(state_at(1), step=1)
        assert ckpt.preempted
        assert not ckpt.should_save(2)
    assert open_().steps() == [1]
    """
    run(nursery, tmp_path, body)


def test_a_process_that_waits_for_its_saves_at_the_end_defers_a_signal_too(tmp_path, nursery):
    body = """
    from children import hold_writes
    go = hold_writes()
    signal.signal(SIGUSR2, lambda *_: go.set())
    ckpt = open_()
    ckpt.save(state_at(1, 5), step=1)
    print("ending", flush=True)
    """
    child = nursery.start(script(body), tmp_path)
    child.wait_for_line("ending\n")
    child.send(signal.SIGTERM)
    child.send(signal.SIGUSR2)

    assert child.ended().status == 0
    assert open_run(tmp_path / "run").steps() == [1]


# --- what was there before -----------------------------------------------------------------------------------------


def test_a_handler_of_the_users_is_called_and_the_process_goes_on(tmp_path, nursery):
    body = """
    signal.signal(SIGTERM, theirs)
    with open_() as ckpt:
        for _ in range(3):
            tell(SIGTERM)
        assert ckpt.preempted
    assert getsignal(SIGTERM) is theirs
    """
    assert run(nursery, tmp_path, body) == "theirs\n" * 3


def test_what_a_handler_of_the_users_raises_comes_through(tmp_path, nursery):
    body = """
    def leave(signum, frame):
        assert ckpt.preempted  # noted before
        sys.exit(5)
    signal.signal(SIGTERM, leave)
    ckpt = open_()
    try:
        tell(SIGTERM)
    except SystemExit as error:
        print(error.code)
    """
    assert run(nursery, tmp_path, body) == "5\n"


def test_an_interrupt_stays_pythons_own_and_counts_if_it_is_named(tmp_path, nursery):
    body = """
    for signals, counts in [(True, False), (("SIGINT",), True)]:
        with open_(signals=signals) as ckpt:
            try:
                tell(signal.SIGINT)
            except KeyboardInterrupt:
                print(ckpt.preempted)
        assert getsignal(signal.SIGINT) is signal.default_int_handler
    """
    assert run(nursery, tmp_path, body) == "False\nTrue\n"


def test_an_ignored_signal_stays_ignored(tmp_path, nursery):
    body = """
    signal.signal(SIGTERM, SIG_IGN)
    with open_() as ckpt:
        assert getsignal(SIGTERM) is SIG_IGN
        tell(SIGTERM)
        assert not ckpt.preempted
        tell(SIGUSR1)
        assert ckpt.preempted
    assert getsignal(SIGTERM) is SIG_IGN
    """
    run(nursery, tmp_path, body)


@pytest.mark.parametrize("install", ["faulthandler.register(SIGUSR1)", "signal.getsignal = lambda _: None"])
def test_a_handler_that_was_not_installed_from_python_is_left_alone_with_a_warning(tmp_path, nursery, install):
    body = f"""
    import faulthandler
    {install}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        ckpt = open_(signals=["SIGUSR1"])
    (warning,) = told
    assert "SIGUSR1 has a handler that was not installed from Python" in str(warning.message)
    assert warning.filename.endswith("states.py"), warning.filename  # where it was constructed
    assert getsignal(SIGUSR1) is SIG_DFL
    tell(SIGUSR1)
    assert not ckpt.preempted
    """
    ended = nursery.run(script(body), tmp_path)

    if "faulthandler" in install:
        assert ended.status == 0, ended.err
        assert "most recent call first" in ended.err  # it still dumps its traces
    else:
        assert ended.status == -signal.SIGUSR1, ended.err


def test_other_signals_can_be_named(tmp_path, nursery):
    body = """
    with open_(signals=(name for name in ("SIGUSR2", signal.SIGRTMIN + 3))) as ckpt:
        assert getsignal(SIGTERM) is getsignal(SIGUSR1) is SIG_DFL
        tell(SIGUSR2)
        assert ckpt.preempted
        tell(signal.SIGRTMIN + 3)
    assert getsignal(SIGUSR2) is getsignal(signal.SIGRTMIN + 3) is SIG_DFL
    """
    run(nursery, tmp_path, body)


# --- who listens ---------------------------------------------------------------------------------------------------


def test_it_must_be_constructed_on_the_main_thread_and_may_be_used_on_any(tmp_path, nursery):
    body = """
    def construct():
        try:
            open_()
        except RuntimeError as error:
            print(error)
        assert not open_run(root, due=Due(every=1)).preempted

    def work():
        assert ckpt.preempted
        assert ckpt.should_save(1)
        ckpt.save(state_at(1), step=1).result()
        assert not ckpt.should_save(2)

    on_thread(construct)
    assert getsignal(SIGTERM) is SIG_DFL
    with open_() as ckpt:
        tell(SIGTERM)
        on_thread(work)
    """
    assert "construct the checkpointer there" in run(nursery, tmp_path, body)


def test_every_checkpointer_is_told(tmp_path, nursery):
    body = """
    one, two, other = open_("one"), open_("two"), open_("other", ["SIGUSR2"])
    tell(SIGTERM)
    assert one.preempted and two.preempted and not other.preempted
    """
    run(nursery, tmp_path, body)


@pytest.mark.parametrize("order", ["one two", "two one"])
@pytest.mark.parametrize("before", ["SIG_DFL", "theirs"])
@pytest.mark.parametrize("close", ["close()", "on_thread(close)"])
def test_two_checkpointers_may_be_closed_in_any_order_and_on_any_thread(tmp_path, nursery, order, before, close):
    first, last = order.split()
    closing = {name: close.replace("close", f"{name}.close") for name in (first, last)}
    closing = {name: how if "thread" in how else f"{name}.close()" for name, how in closing.items()}
    body = f"""
    signal.signal(SIGTERM, {before})
    one, two = open_("one"), open_("two")
    {closing[first]}
    tell(SIGTERM)
    assert {last}.preempted and not {first}.preempted
    {closing[last]}
    assert (getsignal(SIGTERM) is {before}) == {"thread" not in close}
    print("closed", flush=True)
    tell(SIGTERM)
    print("here", flush=True)
    """
    if before == "SIG_DFL":
        assert run(nursery, tmp_path, body, ends_by=signal.SIGTERM) == "closed\n"
    else:
        assert run(nursery, tmp_path, body) == "theirs\nclosed\ntheirs\nhere\n"


def test_what_was_closed_on_a_thread_is_put_back_by_the_next_one(tmp_path, nursery):
    body = """
    one = open_()
    tell(SIGTERM)
    on_thread(one.close)
    with open_("two") as two:
        assert not two.preempted
        tell(SIGTERM)  # deferred anew, for another training
        assert two.preempted
    assert getsignal(SIGTERM) is SIG_DFL
    """
    run(nursery, tmp_path, body)


def test_a_checkpointer_that_is_lost_without_being_closed_no_longer_defers(tmp_path, nursery):
    body = "ckpt = open_(); del ckpt; import gc; gc.collect(); tell(SIGTERM)"

    run(nursery, tmp_path, body, ends_by=signal.SIGTERM)


def test_what_could_not_be_constructed_leaves_no_handler(tmp_path, nursery):
    body = """
    try:
        open_(max_in_flight=0)
    except ValueError:
        assert getsignal(SIGTERM) is SIG_DFL
        print("refused")
    """
    assert run(nursery, tmp_path, body) == "refused\n"


# --- handlers that were installed over ours ------------------------------------------------------------------------

OVER = """
ckpt = open_()
ours = signal.getsignal(SIGTERM)

def over(signum, frame):
    print("over", flush=True)
    ours(signum, frame)

signal.signal(SIGTERM, over)
"""


def test_a_handler_that_was_installed_over_ours_stays_and_ours_passes_on(tmp_path, nursery):
    body = "tell(SIGTERM)\nassert ckpt.preempted\nckpt.close()\nassert getsignal(SIGTERM) is over\ntell(SIGTERM)"

    out = run(nursery, tmp_path, OVER + body, ends_by=signal.SIGTERM)
    assert out == "over\n" * 2


def test_over_a_handler_of_the_users_ours_passes_on_to_that(tmp_path, nursery):
    body = "ckpt.close()\ntell(SIGTERM)\nsignal.signal(SIGTERM, ours)\ntell(SIGTERM)"

    out = run(nursery, tmp_path, "signal.signal(SIGTERM, theirs)\n" + OVER + body)
    assert out == "over\ntheirs\ntheirs\n"


@pytest.mark.parametrize("first", ["ckpt", "another"])
def test_one_that_is_constructed_after_that_still_has_its_signal_deferred(tmp_path, nursery, first):
    """Of ours over theirs over ours, the lowest alone knows what the signal would do."""
    last = "another" if first == "ckpt" else "ckpt"
    body = f"""
another = open_("another")
{first}.close()
tell(SIGTERM)
assert {last}.preempted and not {first}.preempted
print("here", flush=True)
{last}.close()
assert getsignal(SIGTERM) is over
tell(SIGTERM)
"""
    out = run(nursery, tmp_path, OVER + body, ends_by=signal.SIGTERM)
    assert out == "over\nhere\nover\n"


def test_what_the_user_has_put_there_since_is_not_touched(tmp_path, nursery):
    body = "ckpt = open_(); signal.signal(SIGTERM, SIG_IGN); ckpt.close(); assert getsignal(SIGTERM) is SIG_IGN"

    run(nursery, tmp_path, body)


# --- forks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", ["SIG_DFL", "theirs"])
@pytest.mark.parametrize("fork", ["fork()", "on_thread(fork)"])
def test_a_forked_child_has_the_former_handlers_and_the_parent_keeps_its_own(tmp_path, nursery, before, fork):
    body = f"""
    def fork():
        child = os.fork()
        if child == 0:
            assert getsignal(SIGTERM) is {before}
            ckpt.close()
            tell(SIGTERM)
            assert not ckpt.preempted
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

    signal.signal(SIGTERM, {before})
    with open_() as ckpt:
        {fork}
        tell(SIGTERM)
        assert ckpt.preempted
    """
    out = run(nursery, tmp_path, body)
    assert out == ("-15\n" if before == "SIG_DFL" else "theirs\n7\ntheirs\n")


def test_a_signal_in_the_first_moment_of_a_forked_child_ends_it(tmp_path, nursery):
    body = """
    from async_ckpt.core.host import process
    process._forgetting.insert(0, lambda: tell(SIGTERM))  # before our handlers are taken out there
    ckpt = open_()
    child = os.fork()
    if child == 0:
        os._exit(7)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run(nursery, tmp_path, body) == "-15\n"


def test_a_worker_process_is_terminated_by_its_parent_as_ever(tmp_path, nursery):
    body = """
    import multiprocessing
    context = multiprocessing.get_context("fork")

    def work(started):
        started.set()
        threading.Event().wait()

    with open_() as ckpt:
        started = context.Event()
        worker = context.Process(target=work, args=(started,))
        worker.start()
        started.wait()
        worker.terminate()
        worker.join()
        print(worker.exitcode)
        assert not ckpt.preempted
    """
    assert run(nursery, tmp_path, body) == "-15\n"


def test_a_forked_child_has_signals_of_its_own(tmp_path, nursery):
    body = """
    ckpt = open_()
    child = os.fork()
    if child == 0:
        own = open_("child")
        tell(SIGTERM)
        assert own.preempted and not ckpt.preempted
        own.close()
        assert getsignal(SIGTERM) is SIG_DFL
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    run(nursery, tmp_path, body)


# --- the rule ------------------------------------------------------------------------------------------------------


FULL = StorageFullError("the disk is full", path="/ckpt", needed_bytes=2, free_bytes=1)


class Told:
    """A policy that is told when the process is asked to leave."""

    def __init__(self) -> None:
        self.is_given = False
        self.policy = SavePolicy(Due(signals=True), preempted=lambda: self.is_given)

    def save(self, step: int) -> Future[SaveReport]:
        save: Future[SaveReport] = Future()
        self.policy.follow(step, save)
        return save


def test_a_signal_makes_one_save_due_at_the_next_step():
    told = Told()
    assert not told.policy.should_save(1)
    told.is_given = True

    assert not told.policy.should_save(1)  # what was said of a step stands
    assert told.policy.should_save(2)
    assert told.policy.should_save(3)  # nobody has saved
    save = told.save(3)
    assert not told.policy.should_save(4)
    save.set_result(SaveReport("committed", 3, "x"))
    assert not told.policy.should_save(5)


def test_a_save_that_was_begun_before_the_signal_is_not_the_last_one():
    told = Told()
    told.save(1)
    told.is_given = True

    assert told.policy.should_save(2)


def test_a_last_save_that_fails_is_due_again_and_one_that_is_skipped_stays_due():
    told = Told()
    told.is_given = True
    assert told.policy.should_save(1)
    told.save(1).set_exception(FULL)
    assert told.policy.should_save(2)
    skipped: Future[SaveReport] = Future()
    skipped.set_result(SaveReport("skipped", 2, "x"))
    told.policy.follow(2, skipped)
    assert told.policy.should_save(2)
    told.save(2).set_result(SaveReport("committed", 2, "x"))
    assert not told.policy.should_save(3)


@pytest.mark.parametrize(
    ("given", "error", "complaint"),
    [
        ("SIGTERM", TypeError, "True or several signals"),
        (signal.SIGTERM, TypeError, "True or several signals"),
        (None, TypeError, "True or several signals"),
        ([1.5], TypeError, "a signal is a name"),
        ([True], TypeError, "a signal is a name"),
        (["USR1"], ValueError, "no signal 'USR1'"),
        ([4000], ValueError, "no signal 4000"),
        (["SIGKILL"], ValueError, "SIGKILL ends the process at once"),
        ([signal.SIGSTOP], ValueError, "SIGSTOP ends the process at once"),
        (["SIGSEGV"], ValueError, "SIGSEGV ends the process at once"),
    ],
)
def test_what_is_no_signal_to_be_deferred_is_refused(given, error, complaint):
    with pytest.raises(error, match=complaint):
        Due(signals=given)


def test_a_system_without_a_signal_does_without_it(monkeypatch):
    monkeypatch.delattr(signal, "SIGUSR1")

    assert signals_of(True) == (signal.SIGTERM,)
    assert signals_of(False) == ()


def test_signals_alone_are_a_rule_and_none_are_not(tmp_path):
    with open_run(tmp_path, due=Due(signals=("SIGTERM", "SIGTERM"))) as ckpt:
        assert not ckpt.should_save(1)
    assert Due(signals=["SIGTERM", 15]).signals == (15,)
    with open_run(tmp_path, due=Due(signals=())) as ckpt, pytest.raises(ValueError, match="needs a rule"):
        ckpt.should_save(1)
    assert repr(ckpt).endswith("closed>")
    with open_run(tmp_path) as ckpt:
        assert not ckpt.preempted
        ckpt.save(state_at(1), step=1)
