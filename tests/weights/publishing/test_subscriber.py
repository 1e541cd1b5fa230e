"""`Subscriber`: what it makes of versions, and of all that can be wrong with them; and where a pull that died is taken up."""

import fcntl
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import receiver
import torch
from disks import mounted, needs_mount
from exported import assert_loads, assert_same, gpt2, spoil, state_of
from published import Line, as_others_write, changed, edit, files_below, flip, weights_below
from racing import Call, until
from safetensors.torch import save_file
from slices import some

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported

import transformers

from async_ckpt import (
    ClosedError,
    CorruptCheckpointError,
    NotCommittedError,
    Place,
    Publisher,
    PullReport,
    StateMismatchError,
    StorageFullError,
    StorageUnavailableError,
    Subscriber,
)
from async_ckpt.core.storage.place import storage_at
from async_ckpt.weights.delta import INDEX, checksum
from async_ckpt.weights.publishing import folder_replica as folders
from async_ckpt.weights.publishing import version_files

LAST = 4


@pytest.fixture
def line(tmp_path: Path) -> Line:
    """Versions 1 to 4 of a model: an anchor, and three deltas."""
    with Line(tmp_path / "weights") as made:
        made.publish(*range(1, LAST + 1))
        made.publisher._wait()
    return made


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


# --- what a pull makes --------------------------------------------------------------------------------------------


def test_a_pull_begins_with_what_is_there(line, local):
    subscriber = line.subscriber()
    reports = [
        subscriber.pull(local, 2),
        subscriber.pull(local),
        subscriber.pull(local),
        subscriber.pull(local, 1),
    ]

    assert [(r.version, r.base, r.num_versions) for r in reports] == [
        (2, None, 2),
        (4, 2, 2),
        (4, 4, 0),
        (1, None, 1),
    ]
    assert reports[2].num_bytes == 0 < reports[1].num_bytes
    assert str(reports[1]).startswith("version 4 from 2: 2 versions, ")
    assert str(reports[2]) == "version 4 was there already"
    line.assert_is(1, local)
    assert subscriber.versions() == [1, 2, 3, 4]
    assert subscriber.latest() == 4


def test_a_report_has_the_same_numbers_for_every_pull():
    first = PullReport(3, None, 1, 10, 0.5).as_dict("w/")
    assert first.keys() == PullReport(4, 3, 1, 10, 0.5).as_dict("w/").keys()
    assert first["w/base"] != first["w/base"]


def test_a_module_gets_all_bits_or_none(line):
    model = gpt2()
    subscriber = line.subscriber()
    subscriber.pull(model, 2)
    line.assert_is(2, model)
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    spoil(model)  # somebody has changed it: it is the version again afterwards
    subscriber.pull(model, 2)
    line.assert_is(2, model)
    flip(line.folder(4) / "model-00001.safetensors", -1)
    with pytest.raises(CorruptCheckpointError):
        subscriber.pull(model)
    line.assert_is(2, model)
    subscriber.pull(model, 3)
    line.assert_is(3, model)


def test_a_wrapped_module_is_filled_too_and_one_on_a_device(sim, line):
    compiled: Any = torch.compile(gpt2(), backend="eager")
    on_device = gpt2().to("sim")
    on_device.tie_weights()  # again: this device is no other's
    for module in (compiled, on_device):
        line.subscriber().pull(module)
        found = {name.removeprefix("_orig_mod."): t.cpu() for name, t in module.state_dict().items()}
        assert_same(found, line.were[LAST])


def test_the_memory_for_a_module_goes_with_it(line):
    subscriber = line.subscriber()
    model = gpt2()
    subscriber.pull(model)
    assert len(subscriber._modules) == 1
    del model
    until(lambda: len(subscriber._modules) == 0)


def test_a_pulled_folder_is_an_ordinary_one(line, local):
    line.subscriber().pull(local)

    assert_loads(local, line.were[LAST], transformers.GPT2LMHeadModel)
    assert sorted(weights_below(local)) == ["config.json", "generation_config.json", "model.safetensors"]


def test_what_another_receiver_has_applied_is_gone_on_from_and_ours_by_it(line, local):
    """It is what its marker says: all of its bytes have the digest of that version."""
    receiver.pull(local, line.folder(1).parent, 2)
    assert line.subscriber().pull(local, 3).base == 2
    line.assert_is(3, local)
    receiver.pull(local, line.folder(1).parent, 4)
    line.assert_is(4, local)


def test_versions_that_others_have_written_are_pulled(line, local):
    """Without identities, structures and digests; the checksums of tensors are part of the protocol."""
    for version in range(1, LAST + 1):
        as_others_write(line.folder(version))
    subscriber = line.subscriber()
    subscriber.pull(local, 2)
    assert subscriber.pull(local).base == 2
    line.assert_is(LAST, local)
    assert_loads(local, line.were[LAST], transformers.GPT2LMHeadModel)


# --- watch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, float("nan"), True, "1", None])
def test_a_time_between_polls_that_is_none_is_refused(value, tmp_path):
    with Subscriber(tmp_path) as subscriber, pytest.raises(ValueError, match="poll_seconds must be"):
        subscriber.watch(poll_seconds=value)


def test_watch_yields_each_version_as_it_comes_and_leaves_out_what_was_overtaken(tmp_path):
    with Line(tmp_path / "weights") as line, line.subscriber() as subscriber:
        seen = subscriber.watch(poll_seconds=0.001)
        line.publish(1)
        assert next(seen) == 1
        line.publish(2, 3)
        assert next(seen) == 3
        waiting = Call(lambda: next(seen))
        line.publish(5)
        assert waiting.outcome() == 5
        ending = Call(lambda: list(seen))
        subscriber.close()
        assert ending.outcome() == []


def test_a_poll_of_a_bucket_is_one_request(bucket, proxy, s3, monkeypatch):
    place = Place(f"s3://{bucket}/weights", options=s3.options)
    with Line(place) as line:
        line.publish(1, 2)
    subscriber = line.subscriber()
    asked: list[str] = []
    for name in ("names", "existing", "read", "exists"):
        real = getattr(type(subscriber._versions.storage), name)
        monkeypatch.setattr(
            type(subscriber._versions.storage),
            name,
            lambda self, *a, _real=real, _n=name: (asked.append(_n), _real(self, *a))[1],
        )
    subscriber.pull(gpt2())
    subscriber.latest()  # learns who publishes here
    asked.clear()
    assert subscriber.versions() == [1, 2]
    assert asked == ["names"]


# --- what is wrong with versions ----------------------------------------------------------------------------------


def test_bytes_behind_the_tensors_of_an_anchor_are_refused(tmp_path, local):
    folder = tmp_path / "weights" / "weight_v000001"
    folder.mkdir(parents=True)
    save_file({"weight": torch.ones(5)}, folder / "model.safetensors")
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"more")
    assert Subscriber(tmp_path / "weights").versions() == []
    (folder / INDEX).write_text(json.dumps({"weight_map": {"weight": "model.safetensors"}}))
    with pytest.raises(CorruptCheckpointError, match="4 bytes after its last tensor"):
        Subscriber(tmp_path / "weights").pull(local)


def no_such(line: Line) -> int:
    return 9


def no_base(line: Line) -> int:
    """Retention, or a careless hand, has deleted it."""
    shutil.rmtree(line.folder(3))
    return 4


def no_anchor(line: Line) -> int:
    shutil.rmtree(line.folder(1))
    return 4


def half_written(line: Line) -> int:
    (line.folder(4) / INDEX).unlink()
    return 4


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (no_such, "version 9 does not exist; there are 1 to 4"),
        (no_base, "version 3 does not exist, and version 4 is a delta against it; there are 1 to 4"),
        (half_written, "version 4 does not exist; there are 1 to 3"),
    ],
)
def test_a_gap_is_an_error_that_says_what_is_missing_and_the_last_good_version_stays(harm, told, line, local):
    subscriber = line.subscriber()
    subscriber.pull(local, 2)
    before = files_below(local)
    target = harm(line)
    with pytest.raises(NotCommittedError, match=told):
        Subscriber(line.root).pull(local, target)

    assert files_below(local) == before
    assert Subscriber(line.root).pull(local, 2).num_versions == 0


def test_without_its_anchor_a_chain_is_of_use_only_to_who_is_on_it(line, local, tmp_path):
    line.subscriber().pull(local, 2)
    no_anchor(line)
    assert Subscriber(line.root).pull(local).version == 4
    line.assert_is(4, local)
    with pytest.raises(NotCommittedError, match="version 1 does not exist, and version 2 is a delta against it"):
        Subscriber(line.root).pull(tmp_path / "other")


def test_an_empty_root_has_no_version(tmp_path, local):
    subscriber = Subscriber(tmp_path / "weights")
    assert subscriber.versions() == []
    assert subscriber.latest() is None
    with pytest.raises(NotCommittedError, match="no version is published yet"):
        subscriber.pull(local)


def lost_file(line: Line) -> None:
    (line.folder(3) / "model-00001.safetensors").unlink()


def truncated(line: Line) -> None:
    path = line.folder(3) / "model-00001.safetensors"
    os.truncate(path, path.stat().st_size - 1)


def truncated_of_others(line: Line) -> None:
    as_others_write(line.folder(3))
    truncated(line)


def flipped(line: Line) -> None:
    flip(line.folder(3) / "model-00001.safetensors", -40)


def flipped_of_others(line: Line) -> None:
    """The last tensor is damaged: those before it have been applied when that is found, and are put back."""
    as_others_write(line.folder(3))
    flipped(line)


def no_safetensors(line: Line) -> None:
    (line.folder(3) / "model-00001.safetensors").write_bytes(b"no")
    as_others_write(line.folder(3))


def no_index(line: Line) -> None:
    (line.folder(3) / INDEX).write_text("[]")


def index_of_another(line: Line) -> None:
    shutil.copyfile(line.folder(2) / INDEX, line.folder(3) / INDEX)


def base_above(line: Line) -> None:
    edit(line.folder(3), lambda told: told["metadata"].update(base_version="000003"))


def other_encoding(line: Line) -> None:
    edit(line.folder(3), lambda told: told["metadata"].update(delta_encoding="add"))


def other_checksums(line: Line) -> None:
    edit(line.folder(3), lambda told: told["metadata"].update(checksum_format="md5"))


def fewer_tensors(line: Line) -> None:
    edit(line.folder(3), lambda told: told["weight_map"].popitem())


def leads_outside(line: Line) -> None:
    edit(line.folder(3), lambda told: told["weight_map"].update(x="../../etc/passwd"))


def wrong_identity(line: Line) -> None:
    edit(line.folder(3), lambda told: told["metadata"]["async_ckpt"].update(identity="0" * 32))


def out_of_order(line: Line) -> None:
    """The bytes of version 4 under the name of version 3: they are against version 3."""
    shutil.rmtree(line.folder(3))
    shutil.copytree(line.folder(4), line.folder(3))
    edit(line.folder(3), lambda told: told["metadata"].update(version="000003", base_version="000002"))
    as_others_write(line.folder(3))


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lost_file, "it is missing"),
        (truncated, "not those that were published"),
        (truncated_of_others, "is no frame|cut off"),
        (flipped, "not those that were published"),
        (flipped_of_others, "checksum|the frame"),
        (no_safetensors, "not a safetensors file"),
        (no_index, "not the index of a version"),
        (index_of_another, "it is the index of version 2"),
        (base_above, "which is not before it"),
        (other_encoding, "its delta_encoding is 'add'; only xor, overwrite can be applied"),
        (other_checksums, "its checksum_format is 'md5'; only xxh3-128, adler32, blake3 can"),
        (fewer_tensors, "other tensors than its files hold"),
        (leads_outside, "is not the name of a file of its folder"),
        (wrong_identity, "not those of the version"),
        (out_of_order, "do not have the checksum"),
    ],
)
def test_a_damaged_delta_is_an_error_and_the_last_good_version_stays(harm, told, line, local):
    harm(line)
    subscriber = line.subscriber()
    model = gpt2()
    subscriber.pull(local, 2)
    subscriber.pull(model, 2)
    before = files_below(local)
    for into in (local, model):
        with pytest.raises(CorruptCheckpointError, match=told) as caught:
            subscriber.pull(into, 3)
        assert str(line.folder(3)) in str(caught.value)
        line.assert_is(2, into)
    assert weights_below(local) == {name: data for name, data in before.items() if not name.startswith(".")}
    assert Subscriber(line.root).pull(local, 2).num_versions == 0
    with Line(line.root, line.model) as again:  # an anchor ends it
        again.publish(5)
        subscriber.pull(local)
        again.assert_is(5, local)


def flip_weights(anchor: Path) -> None:
    flip(anchor / "model.safetensors", -40)


def cut_weights(anchor: Path) -> None:
    path = anchor / "model.safetensors"
    os.truncate(path, path.stat().st_size - 4)


def other_config(anchor: Path) -> None:
    flip(anchor / "config.json", 20)


def no_weights(anchor: Path) -> None:
    (anchor / "model.safetensors").unlink()


def no_config(anchor: Path) -> None:
    (anchor / "config.json").unlink()


def other_structure(anchor: Path) -> None:
    edit(anchor, lambda told: told["metadata"]["async_ckpt"].update(structure="0" * 32))


@pytest.mark.parametrize(
    "harm",
    [flip_weights, cut_weights, other_config, no_weights, no_config, other_structure],
    ids=lambda f: f.__name__,
)
def test_a_damaged_anchor_takes_nothing_away(harm, tmp_path, local):
    with Line(tmp_path / "weights", encoding=None) as line:
        line.publish(1, 2)
    subscriber = line.subscriber()
    model = gpt2()
    subscriber.pull(local, 1)
    subscriber.pull(model, 1)
    before = files_below(local)
    harm(line.folder(2))
    with pytest.raises(CorruptCheckpointError) as caught:
        subscriber.pull(local)
    assert str(line.folder(2)) in str(caught.value)
    if harm not in (other_config, no_config):  # of which a module has no use
        with pytest.raises(CorruptCheckpointError):
            subscriber.pull(model)
    assert files_below(local) == before
    if harm not in (other_config, no_config):
        line.assert_is(1, model)
    assert sorted(os.listdir(tmp_path)) == ["local", "weights"]


def test_a_half_written_version_is_waited_past(line, local):
    """As a store shows one, whose index is written last."""
    (line.folder(4) / INDEX).unlink()
    subscriber = line.subscriber()

    assert subscriber.pull(local).version == 3
    line.assert_is(3, local)


# --- who pulls ----------------------------------------------------------------------------------------------------


def test_a_receiver_of_another_model_is_refused_and_keeps_what_it_has(line, tmp_path, local):
    other = {"weight": torch.ones(3)}
    with Publisher(tmp_path / "other") as publisher:
        publisher.publish(other, 1).result()
    Subscriber(tmp_path / "other").pull(local)
    before = files_below(local)
    with pytest.raises(StateMismatchError, match="of another model than the weights here"):
        line.subscriber().pull(local)
    assert files_below(local) == before
    larger = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=99))
    in_bfloat16 = gpt2().to(torch.bfloat16)
    deeper = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, n_positions=16)
    )
    for model, told in [
        (larger, "of another dtype or shape"),
        (in_bfloat16, "of another dtype or shape"),
        (deeper, "missing in the version: transformer.h.2"),
        (torch.nn.Linear(3, 3), "unknown to the module: transformer"),
    ]:
        were = state_of(model)
        with pytest.raises(StateMismatchError, match=told):
            line.subscriber().pull(model)
        assert_same(dict(model.state_dict()), were)


def test_a_delta_of_another_model_is_refused(line, local):
    """One that was written by others, so that nothing but its tensors tells."""
    subscriber = line.subscriber()
    subscriber.pull(local, 2)
    with Publisher(line.root + "-other" if isinstance(line.root, str) else line.root.with_name("other")) as publisher:
        publisher.publish({"weight": torch.ones(3)}, 2).result()
        publisher.publish({"weight": torch.zeros(3)}, 3).result()
    shutil.rmtree(line.folder(3))
    shutil.copytree(line.root.with_name("other") / line.folder(3).name, line.folder(3))
    as_others_write(line.folder(3))
    with pytest.raises(StateMismatchError, match=r"such as 'weight'"):
        subscriber.pull(local, 3)
    line.assert_is(2, local)


def test_a_training_that_was_set_back_is_followed_by_what_it_publishes_now(line, local):
    """Version 4 is another one now, against the same number: what was pulled is not taken for its base."""
    line.subscriber().pull(local)
    for version in (3, 4):
        shutil.rmtree(line.folder(version))
    with Line(line.root, gpt2()) as again:
        again.publish(3, 4, 5)
        Subscriber(line.root).pull(local, 4)
        again.assert_is(4, local)
        Subscriber(line.root).pull(local)
        again.assert_is(5, local)


def test_a_root_that_is_emptied_and_filled_anew_is_followed(line, local):
    """The same numbers, of other weights: nothing that was read before is believed."""
    subscriber, model = line.subscriber(), gpt2()
    subscriber.pull(local)
    subscriber.pull(model)
    line.publisher._wait()
    shutil.rmtree(line.root)
    with Line(line.root, gpt2()) as again:
        again.publish(*range(1, LAST + 1))
    for into in (local, model):
        assert subscriber.pull(into).base is None
        again.assert_is(LAST, into)


def test_a_folder_with_other_files_is_refused_and_one_elsewhere(line, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileExistsError, match="new or empty"):
        line.subscriber().pull(tmp_path / "mine")
    with pytest.raises(NotADirectoryError, match="is a file"):
        line.subscriber().pull(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="is a file; give the folder with the versions"):
        Subscriber(tmp_path / "file").versions()
    with pytest.raises(ValueError, match="not a local path"):
        line.subscriber().pull("s3://bucket/x")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "x"


@needs_mount
def test_a_disk_that_fills_takes_nothing_away(tmp_path):
    state = {"weight": torch.randn(2**20)}
    with Publisher(tmp_path / "weights", encoding=None) as publisher:
        publisher.publish(state, 1).result()
        state["weight"].neg_()
        publisher.publish(state, 2).result()
    with mounted(tmp_path / "small", "size=7m") as folder:
        Subscriber(tmp_path / "weights").pull(folder / "local", 1)
        before = files_below(folder)
        with pytest.raises(StorageFullError):
            Subscriber(tmp_path / "weights").pull(folder / "local")
        assert files_below(folder) == before


def test_pulls_into_one_folder_come_one_after_the_other(line, local, monkeypatch, gate):
    real = folders.FolderReplica.seed

    def seed(self: Any, anchor: Any) -> int:
        gate.passed()
        return real(self, anchor)

    monkeypatch.setattr(folders.FolderReplica, "seed", seed)
    first = Call(lambda: line.subscriber().pull(local, 1))
    gate.wait_reached()
    begun = threading.Event()
    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: (begun.set(), flock(fd, how))[1])
    second = Call(lambda: line.subscriber().pull(local, 2))
    assert begun.wait(60)
    gate.open()

    assert (first.outcome().num_versions, second.outcome().base) == (1, 1)
    line.assert_is(2, local)


def test_two_pulls_of_one_subscriber_at_once_are_refused_and_a_closed_one(line, local, monkeypatch, gate):
    subscriber = line.subscriber()
    real = folders.FolderReplica.seed
    monkeypatch.setattr(folders.FolderReplica, "seed", lambda self, anchor: (gate.passed(), real(self, anchor))[1])
    first = Call(lambda: subscriber.pull(local))
    gate.wait_reached()
    with pytest.raises(RuntimeError, match="use one for each thread"):
        subscriber.pull(gpt2())
    gate.open()
    first.outcome()
    subscriber.close()
    for use in (lambda: subscriber.pull(local), subscriber.versions, subscriber.latest):
        with pytest.raises(ClosedError):
            use()


# --- who has died -------------------------------------------------------------------------------------------------

PULLS = """
import sys, async_ckpt, children
from async_ckpt.weights.publishing import live_weights
root, local, disk_call, change = sys.argv[1:]
subscriber = async_ckpt.Subscriber(root)
subscriber.pull(local, 2)
print("pulled", flush=True)
count, real, changes = children.die_at(int(disk_call)), live_weights.apply, []
def apply(*arguments):
    if len(changes) == int(change):
        import os, signal
        os.kill(os.getpid(), signal.SIGKILL)
    changes.append(arguments)
    return real(*arguments)
live_weights.apply = apply
subscriber.pull(local)
subscriber.pull(local, 1)
print("calls", count(), "changes", len(changes))
"""


def assert_taken_up(line: Line, folder: Path) -> None:
    """What a killed pull has left is a version, or the next pull begins anew; no other takes it for what it is not."""
    other = folder.with_name(folder.name + "-other")
    shutil.copytree(folder, other)
    for into, pull in (
        (folder, lambda: line.subscriber().pull(folder)),
        (other, lambda: receiver.pull(other, Path(line.root), LAST)),
    ):
        pull()
        line.assert_is(LAST, into)
    line.subscriber().pull(folder, 1)
    assert not [name for name in os.listdir(folder.parent) if name.startswith(f".{folder.name}.")]


def test_a_pull_that_is_killed_at_any_call_that_changes_the_disk_is_taken_up(line, tmp_path, nursery):
    ended = nursery.run(PULLS, line.root, tmp_path / "whole", 0, -1)
    num_calls = int(ended.out.split()[-3])
    assert num_calls > 5
    for number in some(range(1, num_calls + 1), 15):
        folder = tmp_path / "locals" / f"{number}"
        ended = nursery.run(PULLS, line.root, folder, number, -1)
        assert (ended.status, ended.out) == (-9, "pulled\n")
        assert_taken_up(line, folder)


@pytest.mark.parametrize("change", some(range(30), 15))
def test_a_pull_that_is_killed_with_half_of_a_delta_applied_is_taken_up(change, line, tmp_path, nursery):
    folder = tmp_path / "locals" / "killed"
    ended = nursery.run(PULLS, line.root, folder, 0, change)
    assert (ended.status, ended.out) == (-9, "pulled\n")
    assert_taken_up(line, folder)


def test_after_a_restart_of_the_machine_every_byte_is_compared(line, local, monkeypatch):
    subscriber = line.subscriber()
    subscriber.pull(local, 2)
    monkeypatch.setattr(folders, "boot_id", lambda: "another")
    assert subscriber.pull(local, 2).num_versions == 0
    assert subscriber.pull(local, 3).base == 2
    line.assert_is(3, local)
    monkeypatch.setattr(folders, "boot_id", lambda: "yet another")
    flip(local / "model.safetensors", -1)  # which was not synced
    assert subscriber.pull(local, 3).base is None
    line.assert_is(3, local)
    monkeypatch.setattr(folders, "boot_id", lambda: "and another")
    os.truncate(local / "model.safetensors", 5)
    assert subscriber.pull(local).base is None
    line.assert_is(4, local)
    monkeypatch.setattr(folders, "boot_id", lambda: "")  # nobody can tell
    assert subscriber.pull(local).num_versions == 0


def lose_weights(local: Path) -> None:
    (local / "model.safetensors").unlink()


def lose_config(local: Path) -> None:
    (local / "config.json").unlink()


def cut_local(local: Path) -> None:
    os.truncate(local / "model.safetensors", 5)


def flip_local(local: Path) -> None:
    for at in range(2000, 60_000, 50):  # wherever the next delta changes something
        flip(local / "model.safetensors", at)


def flip_header(local: Path) -> None:
    flip(local / "model.safetensors", 10)


@pytest.mark.parametrize(
    "harm", [lose_weights, lose_config, cut_local, flip_local, flip_header], ids=lambda f: f.__name__
)
def test_a_folder_that_was_harmed_meanwhile_begins_with_an_anchor_again(harm, line, local):
    subscriber = line.subscriber()
    subscriber.pull(local, 2)
    harm(local)
    subscriber.pull(local, 3)
    line.assert_is(3, local)
    assert_loads(local, line.were[3], transformers.GPT2LMHeadModel)
    assert subscriber.pull(local, 3).num_versions == 0


def test_files_of_the_user_stay_in_the_folder_and_those_of_versions_go(tmp_path, local):
    config = tmp_path / "config"
    (config / "additional_chat_templates").mkdir(parents=True)
    for name in ("additional_chat_templates/tool.jinja", "config.json", "old.json"):
        (config / name).write_text("{}")
    state = {"weight": torch.randn(1000)}
    with Publisher(tmp_path / "weights", encoding=None) as publisher:
        publisher.publish(state, 1, config).result()
        Subscriber(tmp_path / "weights").pull(local)
        (local / "notes.txt").write_text("mine")
        (local / "sub").mkdir()
        (local / "sub" / "more.txt").write_text("mine")
        shutil.rmtree(config / "additional_chat_templates")
        (config / "old.json").unlink()
        publisher.publish(state, 2, config).result()
        Subscriber(tmp_path / "weights").pull(local)
    assert sorted(weights_below(local)) == ["config.json", "model.safetensors", "notes.txt", "sub/more.txt"]
    assert sorted(os.listdir(local)) == [
        ".weight_sync", "config.json", "model.safetensors", "notes.txt", "sub"
    ]  # fmt: skip
    assert sorted(os.listdir(local / ".weight_sync")) == ["files.json", "lock", "state.json"]


def test_an_anchor_whose_files_cannot_take_their_places_leaves_those_that_were_there(line, local, monkeypatch):
    line.subscriber().pull(local, 2)
    before = weights_below(local)
    real = os.replace

    def replace(a: Any, b: Any, **folders: Any) -> None:
        is_new = os.readlink(f"/proc/self/fd/{folders['src_dir_fd']}").endswith("/new")
        if b == "model.safetensors" and is_new:
            monkeypatch.undo()
            raise OSError(5, "no luck")
        real(a, b, **folders)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(StorageUnavailableError, match="no luck"):
        line.subscriber().pull(local, 1)
    assert weights_below(local) == before
    assert line.subscriber().pull(local, 3).base == 2
    line.assert_is(3, local)


def test_a_folder_may_be_a_link(line, tmp_path):
    (tmp_path / "real").mkdir()
    for name, target in (("link", "real"), ("dangling", "nowhere")):
        (tmp_path / name).symlink_to(tmp_path / target)
        for version in (1, 3, 2):
            line.subscriber().pull(tmp_path / name, version)
            line.assert_is(version, tmp_path / name)
        assert (tmp_path / name).is_symlink()


@needs_mount
def test_a_folder_may_be_where_a_disk_is_mounted(line, tmp_path):
    with mounted(tmp_path / "mounted", "size=9m") as folder:
        (folder / "lost+found").mkdir()
        for version in (1, 3, 2):
            line.subscriber().pull(folder, version)
            line.assert_is(version, folder)


def test_what_is_pulled_while_it_is_deleted_is_an_error_and_the_next_pull_works(line, local, monkeypatch):
    real = version_files.VersionSource.open

    def open_(self: Any, file: str) -> Any:
        monkeypatch.undo()
        shutil.rmtree(line.folder(1))
        return real(self, file)

    subscriber = line.subscriber()
    monkeypatch.setattr(version_files.VersionSource, "open", open_)
    with pytest.raises(NotCommittedError, match="version 1 does not exist, and version 2 is a delta against it"):
        subscriber.pull(local)
    with Line(line.root, line.model) as again:
        again.publish(5)
    subscriber.pull(local)
    again.assert_is(5, local)


def test_a_bucket_that_loses_an_object_says_which(bucket, s3, local):
    place = Place(f"s3://{bucket}/weights", options=s3.options)
    with Line(place) as line:
        line.publish(1, 2)
    storage = storage_at(place)
    (file,) = (name for name in storage.sizes("weight_v000002") if name.endswith("/model-00001.safetensors"))
    file = f"weight_v000002/{file}"
    data = storage.read(file)[0]
    line.subscriber().pull(local, 1)
    for harm, told in [
        (lambda: storage.delete(file), "missing, or was deleted"),
        (
            lambda: storage.replace(file, data[:-9]),
            "not those that were published",
        ),
    ]:
        harm()
        with pytest.raises(CorruptCheckpointError, match=told):
            line.subscriber().pull(local)
        line.assert_is(1, local)
    storage.replace(file, data)
    line.subscriber().pull(local)
    line.assert_is(2, local)
    assert checksum(data)
    changed(line.model)
