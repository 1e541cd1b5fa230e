"""`python -m tests.matrices.referee`: trainings are killed at each of their file events by the tool of somebody else, and resumed.

In: options. Out: a report, with a table, and exit status 1 if a training of ours did not come back as promised. Knows nothing of:
what is saved, and how.

ckpt-chaos chooses the moments and judges. Its processes are forked from a warm one here, and the rank that it is to kill is told to
all of them: by itself it kills none but rank 0, and judges the unharmed training. An event is not met if threads and ranks made fewer
calls than in the first run. That none was met counts as wrong, as does a training that fails by itself, which the tool would take for
a kill.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from children import Child, Nursery
from ckpt_chaos import byo

from tests.matrices import report

MODULE: Final = "tests.matrices.referee.referee_trainings"
_CHILD: Final = f"import sys\nfrom {MODULE} import main\nmain(*sys.argv[1:])"
WARM: Final = ("trainers", "lightning_runs", "accelerate", "ckpt_chaos.inject", "torch.distributed.checkpoint", MODULE)
MOST: Final = 10_000  # no event is left out
KILLED: Final = 137  # the status with which the tool ends a process
_SECONDS, _PEER_SECONDS = 120.0, 3.0  # as the referee has it: behind a rank that was killed, the others are
_CHECKPOINTS: Final = {"Trainer": "checkpoint-*", "Lightning": "ck-step=*.ckpt", "accelerate": "ck-*"}


@dataclass(frozen=True)
class Case:
    """A training, with the rank that is killed. Beside `told-*` of loops, checkpoints say which step was there."""

    training: str
    ranks: int = 1
    killed: int = 0

    @property
    def is_ours(self) -> bool:
        return not self.training.startswith("plain ")

    @property
    def checkpoints(self) -> str:
        return _CHECKPOINTS.get(self.training.removeprefix("plain "), "told-*")

    def __str__(self) -> str:
        return self.training if self.ranks == 1 else f"{self.training}, rank {self.killed} of {self.ranks}"


CASES: Final = [
    Case(f"{kind}{name}", ranks, killed)
    for kind in ("", "plain ")
    for name, ranks in (("loop", 1), ("FSDP2", 2), ("wrap", 1), ("Trainer", 1), ("Lightning", 1), ("accelerate", 1))
    for killed in range(ranks)
    if f"{kind}{name}" != "plain wrap"
]


@dataclass(frozen=True)
class Launcher:
    """What starts the referee's processes, in place of the two functions by which it does so itself.

    `failed` has the ends of processes that were to be killed, and were neither killed nor done.
    """

    nursery: Nursery
    failed: list[str] = field(default_factory=list)

    def run(self, command: Sequence[str], env: Mapping[str, str], cwd: str, timeout: int) -> tuple[int, str]:
        return self._ended(self._start(command, env), _SECONDS, env)

    def run_group(
        self, commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], cwd: str, timeout: int, folder: Path
    ) -> tuple[int, str]:
        children = [self._start(command, env) for command, env in zip(commands, envs, strict=True)]
        killed = int(os.environ["CKPT_CHAOS_CRASH_RANK"])  # whose end the others see
        ends = {killed: self._ended(children[killed], _SECONDS, envs[killed])}
        patience = _PEER_SECONDS if ends[killed][0] else _SECONDS
        for rank, child in enumerate(children):
            if rank != killed:
                ends[rank] = self._ended(child, patience, envs[rank])
        return next((status for status, _ in ends.values() if status), 0), ends[0][1]

    def _start(self, command: Sequence[str], env: Mapping[str, str]) -> Child:
        names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        given = {name: value for name, value in env.items() if name.startswith("CKPT_CHAOS_") or name in names}
        return self.nursery.start(_CHILD, *command, env=given)

    def _ended(self, child: Child, patience: float, env: Mapping[str, str]) -> tuple[int, str]:
        try:
            ended = child.ended(patience)
            status, text = ended.status, ended.out + ended.err
        except AssertionError as hung:  # the nursery has killed it
            status, text = -9, f"TIMEOUT\n{hung}"
        if "CKPT_CHAOS_CRASH_AT" in env and status not in (0, KILLED):
            self.failed.append(f"event {env['CKPT_CHAOS_CRASH_AT']}: ended by itself, status {status}: {text[-400:]}")
        return status, text


@contextlib.contextmanager
def launched_by(launcher: Launcher, killed: int) -> Iterator[None]:
    before = byo._run, byo._run_group
    byo._run, byo._run_group = launcher.run, launcher.run_group
    os.environ["CKPT_CHAOS_CRASH_RANK"] = str(killed)
    try:
        yield
    finally:
        byo._run, byo._run_group = before
        del os.environ["CKPT_CHAOS_CRASH_RANK"]


def referee(case: Case, launcher: Launcher, folder: Path, *, wide: bool = True, most: int = MOST) -> list[Any]:
    """The rows of the referee for one training: a control, and a kill at each event, before it and with half a file."""
    command = [case.training, "{out}", "wide" if wide else "own"]
    with launched_by(launcher, case.killed), contextlib.redirect_stdout(io.StringIO()):
        rows: list[Any] = byo.run_byo(
            command,
            None,
            folder,
            max_points=most,
            result_file="{out}.digest",
            step_regex=r"resumed from step (\d+)",
            checkpoint_glob=case.checkpoints,
            ignore_size=case.is_ours,  # the figures of earlier saves are in the files
            ranks=case.ranks,
            crash_rank=case.killed,
        )
    return rows


VERDICTS: Final = {
    "PASS": "exact",
    "HARD_FAIL": "raises",
    "SILENT_DIVERGENCE": "other weights",
    "LOST_WORK": "lost work",
}


def counted(rows: Sequence[Any]) -> Counter[str]:
    """How the resumes ended, by the words of the table. A training that ended before its kill counts as "not met"."""
    found: Counter[str] = Counter()
    for row in rows:
        if row.label.startswith("no crash"):
            found["control failed"] += row.verdict != "PASS"
        else:
            found[VERDICTS[row.verdict] if row.crashed else "not met"] += 1
    return found


def wrong_in(rows: Sequence[Any]) -> list[str]:
    """The resumes that are not exact; and that none was killed, by which all would be."""
    wrong = [f"{row.label}: {row.verdict}, {row.outcome}" for row in rows if row.verdict != "PASS"]
    return wrong if any(row.crashed for row in rows) else [*wrong, "nothing was killed"]


def _tried(case: Case, *, wide: bool, most: int) -> tuple[Counter[str], int, list[str]]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as place:
        folder = Path(place)
        (folder / "children").mkdir()
        with Nursery(folder / "children", *WARM) as nursery:
            launcher = Launcher(nursery)
            rows = referee(case, launcher, folder / "work", wide=wide, most=most)
    return counted(rows), len(rows) - 1, [*launcher.failed, *wrong_in(rows)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrices.referee")
    parser.add_argument("--only", help="one training by its name in the table, and no report")
    parser.add_argument("--most", type=int, default=MOST, help="kill at so many events at most, and write no report")
    parser.add_argument(
        "--own-eye", action="store_true", help="see what ckpt-chaos sees by itself, and write no report"
    )
    parser.add_argument("--workers", type=int, default=2)
    told = parser.parse_args()
    cases = [case for case in CASES if told.only in (None, case.training, str(case))]
    began, table, wrong = time.monotonic(), [], {}
    tried = partial(_tried, wide=not told.own_eye, most=told.most)
    # A process for each: what is replaced in the referee is replaced for all of a process.
    with multiprocessing.get_context("fork").Pool(told.workers, maxtasksperchild=1) as pool:
        for case, (found, num_kills, wrong[str(case)]) in zip(cases, pool.imap(tried, cases), strict=True):
            table.append((str(case), num_kills, *(found[word] for word in (*VERDICTS.values(), "not met"))))
            print(f"{case}: {num_kills} kills, {dict(+found)}", *wrong[str(case)][:3], sep="\n  ", flush=True)
    num_wrong = sum(len(wrong[str(case)]) for case in CASES if case.is_ours and str(case) in wrong)
    if not (told.only or told.own_eye or told.most < MOST):
        head = ("training", "kills", *VERDICTS.values(), "not met")
        counts = {"kills": sum(int(row[1]) for row in table), "wrong": num_wrong}
        command = "python -m tests.matrices.referee"
        made = report.Report("referee", head, table, counts, time.monotonic() - began, 0, command, {"wrong": wrong})
        report.show(report.keep(made))
    return min(1, num_wrong)


if __name__ == "__main__":
    sys.exit(main())
