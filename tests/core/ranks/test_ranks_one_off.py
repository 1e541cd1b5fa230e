"""One-off saves of states that are spread over ranks: a folder with an archive of each rank, committed together."""

import pytest
import torch
from rank_states import numbered
from rank_worlds import Ended
from states import difference, open_run

import async_ckpt
from async_ckpt import Place

PRELUDE = """
import async_ckpt
from async_ckpt import Place, PeerFailedError
from fake_ranks import no_collectives

def save(state, path, **options):
    try:
        report = async_ckpt.save(state, path, **options).result()
        here.tell([report.status, report.path, report.num_bytes])
    except Exception as error:
        undecided = error.undecided if isinstance(error, PeerFailedError) else None
        here.tell([type(error).__name__, str(error), undecided])
"""


def told(ended: list[Ended], number: int, what: int = 0) -> list[object]:
    return [one.told[number][what] for one in ended]


SAVE = """
out = {out}
state = {make}
keep_full({{"model": state["model"]}}, here.root + ".pt")
state["rng"] = async_ckpt.RngState()
with no_collectives():
    for _ in range({times}):
        save(state, out, guard=state["optimizer"])
"""


@pytest.mark.parametrize(("size", "make"), [(2, "fsdp()"), (4, "fsdp_tp(2)"), (1, "fsdp()")])
def test_any_process_loads_full_tensors_from_the_path(worlds, tmp_path, size, make):
    out = tmp_path / "out" / "weights.tar"
    ended = worlds.run(size, PRELUDE + SAVE.format(out=repr(str(out)), make=make, times=2))

    assert told(ended, 0) == told(ended, 1) == ["committed"] * size
    assert {*told(ended, 1, 1)} == {str(out)}
    full = torch.load(f"{worlds.root}.pt")
    loaded = async_ckpt.load(out, from_ranks={"rng": 0} if size > 1 else None)
    assert difference({f"model.{name}": one for name, one in loaded["model"].items()}, full) is None
    assert [path.name for path in out.parent.iterdir()] == ["weights.tar"]
    async_ckpt.verify(out)
    if size > 1:
        there = sorted(path.name.split(".")[0] for path in out.iterdir())
        assert there == ["archives", "layout", "manifest", *(f"rank_{rank:05d}" for rank in range(size))]
        assert sum(path.stat().st_size for path in out.glob("rank*")) <= ended[0].told[1][2]


def test_when_the_handle_of_rank_0_is_done_the_folder_has_what_stays_alone(worlds):
    """No receipts, no claim of the folder, and nothing of the checkpoint that was replaced."""
    ended = worlds.run(
        2,
        f"""{PRELUDE}
import os
for _ in range(3):
    save(fsdp(), here.root + "/x")
    here.tell([name.split(".") for name in sorted(os.listdir(here.root + "/x"))])
    torch.distributed.barrier()
""",
    )

    for number in (1, 3, 5):
        names = ended[0].told[number]
        kinds = [name[0] for name in names]
        assert kinds == ["archives", "layout", "manifest", "rank_00000", "rank_00001"]
        assert len({name[1] for name in names if name[0] != "manifest"}) == 1


def test_in_a_store_too(worlds, s3, bucket):
    place = f"Place('s3://{bucket}/x', options={s3.options})"
    ended = worlds.run(2, PRELUDE + SAVE.format(out=place, make="fsdp()", times=2))

    assert told(ended, 0) == told(ended, 1) == ["committed"] * 2
    loaded = async_ckpt.load(Place(f"s3://{bucket}/x", options=s3.options), from_ranks={"rng": 0})
    full = torch.load(f"{worlds.root}.pt")
    assert difference({f"model.{name}": one for name, one in loaded["model"].items()}, full) is None
    assert sorted(key.split(".")[0] for key in s3.keys(bucket)) == [
        "x/archives", "x/layout", "x/manifest", "x/rank_00000", "x/rank_00001"
    ]  # fmt: skip


SNAPSHOT = """
with async_ckpt.snapshot(small(1)) as snap:
    save(snap, here.root + "/whole")
    save({"model": snap["model"]}, here.root + "/part")
"""


def test_a_snapshot_is_saved_as_it_was(worlds):
    ended = worlds.run(2, PRELUDE + SNAPSHOT)

    assert told(ended, 0) == told(ended, 1) == ["committed"] * 2
    for name in ("whole", "part"):
        assert torch.equal(async_ckpt.load(worlds.root / name)["model"]["cut"], numbered(41, 3) + 1)


FAILING = """
save(small(1), here.root + "/x")
state = small(2)
if here.rank == {rank}:
    state["lost"] = torch.empty(3, device="meta")
save(state, here.root + "/x")
save(small(3), here.root + ("/x" if here.rank != {rank} else "/y"))
save(small(4) if here.rank != {rank} else {{"model": {{"cut": spread(40, 3)}}}}, here.root + "/x")
save(small(5), here.root + "/x")
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_does_otherwise_fails_all_and_what_was_saved_before_stays(worlds, rank):
    """A state that cannot be saved, another path, another structure; and then they save alike again."""
    ended = worlds.run(3, PRELUDE + FAILING.format(rank=rank))

    assert told(ended, 0) == ["committed"] * 3
    errors = ["PeerFailedError"] * 3
    errors[rank] = "UnsupportedStateError"
    assert told(ended, 1) == errors
    assert all("lost" in text for text in told(ended, 1, 1))
    assert told(ended, 2) == ["PeerFailedError"] * 3
    assert told(ended, 2, 2) == [False] * 3
    for text in told(ended, 2, 1):
        assert "/x" in text
        assert "/y" in text
        assert "give all ranks the same arguments" in text
    assert told(ended, 3)[0] == "UnsupportedStateError"
    assert told(ended, 3)[1:] == ["PeerFailedError"] * 2
    assert told(ended, 4) == ["committed"] * 3
    assert torch.equal(async_ckpt.load(worlds.root / "x")["model"]["cut"], numbered(41, 3) + 5)
    assert len(list(worlds.root.glob("*/rank*"))) == 3
    assert not [
        path for path in (worlds.root / "x").iterdir() if path.name.startswith(("world", "receipts", "verdict"))
    ]
    assert not [*(worlds.root / "y").glob("*")]


KINDS = """
from collections import deque
from dataclasses import dataclass

@dataclass
class Weights:
    cut: object

for number, state in enumerate([{"in": Weights(spread(41, 3))}, {"in": deque([spread(41, 3)])}]):
    with async_ckpt.snapshot(state) as snap:
        save(snap, f"{here.root}/{number}")
"""


def test_a_snapshot_is_spread_whatever_its_tensors_lie_in(worlds):
    ended = worlds.run(2, PRELUDE + KINDS)

    assert told(ended, 0) == told(ended, 1) == ["committed"] * 2
    assert torch.equal(async_ckpt.load(worlds.root / "1")["in"][0], numbered(41, 3))


RAISING = """
class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(spread(9, 3))
    def state_dict(self, **_):
        raise OSError("no state today")

broken = Broken()
save(small(1), here.root + "/x")
state, options = async_ckpt.snapshot(small(2)), {{}}
if here.rank == 1:
    if "{how}" == "closed":
        state.close()
    elif "{how}" == "compressed":
        options = {{"compression": "zstd"}}
    else:
        state = broken
save(state, here.root + "/x", **options)
save(small(3), here.root + "/x")
"""


@pytest.mark.parametrize(
    ("how", "error"), [("closed", "ClosedError"), ("compressed", "ValueError"), ("broken", "OSError")]
)
def test_a_call_that_raises_early_on_one_rank_is_told_to_all(worlds, how, error):
    ended = worlds.run(2, PRELUDE + RAISING.format(how=how))

    assert told(ended, 1) == ["PeerFailedError", error]
    assert f"rank 1: {error}" in told(ended, 1, 1)[0]
    assert told(ended, 0) == told(ended, 2) == ["committed"] * 2


REFUSED = """
with open_run(here.root) as ckpt:
    here.save(ckpt, small(1), 1)
(here.say if here.rank else open)(here.root + "-file", *([] if here.rank else ["w"]))
here.meet("made")
for path in ("", "/step_00000001", "/best_7", "-file"):
    save(small(2), here.root + path)
save(small(2), here.root + "/x", compression="zstd")
"""


def test_a_run_is_not_written_over(worlds):
    ended = worlds.run(2, PRELUDE + REFUSED)

    rank_0, rank_1 = ([one.told[number] for number in range(1, 6)] for one in ended)
    assert [name for name, *_ in rank_0] == [
        "ValueError",
        "ValueError",
        "ValueError",
        "NotAFolderError",
        "ValueError",
    ]
    assert [name for name, *_ in rank_1] == [*["PeerFailedError"] * 3, "NotAFolderError", "ValueError"]
    assert "is a run" in rank_0[0][1]
    assert "a step of the run" in rank_0[1][1]
    assert "a step of the run" in rank_0[2][1]
    assert open_run(worlds.root).steps() == [1]
    assert torch.equal(async_ckpt.load(worlds.root)["model"]["cut"], numbered(41, 3) + 1)
    assert len(list(worlds.root.glob("**/rank_*.tar"))) == 2


def test_the_root_of_a_disk_is_no_folder_for_a_save(worlds):
    ended = worlds.run(2, PRELUDE + 'save(small(1), "/")')

    assert told(ended, 0) == ["ValueError"] * 2
    assert all("root of its storage" in text for text in told(ended, 0, 1))


ALONE = """
states = [small(n) for n in range(3)]
save(states[0], here.root + "/x")
if here.rank == 1:
    here.expire(lambda: not here.is_said("alone"))
    save(states[1], here.root + "/x")
    here.say("alone")
here.hear("alone")
save(states[2], here.root + "/z")
"""


def test_a_rank_that_saves_alone_is_told_in_the_end(worlds):
    rank_0, rank_1 = worlds.run(2, PRELUDE + ALONE)

    assert [one[0] for one in rank_0.told] == ["committed"] * 2
    assert rank_1.told[1][0] == "PeerFailedError"
    assert "call save on every rank" in rank_1.told[1][1].lower()
