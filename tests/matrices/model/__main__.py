"""The model of the commit, explored whole: `python -m tests.matrices.model`.

In: options. Out: counts as it goes, a report, and the way to each violation. Knows nothing of: the protocol.
"""

import argparse
import sys
from collections.abc import Sequence
from time import monotonic
from typing import TypeAlias

from .. import report
from .commit_configurations import BROKEN, KNOWN, QUICK, SLOW, VIOLATIONS, WHOLE
from .commit_invariants import INVARIANTS
from .commit_search import Found, search, told
from .commit_state import Configuration
from .next_configurations import BROKEN_NEXT, NEXT, QUICK_NEXT, NextConfiguration

Explored: TypeAlias = Configuration | NextConfiguration
HEAD = ("what is explored", "ranks", "states", "transitions", "longest way", "explored", "violations")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrices.model", description=__doc__)
    parser.add_argument("--ranks", type=int, help="of each start, in place of what each configuration says")
    parser.add_argument("--starts", type=int, help="only configurations of so many")
    parser.add_argument("--bound", type=int, default=250_000, help="states of each configuration")
    parser.add_argument("--seed", type=int, default=0, help="changes nothing: all orders are tried")
    parser.add_argument("--only", default="", help="part of the name of a configuration, or of a broken protocol")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--next", action="store_true", help="how ranks find each other, rank 0's words, lines of a run, and tiers"
    )
    options = parser.parse_args(arguments)
    explored: Sequence[Explored] = QUICK if options.quick else (*WHOLE, KNOWN, *SLOW)
    broken: Sequence[tuple[Explored, str]] = BROKEN
    if options.next:
        explored, broken = QUICK_NEXT if options.quick else NEXT, BROKEN_NEXT
    chosen = [
        one if options.ranks is None else _with_ranks(one, options.ranks)
        for one in explored
        if options.only in one.name and options.starts in (None, _num_starts(one))
    ]
    begun = monotonic()
    rows, wrong = [], 0
    sums = {"states": 0, "transitions": 0}
    for one in chosen:
        found = search(one, options.bound)
        is_known = bool(found.violation) and VIOLATIONS.get(one.name) == found.violation
        sums["states"] += found.states
        sums["transitions"] += found.transitions
        rows.append(_row(found, is_known))
        print(" | ".join(map(str, rows[-1])), flush=True)
        if found.violation and not is_known:
            wrong += 1
            print(told(found), f"\nagain: python -m tests.matrices.model --only {one.name!r}", sep="\n")
    missed = [one for one, violation in broken if options.only in one.name and not _is_found(one, violation)]
    for one in missed:
        print(f"no violation found: {one.name}")
    tried = sum(options.only in one.name for one, _ in broken)
    print(f"{sums['states']:,} states, {tried - len(missed)} of {tried} broken protocols found")
    if not (options.only or options.next) and options.ranks is None and options.starts is None and not options.quick:
        counts = {
            **sums,
            "invariants": len(INVARIANTS),
            "broken protocols": tried,
            "not found": len(missed),
            "wrong": wrong,
        }
        command = "python -m tests.matrices.model"
        seconds = monotonic() - begun
        details = {"invariants": [*INVARIANTS], "broken": [one.name for one, _ in broken]}
        kept = report.Report("model", HEAD, rows, counts, seconds, options.seed, command, details)
        report.show(report.keep(kept))
    return 1 if wrong or missed else 0


def _row(found: Found, is_known: bool) -> tuple[str | int, ...]:
    configuration = found.configuration
    explored = "all" if found.is_whole else "the nearest"
    if found.violation:
        explored = "up to the violation"
    violations = "1, known" if is_known else int(bool(found.violation))
    return (
        configuration.name,
        configuration.num_ranks,
        found.states,
        found.transitions,
        found.depth,
        explored,
        violations,
    )


def _with_ranks(configuration: Explored, num_ranks: int) -> Explored:
    """The same with other numbers of ranks, where all of them do the same."""
    return configuration._replace(num_ranks=num_ranks) if "num_ranks" in configuration._fields else configuration  # type: ignore[arg-type]


def _num_starts(configuration: Explored) -> int:
    return len(configuration.plans) if isinstance(configuration, Configuration) else 1


def _is_found(broken: Explored, violation: str) -> bool:
    found = search(broken)
    print(f"{broken.name}: {found.violation or 'nothing'}, after {len(found.path)} moves", flush=True)
    return found.violation == violation


if __name__ == "__main__":
    sys.exit(main())
