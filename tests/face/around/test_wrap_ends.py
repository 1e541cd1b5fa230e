"""Wrapped functions at the end of their process: what was begun is ended first, and nothing is half there."""

import os
import signal
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch
from slices import some
from states import names_below

from async_ckpt import wrap

# `held` functions print "inside" and wait until there is a file called "go" in the root.
HEAD = """
import os, signal, sys, threading
import torch
from async_ckpt.core.saving import kept_memory
import async_ckpt
from async_ckpt import wrap
from racing import until

torch.set_num_threads(1)  # a forked child whose parent has used OpenMP hangs in torch itself
root = sys.argv[1]
STATE = {"w": torch.arange(3 << 20)}

def save_folder(state, folder, *, held=False):
    os.makedirs(folder, exist_ok=True)
    torch.save(state, folder + "/state.pt")
    if held:
        print("inside", flush=True)
        until(lambda: os.path.exists(root + "/go"))
    with open(folder + "/config.json", "w") as file:
        file.write("{}")

def held_stream(state, file):
    file.write(bytes(20 << 20))
    print("inside", flush=True)
    until(lambda: os.path.exists(root + "/go"))
    torch.save(state, file)

def fail(state, path):
    raise RuntimeError("the function failed")
"""
STATE = {"w": torch.arange(3 << 20)}


def script(body: str) -> str:
    return HEAD + textwrap.dedent(body)


def assert_saved(path: Path) -> None:
    assert torch.equal(torch.load(path)["w"], STATE["w"])


SAVES = {
    "stream": 'wrap(torch.save)(STATE, root + "/x")',
    "folder": 'wrap(save_folder)(STATE, root + "/x")',
    "held folder": 'wrap(save_folder)(STATE, root + "/x", held=True)',
    "held stream": 'wrap(held_stream, file_object=True)(STATE, root + "/x")',
}


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise RuntimeError"])
@pytest.mark.parametrize("kind", ["stream", "folder"])
def test_what_was_begun_right_before_the_end_is_there(tmp_path, nursery, kind, end):
    ended = nursery.run(script(f"{SAVES[kind]}\n{end}"), tmp_path)

    assert ended.status == {"pass": 0, "sys.exit(3)": 3}.get(end, 1), ended.err
    assert "async_ckpt:" not in ended.err
    assert names_below(tmp_path) == (["x"] if kind == "stream" else ["x/config.json", "x/state.pt"])
    assert_saved(tmp_path / ("x" if kind == "stream" else "x/state.pt"))


def test_a_function_may_use_threads_and_executors_when_the_process_ends(tmp_path, nursery):
    body = """
    import racing

    def save(state, folder):
        until(lambda: "drain_at_exit" in racing._functions_of(threading.main_thread().ident))
        from concurrent.futures import ThreadPoolExecutor
        os.makedirs(folder)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda n: torch.save(state, f"{folder}/{n}"), range(2)))
        thread = threading.Thread(target=torch.save, args=(state, folder + "/2"))
        thread.start()
        thread.join()

    wrap(save)(STATE, root + "/x")
    """
    nursery.out_of(script(body), tmp_path)
    assert names_below(tmp_path) == ["x/0", "x/1", "x/2"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", 75),
        ("sys.exit(0)", 75),
        ("sys.exit(3)", 3),
    ],
)
def test_a_failure_that_nobody_has_seen_is_told_at_the_end(tmp_path, nursery, body, status):
    ended = nursery.run(script(f'wrap(fail)(STATE, root + "/x")\n{body}'), tmp_path)

    assert ended.status == status
    (line,) = [line for line in ended.err.splitlines() if line.startswith("async_ckpt:")]
    assert line == f"async_ckpt: {tmp_path}/x was not saved: RuntimeError: the function failed"
    assert names_below(tmp_path) == []


def test_where_it_is_kept_is_told_too(tmp_path, nursery):
    (tmp_path / "x").touch()
    ended = nursery.run(script(SAVES["folder"]), tmp_path)

    assert ended.status == 75
    kept = ended.err.strip().rpartition("is kept in ")[2]
    assert_saved(Path(kept, "x", "state.pt"))


@pytest.mark.parametrize("given", ["0", "3", "'text'", ""])
def test_an_exit_in_a_function_ends_no_process_and_is_a_failure(tmp_path, nursery, given):
    body = f"""
    def save(path):
        sys.exit({given})

    handle = wrap(save)(root + "/x")
    until(handle.done)
    print("still here", flush=True)
    """
    ended = nursery.run(script(body), tmp_path)

    assert ended.status == 75
    assert ended.out == "still here\n"
    assert "x was not saved: SystemExit" in ended.err


# --- killed ------------------------------------------------------------------------------------------------------


def test_a_living_process_is_not_swept(tmp_path, nursery):
    child = nursery.start(script(SAVES["held folder"]), tmp_path)
    child.wait_for_line("inside")
    handle = wrap(lambda state, path: (os.mkdir(path), torch.save(state, path + "/other")))(STATE, str(tmp_path / "x"))
    handle.result()
    assert names_below(tmp_path / "x") == ["other"]
    (tmp_path / "go").touch()

    ended = child.ended()
    assert (ended.status, ended.err) == (0, "")
    assert names_below(tmp_path / "x") == ["config.json", "other", "state.pt"]


DYING = """
from children import die_at
with open(root + "/x/number") as file:
    old = int(file.read())

def save(folder):
    for name in ("a", "number"):
        with open(f"{folder}/{name}", "w") as file:
            file.write(str(old + 1))

count = die_at(int(sys.argv[2]))
wrap(save)(root + "/x").result()
async_ckpt.pack.__globals__["files_saver"]().wait()
print(count())
"""


def test_killed_at_any_call_the_folder_is_the_old_one_or_the_new_one(tmp_path, nursery):
    quick = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=quick) as folder:
        root = Path(folder)
        (root / "x").mkdir()
        for name in ("a", "number", "kept"):
            (root / "x" / name).write_text("0")
        seen = set()
        for number in some(range(1, 10_000), 3):
            before = (root / "x" / "number").read_text()
            ended = nursery.run(script(DYING), root, number)
            found = {name: (root / "x" / name).read_text() for name in names_below(root / "x")}
            assert found["kept"] == "0"
            assert found["a"] == found["number"]
            seen.add(int(found["number"]) - int(before))
            if ended.status == 0:
                break
            assert ended.status == -signal.SIGKILL, ended.err

        assert seen == {0, 1}
        assert sorted(os.listdir(root)) == ["x"]


# --- Ctrl-C ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["held folder", "held stream"])
def test_ctrl_c_while_a_handle_is_waited_for_lets_the_function_end(tmp_path, nursery, kind):
    child = nursery.start(script(SAVES[kind] + ".result()"), tmp_path)
    child.wait_for_line("inside")
    child.send(signal.SIGINT)
    (tmp_path / "go").touch()
    ended = child.ended()

    assert ended.status == -signal.SIGINT
    assert "async_ckpt:" not in ended.err
    assert len(names_below(tmp_path)) == (3 if kind == "held folder" else 2)


@pytest.mark.parametrize("kind", ["held folder", "held stream"])
def test_ctrl_c_while_the_process_ends_gives_the_function_up(tmp_path, nursery, kind):
    body = f"""
    async_ckpt.core.host.waits.ABANDON_SECONDS = 0.1
    real_wait = async_ckpt.core.saving.exit.wait_for
    async_ckpt.core.saving.exit.wait_for = lambda *a: (print("waiting", flush=True), real_wait(*a))[1]
    {SAVES[kind]}
    """
    child = nursery.start(script(body), tmp_path)
    child.wait_for_line("inside")
    child.wait_for_line("waiting")
    child.send(signal.SIGINT)
    ended = child.ended()

    assert ended.status == 130, ended.err
    assert "x was not saved" in ended.err
    assert [name for name in names_below(tmp_path) if not name.startswith(".x.")] == []


# --- forks -------------------------------------------------------------------------------------------------------


# What `torch.save` imports when it is first called is imported before: a child that is forked in the middle of an
# import waits for that for ever.
FORKED = """
import io, warnings
warnings.simplefilter("ignore", DeprecationWarning)
torch.save({}, io.BytesIO())
"""


def forked(body: str) -> str:
    return script(FORKED + textwrap.dedent(body))


def test_a_forked_child_wraps_with_memory_of_its_own(tmp_path, nursery):
    body = """
    import gc
    kept = []
    wrap(lambda state, path: (kept.append(state["w"]), torch.save(state, path)))(STATE, root + "/1").result()
    save = wrap(torch.save)
    save(STATE, root + "/2").result()  # its buffer is idle now, and no child inherits that
    child = os.fork()
    name = "/child" if child == 0 else "/parent"
    if child == 0:
        kept.clear()
        gc.collect()
    save(STATE, root + name).result()
    save(STATE, root + name + "-again")
    if child != 0:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(kept[0], STATE["w"])
    """
    nursery.out_of(forked(body), tmp_path)
    for name in ("1", "2", "child", "child-again", "parent", "parent-again"):
        assert_saved(tmp_path / name)


def test_a_child_forked_in_the_middle_of_a_call_still_wraps(tmp_path, nursery):
    body = """
    from async_ckpt.core.saving import kept_memory
    from async_ckpt.core.staging.host_copy import LentBuffer
    held, go = threading.Event(), threading.Event()
    kept_memory.files_saver()

    def hold_locks():
        with (
            kept_memory.host_memory()._changed,
            async_ckpt.wrap.__globals__["_busy_lock"],
            kept_memory.files_saver().pool._changed,
        ):
            kept_memory.host_memory()._lent.add(LentBuffer(1 << 62, is_held=False))
            held.set()
            go.wait()

    holder = threading.Thread(target=hold_locks)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        wrap(torch.save)(STATE, root + "/x").result()
    else:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        go.set()
    """
    nursery.out_of(forked(body), tmp_path)
    assert_saved(tmp_path / "x")


def test_a_destination_that_the_parent_writes_to_is_free_in_a_child(tmp_path, nursery):
    body = """
    handle = wrap(save_folder)(STATE, root + "/x", held=True)
    child = os.fork()
    if child == 0:
        wrap(save_folder)(STATE, root + "/x").result()
    else:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        open(root + "/go", "w").close()
        handle.result()
    """
    nursery.out_of(forked(body), tmp_path)
    assert_saved(tmp_path / "x" / "state.pt")
