"""What a report says of groups that have not changed since the commit before: a training that stands still."""

import itertools
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import MIB, open_run

import async_ckpt
from async_ckpt.core.format import digests
from async_ckpt.core.saving.block_digests import GroupDigest, GroupDigests
from async_ckpt.core.spec import BLOCK_BYTES, Extent

Groups = dict[str, list[Extent]]


def digested(data: bytes, extents: Groups, order: Any = None, before: Groups | None = None) -> dict[str, GroupDigest]:
    """The digests of the groups of a file, whose blocks come in some order."""
    blocks = [memoryview(data)[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    found = GroupDigests(extents, before or {})
    for number in order or range(len(blocks)):
        found.note(number, blocks[number])
    return found.result(b"".join(map(digests.block_digest, blocks)))


def groups_of(data: bytes, extents: Groups, order: Any = None) -> dict[str, bytes]:
    return {name: digest.here for name, digest in digested(data, extents, order).items()}


@st.composite
def files(draw: Any) -> tuple[int, dict[str, list[Extent]]]:
    """A file of up to four blocks, and groups in it, of one or several extents."""
    file_bytes = draw(st.integers(1, 4 * BLOCK_BYTES))
    edges = st.integers(0, file_bytes) | st.integers(0, 4).map(lambda n: min(n * BLOCK_BYTES, file_bytes))
    cuts = sorted(draw(st.sets(edges, min_size=2, max_size=8)))
    extents = [Extent(begin, end - begin) for begin, end in itertools.pairwise(cuts)]
    groups: dict[str, list[Extent]] = {}
    for extent in extents:
        groups.setdefault(draw(st.sampled_from("abcd-")), []).append(extent)
    groups.pop("-", None)  # what belongs to no group
    tied = draw(st.sampled_from(extents))  # a group may have the first tensors of another one, too
    groups["tied"] = [Extent(tied.offset, draw(st.integers(1, tied.length)))]
    return file_bytes, groups


@settings(max_examples=60, deadline=None)
@given(files(), st.integers(0), st.randoms(use_true_random=False))
def test_a_flipped_byte_changes_the_digest_of_the_group_that_it_is_in_and_of_no_other(file, at, random):
    file_bytes, extents = file
    data = bytearray(os.urandom(64) * (file_bytes // 64 + 1))[:file_bytes]
    order = list(range(-(-file_bytes // BLOCK_BYTES)))
    before = groups_of(bytes(data), extents)
    random.shuffle(order)
    assert groups_of(bytes(data), extents, order) == before

    at %= file_bytes
    data[at] ^= 1
    after = groups_of(bytes(data), extents, order)
    hit = {n for n, those in extents.items() if any(e.offset <= at < e.end for e in those)}
    assert {name for name in before if before[name] != after[name]} == hit


@settings(max_examples=60, deadline=None)
@given(files(), st.integers(0, 2 * BLOCK_BYTES), st.integers(0), st.randoms(use_true_random=False))
def test_a_group_is_known_wherever_it_lies(file, by, at, random):
    file_bytes, extents = file
    data = bytearray(os.urandom(64) * (file_bytes // 64 + 1))[:file_bytes]
    moved = {name: [Extent(e.offset + by, e.length) for e in those] for name, those in extents.items()}
    order = list(range(-(-(file_bytes + by) // BLOCK_BYTES)))
    random.shuffle(order)
    here = groups_of(bytes(data), extents)
    there = digested(bytes(by) + data, moved, order, before=extents)
    assert {name: digest.before for name, digest in there.items()} == here

    at %= file_bytes
    data[at] ^= 1
    hit = {n for n, those in extents.items() if any(e.offset <= at < e.end for e in those)}
    there = digested(bytes(by) + data, moved, order, before=extents)
    assert {name for name, digest in there.items() if digest.before != here[name]} == hit


def state_of(mib: int = 6) -> dict[str, Any]:
    return {
        "policy": {"w": torch.ones(mib * MIB // 4), "b": torch.zeros(3)},
        "ref": torch.nn.Linear(64, 64),
        "tensor": torch.ones(5),
        "epoch": 1,
    }


def test_a_report_names_the_groups_whose_bytes_are_those_of_the_commit_before(tmp_path):
    state = state_of()
    with open_run(tmp_path) as ckpt:

        def unchanged(step: int) -> tuple[str, ...]:
            return ckpt.save(state, step=step).result().unchanged_groups

        assert unchanged(1) == ()
        assert unchanged(2) == ("model", "policy", "ref")  # tensors at the top are in model.safetensors
        state["policy"]["w"][-1] = 2
        state["epoch"] = 2
        assert unchanged(3) == ("model", "ref")
        state["policy"]["w"][-1] = 1  # as it was two commits before
        state["tensor"][0] = 7
        assert unchanged(4) == ("ref",)
        assert unchanged(5) == ("model", "policy", "ref")


def test_a_group_is_compared_with_the_tensors_that_it_shares_with_others(tmp_path):
    """They are stored once, in the group that comes first; one group here has no others."""
    policy, own = torch.nn.Linear(1024, 1024), torch.ones(3)
    state = {
        "policy": policy,
        "actor": policy,
        "head": {"tied": policy.bias, "own": own},
        "tied": policy.weight,
        "other": {"w": torch.ones(5)},
    }
    with open_run(tmp_path) as ckpt:

        def unchanged(step: int) -> tuple[str, ...]:
            return ckpt.save(state, step=step).result().unchanged_groups

        assert unchanged(1) == ()
        assert unchanged(2) == ("actor", "head", "model", "other", "policy")
        own.add_(1)
        assert unchanged(3) == ("actor", "model", "other", "policy")
        with torch.no_grad():
            policy.bias.add_(1)
        assert unchanged(4) == ("model", "other")
        with torch.no_grad():
            policy.weight[-1, -1] += 1
        assert unchanged(5) == ("head", "other")


def test_plain_values_that_grow_a_little_every_time_hide_nothing(tmp_path):
    """The index before the tensors gets longer, and has room for that once it has grown."""
    state = {**state_of(9), "history": [0.0] * 500}
    found = []
    with open_run(tmp_path) as ckpt:
        for step in range(40):
            state["history"] += [0.123456789] * 20
            found.append(ckpt.save(state, step=step).result().unchanged_groups)
    assert sum("policy" in groups for groups in found) >= 34
    assert all("ref" in groups for groups in found[1:])


def test_a_group_that_has_moved_is_known_all_the_same(tmp_path):
    model, replay, found = torch.nn.Linear(1500, 2048), [], []
    with open_run(tmp_path) as ckpt:
        for step in range(4):
            replay.append(torch.ones(300))
            state = {"buffer": {"items": torch.cat(replay)}, "model": model}
            found.append(ckpt.save(state, step=step).result().unchanged_groups)
    assert found == [(), *[("model",)] * 3]


def test_a_group_is_known_beside_groups_that_are_borrowed_and_then_are_not(tmp_path):
    state = {"model": torch.nn.Linear(1500, 1024), "values": {"v": torch.ones(2 * MIB)}}
    with open_run(tmp_path) as ckpt, async_ckpt.snapshot(state) as held:
        options: list[dict[str, Any]] = [{}, {"unchanged": {"model"}}, {}]
        found = [ckpt.save(held, step=step, **more).result().unchanged_groups for step, more in enumerate(options)]
    assert found == [(), ("model", "values"), ("model", "values")]


def test_what_failed_is_not_what_the_next_commit_is_compared_with(tmp_path):
    state = state_of()
    with open_run(tmp_path) as ckpt:
        ckpt.save(state, step=1).result()
        state["tensor"][0] = 7
        with pytest.raises(async_ckpt.StepExistsError):
            ckpt.save(state, step=1)
        assert ckpt.save(state, step=2).result().unchanged_groups == ("policy", "ref")


def test_borrowed_groups_are_unchanged_and_known_when_they_are_written_again(tmp_path):
    state = state_of(1)
    with open_run(tmp_path) as ckpt:
        ckpt.save(state, step=1).result()
        state["policy"]["w"].add_(1)
        assert ckpt.save(state, step=2, unchanged={"ref"}).result().unchanged_groups == ("model", "ref")
        assert ckpt.save(state, step=3).result().unchanged_groups == ("model", "policy", "ref")


def test_after_a_restore_there_is_no_commit_before(tmp_path):
    state = state_of(1)
    with open_run(tmp_path) as ckpt:
        ckpt.save(state, step=1).result()
        ckpt.restore(state, step=1)
        assert ckpt.save(state, step=2).result().unchanged_groups == ()


def test_a_snapshot_that_is_saved_twice_is_stale(tmp_path):
    state = state_of(1)
    with open_run(tmp_path) as ckpt, async_ckpt.snapshot(state) as snap:
        ckpt.save(snap, step=1)
        state["policy"]["w"].add_(1)
        assert ckpt.save(snap, step=2).result().unchanged_groups == ("model", "policy", "ref")
        assert ckpt.save(state, step=3).result().unchanged_groups == ("model", "ref")


def test_a_one_off_save_has_no_commit_before_it(tmp_path):
    for _ in range(2):
        report = async_ckpt.save(state_of(1), tmp_path / "x.tar").result()
        assert report.unchanged_groups == ()
    assert "unchanged_groups" not in report.as_dict()


def test_entries_of_each_rank_must_be_in_the_state(tmp_path):
    with open_run(tmp_path) as ckpt:
        ckpt.save({"loader": {"at": 5}, "w": torch.ones(3)}, step=1, per_rank={"loader"}).result()
        assert ckpt.load(1)["loader"] == {"at": 5}
        for names in (["laoder"], "laoder"):
            with pytest.raises(ValueError, match=r"per_rank='laoder': the state has no entry of that name"):
                ckpt.save({"loader": 1}, step=2, per_rank=names)
        with pytest.raises(ValueError, match="per_rank="):
            ckpt.save([1], step=2, per_rank=["loader"])
        ckpt.save({"loader": 1}, step=2, per_rank="loader").result()
