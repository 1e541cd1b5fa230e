"""Versions of a model that is spread over ranks: each publishes what it holds, and only what all have published is a version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from exported import assert_same, weights_in
from published import files_below
from rank_worlds import Worlds

from async_ckpt import (
    CorruptCheckpointError,
    NotCommittedError,
    Place,
    StateMismatchError,
    Subscriber,
    UnsupportedStateError,
)
from async_ckpt.around.hub import Weights
from async_ckpt.format.delta import INDEX
from async_ckpt.host.threads import Crew
from async_ckpt.publishing.ranks import Whole, assembled, own_slices
from async_ckpt.publishing.replica import MemoryReplica
from async_ckpt.publishing.versions import Where
from async_ckpt.state.cover import Box
from async_ckpt.storage.place import storage_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks as Linux has them")

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


@pytest.mark.parametrize(
    ("size", "make", "width"),
    [(3, "fsdp()", 37), (4, "hsdp(2)", 37), (4, "fsdp_tp(2)", 14), (1, "fsdp()", 37)],
)
def test_a_subscriber_makes_whole_weights_of_what_each_rank_has_published(
    worlds: Worlds, tmp_path: Path, size: int, make: str, width: int
):
    told = published(worlds, size, make, tmp_path / "out")

    assert [one[2] for one in told] == [[1, 2, 3, 4, 5]] * size
    with Subscriber(tmp_path / "out") as subscriber:
        model = network(width)
        for version, base in ((2, None), (3, 2), (5, None)):
            reports = [subscriber.pull(tmp_path / "local", version), subscriber.pull(model, version)]
            assert_same(weights_in(tmp_path / "local"), full_at(worlds, version))
            assert_same(dict(model.state_dict()), full_at(worlds, version))
            assert reports[0].base == base
        again = Subscriber(tmp_path / "out").pull(tmp_path / "local", 5)
        assert (again.num_versions, again.num_bytes) == (0, 0)
        assert next(subscriber.watch()) == 5


def test_overwritten_positions_and_a_retention_that_keeps_what_is_whole(worlds: Worlds, tmp_path: Path):
    told = published(
        worlds, 2, "fsdp()", tmp_path / "out", versions=range(1, 9), encoding="overwrite", keep=1
    )

    assert told[0][2] == told[1][2]
    assert told[0][2] == [7, 8] or told[0][2] == [4, 5, 6, 7, 8]  # by who was first to look
    Subscriber(tmp_path / "out").pull(tmp_path / "local")
    assert_same(weights_in(tmp_path / "local"), full_at(worlds, 8))


def test_in_a_store(worlds: Worlds, s3, bucket: str, tmp_path: Path):
    place = Place(f"s3://{bucket}/weights", options=s3.options)
    published(worlds, 2, "fsdp()", f"Place({place.url!r}, options={s3.options})", versions=[1, 2])
    model = network()
    Subscriber(place).pull(model)

    assert_same(dict(model.state_dict()), full_at(worlds, 2))


def test_what_one_rank_has_not_published_is_no_version_and_the_next_one_is(worlds: Worlds, tmp_path: Path):
    out = tmp_path / "out"
    published(worlds, 2, "fsdp()", out, versions=[1, 2])
    (out / "rank_00001_of_00002" / "weight_v000002" / INDEX).unlink()
    subscriber = Subscriber(out)

    assert subscriber.versions() == [1]
    with pytest.raises(NotCommittedError, match="version 2 is not there"):
        subscriber.pull(tmp_path / "local", 2)
    subscriber.pull(tmp_path / "local")
    assert_same(weights_in(tmp_path / "local"), full_at(worlds, 1))


def test_ranks_of_two_starts_are_never_mixed_and_other_worlds_go_on_above(worlds: Worlds, tmp_path: Path):
    """The first start is killed when rank 0 has published 3, and rank 1 has not; the second one publishes 3 on rank 1 alone."""
    out = tmp_path / "out"
    published(worlds, 2, "fsdp()", out, versions=[1, 2, 3])
    last = out / "rank_00001_of_00002" / "weight_v000003"
    storage = storage_at(last.parent)
    storage.delete_all(last.name)
    script = PUBLISH.format(make="fsdp()", out=repr(str(out)), encoding="xor", keep=None, versions=[3]).replace(
        "report = handle.result()", "report = handle if handle.exception() else handle.result()"
    ).replace("report.step, report.num_tensors", "str(handle.exception()), 0")  # fmt: skip
    first, second = [one.told[-1] for one in worlds.run(2, script)]
    assert "version 3 is published already" in str(first[0])
    assert second[0] == "None"
    assert Subscriber(out).versions() == [1, 2]
    told = published(worlds, 3, "fsdp()", out, versions=[4])
    assert told[0][2] == [1, 2, 4]
    Subscriber(out).pull(tmp_path / "local")
    assert_same(weights_in(tmp_path / "local"), full_at(worlds, 4))


def test_damage_of_one_rank_takes_nothing_away(worlds: Worlds, tmp_path: Path):
    out = tmp_path / "out"
    published(worlds, 2, "fsdp()", out, versions=[1, 2])
    subscriber = Subscriber(out)
    model = network()
    subscriber.pull(tmp_path / "local", 1)
    subscriber.pull(model, 1)
    before = files_below(tmp_path / "local")
    path = out / "rank_00001_of_00002" / "weight_v000002" / "model-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    for into in (tmp_path / "local", model):
        with pytest.raises(CorruptCheckpointError, match="not those that were published"):
            subscriber.pull(into)
    assert files_below(tmp_path / "local") == before
    assert_same(dict(model.state_dict()), full_at(worlds, 1))
    wrong = network(3)
    with pytest.raises(StateMismatchError, match="of another dtype or shape"):
        subscriber.pull(wrong, 1)


GAP = """
import async_ckpt
model = fsdp()["model"]
weights = model.state_dict()
if here.rank == 1:
    del weights["2.weight"]
async_ckpt.Publisher(here.root).publish(weights, 1).result()
here.meet("published")
"""


def test_a_rank_that_lacks_some_weights_leaves_a_gap_that_is_told(worlds: Worlds, tmp_path: Path):
    worlds.run(2, GAP)
    with pytest.raises(CorruptCheckpointError, match=r"no rank has published 2\.weight\["):
        Subscriber(worlds.root).pull(tmp_path / "local")


CONFIG = """
import async_ckpt
from pathlib import Path
folder = Path(here.root + f"-config-{here.rank}")
folder.mkdir()
(folder / "config.json").write_text(f'{{"rank": {here.rank}}}')
async_ckpt.Publisher(here.root).publish(fsdp()["model"], 1, folder).result()
here.meet("published")
"""


def test_config_and_tokenizer_are_those_of_rank_0(worlds: Worlds, tmp_path: Path):
    worlds.run(2, CONFIG)
    Subscriber(worlds.root).pull(tmp_path / "local")
    assert (tmp_path / "local" / "config.json").read_text() == '{"rank": 0}'


def test_models_whose_checkpoints_are_cut_otherwise_are_refused():
    """As `revert_weight_conversion` of transformers 5 says it of experts that are one tensor in memory."""
    weights = Weights("model", {"experts": torch.ones(2, 3)}, {}, {}, lambda t: {"expert.0": t["experts"][0]})
    with pytest.raises(UnsupportedStateError, match="in memory otherwise than in its checkpoints"):
        own_slices(weights)


def test_every_element_is_taken_from_the_lowest_rank_that_has_it_and_bits_stay():
    bits = torch.tensor([[0x7FC1, 1, 2], [3, 4, 0x7F81]], dtype=torch.int16)
    parts = {0: (bits[:, :2], Box((0, 0), (2, 2))), 1: (bits + 1, Box((0, 0), (2, 3)))}
    replicas = {rank: MemoryReplica(lambda n: torch.empty(n, dtype=torch.uint8)) for rank in parts}
    for rank, (part, box) in parts.items():
        replicas[rank].lay_out({f"w{box}": Where("", "bfloat16", box.sizes, 0, part.nbytes)})
        replicas[rank].take_over({f"w{box}": part.contiguous().view(torch.bfloat16)}, Crew("test", 1))
    whole = Whole("bfloat16", (2, 3), [(rank, f"w{box}", box) for rank, (_, box) in parts.items()])
    wanted = torch.cat([bits[:, :2], bits[:, 2:] + 1], 1)
    assert torch.equal(assembled(whole, replicas).view(torch.int16), wanted)
