"""What mkdocs is told beside mkdocs.yml: pages that are not in docs/, the navigation, and links that leave docs/.

In: README and docs as GitHub shows them, the package. Out: pages of the site. Knows nothing of: how they look.

docs/index.md is the first page, and its table of all pages is the navigation: there is no second list to keep.
"""

from __future__ import annotations

import itertools
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PICTURES = "benchmarks/results/"
WORKER = "iframe-worker.js"
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
CODE = re.compile(r"(```.*?```|`[^`\n]*`)", flags=re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    reference = [
        {section: [{module.removeprefix("async_ckpt.integrations."): _page_of(module)} for module in modules]}
        for section, modules in _reference().items()
    ]
    config.nav = [{"Overview": "index.md"}, {"README": "readme.md"}, *_documentation(), *reference]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, f"assets/{WORKER}", abs_src_path=str(ROOT / ".ci" / WORKER)))
    for picture in (ROOT / PICTURES).glob("*.png"):
        files.append(File.generated(config, PICTURES + picture.name, abs_src_path=str(picture)))
    for module in itertools.chain(*_reference().values()):
        files.append(File.generated(config, _page_of(module), content=f"# {module}\n\n::: {module}\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead to pages of the site, and those to other files into the repository."""
    sources = {site: repository for repository, site in PAGES.items()}
    folder = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def led(link: re.Match[str]) -> str:
        before, target, after = link.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", target):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, path))
        site = PAGES.get(path) or (path if path.startswith(PICTURES) else path.removeprefix("docs/"))
        if files.get_file_from_path(site) is None:
            return f"{before}{config.repo_url}/blob/main/{path}{hash_sign}{anchor}{after}"
        return f"{before}{posixpath.relpath(site, posixpath.dirname(page.file.src_uri))}{hash_sign}{anchor}{after}"

    parts = CODE.split(markdown)  # every second one is code
    parts[::2] = [LINK.sub(led, part) for part in parts[::2]]
    return "".join(parts)


def _documentation() -> Iterator[dict[str, object]]:
    """The rows of the table of all pages. A row that links several is a section of them."""
    table = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("\n## All pages\n")[2]
    seen: set[str] = set()
    for row in re.findall(r"^\| \[.*$", table, flags=re.M):
        pages = []
        for title, target in re.findall(r"\[([^]]+)\]\(([^)#]+)\)", row):
            page = PAGES.get(target.removeprefix("../"), target)
            if page not in seen:
                seen.add(page)
                pages.append({title: page})
        if len(pages) > 1:
            yield {next(iter(pages[0])): pages}
        else:
            yield from pages


def _reference() -> dict[str, list[str]]:
    """The modules that users import, by their section of the navigation."""
    integrations = (ROOT / "async_ckpt" / "integrations").iterdir()
    names = sorted(path.stem for path in integrations if path.stem not in ("__init__", "__pycache__", "common"))
    return {
        "Reference": ["async_ckpt", *(f"async_ckpt.{name}" for name in ("errors", "files", "plumbing", "testing"))],
        "Reference of integrations": [f"async_ckpt.integrations.{name}" for name in names],
    }


def _page_of(module: str) -> str:
    return f"reference/{module}.md"
