"""The model of the commit of several ranks: what holds in it, that it can fail, and that the library takes the same steps."""

import random

import pytest
from interleaved import line
from slices import PART, is_tried, some

from tests.matrices.model import tier_model, tier_state, word_model
from tests.matrices.model.commit_configurations import BROKEN, KNOWN, QUICK, SLOW, VIOLATIONS, WHOLE
from tests.matrices.model.commit_model import STANDS_FOR, Move, moves
from tests.matrices.model.commit_replay import Replay, without_waiting
from tests.matrices.model.commit_search import search, told
from tests.matrices.model.commit_state import Configuration, first_state
from tests.matrices.model.next_configurations import BROKEN_NEXT, QUICK_NEXT, WORDS, NextConfiguration
from tests.matrices.model.tier_configurations import QUICK_TIERS
from tests.matrices.model.word_model import WordConfiguration, WordMove
from tests.matrices.model.word_replay import WordReplay

Explored = Configuration | NextConfiguration


@pytest.mark.parametrize("configuration", [*QUICK, *QUICK_NEXT], ids=lambda one: one.name)
def test_what_is_promised_holds_in_every_state(configuration):
    found = search(configuration)
    assert not found.violation, told(found)
    assert found.is_whole


@pytest.mark.parametrize(
    ("configuration", "violation"), [*some(BROKEN, 5), *some(BROKEN_NEXT, 3)], ids=lambda one: getattr(one, "name", "")
)
def test_a_broken_protocol_is_found(configuration, violation):
    found = search(configuration)
    assert found.violation == violation, told(found)


@pytest.mark.parametrize("configuration", SLOW, ids=lambda one: one.name)
def test_listings_must_show_what_was_put(configuration):
    """As docs/guarantees.md says of stores."""
    found = search(configuration)
    assert found.violation == VIOLATIONS[configuration.name], told(found)


def walk(configuration: Configuration, dice: random.Random) -> list[Move]:
    """Moves by chance, up to an end. Now and then one process goes on alone for a while, and the others sleep."""
    state, path = first_state(configuration), []
    chosen: tuple[int, int] | None = None
    while following := moves(configuration, state):
        alone = [one for one in following if (one.start, one.rank) == chosen and dice.random() < 0.8]
        move = dice.choice(alone or following)
        chosen = move.start, move.rank
        path.append(move)
        state = move.then
    return path


@pytest.mark.parametrize("seed", some(range(1000), 101))
def test_the_library_takes_the_same_steps(seed):
    dice = random.Random(seed)
    configuration = dice.choice(WHOLE)
    path = walk(configuration, dice)
    with without_waiting():
        taken = Replay(configuration).follow(path)
    assert taken > len(path) // 2
    assert {move.what for move in path} <= STANDS_FOR.keys()


# In the others, what is broken shows in no step of a process.
UNSEEN = ("readers take every manifest",)
WAYS = [one for one, _ in BROKEN if isinstance(one, Configuration) and one.broken not in UNSEEN]


@pytest.mark.parametrize("broken", some(WAYS, 5), ids=lambda one: one.name)
def test_the_library_does_not_go_the_way_of_a_broken_protocol(broken):
    path = search(broken).path
    with without_waiting(), pytest.raises(AssertionError, match=r"^move "):
        Replay(broken).follow(path)


@pytest.mark.skipif(not is_tried(0, 5), reason="it looks at 40,000 states")
def test_a_process_that_sleeps_between_its_last_look_and_its_deletion_deletes_what_a_rollback_has_saved_anew():
    """Known, and told in docs/guarantees.md: a store has no deletion on a condition."""
    found = search(KNOWN)
    assert found.violation == VIOLATIONS[KNOWN.name], told(found)
    with without_waiting():
        replay = Replay(KNOWN)
        replay.follow(found.path)
    assert found.path[-1].what == "delete"
    assert [made.step for made in line(replay.objects)] == [1]
    assert {one.step for one in found.path[-2].then.store.manifests} == {1, 2}


def test_the_longest_way_is_the_library_s():
    found = search(QUICK[PART % len(QUICK)])
    with without_waiting():
        Replay(found.configuration).follow(found.path)


# --- words ------------------------------------------------------------------------------------------------------------


def word_walk(configuration: WordConfiguration, dice: random.Random) -> list[WordMove]:
    """Moves by chance, up to an end; the library keeps words for longer, and so deletes none here."""
    state, path = word_model.first_state(configuration), []
    chosen = -1

    while following := [one for one in word_model.moves(configuration, state) if one.what != "deletes words"]:
        alone = [one for one in following if one.rank == chosen and dice.random() < 0.8]
        move = dice.choice(alone or following)
        chosen = move.rank
        path.append(move)
        state = move.then
    return path


@pytest.mark.parametrize("seed", some(range(40), 20))
def test_the_calls_of_the_library_come_to_what_they_do_in_the_model(seed):
    for number in range(50):
        dice = random.Random(50 * seed + number)
        configuration = dice.choice(WORDS)
        path = word_walk(configuration, dice)
        try:
            WordReplay(configuration).follow(path)
        except AssertionError as error:
            shown = "\n".join(f"{at:4}  {word_model.told(move)}" for at, move in enumerate(path, 1))
            raise AssertionError(f"seed {50 * seed + number}, {configuration.name}: {error}\n{shown}") from error


@pytest.mark.parametrize("configuration", some(WORDS, 3), ids=lambda one: one.name)
def test_the_library_takes_the_longest_way_of_words(configuration):
    path = [move for move in search(configuration._replace(in_flight=1)).path if move.what != "deletes words"]
    WordReplay(configuration).follow(path)


def test_a_decision_that_is_read_ahead_of_its_call_ends_that_call():
    configuration = WordConfiguration("one call", ((word_model.Call(1),), (word_model.Call(1),)), faults=1)
    path = the_way(
        configuration,
        "calls step 1",
        "cannot write",
        "word arrives",
        "word arrives",
        "reads save",
        "sign arrives",
        "reads failed",
        "sign arrives",
        "calls step 1",
    )
    WordReplay(configuration).follow(path)


def the_way(configuration: WordConfiguration, *whats: str) -> list[WordMove]:
    """The moves of these names: on rank 0 where it can make one, else on the other rank."""
    state, path = word_model.first_state(configuration), []
    for what in whats:
        move = next(one for one in word_model.moves(configuration, state) if one.what == what)
        path.append(move)
        state = move.then
    return path


# In the others, what is broken is a move that does not come, or the deletion of words, which is another one in the library. The
# last of them has the test above.
WORD_UNSEEN = ("one log, read in order", "a word is deleted unread", "a decision ahead of its call is forgotten")
WORD_WAYS = [one for one, _ in BROKEN_NEXT if isinstance(one, WordConfiguration) and one.broken not in WORD_UNSEEN]


@pytest.mark.parametrize("broken", some(WORD_WAYS, 3), ids=lambda one: one.name)
def test_the_library_does_not_go_the_way_of_broken_words(broken):
    path = [move for move in search(broken).path if move.what != "deletes words"]
    with pytest.raises((AssertionError, IndexError)):
        WordReplay(broken).follow(path)


# --- tiers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("configuration", QUICK_TIERS, ids=lambda one: one.name)
def test_no_mover_goes_round(configuration):
    """No state is reached again from itself: so each way has an end, and `search` has looked at it."""
    first = tier_state.first_state(configuration)
    following: dict[tier_state.State, set[tier_state.State]] = {}
    waiting, times_reached = [first], {first: 0}
    while waiting:
        if (state := waiting.pop()) not in following:
            following[state] = {move.then for move in tier_model.moves(configuration, state)}
            for then in following[state]:
                times_reached[then] = times_reached.get(then, 0) + 1
            waiting += following[state]
    waiting, in_order = [first], 0
    while waiting:
        in_order += 1
        for then in following[waiting.pop()]:
            times_reached[then] -= 1
            if not times_reached[then]:
                waiting.append(then)
    assert in_order == len(following)
