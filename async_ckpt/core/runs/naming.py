"""Names of steps, in folders and trackers: formats with one plain field for the step.

In: formats from the user, steps. Out: names; the step in a name. Knows nothing of: storage.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, NamedTuple

STEP_FORMAT: Final = "step_{:08d}"
TRACKER: Final = "latest"
JOURNAL: Final = "checkpoints.jsonl"

# Decimal digits, with or without leading zeros: names of other fields (octal, grouping, spaces) could not be parsed
# back to the same step.
_FORMAT: Final = re.compile(r"([^{}]*)\{0?(?::(?:0\d{1,2})?d?)?\}([^{}]*)")
# More digits than any step has. Limited because Python refuses to parse integers of thousands of digits.
_STEP: Final = r"([0-9]{1,255})"
_NUMBERED: Final = re.compile(r"(.*?)([0-9]{1,255})([^0-9]*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Tracker:
    """A file that names the newest committed step: its `name` in the run's folder, its `text` with `{}` for the step.

    Other programs read the file, so `text` is written exactly: Tracker("latest_ckpt_global_step.txt", "{}") contains
    "500", Tracker("latest", "global_step{}") contains "global_step500". Reads ignore white space around the text.
    """

    name: str
    text: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^/\\]+", self.name) or self.name in (".", "..") or not self.name.isprintable():
            raise ValueError(
                f'tracker must be the name of a file in the run\'s folder, such as "{TRACKER}"; got {self.name!r}'
            )
        if pattern_of(self.text.strip()) is None:
            raise ValueError(
                f'the text of tracker {self.name} must be one line with the step in it once, such as "{{}}" or '
                f'"global_step{{}}"; got {self.text!r}'
            )

    def dump(self, step: int) -> bytes:
        """The file's content for a step."""
        return self.text.format(step).encode()

    def parse(self, data: bytes) -> int | None:
        """The step that the file names; None if it names none."""
        pattern = pattern_of(self.text.strip())
        match = pattern and pattern.fullmatch(data.decode(errors="replace").strip())
        return int(match[1]) if match else None


# Trackers of other programs, which parse them with `int`.
_KNOWN: Final = {"latest_ckpt_global_step.txt": "{}", "latest_checkpointed_iteration.txt": "{}"}
# The usual names of trackers.
TRACKERS: Final = (TRACKER, *_KNOWN)


def tracker_of(tracker: tuple[str, str] | str | None, step_format: str) -> Tracker | None:
    """The tracker for a user's argument. Given only a name, the content is the known one, or the step's folder name."""
    pattern = folder_pattern(step_format)
    if tracker is None:
        return None
    if isinstance(tracker, str):
        tracker = (tracker, _KNOWN.get(tracker, f"{step_format}\n"))
    if not (isinstance(tracker, tuple) and len(tracker) == 2 and all(isinstance(t, str) for t in tracker)):
        raise TypeError(
            'tracker must be a name, or a name and its text such as ("latest", "global_step{}"); '
            f"got {tracker!r:.100}"
        )
    parsed = Tracker(*tracker)
    if parsed.name == JOURNAL:
        raise ValueError(f"tracker must not be {JOURNAL}, which is the journal; give it another name")
    if pattern.fullmatch(parsed.name):
        raise ValueError(
            f"tracker {parsed.name} could be the folder of a step, by step_format={step_format!r}; give it another name"
        )
    return parsed


@dataclass(frozen=True, slots=True)
class Naming:
    """The names of a run's folders and of its tracker, so that other programs can read the run.

        AsyncCheckpointer("runs/a", naming="verl")
        AsyncCheckpointer("runs/a", naming=Naming("step-{}", tracker=None))

    Args:
        step_format: the name of a step's folder, with one field for the step: "step_{:08d}" or "global_step_{}".
        tracker: the file that names the newest step. Give its name, or its name and its content with `{}` for the step,
            such as ("latest", "global_step{}"). Given only a name, the file contains the name of the step's folder; the
            files that SkyRL and verl read contain only the number. With None, no such file is written.

    Raises ValueError if the format cannot name the folder of every step, if a name is not a file name, or if the
    tracker could be the folder of a step.
    """

    step_format: str = STEP_FORMAT
    tracker: tuple[str, str] | str | None = TRACKER

    def __post_init__(self) -> None:
        tracker_of(self.tracker, self.step_format)


def folder_pattern(step_format: str) -> re.Pattern[str]:
    """The pattern of the folder names of a format. Raises ValueError if it cannot name the folder of every step."""
    if not isinstance(step_format, str):
        raise TypeError(f'step_format must be text such as "{STEP_FORMAT}", got {step_format!r:.100}')
    pattern = pattern_of(step_format)
    if pattern is None or re.search(r"[/\\]", step_format):
        raise ValueError(
            'step_format must be one folder name with the step in it once, as "{}" or with leading zeros, such as '
            f'"{STEP_FORMAT}" or "global_step_{{}}"; got {step_format!r}'
        )
    return pattern


def pattern_of(text: str) -> re.Pattern[str] | None:
    """The pattern of the names of a format; None unless it is one line with exactly one plain field."""
    halves = _FORMAT.fullmatch(text)
    if halves is None or not text.isprintable():
        return None
    return re.compile(re.escape(halves[1]) + _STEP + re.escape(halves[2]))


# The namings of other programs, by the names that `naming=` accepts.
_DEEPSPEED: Final = Naming("global_step{}", ("latest", "global_step{}"))
NAMINGS: Final = {
    "skyrl": Naming("global_step_{}", "latest_ckpt_global_step.txt"),
    "verl": Naming("global_step_{}", "latest_checkpointed_iteration.txt"),
    "open-instruct": _DEEPSPEED,
    "deepspeed": _DEEPSPEED,
}


class StepName(NamedTuple):
    """A name with a number in it: its last number is the step. The rest is the same for all steps of a run."""

    step: int
    digits: str
    rest: str  # with `{}` in the place of the number

    @property
    def is_padded(self) -> bool:
        """True if the number has leading zeros. False does not mean that its format has none."""
        return self.digits.startswith("0") and len(self.digits) > 1

    @property
    def step_format(self) -> str:
        """A format that produces this name, and later names of the same run."""
        field = f"{{:0{len(self.digits)}d}}" if self.is_padded else "{}"
        return self.rest.replace("{}", field)


def parse_step_name(name: str) -> StepName | None:
    """Split the name of a step, under any naming, into number and rest; None for a name without a number."""
    match = _NUMBERED.fullmatch(name)
    return match and StepName(int(match[2]), match[2], f"{match[1]}{{}}{match[3]}")


def words_for(folder: str) -> list[str]:
    """The values of `naming=` that give a step this folder name."""
    step_name = parse_step_name(folder)
    return [
        word for word, naming in NAMINGS.items() if step_name and naming.step_format.format(step_name.step) == folder
    ]


def advice_to_open(folder: str, beside: Collection[str]) -> str:
    """Advice on how to open a run with this folder; `beside` are the names in the run's folder."""
    step_name = parse_step_name(folder)
    assert step_name is not None
    if STEP_FORMAT.format(step_name.step) == folder:
        return "open it without naming="
    words = words_for(folder)
    if words:
        trackers = {word: tracker_of(NAMINGS[word].tracker, NAMINGS[word].step_format) for word in words}
        tracked = [word for word, tracker in trackers.items() if tracker and tracker.name in beside]
        return "open it with " + " or ".join(f'naming="{word}"' for word in tracked or words)
    return f'open it with naming=Naming("{step_name.step_format}")'


def naming_of(naming: Naming | str | None) -> Naming:
    """The naming for a user's argument. Raises ValueError for an unknown name, and TypeError for other types."""
    if naming is None:
        return Naming()
    if isinstance(naming, str):
        if naming not in NAMINGS:
            known = ", ".join(f'"{word}"' for word in NAMINGS)
            raise ValueError(f"naming must be one of {known}, or Naming(step_format=…, tracker=…); got {naming!r}")
        return NAMINGS[naming]
    if not isinstance(naming, Naming):
        raise TypeError(f"naming must be a word or Naming(…), got {naming!r:.100}")
    return naming
