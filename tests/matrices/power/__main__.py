"""`python -m tests.matrices.power`: the power is cut behind each call of each scenario, and all that may be left is read.

In: options. Out: counts, a report, an exit status. Knows nothing of: how a disk keeps things, or what the library promises.

Ends with 1 if any state was wrong. Such a state is kept in a file, and the command that reads it again is printed.
"""

import argparse
import multiprocessing
import pickle
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

from tests.matrices import report
from tests.matrices.power.cut_check import Folder, wrong_with
from tests.matrices.power.cut_model import MODELS, POSIX
from tests.matrices.power.cut_runs import Outcome, try_all
from tests.matrices.power.power_scenarios import SCENARIOS, Scenario

STATES, QUICK = 7000, 150  # of each scenario
_EACH = {False: 160, True: 24}  # at one cut


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.matrices.power", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scenario", action="append", help="one alone; may be repeated")
    parser.add_argument("--states", type=int, help=f"read at most so many of each scenario; by default {STATES:,}")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} of each")
    parser.add_argument("--model", choices=MODELS, default=POSIX)
    parser.add_argument(
        "--only", type=Path, metavar="FILE", help="read one state again, which was kept as it was wrong"
    )
    parser.add_argument("--workers", type=int, default=2)
    return parser.parse_args()


def work(scenario: Scenario, options: argparse.Namespace) -> Outcome:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # the library's, of trackers without a step: there are thousands
    place = scratch()
    try:
        most = options.states or (QUICK if options.quick else STATES)
        each = _EACH[options.quick]
        return try_all(scenario, place, seed=options.seed, most=each, states=most, model=options.model)
    finally:
        shutil.rmtree(place)


def scratch() -> Path:
    """A folder in memory, where there is one: syncing costs nothing there, and the model says what a disk would keep."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="power-", dir=memory if memory.is_dir() else None))


def _work_by_name(given: tuple[str, argparse.Namespace]) -> tuple[str, Outcome]:
    name, options = given
    return name, work(next(one for one in SCENARIOS if one.name == name), options)


def slowest_first(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: ("two" not in name, name))


def read_again(path: Path) -> int:
    name, cut, tree, marks, wrong = pickle.loads(path.read_bytes())
    scenario = next(one for one in SCENARIOS if one.name == name)
    folder = Folder(scratch() / "read")
    folder.become(tree)
    found = wrong_with(scenario, folder.path, marks)
    print(f"{name}, cut behind record {cut}: was {wrong}; is {found or 'as promised'}; it lies in {folder.path}")
    return 1 if found else 0


def kept(outcomes: dict[str, Outcome], seconds: float, options: argparse.Namespace) -> Path:
    head = ["scenario", "calls recorded", "distinct states", "read", "worked on", "wrong"]
    rows: list[list[str | int]] = []
    for name, told in outcomes.items():
        rows.append([name, told.calls, told.states, told.readings, told.continued, sum(told.wrong.values())])
    total = [sum(int(row[column]) for row in rows) for column in range(1, len(head))]
    counts = dict(zip(head[1:], total, strict=True))
    details = {name: {"seconds": round(told.seconds, 1), "wrong": dict(told.wrong)} for name, told in outcomes.items()}
    command = f"python -m tests.matrices.power --seed {options.seed}"
    told = report.Report("power", head, [*rows, ["all", *total]], counts, seconds, options.seed, command, details)
    return report.keep(told)


def main() -> int:
    options = parsed()
    if options.only:
        return read_again(options.only)
    names = options.scenario or [one.name for one in SCENARIOS]
    if unknown := {*names} - {one.name for one in SCENARIOS}:
        print(f"no scenario {', '.join(sorted(unknown))}; there are {', '.join(one.name for one in SCENARIOS)}")
        return 2
    begun, outcomes = time.monotonic(), {}
    # A process for each scenario, forked before this one has any thread of the library.
    with multiprocessing.get_context("fork").Pool(options.workers, maxtasksperchild=1) as pool:
        for name, told in pool.imap_unordered(_work_by_name, [(name, options) for name in slowest_first(names)]):
            outcomes[name] = told
            print(
                f"{name}: {told.calls} calls, {told.states:,} distinct states, {told.readings:,} read, {told.continued} "
                f"worked on, in {told.seconds:.0f} s: {dict(told.wrong) or 'nothing wrong'}",
                flush=True,
            )
            for path in told.files:
                print(f"  python -m tests.matrices.power --only {path}", flush=True)
    outcomes = {name: outcomes[name] for name in names}
    if not (options.scenario or options.quick or options.states) and options.model == POSIX:
        report.show(kept(outcomes, time.monotonic() - begun, options))
    num_wrong = sum(sum(told.wrong.values()) for told in outcomes.values())
    num_states = sum(told.states for told in outcomes.values())
    print(f"{num_states:,} distinct states in {time.monotonic() - begun:,.0f} s: {num_wrong} wrong")
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
