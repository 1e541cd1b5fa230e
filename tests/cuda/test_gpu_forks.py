"""A child that is forked, or started in another way, beside saves from a CUDA device: it can use no device, and must end well."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu

# 160 tensors that are copied each by itself: more operations than the side stream has under way without an event.
STATE = """
from collecting import draw
context = sys.argv[2]
model = torch.nn.ParameterList(torch.full((65_536,), float(n), device="cuda") for n in range(160))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
for p in model:
    p.grad = torch.ones_like(p)
state = {"model": model.state_dict()}
ckpt = open_run(root + "/run")
def lose():
    # Nothing but a cycle holds what the call has made.
    gc.collect()
"""
SAVES = {
    "finished": """
for step in range(3):
    ckpt.save(state, step=step).result()
ckpt.wait()
draw(context)
""",
    "pending on the device": """
with held(torch.cuda.current_stream()):
    handle = ckpt.save(state, step=1)
    draw(context)
handle.result()
""",
    "pending on the disk": """
with scripted(ckpt) as disk:
    disk.stop("write")
    handle = ckpt.save(state, step=1)
    draw(context)
    disk.release_all()
    handle.result()
""",
    "failed": """
with scripted(ckpt) as disk:
    disk.fail("write", error=async_ckpt.StorageUnavailableError("gone", path="/ckpt"), times=None)
    assert ckpt.save(state, step=1).exception() is not None
draw(context)
""",
    "guarded": """
handle = ckpt.save(state, step=1, guard=optimizer)
optimizer.step()
draw(context)
handle.result()
draw(context)
""",
    "held": """
snap = async_ckpt.snapshot(state, guard=optimizer)
draw(context)
snap["model"]
snap.close()
draw(context)
""",
    "wrapped": """
async_ckpt.wrap(torch.save)(state, root + "/x.pt").result()
draw(context)
""",
    "one-off": """
async_ckpt.save(state, root + "/x.tar").result()
draw(context)
""",
    "exported": """
async_ckpt.export_hf({f"w{n}": p.data for n, p in enumerate(model)}, root + "/hf").result()
draw(context)
""",
    "published": """
with async_ckpt.Publisher(root + "/weights") as publisher:
    publisher.publish({f"w{n}": p.data for n, p in enumerate(model)}, version=1).result()
    draw(context)
""",
    "on two devices": """
state |= {"other": [torch.full((65_536,), float(n), device="cuda:1") for n in range(160)]}
ckpt.save(state, step=1).result()
draw(context)
""",
    "restored": """
ckpt.save(state, step=1).result()
ckpt.restore({"model": model.state_dict()})
draw(context)
""",
}


@pytest.mark.parametrize("save", SAVES)
def test_forked_workers_of_a_data_loader_end_well_beside_a_save_that_is(apart, save):
    apart(STATE + SAVES[save] + "ckpt.close()\n", "fork")


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
@pytest.mark.parametrize("save", ["finished", "pending on the disk"])
def test_started_workers_of_a_data_loader_end_well_beside_a_save_that_is(apart, save, context):
    apart(STATE + SAVES[save] + "ckpt.close()\n", context)


FORKED = """
def forked(task):
    child = os.fork()
    if child == 0:
        try:
            task()
            gc.collect()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.parametrize("when", ["while it is copied", "once it is saved"])
def test_a_saved_tensor_is_freed_in_a_forked_child(apart, when):
    apart(
        FORKED
        + f"""
state = {{"w": torch.ones(MIB, device="cuda"), "v": torch.ones(MIB, device="cuda").t()}}
with open_run(root) as ckpt:
    if {when == "once it is saved"}:
        ckpt.save(state, step=1).result()
        forked(state.clear)
    else:
        with held(torch.cuda.current_stream()):
            handle = ckpt.save(state, step=1)
            forked(state.clear)
        handle.result()
    assert bool((ckpt.load(1)["w"] == 1).all())
"""
    )


@pytest.mark.parametrize("when", ["while it is copied", "once it is saved"])
def test_a_forked_child_lets_go_of_the_run_and_of_all_that_it_has(apart, when):
    apart(
        FORKED
        + f"""
state = {{f"w{{n}}": torch.ones(65_536, device="cuda") for n in range(160)}}
ckpt = open_run(root)
def let_go():
    global ckpt, handle
    ckpt = handle = None
if {when == "once it is saved"}:
    handle = ckpt.save(state, step=1)
    handle.result()
    forked(let_go)
else:
    with held(torch.cuda.current_stream()):
        handle = ckpt.save(state, step=1)
        forked(let_go)
    handle.result()
ckpt.close()
"""
    )


def test_a_fork_of_another_thread_than_that_which_saves_ends_well(apart):
    apart(
        FORKED
        + """
state = {f"w{n}": torch.ones(65_536, device="cuda") for n in range(160)}
with open_run(root) as ckpt:
    ckpt.save(state, step=1).result()
    thread = threading.Thread(target=forked, args=(gc.collect,))
    thread.start()
    thread.join()
"""
    )


def test_a_child_of_a_forked_child_ends_well(apart):
    apart(
        FORKED
        + """
state = {f"w{n}": torch.ones(65_536, device="cuda") for n in range(160)}
with open_run(root) as ckpt:
    ckpt.save(state, step=1).result()
    forked(lambda: forked(gc.collect))
"""
    )


def test_a_forked_child_gives_no_memory_of_the_side_stream_back(apart):
    """Where torch's allocator keeps none, to end a tensor is a call of the runtime."""
    apart(
        FORKED
        + """
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
state = {"small": [torch.ones(n, device="cuda") for n in range(9)], "t": torch.ones(300, 200, device="cuda").t()}
with open_run(root) as ckpt:
    ckpt.save(state, step=1).result()
    forked(gc.collect)
"""
    )


def test_a_forked_child_ends_as_any_interpreter_does(apart):
    """Behind its last exit hook, everything that it has inherited is destroyed."""
    apart(
        """
state = {f"w{n}": torch.ones(65_536, device="cuda") for n in range(160)}
ckpt = open_run(root)
with held(torch.cuda.current_stream()):
    handle = ckpt.save(state, step=1)
    child = os.fork()
    if child == 0:
        del state, handle
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
handle.result()
ckpt.close()
""",
        whole_exit=True,
    )


def test_a_forked_child_saves_what_is_on_the_host_with_a_run_of_its_own(apart):
    apart(
        FORKED
        + """
state = {"w": torch.ones(65_536, device="cuda")}
def save():
    with open_run(root + "/child") as own:
        own.prewarm({"w": torch.ones(65_536)})
        own.save({"w": torch.ones(65_536)}, step=1).result()
        async_ckpt.save({"w": torch.ones(65_536)}, root + "/child.tar").result()
with open_run(root + "/parent") as ckpt:
    ckpt.save(state, step=1).result()
    forked(save)
assert bool((async_ckpt.load(root + "/child.tar")["w"] == 1).all())
"""
    )


@pytest.mark.parametrize("when", ["at once", "in a garbage collection", "at the end of the interpreter"])
def test_a_forked_child_drops_an_event_that_was_recorded(apart, when):
    """Wherever the library has it; to end such an event would be a call of the runtime."""
    apart(
        f"""
from async_ckpt.core.backends import backend_of
event = backend_of(torch.device("cuda", 0)).timing_event()
event.record(torch.cuda.current_stream())
child = os.fork()
if child == 0:
    if {when == "at once"}:
        del event
    elif {when == "in a garbage collection"}:
        cycle = [event]
        cycle.append(cycle)
        del cycle, event
        gc.collect()
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
""",
        whole_exit=True,
    )


def test_what_a_finished_save_had_of_a_device_goes_without_a_garbage_collection(apart):
    apart(
        """
from async_ckpt.core.staging.device import Device
state = {"w": torch.ones(65_536, device="cuda")}
with open_run(root) as ckpt:
    gc.disable()
    for step in range(10):
        ckpt.save(state, step=step).result()
    ckpt.wait()
    assert sum(isinstance(one, Device) for one in gc.get_objects()) <= 2  # of the last ones
"""
    )


def test_a_finished_save_leaves_no_event_behind(apart):
    """Those of the side stream are the last that say what it has to wait for; there are at most a handful."""
    apart(
        """
state = {f"w{n}": torch.ones(65_536, device="cuda") for n in range(160)}
def events():
    return sum(isinstance(one, torch.cuda.Event) for one in gc.get_objects())
with open_run(root) as ckpt:
    gc.disable()
    handles = [ckpt.save(state, step=step) for step in range(2)]
    for handle in handles:
        handle.result()
    ckpt.wait()
    before = events()
    kept = []
    for step in range(2, 12):
        kept.append(ckpt.save(state, step=step))
        kept[-1].result()
    ckpt.wait()
    assert events() <= before + 5, (before, events())
"""
    )
