"""Items of a list that several ranks have: each saves those that it was given, and together they are the list."""

import pytest

from async_ckpt.core.state.per_rank import ListItems, nested
from async_ckpt.core.state.skeletons import merge
from async_ckpt.core.state.tree import Encoder, decode


def node(value: object) -> object:
    return Encoder(lambda _, __: None).encode(value)


def test_paths_lead_into_dicts_and_lists():
    entries = [(("a", 0, "x"), 1), (("a", 1), 2), (("b.c",), 3), (("d", "0"), 4)]
    assert nested(entries) == {"a": [{"x": 1}, 2], "b.c": 3, "d": {"0": 4}}
    assert nested(reversed(entries)) == nested(entries)
    assert nested([]) == {}


def test_a_list_with_an_empty_place_keeps_the_places_of_the_others():
    found = nested([(("a", 2), "x"), (("a", 0, 0), "y")])
    assert found == {"a": ListItems({2: "x", 0: ["y"]})}
    assert isinstance(found["a"], ListItems)


@pytest.mark.parametrize(
    "paths",
    [
        [("a",), ("a", "b")],
        [("a", "b"), ("a",)],
        [("a", 0), ("a", "b")],
        [("a", "b"), ("a", 0)],
        [(0,)],
        [()],
        [("a",)] * 2,
    ],
)
def test_paths_that_contradict_each_other_are_refused(paths):
    with pytest.raises(ValueError, match="contradicts another name"):
        nested((path, 1) for path in paths)


def test_items_of_several_ranks_are_one_list():
    parts = {
        rank: node(nested([(("l", rank), {"rank": rank}), (("l", 3), "alike"), (("own", f"{rank}"), 1)], are_all=False))
        for rank in (2, 0, 1)
    }
    assert decode(parts[0])[0]["l"] == ListItems({0: {"rank": 0}, 3: "alike"})
    merged = merge(parts, dict.fromkeys(parts, 0))
    assert decode(merged.skeleton)[0] == {
        "l": [{"rank": 0}, {"rank": 1}, {"rank": 2}, "alike"],
        "own": {"2": 1, "0": 1, "1": 1},
    }


@pytest.mark.parametrize("places", [[["x", 1]], [[-1, 1]], [[True, 1]], [[0, 1], [0, 2]], [0], {"0": 1}])
def test_places_that_nobody_wrote_are_refused(places):
    with pytest.raises(ValueError, match=r"\w"):
        decode({"dict": [["l", {"places": places}]]})
