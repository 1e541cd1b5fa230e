"""What is attacked: for each kind of run a starting state, the work of a child process, and what has to hold afterwards.

In: a folder. Out: an untouched state; notes of what the child has begun, been told and been refused; the first promise that is
broken. Knows nothing of: faults, places.

After each the next save must work.
"""

import io
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Final

import torch

import async_ckpt
from async_ckpt import AsyncCheckpointer, CheckpointError, Place, Publisher, Subscriber
from async_ckpt.files import extract, pack_folder
from tests.matrices.calls.plugin_scenarios import PLUGINS
from tests.matrices.calls.scenario import Notes, Scenario, Told, number_of, state_of

_KEPT: Final = 2


def weights_of(number: int) -> dict[str, torch.Tensor]:
    weights = {"a": torch.zeros(2000), "b": torch.full((10,), float(number))}
    weights["a"][number::7] = number
    return weights


# --- runs -----------------------------------------------------------------------------------------------------------


def _open(root: Path, **options: Any) -> AsyncCheckpointer:
    return AsyncCheckpointer(root / "run", on_rollback="retire", **options)


def _two(root: Path, **options: Any) -> AsyncCheckpointer:
    return AsyncCheckpointer([root / "run", root / "second"], on_rollback="retire", **options)


def _three(root: Path, **options: Any) -> AsyncCheckpointer:
    """Memory in front of a disk, and behind both a place that is a store where others are."""
    memory = Place(root / "memory", volatile=True)
    return AsyncCheckpointer([memory, root / "disk", root / "third"], on_rollback="retire", **options)


def _without_memory(root: Path) -> AsyncCheckpointer:
    return AsyncCheckpointer([root / "disk", root / "third"])


def _saved(root: Path, steps: Mapping[int, int], opened: Callable[[Path], AsyncCheckpointer] = _open) -> None:
    with opened(root) as ckpt:
        for step, number in steps.items():
            ckpt.save(state_of(number), step).result()


def _save(ckpt: AsyncCheckpointer, notes: Notes, what: str, step: int, number: int, **options: Any) -> None:
    with notes.of(what, step, number):
        ckpt.save(state_of(number), step, **options).result()


@contextmanager
def closing(ckpt: AsyncCheckpointer) -> Iterator[AsyncCheckpointer]:
    """The error of a save has been told of by its handle."""
    yield ckpt
    with suppress(CheckpointError):
        ckpt.wait()
    with suppress(CheckpointError):
        ckpt.close()


def _saves(root: Path, notes: Notes, opened: Callable[[Path], AsyncCheckpointer] = _open) -> None:
    with closing(opened(root)) as ckpt:
        _save(ckpt, notes, "save", 2, 20)
        _save(ckpt, notes, "save", 3, 30)


def _overwrites(root: Path, notes: Notes) -> None:
    with closing(_open(root)) as ckpt:
        _save(ckpt, notes, "save", 2, 21, overwrite=True)
        _save(ckpt, notes, "save", 3, 30)


def _rolls_back(root: Path, notes: Notes, opened: Callable[[Path], AsyncCheckpointer] = _open) -> None:
    with closing(opened(root)) as ckpt:
        _save(ckpt, notes, "back", 1, 11, overwrite=True)
        with notes.of("save", 2, 22):
            ckpt.save(state_of(22), 2, overwrite=2 in ckpt.steps()).result()


def _retains(root: Path, notes: Notes, opened: Callable[..., AsyncCheckpointer] = _open) -> None:
    with closing(opened(root, keep=_KEPT)) as ckpt:
        for step in (3, 4, 5):
            _save(ckpt, notes, "save", step, 10 * step)


def _borrows(root: Path, notes: Notes) -> None:
    with closing(_open(root, keep=_KEPT)) as ckpt:
        for step in (2, 3, 4):
            _save(ckpt, notes, "save", step, 10 * step, unchanged=["frozen"] if step > 2 else [])


def _restarts(root: Path, notes: Notes) -> None:
    for step in (2, 3):
        with closing(_open(root)) as ckpt:
            live = state_of(0)
            with suppress(CheckpointError):
                ckpt.restore(live)
            _save(ckpt, notes, "save", step, 10 * step)


def _check_run(
    root: Path, told: Told, opened: Callable[[Path], AsyncCheckpointer] = _open, keep: int | None = None
) -> None:
    with opened(root) as ckpt:
        check_steps(ckpt, told, keep)
        ckpt.save(state_of(990), 99).result()
        ckpt.wait()
        assert number_of(ckpt.load(99)) == 990
    _check_leftovers(root)


def _check_three(root: Path, told: Told, keep: int | None = None) -> None:
    """Also if the memory is lost, of which no handle has told."""
    with _without_memory(root) as ckpt:
        check_steps(ckpt, told, keep)
    _check_run(root, told, _three, keep)


def check_steps(ckpt: AsyncCheckpointer, told: Told, keep: int | None = None) -> dict[int, int]:
    """Of all that is there, the numbers by step: each is one that it may be, and none that was told of is missing."""
    steps = ckpt.steps()
    numbers = {step: number_of(ckpt.load(step)) for step in steps}
    told.check(steps, keep)
    for step, number in numbers.items():
        allowed = told.may[step] if step in told.unsure else {told.told.get(step)}
        assert number in allowed, f"step {step} is {number}, and may be {allowed}"
    return numbers


def _check_leftovers(root: Path) -> None:
    """After a save of another process: each archive is one that a manifest names."""
    if not isinstance(root, Path):  # at a store, whoever has made the root looks
        return
    for run in (root / name for name in ("run", "second", "memory", "disk", "third")):
        named = "".join(path.read_text() for path in run.glob("*/manifest*.json"))
        left = [path for path in run.rglob("*.tar*") if path.name not in named]
        left += [path for path in run.rglob("*") if ".tmp" in path.name or path.name.startswith("rollback-")]
        assert not left, f"left: {', '.join(str(path.relative_to(root)) for path in left)}"


# --- versions -------------------------------------------------------------------------------------------------------


def _publisher(root: Path, **options: Any) -> Publisher:
    return Publisher(root / "weights", anchor_every=3, on_rollback="retire", **options)


def _published(root: Path, *versions: int) -> None:
    with _publisher(root) as publisher:
        for version in versions:
            publisher.publish(weights_of(version), version).result()


def _publishes(root: Path, notes: Notes, *versions: int, what: str = "save", **options: Any) -> None:
    publisher = _publisher(root, **options)
    for version in versions:
        with notes.of(what, version, version):
            publisher.publish(weights_of(version), version).result()
        if publisher_is_lost(publisher):
            publisher = _publisher(root, **options)
    with suppress(CheckpointError):
        publisher.close()


def publisher_is_lost(publisher: Publisher) -> bool:
    """Whether it says that it goes on no more."""
    return "closed" in repr(publisher)


def _check_versions(root: Path, told: Told, keep: int | None = None) -> None:
    with Subscriber(root / "weights") as subscriber:
        versions = subscriber.versions()
        told.check(versions, keep)
        for version in versions:
            into = root.parent / f"pulled-{version}"
            subscriber.pull(into, version)
            _check_folder(into, version)
            shutil.rmtree(into)
    with _publisher(root) as publisher:
        publisher.publish(weights_of(99), 99).result()
    with Subscriber(root / "weights") as subscriber:
        subscriber.pull(root.parent / "pulled")
        _check_folder(root.parent / "pulled", 99)


def _check_folder(folder: Path, version: int) -> None:
    loaded = async_ckpt.load(folder / "model.safetensors")
    for name, tensor in weights_of(version).items():
        assert torch.equal(loaded[name], tensor), f"{name} of version {version}"


def _pulls(root: Path, notes: Notes) -> None:
    with Subscriber(root / "weights") as subscriber:
        for version in (2, 3):
            with notes.of("pull", version, version):
                subscriber.pull(root / "engine", version)


def _check_pulled(root: Path, told: Told) -> None:
    """The folder has one version, or none that it says it has; and the next pull brings the newest."""
    with Subscriber(root / "weights") as subscriber:
        subscriber.pull(root / "engine")
        _check_folder(root / "engine", 4)
    assert told.may


# --- files ----------------------------------------------------------------------------------------------------------


def _one_file(root: Path) -> None:
    root.mkdir(exist_ok=True)
    async_ckpt.save(state_of(10), root / "one.tar").result()


def _saves_a_file(root: Path, notes: Notes) -> None:
    with notes.of("save", 1, 11):
        async_ckpt.save(state_of(11), root / "one.tar").result()
    with notes.of("save", 2, 20):
        async_ckpt.save(state_of(20), root / "two.tar.zst").result()


def _check_file(root: Path, told: Told) -> None:
    for step, name in ((1, "one.tar"), (2, "two.tar.zst")):
        if step in told.told or (root / name).exists():
            number = number_of(async_ckpt.load(root / name))
            allowed = told.may[step] if step in told.unsure else {told.told[step]}
            assert number in allowed, f"{name} is {number}, and may be {allowed}"
    async_ckpt.save(state_of(99), root / "one.tar").result()
    assert number_of(async_ckpt.load(root / "one.tar")) == 99


def _a_folder(root: Path) -> None:
    (root / "given").mkdir(parents=True)
    for name in ("a", "b"):
        (root / "given" / name).write_bytes(name.encode() * 9000)


def _packs(root: Path, notes: Notes) -> None:
    with notes.of("save", 1, 1):
        pack_folder(root / "given", root / "given.tar").result()
    with notes.of("save", 2, 2):
        extract(root / "given.tar", root / "taken")


def _check_packed(root: Path, told: Told) -> None:
    if 1 in told.told or (root / "given.tar").exists():
        extract(root / "given.tar", root / "again")
        _same_files(root / "given", root / "again")
    if 2 in told.told or (root / "taken").exists():
        _same_files(root / "given", root / "taken")
    pack_folder(root / "given", root / "next.tar").result()
    extract(root / "next.tar", root / "next")
    _same_files(root / "given", root / "next")


def _same_files(one: Path, other: Path) -> None:
    files = {path.name: path.read_bytes() for path in one.iterdir()}
    assert files == {path.name: path.read_bytes() for path in other.iterdir()}


def _command(*words: object) -> None:
    """What `async-ckpt` does. Raises OSError for an exit status that is not 0."""
    from async_ckpt.tools.command.main import status_of

    with redirect_stdout(io.StringIO()):
        status = status_of(list(map(str, words)))
    if status:
        raise OSError(0, f"exit status {status}")


def _copies(root: Path, notes: Notes) -> None:
    with notes.of("save", 1, 1):
        _command("cp", root / "run", root / "copy")


def _check_copy(root: Path, told: Told) -> None:
    if 1 in told.told:
        async_ckpt.verify(root / "copy")
    _command("cp", root / "run", root / "copy")
    with AsyncCheckpointer(root / "copy") as ckpt:
        assert [number_of(ckpt.load(step)) for step in ckpt.steps()] == [10, 20]


def _converts(root: Path, notes: Notes) -> None:
    with notes.of("save", 1, 1):
        _command("convert", root / "one.tar", root / "one.pt")
    with notes.of("save", 2, 2):
        _command("convert", root / "one.tar", root / "one.safetensors", "--select", "model")


def _check_converted(root: Path, told: Told) -> None:
    if 1 in told.told or (root / "one.pt").exists():
        assert number_of(torch.load(root / "one.pt")) == 10
    if 2 in told.told or (root / "one.safetensors").exists():
        assert torch.equal(async_ckpt.load(root / "one.safetensors")["model.w"], state_of(10)["model"]["w"])
    assert number_of(async_ckpt.load(root / "one.tar")) == 10


_TWO: Final = {1: 10, 2: 20}


def _prepared(steps: Mapping[int, int], opened: Callable[[Path], AsyncCheckpointer] = _open) -> Callable[[Path], None]:
    return lambda root: _saved(root, steps, opened)


SCENARIOS: Final[Mapping[str, Scenario]] = {
    "save": Scenario(_prepared({1: 10}), _saves, _check_run, {1: 10}),
    "overwrite": Scenario(_prepared(_TWO), _overwrites, _check_run, _TWO),
    "rollback": Scenario(_prepared({1: 10, 2: 20, 3: 30}), _rolls_back, _check_run, {1: 10, 2: 20, 3: 30}),
    "retention": Scenario(_prepared(_TWO), _retains, lambda root, told: _check_run(root, told, keep=_KEPT), _TWO),
    "borrowed groups": Scenario(
        _prepared({1: 10}), _borrows, lambda root, told: _check_run(root, told, keep=_KEPT), {1: 10}
    ),
    "restart": Scenario(_prepared({1: 10}), _restarts, _check_run, {1: 10}),
    "two places": Scenario(
        _prepared({1: 10}, _two),
        lambda root, notes: _saves(root, notes, _two),
        lambda root, told: _check_run(root, told, _two),
        {1: 10},
    ),
    "rollback at two places": Scenario(
        _prepared({1: 10, 2: 20, 3: 30}, _two),
        lambda root, notes: _rolls_back(root, notes, _two),
        lambda root, told: _check_run(root, told, _two),
        {1: 10, 2: 20, 3: 30},
    ),
    "three places": Scenario(
        _prepared({1: 10}, _three), lambda root, notes: _saves(root, notes, _three), _check_three, {1: 10}
    ),
    "rollback at three places": Scenario(
        _prepared({1: 10, 2: 20, 3: 30}, _three),
        lambda root, notes: _rolls_back(root, notes, _three),
        _check_three,
        {1: 10, 2: 20, 3: 30},
    ),
    "retention at three places": Scenario(
        _prepared(_TWO, _three),
        lambda root, notes: _retains(root, notes, _three),
        lambda root, told: _check_three(root, told, _KEPT),
        _TWO,
    ),
    "publish an anchor": Scenario(
        lambda root: _published(root, 1), lambda root, notes: _publishes(root, notes, 4, 7), _check_versions, {1: 1}
    ),
    "publish deltas": Scenario(
        lambda root: _published(root, 1, 2),
        lambda root, notes: _publishes(root, notes, 3, 4, keep=_KEPT),
        lambda root, told: _check_versions(root, told, _KEPT),
        {1: 1, 2: 2},
    ),
    "set back versions": Scenario(
        lambda root: _published(root, 1, 2, 3),
        lambda root, notes: _publishes(root, notes, 2, what="back"),
        _check_versions,
        {1: 1, 2: 2, 3: 3},
    ),
    "pull into a folder": Scenario(lambda root: _published(root, 1, 2, 3, 4), _pulls, _check_pulled),
    "save to files": Scenario(_one_file, _saves_a_file, _check_file, {1: 10}),
    "pack and extract": Scenario(_a_folder, _packs, _check_packed, has_plain_errors=True),
    "cp": Scenario(_prepared(_TWO), _copies, _check_copy, has_plain_errors=True),
    "convert": Scenario(_one_file, _converts, _check_converted, has_plain_errors=True),
    **PLUGINS,
}


def act(name: str, root: str, notes: str) -> None:
    """In the child."""
    SCENARIOS[name].act(Path(root), Notes(Path(notes)))
