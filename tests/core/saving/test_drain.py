"""The drain: segments in, one written archive out, whatever the order in which threads come by."""

import threading

from async_ckpt.core.format.layout import TensorPlan, lay_out
from async_ckpt.core.host.pool import Lease, SegmentPool
from async_ckpt.core.saving.drain import Drain
from async_ckpt.core.spec import MIB, TensorSpec

SEGMENT_BYTES = 4 * MIB


class Discarding:
    def write(self, offset, data, lease):
        pass


class LateToLeave(Drain):
    """A writer of the body comes back from its write, and is held up before it says so."""

    may_leave = threading.Event()

    def _leave(self):
        assert self.may_leave.wait(60)
        super()._leave()


def leases(count):
    pool = SegmentPool(SEGMENT_BYTES, max_bytes=count * SEGMENT_BYTES)
    return [pool.lease((0, i), pin=None, check=lambda: None) for i in range(count)]


def in_a_thread(task, refused):
    threading.Thread(target=task).start()


def drain_of(layout, made=Drain):
    return made(layout, SEGMENT_BYTES, 8, in_a_thread)


def test_a_writer_that_is_held_up_behind_the_last_write_does_not_leave_the_save_hanging():
    plan = TensorPlan([TensorSpec(("model", "w"), "uint8", (5 * MIB,))])
    layout = lay_out(plan, skeleton="{}", objects=None, step=1, mtime=0)
    drain = drain_of(layout, LateToLeave)
    (lane,) = drain.open([(Discarding(), in_a_thread, None)])
    for number, lease in enumerate(leases(drain.num_segments)):
        assert isinstance(lease, Lease)
        drain.put(number, lease)
    drain.may_leave.set()

    lane.written.result(60)
    drain.idle.result(60)
    assert drain.progress.written_bytes == layout.file_bytes


def test_a_failed_drain_gives_back_what_it_is_given():
    plan = TensorPlan([TensorSpec(("model", "w"), "uint8", (5 * MIB,))])
    layout = lay_out(plan, skeleton="{}", objects=None, step=1, mtime=0)
    drain = drain_of(layout)
    given = leases(drain.num_segments)
    drain.put(0, given[0])
    drain.fail(OSError("the disk is gone"))
    for number, lease in enumerate(given[1:], start=1):
        drain.put(number, lease)

    drain.idle.result(60)
    (lane,) = drain.open([(Discarding(), in_a_thread, None)])
    assert isinstance(lane.written.exception(60), OSError)
    assert given[0]._lender.lease((1, 0), pin=None, check=lambda: None)
    assert "0 of" not in repr(given[0]._lender)


def test_a_refused_thread_fails_a_save_only_if_no_other_one_has_written_what_was_sent():
    def write_at_once(task, refused):
        task()
        refused(RuntimeError("the interpreter is exiting"))

    def refuse(task, refused):
        refused(RuntimeError("there is no thread"))

    plan = TensorPlan([TensorSpec(("model", "w"), "uint8", (5 * MIB,))])
    layout = lay_out(plan, skeleton="{}", objects=None, step=1, mtime=0)
    for submit, why in ((write_at_once, None), (refuse, "there is no thread")):
        drain = Drain(layout, SEGMENT_BYTES, 8, refuse)  # nor is there one beside those that write
        (lane,) = drain.open([(Discarding(), submit, None)])
        for number, lease in enumerate(leases(drain.num_segments)):
            drain.put(number, lease)

        error = lane.written.exception(60)
        assert (error and str(error)) == why
        drain.idle.result(60)
