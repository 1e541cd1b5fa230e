"""`python -m tests.matrices.calls`: each call that touches the disk fails once, in each way in which it may.

In: the command line. Out: a report, with a picture, and exit status 1 if a promise was broken. Knows nothing of: how a place is
tried.

First each scenario runs unharmed, and its calls are counted. Then there is a child for each of these calls and each fault
that fits it. What each place has shown goes to a file at once, by which `--resume` goes on.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from tests.matrices.attack_driver import Matrix
from tests.matrices.calls.attack_places import FAULTS, CallAttacker, build_shim
from tests.matrices.calls.attack_scenarios import SCENARIOS
from tests.matrices.report import REPOSITORY


@contextmanager
def _attackers(folder: Path, num_workers: int) -> Iterator[Sequence[CallAttacker]]:
    shim = build_shim(folder)
    with ExitStack() as stack:
        yield [stack.enter_context(CallAttacker(folder / f"worker-{n}", shim)) for n in range(num_workers)]


MATRIX: Final = Matrix("calls", list(SCENARIOS), list(FAULTS), _attackers, "python -m tests.matrices.calls")


def _draw(report: Path) -> None:
    from tests.matrices.calls.attack_picture import draw

    draw(report, REPOSITORY / "docs/calls.svg")


if __name__ == "__main__":
    sys.exit(MATRIX.run(_draw))
