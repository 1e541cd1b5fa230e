"""What is saved while calls are recorded, and how what is left of it is read after a cut.

In: a folder, and a `Recorder` that is told what is acknowledged. Out: the labels of the states that load. Knows nothing of: cuts.

Each state is a function of its label, so that whatever loads shows which one it is, and that it is whole.
"""

import contextlib
import io
import os
import shutil
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from states import difference

import async_ckpt
from async_ckpt import AsyncCheckpointer, Keep, Place, Publisher, Subscriber
from async_ckpt.tools.command.main import main as command
from async_ckpt.weights.publishing import folder_replica

NUM_FLOATS = 3300  # four blocks of a file


class Told(Protocol):
    """What a scenario tells of its saves."""

    def begins(self, label: str, *, instead_of: tuple[str, ...] = ()) -> None: ...

    def acknowledged(self, label: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way of using the library below a folder."""

    name: str
    run: Callable[[Path, Told], None]
    found: Callable[[Path], set[str]]
    """The labels of all states that can be loaded; each was compared. Raises AssertionError if anything torn loads."""
    goes_on: Callable[[Path], None] | None = None
    """What was under way is done again, in a process that starts after the cut."""
    reading_writes: bool = False
    is_alone: bool = True
    """One process does all."""


def tensors(label: str) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(zlib.crc32(label.encode()))
    return {"weight": torch.rand(NUM_FLOATS, generator=drawn), "bias": torch.rand(3, generator=drawn)}


def state(label: str, frozen: str = "frozen") -> dict[str, Any]:
    return {"model": tensors(label), "frozen": tensors(frozen), "label": label}


def assert_whole(loaded: Any, label: str) -> None:
    made = state(label)
    wrong = difference({name: loaded[name] for name in sorted(loaded)}, {name: made[name] for name in sorted(made)})
    assert wrong is None, f"what loads as {label} is torn: {wrong}"


def assert_tensors(loaded: Any, label: str) -> None:
    wrong = difference(dict(sorted(loaded.items())), dict(sorted(tensors(label).items())))
    assert wrong is None, f"what loads as {label} is torn: {wrong}"


# --- runs ---------------------------------------------------------------------------------------------------------


def open_run(root: Any, **options: Any) -> AsyncCheckpointer:
    return AsyncCheckpointer(root, segment_bytes=4 << 20, **options)


def save(told: Told, ckpt: AsyncCheckpointer, label: str, instead_of: tuple[str, ...] = (), **options: Any) -> None:
    """Labels begin with the step."""
    told.begins(label, instead_of=instead_of)
    ckpt.save(state(label), int(label.split()[0]), **options).result()
    told.acknowledged(label)
    ckpt.wait()


def in_run(*names: str) -> Callable[[Path], set[str]]:
    def found(top: Path) -> set[str]:
        labels: dict[int, str] = {}
        root: Any = [top / name for name in names] if len(names) > 1 else top / names[0]
        with open_run(root) as ckpt:
            steps = ckpt.steps()
            assert ckpt.latest() == (steps[-1] if steps else None)
            for step in steps:
                loaded = ckpt.load(step)
                labels[step] = loaded["label"]
                assert_whole(loaded, loaded["label"])
                assert labels[step].startswith(f"{step} ")
            live = state("none")
            assert ckpt.restore(live) == (steps[-1] if steps else None)
            if steps:
                assert_whole(live, labels[steps[-1]])
            [*ckpt.records()]
        return {*labels.values()}

    return found


def run_goes_on(*names: str) -> Callable[[Path], None]:
    def goes_on(top: Path) -> None:
        root: Any = [top / name for name in names] if len(names) > 1 else top / names[0]
        saves_again(open_run(root))

    return goes_on


def saves_again(opened: AsyncCheckpointer, step: int = 90) -> None:
    with opened as ckpt:
        ckpt.save(state(f"{step} again"), step).result()
        ckpt.wait()
        assert ckpt.latest() == step
        assert_whole(ckpt.load(), f"{step} again")


def steps(top: Path, told: Told) -> None:
    with open_run(top / "deep" / "run") as ckpt:
        for step in range(1, 7):
            save(told, ckpt, f"{step} first")


def retention(top: Path, told: Told) -> None:
    with open_run(top / "run", keep=Keep(last=2)) as ckpt:
        for step in range(1, 8):
            save(told, ckpt, f"{step} first", (f"{step - 2} first",))


def overwrite(top: Path, told: Told) -> None:
    with open_run(top / "run") as ckpt:
        for step in (1, 2, 3):
            save(told, ckpt, f"{step} first")
            save(told, ckpt, f"{step} second", (f"{step} first",), overwrite=True)
            save(told, ckpt, f"{step} third", (f"{step} second",), overwrite=True)


def rollback(top: Path, told: Told) -> None:
    with open_run(top / "run", on_rollback="retire") as ckpt:
        for step in range(1, 4):
            save(told, ckpt, f"{step} first")
    with open_run(top / "run", on_rollback="retire") as ckpt:
        save(told, ckpt, "2 again", ("2 first", "3 first"), overwrite=True)
        save(told, ckpt, "3 again")


def unchanged(top: Path, told: Told) -> None:
    held = state("1 first")
    with open_run(top / "run", keep=Keep(last=1)) as ckpt:
        for step in range(1, 7):
            label = f"{step} first"
            held |= {"model": tensors(label), "label": label}
            told.begins(label, instead_of=(f"{step - 1} first",))
            ckpt.save(held, step, unchanged=["frozen"] if step > 1 else []).result()
            told.acknowledged(label)
            ckpt.wait()


def two_roots(top: Path, told: Told) -> None:
    with open_run([top / "near", top / "far"], keep=Keep(last=2)) as ckpt:
        for step in range(1, 5):
            save(told, ckpt, f"{step} first", (f"{step - 2} first",))


def either_root(top: Path, told: Told) -> None:
    with open_run([top / "near", top / "far"], on_rollback="retire") as ckpt:
        for step in range(1, 3):
            save(told, ckpt, f"{step} first")
        save(told, ckpt, "1 again", ("1 first", "2 first"), overwrite=True)


def three_places(top: Path, **options: Any) -> AsyncCheckpointer:
    """Memory, of which a cut leaves nothing, in front of the two places that are looked at."""
    lasting = {"memory": False, "near": True, "far": True}  # wherever all of it lies
    return open_run([Place(top / name, volatile=not lasts) for name, lasts in lasting.items()], **options)


def behind_memory(top: Path, told: Told) -> None:
    with three_places(top, keep=Keep(last=2), on_rollback="retire") as ckpt:
        for step in range(1, 4):
            save(told, ckpt, f"{step} first", (f"{step - 2} first",))
        save(told, ckpt, "2 again", ("2 first", "3 first"), overwrite=True)


def goes_on_behind_memory(top: Path) -> None:
    shutil.rmtree(top / "memory", ignore_errors=True)
    opened = three_places(top)
    opened.restore(state("none"))
    saves_again(opened)


def in_both_roots(top: Path) -> set[str]:
    """What all readers see, and no root alone shows anything torn."""
    for name in ("near", "far"):
        in_run(name)(top)
    return in_run("near", "far")(top)


def copied(top: Path, told: Told) -> None:
    with open_run(top / "run") as ckpt:
        for step in (1, 2):
            save(told, ckpt, f"{step} first")
    told.begins("copy")
    run_command("cp", top / "run", top / "copies" / "run")
    told.acknowledged("copy")


def in_copies(top: Path) -> set[str]:
    labels = in_run("copies/run")(top)
    return in_run("run")(top) | ({"copy"} if labels == {"1 first", "2 first"} else set())


def merged(top: Path, told: Told) -> None:
    with open_run(top / "run") as ckpt:
        save(told, ckpt, "1 first")
    told.begins("merged")
    async_ckpt.merge(top / "run", 1, top / "a" / "b" / "x.tar")
    told.acknowledged("merged")


def in_merged(top: Path) -> set[str]:
    labels = in_run("run")(top)
    if (top / "a/b/x.tar").exists():
        assert_whole(async_ckpt.load(top / "a/b/x.tar"), "1 first")
        labels.add("merged")
    return labels


def two_ranks(top: Path, told: Told) -> None:
    """Both are recorded in one log, by the order of their calls. Rank 0 alone tells, and it knows what is committed."""
    other = os.fork()
    rank = 0 if other else 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{top.parent / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        with open_run(top / "run", keep=Keep(last=2)) as ckpt:
            for step in range(1, 4):
                label = f"{step} first"
                if rank == 0:
                    told.begins(label, instead_of=(f"{step - 2} first",))
                ckpt.save(state(label), step).result()
                if rank == 0:
                    told.acknowledged(label)
                ckpt.wait()
        torch.distributed.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if rank:
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0


def run_command(*words: Any) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            command([str(word) for word in words])
        except SystemExit as ended:
            if ended.code:
                raise RuntimeError(out.getvalue()) from None


# --- single files -------------------------------------------------------------------------------------------------


def one_file(top: Path, told: Told) -> None:
    for number, label in enumerate(("0 a", "0 b", "0 c")):
        told.begins(label, instead_of=("0 a", "0 b")[max(0, number - 1) : number])
        async_ckpt.save(state(label), top / "some" / "x.tar").result()
        told.acknowledged(label)


def in_file(name: str) -> Callable[[Path], set[str]]:
    def found(top: Path) -> set[str]:
        if not (top / name).exists():
            return set()
        loaded = async_ckpt.load(top / name)
        assert_whole(loaded, loaded["label"])
        return {loaded["label"]}

    return found


def file_goes_on(top: Path) -> None:
    async_ckpt.save(state("0 again"), top / "some" / "x.tar").result()
    assert in_file("some/x.tar")(top) == {"0 again"}


_CONVERSIONS: dict[str, tuple[str, Sequence[str]]] = {
    "safetensors": ("out/x.safetensors", ()),
    "hf": ("hf/model", ("--as", "hf")),
    "tar": ("again/x.tar", ()),
}


def converted(top: Path, told: Told) -> None:
    told.begins("0 a")
    async_ckpt.save({"model": tensors("0 a")}, top / "x.tar").result()
    told.acknowledged("0 a")
    for kind, (name, options) in _CONVERSIONS.items():
        told.begins(kind)
        run_command("convert", top / "x.tar", top / name, *options)
        told.acknowledged(kind)


def in_conversions(top: Path) -> set[str]:
    found = set()
    for label, (name, _) in {"0 a": ("x.tar", ()), **_CONVERSIONS}.items():
        if (top / name).exists():
            loaded = async_ckpt.load(top / name)
            flat = {key.removeprefix("model."): one for key, one in loaded.items()}
            assert_tensors(loaded.get("model", flat), "0 a")
            found.add(label)
    return found


def conversions_go_on(top: Path) -> None:
    """Each is made again over whatever is there."""
    async_ckpt.save({"model": tensors("0 a")}, top / "x.tar").result()
    for name, options in _CONVERSIONS.values():
        run_command("convert", top / "x.tar", top / name, "--overwrite", *options)
    assert in_conversions(top) == {"0 a", *_CONVERSIONS}


def exported(top: Path, told: Told) -> None:
    for label in ("0 a", "0 b"):
        told.begins(label, instead_of=("0 a",) if label == "0 b" else ())
        async_ckpt.export_hf(tensors(label), top / "some" / "hf").result()
        told.acknowledged(label)


def in_export(top: Path) -> set[str]:
    folder = top / "some" / "hf"
    if not folder.exists():
        return set()
    loaded = async_ckpt.load(folder)
    (label,) = [one for one in ("0 a", "0 b") if torch.equal(loaded["bias"], tensors(one)["bias"])]
    assert_tensors(loaded, label)
    return {label}


def export_goes_on(top: Path) -> None:
    async_ckpt.export_hf(tensors("0 b"), top / "some" / "hf").result()
    assert in_export(top) == {"0 b"}


# --- folders ------------------------------------------------------------------------------------------------------

TREES = {"first": ("a", "in/b"), "second": ("a", "in/b", "more/deep/c", "empty")}


def tree(label: str) -> dict[str, bytes]:
    return {
        name: b"" if name == "empty" else tensors(f"{label} {name}")["weight"].numpy().tobytes()
        for name in TREES[label]
    }


def below(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def download(label: str, top: Path) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    for name, data in tree(label).items():
        MemoryFileSystem().pipe_file(f"/{label}/{name}", data)
    async_ckpt.files.download_directory(Place(f"memory://{label}"), top / "got" / "model")


def downloads(top: Path, told: Told) -> None:
    for label in TREES:
        told.begins(label, instead_of=("first",) if label == "second" else ())
        download(label, top)
        told.acknowledged(label)


def in_downloads(top: Path) -> set[str]:
    """The folder is one of both, or on the way from the first to the second, whose files are each replaced."""
    found = below(top / "got" / "model")
    old, new = tree("first"), tree("second")
    visible = {name: data for name, data in found.items() if not name.startswith(".")}
    for name, data in visible.items():
        assert data in (old.get(name), new.get(name)), f"{name} is torn: {len(data)} bytes"
    if visible:
        assert visible.keys() >= old.keys(), "a folder is visible of which files are missing"
    whole = {label for label in TREES if visible == tree(label)}
    return whole or ({"first"} if visible else set())


def downloads_go_on(top: Path) -> None:
    download("second", top)
    assert in_downloads(top) == {"second"}


def pack(label: str, top: Path) -> None:
    with async_ckpt.pack(top / "packs" / "x.tar") as folder:
        for name, data in tree(label).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    folder.handle.result()


def packed(top: Path, told: Told) -> None:
    for label in TREES:
        told.begins(label, instead_of=("first",) if label == "second" else ())
        pack(label, top)
        told.acknowledged(label)


def in_pack(top: Path) -> set[str]:
    path = top / "packs" / "x.tar"
    if not path.exists():
        return set()
    with async_ckpt.unpack(path, scratch=top.parent) as folder:
        whole = below(folder)
    found = {label for label in TREES if whole == tree(label)}
    assert found, f"a pack is torn: {[*whole]}"
    return found


def packs_go_on(top: Path) -> None:
    pack("second", top)
    assert in_pack(top) == {"second"}


# --- published versions -------------------------------------------------------------------------------------------


def published(top: Path, told: Told) -> None:
    with Publisher(top / "out" / "weights", anchor_every=3, keep=2) as publisher:
        held = tensors("0 a")
        for version in range(1, 9):
            label = f"{version} v"
            told.begins(label, instead_of=(f"{version - 2} v",))
            held["weight"].copy_(tensors("0 a")["weight"])
            held["weight"][::7] = version
            publisher.publish(held, version).result()
            told.acknowledged(label)


def version_of(label: str) -> dict[str, torch.Tensor]:
    made = tensors("0 a")
    made["weight"][::7] = int(label.split()[0])
    return made


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(NUM_FLOATS))
        self.bias = torch.nn.Parameter(torch.zeros(3))


def in_versions(top: Path) -> set[str]:
    found = set()
    with Subscriber(top / "out" / "weights") as subscriber:
        for version in subscriber.versions():
            model = _Model()
            subscriber.pull(model, version)
            wrong = difference(
                {name: one.detach() for name, one in sorted(model.named_parameters())},
                dict(sorted(version_of(f"{version} v").items())),
            )
            assert wrong is None, f"version {version} is torn: {wrong}"
            found.add(f"{version} v")
    return found


def versions_go_on(top: Path) -> None:
    with Publisher(top / "out" / "weights") as publisher:
        publisher.publish(version_of("90 v"), 90).result()
    assert "90 v" in in_versions(top)


def pulled(top: Path, told: Told) -> None:
    """No pull is acknowledged for ever: a folder that a cut has spoiled is filled again, from a root that has all of it."""
    beside = top.parent / "source"
    with Publisher(beside, anchor_every=3) as publisher, Subscriber(beside) as subscriber:
        for version in range(1, 5):
            publisher.publish(version_of(f"{version} v"), version).result()
            subscriber.pull(top / "model")


def in_pulled(top: Path) -> set[str]:
    """After any cut, the next pull makes the folder right, or refuses a folder that has lost all notes about its files."""
    folder_replica.boot_id = lambda: "another one"  # a power cut starts another one
    folder = top / "model"
    is_noted = (folder / ".weight_sync").is_dir()
    with Subscriber(top.parent / "source") as subscriber:
        newest = subscriber.latest()
        if newest is None:  # a real disk that was cut has the root as well
            return set()
        try:
            subscriber.pull(folder)
        except FileExistsError:
            assert not is_noted, "a folder that versions have filled is refused"
            return set()
    loaded = async_ckpt.load(folder)
    wrong = difference(dict(sorted(loaded.items())), dict(sorted(version_of(f"{newest} v").items())))
    assert wrong is None, f"a pull is torn: {wrong}"
    return set()


SCENARIOS = [
    Scenario("steps", steps, in_run("deep/run"), run_goes_on("deep/run")),
    Scenario("retention", retention, in_run("run"), run_goes_on("run")),
    Scenario("overwrite", overwrite, in_run("run"), run_goes_on("run")),
    Scenario("rollback", rollback, in_run("run"), run_goes_on("run")),
    Scenario("unchanged groups", unchanged, in_run("run"), run_goes_on("run")),
    Scenario("two places", two_roots, in_both_roots, run_goes_on("near", "far"), reading_writes=True),
    Scenario("rollback at two places", either_root, in_both_roots, run_goes_on("near", "far"), reading_writes=True),
    Scenario("three places", behind_memory, in_both_roots, goes_on_behind_memory, reading_writes=True),
    Scenario("cp", copied, in_copies, run_goes_on("run")),
    Scenario("two ranks", two_ranks, in_run("run"), run_goes_on("run"), is_alone=False),
    Scenario("merge", merged, in_merged, run_goes_on("run")),
    Scenario("one file", one_file, in_file("some/x.tar"), file_goes_on),
    Scenario("convert", converted, in_conversions, conversions_go_on),
    Scenario("export", exported, in_export, export_goes_on),
    Scenario("download", downloads, in_downloads, downloads_go_on),
    Scenario("pack", packed, in_pack, packs_go_on),
    Scenario("publish", published, in_versions, versions_go_on),
    Scenario("pull", pulled, in_pulled, reading_writes=True),
]
