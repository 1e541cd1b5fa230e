"""Reports of saves, verifications and pulls.

In: measured numbers. Out: frozen reports. Knows nothing of: the measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from math import nan
from typing import Any, Final, Literal

_NO_NUMBERS: Final = ("status", "step", "path", "destinations", "unchanged_groups")


def sized(num_bytes: float) -> str:
    """A number of bytes as text for people, such as "1.5 GB". For a bandwidth, append "/s"."""
    for unit, factor, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 1)):
        if num_bytes >= 0.99995 * factor:  # so that 999,950 bytes are "1.0 MB", not "1000.0 kB"
            return f"{num_bytes / factor:.{digits}f} {unit}"
    return f"{num_bytes:.0f} byte{'' if round(num_bytes) == 1 else 's'}"


def bandwidth(num_bytes: float | None, seconds: float | None) -> float | None:
    """Bytes per second of a save: all bytes of the step, divided by the seconds from the call until the commit.

    None if either is unknown or zero.
    """
    return num_bytes / seconds if num_bytes and seconds else None


def paragraph(text: str) -> str:
    """A paragraph of HTML."""
    from html import escape  # lazy: its table of entities takes milliseconds, and no save needs it

    return f"<p>{escape(text)}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in HTML. If `columns` is empty, the first text of each row is its heading. Texts are escaped, since names
    and messages may come from untrusted checkpoints.
    """
    from html import escape

    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = [f"<thead><tr>{head}</tr></thead>"] if columns else []
    for first, *texts in rows:
        tag = "td" if columns else "th"
        cells = [f"<{tag}>{escape(first)}</{tag}>", *(f"<td>{escape(text)}</td>" for text in texts)]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


class _NotebookText:
    """A value that IPython shows as text, and notebooks as text above a table of its fields."""

    __slots__ = ()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # noqa: ARG002
        printer.text(str(self))

    def _repr_html_(self) -> str:
        rows = [(name, shown) for name, value in self._fields().items() if (shown := _in_cell(name, value))]
        return f"{paragraph(str(self))}{table((), rows)}"

    def _fields(self) -> dict[str, Any]:
        return {one.name: getattr(self, one.name) for one in fields(self)}  # type: ignore[arg-type]


def _in_cell(name: str, value: Any) -> str:
    """The value of a report's field as text for people; empty for None and empty tuples."""
    if name.endswith("_bytes"):
        return sized(value)
    if name.endswith("seconds"):
        return f"{value:.3g} s"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


@dataclass(frozen=True, slots=True)
class Progress(_NotebookText):
    """The progress of a save, in bytes of the finished archive."""

    total_bytes: int
    staged_bytes: int
    written_bytes: int

    @property
    def fraction(self) -> float:
        """The written share of the archive, from 0 to 1."""
        return self.written_bytes / self.total_bytes if self.total_bytes else 0.0

    def __str__(self) -> str:
        if not self.total_bytes:  # some saves do not know their size in advance
            return f"{sized(self.written_bytes)} written"
        return f"{self.fraction:.0%} written, {sized(self.written_bytes)} of {sized(self.total_bytes)}"


@dataclass(frozen=True, slots=True)
class Destination:
    """The result at one place that a save wrote to.

    `num_bytes` counts all objects of the step, of all ranks. `write_seconds` is the time from the call until the
    archive of this rank was durable at the place. `retryable` is True if the whole archive stayed in memory until then,
    so that a failed upload could have been repeated.
    """

    path: str
    num_bytes: int
    write_seconds: float
    retries: int = 0
    retryable: bool = False

    @property
    def bandwidth(self) -> float:
        """Bytes per second at this place, including the sync."""
        return self.num_bytes / self.write_seconds if self.write_seconds > 0 else 0.0

    def __str__(self) -> str:
        return f"{self.path}: {sized(self.num_bytes)} at {sized(self.bandwidth)}/s"


@dataclass(frozen=True, slots=True)
class SaveReport(_NotebookText):
    """The measurements of one save. The durations overlap: staging and writing run at the same time.

        print(handle.result())  # step 100: 1.49 GB, stall 12.1 ms, durable after 0.84 s at 1.77 GB/s

    `num_bytes` counts all objects of the step, of all ranks, except borrowed ones. `stall_seconds` is how long the
    caller's thread or stream was held: by the call, by waiting for an earlier save, and by the guard. `total_seconds`
    is the time from the call until the checkpoint is durable and committed. `bandwidth` is `num_bytes` divided by
    `total_seconds`, in bytes per second.

    `unchanged_groups` names the top-level entries of the state whose tensors have the same bytes as in the previous
    commit, if this checkpointer made that. If it names all of them, the training makes no progress, or a snapshot is
    stale. Tensors at the top level form one group, "model" or "state". Tied tensors belong to each group that has them.
    """

    status: Literal["committed", "skipped"]
    step: int | None
    path: str
    num_bytes: int = 0
    num_tensors: int = 0
    stall_seconds: float = 0.0
    stage_seconds: float = 0.0
    write_seconds: float = 0.0
    commit_seconds: float = 0.0
    total_seconds: float = 0.0
    retries: int = 0
    destinations: tuple[Destination, ...] = ()
    unchanged_groups: tuple[str, ...] = ()

    @property
    def bandwidth(self) -> float:
        """Bytes per second, from the call until the checkpoint is durable and committed."""
        return bandwidth(self.num_bytes, self.total_seconds) or 0.0

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """The report as numbers for a logger, with the same keys on every call.

            wandb.log(report.as_dict("ckpt/"))

        NaN stands for a missing number: the step of a one-off save, and measurements that a skipped save does not have.
        """
        skipped = self.status == "skipped"
        names = [f.name for f in fields(self) if f.name not in _NO_NUMBERS]
        row = {"committed": float(not skipped), "step": nan if self.step is None else float(self.step)}
        for name in (*names, "bandwidth"):
            row[name] = nan if skipped and name != "stall_seconds" else float(getattr(self, name))
        return {prefix + key: value for key, value in row.items()}

    def __str__(self) -> str:
        if self.status == "skipped":
            return f"step {self.step} skipped: an earlier save is still in flight"
        subject = self.path if self.step is None else f"step {self.step}"
        return (
            f"{subject}: {sized(self.num_bytes)}, stall {self.stall_seconds * 1e3:.1f} ms, "
            f"durable after {self.total_seconds:.2f} s at {sized(self.bandwidth)}/s"
        )


def _counted(numbers: tuple[int, ...], word: str) -> str:
    """Numbers as text for people: "step 7", or "3 steps, 100 to 300,"."""
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    return f"{len(numbers)} {word}s, {numbers[0]} to {numbers[-1]},"


@dataclass(frozen=True, slots=True)
class VerifyReport(_NotebookText):
    """The archives that `verify` has read and found sound.

        print(async_ckpt.verify("runs/a"))  # runs/a: 3 steps, 100 to 300, are sound, 41.20 GB read in …

    `steps` are the committed steps, in ascending order; empty for a single archive. `num_archives` and `num_bytes`
    count each archive once, including those that a step borrows from. A compressed archive counts with its size before
    compression. `versions` are the versions of a publication, which `num_archives` counts once per rank. `bandwidth` is
    in bytes per second. `notes` lists facts that are not damage but may be a surprise, such as a tracker that does not
    name a committed step.
    """

    path: str
    num_archives: int
    num_bytes: int
    seconds: float
    steps: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    versions: tuple[int, ...] = ()

    @property
    def bandwidth(self) -> float:
        return self.num_bytes / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """The report as numbers for a logger, with the same keys on every call.

        wandb.log(async_ckpt.verify("runs/a").as_dict("verify/"))
        """
        row = {f"num_{name}": float(len(getattr(self, name))) for name in ("steps", "versions", "notes")}
        for name in ("num_archives", "num_bytes", "seconds", "bandwidth"):
            row[name] = float(getattr(self, name))
        return {prefix + key: value for key, value in row.items()}

    def __str__(self) -> str:
        counted = [_counted(*both) for both in ((self.steps, "step"), (self.versions, "version")) if both[0]]
        verb = "are" if len(self.steps) + len(self.versions) > 1 else "is"
        subject = f"{' and '.join(counted) or 'the archive'} {verb}"
        notes = "".join(f"; {note}" for note in self.notes)
        return (
            f"{self.path}: {subject} sound, {sized(self.num_bytes)} read in {self.seconds:.2f} s "
            f"at {sized(self.bandwidth)}/s{notes}"
        )


@dataclass(frozen=True, slots=True)
class PullReport(_NotebookText):
    """The measurements of one pull of a `Subscriber`.

        print(subscriber.pull("/local/model"))  # version 102 from 100: 2 versions, 31.2 MB read in 0.42 s

    `base` is the version that was already there, to which deltas were applied; None if an anchor was read.
    `num_versions` counts the versions that were applied, 0 if the version was already there. `num_bytes` counts the
    bytes of tensors and files that were read. `from_memory` is True if the version came from the memory of its
    publisher on this host instead of the root: it may not be durable yet.
    """

    version: int
    base: int | None
    num_versions: int
    num_bytes: int
    seconds: float
    from_memory: bool = False

    def as_dict(self, prefix: str = "") -> dict[str, float]:
        """The report as numbers for a logger, with the same keys on every call. NaN stands for no base.

        wandb.log(subscriber.pull(folder).as_dict("weights/"))
        """
        names = ("version", "base", "num_versions", "num_bytes", "seconds", "from_memory")
        row = {name: getattr(self, name) for name in names}
        return {prefix + key: nan if value is None else float(value) for key, value in row.items()}

    def __str__(self) -> str:
        if not self.num_versions:
            return f"version {self.version} was there already"
        if self.from_memory:
            return f"version {self.version} from memory: {sized(self.num_bytes)} in {self.seconds:.2f} s"
        begin = "an anchor" if self.base is None else str(self.base)
        count = "1 version" if self.num_versions == 1 else f"{self.num_versions} versions"
        return f"version {self.version} from {begin}: {count}, {sized(self.num_bytes)} read in {self.seconds:.2f} s"
