"""`python -m tests.matrices.hostile`: hostile inputs for every parser, each in a process of its own, and what they came to.

In: options. Out: counts, a report, an exit status. Knows nothing of: any parser.

Ends with 1 if any input was answered by an undocumented error, took more than a second or 256 MiB, or reached out of its
folder. Such an input is written to a file, and the command that repeats it is printed.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.matrices.hostile.instrumentation import instrumented

with instrumented():  # before anything imports the library
    from tests.matrices.hostile import input_engines as engines
    from tests.matrices.hostile.hostile_corpus import BESIDE, FAULT, SOUND, fewest, inputs_of, keep, kept
    from tests.matrices.hostile.hostile_slice import TARGETS
    from tests.matrices.hostile.hostile_target import Scratch, Target

INPUTS = 1_050_000
QUICK = 20_000
_MOST_KEPT, _MOST_KEPT_BYTES = 12, 4096
_MOST_SECONDS = 3000


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.matrices.hostile", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="TARGET", help="one parser alone")
    parser.add_argument("--inputs", type=int, default=0, help="of all parsers together")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} inputs")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="one input for --only")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", action="store_true", help="write the corpus anew from what the library writes")
    parser.add_argument("--grow", action="store_true", help="keep what the run has found in the corpus")
    return parser.parse_args(arguments)


def watched(target: Target, failures: Path) -> Any:
    """The watch of a target in this process, which knows what the target imports late."""
    import torch

    from tests.matrices.hostile.input_watch import Watch

    torch.set_num_threads(1)
    Scratch.begin(Scratch.folder if Scratch.folder.is_absolute() else None)
    watch = Watch(target, failures)
    with instrumented():
        watch.learn(inputs_of(target))
    return watch


def write_seeds(targets: list[Target]) -> None:
    from tests.matrices.hostile import seed_inputs

    if len(targets) > 1:
        keep(BESIDE, seed_inputs.beside())
    for target in targets:
        others = {name: data for name, data in kept(target.name).items() if not name.startswith(SOUND)}
        keep(target.name, {f"{SOUND}{number}": data for number, data in enumerate(target.seeds())} | others)
    shutil.rmtree(seed_inputs.folder())


def start(target: Target, place: Path, num_inputs: int, seed: int) -> int:
    """Fork a process that gives a target its inputs. Returns its id."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        engines.fuzz(target, watched(target, place / "failures"), place, num_inputs, seed)
    except BaseException:
        import traceback

        print(f"{target.name}: {traceback.format_exc()}", flush=True)
        os._exit(3)
    os._exit(0)


def run_all(targets: list[Target], options: argparse.Namespace, place: Path) -> dict[str, dict[str, Any]]:
    """Give all targets their inputs, the slowest first. Returns what each came to."""
    total = options.inputs or (QUICK if options.quick else INPUTS)
    shares = sum(target.share for target in targets)
    waiting = sorted(targets, key=lambda target: target.share)
    running: dict[int, tuple[Target, float]] = {}
    found: dict[str, dict[str, Any]] = {}
    while waiting or running:
        while waiting and len(running) < options.workers:
            target = waiting.pop(0)
            home = place / target.name.replace(" ", "-")
            home.mkdir(parents=True)
            running[start(target, home, -(-total * target.share // shares), options.seed)] = target, time.monotonic()
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            time.sleep(0.05)
            for other, (_, begun) in running.items():
                if time.monotonic() - begun > _MOST_SECONDS:
                    os.kill(other, signal.SIGKILL)
            continue
        target, begun = running.pop(pid)
        home = place / target.name.replace(" ", "-")
        found[target.name] = told = engines.found(home)
        told |= {"seconds": round(time.monotonic() - begun, 1), "status": os.waitstatus_to_exitcode(status)}
        _say(target, told, home)
        if options.grow and not told.get("wrong"):
            _grow(target, home)
    return found


def _say(target: Target, told: dict[str, Any], home: Path) -> None:
    rate = told.get("inputs", 0) / max(told["seconds"], 0.01)
    print(
        f"{target.name}: {told.get('inputs', 0):,} inputs ({rate:,.0f} a second), {told['branches']} branches, slowest "
        f"{told.get('slowest', 0):.2f} s, {told.get('peak_mib', 0)} MiB, {told.get('errors', {})}",
        flush=True,
    )
    if told["status"] or told["left"]:
        told.setdefault("wrong", {})[f"the process ended with {told['status']}: {told['left']}"] = 1
        print(f"{target.name}: ended with {told['status']}, see {home}; {told['left']}", flush=True)


def _grow(target: Target, home: Path) -> None:
    """Keep the fewest inputs that meet what all have met, in a process of its own: they are run once more."""
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        return
    watch = watched(target, home / "failures")
    kept_before = kept(target.name)
    sound = {name: data for name, data in kept_before.items() if name.startswith((SOUND, FAULT))}
    others = [*kept_before.values(), *(path.read_bytes() for path in (home / "corpus").iterdir())]
    small = [data for data in others if len(data) <= _MOST_KEPT_BYTES]
    chosen = fewest(sound.values(), small, lambda data: watch.run(data, alarm=True), _MOST_KEPT - len(sound))
    keep(target.name, sound | {f"{number:02d}": data for number, data in enumerate(chosen)})
    os._exit(0)


def replay(target: Target, path: Path) -> int:
    Scratch.begin()
    watch = watched(target, Path(tempfile.mkdtemp(prefix="hostile-failures-")))
    wrong = watch.run(path.read_bytes(), alarm=True)
    print(f"{target.name}: {wrong or 'nothing wrong'}; {watch.tally.as_dict()}")
    Scratch.end()
    return 1 if watch.tally.wrong else 0


def main() -> int:
    options = parsed()
    targets = TARGETS
    if options.only:
        targets = [target for target in targets if target.name.replace(" ", "-") == options.only.replace(" ", "-")]
        if not targets:
            print(f"no target {options.only}; there are {', '.join(target.name for target in TARGETS)}")
            return 2
    if options.seeds:
        write_seeds(targets)
        return 0
    if options.replay:
        return replay(targets[0], options.replay)
    place, begun = Path(tempfile.mkdtemp(prefix="hostile-run-")), time.monotonic()
    Scratch.begin()
    print(f"{engines.name()}, seed {options.seed}; failures go to {place}", flush=True)
    found = run_all(targets, options, place)
    is_wrong = any(told.get("wrong") for told in found.values())
    if not (options.only or options.quick or options.inputs):
        from tests.matrices.hostile.hostile_report import report

        report(targets, found, time.monotonic() - begun, options.seed)
    Scratch.end()
    total = sum(told.get("inputs", 0) for told in found.values())
    print(
        f"{total:,} inputs in {time.monotonic() - begun:,.0f} s: {'wrong: see above' if is_wrong else 'nothing wrong'}"
    )
    if not is_wrong:
        shutil.rmtree(place)
    return 1 if is_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
