"""A machine with a GPU, which may have torch, xxhash and pytest alone: the tests of the device are found there."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def with_what_they_need(*names: str) -> Iterator[Distribution]:
    todo, seen = list(names), set()
    while todo:
        name = todo.pop().lower()
        if name in seen:
            continue
        seen.add(name)
        yield distribution(name)
        needed = map(Requirement, distribution(name).requires or ())
        todo += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]


def installed(folder: Path, *names: str) -> Path:
    """A folder of installed packages that has these, and what they need; nothing tells of the plug-ins of pytest."""
    folder.mkdir()
    for found in with_what_they_need(*names):
        for top in {file.parts[0] for file in found.files or () if file.suffix == ".py" or ".so" in file.name}:
            if top != ".." and not (folder / top).exists():
                (folder / top).symlink_to(str(found.locate_file(top)))
    return folder


def found_by(*options: str, path: Path | None = None) -> list[str]:
    command = [sys.executable, *options, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider"]
    environment = os.environ | ({} if path is None else {"PYTHONPATH": str(path)})
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_all_tests_of_the_device_are_found_with_torch_xxhash_and_pytest_alone(tmp_path):
    packages = installed(tmp_path / "packages", "torch", "xxhash", "pytest")
    found = found_by("-S", path=packages)

    assert found == found_by()
    assert {line.partition("::")[0] for line in found} == {
        str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_gpu*.py")
    }
