"""Published versions that are damaged, or lie: never other weights than were published, and never another error than a CheckpointError."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import assert_same, weights_in
from fuzz_versions import Model, Stage, flip_bits, run, wrong
from published import Line, as_others_write, edit, files_below, files_but_the_marker
from safetensors.torch import load_file, save_file
from slices import some

from async_ckpt import CorruptCheckpointError, NotCommittedError, Publisher, StateMismatchError, Subscriber
from async_ckpt.weights.delta import INDEX, folder_of


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def refused(root: Path, into: Any, version: int | None = None, match: str = "") -> None:
    with pytest.raises(CorruptCheckpointError, match=match):
        Subscriber(root).pull(into, version)


def index_of(root: Path, version: int) -> Path:
    return root / folder_of(version) / INDEX


# --- all that may be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_others", [False, True], ids=["ours", "of others"])
def test_a_flipped_bit_in_an_index_never_gives_other_weights(by_others, stage):
    assert wrong(flip_bits(stage, 251, by_others=by_others)) == {}


def test_hostile_versions_never_give_other_weights_and_only_our_errors():
    assert wrong(run(some(range(5000), 50))) == {}


# --- what looks as if others had written it -----------------------------------------------------------------------


def no_metadata(told: Any) -> None:
    told["metadatb"] = told.pop("metadata")


def no_mark(told: Any) -> None:
    told["metadata"]["asynb_ckpt"] = told["metadata"].pop("async_ckpt")


def nothing(told: Any) -> None:
    told.clear()
    told["weight_map"] = {}


def no_delta(told: Any) -> None:
    del told["metadata"]["async_ckpt"]
    for key in ("base_version", "delta_encoding", "compression_format"):
        told["metadata"].pop(key, None)


@pytest.mark.parametrize("change", [no_metadata, no_mark, nothing, no_delta], ids=lambda f: f.__name__)
@pytest.mark.parametrize("version", [1, 2], ids=["anchor", "delta"])
def test_an_index_that_is_not_a_publishers_is_refused_by_name_where_a_publisher_publishes(change, version, stage):
    root = stage.fresh()
    edit(root / folder_of(version), change)
    for into in (root.with_name("local"), root.with_name("new"), Model()):
        with pytest.raises(CorruptCheckpointError, match=r"damaged, or another program's: a Publisher publishes"):
            Subscriber(root).pull(into, version)
    assert not files_below(root.with_name("new")).keys() - {".weight_sync/lock"}


@pytest.mark.parametrize("change", [no_metadata, nothing, no_delta], ids=lambda f: f.__name__)
def test_the_frames_of_a_delta_are_nobodys_weights_wherever_they_lie(change, stage):
    """The versions were copied elsewhere, without what else is at the root."""
    root = stage.fresh()
    (root / "publisher.json").unlink()
    edit(root / folder_of(2), change)
    for into in (root.with_name("local"), root.with_name("new"), Model()):
        refused(
            root,
            into,
            2,
            "as only the frames of a delta have|model has no tensors|other tensors than its files",
        )


def test_an_anchor_whose_index_is_gone_is_no_version_where_a_publisher_publishes(stage):
    root = stage.fresh()
    index_of(root, 1).unlink()
    assert Subscriber(root).versions() == [2, 3]
    with pytest.raises(NotCommittedError, match="version 1 does not exist"):
        Subscriber(root).pull(root.with_name("new"), 1)


def test_versions_that_were_there_before_the_first_publisher_are_read_and_none_that_come_later(tmp_path):
    """That publisher has noted their indices, as they were."""
    root, state = tmp_path / "weights", {"weight": torch.arange(9.0)}
    theirs = root / folder_of(1)
    theirs.mkdir(parents=True)
    save_file(state, theirs / "model.safetensors")
    theirs.joinpath(INDEX).write_text(json.dumps({"weight_map": {"weight": "model.safetensors"}}))
    for version in (2, 3):
        with Publisher(root) as publisher:
            publisher.publish(state, version).result()
    Subscriber(root).pull(tmp_path / "local", 1)
    assert_same(weights_in(tmp_path / "local"), state)
    shutil.copytree(theirs, root / folder_of(4))
    refused(root, tmp_path / "other", 4, "another program's")
    theirs.joinpath(INDEX).write_text(json.dumps({"weight_map": {"weight": "model.safetensors"}, "x": 1}))
    refused(root, tmp_path / "other", 1, "another program's")


def as_before(folder: Path) -> None:
    """As the first release has written it."""

    def change(told: Any) -> None:
        ours = told["metadata"]["async_ckpt"]
        for key in ("digest", "heads"):
            ours.pop(key, None)

    edit(folder, change)


def test_versions_of_a_release_before_are_read_and_published_on(tmp_path):
    line = Line(tmp_path / "weights")
    with line:
        line.publish(1, 2, 3)
        line.publisher._wait()
    for version in (1, 2, 3):
        as_before(line.folder(version))
    owner = tmp_path / "weights" / "publisher.json"
    told = json.loads(owner.read_text())
    del told["unsealed"]
    owner.write_text(json.dumps(told))
    line.subscriber().pull(tmp_path / "local", 2)
    line.assert_is(2, tmp_path / "local")
    with Line(line.root, line.model, keep=2) as again:
        again.publish(4)
        assert line.subscriber().pull(tmp_path / "local", 3).base == 2
        line.assert_is(3, tmp_path / "local")
        again.publish(5)
        again.publisher._wait()
        assert again.publisher.versions() == [4, 5]  # old ones are a Publisher's, too
    with Line(tmp_path / "other", line.model) as new:
        new.publish(1)
    as_before(new.folder(1))  # which no release before has written there
    refused(Path(new.root), tmp_path / "new", match="another program's")


# --- an anchor of others ------------------------------------------------------------------------------------------


def theirs(stage: Stage) -> Path:
    """A root with an anchor that another program has written, and a folder and a module that know the model."""
    root = stage.fresh()
    for version in (2, 3):
        shutil.rmtree(root / folder_of(version))
    as_others_write(root / folder_of(1))
    shutil.copytree(root / folder_of(1), root / folder_of(5))
    index_of(root, 5).write_text(json.dumps({"weight_map": dict.fromkeys(stage.were[1], "model.safetensors")}))
    return root


def change_weights(root: Path, change: Any) -> None:
    path = root / folder_of(5) / "model.safetensors"
    state = load_file(path)
    change(state)
    save_file(state, path)
    index_of(root, 5).write_text(json.dumps({"weight_map": dict.fromkeys(state, "model.safetensors")}))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("norm"),
        lambda state: state.update(more=torch.ones(3)),
        lambda state: state.update(norm=torch.ones(4)),
        lambda state: state.update(norm=torch.ones(3, dtype=torch.int32)),
    ],
    ids=["fewer", "more", "shape", "dtype"],
)
@pytest.mark.parametrize("note", ["state.json", "nothing"])
def test_an_anchor_of_others_has_the_tensors_of_what_is_here(note, change, stage):
    """Also where a pull was killed, so that nothing says any more what is here."""
    root = theirs(stage)
    local = root.with_name("local")
    if note == "nothing":
        (local / ".weight_sync" / "state.json").unlink()
    change_weights(root, change)
    before = files_but_the_marker(local)
    for into in (local, Model()):
        with pytest.raises(StateMismatchError):
            Subscriber(root).pull(into, 5)
    assert files_but_the_marker(local) == before


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def shorter(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def with_header(path: Path, change: Any) -> None:
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    told = json.loads(data[8:begin])
    change(told)
    head = json.dumps(told).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + data[begin:])


def overlapping(path: Path) -> None:
    with_header(path, lambda told: told["norm"].update(data_offsets=[0, 12]))


def with_a_gap(path: Path) -> None:
    with_header(path, lambda told: told.pop("norm"))


def with_numbers_for_texts(path: Path) -> None:
    with_header(path, lambda told: told["__metadata__"].update(format=1))


def with_half_a_character(path: Path) -> None:
    with_header(path, lambda told: told["__metadata__"].update(x="\ud800"))


@pytest.mark.parametrize(
    "harm",
    [longer, shorter, overlapping, with_a_gap, with_numbers_for_texts, with_half_a_character],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("version", [1, 5], ids=["a Publisher's", "others'"])
def test_an_anchor_is_what_safetensors_says(version, harm, stage):
    root = theirs(stage)
    if version == 1:
        shutil.rmtree(root)
        shutil.copytree(stage.root, root)
    harm(root / folder_of(version) / "model.safetensors")
    for into in (root.with_name("new"), Model()):
        refused(root, into, version, r"model\.safetensors")
    assert not files_below(root.with_name("new")).keys() - {".weight_sync/lock"}


def test_a_header_that_was_flipped_is_refused_also_where_it_says_the_same_of_the_tensors(stage):
    root = stage.fresh()
    path = root / folder_of(1) / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"format":"pt"', b'"format":"qt"'))
    refused(root, root.with_name("new"), 1, "its header is not the one that was published")


# --- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["\ud800.safetensors", "\ud800", ".Weight_Sync/state.json", "a\\b", "x/../y"])
def test_a_file_of_a_version_has_a_name_that_every_folder_can_have(name, stage):
    for sealed in (True, False):
        root = stage.fresh()
        if not sealed:
            as_others_write(root / folder_of(1))
        edit(root / folder_of(1), lambda told: told["weight_map"].update(norm=name))
        refused(root, root.with_name("new"), 1, "is not the name of a file of its folder")
        if sealed:
            root = stage.fresh()
            edit(
                root / folder_of(1),
                lambda told: told["metadata"]["async_ckpt"]["digests"].update({name: "0" * 32}),
            )
            refused(root, root.with_name("new"), 1, "is not the name of a file of|half of a surrogate pair")


def test_a_tensor_has_a_name_of_whole_characters(stage):
    root = stage.fresh()
    as_others_write(root / folder_of(1))
    with_header(root / folder_of(1) / "model.safetensors", lambda told: told.update({"\ud800": told.pop("norm")}))
    edit(
        root / folder_of(1),
        lambda told: told["weight_map"].update({"\ud800": told["weight_map"].pop("norm")}),
    )
    refused(root, root.with_name("new"), 1, "half of a surrogate pair")
    index_of(root, 1).unlink()
    with pytest.raises(NotCommittedError):
        Subscriber(root).pull(root.with_name("new"), 1)
