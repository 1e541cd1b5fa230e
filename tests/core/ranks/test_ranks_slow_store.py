"""Ranks at a store that answers slowly, each rank for itself, and that may ignore the conditions of requests: every step is whole,
and no rank is told otherwise.
"""

import contextlib
import random
from collections.abc import Iterator

import botocore.exceptions
import botocore.session
import pytest
import torch
from rank_oracle import saved
from rank_states import numbered
from slices import some
from states import open_run

from async_ckpt import Place
from async_ckpt.testing import FaultyProxy
from async_ckpt.testing.servers import Server

# A training, then the same again from a step before its end, as a rollback; each rank goes by a proxy of its own.
TRAINING = """
import warnings
from async_ckpt import Place
from children import die_at_request
warnings.simplefilter("ignore", RuntimeWarning)  # that the store ignores conditions
ways, who, number = {ways}, {who}, {number}
root = Place({url!r}, options={options!r} | dict(endpoint=ways[here.rank]))
with open_run(root, keep=4) as ckpt:
    for step in (1, 2, 3):
        here.meet(f"step {{step}}")
        if here.rank == who and step == 3:
            die_at_request(number, here.die)
        elif who is not None and step == 3:
            here.expire(lambda: here.is_said(f"dead{{who}}"))
        here.save(ckpt, small(step), step)
if who is None:
    with open_run(root, keep=4, on_rollback="retire") as ckpt:
        state = small(0)
        here.tell(ckpt.restore(state, step=1))
        here.save(ckpt, small(2), 2, overwrite=True)
"""
AGAIN = """
from async_ckpt import Place
with open_run(Place({url!r}, options={options!r}), on_rollback="retire") as ckpt:
    state = small(0)
    start = ckpt.restore(state)
    here.tell([start, float(state["model"]["whole"].min())])
    here.save(ckpt, small(start + 1), start + 1)
"""
# What ranks ask of a store while they save.
KINDS = (
    "put_object",
    "get_object",
    "head_object",
    "list_objects_v2",
    "delete_object",
    "delete_objects",
    "create_multipart_upload",
)


@pytest.fixture
def proxies(s3: Server) -> Iterator[list[FaultyProxy]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(FaultyProxy(s3.endpoint)) for _ in range(2)]


def slow_down(proxies: list[FaultyProxy], dice: random.Random, *, has_conditions: bool) -> None:
    """Some kinds of requests of some ranks take long, or no condition is obeyed."""
    for proxy in proxies:
        if not has_conditions:
            proxy.ignore_conditions()
        else:
            for kind in dice.sample(KINDS, dice.randint(0, 3)):
                proxy.delay(dice.uniform(0.01, 0.3), kind=kind)


def assert_whole(root: Place, steps: list[int]) -> None:
    assert open_run(root).steps() == steps
    for step in steps:
        tensors = saved(root, step).tensors
        assert torch.equal(tensors["model.cut"], numbered(41, 3) + step)
        assert torch.equal(tensors["model.whole"], numbered(300, 1000) + step)


def test_a_proxy_takes_conditions_out_of_requests(s3, bucket, proxies):
    def put(proxy: FaultyProxy) -> None:
        client = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=proxy.endpoint,
            region_name="us-east-1",
            aws_access_key_id=s3.options["access_key_id"],
            aws_secret_access_key=s3.options["secret_access_key"],
        )
        client.put_object(Bucket=bucket, Key="key", Body=b"abc", IfNoneMatch="*")

    proxies[1].ignore_conditions()
    put(proxies[0])
    with pytest.raises(botocore.exceptions.ClientError, match="PreconditionFailed"):
        put(proxies[0])
    put(proxies[1])


@pytest.mark.parametrize("has_conditions", [True, False])
@pytest.mark.parametrize("seed", some(range(60), 60))
def test_a_training_and_its_rollback_are_whole_however_slowly_each_rank_is_answered(
    worlds, s3, bucket, proxies, seed, has_conditions
):
    slow_down(proxies, random.Random(seed), has_conditions=has_conditions)
    root = Place(f"s3://{bucket}/run", options=s3.options)
    ways = [proxy.endpoint for proxy in proxies]
    for one in worlds.run(
        2, TRAINING.format(ways=ways, who=None, number=0, url=root.url, options=root.options), patience=300
    ):
        assert [save.get("status") for save in one.saves] == ["committed"] * 4, one.saves
        assert 1 in one.told
    assert_whole(root, [1, 2])


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("seed", some(range(60), 60))
def test_killed_at_a_slow_store_the_step_is_whole_or_not_there(worlds, s3, bucket, proxies, seed, who):
    dice = random.Random(seed)
    slow_down(proxies, dice, has_conditions=dice.random() < 0.7)
    root = Place(f"s3://{bucket}/run", options=s3.options)
    where = {"url": root.url, "options": root.options}
    ways, number = [proxy.endpoint for proxy in proxies], dice.randint(1, 12)
    ended = worlds.start(2, TRAINING.format(ways=ways, who=who, number=number, **where)).ended(
        failed={who}, patience=300
    )
    survivor = ended[1 - who].saves[-1]
    steps = open_run(root).steps()
    assert steps in ([1, 2], [1, 2, 3])
    assert_whole(root, steps)
    if survivor["step"] == 3 and not survivor.get("undecided"):
        assert (survivor.get("status") == "committed") == (3 in steps)
    for proxy in proxies:
        proxy.clear()
    for one in worlds.run(2, AGAIN.format(**where)):
        assert one.told[0] == [steps[-1], float(steps[-1])]
        assert one.saves[0].get("status") == "committed"
    assert_whole(root, [*steps, steps[-1] + 1][-3:] if len(steps) < 3 else [*steps, steps[-1] + 1])
