"""torch.distributed.checkpoint with our writer and reader, on real ranks with gloo."""

import textwrap
from pathlib import Path

import pytest
import torch
from states import difference

import async_ckpt
from async_ckpt.integrations.dcp import to_dcp

PRELUDE = """
from dcp_states import *
"""


def of_ranks(script: str) -> str:
    return PRELUDE + textwrap.dedent(script)


SAVE = (
    PRELUDE
    + """
state = {make}
model, optimizer = state["model"], state["optimizer"]
taken, states = get_state_dict(model, optimizer)
state = {{"model": taken, "optim": states, "rank": "shared"}}
keep_full(state, here.root + ".pt")
save(state, here.root + "/step_00000001")
"""
)
LOAD = (
    PRELUDE
    + """
state = {make}
model, optimizer = state["model"], state["optimizer"]
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
taken, states = get_state_dict(model, optimizer)
state = {{"model": taken, "optim": states, "rank": ""}}
load(state, here.root + "/step_00000001")
keep_full(state, here.root + ".loaded.pt")
here.tell(state["rank"])
"""
)


def kept(worlds, name):
    return dict(sorted(torch.load(f"{worlds.root}{name}").items()))


def flat(state, path=()):
    if isinstance(state, torch.Tensor):
        return {".".join(path): state}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return {name: t for key, inner in items for name, t in flat(inner, (*path, str(key))).items()}


@pytest.mark.parametrize(
    ("before", "make", "after", "other"),
    [(4, "hsdp(2, 14)", 3, "fsdp(width=14)"), (2, "fsdp(width=14)", 4, "fsdp_tp(2)")],
)
def test_what_ranks_save_is_one_step_that_other_ranks_load_in_another_layout(worlds, before, make, after, other):
    worlds.run(before, SAVE.format(make=make))

    want = kept(worlds, ".pt")
    found = async_ckpt.load(f"{worlds.root}/step_00000001")
    assert difference(dict(sorted(flat(found).items())), want) is None
    assert found["rank"] == "shared"
    assert async_ckpt.verify(f"{worlds.root}/step_00000001").num_archives == before
    assert worlds.told(after, LOAD.format(make=other)) == [["shared"]] * after
    assert difference(kept(worlds, ".loaded.pt"), want) is None


def test_a_step_of_a_checkpointer_and_a_folder_of_torch_are_loaded_by_each_other_on_other_ranks(worlds):
    """Saved by 2: by our checkpointer, and by torch alone. On 3: ours by torch, torch's by us; and ours as torch's folder."""
    saved = of_ranks("""
        state = fsdp(width=14)
        taken, states = get_state_dict(state["model"], state["optimizer"])
        plain = {"model": taken, "optim": states, "items": [numbered(3), {"rank": 1}, spread(5, 2), "text"]}
        keep_full(plain, here.root + ".pt")
        with open_run(here.root) as ckpt:
            ckpt.save({**plain, "rng": {"own": here.rank}}, 1, per_rank="rng").result()
        dcp.save(plain, checkpoint_id=here.root + "/torch")
        save(plain, here.root + "/ours/step_00000002")
    """)
    loaded = of_ranks("""
        from async_ckpt.integrations.dcp import restore
        def live():
            state = fsdp(width=14)
            with torch.no_grad():
                for parameter in state["model"].parameters():
                    parameter.zero_()
            taken, states = get_state_dict(state["model"], state["optimizer"])
            return {"model": taken, "optim": states, "items": [numbered(3) * 0, {"rank": 0}, spread(5, 2, add=9), ""]}

        def restored(state):
            with open_run(here.root + "/ours") as ckpt:
                return ckpt.restore(state)

        def by_torch(path):
            state = live()
            dcp.load(state, checkpoint_id=path)
            return state

        ways = {
            "by torch, of a checkpointer": lambda: load(live(), here.root + "/step_00000001"),
            "by torch, of our writer": lambda: load(live(), here.root + "/ours"),
            "restored": lambda: restore(state, here.root + "/torch"),
            "by a checkpointer, of our writer": lambda: restored(state) and None,
            "by torch alone, converted": lambda: by_torch(here.root + ".converted"),
        }
        for name, way in ways.items():
            state = live()
            state = way() or state
            keep_full(state, here.root + "." + name)
            here.tell([state["items"][1]["rank"], state["items"][3]])
        try:
            load({"rng": {"own": 0}, "items": [numbered(3)]}, here.root + "/step_00000001")
        except CheckpointException as error:
            here.tell("rng has a separate value for each rank that saved" in str(error))
        here.tell(load({"rng": {"own": 5}}, here.root + "/step_00000001", from_ranks={"rng": 1})["rng"]["own"])
    """)
    worlds.run(2, saved)
    to_dcp(f"{worlds.root}/ours", f"{worlds.root}.converted")
    assert worlds.told(3, loaded) == [[[1, "text"]] * 5 + [True, 1]] * 3
    want = kept(worlds, ".pt")
    for name in (
        "by torch, of a checkpointer",
        "by torch, of our writer",
        "restored",
        "by a checkpointer, of our writer",
        "by torch alone, converted",
    ):
        assert difference(kept(worlds, f".{name}"), want) is None, name
    for folder in ("torch", "ours"):
        found = async_ckpt.load(f"{worlds.root}/{folder}")
        assert difference(dict(sorted(flat(found).items())), want) is None
        assert found["items"][1::2] == [{"rank": 1}, "text"]


def test_strided_and_uneven_shards_are_loaded_right_and_saved_right_or_not_at_all(worlds):
    """Packed matrices, which torch's own reader fills with other rows; and what FSDP2 over TP cuts unevenly.

    Torch's planner refuses rectangles that overlap, whoever writes; of others that are not this rank's the writer refuses each.
    """
    told = worlds.run(
        6,
        of_ranks("""
        from dataclasses import replace
        import async_ckpt
        from torch.distributed.checkpoint.default_planner import create_default_local_load_plan
        from torch.distributed.checkpoint.metadata import MetadataIndex
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
        from torch.distributed.tensor.placement_types import _StridedShard

        full = numbered(24, 3)
        packed = DTensor.from_local(
            torch.zeros(4, 3), mesh_of(names=("tp",)), (_StridedShard(0, split_factor=2),), run_check=False
        )
        if here.rank == 0:
            async_ckpt.save({"w": full, "v": full}, here.root + ".tar").result()
        dist.barrier()
        load({"w": packed}, here.root + ".tar")
        mine = torch.cat([half.chunk(6)[here.rank] for half in full.chunk(2)])
        here.tell(torch.equal(packed.to_local(), mine))

        class Renames(dcp.DefaultLoadPlanner):
            # What the model calls m.w is in the step as w.
            def create_local_plan(self):
                state = {name.removeprefix("m."): value for name, value in self.state_dict.items()}
                plan = create_default_local_load_plan(state, self.metadata, True)
                renamed = [
                    replace(one, dest_index=replace(one.dest_index, fqn="m." + one.dest_index.fqn))
                    for one in plan.items
                ]
                if two_of_them:
                    renamed += [replace(one, storage_index=MetadataIndex("v")) for one in renamed]
                return replace(plan, items=renamed)

        packed.to_local().zero_()
        for two_of_them in (False, True):
            try:
                dcp.load({"m": {"w": packed}}, storage_reader=TarStorageReader(here.root + ".tar"), planner=Renames())
            except CheckpointException as error:
                assert "m.w: the plan fills this shard from v, w" in str(error), error
                assert two_of_them
        here.tell(torch.equal(packed.to_local(), mine))
        refused = {}

        def by(error):
            theirs, ours = "Failed to validate global plan" in str(error), "nothing was written" in str(error)
            assert theirs != ours, error
            return "planner" if theirs else "writer"

        try:
            save({"w": packed}, here.root + "-packed")
        except CheckpointException as error:
            refused["packed"] = by(error)
        grid = mesh_of(3, 2, names=("dp", "tp"))
        for width in (7, 13, 14):
            model = torch.nn.Linear(5, width, bias=False)
            parallelize_module(model, grid["tp"], ColwiseParallel())
            fully_shard(model, mesh=grid["dp"])
            state = {"m": model.state_dict()}
            keep_full(state, f"{here.root}-{width}.pt")
            try:
                save(state, f"{here.root}-{width}")
            except CheckpointException as error:
                refused[width] = by(error)
                assert "weight" in str(error), error
        here.tell(refused)
        """),
    )
    refused = told[0].told[2]
    assert [one.told for one in told] == [[True, True, refused]] * 6
    assert refused == {"packed": "planner", "7": "writer", "13": "planner"}
    for width in {7, 13, 14}.difference(map(int, refused.keys() - {"packed"})):
        found = async_ckpt.load(f"{worlds.root}-{width}")
        assert difference(dict(sorted(flat(found).items())), kept(worlds, f"-{width}.pt")) is None


def test_an_error_of_one_rank_is_everybodys_and_the_next_save_commits_shards_of_fsdp1_too(worlds):
    script = of_ranks("""
        import gc, warnings

        def _part(whole, told):
            return whole[tuple(slice(a, a + n) for a, n in zip(told.shard_offsets, told.shard_sizes))]

        class Fails(dcp.DefaultSavePlanner):
            def resolve_data(self, item):
                if here.rank == 1:
                    raise ArithmeticError("this rank alone")
                return super().resolve_data(item)

        state = {"w": spread(8, 3), "n": 1}
        writer = TarStorageWriter(here.root + "/x")
        try:
            dcp.save(state, storage_writer=writer, planner=Fails())
        except CheckpointException as error:
            here.tell("this rank alone" in str(error))
        gc.collect()  # torch keeps what it has raised in a circle
        from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
        wrapped = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
        whole = {name: parameter.detach().clone() for name, parameter in network().named_parameters()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of FSDP1, that it is old
            with FullyShardedDataParallel.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
                state["fsdp1"] = wrapped.state_dict()
        response = dcp.async_save(state, storage_writer=writer, async_stager=PinnedStager())
        state["w"].zero_()
        for tensor in state["fsdp1"].values():
            for shard in tensor.local_shards():
                shard.tensor.zero_()
        response.upload_completion.result()
        load(state, here.root + "/x")
        shards = [(n, s) for n, t in state["fsdp1"].items() for s in t.local_shards()]
        here.tell(all(torch.equal(s.tensor, _part(whole[n], s.metadata)) for n, s in shards))
        try:
            dcp.save(state, storage_writer=TarStorageWriter(here.root + "/y"), use_collectives=False)
        except ValueError as error:
            here.tell("use_collectives" in str(error))
    """)
    assert [one.told for one in worlds.run(2, script)] == [[True, True, True]] * 2
    assert async_ckpt.load(f"{worlds.root}/x")["w"].sum() == sum(range(24))
    names = sorted(path.name.split(".")[0] for path in Path(f"{worlds.root}/x").iterdir())
    assert names == ["layout", "manifest", "rank_00000", "rank_00001"]
