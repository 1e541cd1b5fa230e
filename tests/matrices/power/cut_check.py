"""A state after a cut, put on a disk and read.

In: a tree, the marks before the cut. Out: what is wrong with it, or None. Knows nothing of: how trees are found.
"""

import shutil
from collections.abc import Collection, Sequence
from pathlib import Path

from async_ckpt import CheckpointError

from .cut_model import Tree
from .disk_records import Acknowledged, Begun, Mark
from .power_scenarios import Scenario


class Folder:
    """A folder that takes the form of one tree after the other, of which only differences are written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True)
        self._has: dict[str, bytes | None] = {}

    def become(self, tree: Tree) -> None:
        for name in sorted(self._has.keys() - tree.keys(), reverse=True):
            self._remove(name)
        for name, data in tree.items():
            if name in self._has and self._has[name] == data and (data is None) == (self._has[name] is None):
                continue
            if name in self._has and (data is None) != (self._has[name] is None):
                self._remove(name)
            if data is None:
                (self.path / name).mkdir(exist_ok=True)
            else:
                (self.path / name).write_bytes(data)
            self._has[name] = data

    def _remove(self, name: str) -> None:
        path = self.path / name
        for below in [other for other in self._has if other.startswith(name + "/")]:
            del self._has[below]
        if self._has.pop(name, b"") is None:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def begin_again(self) -> None:
        """After something was written to it."""
        shutil.rmtree(self.path)
        self.path.mkdir()
        self._has = {}


def what_is_lost(found: Collection[str], marks: Sequence[Mark]) -> list[str]:
    """The labels that were acknowledged, and neither load nor may be gone."""
    begun = [mark for mark in marks if isinstance(mark, Begun)]

    def is_there(label: str, met: frozenset[str]) -> bool:
        after = (mark.label for mark in begun if label in mark.instead_of and mark.label not in met)
        return label in found or any(is_there(other, met | {label}) for other in after)

    acknowledged = [mark.label for mark in marks if isinstance(mark, Acknowledged)]
    return [label for label in acknowledged if not is_there(label, frozenset())]


def wrong_with(scenario: Scenario, folder: Path, marks: Sequence[Mark]) -> str | None:
    """What is wrong with what is there, by the promises of docs/guarantees.md."""
    try:
        found = scenario.found(folder)
    except AssertionError as error:
        return f"torn: {error}"
    except CheckpointError as error:
        return f"refused: {type(error).__name__}: {error}"
    except Exception as error:
        return f"undocumented: {type(error).__name__}: {error}"
    if lost := what_is_lost(found, marks):
        return f"lost: {', '.join(lost)}; there are {', '.join(sorted(found)) or 'none'}"
    if never := found - {mark.label for mark in marks if isinstance(mark, Begun)}:
        return f"never saved: {', '.join(sorted(never))}"
    return None


def wrong_afterwards(scenario: Scenario, folder: Path) -> str | None:
    """What is wrong when work goes on from there."""
    if scenario.goes_on is None:
        return None
    try:
        scenario.goes_on(folder)
    except Exception as error:
        return f"does not go on: {type(error).__name__}: {error}"
    return None
