"""Streams that other trainers write, and folders that other receivers have filled."""

import hashlib
import importlib.machinery
import json
import os
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import receiver
import torch
from exported import assert_same, weights_in
from published import Line, files_below, files_but_the_marker
from safetensors.torch import save_file
from streams import INDEX, Stream

import async_ckpt
from async_ckpt import CorruptCheckpointError, NotCommittedError, StateMismatchError, Subscriber
from async_ckpt.weights.delta import seal

NAMES = ("embed.weight", "layer.weight", "layer.bias", "norm")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4)
        self.norm = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A model as it comes from the hub: its files are links to what is elsewhere."""
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    save_file(dict(Model().state_dict()), blobs / "0", metadata={"format": "pt"})
    (blobs / "1").write_text("{}")
    (tmp_path / "base").mkdir()
    for number, name in enumerate(("model.safetensors", "config.json")):
        (tmp_path / "base" / name).symlink_to(blobs / str(number))
    (tmp_path / "base" / "pytorch_model.bin").write_bytes(b"the same once more")
    return tmp_path / "base"


@pytest.fixture
def stream(tmp_path: Path, base: Path) -> Stream:
    made = Stream(tmp_path / "stream", weights_in(base))
    train(made, 3)
    return made


def train(stream: Stream, number: int = 1, names: Any = NAMES) -> None:
    for _ in range(number):
        state = stream.were[max(stream.were)]
        stream.publish({name: state[name] + 1 for name in names})


def assert_is(into: Path | torch.nn.Module, stream: Stream, version: int) -> None:
    found = dict(into.state_dict()) if isinstance(into, torch.nn.Module) else weights_in(into)
    assert_same(found, stream.were[version])


# --- the model that all began with --------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksums", ["xxh3-128", "adler32"])
def test_a_stream_of_deltas_begins_with_the_model_that_is_given_as_its_base(checksums, encoding, base, tmp_path):
    stream = Stream(tmp_path / "stream", weights_in(base), encoding=encoding, checksums=checksums)
    train(stream, 2)
    stream.publish({})  # in which nothing has changed
    train(stream, 2, names=("norm",))
    local, model = tmp_path / "local", Model()
    with Subscriber(stream.root, base=base) as subscriber:
        assert subscriber.versions() == [1, 2, 3, 4, 5]
        for version, before in ((2, None), (5, 2), (1, None), (0, None), (3, 0)):
            for into in (local, model):
                report = subscriber.pull(into, version)
                assert (report.version, report.base) == (version, before)
                assert_is(into, stream, version)
        assert subscriber.pull(local, 3).num_versions == 0
    assert sorted(name for name in os.listdir(local) if name[0] != ".") == [
        "config.json",
        "model.safetensors",
    ]


def test_a_base_of_several_files_is_one(base, tmp_path):
    state = weights_in(base)
    (base / "model.safetensors").unlink()
    files = {name: f"model-{number:05d}-of-00004.safetensors" for number, name in enumerate(NAMES)}
    for name, file in files.items():
        save_file({name: state[name]}, base / file)
    (base / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    stream = Stream(tmp_path / "stream", state)
    train(stream)
    Subscriber(stream.root, base=base).pull(tmp_path / "local")
    assert_is(tmp_path / "local", stream, 1)
    assert json.loads((tmp_path / "local" / INDEX).read_text())["weight_map"] == files


def test_without_a_base_the_error_names_the_argument(stream, tmp_path):
    with pytest.raises(
        NotCommittedError,
        match=r"version 0 does not exist, and version 1 is a delta against it; there are 1 to 3; .*base=",
    ):
        Subscriber(stream.root).pull(tmp_path / "local")


def test_a_base_stands_for_no_version_that_was_deleted(stream, base, tmp_path):
    shutil.rmtree(stream.folder(2))
    with pytest.raises(NotCommittedError, match="version 2 does not exist"):
        Subscriber(stream.root, base=base).pull(tmp_path / "local")


def test_a_base_whose_weights_are_others_is_refused_and_the_right_one_is_begun_with_then(stream, base, tmp_path):
    other, local = tmp_path / "other", tmp_path / "local"
    other.mkdir()
    save_file({name: tensor + 3 for name, tensor in weights_in(base).items()}, other / "model.safetensors")
    with pytest.raises(CorruptCheckpointError, match="do not have the checksum"):
        Subscriber(stream.root, base=other).pull(local)
    Subscriber(stream.root, base=base).pull(local)
    assert_is(local, stream, 3)
    save_file({"norm": torch.ones(5, dtype=torch.bfloat16)}, other / "model.safetensors")
    with pytest.raises(StateMismatchError, match="another model"):
        Subscriber(stream.root, base=other).pull(tmp_path / "new")


def test_a_base_of_a_publishers_delta_has_the_weights_that_it_names(tmp_path):
    """The anchor was deleted, and somebody has kept a copy of it."""
    with Line(tmp_path / "weights") as line:
        line.publish(7, 8)
        line.publisher._wait()
    shutil.move(line.folder(7), tmp_path / "kept")
    Subscriber(line.root, base=tmp_path / "kept").pull(tmp_path / "local")
    line.assert_is(8, tmp_path / "local")
    path = tmp_path / "kept" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="its base is not the weights of version 7"):
        Subscriber(line.root, base=tmp_path / "kept").pull(tmp_path / "new")


def test_a_base_that_is_no_folder_or_has_no_weights_is_refused(stream, base, tmp_path):
    for wrong in (tmp_path / "nowhere", base / "config.json"):
        with pytest.raises(NotADirectoryError, match="is not a folder"):
            Subscriber(stream.root, base=wrong)
    with pytest.raises(ValueError, match="not a local path"):
        Subscriber(stream.root, base="s3://bucket/model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorruptCheckpointError, match=r"model.safetensors: it is missing"):
        Subscriber(stream.root, base=tmp_path / "empty").pull(tmp_path / "local")
    with pytest.raises(CorruptCheckpointError, match="it is the index of a delta"):
        Subscriber(stream.root, base=stream.folder(1)).pull(tmp_path / "local")
    (base / ".weight_sync").mkdir()
    with pytest.raises(ValueError, match="the base itself"):
        Subscriber(stream.root, base=base).pull(base)


# --- checksums ----------------------------------------------------------------------------------------------------


def test_checksums_that_cannot_be_computed_here_are_refused_by_name(stream, base, tmp_path, monkeypatch):
    path = stream.folder(1) / INDEX
    for told, wanted in (
        ("blake3", "needs the package blake3"),
        ("md5", "checksum_format is 'md5'; only xxh3"),
    ):
        index = json.loads(path.read_text())
        index["metadata"]["checksum_format"] = told
        path.write_text(json.dumps(index))
        monkeypatch.setitem(sys.modules, "blake3", None)
        with pytest.raises(CorruptCheckpointError, match=wanted):
            Subscriber(stream.root, base=base).pull(tmp_path / "local")


def test_checksums_of_blake3_are_compared_where_it_is_installed(base, tmp_path, monkeypatch):
    """Another hash stands for it, where it is not."""
    try:
        import blake3  # noqa: F401
    except ImportError:
        made = types.ModuleType("blake3")
        made.__spec__ = importlib.machinery.ModuleSpec("blake3", None)
        made.blake3 = hashlib.sha256  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "blake3", made)
    stream = Stream(tmp_path / "stream", weights_in(base), checksums="blake3")
    train(stream, 2)
    Subscriber(stream.root, base=base).pull(tmp_path / "local")
    assert_is(tmp_path / "local", stream, 2)


# --- what another receiver has applied ----------------------------------------------------------------------------


def marked(local: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((local / ".weight_sync" / "state.json").read_text())
    return found


@pytest.mark.parametrize("given", [True, False], ids=["base", "no base"])
def test_a_folder_that_another_receiver_has_filled_is_gone_on_from(given, stream, base, tmp_path):
    local = tmp_path / "local"
    receiver.pull(local, stream.root, 2, base)
    subscriber = Subscriber(stream.root, base=base if given else None)
    report = subscriber.pull(local)
    assert (report.base, report.num_versions) == (2, 1)
    assert_is(local, stream, 3)
    assert subscriber.pull(local).num_versions == 0
    train(stream, 2)
    receiver.pull(local, stream.root, 4, base)
    assert subscriber.pull(local).base == 4
    assert_is(local, stream, 5)


def test_a_version_that_another_receiver_has_is_there_and_noted_then(stream, base, tmp_path):
    local = tmp_path / "local"
    receiver.pull(local, stream.root, 3, base)
    before = (local / "model.safetensors").stat().st_ino
    assert Subscriber(stream.root).pull(local).num_versions == 0
    assert marked(local)["checksums"].keys() == {*NAMES}
    assert (local / "model.safetensors").stat().st_ino == before


def half_applied(stream: Stream, local: Path) -> None:
    """The receiver was killed in the middle of version 3: its marker says 2 still."""
    state = weights_in(local)
    save_file({**state, "layer.bias": stream.were[3]["layer.bias"]}, local / "model.safetensors")


@pytest.mark.parametrize("target", [2, 3])
def test_what_another_receiver_has_half_applied_is_no_version(target, stream, base, tmp_path):
    local = tmp_path / "local"
    receiver.pull(local, stream.root, 2, base)
    half_applied(stream, local)
    before = files_below(local)
    with pytest.raises((CorruptCheckpointError, NotCommittedError)):
        Subscriber(stream.root).pull(local, target)
    assert files_below(local) == before
    assert Subscriber(stream.root, base=base).pull(local, target).base is None
    assert_is(local, stream, target)


@pytest.mark.parametrize("by_us", [False, True], ids=["by another", "by us"])
def test_a_stream_that_was_begun_anew_is_not_mixed_with_the_one_before(by_us, stream, base, tmp_path):
    """The same numbers of another training, whose next delta leaves alone what differs."""
    local = tmp_path / "local"
    if by_us:
        Subscriber(stream.root, base=base).pull(local, 2)
    else:
        receiver.pull(local, stream.root, 2, base)
    shutil.rmtree(stream.root)
    again = Stream(stream.root, weights_in(base))
    train(again, 2, names=("norm", "layer.bias"))
    train(again, 1, names=("norm",))
    for target in (2, 3):
        copy = tmp_path / f"copy-{target}"
        shutil.copytree(local, copy)
        assert Subscriber(again.root, base=base).pull(copy, target).base is None
        assert_is(copy, again, target)


def test_what_is_known_by_the_very_index_is_not_proven_again(stream, base, tmp_path, monkeypatch):
    local, subscriber = tmp_path / "local", Subscriber(stream.root, base=base)
    subscriber.pull(local, 2)
    monkeypatch.setattr("async_ckpt.weights.publishing.live_weights._Update._was_made", None)
    assert subscriber.pull(local, 2).num_versions == 0
    assert subscriber.pull(local, 3).base == 2
    subscriber.pull(tmp_path / "first", 0)
    assert subscriber.pull(tmp_path / "first", 0).num_versions == 0
    shutil.rmtree(stream.root)
    (stream.folder(1)).mkdir(parents=True)
    shutil.copyfile(base / "model.safetensors", stream.folder(1) / "model.safetensors")
    subscriber.pull(tmp_path / "bare", 1)
    assert subscriber.pull(tmp_path / "bare", 1).num_versions == 0


def test_a_base_that_has_become_another_is_begun_with_anew(stream, base, tmp_path):
    local = tmp_path / "local"
    Subscriber(stream.root, base=base).pull(local, 0)
    (base / "model.safetensors").unlink()
    save_file({**stream.were[0], "norm": stream.were[0]["norm"] * 3}, base / "model.safetensors")
    again = Stream(tmp_path / "again", weights_in(base))
    train(again, names=("layer.bias",))
    Subscriber(again.root, base=base).pull(local)
    assert_is(local, again, 1)


def test_what_another_receiver_has_of_a_full_version_is_compared_with_it(base, tmp_path):
    """Of what deltas have not changed, the full version tells."""
    stream = Stream(tmp_path / "stream", weights_in(base))
    shutil.copytree(base, stream.folder(1))
    stream.were[1] = stream.were[0]
    train(stream, 2, names=("norm",))
    for harm in (False, True):
        local = tmp_path / f"local-{harm}"
        receiver.pull(local, stream.root, 2)
        if harm:
            save_file({**weights_in(local), "layer.bias": torch.zeros(4)}, local / "model.safetensors")
        assert Subscriber(stream.root).pull(local).base == (None if harm else 2)
        assert_is(local, stream, 3)


def test_a_damaged_delta_of_others_takes_nothing_away_also_where_there_is_no_anchor(stream, base, tmp_path):
    local = tmp_path / "local"
    Subscriber(stream.root, base=base).pull(local, 2)
    path = stream.folder(3) / "model-00000-of-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 8
    path.write_bytes(data)
    before = files_but_the_marker(local)
    with pytest.raises(CorruptCheckpointError):
        Subscriber(stream.root).pull(local)
    assert files_but_the_marker(local) == before


def test_a_sealed_delta_without_its_base_is_refused(tmp_path):
    """One that was forged, with a digest that is right."""
    with Line(tmp_path / "weights") as line:
        line.publish(1, 2)
    path = line.folder(2) / INDEX
    told = json.loads(path.read_text())
    del told["metadata"]["async_ckpt"]["base_identity"]
    told["metadata"]["async_ckpt"]["digest"] = "0" * 32
    path.write_bytes(seal(json.dumps(told).encode()))
    with pytest.raises(CorruptCheckpointError, match="its base_identity is None"):
        async_ckpt.Subscriber(line.root).pull(tmp_path / "local")
