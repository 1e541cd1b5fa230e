"""A data loader that would go on in another order than it was saved in is told by name, before anything is filled."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import async_ckpt
from async_ckpt import StateMismatchError
from async_ckpt.core.state import loaders
from async_ckpt.core.state.skeletons import merge
from async_ckpt.core.state.tree import LOADER, note_at, with_notes
from async_ckpt.integrations.dcp import restore

datasets = pytest.importorskip("datasets")
split_dataset_by_node = pytest.importorskip("datasets.distributed").split_dataset_by_node
StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
StatefulDistributedSampler = pytest.importorskip("torchdata.stateful_dataloader.sampler").StatefulDistributedSampler
accelerate = pytest.importorskip("accelerate")

WARM = ("torchdata.stateful_dataloader", "datasets")


class Counting(IterableDataset):
    """Numbers without a length."""

    def __iter__(self) -> Any:
        return iter(range(64))


class Measured(Counting):
    """Says a length that is too small, as when documents are split."""

    def __len__(self) -> int:
        return 8


def items(number: int = 64) -> TensorDataset:
    return TensorDataset(torch.arange(number))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mixed(seed: int, **how: Any) -> Any:
    data = items()
    return StatefulDataLoader(data, 4, sampler=RandomSampler(data, generator=seeded(seed), **how))


def seedable(seed: int) -> Any:
    """A loader of accelerate that draws each epoch by a seed and its number."""
    return accelerate.data_loader.prepare_data_loader(
        StatefulDataLoader(items(), 4, sampler=RandomSampler(items())),
        num_processes=1, put_on_device=False, use_stateful_dataloader=True, use_seedable_sampler=True, data_seed=seed,
    )  # fmt: skip


def numbers(num_shards: int = 4) -> Any:
    return datasets.Dataset.from_dict({"n": list(range(64))}).to_iterable_dataset(num_shards)


def of_replicas(number: int, *, num_items: int = 64, **how: Any) -> Any:
    data = items(num_items)
    return StatefulDataLoader(data, 4, sampler=DistributedSampler(data, number, 0, **how))


def split(num_nodes: int) -> Any:
    return split_dataset_by_node(numbers(), 0, num_nodes)


def prepared(number: int, loader: Any = None) -> Any:
    """A loader of accelerate for one of several processes."""
    loader = StatefulDataLoader(items(), 4, shuffle=True, generator=seeded(0)) if loader is None else loader
    return accelerate.data_loader.prepare_data_loader(
        loader, num_processes=number, process_index=0, put_on_device=False, use_stateful_dataloader=True
    )


class Backwards(BatchSampler):
    """Batches of a user, in an order of their own."""

    def __iter__(self) -> Any:
        return iter([*super().__iter__()][::-1])


def in_batches(size: int) -> Any:
    data = items()
    return StatefulDataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), size, drop_last=False))


def saved(folder: Path, loader: Any) -> Path:
    async_ckpt.save({"loader": loader, "epoch": 1}, folder / "x.tar").result()
    return folder / "x.tar"


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


SAYS = {
    "a shuffled loader of another length": (
        lambda: StatefulDataLoader(items(64), 4, shuffle=True),
        lambda: StatefulDataLoader(items(65), 4, shuffle=True),
        ["number of items 64 in the checkpoint and 65 here", "number of batches 16 in the checkpoint and 17 here"],
    ),
    "a loader of another length in order": (
        lambda: StatefulDataLoader(items(64), 4),
        lambda: StatefulDataLoader(items(62), 4),
        ["number of items 64 in the checkpoint and 62 here"],
    ),
    "a sampler that takes fewer": (
        lambda: StatefulDataLoader(items(), 4, sampler=RandomSampler(items())),
        lambda: StatefulDataLoader(items(), 4, sampler=RandomSampler(items(), num_samples=32)),
        ["number of batches 16 in the checkpoint and 8 here"],
    ),
    "other batches": (
        lambda: StatefulDataLoader(items(), 4),
        lambda: StatefulDataLoader(items(), 8),
        ["number of batches 16 in the checkpoint and 8 here", "batch size 4 in the checkpoint and 8 here"],
    ),
    "another batch sampler": (
        lambda: in_batches(4),
        lambda: in_batches(8),
        ["number of batches 16 in the checkpoint and 8 here", "batch size 4 in the checkpoint and 8 here"],
    ),
    "another number of workers": (
        lambda: StatefulDataLoader(items(), 4, shuffle=True, num_workers=2, multiprocessing_context="spawn"),
        lambda: StatefulDataLoader(items(), 4, shuffle=True),
        ["number of workers 2 in the checkpoint and 0 here"],
    ),
    "a distributed sampler of more ranks": (
        lambda: of_replicas(2, shuffle=True),
        lambda: of_replicas(4, shuffle=True),
        ["number of batches 8 in the checkpoint and 4 here", "world size 2 in the checkpoint and 4 here"],
    ),
    "no distributed sampler any more": (
        lambda: of_replicas(2, shuffle=False),
        lambda: StatefulDataLoader(items(), 4),
        ["number of batches 8 in the checkpoint and 16 here", "world size 2 in the checkpoint and 1 here"],
    ),
    "accelerate's loader for more processes": (
        lambda: prepared(2),
        lambda: prepared(4),
        ["number of batches 8 in the checkpoint and 4 here", "world size 2 in the checkpoint and 4 here"],
    ),
    "accelerate's loader of an iterable dataset": (
        lambda: prepared(2, StatefulDataLoader(Counting(), 4)),
        lambda: prepared(1, StatefulDataLoader(Counting(), 4)),
        ["world size 2 in the checkpoint and 1 here"],
    ),
    "a streamed dataset for more nodes": (
        lambda: split(2),
        lambda: split(4),
        ["number of shards 2 in the checkpoint and 1 here", "world size 2 in the checkpoint and 4 here"],
    ),
    "a streamed dataset of other files": (
        lambda: numbers(4),
        lambda: numbers(8),
        ["number of shards 4 in the checkpoint and 8 here"],
    ),
    "a loader of a streamed dataset": (
        lambda: StatefulDataLoader(split(2).with_format("torch"), 4),
        lambda: StatefulDataLoader(numbers().with_format("torch"), 4),
        ["number of shards 2 in the checkpoint and 4 here", "world size 2 in the checkpoint and 1 here"],
    ),
    "a loader that shuffles now": (
        lambda: StatefulDataLoader(items(), 4),
        lambda: StatefulDataLoader(items(), 4, shuffle=True),
        ["sampling in order in the checkpoint and by RandomSampler here"],
    ),
    "a sampler of another class": (
        lambda: StatefulDataLoader(items(), 4, sampler=WeightedRandomSampler([1.0] * 64, 64)),
        lambda: StatefulDataLoader(items(), 4, sampler=RandomSampler(items())),
        ["sampling by WeightedRandomSampler with replacement in the checkpoint and by RandomSampler here"],
    ),
    "a sampler that may draw an item twice": (
        lambda: mixed(0),
        lambda: mixed(0, replacement=True),
        ["sampling by RandomSampler in the checkpoint and by RandomSampler with replacement here"],
    ),
    "a sampler of batches of another class": (
        lambda: StatefulDataLoader(items(), batch_sampler=BatchSampler(SequentialSampler(items()), 4, drop_last=False)),
        lambda: StatefulDataLoader(items(), batch_sampler=Backwards(SequentialSampler(items()), 4, drop_last=False)),
        ["sampling in order in the checkpoint and by Backwards here"],
    ),
    "a generator of another seed": (
        lambda: mixed(1),
        lambda: mixed(2),
        ["seed 1 in the checkpoint and 2 here"],
    ),
    "a distributed sampler of another seed": (
        lambda: of_replicas(2, seed=1),
        lambda: of_replicas(2, seed=2),
        ["seed 1 in the checkpoint and 2 here"],
    ),
    "a distributed sampler that shuffles no more": (
        lambda: of_replicas(2, shuffle=True),
        lambda: of_replicas(2, shuffle=False),
        ["sampling by DistributedSampler in the checkpoint and in order here"],
    ),
    "a distributed sampler that drops what is over": (
        lambda: of_replicas(2, num_items=7),
        lambda: of_replicas(2, num_items=7, drop_last=True),
        ["drop_last of the sampler False in the checkpoint and True here"],
    ),
    "a loader that drops its last batch": (
        lambda: StatefulDataLoader(items(66), 4),
        lambda: StatefulDataLoader(items(66), 4, drop_last=True),
        ["number of batches 17 in the checkpoint and 16 here", "drop_last False in the checkpoint and True here"],
    ),
    "a loader of no known length that drops its last batch": (
        lambda: StatefulDataLoader(Counting(), 4, drop_last=True),
        lambda: StatefulDataLoader(Counting(), 4),
        ["drop_last True in the checkpoint and False here"],
    ),
    "a seedable sampler of another seed": (
        lambda: seedable(1),
        lambda: seedable(2),
        ["seed 1 in the checkpoint and 2 here"],
    ),
    "no seedable sampler any more": (
        lambda: seedable(1),
        lambda: StatefulDataLoader(items(), 4, sampler=RandomSampler(items())),
        ["sampling by SeedableRandomSampler in the checkpoint and by RandomSampler here"],
    ),
    "accelerate's loader of another seed": (
        lambda: prepared(2, StatefulDataLoader(items(), 4, shuffle=True, generator=seeded(1))),
        lambda: prepared(2, StatefulDataLoader(items(), 4, shuffle=True, generator=seeded(2))),
        ["seed 1 in the checkpoint and 2 here"],
    ),
    "a streamed dataset that is shuffled by another seed": (
        lambda: numbers().shuffle(seed=1).map(dict),
        lambda: numbers().shuffle(seed=2).map(dict),
        ["seed 1 in the checkpoint and 2 here"],
    ),
    "a streamed dataset with a larger buffer, in a loader": (
        lambda: StatefulDataLoader(numbers().shuffle(seed=1, buffer_size=8).with_format("torch"), 4),
        lambda: StatefulDataLoader(numbers().shuffle(seed=1, buffer_size=9).with_format("torch"), 4),
        ["buffer size 8 in the checkpoint and 9 here"],
    ),
    "streamed datasets that are interleaved by another seed": (
        lambda: datasets.interleave_datasets([numbers().shuffle(seed=1), numbers()], [0.5, 0.5], seed=3),
        lambda: datasets.interleave_datasets([numbers().shuffle(seed=1), numbers()], [0.5, 0.5], seed=4),
        ["seed 3 in the checkpoint and 4 here"],
    ),
}


@pytest.mark.parametrize("case", SAYS)
def test_another_order_is_a_warning_by_name_and_an_error_with_strict(case, tmp_path, caplog):
    before, after, facts = SAYS[case]
    path = saved(tmp_path, before())
    caplog.clear()
    live: dict[str, Any] = {"loader": after(), "epoch": 0}
    with pytest.raises(StateMismatchError, match="leave strict=True out to go on with another order") as caught:
        restore(live, path, strict=True)
    assert f"loader yields its data in another order than at the save: {', '.join(facts)}" in str(caught.value)
    assert caught.value.mismatched == (str(caught.value).splitlines()[1].strip(),)
    assert live["epoch"] == 0
    assert not told(caplog)
    for how in ({}, {"strict": False}):
        caplog.clear()
        restore({"loader": after(), "epoch": 0}, path, **how)
        (warning,) = told(caplog)
        assert f"loader yields its data in another order than at the save: {', '.join(facts)}; construct" in warning


SILENT: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "settings of the host": (
        lambda: StatefulDataLoader(items(), 4, shuffle=True),
        lambda: StatefulDataLoader(items(), 4, shuffle=True, pin_memory=False, timeout=0, collate_fn=list),
    ),
    "settings of the workers": (
        lambda: StatefulDataLoader(items(), 4, num_workers=1, multiprocessing_context="spawn"),
        lambda: StatefulDataLoader(
            items(), 4, num_workers=1, multiprocessing_context="spawn", prefetch_factor=4, persistent_workers=True
        ),
    ),
    "a distributed sampler of one rank": (
        lambda: of_replicas(1, shuffle=False),
        lambda: StatefulDataLoader(items(), 4),
    ),
    "accelerate with one process": (
        lambda: prepared(1, StatefulDataLoader(items(), 4)),
        lambda: StatefulDataLoader(items(), 4),
    ),
    "a streamed dataset in another format": (numbers, lambda: numbers().with_format("torch")),
    "a sampler of the same seed, made anew": (lambda: mixed(1), lambda: mixed(1)),
    "a loader whose state has its generator": (
        lambda: StatefulDataLoader(items(), 4, shuffle=True, generator=seeded(1)),
        lambda: StatefulDataLoader(items(), 4, shuffle=True, generator=seeded(2)),
    ),
    "the seed of a generator that mixes nothing": (
        lambda: StatefulDataLoader(items(), 4, generator=seeded(1)),
        lambda: StatefulDataLoader(items(), 4, generator=seeded(2)),
    ),
    "the seed of a distributed sampler that shuffles nothing": (
        lambda: of_replicas(2, shuffle=False, seed=1),
        lambda: of_replicas(2, shuffle=False, seed=2),
    ),
    "drop_last where nothing is over": (
        lambda: of_replicas(2, shuffle=True),
        lambda: StatefulDataLoader(
            items(), 4, sampler=DistributedSampler(items(), 2, 0, drop_last=True), drop_last=True
        ),
    ),
    "a distributed sampler with a state": (
        lambda: of_replicas(2, seed=1),
        lambda: StatefulDataLoader(items(), 4, sampler=StatefulDistributedSampler(items(), 2, 0, seed=1)),
    ),
    "a sampler of batches that only names its sampler": (
        lambda: StatefulDataLoader(items(), 4),
        lambda: StatefulDataLoader(items(), batch_sampler=BatchSampler(SequentialSampler(items()), 4, drop_last=False)),
    ),
    "a seedable sampler of the same seed": (lambda: seedable(1), lambda: seedable(1)),
    "a streamed dataset that is shuffled alike": (
        lambda: numbers().shuffle(seed=1),
        lambda: numbers().shuffle(seed=1).with_format("torch"),
    ),
}


@pytest.mark.parametrize("case", SILENT)
def test_what_changes_no_order_is_not_told(case, tmp_path, caplog):
    before, after = SILENT[case]
    path = saved(tmp_path, before())
    caplog.clear()
    restore({"loader": after(), "epoch": 0}, path, strict=True)
    assert not told(caplog)


def test_a_loader_goes_on_where_it_was(tmp_path):
    """The facts stand beside its state, and are no part of it."""
    loader = StatefulDataLoader(items(), 4, shuffle=True)
    batches = iter(loader)
    before = [next(batches) for _ in range(3)]
    path = saved(tmp_path, loader)
    rest = [batch[0].tolist() for batch in batches]
    live = StatefulDataLoader(items(), 4, shuffle=True)
    restore({"loader": live}, path, strict=True)
    assert [batch[0].tolist() for batch in live] == rest
    assert len(before) + len(rest) == 16
    assert async_ckpt.load(path, select="loader")["loader"].keys() == loader.state_dict().keys()


def test_the_seed_of_a_generator_that_is_restored_beside_the_loader_says_nothing(tmp_path, caplog):
    loader, live = mixed(1), mixed(2)
    async_ckpt.save({"loader": loader, "by": {"g": loader.sampler.generator}}, tmp_path / "x.tar").result()
    restore({"loader": live, "by": {"g": live.sampler.generator}}, tmp_path / "x.tar", strict=True)
    assert [batch[0].tolist() for batch in live] == [batch[0].tolist() for batch in mixed(1)]
    assert not told(caplog)


def test_a_shuffle_without_a_seed_is_told(tmp_path):
    """Each call of it draws another order."""
    path = saved(tmp_path, numbers().shuffle())
    with pytest.raises(StateMismatchError, match=r"seed \d+ in the checkpoint and \d+ here"):
        restore({"loader": numbers().shuffle()}, path, strict=True)


def test_objects_of_users_that_raise_or_have_no_end_are_saved(tmp_path, caplog):
    class Endless(RandomSampler):
        @property
        def sampler(self) -> Any:
            return self

        @property
        def seed(self) -> int:
            raise RuntimeError("not before the first epoch")

    loader = StatefulDataLoader(items(), 4, sampler=Endless(items()))
    restore({"loader": loader, "epoch": 0}, saved(tmp_path, loader), strict=True)
    assert not told(caplog)


def test_lightnings_wrapper_of_a_sampler_is_named_with_the_sampler():
    wrapper = pytest.importorskip("lightning_fabric.utilities.distributed").DistributedSamplerWrapper

    def facts(sampler: Any) -> dict[str, Any]:
        wrapped = wrapper(sampler, num_replicas=2, rank=0, seed=5)
        return loaders.loader_facts(DataLoader(items(), 4, sampler=wrapped))

    weighted = facts(WeightedRandomSampler([1.0] * 64, 64))
    assert weighted["sampling"] == "by DistributedSamplerWrapper of WeightedRandomSampler with replacement"
    assert (weighted["seed"], weighted["world_size"]) == (5, 2)
    assert facts(SequentialSampler(items()))["sampling"] == "by DistributedSamplerWrapper"


@pytest.mark.parametrize(
    "known", [(), ("items", "batches", "batch_size", "shards", "num_workers", "world_size")], ids=["none", "the first"]
)
def test_a_checkpoint_without_the_facts_says_nothing(known, tmp_path, caplog, monkeypatch):
    """As those of earlier versions."""
    monkeypatch.setattr(
        "async_ckpt.core.state.capture.loader_facts",
        lambda loader: {name: fact for name, fact in loaders.loader_facts(loader).items() if name in known},
    )
    path = saved(tmp_path, of_replicas(2, seed=1, num_items=66))
    monkeypatch.undo()
    caplog.clear()
    live = of_replicas(2, seed=2, num_items=66, drop_last=True) if known else of_replicas(4, seed=2)
    restore({"loader": live}, path, strict=True)
    assert not told(caplog)


def test_facts_of_a_hostile_file_are_only_shown():
    live = StatefulDataLoader(items(), 4)
    for saved in (
        None,
        [],
        "x",
        {"num_workers": {"dict": []}, "items": "\x1b[2J" * 99, "more": 1},
        {"sampling": "'\x1b" + "\ud800" * 99, "seed": [10**40] * 9, "drop_last": None, "batches": {}},
    ):
        assert all(line.isprintable() and len(line) < 120 for line in loaders.order_differences(live, saved))


def test_a_loader_in_a_snapshot_is_known(tmp_path):
    with async_ckpt.snapshot({"all": [{"loader": of_replicas(2)}]}) as snap:
        path = saved(tmp_path, snap["all"][0]["loader"])
    with pytest.raises(StateMismatchError, match="world size 2 in the checkpoint and 3 here"):
        restore({"loader": of_replicas(3)}, path, strict=True)


def test_the_length_of_an_iterable_dataset_is_not_asked_of_its_loader(tmp_path, recwarn):
    """torch warns of each item that is beyond it, once it was asked."""
    loader = StatefulDataLoader(Measured(), 4)
    path = saved(tmp_path, loader)
    restore({"loader": loader}, path, strict=True)
    assert len(list(loader)) == 16
    assert not [str(one.message) for one in recwarn.list if "set_vital" not in str(one.message)]


# --- several ranks ------------------------------------------------------------------------------------------------

_LOADER = """
import logging, torch
from torch.utils.data import DistributedSampler, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
class Divided(IterableDataset):
    "Divides its numbers itself."
    def __iter__(self):
        return iter(range(here.rank, 64, here.size))
data = TensorDataset(torch.arange(64))
def make(kind):
    if kind == "streamed":
        return split_dataset_by_node(Dataset.from_list([{{"n": n}} for n in range(64)]).to_iterable_dataset(4), here.rank, here.size)
    if kind == "whole":
        return Dataset.from_list([{{"n": n}} for n in range(64)]).to_iterable_dataset(4)
    if kind == "divided":
        return StatefulDataLoader(Divided(), 4)
    return StatefulDataLoader(data, 4, sampler=DistributedSampler(data, here.size, here.rank, shuffle=kind == "shuffled"))
kind, per_rank = {kind!r}, {per_rank}
loader = make(kind)
"""
_SAVE = """
batches = iter(loader)
for _ in range(2 + 2 * here.rank if per_rank else 2):
    next(batches)
with open_run(here.root) as ckpt:
    here.tell(ckpt.save({"loader": loader}, 1, per_rank={"loader"} if per_rank else ()).result().status)
"""
_RESTORE = """
class Log(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING:
            here.tell(record.getMessage())
logging.getLogger("async_ckpt").addHandler(Log())
from async_ckpt import StateMismatchError
with open_run(here.root) as ckpt:
    try:
        ckpt.restore({"loader": loader}, strict=True, **{how})
        here.tell("as it was")
    except StateMismatchError as error:
        here.tell(error.mismatched)
    ckpt.restore({"loader": loader}, **{how})
"""
OTHER_SIZE = "world size 2 in the checkpoint and 1 here"


@pytest.mark.parametrize("kind", ["in order", "shuffled", "streamed", "divided"])
@pytest.mark.parametrize("per_rank", [False, True], ids=["alike", "per rank"])
def test_one_rank_instead_of_two_is_told_and_as_many_are_not(worlds, kind, per_rank):
    loader = _LOADER.format(kind=kind, per_rank=per_rank)
    how = {"from_ranks": {"loader": 1}} if per_rank else {}
    assert [end.told for end in worlds.run(2, loader + _SAVE)] == [["committed"], ["committed"]]
    for end in worlds.run(2, loader + _RESTORE.replace("{how}", "{}")):
        assert end.told == ["as it was"]
    (end,) = worlds.run(1, loader + _RESTORE.replace("{how}", str(how)))
    refused, *warnings = end.told
    assert OTHER_SIZE in refused[0]
    assert any("loader yields its data in another order" in line and OTHER_SIZE in line for line in warnings)


def test_a_dataset_that_no_rank_has_split_is_the_same_on_any_number_of_ranks(worlds):
    loader = _LOADER.format(kind="whole", per_rank=False)
    worlds.run(2, loader + _SAVE)
    (end,) = worlds.run(1, loader + _RESTORE.replace("{how}", "{}"))
    assert end.told == ["as it was"]


def test_where_ranks_differ_only_what_is_alike_is_compared():
    nodes = {rank: {"dict": [["loader", {"dict": [["at", 0]]}]]} for rank in range(3)}
    for rank, node in nodes.items():
        with_notes(node, {("loader",): {LOADER: {"items": 64 + rank, "batch_size": 4}}})
    merged = merge(nodes, dict.fromkeys(nodes, 0)).skeleton
    assert note_at(merged, ("loader",), LOADER) == {"batch_size": 4}
