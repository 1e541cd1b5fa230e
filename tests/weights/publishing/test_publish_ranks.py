"""Versions of a model that is spread over ranks: each publishes what it holds, and only what all have published is a version."""

import shutil
from pathlib import Path

import pytest
import torch
from exported import assert_only, assert_same, weights_in
from published import edit, files_below
from rank_worlds import Worlds
from slices import some

from async_ckpt import (
    CorruptCheckpointError,
    NotCommittedError,
    Place,
    Publisher,
    StateMismatchError,
    StepBehindError,
    StepExistsError,
    Subscriber,
    UnsupportedStateError,
)
from async_ckpt.core.slicing.boxes import Box
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.face.around.hf_weights import Weights
from async_ckpt.weights.delta import INDEX, SliceOf
from async_ckpt.weights.publishing.live_weights import PullResult
from async_ckpt.weights.publishing.of_ranks import rank_replicas, root_versions
from async_ckpt.weights.publishing.of_ranks.pieces import PiecedTensor, TensorPiece, own_slices, sliced_tensors
from async_ckpt.weights.publishing.version_files import WeightsState

# What all ranks do. Publishing calls no collective; the whole model of each version is kept beside, to compare.
PUBLISH = """
import async_ckpt
from async_ckpt import Place
from fake_ranks import no_collectives
out = {out}
model = {make}["model"]
publisher = async_ckpt.Publisher(out, anchor_every=3, encoding={encoding!r}, keep={keep})
for version in {versions}:
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if local.numel():
                local.view(-1)[version % local.numel()] += 1 + here.rank
    keep_full(model, here.root + f"-{{version}}.pt")
    with no_collectives():
        handle = publisher.publish(model, version)
        report = handle.result()
    here.meet(f"published{{version}}")
with no_collectives():
    publisher.close()
here.meet("closed")
here.tell([report.step, report.num_tensors, publisher.versions()])
"""


def published(
    worlds: Worlds,
    size: int,
    make: str,
    out: object,
    *,
    versions: object = range(1, 6),
    encoding: str = "xor",
    keep: int | None = None,
) -> list[list[object]]:
    script = PUBLISH.format(make=make, out=repr(str(out)) if isinstance(out, Path) else out, encoding=encoding, keep=keep,
                            versions=list(versions))  # fmt: skip
    worlds.root.parent.mkdir(exist_ok=True, parents=True)
    return [one.told[-1] for one in worlds.run(size, script)]


def full_at(worlds: Worlds, version: int) -> dict[str, torch.Tensor]:
    return dict(torch.load(f"{worlds.root}-{version}.pt"))


def network(width: int = 37) -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(13, width), torch.nn.ReLU(), torch.nn.Linear(width, 5), torch.nn.LayerNorm(5)
    )


MADE = [(3, "fsdp()", 37), (4, "fsdp_tp(2)", 14), (4, "hsdp(2)", 37), (1, "fsdp()", 37)]


@pytest.mark.parametrize(("size", "make", "width"), some(MADE, 2))
def test_a_subscriber_makes_whole_weights_of_what_each_rank_has_published(worlds, tmp_path, size, make, width):
    told = published(worlds, size, make, tmp_path / "out")

    assert [one[2] for one in told] == [[1, 2, 3, 4, 5]] * size
    with Subscriber(tmp_path / "out") as subscriber:
        model = network(width)
        for version, base in ((2, None), (3, 2), (5, None)):
            with torch.device("meta"):  # which some have set while they make models
                reports = [subscriber.pull(tmp_path / "local", version), subscriber.pull(model, version)]
            assert_same(weights_in(tmp_path / "local"), full_at(worlds, version))
            assert_same(dict(model.state_dict()), full_at(worlds, version))
            assert reports[0].base == base
        again = Subscriber(tmp_path / "out").pull(tmp_path / "local", 5)
        assert (again.num_versions, again.num_bytes) == (0, 0)
        assert next(subscriber.watch()) == 5


def test_overwritten_positions_and_a_retention_that_keeps_what_is_whole(worlds, tmp_path):
    told = published(worlds, 2, "fsdp()", tmp_path / "out", versions=range(1, 9), encoding="overwrite", keep=1)

    assert told[0][2] == told[1][2]
    assert told[0][2] == [7, 8] or told[0][2] == [4, 5, 6, 7, 8]  # by who was first to look
    Subscriber(tmp_path / "out").pull(tmp_path / "local")
    assert_same(weights_in(tmp_path / "local"), full_at(worlds, 8))


def test_in_a_store(worlds, s3, bucket, tmp_path):
    place = Place(f"s3://{bucket}/weights", options=s3.options)
    published(worlds, 2, "fsdp()", f"Place({place.url!r}, options={s3.options})", versions=[1, 2])
    model = network()
    Subscriber(place).pull(model)

    assert_same(dict(model.state_dict()), full_at(worlds, 2))


def test_what_one_rank_lacks_or_has_damaged_takes_nothing_away(worlds, tmp_path):
    out = tmp_path / "out"
    published(worlds, 2, "fsdp()", out, versions=[1, 2])
    subscriber = Subscriber(out)
    model = network()
    subscriber.pull(tmp_path / "local", 1)
    subscriber.pull(model, 1)
    before = files_below(tmp_path / "local")
    folder = out / "rank_00001_of_00002" / "weight_v000002"
    path = folder / "model-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for into in (tmp_path / "local", model):
        with pytest.raises(CorruptCheckpointError, match="not those that were published"):
            subscriber.pull(into)
    (folder / INDEX).unlink()
    assert Subscriber(out).versions() == [1]
    for into in (tmp_path / "local", model):
        with pytest.raises(NotCommittedError, match="version 2 does not exist; there are 1 to 1"):
            Subscriber(out).pull(into, 2)
    with pytest.raises(StateMismatchError, match="of another dtype or shape"):
        Subscriber(out).pull(network(3))
    assert files_below(tmp_path / "local") == before
    assert_same(dict(model.state_dict()), full_at(worlds, 1))


def test_ranks_of_two_starts_are_never_mixed_and_what_other_worlds_have_left_goes_in_the_end(worlds, tmp_path):
    """As after a start that was killed when only one rank had published version 2, and another in which the other did.

    The next start publishes it again; then come publishers of a whole model, at the same root.
    """
    out = tmp_path / "out"
    published(worlds, 2, "fsdp()", out, versions=[1, 2])
    folder = out / "rank_00001_of_00002" / "weight_v000002"
    edit(folder, lambda told: told["metadata"]["async_ckpt"].update(start="another"))

    assert Subscriber(out).versions() == [1]
    # On both ranks, though one of them has a version 2.
    told_again = published(worlds, 2, "fsdp()", out, versions=[2, 3])
    assert [one[2] for one in told_again] == [[1, 2, 3]] * 2
    with Publisher(out) as publisher:
        for version, error in ((3, StepExistsError), (2, StepBehindError)):
            with pytest.raises(error):
                publisher.publish(network(), version).result()
    with Publisher(out, on_rollback="retire", keep=2) as publisher:
        publisher.publish(network(), 3).result()
        publisher._wait()
        assert publisher.versions() == Subscriber(out).versions() == [2, 3]
        publisher.publish(network(), 4).result()
    assert Subscriber(out).versions() == [3, 4]
    assert Subscriber(out).pull(network()).version == 4
    assert_only(out, "publisher.json", "weight_v000003", "weight_v000004")


# The next start publishes versions 3 and 4 again, with other weights; then all of what it has is compared.
AGAIN = """
import async_ckpt
from async_ckpt import Place
model = fsdp()["model"]
with torch.no_grad():
    for parameter in model.parameters():
        parameter.to_local().fill_(7.0 + here.rank)
keep_full(model, here.root + "-again.pt")
publisher = async_ckpt.Publisher({out}, anchor_every=3, on_rollback="retire")
for version in {versions}:
    publisher.publish(model, version).result()
    here.meet(f"again{{version}}")
publisher.close()
"""


@pytest.mark.parametrize("store", [False, True], ids=["disk", "store"])
def test_a_pull_never_mixes_two_starts(worlds, s3, bucket, tmp_path, monkeypatch, store):
    """Rank 1's version is replaced between the reading of rank 0's slices and of its own."""
    place = Place(f"s3://{bucket}/weights", options=s3.options) if store else Place(str(tmp_path / "out"))
    text = f"Place({place.url!r}, options={s3.options if store else {}})"
    published(worlds, 2, "fsdp()", text, versions=[1, 2, 3])
    subscriber, model, num_read = Subscriber(place), network(), 0
    real = rank_replicas.update_replica

    def bring(replica, versions, target, crew):
        nonlocal num_read
        found = real(replica, versions, target, crew)
        num_read += 1
        if num_read == 1:
            worlds.run(2, AGAIN.format(out=text, versions=[3]))
        return found

    monkeypatch.setattr(rank_replicas, "update_replica", bring)
    report = subscriber.pull(model)
    again = dict(torch.load(f"{worlds.root}-again.pt"))
    assert report.version == 3
    assert_same(dict(model.state_dict()), again)
    subscriber.pull(tmp_path / "local")
    assert_same(weights_in(tmp_path / "local"), again)


def test_slices_whose_digests_are_not_those_of_one_start_are_refused(worlds, tmp_path, monkeypatch):
    """As where a rank's index was exchanged for another one without a trace."""
    out = tmp_path / "out"
    published(worlds, 2, "fsdp()", out, versions=[1, 2])
    model = network()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(
        root_versions.RootVersions,
        "were_replaced",
        lambda *_: False,  # what is read stays as it was
    )
    monkeypatch.setattr(
        rank_replicas,
        "update_replica",
        lambda replica, *_: (replica.note(WeightsState(2, "another", "", {})), PullResult(None, 0, 0))[1],
    )
    with pytest.raises(CorruptCheckpointError, match="was published again while it was read"):
        Subscriber(out).pull(model)
    assert_same(dict(model.state_dict()), before)


def test_a_subscriber_that_lives_on_sees_what_ranks_have_published_again(worlds, tmp_path):
    out = tmp_path / "out"
    published(worlds, 2, "fsdp()", out, versions=[1, 2, 3, 4])
    with Subscriber(out) as subscriber:
        model, watch = network(), subscriber.watch(poll_seconds=0.01)
        assert next(watch) == subscriber.pull(model).version == 4
        worlds.run(2, AGAIN.format(out=repr(str(out)), versions=[3]))
        assert subscriber.versions() == [1, 2, 3]
        assert next(watch) == subscriber.pull(model).version == 3
        worlds.run(2, AGAIN.format(out=repr(str(out)), versions=[3, 4]))
        assert subscriber.versions() == [1, 2, 3, 4]
        assert next(watch) == subscriber.pull(model).version == 4
        assert_same(dict(model.state_dict()), dict(torch.load(f"{worlds.root}-again.pt")))


def test_a_version_that_only_rank_0_has_published_again_in_a_root_that_was_emptied_is_not_whole(worlds, tmp_path):
    """Seen by a subscriber that has not looked in between, on a disk, where no mark tells of it."""
    out = tmp_path / "out"
    published(worlds, 2, "fsdp()", out, versions=[1, 2])
    with Subscriber(out) as subscriber:
        assert subscriber.versions() == [1, 2]
        edit(
            out / "rank_00000_of_00002" / "weight_v000002",
            lambda told: told["metadata"]["async_ckpt"].update(start="another"),
        )
        assert subscriber.versions() == [1]
        (out / "rank_00001_of_00002" / "weight_v000002" / INDEX).unlink()
        assert subscriber.versions() == [1]


def test_a_version_that_a_rank_deletes_while_it_is_looked_at_is_not_whole(worlds, tmp_path, monkeypatch):
    out = tmp_path / "out"
    published(worlds, 2, "fsdp()", out, versions=[1, 2])
    existing = LocalStorage.existing

    def then_deleted(self, paths):
        found = existing(self, paths)
        if any("rank_00001" in path and "v000001" in path for path in paths):
            shutil.rmtree(out / "rank_00001_of_00002" / "weight_v000001")
        return found

    monkeypatch.setattr(LocalStorage, "existing", then_deleted)
    assert Subscriber(out).versions() == [2]


def test_a_version_that_one_rank_has_published_alone_is_in_the_way_of_no_whole_model(tmp_path):
    with Publisher(tmp_path / "out" / "rank_00000_of_00002") as publisher:
        publisher.publish(network(), 5).result()
    with Publisher(tmp_path / "out") as publisher:
        publisher.publish(network(), 3).result()
    assert Subscriber(tmp_path / "out").versions() == [3]


TWICE = """
import async_ckpt
model = fsdp()["model"]
with async_ckpt.Publisher(here.root) as publisher:
    if here.rank == 0:
        for again in (False, True):
            try:
                publisher.publish(model, 1).result()
            except async_ckpt.StepExistsError:
                here.tell(again)
    here.meet("refused")
"""


def test_a_version_that_other_ranks_of_the_same_start_may_still_publish_is_not_published_again(worlds):
    worlds.root.parent.mkdir(exist_ok=True, parents=True)
    assert worlds.run(2, TWICE)[0].told == [True]


OTHERWISE = """
import async_ckpt
from pathlib import Path
folder = Path(here.root + f"-config-{here.rank}")
folder.mkdir()
(folder / "config.json").write_text(f'{{"rank": {here.rank}}}')
model = fsdp()["model"]
async_ckpt.Publisher(here.root + "/config").publish(model, 1, folder).result()
weights = model.state_dict()
if here.rank == 1:
    del weights["2.weight"]
async_ckpt.Publisher(here.root + "/gap").publish(weights, 1).result()
here.meet("published")
"""


def test_config_is_that_of_rank_0_and_a_rank_that_lacks_some_weights_leaves_a_gap_that_is_told(worlds, tmp_path):
    worlds.run(2, OTHERWISE)
    Subscriber(worlds.root / "config").pull(tmp_path / "local")
    assert (tmp_path / "local" / "config.json").read_text() == '{"rank": 0}'
    with pytest.raises(CorruptCheckpointError, match=r"no rank has published 2\.weight\["):
        Subscriber(worlds.root / "gap").pull(tmp_path / "other")


def test_models_whose_checkpoints_are_cut_otherwise_are_refused():
    """As `revert_weight_conversion` of transformers 5 says it of experts that are one tensor in memory."""
    weights = Weights("model", {"experts": torch.ones(2, 3)}, {}, {}, lambda t: {"expert.0": t["experts"][0]})
    with pytest.raises(UnsupportedStateError, match="in memory differ from those in its checkpoints"):
        own_slices(weights)


def test_every_element_is_taken_from_the_lowest_rank_that_has_it_and_bits_stay():
    bits = torch.tensor([[0x7FC1, 1, 2], [3, 4, 0x7F81]], dtype=torch.int16)
    held = [(Box((0, 0), (2, 2)), bits[:, :2]), (Box((0, 0), (2, 3)), bits + 1)]
    pieces = [TensorPiece(box, part.contiguous().view(torch.bfloat16)) for box, part in held]
    tensor = PiecedTensor(torch.bfloat16, (2, 3), pieces)
    wanted = torch.cat([bits[:, :2], bits[:, 2:] + 1], 1)
    assert torch.equal(tensor.whole().view(torch.int16), wanted)
    turned = torch.zeros(3, 2, dtype=torch.bfloat16).T
    tensor.copy_to(turned)
    assert torch.equal(turned.contiguous().view(torch.int16), wanted)


def test_slices_that_lower_ranks_have_are_left_out():
    """As plain tensors, which every rank has, and replicas that do not say so."""

    def part(begin: int, end: int) -> dict[str, SliceOf]:
        return {f"w[{begin}:{end}]": SliceOf("w", "float32", (6,), (begin,), (end - begin,))}

    found = sliced_tensors([part(0, 2), part(0, 2), {}, part(1, 4), part(2, 6), part(0, 6)])
    assert [rank for rank, _, _ in found["w"].slices] == [0, 3, 4]
    with pytest.raises(ValueError, match=r"no rank has published w\[2:4\]"):
        sliced_tensors([part(0, 2), part(4, 6)])


SPREAD_IN_PART = """
import async_ckpt
from torch.distributed.fsdp import fully_shard
def layers():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
if here.rank == 0:
    with async_ckpt.Publisher(here.root) as publisher:
        publisher.publish(layers(), 1).result()
here.meet("published")
model = layers()
first = model[0].weight.detach().clone()
fully_shard(model[1])
try:
    async_ckpt.Subscriber(here.root).pull(model)
except async_ckpt.UnsupportedStateError as error:
    here.tell([str(error), torch.equal(first, model[0].weight)])
import warnings
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType
warnings.simplefilter("ignore")  # of FSDP1, that it is old
old = FSDP(layers(), device_id=torch.device("cpu"))
FSDP.set_state_dict_type(old, StateDictType.SHARDED_STATE_DICT)
for call in (lambda: async_ckpt.Publisher(here.root + "/old").publish(old, 1), lambda: async_ckpt.Subscriber(here.root).pull(old)):
    try:
        call()
    except async_ckpt.UnsupportedStateError as error:
        here.tell(str(error))
here.meet("told")
"""


def test_a_module_that_is_spread_in_part_is_refused_before_the_rest_is_filled_and_one_of_fsdp1(worlds):
    worlds.root.parent.mkdir(exist_ok=True, parents=True)
    (told, is_same), published, pulled = worlds.run(2, SPREAD_IN_PART)[0].told

    assert told.startswith("'1.weight': it is sharded")
    assert is_same
    assert published.startswith("'0.weight' is a shard of FSDP1")
    assert "it is sharded" in pulled
