"""The site of the docs: built without a warning, complete, and readable from a folder without a network."""

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import async_ckpt

for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
    pytest.importorskip(package, reason="the packages of `make docs` are not installed")

ROOT = Path(__file__).parent.parent


class Links(HTMLParser):
    """What a page refers to: links, and what a browser loads by itself; and the anchors that it has."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag in ("script", "img", "iframe", "source") and "src" in given:
            self.loaded.append(given["src"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Links]:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return {page: Links(page) for page in folder.rglob("*.html") if page.name != "404.html"}


def at(site: dict[Path, Links], name: str) -> Links:
    (found,) = [links for page, links in site.items() if page.as_posix().endswith(f"/{name}.html")]
    return found


def test_every_page_of_the_docs_is_in_it_and_in_its_navigation(site):
    names = {page.stem for page in (ROOT / "docs").glob("*.md")}
    assert {f"{name}.html" for name in names} <= {*at(site, "index").links}


def test_every_public_name_is_in_the_reference(site):
    anchors = at(site, "reference/async_ckpt").anchors
    modules = {"errors", "files"}  # which have pages of their own
    assert {f"async_ckpt.{name}" for name in {*async_ckpt.__all__} - modules} - anchors == set()
    assert "async_ckpt.AsyncCheckpointer.save" in anchors
    assert "async_ckpt.errors.PeerFailedError" in at(site, "reference/async_ckpt.errors").anchors
    assert "async_ckpt.files.open_file" in at(site, "reference/async_ckpt.files").anchors


def test_every_link_leads_to_a_file_and_an_anchor_of_the_site(site):
    wrong = []
    for page, links in site.items():
        for link in (*links.links, *links.loaded):
            path, _, anchor = link.partition("#")
            if re.match(r"(https?|mailto|data):", link):
                continue
            target = (page.parent / unquote(path)).resolve() if path else page
            if not target.is_file() or (anchor and target in site and unquote(anchor) not in site[target].anchors):
                wrong.append((page.name, link))
    assert wrong == []


def test_a_browser_loads_nothing_from_elsewhere(site):
    loaded = [link for links in site.values() for link in links.loaded]
    assert loaded
    assert [link for link in loaded if re.match(r"(https?:)?//", link)] == []


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no Chromium on this machine: apt-get install chromium")
def test_the_search_works_in_a_browser_that_opens_the_folder(site, tmp_path):
    """Browsers start no worker and fetch no file for a page from a folder."""
    (index,) = [page for page in site if page.name == "index.html"]
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=60000",
    ]
    command = ["chromium", *flags, "--dump-dom", f"{index.as_uri()}?q=prewarm"]
    page = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert f"{index.parent.as_uri()}/reference/async_ckpt.html#async_ckpt.AsyncCheckpointer.prewarm" in page
