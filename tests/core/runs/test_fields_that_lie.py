"""Files of a run whose digests are right and whose fields are of other types: every reader works, or raises a CheckpointError."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from archives import little_memory
from published import Line
from rank_archives import commit, write_all
from slices import is_tried
from states import open_run

import async_ckpt
from async_ckpt import CheckpointError, Publisher, StorageUnavailableError, Subscriber
from async_ckpt.core.format.digests import block_digest
from async_ckpt.core.runs import layouts
from async_ckpt.core.runs.manifest import seal, unseal
from async_ckpt.core.runs.receipts import Table
from async_ckpt.core.slicing.locator import StepLayout, check_structure
from async_ckpt.core.slicing.slices import Mesh
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.weights.lent import parse_lent

ODD: list[Any] = [
    None, True, -1, 2**70, 10**400, 1e308, float("nan"), "", "x", "\ud800", "../../x", "9" * 5000, [], {}, [[]], [None], {"x": 1}, ["x"] * 3,
]  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 1 is of two ranks, step 3 has borrowed a group of step 2."""
    root = tmp_path_factory.mktemp("sound") / "run"
    folder, base = root / "step_00000001", {"w": torch.arange(64.0)}
    folder.mkdir(parents=True)
    commit(write_all(folder, 2, lambda _: {"base": base, "head": {"w": torch.ones(64)}}))
    with open_run(root) as ckpt:
        for step in (2, 3):
            state = {"base": base, "head": {"w": torch.ones(64) * step}, "step": step}
            ckpt.save(state, step, unchanged="base", record={"loss": 1.0}).result()
        ckpt.wait()
    return root


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from fields(inner, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], by: Any) -> Any:
    if not path:
        return by
    changed = dict(value) if isinstance(value, dict) else list(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], by)
    return changed


def without_digest(data: bytes) -> Any:
    told = unseal(data)
    told.pop("digest")
    return told


def lies(told: Any) -> Iterator[tuple[str, Any]]:
    for path in fields(told):
        for odd in ODD:
            yield f"{'.'.join(map(str, path))}={odd!r:.20}", replaced(told, path, odd)


def readers(root: Path) -> Iterator[Callable[[], Any]]:
    ckpt = async_ckpt.AsyncCheckpointer(root)
    yield ckpt.steps
    yield ckpt.latest
    yield ckpt.records
    yield from ((lambda step=step: ckpt.load(step)) for step in (1, 2, 3))
    yield lambda: ckpt.restore({"base": {"w": torch.zeros(64)}, "head": {"w": torch.zeros(64)}})
    yield lambda: async_ckpt.load(root)
    yield lambda: async_ckpt.verify(root)
    yield partial(save, root)


def save(root: Path) -> None:
    with open_run(root, on_rollback="retire") as ckpt:
        ckpt.save({"w": torch.ones(3)}, 4).result()


def raw_error(read: Callable[[], Any]) -> str | None:
    """The error of a reader that is none of this library; None where it works, or refuses by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            read()
        except CheckpointError:
            return None
        except Exception as error:
            return repr(error)[:200]
    return None


SEALED = [
    "step_00000001/manifest.json",
    "step_00000003/manifest.json",
    "step_00000001/layout.*",
    "start-*.json",
    "start-*.seen",
]


@pytest.mark.parametrize("name", SEALED)
def test_a_field_of_another_type_is_refused_by_name(sound, tmp_path, name):
    wrong = []
    (original,) = sound.glob(name)
    for number, (lie, told) in enumerate(lies(without_digest(original.read_bytes()))):
        if not is_tried(number, 13) or not isinstance(told, dict):
            continue
        root = shutil.copytree(sound, tmp_path / str(number))
        (root / original.relative_to(sound)).write_bytes(seal(told))
        wrong += [(lie, at, error) for at, read in enumerate(readers(root)) if (error := raw_error(read))]
        shutil.rmtree(root)
    assert not wrong, "\n".join(map(str, wrong))


@pytest.mark.parametrize("name", SEALED)
def test_a_file_with_the_right_digest_that_is_nested_too_deeply_is_refused_by_name(sound, tmp_path, name):
    root = shutil.copytree(sound, tmp_path / "run")
    (path,) = root.glob(name)
    rest = b'"x": ' + b"[" * 100_000
    data = b'{"digest": "' + block_digest(rest).hex().encode() + b'",\n' + rest
    path.write_bytes(data)
    assert [error for read in readers(root) if (error := raw_error(read))] == []
    with pytest.raises(ValueError, match="nested too deeply"):
        unseal(data)


NO_JSON = [b"", b"\xff\xfe", b"null", b"[" * 100_000, b"[" * 100_000 + b"\n", b'{"x": ' + b"9" * 5000 + b"}"]


def texts(original: bytes) -> Iterator[tuple[str, bytes]]:
    """What somebody may have written instead of one JSON value, or a line of several."""
    for bad in NO_JSON:
        yield f"{bad[:20]!r}", bad
    *lines, last = original.splitlines() if b"\n{" in original else [original]
    for lie, told in lies(json.loads(last)):
        yield lie, b"\n".join([*lines, json.dumps(told).encode()]) + b"\n"


def wrong_answers(path: Path, readers: Callable[[], Iterator[Callable[[], Any]]], each: int) -> list[tuple[Any, ...]]:
    """What the readers raise that is no error of this library, for everything that may be in a file; it is put back each time."""
    original, wrong = path.read_bytes(), []
    for number, (lie, data) in enumerate(texts(original)):
        if number >= len(NO_JSON) and not is_tried(number, each):
            continue
        for at, read in enumerate(readers()):
            path.write_bytes(data)
            if error := raw_error(read):
                wrong.append((lie, at, error))
        path.write_bytes(original)
    return wrong


def test_a_journal_with_anything_in_it_is_passed_over(sound, tmp_path):
    root = shutil.copytree(sound, tmp_path / "run")
    assert not wrong_answers(root / "checkpoints.jsonl", partial(readers, root), 13)


def test_the_index_of_a_folder_of_weights_is_refused_by_name(tmp_path):
    folder = tmp_path / "model"
    model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(3)))
    async_ckpt.export_hf(model, folder, max_shard_bytes=2000).result()
    (index,) = folder.glob("*.index.json")

    def readers() -> Iterator[Callable[[], Any]]:
        yield lambda: async_ckpt.load(folder)
        yield lambda: async_ckpt.verify(folder)

    assert not wrong_answers(index, readers, 1)


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    with Line(tmp_path / "versions", torch.nn.Linear(4, 3)) as line:
        line.publish(1, 2, 3)
        yield line


@pytest.mark.parametrize("name", ["publisher.json", "weight_v000002/model.safetensors.index.json"])
def test_the_files_of_a_publication_are_refused_by_name(line, tmp_path, name):
    path = line.root / name
    line.publisher.close()

    def publish() -> None:
        with Publisher(shutil.copytree(line.root, tmp_path / "copy", dirs_exist_ok=True)) as publisher:
            publisher.publish(line.model, 4).result()

    def readers() -> Iterator[Callable[[], Any]]:
        subscriber = Subscriber(line.root)
        yield subscriber.versions
        yield lambda: subscriber.pull(torch.nn.Linear(4, 3))
        yield lambda: subscriber.pull(shutil.rmtree(tmp_path / "into", ignore_errors=True) or tmp_path / "into")
        yield publish
        shutil.rmtree(tmp_path / "copy")

    assert not wrong_answers(path, readers, 7)


@pytest.mark.parametrize(
    "classes", [{"a": [[0, 2**24, 1]]}, {str(n): [[0, 2**18, 1]] * 4 for n in range(100)}], ids=["one", "many"]
)
def test_a_table_of_ranks_in_a_few_bytes_makes_no_long_list(classes):
    with little_memory(64 << 20), pytest.raises(ValueError, match=r"too many ranks|not a count"):
        Table.unpacked({"classes": classes, "differing": []})


@pytest.mark.parametrize(
    "spread",
    [
        [[], [2**62, 2], [1, 1], None, True],  # a mesh with more places than ranks
        [[], [1] * 100, [1] * 100, None, True],
        [[], [2], [1, 1], None, True],
        [[], [2], [], [0, 1, 1], True],
        [[[0, 1]], [2], [1], None, True],  # a cut by a dimension that the mesh does not have
        [[[1, 0]], [2], [1], None, True],
        [[[0, 0, 0]], [2], [1], None, True],
    ],
    ids=range(7),
)
def test_a_mesh_that_does_not_fit_the_ranks_or_the_tensor_is_no_layout(spread):
    check_structure(json.dumps(["w", "float32", [8], [[[0, 0, 1]], [2], [1], None, True]]), 2)
    with little_memory(64 << 20), pytest.raises(ValueError, match="mesh"):
        check_structure(json.dumps(["w", "float32", [8], spread]), 2)


@pytest.mark.parametrize(
    "held", [5, [5], [[[0]]], [[[0], [4], [1]]], [[[0], ["4"]]], [[[0], [-4]]], [[[0.5], [4]]]], ids=range(7)
)
def test_slices_that_are_no_boxes_are_no_layout(held):
    check_structure(json.dumps(["w", "float32", [8], {"held": [[[0], [4]]]}]), 2)
    with pytest.raises((ValueError, TypeError)):
        check_structure(json.dumps(["w", "float32", [8], {"held": held}]), 2)


def test_a_structure_of_no_rank_and_a_root_of_more_places_than_ranks_are_no_layout():
    structures = {"a": json.dumps(["w", "float32", [8], None]), "b": json.dumps(["w", "float32", [8], None])}
    sound = layouts.dump(StepLayout({"a": [0, 1]}, structures), Table({"a": [0, 1]}))
    layouts.parse(sound)
    for classes, root in (({"a": [0, 1], "b": []}, None), ({"a": [0, 1]}, Mesh(1, (2**62, 2), (2, 1)))):
        with little_memory(64 << 20), pytest.raises(ValueError, match=r"no rank|places"):
            layouts.parse(layouts.dump(StepLayout(classes, structures, {}, root), Table(classes)))


@pytest.mark.parametrize(
    "place",
    [["float32", [10**400], 0, 0.0], ["float32", [1], 0, 0.0], ["float32", [1] * 100, 0, 0], ["float32", [True], 0, 0]],
    ids=range(4),
)
def test_a_lent_table_whose_places_are_no_counts_is_refused(place):
    told = {"version": 1, "identity": "", "structure": "", "adapter": {}, "start": "", "slices": {}, "files": {}}
    data = json.dumps(told | {"tensors": {"a": [*place, "0" * 32]}}).encode()
    with pytest.raises(ValueError, match="lent version"):
        parse_lent(memoryview(len(data).to_bytes(8, "little") * 2 + data), [64])


@pytest.mark.parametrize("name", ["state.json", "files.json"])
def test_notes_in_a_pulled_folder_are_believed_or_passed_over(line, tmp_path, name):
    Subscriber(line.root).pull(tmp_path / "pulled", 2)

    def readers() -> Iterator[Callable[[], Any]]:
        def pull() -> None:
            into = shutil.copytree(tmp_path / "pulled", tmp_path / "into")
            try:
                assert Subscriber(line.root).pull(into).version == 3
                line.assert_is(3, into)
            finally:
                shutil.rmtree(into)

        yield pull

    assert not wrong_answers(tmp_path / "pulled/.weight_sync" / name, readers, 7)


@pytest.mark.parametrize(
    "name",
    [
        "step_00000001",
        "step_00000003",
        "*2/manifest.json",
        "*2/rank*",
        "checkpoints.jsonl",
        "latest",
        "start-*.json",
        "start-*.seen",
    ],
)
def test_a_link_that_leads_to_itself_is_refused_by_name_or_passed_over(sound, tmp_path, name):
    root = shutil.copytree(sound, tmp_path / "run")
    (path,) = root.glob(name)
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    path.symlink_to(path.name)
    assert [error for read in readers(root) if (error := raw_error(read))] == []


def test_a_folder_that_nothing_can_be_written_to_has_no_clock_and_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailableError, match="make sure that the folder exists"):
        LocalStorage(tmp_path).sweep("file", ["rank_00000.0123abcd.tar"], decided=True, of_ranks=True)
