"""What a commit asks a store does not grow with the steps that are kept; a new process pays for knowing them once."""

import pytest
import torch
from states import assert_is_state, everywhere, journaled_steps, open_run, state_at

from async_ckpt import AsyncCheckpointer, Place
from async_ckpt.core.runs.manifest import Archive, Manifest
from async_ckpt.core.storage.local import LocalStorage

# Beside one page of a listing for every thousand folders. An upload in parts asks for each of these, too. The history
# takes one of them, and the look for later starts after the manifest of a deleted step another.
MOST_REQUESTS = 15


def seed(s3, bucket: str, num_steps: int) -> None:
    """Committed steps, as another process has left them; nobody reads their archives."""
    for step in range(num_steps):
        attempt = f"{step:08x}"
        name = f"rank_00000.{attempt}.tar"
        made = Manifest(step, attempt, 1, 1e9 + step, (Archive(name, 5, "0" * 32),))
        folder = f"run/step_{step:08d}"
        s3.client.put_object(Bucket=bucket, Key=f"{folder}/{name}", Body=b"bytes")
        s3.client.put_object(Bucket=bucket, Key=f"{folder}/manifest.json", Body=made.dump())


def through(proxy, s3, bucket: str) -> Place:
    return Place(f"s3://{bucket}/run", options={**s3.options, "endpoint": proxy.endpoint})


def save(ckpt: AsyncCheckpointer, step: int) -> None:
    ckpt.save({"weight": torch.full((8,), float(step))}, step=step).result()
    ckpt.wait()


@pytest.mark.parametrize("options", [{}, {"on_rollback": "retire"}], ids=["plain", "retire"])
@pytest.mark.parametrize("num_kept", [3, 60])
def test_a_commit_asks_a_store_the_same_few_things_whatever_is_kept(s3, bucket, proxy, num_kept, options):
    seed(s3, bucket, num_kept)
    with open_run(through(proxy, s3, bucket), keep=num_kept, **options) as ckpt:
        save(ckpt, num_kept)  # which learns what is there
        learned = len(proxy.requests)
        for step in range(num_kept + 1, num_kept + 4):
            before = len(proxy.requests)
            save(ckpt, step)
            asked = proxy.requests[before:]
            assert len(asked) <= MOST_REQUESTS, "\n".join(f"{r.method} {r.target}" for r in asked)
        assert ckpt.steps() == list(range(4, num_kept + 4))
        assert journaled_steps(ckpt) == list(range(4, num_kept + 4))
    # A new process looks at each folder once: what is written there, and what a dead writer may have left.
    # Six requests prove the place.
    assert learned <= 36 + 3 * num_kept


def test_with_several_roots_a_commit_asks_a_store_no_more(s3, bucket, proxy, tmp_path):
    with open_run([tmp_path, through(proxy, s3, bucket)], keep=20) as ckpt:
        for step in range(21):
            everywhere(ckpt, ckpt.save({"weight": torch.full((8,), float(step))}, step=step))
        for step in range(21, 24):
            before = len(proxy.requests)
            everywhere(ckpt, ckpt.save({"weight": torch.full((8,), float(step))}, step=step))
            asked = proxy.requests[before:]
            # The mover lists the place before and behind a copy, and looks for steps that retention has deleted at one.
            assert len(asked) <= MOST_REQUESTS + 12, "\n".join(f"{r.method} {r.target}" for r in asked)
        assert ckpt.steps() == list(range(4, 24))


def test_steps_that_only_a_further_place_keeps_cost_a_commit_nothing(s3, bucket, proxy, tmp_path):
    seed(s3, bucket, 40)
    with open_run([Place(tmp_path, keep=2), through(proxy, s3, bucket)]) as ckpt:
        for step in range(40, 43):
            everywhere(ckpt, ckpt.save({"weight": torch.full((8,), float(step))}, step=step))
        for step in range(43, 46):
            before = len(proxy.requests)
            everywhere(ckpt, ckpt.save({"weight": torch.full((8,), float(step))}, step=step))
            asked = proxy.requests[before:]
            assert len(asked) <= MOST_REQUESTS + 12, "\n".join(f"{r.method} {r.target}" for r in asked)


def test_after_several_starts_a_listing_of_two_places_reads_each_manifest_once(tmp_path, monkeypatch):
    roots = [tmp_path / "near", tmp_path / "far"]
    for first in (0, 8):
        with open_run(roots) as ckpt:
            for step in range(first, first + 8):
                everywhere(ckpt, ckpt.save({"weight": torch.zeros(8)}, step=step))
    with open_run(roots) as ckpt:
        assert ckpt.steps() == [*range(16)]
        reads: list[str] = []
        read = LocalStorage.read
        monkeypatch.setattr(LocalStorage, "read", lambda storage, path: reads.append(path) or read(storage, path))
        assert ckpt.steps() == [*range(16)]
        assert ckpt.latest() == 15
        assert [path for path in reads if path.endswith("manifest.json")] == []


@pytest.mark.parametrize("num_retired", [2, 5, 20, 60])
def test_steps_that_a_rollback_has_retired_cost_pages_of_a_listing_however_many_they_are(
    s3, bucket, proxy, num_retired
):
    seed(s3, bucket, num_retired + 1)
    with open_run(through(proxy, s3, bucket), on_rollback="retire") as ckpt:
        ckpt.save({"weight": torch.zeros(8)}, step=0, overwrite=True).result()
        ckpt.wait()
        save(ckpt, num_retired + 1)
        for step in range(num_retired + 2, num_retired + 5):
            before = len(proxy.requests)
            save(ckpt, step)
            asked = proxy.requests[before:]
            assert len(asked) <= MOST_REQUESTS, "\n".join(f"{r.method} {r.target}" for r in asked)
        before = len(proxy.requests)
        assert ckpt.steps() == [0, *range(num_retired + 1, num_retired + 5)]
        assert len(proxy.requests) - before <= 4


def test_a_new_process_asks_for_what_it_does_not_know_all_at_once(s3, bucket, proxy):
    seed(s3, bucket, 12)
    held = proxy.delay(None, method="GET", target=r"manifest\.json")
    with open_run(through(proxy, s3, bucket)) as ckpt:
        handle = ckpt.save({"weight": torch.zeros(8)}, step=12)
        try:
            for _ in range(12):
                held.wait()
        finally:
            held.clear()
        handle.result()


def test_what_another_process_commits_deletes_and_takes_out_of_the_run_is_seen_at_the_next_save(tmp_path):
    with open_run(tmp_path) as ours, open_run(tmp_path, keep=2, on_rollback="retire") as theirs:
        for step in (1, 2):
            ours.save(state_at(step), step=step).result()
        ours.wait()
        for step in (3, 4):
            theirs.save(state_at(step), step=step).result()
        theirs.wait()
        ours.save(state_at(5), step=5).result()
        ours.wait()
        assert journaled_steps(ours) == [3, 4, 5]
        theirs.restore(state_at(0), step=3)
        theirs.save(state_at(4) | {"note": "anew"}, step=4, overwrite=True).result()
        theirs.wait()
        ours.save(state_at(6), step=6).result()
        ours.wait()
        assert ours.steps() == [3, 4, 6]
        assert journaled_steps(ours) == [3, 4, 6]
        assert_is_state(ours.load(6), 6)
        assert ours.load(4)["note"] == "anew"
