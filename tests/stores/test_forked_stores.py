"""Forks of a process that uses a store: the child works or is refused at once, and the parent is not harmed."""

import json
import textwrap

import pytest
from buckets import ENGINES, OnServer
from states import assert_is_state

HEAD = """
import json, os, pathlib, signal, sys, tempfile, threading
import torch, async_ckpt, children
from async_ckpt import AsyncCheckpointer, Place, StorageUnavailableError
from async_ckpt import Publisher, Subscriber
from states import assert_is_state, open_run, state_at, weight

children.forks_on_purpose()
bucket, options, engine = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]

def at(path, engine=engine):
    return Place(f"{bucket}/{path}", options=options, engine=engine)

def forked(work):
    child = os.fork()
    if child == 0:
        work()
        sys.exit(0)
    return child

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def pack(path):
    with async_ckpt.pack(path) as folder:
        (folder / "a").write_text("packed")
    return folder.handle.result().status

def unpack(path):
    with async_ckpt.unpack(path) as folder:
        return (folder / "a").read_text()

def publish(path):
    with Publisher(path) as publisher:
        return publisher.publish({"w": weight(1)}, 1).result().status

def save(path, step):
    with open_run(path) as ckpt:
        return ckpt.save(state_at(step), step).result().status

def says(call):
    try:
        return str(call())
    except StorageUnavailableError as error:
        return "refused" if "was forked from one" in str(error) else repr(error)
"""


def script(body: str) -> str:
    return HEAD + textwrap.dedent(body)


def run(nursery, bucket, engine: str, body: str, *, whole_exit: bool = False):
    ended = nursery.run(script(body), bucket.url(), json.dumps(bucket.server.options), engine, whole_exit=whole_exit)
    assert (ended.status, ended.err) == (0, ""), f"{ended.out}\n{ended.err}"
    return ended.out.splitlines()


# What the parent does ahead of the fork, and what the child then says of every way to a store.
USED = """
ckpt = open_run(at("runs/a"))
for step in (1, 2):
    ckpt.save(state_at(step), step).result()
ckpt.steps()
async_ckpt.save(state_at(3), at("x.tar")).result()
pack(at("packed.tar")), publish(at("weights"))
"""
USES = """
def work():
    for use in [
        lambda: save(at("child"), 7), lambda: AsyncCheckpointer(at("runs/a")).steps(), ckpt.steps, lambda: ckpt.load()["step"],
        lambda: async_ckpt.load(at("x.tar"))["step"], lambda: async_ckpt.save(state_at(4), at("y.tar")).result().status,
        lambda: async_ckpt.verify(at("x.tar")).num_archives, lambda: pack(at("child.tar")), lambda: unpack(at("packed.tar")),
        lambda: async_ckpt.wrap(torch.save)(state_at(5), at("w.pt")).result().status,
        lambda: publish(at("published")), lambda: Subscriber(at("weights")).pull(tempfile.mkdtemp()).version,
    ]:
        print(says(use), flush=True)
"""
WORKS = [
    "committed",
    "[1, 2]",
    "[1, 2]",
    "2",
    "3",
    "committed",
    "1",
    "committed",
    "packed",
    "committed",
    "committed",
    "1",
]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_child_of_a_parent_that_has_used_a_store_works_or_is_refused_at_once(bucket, nursery, engine):
    body = """
    print(ended(forked(work)))
    ckpt.save(state_at(3), 3)
    """
    said = run(nursery, bucket, engine, USED + USES + textwrap.dedent(body))

    assert said == [*(["refused"] * len(WORKS) if engine == "obstore" else WORKS), "0"]
    place = OnServer(bucket, engine)
    for step in (1, 2, 3):
        with place.run() as ckpt:
            assert_is_state(ckpt.load(step), step)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_child_that_is_killed_in_the_middle_of_its_requests_leaves_the_parents_saves_alone(bucket, nursery, engine):
    body = """
    ckpt = open_run(at("runs/a"))
    ckpt.save(state_at(1), 1).result()
    read, write = os.pipe()

    def work():
        while True:
            says(lambda: AsyncCheckpointer(at("runs/a")).steps())
            os.write(write, b"1")

    for step in (2, 3, 4):
        handle = ckpt.save(state_at(step, 20), step)  # which is under way
        child = forked(work)
        for _ in range(3):
            os.read(read, 1)
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        handle.result()
        assert_is_state(ckpt.load(step), step, 20)
    """
    run(nursery, bucket, engine, body)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_child_that_is_forked_ahead_of_the_first_request_works_and_so_does_its_parent(bucket, nursery, engine):
    body = """
    ckpt, weights = open_run(at("runs/a")), Subscriber(at("weights"))

    def work():
        print(ckpt.steps(), save(at("child"), 1), save(at("child"), 2), flush=True)

    assert ended(forked(work)) == 0
    ckpt.save(state_at(1), 1).result()
    print(AsyncCheckpointer(at("child")).steps(), says(lambda: weights.versions()))
    """
    said = run(nursery, bucket, engine, body)

    assert said == ["[] committed committed", "[1, 2] []"]
    assert_is_state(OnServer(bucket, engine).load(), 1)


def test_a_refused_child_uses_another_client_and_so_does_a_worker_of_a_data_loader(bucket, nursery):
    body = """
    async_ckpt.save(state_at(3), at("x.tar")).result()

    class Weights(torch.utils.data.Dataset):
        def __init__(self, place):
            self.place = place
        def __len__(self):
            return 2
        def __getitem__(self, number):
            return async_ckpt.load(self.place)["model"]["bias"]

    for engine in ("fsspec", "obstore"):
        loader = torch.utils.data.DataLoader(Weights(at("x.tar", engine)), num_workers=2, multiprocessing_context="fork")
        print(says(lambda: [float(bias.sum()) for bias in loader]))
    """
    assert run(nursery, bucket, "obstore", body) == ["[9.0, 9.0]", "refused"]


def test_a_child_is_refused_also_where_others_have_used_obstore_and_in_its_own_children(bucket, nursery):
    body = """
    import obstore
    from obstore.store import MemoryStore
    obstore.put(MemoryStore(), "x", b"")
    while "tokio" not in "".join(path.read_text() for path in pathlib.Path("/proc/self/task").glob("*/comm")):
        pass  # its threads name themselves when they run

    def work():
        print(says(lambda: async_ckpt.load(at("x.tar"))), flush=True)
        assert ended(forked(lambda: print(says(lambda: async_ckpt.load(at("x.tar"))), flush=True))) == 0

    print(ended(forked(work)))
    """
    assert run(nursery, bucket, "obstore", body) == ["refused", "refused", "0"]


def test_the_end_of_a_child_closes_nothing_that_its_parent_uses(bucket, nursery):
    """s3fs closes its connections when it is collected, and so would they be from the parent's event loop."""
    body = """
    ckpt = open_run(at("runs/a"))
    ckpt.save(state_at(1), 1).result()
    import gc, s3fs

    def work():
        global ckpt
        s3fs.core.sync = lambda *arguments, **options: os._exit(9)  # which talks to the parent's loop
        del ckpt
        gc.collect()

    print(ended(forked(work)))
    ckpt.save(state_at(2), 2)
    """
    assert run(nursery, bucket, "s3fs", body) == ["0"]
    assert_is_state(OnServer(bucket, "s3fs").load(), 2)


def test_a_filesystem_of_the_users_is_made_again_in_a_child_or_refused_by_name(bucket, nursery):
    body = """
    import s3fs
    given = dict(key=options["access_key_id"], secret=options["secret_access_key"], endpoint_url=options["endpoint"])
    class Unpicklable(s3fs.S3FileSystem):
        def __reduce__(self):
            raise TypeError("it holds a lock")

    for kind in (s3fs.S3FileSystem, Unpicklable):
        fs = kind(**given, client_kwargs={"region_name": options["region"]})
        place = Place(f"{bucket}/{kind.__name__}", fs=fs)
        ckpt = open_run(place)
        ckpt.save(state_at(1), 1).result()

        def work():
            for steps in (ckpt.steps, lambda: AsyncCheckpointer(place).steps()):
                try:
                    print(steps(), flush=True)
                except StorageUnavailableError as error:
                    print(str(error).partition(": ")[2], flush=True)

        assert ended(forked(work)) == 0
        ckpt.save(state_at(2), 2).result()
    """
    refused = (
        "fs=Unpicklable belongs to the parent of this process; make it in this process, or give a URL and options= "
        "instead of fs="
    )
    assert run(nursery, bucket, "s3fs", body) == ["[1]", "[1]", refused, refused]
