"""The segment pool and the crews: bounded, in order, and never in anybody's way."""

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from racing import Call, Thrown, until
from states import MIB, SEGMENT

from async_ckpt.core.host import limits as host
from async_ckpt.core.host import threads
from async_ckpt.core.host.limits import free_memory_bytes
from async_ckpt.core.host.loop import Loop
from async_ckpt.core.host.memory import HostBuffer, _node_at, prefer_node
from async_ckpt.core.host.pool import MIN_SEGMENTS, SegmentPool
from async_ckpt.core.host.threads import Crew


def nothing() -> None:
    """A check that finds nothing wrong."""


@pytest.fixture
def pool():
    made = SegmentPool(SEGMENT, max_bytes=MIN_SEGMENTS * SEGMENT)
    yield made
    made.close()


def lease(pool: SegmentPool, order: int = 0, segment: int = 0):
    return pool.lease((order, segment), pin=None, check=nothing)


def test_a_segment_is_page_aligned_writable_and_of_its_exact_size():
    segment = HostBuffer(SEGMENT)

    assert segment.address % (2 * MIB) == 0
    assert len(segment.view) == SEGMENT == segment.tensor.numel()
    assert segment.tensor.data_ptr() == segment.address
    segment.tensor.fill_(7)
    assert segment.view[0] == segment.view[-1] == 7
    assert not segment.pinned
    segment.free()
    segment.free()


def test_a_segment_that_somebody_still_looks_at_is_not_taken_from_them(nursery):
    script = """
    from async_ckpt.core.host.memory import HostBuffer
    segment = HostBuffer(4 << 20)
    held = segment.tensor
    segment.free()
    assert int(held.fill_(1).sum()) == 4 << 20
    """
    nursery.out_of(script)


def test_a_segment_that_outlives_every_module_goes_without_a_word(nursery):
    # A module that somebody still holds at the interpreter's end is emptied in the order of its names.
    ended = nursery.run(
        "import ctypes; from async_ckpt.core.host import memory; memory.kept = memory.HostBuffer(4 << 20);"
        "ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))"
    )
    assert (ended.status, ended.err) == (0, "")


def test_no_more_segments_are_lent_than_the_budget_holds(pool):
    leases = [lease(pool) for _ in range(MIN_SEGMENTS)]
    assert len({held.segment.address for held in leases}) == MIN_SEGMENTS
    assert pool.num_bytes == MIN_SEGMENTS * SEGMENT

    waiting = Call(lambda: lease(pool))
    until(lambda: "1 waiting" in repr(pool))
    leases[0].release()
    assert waiting.outcome().segment is leases[0].segment
    assert pool.num_bytes == MIN_SEGMENTS * SEGMENT


def test_a_drained_segment_is_lent_again_before_new_memory_is_taken(pool):
    first = lease(pool)
    first.release()
    assert lease(pool).segment is first.segment
    assert pool.num_bytes == SEGMENT


def test_the_oldest_save_is_served_first_and_in_the_order_of_its_file(pool):
    held = [lease(pool) for _ in range(MIN_SEGMENTS)]
    served = []
    calls = []
    for number, order in enumerate([(2, 0), (1, 5), (3, 1), (1, 3), (2, 9)], start=1):
        calls.append(Call(lambda order=order: served.append((order, pool.lease(order, pin=None, check=nothing)))))
        until(lambda number=number: f"{number} waiting" in repr(pool))
    for number in range(5):
        (held[number] if number < MIN_SEGMENTS else served[0][1]).release()
        until(lambda number=number: len(served) == number + 1)
    for call in calls:
        call.outcome()

    assert [order for order, _ in served] == [(1, 3), (1, 5), (2, 0), (2, 9), (3, 1)]


def test_a_segment_comes_back_when_the_last_who_retained_it_has_released_it(pool):
    held = lease(pool)
    held.retain()
    held.release()
    assert "1 of 1 segments lent" in repr(pool)
    held.release()
    assert "0 of 1 segments lent" in repr(pool)


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 80])
def test_memory_that_the_system_refuses_is_a_memory_error_in_words(num_bytes):
    with pytest.raises(MemoryError, match=r"the system refuses .* bytes of host memory .* lower host_bytes="):
        HostBuffer(num_bytes)


def test_waiting_ends_with_what_check_raises_and_nobody_behind_is_held_up(pool):
    held = [lease(pool) for _ in range(MIN_SEGMENTS)]
    pointless = threading.Event()

    def check() -> None:
        if pointless.is_set():
            raise Thrown

    first = Call(lambda: pool.lease((0, 0), pin=None, check=check))
    until(lambda: "1 waiting" in repr(pool))
    second = Call(lambda: lease(pool, 1))
    until(lambda: "2 waiting" in repr(pool))
    pointless.set()
    with pytest.raises(Thrown):
        first.outcome()
    held[0].release()
    assert second.outcome().segment is held[0].segment


def test_released_memory_goes_back_to_the_system_and_lent_memory_when_it_comes_back(pool):
    held, free = lease(pool), lease(pool)
    free.release()
    pool.release()
    assert pool.num_bytes == SEGMENT
    pool.close()
    assert pool.num_bytes == SEGMENT
    held.release()
    assert pool.num_bytes == 0


def test_a_pool_without_a_budget_grows_to_what_the_saves_need_and_no_further():
    pool = SegmentPool(SEGMENT)
    assert pool.max_segments == MIN_SEGMENTS
    pool.admit(10 * SEGMENT - 1)
    assert pool.max_segments == 10
    pool.admit(3 * SEGMENT)
    assert pool.max_segments == 10
    pool.admit(6 * SEGMENT, num_saves=2)
    assert pool.max_segments == 12


def test_a_pool_without_a_budget_never_plans_with_more_than_half_of_the_free_memory():
    pool = SegmentPool(SEGMENT)
    pool.admit(1 << 50)

    assert MIN_SEGMENTS * SEGMENT <= pool.max_segments * SEGMENT <= free_memory_bytes()
    assert pool.num_bytes == 0


def test_a_budget_is_not_changed_by_what_is_saved(pool):
    pool.admit(1 << 40, 5)
    assert pool.max_segments == MIN_SEGMENTS


def test_reserving_takes_what_is_missing_up_to_the_budget(pool):
    crew = Crew("test", 2)
    try:
        pool.reserve(2, crew, pin=None)
        assert pool.num_bytes == 2 * SEGMENT
        pool.reserve(2, crew, pin=None)
        assert pool.num_bytes == 2 * SEGMENT
        pool.reserve(99, crew, pin=None)
        assert pool.num_bytes == MIN_SEGMENTS * SEGMENT
        assert "0 of 4 segments lent" in repr(pool)
    finally:
        crew.stop()


# --- runs --------------------------------------------------------------------------------------------------------


def run(pool: SegmentPool, num_segments: int):
    return pool.lease_run((0, 0), num_segments, pin=torch.device("sim", 0), check=nothing)


@pytest.fixture
def registered(sim) -> Callable[[], dict[int, int]]:
    """Memory that has been page-locked since, with its bytes by its address."""
    before = dict(sim.sim.registered)
    return lambda: {at: length for at, length in sim.sim.registered.items() if at not in before}


def addresses(leases) -> list[int]:
    return [held.segment.address for held in leases]


def test_a_run_lies_one_behind_the_other_in_memory_that_is_page_locked_as_one(pool, registered):
    leases = run(pool, 3)

    first = leases[0].segment.address
    assert addresses(leases) == [first, first + SEGMENT, first + 2 * SEGMENT]
    assert registered() == {first: 3 * SEGMENT}
    assert pool.num_bytes == 3 * SEGMENT
    assert len(run(pool, 3)) == 1  # as far as the budget goes


def test_a_run_is_lent_again_as_far_as_it_is_free(pool, sim):
    first, second, _third, fourth = run(pool, 4)
    for held in (fourth, second, first):
        held.release()

    assert addresses(run(pool, 4)) == addresses([first, second])
    assert addresses(run(pool, 4)) == addresses([fourth])


def test_a_short_run_is_lent_where_it_is_enough_and_the_long_one_is_kept(pool, sim):
    short, long = run(pool, 1), run(pool, 3)
    for held in (*short, *long):
        held.release()

    assert addresses(run(pool, 1)) == addresses(short)
    assert addresses(run(pool, 3)) == addresses(long)


def test_memory_of_which_a_part_is_lent_goes_back_to_the_system_with_that_part(pool, registered):
    first, *others = run(pool, 3)
    for held in others:
        held.release()
    pool.release()
    assert (pool.num_bytes, len(registered())) == (3 * SEGMENT, 1)

    first.release()
    pool.release()
    assert (pool.num_bytes, len(registered())) == (0, 0)


def test_memory_of_which_a_part_is_leaked_is_lent_on_and_stays_page_locked(pool, registered):
    first, second, third = run(pool, 3)
    second.leak()
    for held in (first, third):
        held.release()
    pool.release()

    assert (pool.num_bytes, len(registered())) == (3 * SEGMENT, 1)
    assert addresses(run(pool, 1) + run(pool, 1)) == addresses([first, third])
    pool.close()
    assert len(registered()) == 1


def test_a_forked_child_neither_inherits_the_memory_nor_gives_it_back(nursery):
    script = """
    import os, signal
    from async_ckpt.core.host.pool import SegmentPool
    pool = SegmentPool(4 << 20, max_bytes=16 << 20)
    lease = pool.lease((0, 0), pin=None, check=lambda: None)
    lease.segment.tensor.fill_(5)
    free = pool.lease((0, 1), pin=None, check=lambda: None)
    free.release()
    child = os.fork()
    if child == 0:
        pool.release()
        pool.close()
        assert pool.num_bytes == 8 << 20
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        print(lease.segment.view[0], flush=True)  # not mapped here
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == -signal.SIGSEGV, status
    assert int(lease.segment.tensor.sum()) == 5 * (4 << 20)
    """
    ended = nursery.run(script)
    assert ended.status == 0, ended.err


# --- crews -----------------------------------------------------------------------------------------------------


@pytest.fixture
def crew():
    made = Crew("test", 3)
    yield made
    made.stop()


def test_a_crew_starts_a_thread_only_when_none_is_idle_and_never_more_than_it_may(crew):
    go = threading.Event()
    running = threading.Semaphore(0)

    def task() -> None:
        running.release()
        go.wait(60)

    for number in range(1, 6):
        crew.submit(task)
        assert repr(crew) == f"<Crew test: {min(number, 3)} threads, {number} tasks>"
    go.set()
    for _ in range(5):
        assert running.acquire(timeout=60)


def test_a_task_that_raises_does_not_end_its_thread(crew):
    told = []
    hook, threading.excepthook = threading.excepthook, told.append
    try:
        ended = threading.Event()

        def throw() -> None:
            raise Thrown

        for _ in range(6):
            crew.submit(throw)
        crew.submit(ended.set)
        assert ended.wait(60)
        until(lambda: len(told) == 6)
    finally:
        threading.excepthook = hook
    assert all(args.exc_type is Thrown for args in told)


def test_running_all_returns_when_every_task_has_ended(crew):
    done = []
    crew.run_all(lambda n=n: done.append(n) for n in range(50))
    assert sorted(done) == list(range(50))


def test_running_all_raises_the_first_error_and_begins_no_more(crew):
    begun = []

    def task(number: int) -> None:
        begun.append(number)
        raise Thrown(number)

    with pytest.raises(Thrown):
        crew.run_all(lambda n=n: task(n) for n in range(1000))
    assert len(begun) <= 3


def test_a_crew_that_was_stopped_works_again_when_asked(crew):
    crew.run_all([nothing] * 5)
    crew.stop()
    crew.stop()
    ended = threading.Event()
    crew.submit(ended.set)
    assert ended.wait(60)


def test_a_crew_keeps_nothing_of_a_task_that_has_ended(crew):
    import weakref

    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)
    crew.submit(lambda held=held: None)
    del held
    until(lambda: gone() is None)


def test_running_all_begins_nothing_when_a_thread_cannot_be_had(crew, monkeypatch):
    start, done = threading.Thread.start, []
    monkeypatch.setattr(threads, "_reserve", threads.Crew("reserve", 1))  # empty, as on most versions of Python

    def scarce(thread):
        if thread.name.endswith("-3"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(RuntimeError, match="new thread"):
        crew.run_all([functools.partial(done.append, n) for n in range(100)])
    num_done = len(done)
    monkeypatch.undo()
    crew.run_all([nothing] * 5)  # a later one has all its threads
    assert len(done) == num_done < 100


# --- processors and memory ------------------------------------------------------------------------------------


def test_limits_of_control_groups_count_but_not_the_page_cache(tmp_path):
    def put(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    put("proc/meminfo", "MemTotal: 64 kB\nMemAvailable: 1000000 kB\n")
    assert free_memory_bytes(tmp_path) == 1_024_000_000
    assert host._quota(tmp_path) > 10**6

    put("proc/self/cgroup", "0::/job/step\n")
    put("sys/fs/cgroup/job/memory.max", "800\n")
    put("sys/fs/cgroup/job/memory.current", "700\n")
    put("sys/fs/cgroup/job/memory.stat", "anon 1\ninactive_file 500\n")
    put("sys/fs/cgroup/job/step/memory.max", "max\n")
    put("sys/fs/cgroup/job/step/cpu.max", "250000 100000\n")
    put("sys/fs/cgroup/job/cpu.max", "max 100000\n")
    host._quota.cache_clear()
    assert free_memory_bytes(tmp_path) == 600
    assert host._quota(tmp_path) == 3

    put("proc/self/cgroup", "4:memory:/elsewhere\n2:cpu,cpuacct:/\n")
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "900\n")
    put("sys/fs/cgroup/memory/memory.usage_in_bytes", "850\n")
    put("sys/fs/cgroup/memory/memory.stat", "total_inactive_file 50\n")
    put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n")
    host._quota.cache_clear()
    assert free_memory_bytes(tmp_path) == 100
    assert host._quota(tmp_path) > 10**6
    host._quota.cache_clear()


def test_the_ranks_of_a_host_share_it_whoever_started_them(monkeypatch):
    for name in host._LOCAL_SIZES:
        monkeypatch.delenv(name, raising=False)
    assert host.local_world_size() == 1
    for name, value in (("SLURM_STEP_TASKS_PER_NODE", "8(x2)"), ("LOCAL_WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
        assert host.local_world_size() == int(value[0])


# --- near a device --------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/proc/self/numa_maps"), reason="the kernel knows no NUMA nodes")
def test_pages_are_preferred_from_the_node_that_is_told():
    segment = HostBuffer(4 * MIB)
    if not prefer_node(segment.address, segment.num_bytes, 0):
        pytest.skip("the kernel refuses mbind here, as in a container without CAP_SYS_NICE")
    segment.touch()
    told = dict(line.split(" ", 1) for line in Path("/proc/self/numa_maps").read_text().splitlines())
    assert told[f"{segment.address:x}"].startswith("prefer")
    assert not prefer_node(segment.address, segment.num_bytes, 1000), "there is no such node"


def test_a_node_is_known_only_where_the_machine_tells(tmp_path):
    path = tmp_path / "numa_node"
    assert _node_at(path) is None
    for text, node in (("-1\n", None), ("0\n", 0), ("3\n", 3), ("?\n", None)):
        path.write_text(text)
        assert _node_at(path) == node


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux do threads have priorities of their own")
def test_who_works_in_the_background_gives_way_to_the_training():
    """By the processor's priority, and by the disk's, as the kernel tells them."""
    get_number = {"x86_64": 252, "aarch64": 31}.get(os.uname().machine)  # ioprio_get(2)
    told = {}
    for background in (False, True):
        crew = Crew("test", 1, background=background)
        ended = threading.Event()

        def ask(background=background, ended=ended):
            disk = ctypes.CDLL(None).syscall(get_number, 1, 0) >> 13 if get_number else None
            told[background] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), disk
            ended.set()

        crew.submit(ask)
        assert ended.wait(30)
        crew.stop()
    assert told[True][0] > told[False][0]
    if get_number and told[True][1] >= 0:
        assert told[True][1] == 3  # served when nobody else asks
        assert told[False][1] != 3


@pytest.mark.skipif(sys.platform != "linux", reason="only on Linux do threads have priorities of their own")
def test_who_is_waited_for_has_the_disk_like_all_others():
    get_number = {"x86_64": 252, "aarch64": 31}.get(os.uname().machine)
    if get_number is None:
        pytest.skip("the number of ioprio_get is not known here")
    crew, threads, may_end = Crew("test", 2, background=True), [], threading.Event()
    loop = Loop()

    def task():
        threads.append(threading.get_native_id())
        may_end.wait(30)

    def classes():
        return {ctypes.CDLL(None).syscall(get_number, 1, thread) >> 13 for thread in threads}

    crew.submit(task)
    until(lambda: len(threads) == 1)
    if classes() != {3}:
        pytest.skip("the kernel has no priorities for its disks")
    crew.hurry()
    crew.submit(task)  # one that starts later, too
    loop.hurry()
    writers = loop.writers()  # that are made for the last saves
    writers.submit(task)
    until(lambda: len(threads) == 3)
    assert 3 not in classes()
    may_end.set()
    crew.stop()
    writers.stop()
    loop.stop()
