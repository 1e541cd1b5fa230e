"""`export_hf` of a model that is spread over ranks: the folder is that of the whole model, and no rank waits for another."""

import json
from pathlib import Path

import pytest
import torch
from rank_worlds import Worlds
from states import difference

from async_ckpt import files

# What all ranks do; `out` is the destination. Exporting calls no collective, and the whole model is exported by rank 0 to compare.
EXPORT = """
import async_ckpt, torch.distributed as dist
from async_ckpt import Place
from fake_ranks import no_collectives
out = {out}
state = {make}
model = state["model"]
keep_full(model, here.root + ".pt")
for number in range({times}):
    with no_collectives():
        handle = async_ckpt.export_hf(model, out, max_shard_bytes={most})
        for parameter in model.parameters():
            parameter.data.mul_(1)
        report = handle.result()
    here.meet(f"done{{number}}")
here.tell([report.path, report.num_bytes, report.num_tensors])
"""


def exported(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def run(worlds: Worlds, size: int, make: str, out: object, *, most: int = 10**9, times: int = 1) -> list[list[object]]:
    ended = worlds.run(size, EXPORT.format(make=make, out=repr(out), most=most, times=times))
    return [one.told[-1] for one in ended]


def assert_is_whole(worlds: Worlds, folder: Path) -> None:
    want = torch.load(f"{worlds.root}.pt")
    assert difference(dict(sorted(exported(folder).items())), dict(sorted(want.items()))) is None


@pytest.mark.parametrize(("size", "make"), [(3, "fsdp()"), (4, "hsdp(2)"), (4, "fsdp_tp(2)"), (1, "fsdp()")])
def test_the_folder_has_the_full_weights_bit_for_bit_and_nothing_is_left_beside_it(worlds, tmp_path, size, make):
    out = tmp_path / "out"
    told = run(worlds, size, make, str(out / "hf"))

    assert_is_whole(worlds, out / "hf")
    assert [path.name for path in out.iterdir()] == ["hf"]
    assert {one[0] for one in told} == {str(out / "hf")}
    assert told[0][1:] == [sum(path.stat().st_size for path in (out / "hf").iterdir()), 6]


def test_shards_are_as_of_a_whole_model_and_the_next_export_takes_their_place(worlds, tmp_path):
    out = tmp_path / "hf"
    run(worlds, 2, "fsdp()", str(out), most=1000, times=3)

    assert_is_whole(worlds, out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(list(out.glob("*.safetensors"))) == 2
    assert sorted(path.name for path in tmp_path.iterdir() if "parts" in path.name) == []


def test_in_a_store(worlds, bucket, tmp_path):
    place = f"Place({bucket.url('hf')!r}, options={bucket.server.options})"
    ended = worlds.run(2, EXPORT.format(make="fsdp()", out=place, most=10**9, times=2))

    assert len(ended) == 2
    assert bucket.keys() == ["hf/model.safetensors"]
    files.download_directory(bucket.place("hf"), tmp_path / "hf")
    assert_is_whole(worlds, tmp_path / "hf")


FAILS = """
import async_ckpt
from torch.distributed.tensor import Partial
model = fsdp()["model"]
weights = model.state_dict()
if here.rank == 1:
    {harm}
try:
    async_ckpt.export_hf(weights, here.root + "/hf").result()
    here.tell("done")
except Exception as error:
    here.tell([type(error).__name__, str(error)])
"""


def test_a_rank_that_cannot_do_its_part_is_named_and_nothing_is_left(worlds):
    harm = "weights['0.weight'] = DTensor.from_local(torch.ones(3, 13), mesh_of(), [Partial()], run_check=False)"
    rank_0, rank_1 = worlds.run(2, FAILS.format(harm=harm))

    assert rank_1.told[0][0] == "UnsupportedStateError"
    assert rank_0.told[0][0] == "PeerFailedError"
    assert "rank 1: " in rank_0.told[0][1]
    assert "UnsupportedStateError: 0.weight: a DTensor that is Partial" in rank_0.told[0][1]
    assert not worlds.root.exists() or not list(worlds.root.iterdir())


RAISES = """
import async_ckpt
weights = fsdp()["model"].state_dict()
for number in range(2):
    config = here.root + "-absent" if number == {which} and here.rank == {rank} else None
    try:
        async_ckpt.export_hf(weights, here.root + "/hf", config).result()
        here.tell("done")
    except Exception as error:
        here.tell([type(error).__name__, str(error)])
    here.meet(f"tried{{number}}")
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("which", [0, 1])
def test_a_call_that_raises_on_one_rank_fails_the_others_at_once(worlds, rank, which):
    """In the first export, before ranks have met, and in a later one."""
    ended = worlds.run(2, RAISES.format(rank=rank, which=which))

    for number, one in enumerate(ended):
        told = one.told[which]
        if number == rank:
            assert told[0] == "NotAFolderError"
        else:
            assert told[0] == "PeerFailedError"
            assert f"rank {rank}: NotAFolderError: config_folder" in told[1]
        assert one.told[1 - which] == "done"
    assert [path.name for path in worlds.root.iterdir()] == ["hf"]


WRONG = """
import async_ckpt
weights = fsdp()["model"].state_dict()
numbers = iter(range(9))

def export(state, destination="/hf", **options):
    try:
        async_ckpt.export_hf(state, here.root + destination, **options).result()
        here.tell(["done", ""])
    except Exception as error:
        here.tell([type(error).__name__, str(error)])
    here.meet(f"tried{{next(numbers)}}")

wrong = here.rank == {rank}
export(weights, max_shard_bytes=0 if wrong else 10**9)
export(weights, "/hf/" if wrong else "/hf", config_folder=here.root + "-absent" if wrong else None)
export(None if wrong else weights)
export(weights, max_shard_bytes=0)
export(weights)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_whatever_is_wrong_in_one_call_the_others_are_told_and_the_next_call_is_the_same_for_all(worlds, rank):
    """An argument that is checked first, another spelling of the destination, what is no model, and a call that is wrong on
    all ranks.
    """
    ended = worlds.run(2, WRONG.format(rank=rank))

    told = ended[rank].told
    assert [name for name, _ in told[:3]] == ["ValueError", "NotAFolderError", "UnsupportedStateError"]
    for number, (name, text) in enumerate(ended[1 - rank].told[:3]):
        assert name == "PeerFailedError"
        assert f"rank {rank}: {told[number][0]}: " in text
    assert [one.told[3][0] for one in ended] == ["ValueError"] * 2
    assert ended[0].told[4] == ended[1].told[4] == ["done", ""]
    assert [path.name for path in worlds.root.iterdir()] == ["hf"]


def test_a_rank_that_lacks_some_weights_leaves_a_gap_that_is_told(worlds):
    rank_0, rank_1 = worlds.run(2, FAILS.format(harm="del weights['2.weight']"))

    assert rank_0.told[0][0] == "CorruptCheckpointError"
    assert "2.weight" in rank_0.told[0][1]
    assert rank_1.told[0][0] == "PeerFailedError"
    assert "rank 0: CorruptCheckpointError: " in rank_1.told[0][1]
    assert not worlds.root.exists() or not list(worlds.root.iterdir())


EXPORTING = """
import async_ckpt
from racing import until
from async_ckpt.core.storage.local import LocalStorage
from async_ckpt.face.around.spread import OtherRanks
from torch.distributed.device_mesh import DeviceMesh
meshes = [DeviceMesh("cpu", [rank]) for rank in range(here.size)]
own = {f"layer{here.rank}": DTensor.from_local(numbered(3, 2), meshes[here.rank], [Shard(0)], run_check=False)}

def export(weights, say=None, to="/hf"):
    try:
        handle = async_ckpt.export_hf(weights, here.root + to)
        if say:
            here.say(say)
        handle.result()
        here.tell(["done", ""])
    except Exception as error:
        here.tell([type(error).__name__, str(error)])

"""
WHOLE_ON_ONE = (
    EXPORTING
    + """
def others_are_known():
    others = OtherRanks(LocalStorage(here.root + to))
    return others._start.token.done() and others._start.connection.ask(lambda store: others._note_about("spread", store)).result()

for culprit in (1, 0):
    to = f"/hf-{culprit}"
    if here.rank == culprit:
        here.hear("called")
        until(others_are_known)
        export({"embed": torch.ones(4)}, to=to)
    else:
        export(own, "called", to)
    here.meet(f"after {culprit}")
    if here.rank == 0:
        (here._folder / "called").unlink()
    here.meet(f"again {culprit}")
odd = {"odd": torch.ones(2, dtype=torch.complex128)}  # no dtype of safetensors
export(own | odd if here.rank == 1 else own)
here.meet("failed")
export({name: value + 1 for name, value in own.items()})
"""
)


def test_a_rank_whose_weights_are_whole_replaces_nothing_and_nobody_waits_for_it(worlds):
    rank_0, rank_1 = (one.told for one in worlds.run(2, WHOLE_ON_ONE))

    assert rank_0[0][0] == "PeerFailedError"
    assert "rank 1: UnsupportedStateError: none of this rank's weights is sharded" in rank_0[0][1]
    assert rank_1[0][0] == rank_0[1][0] == "UnsupportedStateError"
    assert "other ranks export sharded weights to the same folder" in rank_1[0][1]
    # A rank that raises before it has a part tells so, too, and the next export is the next for all.
    assert rank_0[2][0] == "PeerFailedError"
    assert "rank 1: UnsupportedStateError: 'odd'" in rank_0[2][1]
    assert rank_0[3][0] == rank_1[3][0] == "done"
    found = exported(worlds.root / "hf")
    assert {name: tensor[0, 0].item() for name, tensor in found.items()} == {"layer0": 1, "layer1": 1}
    assert [path.name for path in worlds.root.iterdir()] == ["hf"]


TRANSFORMERS = """
import async_ckpt, transformers
from exported import SMALL
from fake_ranks import no_collectives
for kind in ("Llama", "Mixtral"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, num_key_value_heads=2, tie_word_embeddings=True)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if here.rank == 0:
        async_ckpt.export_hf(model, f"{here.root}/whole/{kind}").result()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with no_collectives():
        async_ckpt.export_hf(model, f"{here.root}/hf/{kind}").result()
"""


def test_transformers_loads_what_ranks_have_exported_as_it_loads_the_whole_model(worlds):
    """Tied embeddings are written once, and experts that are one tensor in memory are published each on its own."""
    worlds.run(2, TRANSFORMERS)  # two of them import transformers
    import exported as hf

    for kind in ("Llama", "Mixtral"):
        whole, ours = worlds.root / "whole" / kind, worlds.root / "hf" / kind
        assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in whole.iterdir())
        for path in whole.iterdir():
            assert path.read_bytes() == (ours / path.name).read_bytes(), path.name
        model = getattr(hf.transformers, f"{kind}ForCausalLM").from_pretrained(whole)
        hf.assert_loads(ours, hf.state_of(model), type(model))
