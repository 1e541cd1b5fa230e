"""What the package index is given: built from the source distribution, with links that work there."""

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import async_ckpt

ROOT = Path(__file__).parent.parent
BUILD = "import sys, hatchling.build as backend; print(getattr(backend, sys.argv[1])(sys.argv[2]))"
HOSTED = r"https://(?:github\.com|raw\.githubusercontent\.com)/async-ckpt/async_ckpt/(?:blob/)?v{version}/([^)#\s]+)"


def built(kind: str, source: Path, folder: Path) -> Path:
    """The archive that the build backend makes of a source tree."""
    command = [sys.executable, "-c", BUILD, kind, str(folder)]
    done = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    sdist = built("build_sdist", ROOT, folder)
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    return built("build_wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_has_the_whole_package_and_nothing_beside_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "async_ckpt"
    files = {path for path in package.rglob("*") if path.is_file() and path.parent.name != "__pycache__"}
    assert names == {path.relative_to(ROOT).as_posix() for path in files}
    assert {"async_ckpt/py.typed", "async_ckpt/tools/command/page/assets/page.js"} <= names


def test_every_link_of_the_description_is_absolute_and_leads_to_a_file(metadata):
    version = re.escape(async_ckpt.__version__)
    prose = re.sub(r"```.*?```", "", str(metadata.get_payload()), flags=re.S)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    assert [target for target in targets if not target.startswith("https://")] == []
    paths = [path for target in targets for path in re.findall(HOSTED.format(version=version), target)]
    assert {"docs/saving.md", "CONTRIBUTING.md", "benchmarks/results/comparison_lost.png"} <= {*paths}
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_pictures_are_linked_as_files_and_not_as_pages(metadata):
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", str(metadata.get_payload()))
    assert pictures
    assert all(url.startswith("https://raw.githubusercontent.com/") for url in pictures)


def test_the_version_is_that_of_the_package_and_of_the_changelog(metadata):
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert metadata["Version"] == async_ckpt.__version__
    assert re.findall(r"^## \[(\d[^]]*)\] - \d{4}-\d\d-\d\d$", changelog, flags=re.M)[0] == metadata["Version"]


def test_a_plain_install_needs_torch_and_xxhash_alone(metadata):
    needed = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split(r"[<>=]", line)[0] for line in needed) == ["torch", "xxhash"]
