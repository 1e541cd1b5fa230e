"""What the demo shows: progress bars on a terminal, plain lines anywhere else.

In: chapters, events, traces. Out: text. Knows nothing of: processes, files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from examples.trace import Event, Trace


class Screen:
    """One console; everything is printed in the order in which it happens."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def chapter(self, title: str) -> None:
        self._console.print(f"\n[bold]{title}[/bold]", soft_wrap=True)

    def say(self, text: str) -> None:
        self._console.print(f"  {text}", soft_wrap=True, markup=False)

    @contextmanager
    def following(self, trace: Trace, *, steps: int) -> Iterator[Callable[[Event], None]]:
        """Yields what shows one event of the run that `trace` gathers."""
        columns = TextColumn("  {task.description}"), BarColumn(), TextColumn("{task.fields[beside]}")
        with Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as bars:
            training = bars.add_task(f"training, {trace.way}", total=steps, beside="")
            writing = bars.add_task("save in flight", beside="", visible=False)

            def show(event: Event) -> None:
                match event["event"]:
                    case "start" if trace.first_step:
                        self.say(f"resumed from the last commit, step {trace.first_step}")
                    case "step":
                        loss = float.fromhex(event["loss"])
                        bars.update(training, completed=event["step"], beside=f"step {event['step']}, loss {loss:.3f}")
                    case "writing":
                        written, total = event["written"], event["total"]
                        beside = f"step {event['step']}, {written / 1e6:.0f} of {total / 1e6:.0f} MB"
                        bars.update(writing, completed=written, total=total, beside=beside, visible=True)
                        bars.refresh()  # by itself it looks ten times a second; a save may be over by then
                    case "durable":
                        bars.update(writing, visible=False)
                        self._durable(trace)

            yield show

    def _durable(self, trace: Trace) -> None:
        save = trace.saves[-1]
        self.say(
            f"{trace.way:<10}  step {save.step:>3} durable: {save.num_bytes / 1e6:.1f} MB, "
            f"stall {save.stall_seconds * 1e3:6.1f} ms, "
            f"after {save.total_seconds * 1e3:6.1f} ms at {save.bandwidth / 1e9:.2f} GB/s"
        )

    def table(self, ways: Sequence[Trace]) -> None:
        """Seconds lost, and of what they consist."""
        table = Table(
            title="Training seconds lost to saving",
            box=box.SIMPLE_HEAD if self._console.is_terminal else box.ASCII2,
        )
        table.add_column("saved with")
        for column in ("MB a save", "stalls", "slower steps", "lost", "of training"):
            table.add_column(column, justify="right")
        for trace in ways:
            table.add_row(
                trace.way,
                f"{trace.saves[-1].num_bytes / 1e6:.1f}",
                f"{trace.stall_seconds:.3f} s",
                f"{trace.slowed_seconds:+.3f} s",
                f"{trace.lost_seconds:.3f} s",
                f"{trace.lost_seconds / (len(trace.steps) * trace.step_seconds):.1%}",
            )
        self._console.print()
        self._console.print(table)
        every = ways[0].saves[1].begin - ways[0].saves[0].begin
        self.say(f"{len(ways[0].steps)} steps, a save every {every:.1f} s: real training saves far less often.")
        self.say("lost: stalls + slower steps. stalls: the training stands still, measured at each save.")
        self.say("slower steps: how much longer than their quiet neighbours (median of ten) those took that")
        self.say("had a write beside them, and the wait at the end. Other work on the machine is noise in it;")
        self.say("whole runs have more of it, so their times are in the picture and not in the table.")
