"""The words of the command `async-ckpt`, their options, and what its exit status says.

In: arguments. Out: text or JSON on stdout, an error on stderr, a status. Knows nothing of: how anything is found out.

Each word imports what it needs when it is called, so that `--help` needs nothing of it.

Status: 0 fine; 1 the answer is no (damaged, nothing found); 2 usage; 74 a storage that does not work; 130 Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ..errors import CheckpointError, StorageUnavailableError
from ..storage.place import Place
from .options import AsJson, Where, place_like, with_place
from .screen import NO, STORAGE, USAGE, Answer, escaped

_INTERRUPTED: Final = 130

app = typer.Typer(
    name="async-ckpt",
    help="Look at checkpoints of async_ckpt: what is there, whether it is whole, and what is in it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=True,
)

Select = Annotated[
    list[str] | None, typer.Option(help="Names, beginnings of names, or patterns; may be given several times.")
]
Trust = Annotated[bool, typer.Option("--trust", help="Unpickle what is no plain data, which may run any code.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
As = Annotated[str | None, typer.Option("--as", help="archive, step, safetensors, hf, torch or dcp; else by the name.")]
FromRank = Annotated[
    list[str] | None, typer.Option(help="NAME=RANK: whose value to take where each rank has its own, such as rng=0.")
]
Strip = Annotated[str, typer.Option(help="The beginning that names lose, such as 'model.'.")]


@app.command(epilog="Example: async-ckpt ls runs/a")
@with_place
def ls(
    place: Where,
    all_: Annotated[bool, typer.Option("--all", help="Also steps that are retired or not committed.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Mark steps that lack an archive.")] = False,
    best: Annotated[str | None, typer.Option(help="Mark the best by a metric: loss, or accuracy:max:3.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the steps of a run, the runs in a folder, or the versions of a publication."""
    from .listing import show

    show(place, with_all=all_, check=check, best=best, as_json=as_json)


@app.command(epilog="Example: async-ckpt inspect runs/a/step_00000100 'model.*' --stats")
@with_place
def inspect(
    place: Where,
    names: Annotated[
        list[str] | None, typer.Argument(help="Names, beginnings of names, or patterns.", show_default=False)
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read every item: min, max, mean, std, norm, NaN, Inf.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the names in a step, an archive, or any checkpoint that load() reads, with their shapes and sizes."""
    from .inspection import show

    show(place, names or [], stats=stats, as_json=as_json)


@app.command(epilog="Example: async-ckpt verify runs/a")
@with_place
def verify(
    place: Where,
    base: Annotated[
        Path | None, typer.Option(help="The folder of the model that a publication began with, if it is not there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read every byte of an archive, a step, a run or a publication, and compare it with the digests."""
    from .soundness import show

    show(place, base=base, as_json=as_json)


@app.command(epilog="Example: async-ckpt cp runs/a s3://bucket/runs/a --steps 100:500")
@with_place
def cp(
    src: Annotated[Place, typer.Argument(help="A run, or the folder of a step.", show_default=False)],
    dst: Annotated[Place, typer.Argument(help="The root that the steps go to.", show_default=False)],
    steps: Annotated[
        list[str] | None, typer.Option(help="A step, or a range such as 100:500; may be given several times.")
    ] = None,
    latest: Annotated[bool, typer.Option("--latest", help="The newest step only.")] = False,
    best: Annotated[str | None, typer.Option(help="The best step by a metric: loss, or accuracy:max.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace other versions of the steps, and damaged ones.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy a run, or some of its steps, to another root: verified, and resumed by the same command."""
    from .copying import show

    show(src, dst, ranges=steps or [], latest=latest, best=best, overwrite=overwrite, as_json=as_json)


@app.command(epilog="Example: async-ckpt prune runs/a --keep last=3 --keep best=loss:min:2 --dry-run")
@with_place
def prune(
    place: Where,
    keep: Annotated[
        list[str] | None,
        typer.Option(help="A rule, given once for each: last=3, every=1000, best=loss:min:2, seconds=86400."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show which steps would go.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    unattended: Annotated[
        bool, typer.Option("--unattended", help="No process writes to the run; a store cannot tell.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete the steps that no rule keeps, as the retention of a training would. The newest step always stays."""
    from .pruning import show

    show(place, keep or [], dry_run=dry_run, yes=yes, unattended=unattended, as_json=as_json)


@app.command(epilog="Example: async-ckpt repair runs/a --apply")
@with_place
def repair(
    place: Where,
    unretire: Annotated[int | None, typer.Option(help="Commit this step again, which a rollback has retired.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Mend it; without this, nothing is changed.")] = False,
    unattended: Annotated[
        bool, typer.Option("--unattended", help="No process writes to the run; a store cannot tell.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find what of a run is not as its manifests say, and make it again: tracker, journal, layouts, leftovers."""
    from .repair import show

    show(place, unretire=unretire, apply=apply, unattended=unattended, as_json=as_json)


@app.command(epilog="Example: async-ckpt diff runs/a/step_00000100 runs/b/step_00000100 --rtol 1e-5")
@with_place
def diff(
    a: Annotated[Place, typer.Argument(help="A checkpoint of any format.", show_default=False)],
    b: Annotated[Place, typer.Argument(help="Another one.", show_default=False)],
    select: Select = None,
    rtol: Annotated[float, typer.Option(help="Differences up to this times the item of B are none.")] = 0.0,
    atol: Annotated[float, typer.Option(help="Differences up to this are none.")] = 0.0,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints name by name: shapes, dtypes, values."""
    from .diffing import show

    show(a, b, select=select or [], rtol=rtol, atol=atol, trust=trust, as_json=as_json)


@app.command(epilog="Example: async-ckpt extract runs/a/step_00000100 --select 'model.*' --to out/model.safetensors")
@with_place
def extract(
    src: Annotated[Place, typer.Argument(help="A checkpoint of any format.", show_default=False)],
    select: Select = None,
    to: Annotated[str, typer.Option(help="A path or URL.", show_default=False)] = "",
    as_: As = None,
    strip: Strip = "",
    from_rank: FromRank = None,
    trust: Trust = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write some names of a checkpoint to a file or folder of any format."""
    from .conversion import ConversionRequest, show

    if not to:
        raise Answer("--to says where the names go: F.safetensors, F.pt, F.tar, or a folder with --as hf", USAGE)
    request = ConversionRequest(
        src, place_like(src, to), tuple(select or ()), strip, trust, overwrite, tuple(from_rank or ())
    )
    show(request, as_, as_json=as_json)


@app.command(epilog="Example: async-ckpt convert model.pt out/model.tar")
@with_place
def convert(
    src: Annotated[Place, typer.Argument(help="A checkpoint of any format.", show_default=False)],
    dst: Annotated[Place, typer.Argument(help="A file or folder.", show_default=False)],
    as_: As = None,
    select: Select = None,
    strip: Strip = "",
    from_rank: FromRank = None,
    trust: Trust = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format; a step that several ranks have saved, as one state."""
    from .conversion import ConversionRequest, show

    show(
        ConversionRequest(src, dst, tuple(select or ()), strip, trust, overwrite, tuple(from_rank or ())),
        as_,
        as_json=as_json,
    )


@app.command(epilog="Example: async-ckpt bench runs --size 100MB --tensors 50")
@with_place
def bench(
    root: Annotated[Place | None, typer.Argument(help="A folder or URL to write to.", show_default="here")] = None,
    size: Annotated[str, typer.Option(help="The size of the state that is saved, such as 1GB or 512MiB.")] = "1GB",
    tensors: Annotated[int, typer.Option(help="The number of its tensors.")] = 300,
    as_json: AsJson = False,
) -> None:
    """Measure in a minute what a disk or store gives, and what saves and restores reach beside it."""
    from .bench import BenchRequest, show, size_of

    show(BenchRequest(root or Place("."), size_of(size), tensors), as_json=as_json)


@app.command(epilog="Example: async-ckpt doctor runs/a")
@with_place
def doctor(
    root: Annotated[
        Place | None, typer.Argument(help="A root that checkpoints are to go to.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what this machine has for checkpoints, and what it lacks."""
    from .doctor import show

    show(root, as_json=as_json)


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
        return _said(str(error), STORAGE)
    except CheckpointError as error:
        return _said(str(error), NO)
    except (ValueError, TypeError, ImportError, KeyError) as error:
        return _said(str(error.args[0] if error.args else error), USAGE)
    except OSError as error:
        return _said(str(error), STORAGE)
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("click", "typer"):
            return _usage(error)
        raise


def _usage(error: Any) -> int:
    error.show()
    return int(getattr(error, "exit_code", USAGE))


def _said(text: str, status: int) -> int:
    print(f"async-ckpt: {escaped(text)}", file=sys.stderr)
    return status
