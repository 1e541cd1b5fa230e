"""The subcommands of `async-ckpt`, and their options.

In: arguments. Out: a call of a subcommand's `show`, and a status. Knows nothing of: what a subcommand does.

Each subcommand is declared here as a function without a body. Its parameters are the options, and its docstring is the
help. `show` has the same parameters, and `as_json`. The module of a subcommand is imported when it is called, so that
`--help` does not import it.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer import Argument, Option

from ... import Place
from .exit_statuses import status_after
from .options import Where, with_place

# Warnings of torch about its own plans. The warnings of this library are RuntimeWarnings.
_NOT_SHOWN: Final = (UserWarning, FutureWarning, DeprecationWarning)

app = typer.Typer(
    name="async-ckpt",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _word(example: str, module: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that adds a subcommand. The backspace keeps click from wrapping the line of the example."""

    def added(declared: Callable[..., None]) -> Callable[..., None]:
        def show(**given: Any) -> None:
            import_module(f".{module}", __package__).show(**given)

        return app.command(epilog=f"\b\nExample: async-ckpt {example}")(with_place(declared, show))

    return added


def _argument(metavar: str, help_: str) -> Any:
    """An argument whose help shows no default."""
    return Argument(metavar=metavar, help=help_, show_default=False)


Wheres = Annotated[list[Place], _argument("PLACE", "Paths or URLs. Name a step as RUN@100 or RUN@latest.")]
Select = Annotated[list[str] | None, Option(metavar="NAME", help="Take only this name, prefix or pattern. Repeatable.")]
Trust = Annotated[bool, Option("--trust", help="Unpickle any object. A pickle can run any code.")]
Overwrite = Annotated[bool, Option("--overwrite", help="Replace an existing file or folder.")]
_FORMATS: Final = "archive, step, safetensors, hf, torch or dcp; default: by the name."
As = Annotated[str | None, Option("--as", metavar="FORMAT", help=_FORMATS)]
To = Annotated[str | None, Option("--to", "--as", metavar="FORMAT", help=_FORMATS)]
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


@_word("ls runs/a", "listing")
def ls(
    place: Where,
    all_: Annotated[bool, Option("--all", help="Also list steps that are retired or not committed.")] = False,
    check: Annotated[bool, Option("--check", help="Mark steps with missing or truncated archives.")] = False,
    best: Best = None,
    records: Annotated[bool, Option("--records", help="Show more than three entries of the records.")] = False,
) -> None:
    """List steps of a run, runs in a folder, or published versions."""


@_word("page runs/a runs/b", "page.run_page")
def page(
    places: Annotated[list[Place], _argument("RUN", "Runs, or a folder of runs. Several runs are compared.")],
    output: Annotated[
        str, Option("--output", "-o", metavar="FILE", help="The path or URL of the HTML file.", show_default="RUN.html")
    ] = "",
    best: Annotated[
        list[str] | None, Option(metavar="METRIC", help="Mark the best steps by a metric, as for ls. Repeatable.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Draw whole runs as pictures and tables, in one HTML file.

    The file shows saves over time, stalls, bandwidth, sizes, records, and the kept steps. It needs no network.
    """


@_word("inspect runs/a@100 'model.*' --stats", "inspection")
def inspect(
    place: Where,
    names: Annotated[list[str] | None, _argument("NAME", "Names, prefixes of names, or patterns.")] = None,
    stats: Annotated[bool, Option("--stats", help="Read all: min, max, mean, std, norm, NaN, Inf.")] = False,
) -> None:
    """Show the names, shapes and values in a checkpoint.

    PLACE is a step, an archive, a run (its newest step), a safetensors file, or a folder of Hugging Face or
    torch.distributed.checkpoint. One tensor is printed as by torch, plain values as JSON. Nothing is unpickled.
    """


@_word("verify runs/a", "soundness")
def verify(places: Wheres, all_: AllPlaces = False, base: Base = None) -> None:
    """Compare every byte with its digest; show how to repair damage.

    A PLACE is an archive, a step, a run, a publication, or a folder of these.
    """


@_word("cp runs/a s3://bucket/runs/a --steps 100:500", "copying")
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
) -> None:
    """Copy a run, or some of its steps, to another root.

    Every byte is compared with its digest on the way. After an interruption, run the same command again. Several runs,
    and runs in a folder, keep their names below DST. With --all, steps that one place lacks come from the next.
    """


@_word("prune runs/a --keep last=3 --keep best=loss:min:2 --dry-run", "pruning")
def prune(
    places: Wheres,
    keep: Annotated[
        list[str] | None,
        Option(
            metavar="RULE",
            help="Keep by last=3, every=1000, best=loss:min:2, seconds=86400, good=2 or bytes=200e9; with free=50e9, "
            "delete the oldest steps until this many bytes are free. Each rule at most once.",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show which steps would be deleted.")] = False,
    yes: Annotated[bool, Option("--yes", help="Delete without asking.")] = False,
    all_: AllPlaces = False,
    unattended: Unattended = False,
) -> None:
    """Delete the steps that no rule keeps.

    The rules are those of a training's retention, and the command shows the steps first. The newest step always stays.
    In a folder of runs, the rules apply to each run, and with --all to each place of a run.
    """


@_word("mark runs/a 200 --bad 'loss is nan'", "marking")
def mark(
    place: Where,
    step: Annotated[int, _argument("STEP", "A committed step.")],
    bad: Annotated[
        str | None, Option(metavar="NOTE", help="Mark it as bad: a restart and `best` pass over it.")
    ] = None,
    good: Annotated[
        str | None, Option(metavar="NOTE", help="Mark it as good: Keep(good=…) keeps the newest such steps.")
    ] = None,
    clear: Annotated[bool, Option("--clear", help="Remove its mark.")] = False,
) -> None:
    """Mark a step as good or bad, at all places of its run.

    NOTE says why, and may be empty. The newest mark of a step counts. The run's training may continue.
    """


@_word("repair runs/a --apply", "repair")
def repair(
    places: Wheres,
    unretire: Annotated[int | None, Option(metavar="STEP", help="Commit a retired step again.")] = None,
    apply: Annotated[bool, Option("--apply", help="Make the repairs. Without it, nothing is changed.")] = False,
    all_: AllPlaces = False,
    unattended: Unattended = False,
) -> None:
    """Rebuild a run's tracker, journal and layout files.

    The files come from the run's manifests and archives. Leftovers of dead writers are deleted. Without --apply,
    nothing is changed. A PLACE is a run, or a folder of runs.
    """


@_word("diff runs/a@100 runs/b@100 --rtol 1e-5", "comparing.diffing")
def diff(
    a: Annotated[Place, _argument("A", "A checkpoint of any format.")],
    b: Annotated[Place, _argument("B", "Another checkpoint.")],
    select: Select = None,
    rtol: Annotated[float, Option(metavar="X", help="Count items as equal if |a-b| <= X*|b|.")] = 0.0,
    atol: Annotated[float, Option(metavar="X", help="Count items as equal if |a-b| <= X.")] = 0.0,
    all_: Annotated[bool, Option("--all", help="Compare A at each place of its run with B.")] = False,
    trust: Trust = False,
) -> None:
    """Compare two checkpoints name by name: shapes, dtypes, values."""


@_word("extract runs/a@100 --select 'model.*' --to out/model.safetensors", "conversion")
def extract(
    src: Annotated[Place, _argument("SRC", "A checkpoint of any format.")],
    select: Select = None,
    to: Annotated[str, Option(metavar="PLACE", help="The file or folder to write.", show_default=False)] = "",
    as_: As = None,
    strip: Strip = "",
    from_rank: FromRank = None,
    trust: Trust = False,
    overwrite: Overwrite = False,
) -> None:
    """Write selected tensors and values to a file or folder."""


@_word("convert model.pt out/model.tar", "conversion")
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
) -> None:
    """Write a checkpoint in another format.

    A step of several ranks becomes one state. With --to hf --config, the folder also gets the config and the tokenizer
    of the model, and the names of the weights are compared with those of the model. LoRA weights become an
    adapter folder; --config then names an adapter with the same settings.
    """


@_word("follow weights --into out/model --exec 'ls out/model' --once", "live.sidecar")
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
) -> None:
    """Pull each new version into a folder, and have an engine load it.

    This is a sidecar for one engine. SIGTERM ends it between versions. With --json, each event is a line of JSON.
    """


@_word("move runs/a --to s3://bucket/runs/a --once", "live.move_steps")
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
) -> None:
    """Copy the steps of a run to its further places.

    The command follows the run until Ctrl-C or SIGTERM, during the training or after it. The places are in tiers.json,
    which a training with several places writes. The client finds credentials in its usual sources. With --json, each
    arrival is a line of JSON.
    """


@_word("watch runs/a --once", "live.watch")
def watch(
    places: Wheres,
    once: Annotated[bool, Option("--once", help="Look once; exit with 1 if there is a warning.")] = False,
    interval: Annotated[float, Option(metavar="SECONDS", help="Look this often.")] = 2.0,
    older: Annotated[
        str | None, Option(metavar="AGE", help="Warn if the newest step is older than this, such as 90s or 2h.")
    ] = None,
) -> None:
    """Show the status of a run until Ctrl-C.

    The status is the newest step and its age, the step in progress, the last saves with their trend, and warnings.
    Several runs, and runs in a folder, have one line each. The command only reads, and sends a store at most two
    requests per second. With --json, each look is a line of JSON.
    """


@_word("bench runs --size 50MB --tensors 50", "bench")
def bench(
    root: Annotated[
        Place | None, Argument(metavar="ROOT", help="A folder or URL to write to.", show_default="here")
    ] = None,
    size: Annotated[str, Option(metavar="SIZE", help="The size of the state to save, such as 1GB or 512MiB.")] = "1GB",
    tensors: Annotated[int, Option(metavar="N", help="The number of tensors in the state.")] = 300,
) -> None:
    """Measure a disk or store, and saves and restores there."""


@_word("doctor runs/a", "doctor")
def doctor(
    root: Annotated[Place | None, _argument("ROOT", "A root where checkpoints will be saved.")] = None,
) -> None:
    """Check what this machine has, and lacks, for checkpoints."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command, and exit with its status."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command quietly
    arguments = sys.argv[1:] if arguments is None else arguments
    if "move" in arguments[:1]:  # lower the priority of the whole process, permanently: the training comes first
        from ...plumbing import threads

        threads.give_way()
    sys.exit(status_of(arguments))


def status_of(arguments: Sequence[str]) -> int:
    """Run the command in this process, and return its status."""
    with warnings.catch_warnings():
        for category in _NOT_SHOWN:
            warnings.simplefilter("ignore", category)
        return status_after(partial(app, args=list(arguments), prog_name="async-ckpt", standalone_mode=False))
