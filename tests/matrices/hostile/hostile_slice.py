"""All kept inputs of all targets, and some that are made from them by chance: the part that `make test` tries at each commit.

In: a number of inputs for each target, a seed. Out: what was wrong. Knows nothing of: atheris.
"""

from pathlib import Path

from . import targets_in_memory, targets_of_folders
from .hostile_corpus import inputs_of
from .hostile_target import Scratch
from .input_engines import by_chance
from .input_watch import Watch

TARGETS = [*targets_in_memory.TARGETS, *targets_of_folders.TARGETS]


def try_all(num_inputs: int, seed: int, failures: Path) -> int:
    """Try so many inputs for each target, in this process. Prints counts. Returns how many inputs were wrong."""
    wrong = 0
    for target in TARGETS:
        Scratch.begin()
        watch = Watch(target, failures)
        watch.learn(inputs_of(target))
        for data in inputs_of(target):
            watch.run(data, alarm=True)
        if not watch.tally.errors["accepted"]:  # nothing behind the first check would be reached
            print(f"{target.name}: no sound input is accepted")
            wrong += 1
        by_chance(target, watch, num_inputs, seed)
        Scratch.end()
        wrong += sum(watch.tally.wrong.values())
        print(f"{target.name}: {watch.tally.as_dict()}", flush=True)
    return wrong
