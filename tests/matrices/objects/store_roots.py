"""Roots of scenarios that lie in a bucket, the process that works there, and scenarios that only stores have.

In: a bucket, and the options of its client. Out: an object that a scenario takes for a folder. Knows nothing of: faults.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from buckets import PART
from racing import Skipping

from async_ckpt import AsyncCheckpointer, Place
from async_ckpt.core.host import waits
from async_ckpt.stores.s3 import store
from tests.matrices.calls import attack_scenarios
from tests.matrices.calls.plugin_scenarios import PLUGINS
from tests.matrices.calls.scenario import Notes, Scenario, Told, state_of

# What the scenarios have on a disk in any case.
_LOCAL: Final = frozenset({"given", "taken", "again", "next", "engine", "one.pt", "one.safetensors", "memory", "disk"})
_PREFIX: Final = "root"
_LARGE: Final = PART // 4 + 100  # numbers of four bytes, which are sent in two parts


class StorePlace(Place):
    """A place that tells whether it is there, and is shown as its URL."""

    def exists(self) -> bool:
        storage, name = self.object()
        return storage.exists(name)

    def __str__(self) -> str:
        return self.text


class StoreRoot:
    """Stands for a folder: the files in it are in a bucket, or on a disk where they have to be."""

    def __init__(self, bucket: str, local: Path, options: Mapping[str, Any], engine: Any = None) -> None:
        self.parent = local
        self._bucket, self._options, self._engine = bucket, options, engine

    def __truediv__(self, name: str) -> Path | StorePlace:
        if name in _LOCAL:
            return self.parent / name
        return StorePlace(f"s3://{self._bucket}/{_PREFIX}/{name}", options=self._options, engine=self._engine)

    def mkdir(self, *_: Any, **__: Any) -> None:
        """A bucket has no folders."""


def nobody_waits() -> None:
    """From now on in this process: between two tries of a request, time passes by the clock of the client alone."""
    store.ObjectStorage = partial(store.ObjectStorage, timer=Skipping())  # type: ignore[assignment,misc]
    waits.ABORT_SECONDS = 2.0  # type: ignore[misc]


def act(scenario: str, where: str, notes: str) -> None:
    """In the child."""
    nobody_waits()
    told = json.loads(where)
    root: Any = StoreRoot(told["bucket"], Path(told["local"]), told["options"], engine_of(scenario))
    SCENARIOS[scenario].act(root, Notes(Path(notes)))


def _saves_two_parts(root: Path, notes: Notes) -> None:
    with attack_scenarios.closing(AsyncCheckpointer(root / "run", segment_bytes=PART)) as ckpt, notes.of("save", 2, 20):
        ckpt.save(state_of(20) | {"large": torch.full((_LARGE,), 20.0)}, 2).result()


def _check_two_parts(root: Path, told: Told) -> None:
    with AsyncCheckpointer(root / "run") as ckpt:
        for step in ckpt.steps():
            state = ckpt.load(step)
            assert step == 1 or torch.equal(state["large"], torch.full((_LARGE,), float(state["number"])))
    SCENARIOS["save"].check(root, told)


_OF_DISKS: Final = {name: made for name, made in attack_scenarios.SCENARIOS.items() if name not in PLUGINS}
_BY_S3FS: Final = {f"{name}, by s3fs": _OF_DISKS[name] for name in ("save", "overwrite", "rollback")}

SCENARIOS: Final[Mapping[str, Scenario]] = {
    **_OF_DISKS,
    "save in two parts": Scenario(_OF_DISKS["save"].prepare, _saves_two_parts, _check_two_parts, {1: 10}),
    **_BY_S3FS,
}


def engine_of(scenario: str) -> str | None:
    """The client of a scenario; None for obstore."""
    return "s3fs" if scenario in _BY_S3FS else None


def takes_options(scenario: str) -> bool:
    """Whether options of obstore reach the client. The command passes on none."""
    return scenario not in _BY_S3FS and not SCENARIOS[scenario].has_plain_errors
