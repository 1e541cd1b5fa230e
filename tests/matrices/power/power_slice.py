"""The part of the matrix that `make test` tries at each commit.

In: a number, a folder. Out: how many states were wrong. Knows nothing of: pytest.
"""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .cut_runs import KINDS_OF_SYNC, record, try_all, without
from .power_scenarios import SCENARIOS
from .real_disk import RealDisk

_STATES, _ALL_STATES = 40, 600
_FEW = 3  # scenarios at each commit
_OFTEN = "one file"  # the smallest, of which every kind of sync is left out


@contextmanager
def _without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the library's, of trackers whose step is not there
        yield


def try_some(part: int, place: Path, everything: bool) -> int:
    """Cut some scenarios, and one from which each kind of sync is left out. Prints counts. Returns how many states were wrong."""
    often = next(one for one in SCENARIOS if one.name == _OFTEN)
    chosen = SCENARIOS if everything else random.Random(part).sample(SCENARIOS, _FEW)
    num_wrong = 0
    with _without_warnings():
        for scenario in chosen:
            states = _ALL_STATES if everything else _STATES
            told = try_all(scenario, place / scenario.name, seed=part, most=24, states=states)
            num_wrong += sum(told.wrong.values())
            print(f"{scenario.name}: {told.states} states: {told.files or 'nothing wrong'}", flush=True)
        records = record(often, place / "recorded")
        for kind in KINDS_OF_SYNC:
            kept = without(kind, records)
            told = try_all(often, place / kind, seed=part, most=24, states=200, records=kept, until_wrong=True)
            is_noticed = len(kept) < len(records) and sum(told.wrong.values()) > 0
            num_wrong += not is_noticed
            print(f"a library without the sync {kind} {'is noticed' if is_noticed else 'is not noticed'}", flush=True)
    return num_wrong


def cut_real_disk(part: int, place: Path, num_cuts: int) -> int:
    """Cut a real file system at calls by chance. Returns how many cuts left something wrong."""
    disk, chosen, num_wrong = RealDisk(place), random.Random(part), 0
    with _without_warnings():
        for _ in range(num_cuts):
            scenario = chosen.choice([one for one in SCENARIOS if one.is_alone])
            at_call = chosen.randrange(1, 120)
            wrong = disk.cut(scenario, at_call)
            num_wrong += wrong is not None
            print(f"{scenario.name}, cut at call {at_call}: {wrong or 'nothing wrong'}", flush=True)
    print(f"{num_cuts} cuts")
    return num_wrong
