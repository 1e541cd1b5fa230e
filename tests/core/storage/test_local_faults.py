"""What the kernel refuses in a save: the right error, or another way; and nothing of it stays longer than until the next save."""

import errno
import os
import sys
from pathlib import Path

import pytest
from children import Nursery, injected, why_no_strace
from states import assert_is_state, leftovers, open_run

_WHY_NOT = why_no_strace() if sys.platform == "linux" else "strace is of Linux"
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=_WHY_NOT or "")


# Commits step 1, waits for the test, saves step 2 under the fault; waits again, and saves step 3.
SAVING = """
import os, sys
from children import allow_tracing
from states import open_run, state_at
allow_tracing()
with open_run(sys.argv[1]) as ckpt:
    ckpt.save(state_at(1, 5), step=1).result()
    ckpt.wait()
    print("ready", flush=True)
    sys.stdin.readline()
    error = ckpt.save(state_at(2, 5), step=2).exception()
    ckpt.wait()
    print("saved", type(error).__name__, getattr(error.__cause__, "errno", None) if error else None, flush=True)
    sys.stdin.readline()
    ckpt.save(state_at(3, 5), step=3).result()
    ckpt.wait()
    print("again", flush=True)
    sys.stdin.readline()
os._exit(0)  # how an interpreter ends is for other tests
"""


class Faulty:
    """Step 2 under a fault, and what was left of it then and after step 3 of the same process."""

    def __init__(self, nursery: Nursery, tmp_path: Path, *faults: str, paths: tuple[str, ...] = ()) -> None:
        root = tmp_path / "run"
        pipe = tmp_path / "stdin"
        os.mkfifo(pipe)
        child = nursery.start(SAVING, root, stdin=str(pipe))
        with open(pipe, "w") as stdin:
            child.wait_for_line("ready\n")
            with injected(child, *faults, paths=tuple(str(root / path) for path in paths)):
                print(file=stdin, flush=True)
                child.wait_for_line("saved ")
            self.left = leftovers(root)
            print(file=stdin, flush=True)
            child.wait_for_line("again\n")
            self.left_after_next = leftovers(root)
            self.folders = sorted(path.name for path in root.iterdir() if path.is_dir())
        ended = child.ended()
        assert (ended.status, ended.err) == (0, "")
        _, self.error, self.errno = ended.out.splitlines()[1].split()
        with open_run(root) as ckpt:
            self.steps = ckpt.steps()
            for step in self.steps:
                assert_is_state(ckpt.load(step), step, 5)


FOLDERS = ["step_00000001", "step_00000003"]


@pytest.mark.parametrize(
    ("fault", "error", "code"),
    [
        ("fsync:error=EIO:when=1+", "StorageUnavailableError", errno.EIO),
        ("pwrite64:error=EIO:when=1+", "StorageUnavailableError", errno.EIO),
        ("pwrite64:error=ENOSPC:when=1+", "StorageFullError", errno.ENOSPC),
        ("pwrite64:error=EDQUOT:when=1+", "StorageFullError", errno.EDQUOT),
        ("fallocate:error=ENOSPC", "StorageFullError", None),
        ("fallocate:error=EIO", "StorageUnavailableError", errno.EIO),
        ("mkdir:error=EACCES", "StorageUnavailableError", errno.EACCES),
        ("rename:error=EIO", "StorageUnavailableError", errno.EIO),
        ("link:error=EIO", "StorageUnavailableError", errno.EIO),
    ],
)
def test_a_refused_call_fails_the_save_under_the_right_name_and_leaves_nothing(tmp_path, nursery, fault, error, code):
    faulty = Faulty(nursery, tmp_path, fault)

    assert (faulty.error, faulty.errno) == (error, str(code))
    assert (faulty.left, faulty.folders, faulty.steps) == ([], FOLDERS, [1, 3])


@pytest.mark.parametrize(
    "fault",
    [
        "pwrite64:error=EINVAL:when=1",  # O_DIRECT is taken at open, and refused at the first write
        "pwrite64:error=EOPNOTSUPP:when=1",
        "fallocate:error=EOPNOTSUPP",
        "fallocate:error=ENOSYS",
        "link:error=EPERM",  # no hard links here: an exclusive rename does as well
        "link:error=EOPNOTSUPP",
        "fcntl:error=ENOLCK:when=2+",  # no record locks
    ],
)
def test_what_a_file_system_cannot_do_is_done_another_way(tmp_path, nursery, fault):
    faulty = Faulty(nursery, tmp_path, fault)

    assert (faulty.error, faulty.left, faulty.steps) == ("NoneType", [], [1, 2, 3])


@pytest.mark.parametrize(
    "faults",
    [
        ("pwrite64:error=EIO:when=1+", "unlink:error=EIO:when=1+"),
        ("rename:error=EIO", "unlink:error=EACCES:when=1+"),
    ],
)
def test_a_temp_file_that_could_not_be_deleted_is_gone_after_the_next_save(tmp_path, nursery, faults):
    faulty = Faulty(nursery, tmp_path, *faults)

    assert faulty.error == "StorageUnavailableError"
    assert [name for name in faulty.left if name.endswith(".async_ckpt-tmp")]
    assert (faulty.left_after_next, faulty.folders, faulty.steps) == ([], FOLDERS, [1, 3])


@pytest.mark.parametrize(
    ("faults", "steps"),
    [
        (("unlink:error=EIO:when=1+",), [1, 2, 3]),
        (("link:error=EIO", "unlink:error=EIO:when=1+"), [1, 3]),
    ],
)
def test_nor_does_one_of_a_manifest_stay(tmp_path, nursery, faults, steps):
    faulty = Faulty(nursery, tmp_path, *faults)

    assert [name for name in faulty.left if "manifest" in name]
    assert not [name for name in faulty.left_after_next if name.endswith(".async_ckpt-tmp")]
    assert faulty.steps == steps


@pytest.mark.parametrize("folder", ["", "step_00000002"])
def test_a_folder_whose_name_or_content_could_not_be_made_durable_is_gone(tmp_path, nursery, folder):
    faulty = Faulty(nursery, tmp_path, "fsync:error=EIO:when=1+", paths=(folder,))

    assert faulty.error == "StorageUnavailableError"
    assert (faulty.left_after_next, faulty.folders, faulty.steps) == ([], FOLDERS, [1, 3])


@pytest.mark.parametrize(
    "faults",
    [
        ("fallocate:error=EINTR:when=1..3",),
        ("link:error=EPERM", "renameat2:error=EINTR:when=1..3"),
    ],
    ids=["fallocate", "renameat2"],
)
def test_a_call_that_a_signal_interrupts_is_made_again(tmp_path, nursery, faults):
    faulty = Faulty(nursery, tmp_path, *faults)

    assert faulty.error == "NoneType"
    assert faulty.steps == [1, 2, 3]
