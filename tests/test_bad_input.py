"""Arguments that are not valid: each is refused by name where it is given, in plain words."""

import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import async_ckpt
from async_ckpt import AsyncCheckpointer, Due, Ema, Keep, Naming, NonFinite, Place, Publisher, Zstd
from async_ckpt.integrations.dcp import TarStorageReader, restore, to_dcp

STATE = {"w": torch.ones(2)}


def opened(**options: Any) -> Callable[[Path], Any]:
    return lambda path: AsyncCheckpointer(path / "run", **options)


def called(use: Callable[[AsyncCheckpointer], Any]) -> Callable[[Path], Any]:
    def call(path: Path) -> None:
        with AsyncCheckpointer(path / "run", due=Due(every=2)) as ckpt:
            use(ckpt)

    return call


def extracted(**limits: Any) -> Callable[[Path], Any]:
    def call(path: Path) -> None:
        tarfile.open(path / "x.tar", "w").close()
        async_ckpt.files.extract(path / "x.tar", path / "out", **limits)

    return call


def loaded(load: Callable[..., Any] = async_ckpt.load, **options: Any) -> Callable[[Path], Any]:
    def call(path: Path) -> None:
        async_ckpt.save(STATE, path / "x.tar").result()
        load(path / "x.tar", **options)

    return call


def merged(step: Any, **options: Any) -> Callable[[Path], Any]:
    def call(path: Path) -> None:
        with AsyncCheckpointer(path / "run") as ckpt:
            ckpt.save(STATE, 1).result()
        async_ckpt.merge(path / "run", step, path / "x.tar", **options)

    return call


def converted(path: Path, **options: Any) -> None:
    to_dcp(path, path.parent / "dcp", **options)


def restored(path: Path, **options: Any) -> None:
    restore(STATE, path, **options)


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (opened(keep=True), TypeError, "keep must be a number of steps, or Keep(…), got True"),
        (opened(max_in_flight=1.5), ValueError, "max_in_flight must be a whole number, at least 1, got 1.5"),
        (opened(max_bandwidth=True), ValueError, "max_bandwidth must be a number of bytes per second, such as 500e6, got True"),
        (opened(host_bytes=0.5), ValueError, "host_bytes must be a number of bytes above 0"),
        (opened(exit_timeout=-1), ValueError, "exit_timeout must be at least 0 seconds, got -1"),
        (opened(exit_timeout="5"), TypeError, "exit_timeout must be a number of seconds or None, got '5'"),
        (opened(progress="y"), ValueError, "progress must be True or False, got 'y'"),
        (opened(strict=1), ValueError, "strict must be True or False, got 1"),
        (lambda path: async_ckpt.save(path / "x.tar", STATE), TypeError, "the order is save(obj, path), as in torch.save"),
        (called(lambda c: c.save(STATE, 1, rolling="x")), ValueError, "rolling must be True or False, got 'x'"),
        (called(lambda c: c.save(STATE, 1, overwrite="x")), ValueError, "overwrite must be True or False, got 'x'"),
        (called(lambda c: c.save(STATE, 1, unchanged=3)), TypeError, "unchanged must be the name of an entry of the state"),
        (called(lambda c: c.save(STATE, 1, per_rank=3)), TypeError, "per_rank must be the name of an entry of the state"),
        (called(lambda c: c.prewarm(STATE, per_rank=3)), TypeError, "or several of them, got 3"),
        (called(lambda c: c.save(STATE, 1, driver=5)), TypeError, "driver must be a mapping such as"),
        (called(lambda c: c.should_save("3")), ValueError, "step must be a whole number from 0 on, got '3'"),
        (called(lambda c: c.should_save(torch.tensor(4))), ValueError, "from 0 on, got a Tensor"),
        (called(lambda c: c.should_save(-1)), ValueError, "step must be a whole number from 0 on, got -1"),
        (called(lambda c: c.save(STATE, 2**63)), ValueError, "step must be below 2**63, got 9223372036854775808"),
        (called(lambda c: c.restore({"w": torch.ones(2)}, True)), ValueError, "step must be a whole number from 0 on, got True"),
        (called(lambda c: c.restore({"w": torch.ones(2)}, "1")), ValueError, "step must be a whole number from 0 on, got '1'"),
        (called(lambda c: c.load(torch.tensor(1))), ValueError, "step must be a whole number from 0 on, got a Tensor"),
        (called(lambda c: c.restore({"w": torch.ones(2)}, trust="no")), ValueError, "trust must be True or False, got 'no'"),
        (called(lambda c: c.restore({"w": torch.ones(2)}, strict=0)), ValueError, "strict must be True or False, got 0"),
        (called(lambda c: c.load(1, trust=1)), ValueError, "trust must be True or False, got 1"),
        (loaded(trust="no"), ValueError, "trust must be True or False, got 'no'"),
        (called(lambda c: c.load([1])), ValueError, "step must be a whole number from 0 on, got a list"),
        (called(lambda c: c.wait(timeout=float("nan"))), TypeError, "timeout must be a number of seconds or None, got nan"),
        (called(lambda c: c.wait(timeout="x")), TypeError, "timeout must be a number of seconds or None, got 'x'"),
        (called(lambda c: c.save(STATE, 1).result("x")), TypeError, "timeout must be a number of seconds"),
        (called(lambda c: c.save(STATE, 1).add_done_callback(3)), TypeError, "takes a function of the handle, got 3"),
        (extracted(max_bytes="1G"), ValueError, "max_bytes must be a number, at least 0, such as 10**9, or None; got '1G'"),
        (extracted(max_file_bytes=-1), ValueError, "max_file_bytes must be a number, at least 0"),
        (loaded(from_ranks={"w": "0"}), TypeError, "from_ranks must be a mapping from names to numbers of ranks"),
        (loaded(from_ranks={"w": 1.0}), TypeError, "from_ranks must be a mapping from names to numbers of ranks"),
        (loaded(from_ranks={"w": True}), TypeError, "from_ranks must be a mapping from names to numbers of ranks"),
        (loaded(from_ranks="w"), TypeError, 'such as {"rng": 0}; got \'w\''),
        (loaded(from_ranks={"w": 0, "typo": 0}), KeyError, "'typo' names nothing in"),
        (loaded(TarStorageReader, from_ranks=["w"]), TypeError, "from_ranks must be a mapping"),
        (loaded(TarStorageReader, verify="yes"), ValueError, "verify must be True or False, got 'yes'"),
        (merged("1"), TypeError, "step must be the number of a step, got '1'"),
        (merged(True), TypeError, "step must be the number of a step, got True"),
        (merged(1, trust="no"), ValueError, "trust must be True or False, got 'no'"),
        (merged(1, verify=None), ValueError, "verify must be True or False, got None"),
        (loaded(converted, trust="no"), ValueError, "trust must be True or False, got 'no'"),
        (loaded(converted, verify=1), ValueError, "verify must be True or False, got 1"),
        (loaded(restored, verify="first"), ValueError, "verify must be True or False, got 'first'"),
        (lambda _: async_ckpt.wrap(torch.save, file_object="no"), ValueError, "file_object must be True or False, got 'no'"),
        (lambda _: async_ckpt.wrap(torch.save, whole_folder=0), ValueError, "whole_folder must be True or False, got 0"),
        (lambda _: Place("s3:/x"), ValueError, "s3:/x has one slash too few; write s3://x"),
        (lambda _: Place("x", fs=5), TypeError, "fs must be a filesystem of fsspec, such as"),
        (lambda _: Naming(5), TypeError, 'step_format must be text such as "step_{:08d}", got 5'),
        (lambda _: Naming("s{}", "checkpoints.jsonl"), ValueError, "must not be checkpoints.jsonl, which is the journal"),
        (lambda _: Naming("latest{}", "latest1"), ValueError, "tracker latest1 could be the folder of a step"),
    ],
)  # fmt: skip
def test_an_argument_that_is_not_valid_is_refused_by_its_name(tmp_path, call, kind, told):
    with pytest.raises(kind, match=re.escape(told)):
        call(tmp_path)


def test_numbers_of_numpy_are_taken_as_numbers_of_python(tmp_path):
    count, share = np.int64, np.float32
    due = Due(every=count(2), seconds=share(9e9), deadline=np.float64(9e9), signals=[count(10)])
    options = {
        "keep": Keep(last=count(2), every=count(5), seconds=count(9), best=("loss", "min", count(1))),
        "due": due,
    }
    options |= {"host_bytes": count(32 << 20), "max_in_flight": count(2), "max_bandwidth": count(10**9)}
    options |= {"exit_timeout": share(5), "ema": Ema(share(0.5), "w"), "check": NonFinite(every=count(2))}
    with AsyncCheckpointer(
        [tmp_path / "a", Place(tmp_path / "b", every=count(2), volatile=np.False_)], **options
    ) as ckpt:
        record = {"loss": share(0.5), "batch": count(3)}
        ckpt.save({"w": {"a": torch.ones(2)}}, count(2), record=record, ttl_seconds=count(10**6)).result(share(60))
        ckpt.wait(count(60))

        assert ckpt.should_save(count(4))
        assert ckpt.steps() == [2]
    publisher = Publisher(tmp_path / "p", anchor_every=count(2), keep=count(2), host_bytes=count(64 << 20))
    with publisher, async_ckpt.Subscriber(tmp_path / "p") as subscriber:
        publisher.publish(STATE, count(3)).result()

        assert next(subscriber.watch(poll_seconds=share(0.5))) == 3
    async_ckpt.save(STATE, tmp_path / "x.tar.zst", compression=Zstd(count(2), count(2))).result()
    async_ckpt.export_hf(STATE, tmp_path / "hf", max_shard_bytes=count(100)).result()
