"""The words of the command `async-ckpt`, their options, and what its exit status says.

In: arguments. Out: text or JSON on stdout, an error on stderr, a status. Knows nothing of: how anything is found out.

Status: 0 fine; 1 the answer is no (damaged, nothing found); 2 usage; 74 a storage that does not work; 130 Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from ..errors import CheckpointError, StorageUnavailableError
from ..report import sized
from ..spans import wall_time
from ..storage.place import Place
from ..storage.url import scheme_of
from . import screen

_NO: Final = 1
_USAGE: Final = 2
_STORAGE: Final = 74  # EX_IOERR of sysexits.h
_INTERRUPTED: Final = 130
# How long a store may not answer: somebody waits at the terminal.
DEADLINE_SECONDS: Final = 30.0

app = typer.Typer(
    name="async-ckpt",
    help="Look at checkpoints of async_ckpt: what is there, whether it is whole, and what is in it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=True,
)

Where = Annotated[str, typer.Argument(help="A path or URL.", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else.")]
Endpoint = Annotated[str | None, typer.Option(help="The endpoint of an S3 store.")]
Region = Annotated[str | None, typer.Option(help="The region of the store.")]
Profile = Annotated[str | None, typer.Option(help="The profile in ~/.aws whose credentials are used.")]
Anonymous = Annotated[bool, typer.Option("--anonymous", help="Ask the store without credentials.")]


def place_of(where: str, endpoint: str | None, region: str | None, profile: str | None, anonymous: bool) -> Place:
    """The place that the options describe."""
    options: dict[str, Any] = {"endpoint": endpoint, "region": region, "profile": profile}
    options = {name: value for name, value in options.items() if value is not None}
    if anonymous:
        options["skip_signature"] = True
    if scheme_of(where) not in (None, "file"):
        options["deadline_seconds"] = DEADLINE_SECONDS
    return Place(where, options=options or None)


@app.command(epilog="Example: async-ckpt ls runs/a")
def ls(
    where: Where,
    all_: Annotated[bool, typer.Option("--all", help="Also steps that are retired or not committed.")] = False,
    as_json: AsJson = False,
    endpoint: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
) -> None:
    """List the steps of a run, the runs in a folder, or the versions of a publication."""
    from . import listing

    place = place_of(where, endpoint, region, profile, anonymous)
    kind, now = listing.kind_of(place), wall_time()
    if kind == "publication":
        versions = listing.versions_of(place.storage())
        if as_json:
            screen.print_json("versions", {"place": place.shown, "versions": [row.as_json() for row in versions]})
            return
        columns = ("version", "kind", "base", "size", "marks")
        screen.print_table(
            columns,
            (
                (
                    str(v.version),
                    v.kind,
                    "" if v.base is None else str(v.base),
                    sized(v.num_bytes),
                    ", ".join(v.marks),
                )
                for v in versions
            ),
            right=("version", "base", "size"),
        )
    elif kind == "runs":
        runs = listing.runs_in(place, clock=wall_time)
        if as_json:
            screen.print_json("runs", {"place": place.shown, "runs": [row.as_json() for row in runs]})
            return
        screen.print_table(
            ("run", "steps", "latest", "age", "size"),
            (
                (
                    screen.escaped(run.name),
                    str(run.num_steps),
                    "" if run.latest is None else str(run.latest),
                    "" if run.created is None else screen.age(run.created, now),
                    sized(run.num_bytes),
                )
                for run in runs
            ),
            right=("steps", "latest", "age", "size"),
        )
    elif kind == "run":
        _print_steps(place, listing.steps_of(place.storage(), clock=wall_time, with_all=all_), as_json=as_json, now=now)
    elif kind == "step":
        raise Answer(
            f"{place.shown} is the folder of one step; look into it with async-ckpt inspect, or list its run",
            _USAGE,
        )
    else:
        raise Answer(f"{place.shown}: no run, no step and no publication there", _NO)


def _print_steps(place: Place, rows: Sequence[Any], *, as_json: bool, now: float) -> None:
    if as_json:
        screen.print_json("steps", {"place": place.shown, "steps": [row.as_json() for row in rows]})
        return
    metrics = sorted(
        {
            key
            for row in rows
            for key, value in row.record.items()
            if isinstance(value, int | float | str) and key not in ("rolling", "ttl_seconds")
        }
    )
    screen.print_table(
        ("step", "age", "size", "ranks", *map(screen.escaped, metrics), "marks"),
        (
            (
                str(row.step),
                "" if row.created is None else screen.age(row.created, now),
                "" if row.num_bytes is None else sized(row.num_bytes),
                str(row.num_ranks) if row.num_ranks else "",
                *(screen.short(row.record[key]) if key in row.record else "" for key in metrics),
                ", ".join(row.marks),
            )
            for row in rows
        ),
        right=("step", "age", "size", "ranks", *metrics),
    )


@app.command(epilog="Example: async-ckpt inspect runs/a/step_00000100 'model.*' --stats")
def inspect(
    where: Where,
    names: Annotated[
        list[str] | None, typer.Argument(help="Names, beginnings of names, or patterns.", show_default=False)
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read every item: min, max, mean, std, norm, NaN, Inf.")
    ] = False,
    as_json: AsJson = False,
    endpoint: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
) -> None:
    """Show the names in a step, an archive, or any checkpoint that load() reads, with their shapes and sizes."""
    from ..loading.archives.find import from_path
    from . import inspection

    place = place_of(where, endpoint, region, profile, anonymous)
    rows = from_path(place, lambda parts: inspection.rows_of(parts, names or [], stats=stats), verify=True)
    if not rows:
        raise Answer(f"{place.shown}: none of its names is {', '.join(names or [])}", _NO)
    if as_json:
        screen.print_json("names", {"place": place.shown, "names": [row.as_json() for row in rows]})
        return
    statistics = ("min", "max", "mean", "std", "norm", "num_nan", "num_inf") if stats else ()
    screen.print_table(
        ("name", "kind", "dtype", "shape", "size", "value", *statistics, "files"),
        (
            (
                screen.escaped(row.name),
                row.kind if row.alias_of is None else f"= {screen.escaped(row.alias_of)}",
                row.dtype or "",
                "" if row.shape is None else "x".join(map(str, row.shape)) or "scalar",
                sized(row.num_bytes) if row.dtype else "",
                screen.short(row.value) if row.kind == "value" else "",
                *("" if row.stats is None else f"{row.stats[key]:.5g}" for key in statistics),
                str(len({one.file for one in row.places})) if len({one.file for one in row.places}) > 1 else "",
            )
            for row in rows
        ),
        right=("size", *statistics, "files"),
    )
    totals: dict[str, int] = {}
    for row in rows:
        top = row.name.partition(".")[0]
        totals[top] = totals.get(top, 0) + (row.num_bytes if row.alias_of is None else 0)
    parts = ", ".join(f"{screen.escaped(top)} {sized(size)}" for top, size in totals.items() if size)
    screen.print_text(f"{len(rows)} names, {sized(sum(totals.values()))}" + (f": {parts}" if parts else ""), "dim")


@app.command(epilog="Example: async-ckpt verify runs/a")
def verify(
    where: Where,
    as_json: AsJson = False,
    endpoint: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
) -> None:
    """Read every byte of an archive, a step or a run, and compare it with the digests."""
    from .. import CorruptCheckpointError
    from .. import verify as verify_place

    place = place_of(where, endpoint, region, profile, anonymous)
    try:
        report = verify_place(place)
    except CorruptCheckpointError as error:
        if as_json:
            tensors = list(error.tensors)
            screen.print_json(
                "verification",
                {"place": place.shown, "sound": False, "error": str(error), "tensors": tensors},
            )
            raise typer.Exit(_NO) from None
        raise
    if as_json:
        screen.print_json(
            "verification",
            {
                "place": place.shown,
                "sound": True,
                "steps": list(report.steps),
                "num_archives": report.num_archives,
                "num_bytes": report.num_bytes,
                "notes": list(report.notes),
            },
        )
    else:
        screen.print_text(screen.escaped(str(report)))


@app.command(epilog="Example: async-ckpt doctor runs/a")
def doctor(
    where: Annotated[
        str | None, typer.Argument(help="A root that checkpoints are to go to.", show_default=False)
    ] = None,
    as_json: AsJson = False,
    endpoint: Endpoint = None,
    region: Region = None,
    profile: Profile = None,
    anonymous: Anonymous = False,
) -> None:
    """Say what this machine has for checkpoints, and what it lacks."""
    from .doctor import findings

    place = None if where is None else place_of(where, endpoint, region, profile, anonymous)
    lines = list(findings(place))
    if as_json:
        screen.print_json("findings", {"findings": [line.as_json() for line in lines]})
    else:
        screen.print_table(("", "what", "is"), ((one.verdict, one.subject, screen.escaped(one.text)) for one in lines))
    if any(one.verdict == "bad" for one in lines):
        raise typer.Exit(_NO)


class Answer(Exception):
    """An answer that is no, or a wrong call: what is said of it, and the status."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and exit with its status."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    sys.exit(status_of(sys.argv[1:] if arguments is None else arguments))


def status_of(arguments: Sequence[str]) -> int:
    """Run the command in this process, and return its status."""
    try:
        result = app(args=list(arguments), standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as error:
        return error.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except Answer as error:
        return _said(str(error), error.status)
    except StorageUnavailableError as error:
        return _said(str(error), _STORAGE)
    except CheckpointError as error:
        return _said(str(error), _NO)
    except (ValueError, TypeError, ImportError, KeyError) as error:
        return _said(str(error.args[0] if error.args else error), _USAGE)
    except OSError as error:
        return _said(str(error), _STORAGE)
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("click", "typer"):
            return _usage(error)
        raise


def _usage(error: Any) -> int:
    error.show()
    return int(getattr(error, "exit_code", _USAGE))


def _said(text: str, status: int) -> int:
    print(f"async-ckpt: {screen.escaped(text)}", file=sys.stderr)
    return status
