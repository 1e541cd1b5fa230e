"""The words of the command `async-ckpt`, their options, and what its exit status says.

In: arguments. Out: text or JSON on stdout, an error on stderr, a status. Knows nothing of: how anything is found out.

Each word imports what it needs when it is called, so that `--help` needs nothing of it.

Status: 0 fine; 1 the answer is no (damaged, different, nothing found); 2 usage, or what cannot be compared; 70 a fault
of the command itself; 74 a storage that does not work; 75 steps that are not moved yet; 130 Ctrl-C.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer import Argument, Option

from ... import Place
from ...errors import (
    CheckpointError,
    IsAFolderError,
    NotAFolderError,
    NotFoundError,
    OccupiedError,
    StorageUnavailableError,
)
from .options import AsJson, Where, with_place
from .screen import NO, STORAGE, USAGE, Answer, documents_in_lines, escaped, print_text
from .where import place_like

_INTERRUPTED: Final = 130
_FAULT: Final = 70  # EX_SOFTWARE of sysexits.h
# What torch says of its own plans; the warnings of this library are RuntimeWarnings.
_NOT_SHOWN: Final = (UserWarning, FutureWarning, DeprecationWarning)

app = typer.Typer(
    name="async-ckpt",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _example(words: str) -> str:
    """The line below the help of a command, which the backspace keeps from being wrapped."""
    return f"\b\nExample: async-ckpt {words}"


def _argument(metavar: str, help_: str) -> Any:
    """An argument that has no default to show."""
    return Argument(metavar=metavar, help=help_, show_default=False)


Wheres = Annotated[list[Place], _argument("PLACE", "Paths or URLs. Name a step as RUN@100 or RUN@latest.")]
Select = Annotated[list[str] | None, Option(metavar="NAME", help="Take only this name, prefix or pattern. Repeatable.")]
Trust = Annotated[bool, Option("--trust", help="Unpickle any object. A pickle can run any code.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an existing file or folder.")]
As = Annotated[
    str | None,
    Option("--as", metavar="FORMAT", help="archive, step, safetensors, hf, torch or dcp; default: by the name."),
]
To = Annotated[
    str | None,
    Option(
        "--to", "--as", metavar="FORMAT", help="archive, step, safetensors, hf, torch or dcp; default: by the name."
    ),
]
FromRank = Annotated[
    list[str] | None,
    Option(metavar="NAME=RANK", help="Take the value of this rank if ranks differ, such as rng=0. Repeatable."),
]
Strip = Annotated[str, Option(metavar="PREFIX", help="Remove this prefix from all names, such as 'model.'.")]
Unattended = Annotated[bool, Option("--unattended", help="Confirm that no process writes to the run.")]
Base = Annotated[Path | None, Option(metavar="FOLDER", help="The model from which deltas start if there is no anchor.")]
AllPlaces = Annotated[bool, Option("--all", help="Work on all places of the run, not only on this one.")]
Best = Annotated[
    str | None, Option(metavar="METRIC", help="Choose the best steps by a metric: loss, or accuracy:max:3.")
]


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"async-ckpt {version('async_ckpt')}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, Option("--version", is_eager=True, callback=_show_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """List, verify, compare, copy and convert checkpoints of async_ckpt.

    Name a step by its folder, or by its run: runs/a@100, runs/a@latest, runs/a@best:loss, runs/a@best:accuracy:max.
    """


@app.command(epilog=_example("ls runs/a"))
@with_place
def ls(
    place: Where,
    all_: Annotated[bool, Option("--all", help="Also list steps that are retired or not committed.")] = False,
    check: Annotated[bool, Option("--check", help="Mark steps with missing or truncated archives.")] = False,
    best: Best = None,
    records: Annotated[bool, Option("--records", help="Show more than three entries of the records.")] = False,
    as_json: AsJson = False,
) -> None:
    """List steps of a run, runs in a folder, or published versions."""
    from .listing import show

    show(place, with_all=all_, check=check, best=best, records=records, as_json=as_json)


@app.command(epilog=_example("page runs/a runs/b"))
@with_place
def page(
    places: Annotated[list[Place], _argument("RUN", "Runs, or a folder of runs. Several runs are compared.")],
    output: Annotated[
        str, Option("--output", "-o", metavar="FILE", help="The path or URL of the HTML file.", show_default="RUN.html")
    ] = "",
    best: Annotated[
        list[str] | None, Option(metavar="METRIC", help="Mark the best steps by a metric, as for ls. Repeatable.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Draw whole runs as pictures and tables, in one HTML file.

    The file shows saves over time, stalls, bandwidth, sizes, records, and the kept steps. It needs no network.
    """
    from .page.run_page import file_name, show

    target = place_like(places[0], output or file_name(places))
    show(places, target, best=best or [], overwrite=overwrite, as_json=as_json)


@app.command(epilog=_example("inspect runs/a@100 'model.*' --stats"))
@with_place
def inspect(
    place: Where,
    names: Annotated[list[str] | None, _argument("NAME", "Names, prefixes of names, or patterns.")] = None,
    stats: Annotated[bool, Option("--stats", help="Read all: min, max, mean, std, norm, NaN, Inf.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the names, shapes and values in a checkpoint.

    PLACE is a step, an archive, a run (its newest step), a safetensors file, or a folder of Hugging Face or
    torch.distributed.checkpoint. One tensor is printed as by torch, plain values as JSON. Nothing is unpickled.
    """
    from .inspection import show

    show(place, names or [], stats=stats, as_json=as_json)


@app.command(epilog=_example("verify runs/a"))
@with_place
def verify(places: Wheres, all_: AllPlaces = False, base: Base = None, as_json: AsJson = False) -> None:
    """Compare every byte with its digest, and say how to mend damage.

    A PLACE is an archive, a step, a run, a publication, or a folder of these.
    """
    from .lookup import EVERYTHING, targets_of
    from .run_places import everywhere
    from .soundness import show

    targets = (place for place, _ in targets_of(places, EVERYTHING))
    _each(partial(show, base=base, as_json=as_json), everywhere(targets, asks_all=all_))


@app.command(epilog=_example("cp runs/a s3://bucket/runs/a --steps 100:500"))
@with_place
def cp(
    src: Annotated[list[Place], _argument("SRC", "Runs or steps, or a folder of runs.")],
    dst: Annotated[Place, _argument("DST", "The destination root; for several runs, a folder.")],
    steps: Annotated[
        list[str] | None,
        Option(metavar="STEP|FIRST:LAST", help="Copy only these steps; a range includes both ends. Repeatable."),
    ] = None,
    latest: Annotated[bool, Option("--latest", help="Copy only the newest step.")] = False,
    best: Best = None,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Replace damaged steps and other versions of steps.")
    ] = False,
    all_: AllPlaces = False,
    as_json: AsJson = False,
) -> None:
    """Copy a run, or some of its steps, to another root.

    Every byte is compared with its digest on the way. After an interruption, run the same command again. Several runs,
    and runs in a folder, keep their names below DST. With --all, steps that one place lacks come from the next.
    """
    from .copying import show, targets_below
    from .lookup import RUNS, targets_of
    from .run_places import everywhere

    copy = partial(show, ranges=steps or [], latest=latest, best=best, overwrite=overwrite, as_json=as_json)
    pairs = [
        (one, target)
        for source, target in targets_below(targets_of(src, RUNS), dst)
        for one in everywhere([source], asks_all=all_)
        if not all_ or one.text.rstrip("/") != target.text.rstrip("/")
    ]
    _each(copy, *zip(*pairs, strict=True), with_headings=not as_json)


@app.command(epilog=_example("prune runs/a --keep last=3 --keep best=loss:min:2 --dry-run"))
@with_place
def prune(
    places: Wheres,
    keep: Annotated[
        list[str] | None,
        Option(
            metavar="RULE",
            help="Keep by last=3, every=1000, best=loss:min:2, seconds=86400, good=2 or bytes=200e9; with free=50e9, "
            "delete the oldest steps until so many bytes are free. Each once.",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show which steps would be deleted.")] = False,
    yes: Annotated[bool, Option("--yes", help="Delete without asking.")] = False,
    all_: AllPlaces = False,
    unattended: Unattended = False,
    as_json: AsJson = False,
) -> None:
    """Delete the steps that no rule keeps.

    The rules are those of a training's retention, and the command shows the steps first. The newest step always stays.
    In a folder of runs, the rules apply to each run, and with --all to each place of a run.
    """
    from .lookup import RUNS, targets_of
    from .pruning import show
    from .run_places import everywhere

    delete = partial(show, rules=keep or [], dry_run=dry_run, yes=yes, unattended=unattended, as_json=as_json)
    targets = everywhere((place for place, _ in targets_of(places, RUNS)), asks_all=all_)
    _each(delete, targets, with_headings=not as_json)


@app.command(epilog=_example("mark runs/a 200 --bad 'loss is nan'"))
@with_place
def mark(
    place: Where,
    step: Annotated[int, _argument("STEP", "A committed step.")],
    bad: Annotated[
        str | None, Option(metavar="NOTE", help="Mark it as bad: a restart and `best` pass over it.")
    ] = None,
    good: Annotated[
        str | None, Option(metavar="NOTE", help="Mark it as good: Keep(good=…) keeps the newest such steps.")
    ] = None,
    clear: Annotated[bool, Option("--clear", help="Take its mark back.")] = False,
    as_json: AsJson = False,
) -> None:
    """Mark a step as good or bad, at all places of its run.

    NOTE says why, and may be empty. The newest mark of a step counts. The run's training may go on meanwhile.
    """
    from .marking import show

    if [bad is not None, good is not None, clear].count(True) != 1:
        raise Answer("pass one of --bad NOTE, --good NOTE and --clear", USAGE)
    note = bad if bad is not None else good or ""
    show(place, step, "bad" if bad is not None else None if clear else "good", note, as_json=as_json)


@app.command(epilog=_example("repair runs/a --apply"))
@with_place
def repair(
    places: Wheres,
    unretire: Annotated[int | None, Option(metavar="STEP", help="Commit a retired step again.")] = None,
    apply: Annotated[bool, Option("--apply", help="Make the repairs. Without it, nothing is changed.")] = False,
    all_: AllPlaces = False,
    unattended: Unattended = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild a run's tracker, journal and layout files.

    The files come from the run's manifests and archives. Leftovers of dead writers are deleted. Without --apply,
    nothing is changed. A PLACE is a run, or a folder of runs.
    """
    from .lookup import RUNS, note_trainers, targets_of
    from .repair import show
    from .run_places import everywhere

    targets = note_trainers(targets_of(places, RUNS))
    if unretire is not None and len(targets) > 1:
        raise Answer("--unretire names a step of one run; give that run alone", USAGE)
    mend = partial(show, unretire=unretire, apply=apply, unattended=unattended, as_json=as_json)
    _each(mend, everywhere([place for place, _ in targets], asks_all=all_))


@app.command(epilog=_example("diff runs/a@100 runs/b@100 --rtol 1e-5"))
@with_place
def diff(
    a: Annotated[Place, _argument("A", "A checkpoint of any format.")],
    b: Annotated[Place, _argument("B", "Another checkpoint.")],
    select: Select = None,
    rtol: Annotated[float, Option(metavar="X", help="Count items as equal if |a-b| <= X*|b|.")] = 0.0,
    atol: Annotated[float, Option(metavar="X", help="Count items as equal if |a-b| <= X.")] = 0.0,
    all_: Annotated[bool, Option("--all", help="Compare A at each place of its run with B.")] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints name by name: shapes, dtypes, values."""
    from .comparing.diffing import show
    from .run_places import everywhere

    compare = partial(show, b=b, select=select or [], rtol=rtol, atol=atol, trust=trust, as_json=as_json)
    _each(compare, everywhere([a], asks_all=all_), with_headings=not as_json)


@app.command(epilog=_example("extract runs/a@100 --select 'model.*' --to out/model.safetensors"))
@with_place
def extract(
    src: Annotated[Place, _argument("SRC", "A checkpoint of any format.")],
    select: Select = None,
    to: Annotated[str, Option(metavar="PLACE", help="The file or folder to write.", show_default=False)] = "",
    as_: As = None,
    strip: Strip = "",
    from_rank: FromRank = None,
    trust: Trust = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write selected tensors and values to a file or folder."""
    from .conversion import ConversionRequest, show

    if not to:
        raise Answer("--to is missing: name the file or folder to write, such as F.safetensors, F.pt or F.tar", USAGE)
    request = ConversionRequest(
        src, place_like(src, to), tuple(select or ()), strip, trust, overwrite, tuple(from_rank or ())
    )
    show(request, as_, as_json=as_json)


@app.command(epilog=_example("convert model.pt out/model.tar"))
@with_place
def convert(
    src: Annotated[Place, _argument("SRC", "A checkpoint of any format.")],
    dst: Annotated[Place, _argument("DST", "The file or folder to write.")],
    as_: To = None,
    config: Annotated[
        str,
        Option(
            metavar="FOLDER|ID", help="For --to hf: the model that has the config and tokenizer.", show_default=False
        ),
    ] = "",
    select: Select = None,
    strip: Strip = "",
    from_rank: FromRank = None,
    trust: Trust = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint in another format.

    A step of several ranks becomes one state. With --to hf --config, the folder also gets the config and the tokenizer
    of the model, and the names of the weights are compared with those of the model. Weights of LoRA become the folder
    of an adapter, for which --config names one with the same settings.
    """
    from .conversion import ConversionRequest, show

    request = ConversionRequest(src, dst, tuple(select or ()), strip, trust, overwrite, tuple(from_rank or ()), config)
    show(request, as_, as_json=as_json)


@app.command(epilog=_example("follow weights --into out/model --exec 'ls out/model' --once"))
@with_place
def follow(
    root: Annotated[Place, _argument("ROOT", "The root where a Publisher puts its versions.")],
    into: Annotated[str, Option(metavar="FOLDER", help="Pull versions into this folder.", show_default=False)] = "",
    sglang: Annotated[str | None, Option(metavar="URL", help="Have this SGLang server load each version.")] = None,
    vllm: Annotated[
        str | None,
        Option(metavar="URL", help="Have this vLLM server load each version; it needs VLLM_SERVER_DEV_MODE=1."),
    ] = None,
    exec_: Annotated[str | None, Option("--exec", metavar="CMD", help="Run this program for each version.")] = None,
    post: Annotated[str | None, Option(metavar="URL", help="Send this server a POST for each version.")] = None,
    abort_requests: Annotated[
        bool, Option("--abort-requests", help="Abort the engine's open requests instead of waiting for them.")
    ] = False,
    answer_within: Annotated[
        float, Option(metavar="SECONDS", help="How long the engine may take to load a version.")
    ] = 600.0,
    poll: Annotated[float, Option(metavar="SECONDS", help="Look for a new version this often.")] = 1.0,
    patience: Annotated[
        float, Option(metavar="SECONDS", help="How long the root may be unreachable before the command fails.")
    ] = 1800.0,
    status: Annotated[
        Path | None, Option(metavar="FILE", help="Write the status to this JSON file at each look at the root.")
    ] = None,
    base: Base = None,
    once: Annotated[bool, Option("--once", help="Exit once the engine has the newest version.")] = False,
    as_json: AsJson = False,
) -> None:
    """Pull each new version into a folder, and have an engine load it.

    This is a sidecar for one engine. SIGTERM ends it between versions. With --json, each event is a line of JSON.
    """
    from .live.sidecar import engine_by, show

    engine = engine_by(sglang, vllm, exec_, post, abort_requests=abort_requests, answer_seconds=answer_within)
    show(root, into, engine, base, status, once=once, poll_seconds=poll, patience_seconds=patience, as_json=as_json)


@app.command(epilog=_example("move runs/a --to s3://bucket/runs/a --once"))
@with_place
def move(
    places: Annotated[list[Place], _argument("PATH", "The nearest place of a run, or a folder of runs.")],
    to: Annotated[
        list[str] | None, Option(metavar="PLACE", help="Copy to these places, from near to far; by default the run's.")
    ] = None,
    once: Annotated[bool, Option("--once", help="Exit when the newest step is everywhere; 75 if not.")] = False,
    adopt: Annotated[bool, Option("--adopt", help="Continue from the steps of another run there.")] = False,
    retire: Annotated[bool, Option("--retire", help="Retire the steps of another run there.")] = False,
    yes: Annotated[bool, Option("--yes", help="Adopt or retire without asking.")] = False,
    unattended: Unattended = False,
    as_json: AsJson = False,
) -> None:
    """Copy the steps of a run to its further places.

    The command follows the run until Ctrl-C or SIGTERM, during the training or after it. The places are in tiers.json,
    which a training with several places writes. The client finds credentials in its usual sources. With --json, each
    arrival is a line of JSON.
    """
    from .live.move_steps import show
    from .lookup import targets_of

    options = {"once": once, "adopt": adopt, "retire": retire, "yes": yes, "unattended": unattended}
    show(targets_of(places, ("run",)), to=to or (), **options, as_json=as_json)


@app.command(epilog=_example("watch runs/a --once"))
@with_place
def watch(
    places: Wheres,
    once: Annotated[bool, Option("--once", help="Look once; exit with 1 if there is a warning.")] = False,
    interval: Annotated[float, Option(metavar="SECONDS", help="Look this often.")] = 2.0,
    older: Annotated[
        str | None, Option(metavar="AGE", help="Warn if the newest step is older than this, such as 90s or 2h.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the status of a run until Ctrl-C.

    The status is the newest step and its age, the step under way, the last saves with their trend, and warnings.
    Several runs, and runs in a folder, have one line each. The command only reads, and sends a store at most two
    requests per second. With --json, each look is a line of JSON.
    """
    from .live.watch import show
    from .lookup import RUNS, targets_of

    targets = targets_of(places, RUNS)
    show(targets, once=once, interval=interval, older=older, as_json=as_json)


@app.command(epilog=_example("bench runs --size 50MB --tensors 50"))
@with_place
def bench(
    root: Annotated[
        Place | None, Argument(metavar="ROOT", help="A folder or URL to write to.", show_default="here")
    ] = None,
    size: Annotated[str, Option(metavar="SIZE", help="The size of the state to save, such as 1GB or 512MiB.")] = "1GB",
    tensors: Annotated[int, Option(metavar="N", help="The number of tensors in the state.")] = 300,
    as_json: AsJson = False,
) -> None:
    """Measure a disk or store, and saves and restores there."""
    from .bench import show, size_of

    show(root or Place("."), size_of(size), tensors, as_json=as_json)


@app.command(epilog=_example("doctor runs/a"))
@with_place
def doctor(
    root: Annotated[Place | None, _argument("ROOT", "A root where checkpoints will be saved.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check what this machine has, and lacks, for checkpoints."""
    from .doctor import show

    show(root, as_json=as_json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and exit with its status."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it quietly
    arguments = sys.argv[1:] if arguments is None else arguments
    if "move" in arguments[:1]:  # the training needs the processors; the whole process gives way, and for good
        from ...plumbing import threads

        threads.give_way()
    sys.exit(status_of(arguments))


def status_of(arguments: Sequence[str]) -> int:
    """Run the command in this process, and return its status."""
    with warnings.catch_warnings():
        for category in _NOT_SHOWN:
            warnings.simplefilter("ignore", category)
        return _status_of(partial(app, args=list(arguments), prog_name="async-ckpt", standalone_mode=False))


def _each(call: Callable[..., object], *places: Sequence[Place], with_headings: bool = False) -> None:
    """Make a call for each of several places, or pairs of places, whatever comes of the others. Exits with the gravest
    status.
    """
    targets = [*zip(*places, strict=True)]
    if len(targets) == 1:
        call(*targets[0])
        return
    worst = 0
    with documents_in_lines():
        for each in targets:
            if with_headings:
                print_text(escaped(f"{each[0].shown}:"))
            worst = max(worst, status := _status_of(partial(call, *each)))
            if status == _INTERRUPTED:
                break
    raise typer.Exit(worst)


def _status_of(call: Callable[[], object]) -> int:
    try:
        result = call()
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
        is_of_path = isinstance(error, IsAFolderError | NotAFolderError | NotFoundError | OccupiedError)
        return _said(str(error), STORAGE if is_of_path else NO)
    except KeyError as error:  # a name that no checkpoint has; its text would be quoted
        return _said(str(error.args[0] if error.args else error), NO)
    except (ValueError, TypeError, ImportError) as error:
        return _said(str(error), USAGE)
    except OSError as error:
        return _said(str(error), STORAGE)
    except Exception as error:
        if type(error).__module__.partition(".")[0] in ("click", "typer"):
            return _usage(error)
        if os.environ.get("ASYNC_CKPT_TRACEBACK"):
            raise
        return _said(
            f"internal error: {type(error).__name__}: {error!s:.200}; please report it with the traceback that "
            "ASYNC_CKPT_TRACEBACK=1 in the environment prints",
            _FAULT,
        )


def _usage(error: Any) -> int:
    error.show()
    return int(getattr(error, "exit_code", USAGE))


def _said(text: str, status: int) -> int:
    print(f"async-ckpt: {escaped(text)}", file=sys.stderr)
    return status
