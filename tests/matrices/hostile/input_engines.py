"""What makes hostile inputs: atheris where it is installed, which libFuzzer steers by the branches that inputs meet; else hypothesis.

In: a target, its watch and a number of inputs. Out: inputs, given to the watch. Knows nothing of: what is right.

libFuzzer never returns, so each target has a process of its own. It is forked from one that has imported torch.
"""

import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

from .hostile_corpus import inputs_of, lines_of
from .hostile_target import Target
from .input_mutations import changed
from .input_watch import HANGS_SECONDS, Watch
from .instrumentation import HAS_ATHERIS

_FIGURES = re.compile(r"cov: (\d+) ft: (\d+) corp: (\d+)")


def name() -> str:
    return "atheris" if HAS_ATHERIS else "hypothesis"


def fuzz(target: Target, watch: Watch, place: Path, num_inputs: int, seed: int) -> None:
    """Give a target so many inputs, and write what came of it to `place`. With atheris, the process ends in here."""
    (place / "corpus").mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(inputs_of(target)):
        (place / "corpus" / f"kept{number:04d}").write_bytes(data)
    (_by_atheris if HAS_ATHERIS else _by_hypothesis)(target, watch, place, num_inputs, seed)


def _by_atheris(target: Target, watch: Watch, place: Path, num_inputs: int, seed: int) -> None:
    import atheris

    def one(data: bytes) -> None:
        watch.run(data)
        if watch.tally.inputs % 250 == 0 or watch.tally.inputs >= num_inputs:
            _write(place, watch)

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        return changed(data, random.Random(seed), target.form, max_bytes, atheris.Mutate)

    log = os.open(place / "log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(log, 2)
    options = {
        "runs": num_inputs, "seed": seed % 2**31 or 1, "max_len": target.max_bytes, "rss_limit_mb": 0, "len_control": 0,
        "timeout": HANGS_SECONDS, "artifact_prefix": f"{place}/", "verbosity": 1,
    }  # fmt: skip
    arguments = [f"-{key}={value}" for key, value in options.items()]
    atheris.Setup([sys.argv[0], *arguments, str(place / "corpus")], one, custom_mutator=mutate)
    atheris.Fuzz()


def _by_hypothesis(target: Target, watch: Watch, place: Path, num_inputs: int, seed: int) -> None:
    import hypothesis
    from hypothesis import strategies as some

    seeds = inputs_of(target)
    met: set[Any] = set()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=num_inputs, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(some.sampled_from(seeds), some.lists(some.integers(0, 2**32), min_size=1, max_size=4))
    def one(data: bytes, numbers: list[int]) -> None:
        for number in numbers:
            data = changed(data, random.Random(number), target.form, target.max_bytes)
        lines = lines_of(data, lambda data: watch.run(data, alarm=True))
        hypothesis.target(float(len(lines)))
        if lines - met:
            met.update(lines)
            (place / "corpus" / f"found{watch.tally.inputs}").write_bytes(data)

    one()
    _write(place, watch, len(met))


def by_chance(target: Target, watch: Watch, num_inputs: int, seed: int) -> None:
    """So many inputs that are made from the kept ones by chance alone: what the tests do at each commit."""
    seeds = inputs_of(target)
    draw = random.Random(f"{seed}/{target.name}")
    for _ in range(num_inputs):
        data = draw.choice(seeds)
        for _ in range(draw.choice([1, 1, 2, 4])):
            data = changed(data, draw, target.form, target.max_bytes)
        watch.run(data, alarm=True)


def _write(place: Path, watch: Watch, met: int = 0) -> None:
    told = json.dumps(watch.tally.as_dict() | {"met": met})
    (place / "tally.new").write_text(told)
    os.replace(place / "tally.new", place / "tally.json")


def found(place: Path) -> dict[str, Any]:
    """What a process has written about its target: the tally, branches that were met, and the size of the corpus."""
    told: dict[str, Any] = json.loads((place / "tally.json").read_text()) if (place / "tally.json").exists() else {}
    figures = _FIGURES.findall((place / "log").read_text(errors="replace")) if (place / "log").exists() else []
    told["branches"] = int(figures[-1][0]) if figures else told.pop("met", 0)
    told["corpus"] = len(list((place / "corpus").iterdir()))
    told["left"] = [
        path.name
        for path in place.iterdir()
        if path.name.startswith(("timeout-", "crash-", "oom-", "slow-unit-", "leak-"))
    ]
    return told
