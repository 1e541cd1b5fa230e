"""A publisher that sleeps while another one takes its root: readers get the line of the later one, whole, and no other."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import weights_in
from slices import some

from async_ckpt import ClosedError, Place, Publisher, Subscriber
from async_ckpt.core.storage.place import storage_at
from async_ckpt.stores.s3.store import ObjectStorage
from async_ckpt.weights.delta import INDEX
from async_ckpt.weights.publishing.publication import Publication
from async_ckpt.weights.publishing.series import VersionSeries
from async_ckpt.weights.publishing.versions import Versions

STORES = pytest.mark.parametrize("store", [False, True], ids=["disk", "store"])
# Another process, which begins again with a lower version.
SET_BACK = """
import torch, async_ckpt
with async_ckpt.Publisher(async_ckpt.Place({url!r}, options={options}), on_rollback="retire") as publisher:
    for version in {versions}:
        publisher.publish({{"weight": torch.full((3000,), 20.0 + version)}}, version).result()
"""


@pytest.fixture
def place(store: bool, s3: Any, bucket: str, tmp_path: Path) -> Place:
    return Place(f"s3://{bucket}/weights", options=s3.options) if store else Place(str(tmp_path / "out"))


@pytest.fixture
def set_back(place: Place, nursery: Any) -> Callable[..., None]:
    def run(*versions: int) -> None:
        end = nursery.run(SET_BACK.format(url=place.url, options=dict(place.options or {}), versions=versions))
        assert end.status == 0, end.err

    return run


def full(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((3000,), float(value))}


def assert_newest_is(place: Place, version: int, value: float, into: Path) -> None:
    assert Subscriber(place).pull(into).version == version
    assert bool((weights_in(into)["weight"] == value).all())


@STORES
def test_a_retention_that_was_overtaken_deletes_nothing_of_the_next_publisher(
    place, set_back, gate, monkeypatch, tmp_path
):
    with Publisher(place, keep=2, anchor_every=1) as old:
        for version in (1, 2):
            old.publish(full(version), version).result()
        old._wait()
        real = Versions.needed_by

        def needed_by(versions: Versions, kept: list[int]) -> set[int]:
            needed = real(versions, kept)
            gate.passed()
            return needed

        monkeypatch.setattr(Versions, "needed_by", needed_by)
        old.publish(full(3), 3).result()
        gate.wait_reached()
        set_back(1, 2)
        gate.open()
    assert Subscriber(place).versions() == [1, 2]
    assert_newest_is(place, 2, 22, tmp_path / "local")


@STORES
def test_a_version_that_comes_after_the_root_was_taken_is_withdrawn(
    place, store, set_back, gate, monkeypatch, tmp_path
):
    """Between the last look at who owns the root, and the index or the rename that makes the version."""
    owner, name = (ObjectStorage, "put_new") if store else (VersionSeries, "delete_replaced")
    real = getattr(owner, name)

    def sleepy(self: Any, *arguments: Any) -> Any:
        if not store or arguments[0].endswith(INDEX):
            gate.passed()
        return real(self, *arguments)

    with Publisher(place) as old:
        for version in (1, 2):
            old.publish(full(version), version).result()
        monkeypatch.setattr(owner, name, sleepy)
        handle = old.publish(full(3), 3)
        gate.wait_reached()
        set_back(1)
        gate.open()
        assert isinstance(handle.exception(), ClosedError)
    assert Subscriber(place).versions() == [1]
    assert_newest_is(place, 1, 21, tmp_path / "local")


@pytest.mark.parametrize("store", [True], ids=["store"])
def test_files_that_a_killed_publisher_wrote_late_are_swept_and_in_nobodys_way(place, tmp_path):
    storage = storage_at(place)

    def write_late(version: int) -> None:
        storage.replace(f"weight_v{version:06d}/files.0123abcd/model.safetensors", b"late")

    with Publisher(place) as first:
        first.publish(full(1), 1).result()
        write_late(2)  # after the sweep of this publisher
        first.publish(full(2), 2).result()
        write_late(2)
        write_late(4)
    with Publisher(place) as second:
        second.publish(full(5), 5).result()
    for version in (2, 4):
        assert "files.0123abcd" not in storage.names(f"weight_v{version:06d}")
    assert Subscriber(place).versions() == [1, 2, 5]
    Subscriber(place).pull(tmp_path / "local", 2)
    assert bool((weights_in(tmp_path / "local")["weight"] == 2).all())


@STORES
def test_a_root_that_is_emptied_and_begun_again_is_followed_by_who_has_not_looked_meanwhile(place, tmp_path):
    twin = torch.nn.Linear(3, 3)
    with Publisher(place) as publisher:
        for version in (1, 2):
            publisher.publish(torch.nn.Linear(3, 3), version).result()
    with Subscriber(place) as subscriber:
        watch = subscriber.watch(poll_seconds=0.01)
        assert next(watch) == subscriber.pull(twin).version == 2
        empty(place)
        model = torch.nn.Linear(3, 3)
        with Publisher(place) as publisher:
            publisher.publish(torch.nn.Linear(3, 3), 1).result()
            publisher.publish(model, 2).result()
        assert next(watch) == subscriber.pull(twin).version == 2
        assert torch.equal(twin.weight, model.weight)


def empty(place: Place) -> None:
    storage = storage_at(place)
    if not storage.remote:
        shutil.rmtree(storage.locate(""))
        return
    for name in storage.names(""):
        storage.delete_all(name)


# A model on ranks, of which each parameter is `value` + the version; the world may sleep ahead of one.
PUBLISH = """
import async_ckpt
from async_ckpt import ClosedError, Place
model = fsdp()["model"]
with async_ckpt.Publisher({place}, on_rollback={on_rollback!r}) as publisher:
    for version in {versions}:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().fill_({value} + version)
        if version == {sleeps_at}:
            here.meet("asleep")
            here.hear("awake")
        error = publisher.publish(model, version).exception()
        here.tell(type(error).__name__)
"""


@STORES
@pytest.mark.parametrize("size", some([None, 1, 3], 2))
def test_a_world_that_was_overtaken_by_one_of_another_size_publishes_no_version_any_more(worlds, place, size):
    """Or by a publisher of a whole model, with None."""
    text = f"Place({place.url!r}, options={dict(place.options or {})})"
    worlds.root.parent.mkdir(exist_ok=True, parents=True)
    script = PUBLISH.format(place=text, on_rollback=None, versions=[1, 2, 3, 4], value=0, sleeps_at=4)
    old = worlds.start(2, script)
    old.wait_for("asleep-0")
    old.wait_for("asleep-1")
    model = network_of(102.0)
    if size is None:
        with Publisher(place, on_rollback="retire") as publisher:
            publisher.publish(model, 2).result()
    else:
        worlds.run(size, PUBLISH.format(place=text, on_rollback="retire", versions=[2], value=100, sleeps_at=None))
    old.say("awake")
    assert old.ended()[0].told[-1] == "ClosedError"
    assert Subscriber(place).versions() == [1, 2]
    twin = network_of(0.0)
    assert Subscriber(place).pull(twin).version == 2
    assert all(torch.equal(twin.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def network_of(value: float) -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(13, 37), torch.nn.ReLU(), torch.nn.Linear(37, 5), torch.nn.LayerNorm(5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


LATE = """
import os, sys, time, torch, async_ckpt
from pathlib import Path
from async_ckpt.weights.publishing.publication import Publication
real = Publication._rename
def sleepy(self, scratch, target):
    print("here", flush=True)
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    try:
        real(self, scratch, target)
    finally:
        os._exit(9)
publisher = async_ckpt.Publisher(sys.argv[1])
for version in (1, 2):
    publisher.publish({"weight": torch.full((3000,), float(version))}, version).result()
Publication._rename = sleepy
publisher.publish({"weight": torch.full((3000,), 3.0)}, 3).result()
"""


@pytest.mark.parametrize("store", [False], ids=["disk"])
@pytest.mark.parametrize("versions", [(1,), (1, 2, 3), (1, 2, 3, 4)])
def test_one_that_is_killed_right_after_its_late_rename_leaves_no_version(place, nursery, set_back, tmp_path, versions):
    child = nursery.start(LATE, place.url, tmp_path / "go")
    child.wait_for_line("here")
    set_back(*versions)
    (tmp_path / "go").touch()
    assert child.ended().status == 9
    assert Subscriber(place).versions() == [*versions]
    assert_newest_is(place, versions[-1], 20 + versions[-1], tmp_path / "local")
    set_back(versions[-1] + 1)
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("store", [False], ids=["disk"])
@pytest.mark.parametrize("versions", [(1,), (1, 2, 3)])
def test_one_that_is_overtaken_is_told_so_also_at_the_same_number(place, set_back, gate, monkeypatch, versions):
    real = Publication._rename
    monkeypatch.setattr(Publication, "_rename", lambda self, *rest: (gate.passed(), real(self, *rest))[1])
    with Publisher(place) as old:
        handle = old.publish(full(3), 3)
        gate.wait_reached()
        set_back(*versions)
        gate.open()
        with pytest.raises(ClosedError, match="another Publisher has begun"):
            handle.result()
    assert Subscriber(place).versions() == [*versions]
