"""Places that ranks do not share: a disk or a RAM disk of each node, in front of one that all share.

A node is simulated by a folder that some ranks have and others do not.
"""

import shutil
import tarfile
from contextlib import closing
from pathlib import Path

import pytest
from rank_oracle import saved
from states import open_run

from async_ckpt import StorageUnavailableError
from async_ckpt.core.storage.node_folders import NodeFolder
from async_ckpt.core.storage.served_folders import NodeServer, Peer

PRELUDE = """
import shutil
from pathlib import Path
from async_ckpt import CheckpointError, Place
from racing import PATIENCE, until
ROOT = Path({root!r})
NODES = {nodes!r}

def opened(far=ROOT / "far", **options):
    near = ROOT / f"node{{NODES[here.rank]}}" / "run"
    near.parent.mkdir(exist_ok=True)
    return open_run([near, far], **options)

def live():
    return {{"model": {{"cut": spread(41, 3), "whole": numbered(300, 1000)}}, "step": 0}}

def restored(ckpt):
    state = live()
    step = ckpt.restore(state)
    if step is not None:
        want = small(step)
        assert torch.equal(state["model"]["cut"].full_tensor(), want["model"]["cut"].full_tensor())
        assert torch.equal(state["model"]["whole"], want["model"]["whole"]) and state["step"] == step
    return step
"""


def run(worlds, root: Path, nodes: str, script: str, **options):
    """`nodes` names the node of each rank by a letter."""
    return worlds.run(len(nodes), PRELUDE.format(root=str(root), nodes=nodes) + script, **options)


def told(ended) -> list:
    return [one.told for one in ended]


@pytest.mark.parametrize("nodes", ["aabb", "abab", "aabc", "ab"])
def test_a_step_is_committed_on_the_disks_of_all_nodes_and_restored_from_them(worlds, tmp_path, nodes):
    script = """
ckpt = opened()
for step in (1, 2):
    handle = ckpt.save(small(step), step)
    here.tell([handle.result().path.split("/")[-3:], handle.at(ROOT / "far").result(PATIENCE)])
ckpt.close()
"""
    ended = run(worlds, tmp_path, nodes, script, patience=60)

    for letter, told in zip(nodes, (one.told for one in ended), strict=True):
        assert told == [[[f"node{letter}", "run", f"step_{step:08d}"], step] for step in (1, 2)]
    for letter in set(nodes):
        assert {path.name for path in (tmp_path / f"node{letter}" / "run" / "step_00000002").glob("rank_*")} != set()
        assert (tmp_path / f"node{letter}" / "run" / "step_00000002" / "manifest.json").exists()
    assert saved(tmp_path / "far", 2).manifest.world_size == len(nodes)

    shutil.rmtree(tmp_path / "far")
    ended = run(worlds, tmp_path, nodes, "ckpt = opened()\nhere.tell(restored(ckpt))\nckpt.close()")

    assert [one.told for one in ended] == [[2]] * len(nodes)


SAVE = """
ckpt = opened({options})
{resume}
for step in {steps}:
    here.save(ckpt, small(step), step)
{then}
ckpt.close()
"""
RESTORE = """
ckpt = opened()
here.tell(restored(ckpt))
ckpt.close()
"""
# The further place gets nothing, as a store that is away.
WITHOUT_FAR = """
from async_ckpt.core.saving.mover import Mover
Mover._bring_up = lambda mover: None
"""


def save(
    worlds,
    root: Path,
    nodes: str,
    *steps: int,
    options: str = "",
    then: str = "",
    before: str = "",
    resume: str = "restored(ckpt)",
):
    script = before + SAVE.format(options=options, steps=steps, then=then, resume=resume)
    ended = run(worlds, root, nodes, script)
    assert {save["status"] for one in ended for save in one.saves} == {"committed"}
    return ended


def restore(worlds, root: Path, nodes: str, **more) -> list:
    return [one.told for one in run(worlds, root, nodes, RESTORE, **more)]


def steps_of(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in folder.glob("run/step_*/manifest.json"))


def archives(folder: Path, step: int) -> set[int]:
    return {int(path.name[5:10]) for path in folder.glob(f"run/step_{step:08d}/rank_*.tar")}


def test_retention_overwrites_and_trackers_reach_all_nodes(worlds, tmp_path):
    save(worlds, tmp_path, "aabb", 1, 2, 3, options="keep=1", then="here.save(ckpt, small(3), 3, overwrite=True)")

    for node, own in (("nodea", {0, 1}), ("nodeb", {2, 3})):
        assert steps_of(tmp_path / node) == [3]
        assert archives(tmp_path / node, 3) == own  # of the second version alone
        assert not list(tmp_path.glob(f"{node}/run/step_00000001/*"))
        assert (tmp_path / node / "run" / "latest").read_text().strip().endswith("3")
    assert saved(tmp_path / "far", 3)


def test_a_rollback_takes_the_newer_steps_from_all_nodes(worlds, tmp_path):
    save(worlds, tmp_path, "aabb", 1, 2, 3)
    script = """
ckpt = opened(on_rollback="retire")
assert ckpt.restore(live(), step=1) == 1
here.save(ckpt, small(2), 2, overwrite=True)
here.tell(ckpt.steps())
here.meet("told")
ckpt.close()
"""
    ended = run(worlds, tmp_path, "aabb", script)

    assert told(ended) == [[{"step": 2, "status": "committed"}, [1, 2]]] * 4
    assert steps_of(tmp_path / "nodea") == steps_of(tmp_path / "nodeb") == [1, 2]
    assert restore(worlds, tmp_path, "aabb") == [[2]] * 4


def test_ranks_on_swapped_nodes_read_from_each_other(worlds, tmp_path):
    save(worlds, tmp_path, "aabb", 1, 2, before=WITHOUT_FAR)

    assert restore(worlds, tmp_path, "bbaa") == [[2]] * 4
    assert restore(worlds, tmp_path, "baba") == [[2]] * 4


@pytest.mark.parametrize("lost", ["a", "b"])
@pytest.mark.parametrize("copied", [True, False], ids=["copied", "near alone"])
def test_where_the_folder_of_a_node_is_lost_the_newest_whole_step_is_restored(worlds, tmp_path, lost, copied):
    save(worlds, tmp_path, "aabb", 1)
    save(worlds, tmp_path, "aabb", 2, before="" if copied else WITHOUT_FAR)
    shutil.rmtree(tmp_path / f"node{lost}" / "run")

    assert restore(worlds, tmp_path, "aabb") == [[2 if copied else 1]] * 4

    if not copied:  # the number of the lost step is free again
        save(worlds, tmp_path, "aabb", 2)
    assert restore(worlds, tmp_path, "aabb") == [[2]] * 4


@pytest.mark.parametrize("nodes", ["ab", "aaaa", "bb", "aabbcc", "c"])
def test_another_number_of_ranks_goes_on_from_the_far_place_where_nodes_are_missing(worlds, tmp_path, nodes):
    save(worlds, tmp_path, "aabb", 1, 2)

    assert restore(worlds, tmp_path, nodes) == [[2]] * len(nodes)
    save(worlds, tmp_path, nodes, 3)
    assert restore(worlds, tmp_path, "aabb") == [[3]] * 4


@pytest.mark.parametrize("nodes", ["aabb", "bbaa"])
def test_a_node_that_comes_back_with_old_contents_is_taken_for_what_it_is(worlds, tmp_path, nodes):
    save(worlds, tmp_path, "aabb", 1, options="keep=1")
    shutil.copytree(tmp_path / "nodeb", tmp_path / "old", symlinks=True)
    save(worlds, tmp_path, "aabb", 2, 3, options="keep=1")
    shutil.rmtree(tmp_path / "nodeb")
    (tmp_path / "old").rename(tmp_path / "nodeb")

    assert restore(worlds, tmp_path, nodes) == [[3]] * 4
    save(worlds, tmp_path, nodes, 4, options="keep=1")
    assert steps_of(tmp_path / "nodea") == steps_of(tmp_path / "nodeb") == [4]
    assert restore(worlds, tmp_path, nodes) == [[4]] * 4


def test_checkpoints_of_another_run_on_one_node_are_neither_restored_nor_harmed(worlds, tmp_path):
    with open_run(tmp_path / "nodeb" / "run") as ckpt:
        ckpt.save({"other": 1}, 5000)
    before = sorted((tmp_path / "nodeb").rglob("*"))

    resume = """
try:
    restored(ckpt)
except CheckpointError as error:
    here.tell("another run" in str(error))
"""
    then = "here.tell(Path(ckpt.save(small(3), 3).result().path).parent.name)"
    ended = save(worlds, tmp_path, "aabb", 1, 2, then=then, resume=resume)

    assert [(one.told[0], one.told[3]) for one in ended] == [(True, "far")] * 4
    assert sorted(path for path in (tmp_path / "nodeb").rglob("*") if "world." not in path.name) == before
    assert restore(worlds, tmp_path, "aabb") == [[3]] * 4


def test_a_node_whose_disk_is_full_costs_one_save_and_the_next_goes_to_the_far_place(worlds, tmp_path):
    script = """
import errno
from async_ckpt.core.storage import local
real = local.pwrite
def full(fd, *arguments):
    if here.rank == 3 and "/nodeb/" in os.readlink(f"/proc/self/fd/{fd}"):
        raise OSError(errno.ENOSPC, "No space left on device")
    return real(fd, *arguments)
ckpt = opened()
here.save(ckpt, small(1), 1)
local.pwrite = full
here.save(ckpt, small(2), 2)
here.tell(Path(ckpt.save(small(3), 3).result().path).parent.name)
ckpt.close()
"""
    ended = run(worlds, tmp_path, "aabb", script)

    assert [one.saves[1]["error"] for one in ended] == ["PeerFailedError"] * 3 + ["StorageFullError"]
    assert [one.told[2] for one in ended] == ["far"] * 4
    assert restore(worlds, tmp_path, "aabb") == [[3]] * 4


def test_memory_of_each_node_in_front_of_its_disk_and_a_place_that_all_share(worlds, tmp_path):
    """What the far place lacks is copied by the ranks that have it on their disks."""
    opening = """
def opened():
    own = ROOT / f"node{NODES[here.rank]}"
    own.mkdir(exist_ok=True)
    return open_run([Place(own / "run", volatile=True), own / "disk", ROOT / "far"])
"""
    script = """
from async_ckpt.core.saving.mover import Mover
Mover.may_follow = lambda *_: False  # no copies in the same pass
ckpt = opened()
for step in (1, 2):
    handle = ckpt.save(small(step), step)
    handle.result()
    here.tell([handle.at(place).result(PATIENCE) for place in ckpt.roots])
ckpt.close()
"""
    ended = run(worlds, tmp_path, "aabb", opening + script)

    assert told(ended) == [[[1] * 3, [2] * 3]] * 4
    for node, own in (("nodea", {0, 1}), ("nodeb", {2, 3})):
        for place in ("run", "disk"):
            names = (tmp_path / node / place / "step_00000002").glob("rank_*.tar")
            assert {int(path.name[5:10]) for path in names} == own
    assert saved(tmp_path / "far", 2)

    for node in ("nodea", "nodeb"):  # a reboot of all
        shutil.rmtree(tmp_path / node / "run")
    shutil.rmtree(tmp_path / "far")
    assert told(run(worlds, tmp_path, "aabb", opening + RESTORE)) == [[2]] * 4


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("moment", ["create", "finish", "commit"])
def test_whichever_rank_is_killed_an_acknowledged_step_is_restored(worlds, tmp_path, rank, moment):
    script = f"""
from async_ckpt.core.runs.run import Run
from async_ckpt.core.storage.local import LocalSink, LocalStorage
ckpt = opened()
here.save(ckpt, small(1), 1)
if here.rank == {rank}:
    owner, call = dict(create=(LocalStorage, "create"), finish=(LocalSink, "finish"), commit=(Run, "commit"))["{moment}"]
    real = getattr(owner, call)
    def dying(*arguments, **options):
        here.die()
    setattr(owner, call, dying)
here.save(ckpt, small(2), 2)
if here.rank == {rank}:
    here.die()
"""
    ended = run(worlds, tmp_path, "aabb", script, killed={rank})
    acknowledged = max(save["step"] for one in ended for save in one.saves if save.get("status") == "committed")

    (found,) = {tuple(one) for one in restore(worlds, tmp_path, "aabb")}
    assert found[0] >= acknowledged
    save(worlds, tmp_path, "aabb", 3)


@pytest.mark.parametrize("damaged", [0, 1, 2, 3])
@pytest.mark.parametrize("how", ["flipped", "cut", "deleted"])
def test_an_archive_that_is_damaged_on_one_node_is_read_from_the_far_place(worlds, tmp_path, damaged, how):
    save(worlds, tmp_path, "aabb", 1)
    (path,) = tmp_path.glob(f"node*/run/step_00000001/rank_{damaged:05d}.*.tar")
    if how == "deleted":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[20_000] ^= 1
        path.write_bytes(data if how == "flipped" else data[: len(data) // 2])

    assert restore(worlds, tmp_path, "aabb") == [[1]] * 4
    assert restore(worlds, tmp_path, "bbaa") == [[1]] * 4


def test_each_node_compresses_its_archives_on_their_way_to_the_far_place(worlds, tmp_path):
    script = """
ckpt = opened(far=Place(ROOT / "far", compression="zstd"))
ckpt.save(small(1), 1).at(ROOT / "far").result(PATIENCE)
ckpt.close()
"""
    run(worlds, tmp_path, "aabb", script)

    archives = sorted((tmp_path / "far" / "step_00000001").glob("*.tar"))
    assert len(archives) == 4
    for archive in archives:
        with tarfile.open(archive) as tar:
            assert tar.getnames() == ["index.json", "blocks/00000000.4.zst", "sizes.txt"]
    for node in tmp_path.glob("node*"):
        shutil.rmtree(node)
    assert restore(worlds, tmp_path, "ab") == [[1]] * 2


def test_unchanged_groups_lie_on_the_nodes_that_have_written_them(worlds, tmp_path):
    script = """
ckpt = opened(keep=1)
frozen = {"t": spread(9, 9)}
for step in (1, 2, 3):
    here.save(ckpt, {**small(step), "frozen": frozen}, step, unchanged=["frozen"])
ckpt.close()
"""
    ended = run(worlds, tmp_path, "aabb", script)

    assert [save["status"] for one in ended for save in one.saves] == ["committed"] * 12
    assert {1, 3} <= {*steps_of(tmp_path / "nodeb")}
    shutil.rmtree(tmp_path / "far")
    script = """
ckpt = opened()
state = {**live(), "frozen": {"t": spread(9, 9, add=-1.0)}}
here.tell(ckpt.restore(state))
assert torch.equal(state["frozen"]["t"].full_tensor(), spread(9, 9).full_tensor())
ckpt.close()
"""
    assert told(run(worlds, tmp_path, "bbaa", script)) == [[3]] * 4


@pytest.mark.parametrize("lost", ["near", "far", "a node"])
def test_a_frozen_base_that_steps_borrow_from_lies_on_the_nodes_and_at_the_place_behind_them(worlds, tmp_path, lost):
    model = """
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(1500, 1500, bias=False), torch.nn.Linear(1500, 3, bias=False))
model[0].requires_grad_(False)
fully_shard(model)
"""
    script = f"""{model}
ckpt = opened(keep=1)
for step in (1, 2, 3):
    with torch.no_grad():
        model[1].weight.fill_(step)
    handle = ckpt.save({{"model": model}}, step)
    here.tell(handle.result().num_bytes)
handle.at(ROOT / "far").result(PATIENCE)
torch.save(model[0].weight.full_tensor(), ROOT / f"base{{here.rank}}.pt")
ckpt.close()
"""
    sizes = told(run(worlds, tmp_path, "aabb", script, patience=60))
    assert all(first > 9_000_000 > 100 * third for first, _, third in sizes)

    for folder in {"near": tmp_path.glob("node*"), "far": [tmp_path / "far"], "a node": [tmp_path / "nodeb"]}[lost]:
        shutil.rmtree(folder)
    script = f"""{model}
ckpt = opened()
here.tell(ckpt.restore({{"model": model}}))
assert torch.equal(model[0].weight.full_tensor(), torch.load(ROOT / "base0.pt"))
assert model[1].weight.full_tensor().unique().tolist() == [3]
ckpt.close()
"""
    assert told(run(worlds, tmp_path, "aabb", script)) == [[3]] * 4


def test_a_refusal_stays_one(worlds, tmp_path):
    """The folder of rank 0's node is another run's: a second try does not restore from it, either."""
    with open_run(tmp_path / "nodea" / "run") as ckpt:
        ckpt.save({"other": 1}, 5000)
        mark = tmp_path / "nodeb" / "run" / ".async_ckpt-nodes-0123456789abcdef"
        mark.parent.mkdir(parents=True)
        mark.touch()
    script = """
ckpt = opened()
for _ in range(2):
    try:
        here.tell(ckpt.restore(live()))
    except CheckpointError as error:
        here.tell("another run" in str(error))
here.save(ckpt, small(1), 1)
"""
    ended = run(worlds, tmp_path, "aabb", script)

    assert [one.told[:2] for one in ended] == [[True, True]] * 4
    assert all("another run" in one.saves[0]["text"] for one in ended)


def test_a_place_that_one_rank_cannot_use_takes_no_saves(worlds, tmp_path):
    (tmp_path / "nodeb").mkdir()
    (tmp_path / "nodeb" / "run").symlink_to("/proc/1/nothing")
    script = """
from async_ckpt.core.ranks import nodes
nodes.SHARED_SECONDS = 1.0
ckpt = opened()
try:
    restored(ckpt)
except CheckpointError as error:
    here.tell("neither see nor write" in str(error))
for step in (1, 2):
    here.tell(Path(ckpt.save(small(step), step).result().path).parent.name)
ckpt.close()
"""
    ended = run(worlds, tmp_path, "aabb", script)

    assert told(ended) == [[True, "far", "far"]] * 4
    assert "so no step is saved at this place" in ended[0].err


def test_a_process_that_does_not_know_the_key_is_answered_nothing(tmp_path):
    def ask(what: str, *arguments: object, key: bytes = b"key"):
        with closing(Peer(["localhost"], server.port, "own", key, "rank 1")) as peer:
            return peer.ask(what, *arguments)

    (tmp_path / "x").write_bytes(b"here")
    with closing(NodeServer(b"key", {"own": NodeFolder(str(tmp_path), lambda *_: None)})) as server:
        assert ask("names", "") == ["x"]
        with pytest.raises(StorageUnavailableError, match="does not answer"):
            ask("names", "", key=b"another")
        for path in ("../x", "/etc/passwd"):
            for what, given in (("read", path), ("existing", ["x", path]), ("delete_many", [path])):
                with pytest.raises(StorageUnavailableError, match="leads out"):
                    ask(what, given)
        for what, *given in (("names",), ("names", "", ""), ("read", 5)):
            with pytest.raises(StorageUnavailableError, match="TypeError"):
                ask(what, *given)
        with pytest.raises(StorageUnavailableError, match=r"is not a request|the message is not valid"):
            ask("locate", "x")
    with pytest.raises(StorageUnavailableError, match="does not answer"):
        ask("names", "")
