"""Pickled objects that are the same have one digest, whatever their pickles are like."""

import datetime
import decimal
import fractions
from collections import OrderedDict
from typing import Any

import pytest
import torch

from async_ckpt.core.pickles import object_digests as module
from async_ckpt.core.pickles.object_digests import object_digests
from async_ckpt.core.state.capture import pickled


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


def digests(*objects: Any) -> list[str]:
    told = object_digests(pickled(list(objects)))
    return [told(number) for number in range(len(objects))]


def itself(value: Any) -> Holder:
    made = Holder(value)
    made.me = made  # type: ignore[attr-defined]
    return made


SHARED = [1, 2]
ONE = torch.ones(6)


@pytest.mark.parametrize(
    ("one", "same", "other"),
    [
        ({0, 8}, {8, 0}, {0, 9}),
        (frozenset({0, 8}), frozenset({8, 0}), {0, 8}),
        (Holder([{0, 8}]), Holder([{8, 0}]), Holder([{8}])),
        (Holder([SHARED, SHARED]), Holder([[1, 2], [1, 2]]), Holder([SHARED])),
        (itself(1), itself(1), itself(2)),
        (Holder(ONE[:3]), Holder(ONE.clone()[:3]), Holder(torch.zeros(6)[:3])),
        (Holder(ONE[:3]), Holder(ONE[:3]), Holder(ONE[3:])),
        (Holder(b"a"), Holder(b"a"), Holder("a")),
        (Holder(1), Holder(1), Holder(True)),
        (Holder((1, 2)), Holder((1, 2)), Holder([1, 2])),
        (Holder(2**300), Holder(2**300), Holder(2**300 + 1)),
        (datetime.timedelta(1), datetime.timedelta(1), datetime.timedelta(2)),
        (decimal.Decimal("1.5"), decimal.Decimal("1.5"), fractions.Fraction(3, 2)),
        (OrderedDict(a=Holder(1)), OrderedDict(a=Holder(1)), OrderedDict(b=Holder(1))),
        (Holder(torch.float32), Holder(torch.float32), Holder(torch.float16)),
    ],
)
def test_what_is_the_same_has_one_digest_and_what_is_not_another(one, same, other):
    assert digests(one) == digests(same)
    assert digests(one) != digests(other)


def test_an_object_has_its_digest_whatever_is_beside_it():
    one = Holder([torch.ones(3), "text"])
    assert digests(one)[0] == digests(torch.zeros(5), "text", one)[2]


def test_of_large_and_very_deep_pickles_all_bytes_are_compared(monkeypatch):
    deep = Holder(1)
    for _ in range(300):
        deep = Holder(deep)
    assert digests(deep, 1) == digests(deep, 1) != digests(deep, 2)
    monkeypatch.setattr(module, "_MAX_BYTES", 100)
    large = Holder(list(range(100)))
    assert digests(large, 1) == digests(large, 1)
    assert digests(large, 1)[0] != digests(large, 2)[0]


def test_what_is_no_list_of_objects_is_refused():
    with pytest.raises(ValueError, match="not a list"):
        object_digests(pickled({1: 2}))
