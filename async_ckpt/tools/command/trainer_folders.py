"""The checkpoints of frameworks, recognized by the names in a trainer's folder.

In: the names in a folder. Out: the frameworks of its checkpoints, and their steps. Knows nothing of: tensors.

All subcommands use this module. A checkpoint is recognized by a file that each complete one of its framework has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from ... import Place
from ...plumbing import Storage, events, runs, threads, timing, urls
from .place_arguments import parent_of

_OF_TORCH: Final = "torch.distributed.checkpoint"
# For each framework, patterns for the name of a checkpoint, and for a file or folder that a complete one has.
_FRAMEWORKS: Final = tuple(
    (framework, re.compile(names), re.compile(mark))
    for framework, names, mark in (
        ("Transformers", r"checkpoint-\d+", r"trainer_state\.json"),
        ("DeepSpeed", r".*", r".+_model_states\.pt"),
        ("DeepSpeed", r"global_step\d+", r"rank_00000\.tar"),
        ("SkyRL", r"global_step_\d+", r"policy|trainer_state\.pt"),
        ("verl", r"global_step_\d+", r"actor|critic"),
        ("accelerate", r".*", r"random_states_\d+\.pkl|training\.tar"),
        ("Lightning", r".+\.ckpt", r"meta\.pt"),
        (_OF_TORCH, r".*", r"\.metadata"),
    )
)
_HUGGING_FACE: Final = re.compile(r".+\.safetensors(\.index\.json)?|pytorch_model.*\.bin")
# Other files with weights, and files of text beside weights.
_BESIDE_STATE: Final = re.compile(r".+\.distcp|(?!trainer_state).+\.json|.+\.(txt|model|jinja|py|md)|[._].*")
_FILE: Final = ".ckpt"  # of Lightning, whose checkpoints may be files
_STEP: Final = re.compile(r"step=(\d+)")
_READERS: Final = 32
# The folder in which accelerate itself names the checkpoints.
_OF_ACCELERATE: Final = "checkpoints"
# The state of Transformers' Trainer, which names its best checkpoint.
TRAINER_STATE: Final = "trainer_state.json"


class TrainerCheckpoint(NamedTuple):
    """A checkpoint of a framework: the name of its file or folder, and its step if the name has it."""

    name: str
    framework: str
    step: int | None


def framework_of(name: str, inside: Collection[str]) -> str | None:
    """The framework that wrote a folder with this name and content; None if the folder is not a checkpoint."""
    for framework, names, mark in _FRAMEWORKS:
        if names.fullmatch(name) and any(map(mark.fullmatch, inside)):
            return framework
    return "Hugging Face" if any(map(_HUGGING_FACE.fullmatch, inside)) else None


def checkpoints_in(storage: Storage, names: Sequence[str], *, most: int | None = None) -> list[TrainerCheckpoint]:
    """The checkpoints of a training in a folder with these names, in ascending order of steps; with `most`, only those
    among so many newest names. The folder of a model is left out: it has no step.
    """
    numbered = [
        (number.step, name) if (number := runs.parse_step_name(name)) else (-1, name)
        for name in names
        if not name.startswith(".") and (runs.parse_step_name(name) or name.endswith(_FILE))
    ]
    candidates = [name for _, name in sorted(numbered)][-(most or len(numbered)) :]
    found: list[TrainerCheckpoint] = []

    def look(name: str) -> None:
        inside = storage.names(name)
        framework = framework_of(name, inside) if inside else "Lightning" if name.endswith(_FILE) else None
        if framework not in (None, "Hugging Face"):
            found.append(TrainerCheckpoint(name, framework, _step_in(name)))

    threads.run_together("look", [partial(look, name) for name in candidates], max_threads=_READERS)
    return sorted(found, key=lambda one: (-1 if one.step is None else one.step, one.name))


def _step_in(name: str) -> int | None:
    """The step in the name of a checkpoint. Names of Lightning may have other numbers, such as a loss."""
    if match := _STEP.search(name):
        return int(match[1])
    number = None if name.endswith(_FILE) else runs.parse_step_name(name)
    return number and number.step


def state_files_of(place: Place) -> list[str]:
    """The files and folders in a trainer's checkpoint that have no weights, such as the state of its optimizer."""
    names = place.storage().names("")
    if framework_of(place.text.rstrip("/").rpartition("/")[2], names) in (None, "Hugging Face", _OF_TORCH):
        return []
    return [name for name in names if not (_HUGGING_FACE.fullmatch(name) or _BESIDE_STATE.fullmatch(name))]


def is_mark(path: str) -> bool:
    """Whether a file in a checkpoint marks it as one, or is in a folder that does."""
    return any(mark.fullmatch(path.partition("/")[0]) for _, _, mark in _FRAMEWORKS)


def log_at(place: Place) -> events.EventLog:
    """The history beside the checkpoints of a trainer."""
    return events.EventLog(place.storage(), timing.wall_time)


def events_at(place: Place) -> list[events.Event]:
    """The history beside the checkpoints of a trainer. Its names are relative to this folder.

    The history of accelerate is one level higher, since accelerate takes each name in `checkpoints` for a checkpoint.
    """
    own, (parent, name) = log_at(place).read(), parent_of(place)
    if own or name != _OF_ACCELERATE:
        return own
    above = log_at(parent).read()
    return [{**one, "name": one["name"].removeprefix(f"{name}/")} if one.get("name") else one for one in above]


def sizes_of(storage: Storage, name: str) -> dict[str, int]:
    """The sizes of the files of a checkpoint by their paths below the folder of the trainer."""
    if sizes := storage.sizes(name):
        return {f"{name}/{path}": size for path, size in sizes.items()}
    with suppress(FileNotFoundError, IsADirectoryError), storage.open(name) as reader:
        return {name: reader.num_bytes}
    return {}


def size_of(storage: Storage, name: str) -> int:
    """The bytes of a checkpoint."""
    return sum(sizes_of(storage, name).values())


def time_of(place: Place, name: str) -> float | None:
    """The time of the last change of a checkpoint on a disk; None if it is not known."""
    if place.is_local:
        with suppress(OSError):
            return (urls.local_path(place.text) / name).stat().st_mtime
    return None


def named_ones(place: Place, found: Sequence[TrainerCheckpoint]) -> dict[str, str]:
    """The checkpoints that the framework itself names: "tracker" by its tracker, "best" by the newest state."""
    storage, by_text = place.storage(), {checkpoint.name: checkpoint.name for checkpoint in found}
    by_text |= {str(one.step): one.name for one in found if one.step is not None}
    named: dict[str, str] = {}
    for tracker in runs.TRACKERS:
        with suppress(FileNotFoundError, IsADirectoryError):
            text = storage.read(tracker)[0][:200].decode(errors="replace").strip()
            if text in by_text:
                named[by_text[text]] = "tracker"
    if found and found[-1].framework == "Transformers":
        with suppress(FileNotFoundError, ValueError, TypeError, AttributeError):
            state = json.loads(storage.read(f"{found[-1].name}/{TRAINER_STATE}")[0])
            best = str(state.get("best_model_checkpoint")).rstrip("/").rpartition("/")[2]
            if best in by_text:
                named[best] = "best"
    return named


def without_second_names(history: Sequence[events.Event]) -> list[events.Event]:
    """The history of a trainer without saves under second names, such as last.ckpt: a save under a name with a step has
    the same step and record.
    """
    saves = [event for event in history if event["kind"] == "save" and event.get("name")]
    named = [(save["step"], save["record"]) for save in saves if _step_in(save["name"].rpartition("/")[2]) is not None]
    seconds = [event for event in saves if _step_in(event["name"].rpartition("/")[2]) is None]
    return [event for event in history if event not in seconds or (event["step"], event["record"]) not in named]


def second_names(place: Place, found: Sequence[TrainerCheckpoint], saves: Mapping[str, events.Event]) -> dict[str, str]:
    """The second names of checkpoints, such as Lightning's last.ckpt, with the first name of each. A second name has no
    step. It is a link to the other checkpoint, or its save shows that it is a copy.
    """
    folder = urls.local_path(place.text) if place.is_local else None

    def facts_of(name: str) -> list[Any]:
        facts: list[Any] = [(save["step"], save["record"])] if (save := saves.get(name)) and save["step"] else []
        with suppress(OSError):  # deleted meanwhile
            facts += [] if folder is None else [_file_of(folder / name)]
        return facts

    seconds = [one.name for one in found if one.step is None]
    others = {one.name: facts_of(one.name) for one in found if one.step is not None} if seconds else {}
    pairs = ((second, other) for second in seconds for other in others)
    return {second: other for second, other in pairs if any(fact in others[other] for fact in facts_of(second))}


def _file_of(path: Path) -> tuple[int, int]:
    """The device and inode of a checkpoint's file, or of the first file in its folder. All its links share them."""
    file = min((one for one in path.rglob("*") if one.is_file()), default=path) if path.is_dir() else path
    return file.stat().st_dev, file.stat().st_ino
