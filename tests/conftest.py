"""Fixtures that several test files ask for."""
# ruff: noqa: E402

import gc
import logging
import os
import signal
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

# What the modules beside the tests assert says what it has seen, as in a test.
pytest.register_assert_rewrite("faulty", "children", "exported", "loans", "packing", "published", "states")

# Two workers share two processors: the threads of OpenMP would only spin beside each other, which takes half of the time.
# OpenMP looks here once, when torch is imported. A product of matrices is rounded otherwise on a thread that has helpers.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import clients
import cuda_simulation
import durations
import simulated
import torch
from accelerators import Accelerator, Cuda, Simulated
from buckets import PART, Bucket
from children import Nursery
from racing import PATIENCE, Gate
from rank_worlds import Worlds
from slices import examples, shown

from async_ckpt import AsyncCheckpointer
from async_ckpt.core.host import waits
from async_ckpt.core.saving import ledger
from async_ckpt.core.storage.local import LocalReader
from async_ckpt.testing import FaultyProxy, moto_server, rclone_server
from async_ckpt.testing.servers import Server

torch.set_num_threads(1)
# On a slow machine anything may take long enough to be told of, or be drawn late, which is no failure.
waits._FIRST_SECONDS = 60.0
ledger._LAST_DRAWING_SECONDS = PATIENCE
with suppress(ModuleNotFoundError):  # a machine with a GPU may have torch, xxhash and pytest alone
    from hypothesis import HealthCheck, settings

    # Beside other work, an example may take any time to be drawn.
    settings.register_profile(
        "slice", max_examples=examples(100), suppress_health_check=[HealthCheck.too_slow], deadline=None
    )
    settings.load_profile("slice")
# A shell starts what runs in the background with Ctrl-C ignored, which all children of the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # while tests are collected, a third of which it would take: none of the million objects goes


def pytest_report_header() -> str:
    return shown()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-durations",
        action="store_true",
        help="write tests/durations.json: the seconds of each test file, by which workers get them",
    )
    parser.addoption(
        "--fast",
        action="store_true",
        help="the fast lane: of each long file a part, which changes with the commit, and no frameworks",
    )
    parser.addoption("--rest", action="store_true", help="what --fast leaves out at this commit")
    if pytest.version_tuple < (9,):  # as on machines with a GPU; pytest would refuse the setting
        parser.addini("faulthandler_exit_on_timeout", "a setting of later versions", type="bool")
    if find_spec("pytest_asyncio") is None:  # pytest would refuse its settings
        for name in ("asyncio_mode", "asyncio_default_fixture_loop_scope"):
            parser.addini(name, "a setting of pytest-asyncio, which is not installed")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Each worker gets one file at a time, in our order; without pytest-xdist there are no such options."""
    if getattr(config.option, "dist", None) == "no":
        config.option.dist, config.option.loadscopereorder = "loadfile", False


def _is_for_gpus(name: str) -> bool:
    return name.startswith("test_gpu")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, only the files of such tests are imported: all others may need packages that are not there."""
    if config.option.markexpr != "gpu" or collection_path.is_dir() or _is_for_gpus(collection_path.name):
        return None
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    strays = {item.path.name for item in items if item.get_closest_marker("gpu") and not _is_for_gpus(item.path.name)}
    if strays:
        raise pytest.UsageError(f"tests with the mark gpu belong into files named test_gpu*.py, not {sorted(strays)}")
    if config.option.fast or config.option.rest:
        fast, rest = {*durations.fast_ones(items)}, config.option.rest
        config.hook.pytest_deselected(items=[item for item in items if (item in fast) is rest])
        items[:] = [item for item in items if (item in fast) is not rest]
    if hasattr(config, "workerinput"):  # one process alone takes as long in any order
        durations.longest_first(items)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
    # Before each phase of a test, pytest hangs two handlers on every logger that does not propagate. torch has forty of
    # them: an empty test takes twice as long.
    for logger in logging.getLogger().manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_configure(config: pytest.Config) -> None:
    if config.option.write_durations and not hasattr(config, "workerinput"):
        config.pluginmanager.register(durations.Recorder())
    if config.option.markexpr == "gpu":
        if cuda_simulation.is_here():
            cuda_simulation.tell_of_gates()
        return
    # Of two accelerators torch takes the simulated one for that of the process: a run has one or the other.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Before any test: autograd's engine counts the devices when it is first used, and has no queue for a later one.
    if simulated.is_possible():
        simulated.install()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and -m gpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same numbers, whichever tests ran before it."""
    # `torch.manual_seed` notes a stack trace for each device that is not there.
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _ended(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test has left under way ends before its folder is deleted."""
    if "tmp_path" in request.fixturenames:
        request.getfixturevalue("tmp_path")  # which then is torn down after this
    yield
    _wait_for_saves()


def _wait_for_saves() -> None:
    for save in ledger.all_saves():
        save.finished.exception(PATIENCE)


def _used(made: Accelerator) -> Iterator[Accelerator]:
    with made.here():
        yield made
        _wait_for_saves()
    made.assert_in_order()


@pytest.fixture(params=["early", "late", 5, pytest.param("hardware", marks=pytest.mark.gpu)])
def accelerator(request: pytest.FixtureRequest) -> Iterator[Accelerator]:
    """A device: the simulated one under each kind of schedule, and the real one."""
    yield from _used(Cuda() if request.param == "hardware" else Simulated(request.param))


@pytest.fixture
def sim(request: pytest.FixtureRequest) -> Iterator[Simulated]:
    """The simulated device, for what hardware does not do when it is asked to."""
    yield from _used(Simulated(getattr(request, "param", "late")))


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Where a test may save one archive."""
    return tmp_path / "x.tar"


@pytest.fixture
def ckpt(tmp_path: Path) -> Iterator[AsyncCheckpointer]:
    """A run."""
    with AsyncCheckpointer(tmp_path / "run") as opened:
        yield opened


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """The places of a run."""
    return [tmp_path / "near", tmp_path / "far"]


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where scratch folders are made; nothing may be left in it."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


@pytest.fixture
def witness(tmp_path: Path) -> Callable[[str], Path]:
    """The folder of a witness of `tests/witnesses`, to do with what a test likes."""

    def unpacked(name: str) -> Path:
        with tarfile.open(Path(__file__).parent / "witnesses" / f"{name}.tar.gz") as tar:
            tar.extractall(tmp_path / name, filter="fully_trusted")
        return tmp_path / name

    return unpacked


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A point where a function waits for the test, or for its end."""
    made = Gate()
    yield made
    made.open()


@pytest.fixture(scope="session")
def _authority(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """All that clients of stores trust."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in clients.trusting_one_authority(tmp_path_factory.mktemp("authority")).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def s3(_authority: None) -> Iterator[Server]:
    """A faithful S3 server. Every test makes a bucket or a prefix of its own."""
    clients.read_services_once()
    with pytest.MonkeyPatch.context() as patch:
        # Parts stay in memory until they are put together: to write each to a file takes as long as all else.
        patch.setenv("MOTO_S3_DEFAULT_KEY_BUFFER_SIZE", str(PART))
        with moto_server() as server:
            yield server


@pytest.fixture
def bucket(s3: Server) -> Bucket:
    """An empty bucket of the test's own."""
    made = Bucket(s3)
    s3.make_bucket(made)
    return made


@pytest.fixture
def proxy(s3: Server) -> Iterator[FaultyProxy]:
    """What stands before the faithful server, and may be told to misbehave."""
    with FaultyProxy(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many bytes were read of each file, by its name."""
    found: dict[str, int] = {}
    read_into = LocalReader.read_into

    def counting(self: LocalReader, offset: int, target: memoryview) -> None:
        name = Path(f"/proc/self/fd/{self._fd}").resolve().name
        found[name] = found.get(name, 0) + len(target)
        read_into(self, offset, target)

    monkeypatch.setattr(LocalReader, "read_into", counting)
    return found


@pytest.fixture
def quick_path(tmp_path):
    """A folder in memory where there is one: what a kill leaves behind is the same there, and syncing costs nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def _nursery(_authority: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("children")) as started:
        yield started


@pytest.fixture(scope="module")
def nursery(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """What runs scripts in processes of their own, forked from one that has imported all they need.

    A test file names more of that in `WARM`, such as a framework, and then has a process of its own.
    """
    if sys.platform != "linux":
        pytest.skip("forks, signals and /proc as Linux has them")
    warm = getattr(request.module, "WARM", ())
    plain: Nursery = request.getfixturevalue("_nursery" if not warm else "_authority")
    if not warm:
        yield plain
        return
    with Nursery(tmp_path_factory.mktemp("children"), *warm) as started:
        yield started


@pytest.fixture
def worlds(nursery: Nursery, tmp_path: Path) -> Worlds:
    """What starts trainings of several ranks, which save below `worlds.root`."""
    return Worlds(nursery, tmp_path)


@pytest.fixture(scope="session")
def rclone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `rclone` serves; its folders are the buckets."""
    return tmp_path_factory.mktemp("rclone")


@pytest.fixture(scope="session")
def rclone(rclone_folder: Path) -> Iterator[Server]:
    """An S3 server that checks signatures and writes to the disk."""
    with rclone_server(rclone_folder) as server:
        yield server
