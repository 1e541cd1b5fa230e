"""`Publisher`: what each version holds, what the next one is against, and what stays when one fails."""

import gc
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import receiver
import torch
from disks import mounted, needs_mount
from exported import (
    SMALL,
    assert_loads,
    assert_only,
    assert_same,
    gpt2,
    held_back,  # noqa: F401
    mixtral,
    spoil,
    state_of,
    weights_in,
)
from published import Line, changed, files_below, weights_below
from racing import Call
from safetensors.torch import save_file
from slices import some
from states import open_run

os.environ["HF_HUB_OFFLINE"] = "1"  # read when it is imported

import transformers

import async_ckpt
from async_ckpt import (
    ClosedError,
    NotCommittedError,
    Place,
    Publisher,
    StateMismatchError,
    StepBehindError,
    StepExistsError,
    StorageFullError,
    Subscriber,
    TornSnapshotError,
    UnsupportedStateError,
)
from async_ckpt.core.saving.kept_memory import host_memory
from async_ckpt.core.storage import store_facts
from async_ckpt.core.storage.place import storage_at
from async_ckpt.integrations.skyrl import CheckpointBackend
from async_ckpt.weights.delta import INDEX, folder_of, parse
from async_ckpt.weights.publishing import version_files
from async_ckpt.weights.publishing.delta_base import DeltaBase
from async_ckpt.weights.publishing.versions import Ownership
from examples.dispatch import LocalDispatch, Trainee

ENCODINGS = pytest.mark.parametrize("encoding", ["xor", "overwrite"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def index_at(folder: Path) -> Any:
    return parse((folder / INDEX).read_bytes(), int(folder.name.removeprefix("weight_v")))


# --- what a version holds -----------------------------------------------------------------------------------------


@ENCODINGS
def test_every_version_is_what_the_weights_were_at_its_call(encoding, root, tmp_path):
    with Line(root, anchor_every=3, encoding=encoding) as line, line.subscriber() as subscriber:
        twin = gpt2()
        for version in range(1, 6):
            line.publish(version)
            spoiled = state_of(line.model)
            subscriber.pull(tmp_path / "local")
            subscriber.pull(twin)

            line.assert_is(version, tmp_path / "local")
            line.assert_is(version, twin)
            assert_loads(tmp_path / "local", line.were[version], transformers.GPT2LMHeadModel)
            line.model.load_state_dict(spoiled)
    assert [index_at(line.folder(v)).is_anchor for v in range(1, 6)] == [True, False, False, True, False]


@ENCODINGS
@pytest.mark.parametrize("anchor_every", [3, 100])
def test_a_receiver_that_has_nothing_of_ours_applies_what_is_published_byte_for_byte(
    anchor_every, encoding, root, tmp_path
):
    with Line(root, anchor_every=anchor_every, encoding=encoding) as line:
        for version in range(1, 6):
            line.publish(version)
            receiver.pull(tmp_path / "follows", root, version)
            line.assert_is(version, tmp_path / "follows")
        receiver.pull(tmp_path / "late", root, 5)
        with line.subscriber() as subscriber:
            subscriber.pull(tmp_path / "ours")

    for local in ("follows", "late"):
        assert weights_in(tmp_path / local).keys() == weights_in(tmp_path / "ours").keys()
        line.assert_is(5, tmp_path / local)
    assert_loads(tmp_path / "late", line.were[5], transformers.GPT2LMHeadModel)


def test_an_anchor_is_the_folder_that_export_hf_writes_and_an_index(root, tmp_path):
    model = mixtral()
    with Publisher(root) as publisher:
        publisher.publish(model, 7).result()
    async_ckpt.export_hf(model, tmp_path / "hf").result()

    published = weights_below(root / "weight_v000007")
    assert json.loads(published.pop(INDEX))["metadata"]["version"] == "000007"
    assert published == weights_below(tmp_path / "hf")


def test_experts_that_are_one_tensor_in_memory_are_followed_by_their_names_in_checkpoints(root, tmp_path):
    line = Line(root, mixtral())
    with line, line.subscriber() as subscriber:
        for version in (1, 2):
            line.publish(version)
            subscriber.pull(tmp_path / "local")

            assert_loads(tmp_path / "local", line.were[version], transformers.MixtralForCausalLM)
        assert len(index_at(line.folder(2)).files) > len(line.model.state_dict())
        with pytest.raises(StateMismatchError, match="pull into a folder"):
            subscriber.pull(mixtral())


ODD_NAMES = [
    "model card (draft).md",
    "tokenizer+x.json",
    "vocab\u00e9.txt",
    "a,b.txt",
    "-dash.txt",
    "a..b.txt",
]


def test_config_and_tokenizer_come_with_an_anchor(root, tmp_path):
    config = tmp_path / "config"
    (config / "additional_chat_templates").mkdir(parents=True)
    (config / "tokenizer.json").write_text("{}")
    for name in ODD_NAMES:
        (config / name).write_text(name)
    (config / "additional_chat_templates" / "tool.jinja").write_text("x")
    transformers.LlamaConfig(**SMALL).save_pretrained(config)
    state = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).state_dict()
    with Publisher(root) as publisher:
        publisher.publish(state, 1, config_folder=config).result()
    Subscriber(root).pull(tmp_path / "local")

    assert_loads(tmp_path / "local", state, transformers.LlamaForCausalLM)
    assert (tmp_path / "local" / "additional_chat_templates" / "tool.jinja").read_text() == "x"
    assert [(tmp_path / "local" / name).read_text() for name in ODD_NAMES] == ODD_NAMES
    (config / "a\\b.txt").write_text("x")
    with Publisher(root) as publisher, pytest.raises(ValueError, match="rename it"):
        publisher.publish(state, 2, config_folder=config)


def test_weights_of_several_files_are_followed(root, tmp_path, monkeypatch):
    monkeypatch.setattr("async_ckpt.face.around.shards.MAX_SHARD_BYTES", 20_000)
    monkeypatch.setattr("async_ckpt.weights.publishing.publication._FILE_BYTES", 500)
    monkeypatch.setattr("async_ckpt.weights.publishing.publication._ENCODED_AT_ONCE_BYTES", 5_000)
    with Line(root) as line, line.subscriber() as subscriber:
        for version in (1, 2):
            line.publish(version)
            subscriber.pull(tmp_path / "local")
            receiver.pull(tmp_path / "other", root, version)
            assert_loads(tmp_path / "local", line.were[version], transformers.GPT2LMHeadModel)
            assert_loads(tmp_path / "other", line.were[version], transformers.GPT2LMHeadModel)
    assert len(index_at(line.folder(1)).tensor_files) > 1
    assert len(index_at(line.folder(2)).tensor_files) > 1


def test_no_more_than_all_of_a_version_is_written_however_small_its_weights_are(root):
    with Publisher(root) as publisher:
        handles = [publisher.publish({"w": torch.full((2,), float(n))}, version=n) for n in (1, 2)]
        assert [handle.result().num_bytes > 8 for handle in handles] == [True, True]
    assert [handle.progress.fraction <= 1 for handle in handles] == [True, True]


@ENCODINGS
def test_the_progress_of_a_version_ends_with_all_of_it_written(encoding, root):
    weights = {"w": torch.zeros(100_000)}
    with Publisher(root, encoding=encoding) as publisher:
        handles = [publisher.publish(weights, version) for version in (1, 2)]
        written = [handle.result().num_bytes for handle in handles]
    assert [handle.progress.fraction for handle in handles] == [1, 1]
    assert [handle.progress.written_bytes for handle in handles] == written


@ENCODINGS
def test_what_is_not_changed_costs_nothing_on_disk(encoding, root):
    state = {f"{i}.weight": torch.randn(300, 300) for i in range(4)}
    with Publisher(root, encoding=encoding) as publisher:
        publisher.publish(state, 1).result()
        state["2.weight"][7, 7] += 1
        some = publisher.publish(state, 2).result()
        none = publisher.publish(state, 3).result()

    assert list(index_at(root / "weight_v000002").files) == ["2.weight"]
    assert os.listdir(root / "weight_v000003") == [INDEX]
    assert none.num_bytes < some.num_bytes < 3000
    assert index_at(root / "weight_v000003").identity == index_at(root / "weight_v000002").identity


@ENCODINGS
def test_bits_are_what_counts_and_not_values(encoding, root, tmp_path):
    """NaNs with payloads, the two zeros, and tensors of every layout and size."""
    bits = torch.randint(-(2**15), 2**15, (1000,), dtype=torch.int16)
    large = torch.randn(3 * 2**20 + 5)
    state = {
        "nan": bits.view(torch.bfloat16),
        "nan32": torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32),
        "zero": torch.tensor([0.0, -0.0]),
        "large": large,
        "transposed": torch.randn(2000, 1500).t(),
        "view": torch.arange(100.0)[10:20],
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 3),
        "fp8": torch.randn(64).to(torch.float8_e4m3fn),
        "bool": torch.rand(100) > 0.5,
    }
    with Publisher(root, encoding=encoding) as publisher, Subscriber(root) as subscriber:
        publisher.publish(state, 1).result()
        state["nan"].view(torch.int16)[::3] ^= 1
        state["nan32"].view(torch.int32)[0] += 1
        state["zero"].neg_()
        large[-1] = 0
        state["transposed"][3, 4] = 7
        state["scalar"].mul_(2)
        state["bool"].logical_not_()
        publisher.publish(state, 2).result()
        for version in (1, 2):
            receiver.pull(tmp_path / "other", root, version)
        subscriber.pull(tmp_path / "local", 1)
        subscriber.pull(tmp_path / "local", 2)

    assert_same(weights_in(tmp_path / "local"), {name: t.contiguous() for name, t in state.items()})
    assert_same(weights_in(tmp_path / "other"), {name: t.contiguous() for name, t in state.items()})
    assert sorted(set(state) - set(index_at(root / "weight_v000002").files)) == ["empty", "fp8", "view"]


def test_where_positions_and_values_would_be_more_than_the_weights_there_is_an_anchor(root, tmp_path):
    state = {"weight": torch.zeros(400_000, dtype=torch.int32)}  # of which more is changed than is applied at once
    with Publisher(root, encoding="overwrite") as publisher, Subscriber(root) as subscriber:
        for share in (0.0, 0.7, 0.9):  # the lowest of four bytes
            state["weight"] ^= (torch.rand(400_000) < share).int()
            publisher.publish(state, int(share * 10)).result()
            subscriber.pull(tmp_path / "local")
            assert_same(weights_in(tmp_path / "local"), state)
    assert [index_at(root / folder_of(version)).is_anchor for version in (0, 7, 9)] == [True, False, True]


PEAK = """
import torch
from async_ckpt.weights.publishing.difference import apply, encode
def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
open("/proc/self/clear_refs", "w").write("5")
old = torch.zeros(2**23, dtype=torch.uint8)
new = torch.randint(1, 256, (2**23,), dtype=torch.uint8)
encode(new[:9], old[:9], "overwrite")
before = peak()
frame, wanted = encode(new, old, "overwrite")
undo = apply(memoryview(frame), old, "overwrite", wanted)
undo()
print((peak() - before) / 2**23)
"""


def test_positions_take_no_more_memory_than_a_frame_has(nursery):
    ended = nursery.run(PEAK)

    assert ended.err == ""
    # Of a tensor of which every byte is changed: the frame, what is in it, and what the allocator has not given back.
    assert float(ended.out) < 22


def test_a_delta_is_not_loaded_for_weights(root):
    state = {"weight": torch.zeros(30)}
    with Publisher(root) as publisher:
        for version in (1, 2, 3):
            publisher.publish(state, version).result()
            state["weight"][3] = 7  # version 3 is an empty delta
    assert_same(async_ckpt.load(root / folder_of(1)), {"weight": torch.zeros(30)})
    for version in (2, 3):
        with pytest.raises(NotCommittedError, match=r"this is a delta.*Subscriber"):
            async_ckpt.load(root / folder_of(version))


def test_two_threads_that_publish_at_first_have_one_line(root, monkeypatch, gate):
    state, begun = {"weight": torch.zeros(30)}, []
    with Publisher(root, on_rollback="retire") as publisher:
        real = publisher._new_series

        def new_line(*arguments: Any, **options: Any) -> Any:
            begun.append(arguments)
            gate.passed()
            return real(*arguments, **options)

        monkeypatch.setattr(publisher, "_new_series", new_line)
        calls = [Call(lambda version=version: publisher.publish(state, version)) for version in (1, 2)]
        gate.wait_reached()
        gate.open()
        for call in calls:
            call.outcome().result()
    assert len(begun) == 1


# --- one snapshot -------------------------------------------------------------------------------------------------


def test_the_checkpoint_and_the_version_of_one_snapshot_are_of_one_instant_and_one_copy(sim, root, tmp_path):
    model = torch.nn.Linear(300, 300).to("sim")
    with Publisher(root) as publisher, open_run(tmp_path / "run") as ckpt:
        before = len(sim.sim.copies)
        with async_ckpt.snapshot({"model": model}) as snap:
            saved = ckpt.save(snap, step=7)
            published = publisher.publish(snap["model"], 7)
            wanted = {name: tensor.cpu().clone() for name, tensor in snap["model"].state_dict().items()}
        spoil(model)
        assert published.result().step == saved.result().step == 7
        to_host = [num_bytes for _, target, num_bytes in sim.sim.copies[before:] if target == "cpu"]

    assert sum(to_host) <= 1.1 * sum(tensor.nbytes for tensor in wanted.values())
    assert_same(weights_in(root / "weight_v000007"), wanted)
    assert_same(async_ckpt.load(tmp_path / "run")["model"], wanted)


def test_a_model_may_change_as_soon_as_the_call_returns(root, held_back):  # noqa: F811
    model = gpt2()
    wanted = state_of(model)
    with Publisher(root) as publisher:
        handle = publisher.publish(model, 1)
        handle.wait_staged(60)
        spoil(model)
        held_back.set()
        handle.result()

    found = weights_in(root / "weight_v000001")
    assert_same(found, {name: wanted[name] for name in found})


def test_a_torn_snapshot_is_no_version_and_the_next_one_is_against_what_was_durable(root, tmp_path):
    state = {"weight": torch.nn.Parameter(torch.randn(600_000))}
    optimizer = torch.optim.SGD(state.values(), lr=1)
    with Publisher(root) as publisher:
        publisher.publish(state, 1).result()
        with async_ckpt.snapshot(state, guard=optimizer) as snap:
            handle = publisher.publish(snap, 2)
            torn = snap.completion.exception() is not None
            if not torn:  # it was copied before anybody could tear it
                handle.result()
        if torn:
            with pytest.raises(TornSnapshotError):
                handle.result()
        with torch.no_grad():
            state["weight"][5] += 1
        publisher.publish(state, 3).result()
    Subscriber(root).pull(tmp_path / "local")

    assert_same(weights_in(tmp_path / "local"), {"weight": state["weight"].detach()})


# --- what the next one is against ---------------------------------------------------------------------------------


def test_a_version_that_failed_is_nobodys_base(root, tmp_path, monkeypatch):
    with Line(root) as line, line.subscriber() as subscriber:
        line.publish(1)
        subscriber.pull(tmp_path / "local")
        with monkeypatch.context() as patch:
            patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(5, "no luck")))
            changed(line.model)
            with pytest.raises(async_ckpt.StorageUnavailableError, match="no luck"):
                line.publisher.publish(line.model, 2).result()
        assert line.publisher.versions() == [1]
        assert subscriber.pull(tmp_path / "local").num_versions == 0
        line.publish(2)
        subscriber.pull(tmp_path / "local")

        line.assert_is(2, tmp_path / "local")
    assert index_at(line.folder(2)).base == 1
    assert_only(root, "publisher.json", "weight_v000001", "weight_v000002")


def test_with_acknowledgements_a_delta_is_against_what_readers_have(root, tmp_path):
    """A reader that has not followed for three versions needs one delta, not four."""
    applied: list[int | None] = [None]
    with Line(root, acknowledged=lambda: applied[-1]) as line, line.subscriber() as subscriber:
        line.publish(1, 2)  # nobody has anything
        subscriber.pull(tmp_path / "local", 1)
        applied.append(1)
        line.publish(3, 4)
        bases = {version: index_at(line.folder(version)).base for version in line.were}
        report = subscriber.pull(tmp_path / "local")
        line.assert_is(4, tmp_path / "local")
        applied.append(4)
        line.publish(5)
        subscriber.pull(tmp_path / "local")
        line.assert_is(5, tmp_path / "local")
        applied.append(99)  # which is not there
        line.publish(6)
        subscriber.pull(tmp_path / "local")
        line.assert_is(6, tmp_path / "local")

    assert bases == {1: None, 2: None, 3: 1, 4: 1}
    assert (report.base, report.num_versions) == (1, 1)
    assert index_at(line.folder(5)).base == 4
    assert index_at(line.folder(6)).is_anchor


def test_an_acknowledged_anchor_is_read_back(root, tmp_path):
    applied: list[int | None] = [None]
    with Line(root, acknowledged=lambda: applied[-1]) as line:
        line.publish(1, 2)
        applied.append(2)
        line.publish(3)
        Subscriber(root).pull(tmp_path / "local")

        line.assert_is(3, tmp_path / "local")
    assert index_at(line.folder(3)).base == 2


def test_a_new_publisher_begins_with_an_anchor_and_goes_on_above_what_is_there(root, tmp_path):
    with Line(root) as line:
        line.publish(1, 2)
    with Publisher(root) as publisher:
        for version, error in ((2, StepExistsError), (1, StepBehindError)):
            with pytest.raises(error, match="give a higher one"):
                publisher.publish(line.model, version).result()
        line.publisher = publisher
        line.publish(3, 4)
        receiver.pull(tmp_path / "local", root, 4)

        line.assert_is(4, tmp_path / "local")
    assert [index_at(line.folder(v)).base for v in (3, 4)] == [None, 3]


def test_of_two_publishers_at_one_root_the_one_that_came_first_is_told_and_harms_nothing(root, tmp_path):
    first, second = Line(root), Publisher(root)
    first.publish(1)
    second.publish(gpt2(), 2).result()
    second._wait()
    before = files_below(root)
    for _ in range(2):
        with pytest.raises(ClosedError, match="another Publisher has begun to publish here"):
            first.publish(3)

    assert files_below(root) == before
    second.publish(gpt2(), 3).result()
    Subscriber(root).pull(tmp_path / "local")
    first.publisher.close()
    second.close()


def test_a_publisher_that_is_refused_takes_the_root_from_nobody(root):
    with Line(root) as line:
        line.publish(1)
        with Publisher(root) as second:
            for wrong, version in ((gpt2(), 1), ({"other": torch.ones(3)}, 2)):
                with pytest.raises((StepExistsError, StateMismatchError)):
                    second.publish(wrong, version).result()
        line.publish(2)
    assert line.publisher.versions() == [1, 2]


def test_versions_that_others_have_published_are_read_and_never_deleted(root, tmp_path):
    """A full version may be any checkpoint of Hugging Face: one file without an index is one on a disk."""
    state = {"weight": torch.randn(30)}
    for number in (1, 3):
        (root / f"weight_v{number:06d}").mkdir(parents=True)
        save_file(state, root / f"weight_v{number:06d}" / "model.safetensors")
        (root / f"weight_v{number:06d}" / "config.json").write_text("{}")
    os.truncate(root / "weight_v000003" / "model.safetensors", 100)  # which is still being written
    before = files_below(root)
    subscriber = Subscriber(root)
    assert subscriber.versions() == [1]
    subscriber.pull(tmp_path / "local")
    assert (tmp_path / "local" / "config.json").read_text() == "{}"
    with Publisher(root, keep=1, on_rollback="retire") as publisher:
        with pytest.raises(StepExistsError, match="not a Publisher's, so it is not deleted"):
            publisher.publish(state, 1).result()
        with pytest.raises(StepExistsError, match="which is not a version of a Publisher; delete it"):
            publisher.publish(state, 3).result()
        for version in (4, 5):
            state["weight"][version] = 7
            publisher.publish(state, version).result()
        publisher._wait()
        subscriber.pull(tmp_path / "local")

    assert files_below(root).items() >= before.items()
    assert_same(weights_in(tmp_path / "local"), state)


def test_an_index_that_is_damaged_does_not_keep_others_from_publishing(root, tmp_path):
    with Line(root) as line:
        line.publish(1, 2)
    (line.folder(2) / INDEX).write_text("{")
    with Line(root, line.model, keep=1) as line:
        line.publish(3, 4)
        line.publisher._wait()
        Subscriber(root).pull(tmp_path / "local")
        line.assert_is(4, tmp_path / "local")
        (line.folder(4) / INDEX).write_text("{")  # before it was read
        line.publish(5)
        Subscriber(root).pull(tmp_path / "local")
        line.assert_is(5, tmp_path / "local")


def test_a_delta_is_never_against_a_chain_whose_anchor_is_gone(root, tmp_path):
    with Line(root, keep=2) as line:
        line.publish(1, 2)
        shutil.rmtree(line.folder(1))
        line.publish(3, 4, 5)
        line.publisher._wait()
        Subscriber(root).pull(tmp_path / "local")
        line.assert_is(5, tmp_path / "local")
    assert line.publisher.versions() == [3, 4, 5]


def test_a_version_that_folders_cannot_have_is_refused_at_the_call(root):
    with Publisher(root) as publisher, pytest.raises(ValueError, match=r"below 10\*\*18"):
        publisher.publish(gpt2(), 10**18)


def test_a_root_that_is_emptied_under_a_publisher_is_told_of(root):
    with Line(root) as line:
        line.publish(1)
        line.publisher._wait()
        shutil.rmtree(root)
        with pytest.raises(ClosedError, match="has emptied it"):
            line.publish(2)


def test_a_root_that_is_taken_while_a_version_is_written_does_not_get_it(root, monkeypatch):
    line = Line(root)
    line.publish(1)
    real = DeltaBase.replica_for

    def taken(self: DeltaBase, *arguments: Any) -> Any:
        monkeypatch.undo()
        Ownership(storage_at(root)).take()
        return real(self, *arguments)

    monkeypatch.setattr(DeltaBase, "replica_for", taken)
    with pytest.raises(ClosedError, match="another Publisher"):
        line.publish(2)

    assert line.publisher.versions() == [1]


# --- a training that is set back ------------------------------------------------------------------------------------


def test_a_training_that_is_set_back_retires_what_is_ahead_and_readers_come_back(root, tmp_path):
    with Line(root, anchor_every=3) as line:
        line.publish(*range(2, 18, 2))
    reader, twin = line.subscriber(), gpt2()
    seen = reader.watch()
    assert next(seen) == reader.pull(tmp_path / "local").version == reader.pull(twin).version == 16
    with Publisher(root) as publisher, pytest.raises(StepBehindError, match='on_rollback="retire"'):
        publisher.publish(line.model, 12).result()
    with Line(root, on_rollback="retire") as again:  # from the checkpoint of step 10
        again.publish(12)
        assert again.publisher.versions() == [2, 4, 6, 8, 10, 12]
        assert next(seen) == 12
        for into in (tmp_path / "local", twin):
            assert reader.pull(into).version == 12
            again.assert_is(12, into)
        again.publish(14, 16)
        Subscriber(root).pull(tmp_path / "local")
        again.assert_is(16, tmp_path / "local")
        again.publish(14)  # of the same publisher: not against what is retired
        assert index_at(again.folder(14)).is_anchor or index_at(again.folder(14)).base < 14
        reader.pull(twin)
        again.assert_is(14, twin)
    reader.pull(tmp_path / "local", 10)
    line.assert_is(10, tmp_path / "local")


def test_what_a_failed_version_was_to_retire_is_still_there(root, monkeypatch):
    with Line(root) as line:
        line.publish(1, 2, 3)
    before = files_below(root)
    with Line(root, line.model, on_rollback="retire") as again, monkeypatch.context() as patch:
        patch.setattr("async_ckpt.core.storage.bulk.copy", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            again.publish(2)
    assert {name for name in files_below(root) if "weight" in name} == {name for name in before if "weight" in name}


# --- what is kept -------------------------------------------------------------------------------------------------


def test_below_the_oldest_delta_there_is_always_an_anchor(root, tmp_path):
    seen = {}
    with Line(root, anchor_every=4, keep=2) as line:
        for version in range(1, 10):
            line.publish(version)
            line.publisher._wait()  # for what is deleted behind the handle
            seen[version] = line.publisher.versions()
            for kept in seen[version]:
                Subscriber(root).pull(tmp_path / f"{version}-{kept}", kept)
                line.assert_is(kept, tmp_path / f"{version}-{kept}")
    assert list(seen.values()) == [
        [1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5], [5, 6], [5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8, 9],
    ]  # fmt: skip
    assert sorted(os.listdir(root)) == ["publisher.json", *(f"weight_v{v:06d}" for v in seen[9])]


def test_without_an_encoding_every_version_is_an_anchor_and_no_host_memory_is_kept(root):
    before = host_memory().lent_bytes
    with Line(root, encoding=None) as line:
        line.publish(1, 2)
        assert host_memory().lent_bytes == before
    assert [index_at(line.folder(v)).is_anchor for v in (1, 2)] == [True, True]


def test_what_deltas_are_against_is_given_back_by_close(root):
    gc.collect()
    before = host_memory().lent_bytes
    with Line(root) as line:
        line.publish(1, 2)
        assert host_memory().lent_bytes > before
    gc.collect()
    assert host_memory().lent_bytes == before


# --- what is refused ----------------------------------------------------------------------------------------------


def test_a_budget_that_is_too_small_for_a_base_is_told_of_and_nothing_is_lost(root, tmp_path):
    with Line(root, host_bytes=1000) as line, pytest.raises(MemoryError, match="encoding=None does not"):
        line.publish(1)
    with Line(root, line.model, encoding=None) as line:
        assert line.publisher.versions() == []
        line.publish(1)
        Subscriber(root).pull(tmp_path / "local")
        line.assert_is(1, tmp_path / "local")


@needs_mount
def test_a_disk_that_fills_in_the_middle_of_a_delta_leaves_what_was_published(tmp_path):
    state = {"weight": torch.randn(2**20)}
    with mounted(tmp_path / "small", "size=9m") as folder, Publisher(folder) as publisher:
        publisher.publish(state, 1).result()
        publisher._wait()
        before = files_below(folder)
        state["weight"].neg_()
        state["weight"].mul_(torch.randn(2**20))  # a delta as large as the weights
        filler = folder / "filler"
        filler.write_bytes(bytes(3 * 2**20))
        with pytest.raises(StorageFullError):
            publisher.publish(state, 2).result()
        filler.unlink()
        publisher._wait()
        assert files_below(folder) == before
        publisher.publish(state, 2).result()
        Subscriber(folder).pull(tmp_path / "local")

        assert index_at(folder / "weight_v000002").base == 1
        assert_same(weights_in(tmp_path / "local"), state)


def test_another_model_is_refused_at_a_root_and_the_one_before_goes_on(root):
    with Line(root) as line:
        line.publish(1)
        other = {name: tensor for name, tensor in line.model.state_dict().items() if "ln_f" not in name}
        for wrong in (other, line.model.to(torch.bfloat16).state_dict()):
            with pytest.raises(StateMismatchError, match="publish another model to its own root"):
                line.publisher.publish(wrong, 2).result()
        line.model.to(torch.float32)
        line.publish(2)
    with Publisher(root) as publisher, pytest.raises(StateMismatchError, match="publish another model to its own root"):
        publisher.publish(other, 3).result()


def test_models_whose_names_are_not_those_of_their_checkpoints_are_refused_before_anything_is_written(root):
    with Publisher(root) as publisher:
        for model, why in [
            (
                {"a": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)},
                "quantised|quint8|qint8|stored",
            ),
            ({"a": torch.ones(3, dtype=torch.complex128)}, "safetensors does not know"),
            ({"a": {"b": torch.ones(3)}}, "flat mapping"),
            ({}, "no weights"),
        ]:
            with pytest.raises(UnsupportedStateError, match=why):
                publisher.publish(model, 1)
    assert not root.exists()


@pytest.mark.parametrize("wrong", [-1, 1.5, "7", None, True, torch.tensor(3)])
def test_a_version_that_is_no_number_is_refused(wrong, root):
    with Publisher(root) as publisher, pytest.raises(ValueError, match="version must be a whole number"):
        publisher.publish(gpt2(), wrong)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"encoding": "diff"}, ValueError, 'must be "xor", "overwrite" or None'),
        ({"anchor_every": 0}, ValueError, "anchor_every must be a whole number"),
        ({"keep": 0}, ValueError, "keep must be a whole number"),
        ({"host_bytes": -1}, ValueError, "host_bytes must be a number of bytes"),
        ({"acknowledged": 7}, TypeError, "acknowledged must be a function"),
        ({"on_rollback": "delete"}, ValueError, 'on_rollback must be None or "retire"'),
    ],
)
def test_wrong_arguments_are_refused(options, error, told, root):
    with pytest.raises(error, match=told):
        Publisher(root, **options)


def test_an_acknowledgement_that_is_no_version_is_refused_at_the_call(root):
    publisher = Publisher(root, acknowledged=lambda: "7")
    with pytest.raises(ValueError, match=r"acknowledged\(\) returns must be a whole number"):
        publisher.publish(gpt2(), 1)
    assert not root.exists()


def test_a_closed_publisher_refuses_and_a_place_with_a_retention_too(root):
    with pytest.raises(ValueError, match="keep="):
        Publisher(Place(root, keep=3))
    with Publisher(root) as publisher:
        publisher.publish(gpt2(), 1)
    assert publisher.versions() == [1]  # `close` has waited
    with pytest.raises(ClosedError, match="create a new one"):
        publisher.publish(gpt2(), 2)
    with pytest.raises(ValueError, match="guard= belongs in the call of snapshot"):
        Publisher(root).publish(async_ckpt.snapshot({"w": torch.ones(3)}), 3, guard=object())


# --- trainers -----------------------------------------------------------------------------------------------------


def test_weights_that_skyrl_only_syncs_are_published_and_pulled(root, tmp_path):
    """`save_sampler_checkpoint(persist=False)`: the dispatch sends the weights, which here is a version."""
    model = torch.nn.Linear(8, 7)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    trainee = Trainee(model, optimizer, scheduler, {"model_type": "mlp"})
    with Publisher(root) as publisher, Subscriber(root) as subscriber:

        class Publishing(LocalDispatch):
            num_sent = 0

            async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
                self.num_sent += 1
                await publisher.publish(model, self.num_sent)

        backend = CheckpointBackend(Publishing({"policy": trainee}))
        engine = torch.nn.Linear(8, 7)
        for version in (1, 2):
            changed(model, 0.5)
            backend.save_sampler_checkpoint(tmp_path / f"{version}.tar", "policy", persist=False).result()
            assert subscriber.pull(engine).version == version
            assert_same(state_of(engine), state_of(model))


# --- dying ----------------------------------------------------------------------------------------------------------

PUBLISHES = """
import sys, torch, async_ckpt, children
state = {"weight": torch.arange(3000.0), "bias": torch.ones(7)}
publisher = async_ckpt.Publisher(sys.argv[1])
for version in (1, 2, 3):
    if version == 3:
        count = children.die_at(int(sys.argv[2]))
    state["weight"][version] += 1
    publisher.publish(state, version).result()
    print("published", version, flush=True)
publisher.close()
print("calls", count())
"""


def test_a_training_that_is_killed_at_any_call_has_published_all_of_a_version_or_nothing(tmp_path, nursery):
    """Killed in its third version, at each call that changes the disk; the next publisher goes on."""
    ended = nursery.run(PUBLISHES, tmp_path / "whole", 0)
    num_calls = int(ended.out.split()[-1])
    assert num_calls > 5
    state = {"weight": torch.arange(3000.0), "bias": torch.ones(7)}
    state["weight"][1] += 1
    state["weight"][2] += 1
    for number in some(range(1, num_calls + 1), 7):
        root = tmp_path / f"{number}"
        ended = nursery.run(PUBLISHES, root, number)
        assert ended.status in (-9, 0)
        found = Subscriber(root).pull(tmp_path / f"{number}-local").version
        assert found == 3 if "published 3" in ended.out else found in (2, 3)
        wanted = {**state, "weight": state["weight"].clone()}
        wanted["weight"][3] += found == 3
        assert_same(weights_in(tmp_path / f"{number}-local"), wanted)
        with Publisher(root) as publisher:
            publisher.publish(wanted, 4).result()
        assert_only(root, "publisher.json", *(f"weight_v{v:06d}" for v in publisher.versions()))


SET_BACK = """
import sys, torch, async_ckpt, children
state = {"weight": torch.arange(3000.0)}
with async_ckpt.Publisher(sys.argv[1]) as publisher:
    for version in (1, 2, 3):
        state["weight"][0] = version
        publisher.publish(state, version).result()
count = children.die_at(int(sys.argv[2]))
with async_ckpt.Publisher(sys.argv[1], on_rollback="retire", keep=2) as publisher:
    state["weight"][0] = 20
    publisher.publish(state, 2).result()
print("calls", count())
"""


def test_a_training_that_is_killed_while_it_retires_versions_leaves_whole_ones(tmp_path, nursery):
    """Killed at each call that changes the disk; the next one, set back as far, goes on."""
    num_calls = int(nursery.run(SET_BACK, tmp_path / "whole", 0).out.split()[-1])
    for number in some(range(1, num_calls + 1), 15):
        root, local = tmp_path / f"{number}", tmp_path / f"{number}-local"
        nursery.run(SET_BACK, root, number)
        found = Subscriber(root).pull(local).version
        assert float(weights_in(local)["weight"][0]) in {1: (1,), 2: (2, 20), 3: (3,)}[found]
        for version in Subscriber(root).versions():
            Subscriber(root).pull(local, version)
        with Publisher(root, on_rollback="retire") as publisher:
            publisher.publish({"weight": torch.full((3000,), 20.0)}, 2).result()
        Subscriber(root).pull(local)
        assert bool((weights_in(local)["weight"] == 20).all())
        assert_only(root, "publisher.json", "weight_v000001", "weight_v000002")


def test_a_process_that_exits_at_once_publishes_what_it_was_told_to(tmp_path, nursery):
    script = """
    import sys, torch, async_ckpt
    publisher = async_ckpt.Publisher(sys.argv[1])
    state = {"weight": torch.zeros(3_000_000)}
    for version in (1, 2):
        state["weight"] += 1
        publisher.publish(state, version)
    """
    nursery.out_of(script, tmp_path / "weights")
    Subscriber(tmp_path / "weights").pull(tmp_path / "local")
    assert bool((weights_in(tmp_path / "local")["weight"] == 2).all())


FORKS = """
import os, sys, torch, async_ckpt, warnings
warnings.simplefilter("ignore", DeprecationWarning)
torch.set_num_threads(1)
state = {"weight": torch.zeros(3000)}
publisher, subscriber = async_ckpt.Publisher(sys.argv[1]), async_ckpt.Subscriber(sys.argv[1])
publisher.publish(state, 1).result()
subscriber.pull(sys.argv[1] + "-local")
child = os.fork()
if child == 0:
    for use in (lambda: publisher.publish(state, 2), publisher.versions, subscriber.versions,
                lambda: subscriber.pull(sys.argv[1] + "-local"), subscriber.watch):
        try:
            use()
        except async_ckpt.ClosedError as error:
            assert "belongs to the parent process" in str(error)
        else:
            os._exit(9)
    publisher.close(), subscriber.close()
    with async_ckpt.Publisher(sys.argv[1] + "-own") as own:
        own.publish(state, 1).result()
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
publisher.publish(state, 2).result()
print(subscriber.pull(sys.argv[1] + "-local").version)
publisher.close()
"""


def test_a_forked_child_is_told_to_make_its_own_and_does_the_parents_no_harm(tmp_path, nursery):
    ended = nursery.run(FORKS, tmp_path / "weights")

    assert (ended.status, ended.err, ended.out.split()) == (0, "", ["7", "2"])
    assert Subscriber(tmp_path / "weights-own").versions() == [1]


def test_a_folder_that_another_process_makes_at_this_moment_is_taken(tmp_path, monkeypatch):
    into, lexists = tmp_path / "into", os.path.lexists

    def made_meanwhile(path: Any) -> bool:
        if Path(path) == into:
            into.mkdir(exist_ok=True)
        return lexists(path)

    with Line(tmp_path / "weights") as line, line.subscriber() as subscriber:
        line.publish(1)
        monkeypatch.setattr(os.path, "lexists", made_meanwhile)
        subscriber.pull(into)
        line.assert_is(1, into)


# --- stores ---------------------------------------------------------------------------------------------------------


def test_what_a_store_was_asked_with_by_a_publisher_that_was_killed_is_swept_a_day_later(bucket, s3, monkeypatch):
    place = Place(f"s3://{bucket}/weights", options=s3.options)
    storage = storage_at(place)
    for name in (".async_ckpt-probe-0123456789abcdef", "own.json"):
        storage.put_new(name, b"probe")
    with Line(place) as line:
        line.publish(1)
    assert storage.exists(".async_ckpt-probe-0123456789abcdef")  # its publisher may live
    monkeypatch.setattr(store_facts, "ORPHAN_SECONDS", -3600.0)
    with Line(place) as line:
        line.publish(2)
    assert not storage.exists(".async_ckpt-probe-0123456789abcdef")
    assert storage.exists("own.json")


def test_versions_in_a_bucket_are_published_followed_kept_and_retired(bucket, s3, tmp_path):
    place = Place(f"s3://{bucket}/weights", options=s3.options)
    with (
        Line(place, anchor_every=3, keep=2, on_rollback="retire") as line,
        line.subscriber() as subscriber,
    ):
        twin = gpt2()
        for version in (1, 2, 3, 4, 5, 6):
            line.publish(version)
            subscriber.pull(twin)
            line.assert_is(version, twin)
        line.publisher._wait()
        assert line.publisher.versions() == subscriber.versions() == [4, 5, 6]
        Subscriber(place).pull(tmp_path / "local")
        line.assert_is(6, tmp_path / "local")
        line.publish(5)
        assert subscriber.versions() == [4, 5]
        Subscriber(place).pull(tmp_path / "local")
        line.assert_is(5, tmp_path / "local")


SET_BACK_IN_A_STORE = """
import torch, async_ckpt
place = async_ckpt.Place({url!r}, options={options})
with async_ckpt.Publisher(place, on_rollback="retire") as publisher:
    publisher.publish({{"weight": torch.full((3000,), 20.0)}}, 2).result()
"""


@pytest.mark.parametrize("pattern", ["files", r"index\.json"])
def test_a_publisher_that_wakes_after_it_was_overtaken_damages_nothing(bucket, s3, proxy, tmp_path, nursery, pattern):
    slow = Place(f"s3://{bucket}/weights", options={**s3.options, "endpoint": proxy.endpoint})
    place = Place(f"s3://{bucket}/weights", options=s3.options)
    with Publisher(slow) as old:
        old.publish({"weight": torch.full((3000,), 1.0)}, 1).result()
        held = proxy.delay(None, method="PUT", target=rf"weight_v000002/.*{pattern}")
        handle = old.publish({"weight": torch.full((3000,), 2.0)}, 2)
        held.wait()
        new = nursery.run(SET_BACK_IN_A_STORE.format(url=place.url, options=s3.options))
        assert new.status == 0, new.err
        held.clear()
        assert isinstance(handle.exception(), ClosedError | StepExistsError)
        Subscriber(place).pull(tmp_path / "local")
        assert bool((weights_in(tmp_path / "local")["weight"] == 20).all())
    with Publisher(place) as again:  # and takes away what was written late
        again.publish({"weight": torch.full((3000,), 22.0)}, 4).result()
    left = [name for name in s3.keys(bucket) if "/weight_v000002/files." in name]
    assert len({name.split("/")[2] for name in left}) == 1
    Subscriber(place).pull(tmp_path / "local")
    assert bool((weights_in(tmp_path / "local")["weight"] == 22).all())


@pytest.mark.parametrize("store", [False, True], ids=["disk", "store"])
def test_a_subscriber_that_lives_on_sees_a_version_that_was_published_again(bucket, s3, tmp_path, store):
    place = Place(f"s3://{bucket}/weights", options=s3.options) if store else Place(str(tmp_path / "out"))
    twin = torch.nn.Linear(3, 3)
    with Publisher(place) as publisher:
        for version in (1, 2, 3):
            publisher.publish(torch.nn.Linear(3, 3), version).result()
    with Subscriber(place) as subscriber:
        watch = subscriber.watch(poll_seconds=0.01)
        assert next(watch) == subscriber.pull(twin).version == 3
        for _ in range(2):
            model = torch.nn.Linear(3, 3)
            with Publisher(place, on_rollback="retire") as publisher:
                publisher.publish(model, 3).result()
            assert subscriber.versions() == [1, 2, 3]
            assert next(watch) == subscriber.pull(twin).version == 3
            assert torch.equal(twin.weight, model.weight)
        with Publisher(place, on_rollback="retire") as publisher:
            publisher.publish(model, 2).result()
        assert subscriber.versions() == [1, 2]
        assert subscriber.latest() == 2


@pytest.mark.parametrize("store", [False, True], ids=["disk", "store"])
def test_a_pull_begins_again_where_what_it_reads_is_replaced(bucket, s3, tmp_path, monkeypatch, store):
    place = Place(f"s3://{bucket}/weights", options=s3.options) if store else Place(str(tmp_path / "out"))
    with Publisher(place, anchor_every=9) as publisher:
        model = torch.nn.Linear(64, 64)
        for version in (1, 2, 3):
            publisher.publish(model, version).result()
            changed(model)
    real, model = version_files.VersionSource.open, torch.nn.Linear(64, 64)

    def open_(self, file):
        monkeypatch.undo()
        with Publisher(place, on_rollback="retire") as publisher:
            publisher.publish(model, 2).result()
        return real(self, file)

    monkeypatch.setattr(version_files.VersionSource, "open", open_)
    for into in (torch.nn.Linear(64, 64), tmp_path / "local"):
        assert Subscriber(place).pull(into).version == 2
        weights = weights_in(into) if isinstance(into, Path) else dict(into.state_dict())
        assert_same(weights, dict(model.state_dict()))


def test_what_a_publisher_left_half_written_in_a_bucket_is_no_version_and_the_next_one_deletes_it(
    bucket, s3, monkeypatch
):
    place = Place(f"s3://{bucket}/weights", options=s3.options)
    storage = storage_at(place)
    storage.replace("weight_v000009/model.safetensors", b"of somebody else")
    with Line(place) as line, monkeypatch.context() as patch:
        line.publish(1)
        patch.setattr(type(storage), "put_new", lambda *_: (_ for _ in ()).throw(RuntimeError("killed")))
        with pytest.raises(RuntimeError, match="killed"):
            line.publish(2)
    # As if it had been killed, it deletes nothing that its index may name.
    assert any(name.startswith("weights/weight_v000002/files.") for name in s3.keys(bucket))

    assert Subscriber(place).versions() == [1]
    with Line(place, line.model) as line:
        line.publish(3)
        line.publisher._wait()
        with pytest.raises(StepExistsError, match="which is not a version of a Publisher"):
            line.publish(9)
    left = {name.split("/")[1] for name in s3.keys(bucket)}
    notes = {name for name in left if name.startswith("replaced.")}
    assert left - notes == {"publisher.json", "weight_v000001", "weight_v000003", "weight_v000009"}
