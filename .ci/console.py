"""Runs the console blocks of docs/command.md, maintenance.md and contents.md, writes their output there, and draws some
as docs/command.svg.

Run by hand when the output of a command changes: `python .ci/console.py`. `tests/tools/command/test_command_page.py` runs the
same blocks and compares their output with the page, and the picture with the page's text.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [DOCS / name for name in ("command.md", "maintenance.md", "contents.md")]
PICTURE = DOCS / "command.svg"
BLOCK = re.compile(r'```console( title="on one machine")?\n(.*?)```', re.S)
DRAWN = ("async-ckpt ls runs/a --best loss", "async-ckpt watch runs/a --once", "async-ckpt inspect runs/a")
COLUMNS = 120
# These differ from run to run: the random part of a name, rates, and ages and times.
VOLATILE = (
    (re.compile(r"\.[0-9a-f]{8}\.tar"), ".*.tar"),
    (re.compile(r"[\d.,]+ (bytes|B|kB|MB|GB)/s"), "*/s"),
    (re.compile(r"\b[\d.]+ (µs|ms|s|min|h|d)\b"), "* s"),
    (re.compile(r" +"), " "),
)


def setup_of(page: str) -> str:
    """The Python block that makes the runs of the examples."""
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    return str(block)


def calls_of(block: str) -> list[tuple[str, str]]:
    """The calls after each prompt of a block, and their output."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.M)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def output_of(call: str) -> str:
    """What a call writes, here and now: in this process, since torch takes seconds to import."""
    if not call.startswith("async-ckpt "):
        return subprocess.run(["sh", "-c", call], capture_output=True, text=True, check=True).stdout
    from async_ckpt.tools.command.main import status_of

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        status_of(shlex.split(call)[1:])
    return out.getvalue()


def lasting(text: str, folder: str = "") -> str:
    """The part of an output that is the same in each run. `folder` is the one that it was run in."""
    for pattern, stand_in in VOLATILE:
        text = pattern.sub(stand_in, text.replace(f"{folder}/", "") if folder else text)
    return text


@contextlib.contextmanager
def made_runs(page: str, folder: Path) -> Iterator[None]:
    """The runs of the examples in a folder, which is the current one meanwhile."""
    (folder / "setup.py").write_text(setup_of(page), "utf-8")
    with contextlib.chdir(folder):
        runpy.run_path("setup.py")
        yield


def rewritten(page: str) -> str:
    """The page with the output that its calls have now, in the current folder."""

    def block(match: re.Match[str]) -> str:
        outputs = ((call, output_of(call).replace(f"{os.getcwd()}/", "")) for call, _ in calls_of(match[2]))
        return f"```console{match[1] or ''}\n" + "".join(f"$ {call}\n{output}" for call, output in outputs) + "```"

    return BLOCK.sub(block, page)


def drawn(page: str) -> str:
    """Some calls of the page with their output, as a terminal shows them, as SVG."""
    outputs = dict(call for match in BLOCK.finditer(page) for call in calls_of(match[2]))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    for call in DRAWN:
        heading, _, rows = outputs[call].partition("\n")
        console.print(Text.assemble(("$ ", "green"), call))
        console.print(Text(heading, style="bold"))
        console.print(Text(rows))
    svg = console.export_svg(title="async-ckpt", unique_id="command")
    return re.sub(r"\s*@font-face \{.*?\}\n", "\n", svg, flags=re.S)  # GitHub fetches no fonts


def main() -> None:
    pages = [page.read_text("utf-8") for page in PAGES]
    with tempfile.TemporaryDirectory() as folder, made_runs(pages[0], Path(folder).resolve()):
        pages = [rewritten(page) for page in pages]
    for path, page in zip(PAGES, pages, strict=True):
        path.write_text(page, "utf-8")
    PICTURE.write_text(drawn("".join(pages)), "utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))
    main()
