"""Make the witnesses of frameworks that need an environment of their own, with the Python of that environment.

    cd tests; PYTHONPATH=..:support ../.venv-frameworks/deepspeed/bin/python -m witnesses.make_frameworks FOLDER NAME ...

In: nothing. Out: FOLDER/<name>.tar.gz for each kind: `run` is what was saved, and `expected.json` has the losses and the
states of the same training by the framework alone, without this library. The committed ones were made by the code of
commit 47276036 of 2026-11-28, with this module, `make.py`, and the trainings of `tests/support` put into it. Knows
nothing of: what is compared afterwards.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from witnessed import DEEPSPEED, LAST, SAVED, TORCHTITAN, VERL_RANKS

from .make import write

WITNESSES: dict[str, Callable[[Path], None]] = {}


@contextmanager
def _worlds(*modules: str) -> Iterator[Any]:
    """Ranks as the tests start them."""
    from children import Nursery
    from rank_worlds import Worlds

    with tempfile.TemporaryDirectory() as folder, Nursery(Path(folder), *modules) as nursery:
        yield Worlds(nursery, Path(folder))


def _make(framework: str, plain: str, saves: str, folder: Path, *, size: int = 2, **values: Any) -> None:
    """Write `expected.json` by one script, which tells losses and states, and `run` by the other."""
    values |= {"last": LAST, "saved": SAVED, "run": str(folder / "run")}
    with _worlds(framework) as worlds:
        told = [end.told[-1] for end in worlds.run(size, plain.format(**values))]
        expected = {name: [of_rank[name] for of_rank in told] for name in told[0]}
        (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")
        worlds.run(size, saves.format(**values))


# --- DeepSpeed ------------------------------------------------------------------------------------------------------

_DEEPSPEED_ALONE = """
from deepspeed_runs import *
from witnessed import DEEPSPEED, of_deepspeed
training, states = Training({stage}, None, **DEEPSPEED[{stage}]), {{}}
for step in range(2, {saved} + 1, 2):
    training.train(step)
    states[step] = of_deepspeed(training)
training.train({last})
here.tell({{"losses": training.losses, "states": states}})
"""
_DEEPSPEED = """
from deepspeed_runs import *
from witnessed import DEEPSPEED
training = Training({stage}, {layout!r}, **DEEPSPEED[{stage}])
training.train({saved}, {run!r})
training.checkpoints.wait()
"""


def _deepspeed(folder: Path, *, layout: str, stage: int) -> None:
    """Steps 2 and 4 on two ranks, without the two programs that DeepSpeed copies there."""
    _make("deepspeed_runs", _DEEPSPEED_ALONE, _DEEPSPEED, folder, layout=layout, stage=stage)
    for program in (folder / "run").glob("zero_to_*.py"):
        program.unlink()


for _stage in DEEPSPEED:
    WITNESSES[f"deepspeed_own_{_stage}"] = partial(_deepspeed, layout="deepspeed", stage=_stage)
    if _stage > 0:
        WITNESSES[f"deepspeed_archive_{_stage}"] = partial(_deepspeed, layout="archive", stage=_stage)

# --- torchtitan -----------------------------------------------------------------------------------------------------

_TORCHTITAN_ALONE = """
from titan_trainers import *
from witnessed import of_torchtitan
trainer, states = Trainer({run!r}, {layout!r}, kind=theirs, enable=False), {{}}
trainer.checkpointer.save = lambda step, **_: (
    states.update({{step: of_torchtitan(trainer)}}) if step in range(2, {saved} + 1, 2) else None)
losses = {{step: float.fromhex(loss) for step, loss in trainer.train({last}).items()}}
here.tell({{"losses": losses, "states": states}})
"""
_TORCHTITAN = """
from titan_trainers import *
Trainer({run!r}, {layout!r}).train({last}, until={saved})
"""
for _layout, _size in TORCHTITAN.items():
    WITNESSES[f"torchtitan_{_layout}"] = partial(
        _make, "titan_trainers", _TORCHTITAN_ALONE, _TORCHTITAN, size=_size, layout=_layout
    )

# --- verl -----------------------------------------------------------------------------------------------------------

_VERL_ALONE = """
from verl_runs import *
from witnessed import VERL, of_verl
training, states = Training({run!r}, "theirs", version={version}, sizes=VERL), {{}}
for step in range(2, {saved} + 1, 2):
    training.train(step, every=None)
    states[step] = of_verl(training)
training.train({last}, every=None)
here.tell({{"losses": training.losses, "states": states}})
"""
_VERL = """
from verl_runs import *
from witnessed import VERL
contents = ["model", "optimizer", "extra", "hf_model"]
training = Training({run!r}, version={version}, sizes=VERL, save_contents=contents)
training.train({saved})
training.manager.wait()
"""
for _name, (_version, _size) in VERL_RANKS.items():
    WITNESSES[f"verl_{_name}"] = partial(_make, "verl_runs", _VERL_ALONE, _VERL, size=_size, version=_version)

# --- SkyRL ----------------------------------------------------------------------------------------------------------

_SKYRL_ALONE = """
from skyrl_runs import *
from witnessed import SKYRL, of_skyrl
training, losses, states = Training(None, SKYRL), [], {{}}
losses += training.train({saved})
states[{saved}] = of_skyrl(training)
losses += training.train({last})
losses = {{step: float.fromhex(loss) for step, loss in enumerate(losses, 1)}}
here.tell({{"losses": losses, "states": states}})
"""
_SKYRL = """
from skyrl_runs import *
from witnessed import SKYRL
training = Training({layout!r}, SKYRL)
training.train({saved})
folder = {run!r} + "/global_step_{saved}/policy"
training.save_checkpoint(folder, client_state={{"epoch": 2, "rank": here.rank}}, tag="a")
training.strategy.finalize_pending_saves()
"""
for _layout in ("async_ckpt", "skyrl"):
    WITNESSES[f"skyrl_ranks_{_layout}"] = partial(_make, "skyrl_runs", _SKYRL_ALONE, _SKYRL, layout=_layout)

_SKYRL_TRAINER_ALONE = """
from skyrl_runs import *
from witnessed import SKYRL, of_skyrl
training, losses, states = TrainingByTrainer({run!r}, None, sizes=SKYRL), [], {{}}
for step in ({saved} - 1, {saved}):
    losses += training.train(step, save=False)
    states[step] = of_skyrl(training.worker)
losses += training.train({last}, save=False)
losses = {{step: float.fromhex(loss) for step, loss in enumerate(losses, 1)}}
here.tell({{"losses": losses, "states": states, "data": training.data}})
"""
_SKYRL_TRAINER = """
from skyrl_runs import *
from witnessed import SKYRL
training = TrainingByTrainer({run!r}, keep=2, sizes=SKYRL)
training.train({saved})
training.trainer.wait_for_checkpoints()
"""
_SKYRL_TINKER = """
from skyrl_runs import *
from async_ckpt.integrations.skyrl import CheckpointBackend
from witnessed import SKYRL
training = Training("async_ckpt", SKYRL)
training.train({saved})
with CheckpointBackend(OneWorker(training)) as backend:
    backend.save_checkpoint({run!r} + "/a/000004.tar.gz", "a")
"""
WITNESSES["skyrl_trainer"] = partial(_make, "skyrl_runs", _SKYRL_TRAINER_ALONE, _SKYRL_TRAINER, size=1)
WITNESSES["skyrl_tinker"] = partial(_make, "skyrl_runs", _SKYRL_ALONE, _SKYRL_TINKER, size=1)


def main(target: Path, names: list[str]) -> None:
    write(target, {name: WITNESSES[name] for name in names})


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main(Path(sys.argv[1]), sys.argv[2:])
