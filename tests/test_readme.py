"""README and docs: their Python blocks run as they stand, their figures are those that were measured, their links lead somewhere."""

import json
import re
import runpy
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from async_ckpt import AsyncCheckpointer, CheckpointError, errors
from async_ckpt.testing import moto_server
from benchmarks.__main__ import RUNS, joined
from benchmarks.headline import headline, summary
from benchmarks.table import markdown, show_in

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BENCHMARKS = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
MOST_WORDS = 700


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


BLOCKS = {
    f"{page.stem}-{number}": block
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text_of(page), flags=re.S), start=1)
}


def test_readme_has_examples_and_is_short():
    assert {"README-1", "README-2"} <= {*BLOCKS}
    assert len(text_of(README).split()) <= MOST_WORDS


@pytest.mark.parametrize("name", BLOCKS)
def test_block_runs_twice_from_an_empty_folder(name, tmp_path, monkeypatch, request):
    """The second time it finds what the first has saved. Its bucket is on a server of its own."""
    block = BLOCKS[name]
    monkeypatch.chdir(tmp_path)
    if "init_process_group" in block:
        run_twice_on_ranks(block, tmp_path, request.getfixturevalue("worlds"))
        return
    with moto_server() if "s3://" in block else nullcontext() as server:
        if server is not None:
            server.make_bucket("my-bucket")
            monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
            for name in ("region", "access_key_id", "secret_access_key"):
                monkeypatch.setenv(f"AWS_{name.upper()}", server.options[name])
        run_twice(block, tmp_path)


def run_twice_on_ranks(block, tmp_path, worlds):
    """By torchrun on four ranks, as the page says, and then on two, which start in a tenth of the time."""
    script = tmp_path / "train.py"
    script.write_text(block, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", script]
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, check=True, timeout=300, env=environment)
    (root,) = (tmp_path / "runs").iterdir()
    saved = AsyncCheckpointer(root).steps()
    assert saved
    quiet = "import warnings; warnings.filterwarnings('ignore', '.* was saved by 4 ranks, and is restored by 2')"
    worlds.run(2, f"os.chdir({str(tmp_path)!r})\n{quiet}\n{block}", has_group=False)
    assert AsyncCheckpointer(root).steps()[-1] == saved[-1] + len(saved)


def run_twice(block, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(block, encoding="utf-8")
    for _ in range(2):
        runpy.run_path(str(script))


# --- figures -------------------------------------------------------------------------------------------------------


def kept(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def shows(page, mark, table):
    shown = f"<!-- {mark} -->\n\n{table}"
    return shown + "\n#" in text_of(page) or text_of(page).endswith(shown)


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_the_docs_show_the_figures_that_the_benchmark_wrote(name):
    table = markdown(kept(name))
    assert text_of(RESULTS / f"{name}.md") == table
    assert shows(BENCHMARKS, name, table)


def test_the_docs_show_the_figures_of_frameworks_as_one_table():
    table = joined(RESULTS / "frameworks")
    assert shows(BENCHMARKS, "frameworks", table)
    for path in (RESULTS / "frameworks").glob("*.json"):
        assert text_of(path.with_suffix(".md")) == markdown(json.loads(text_of(path)))


def test_tables_with_the_same_columns_are_shown_as_one():
    both = [
        {"environment": {"of": name}, "tables": [{"head": ["what", "s"], "lines": [[name, "1"]]}]}
        for name in ("a", "b")
    ]
    assert markdown(*both) == (
        "| what | s |\n| --- | --- |\n| a | 1 |\n| b | 1 |\n\n"
        "Medians, measured side by side. of a.\n\nMedians, measured side by side. of b.\n"
    )


def test_the_readme_shows_the_medians_of_several_runs_and_the_range_of_their_ratios():
    runs = json.loads(text_of(RUNS))
    assert len(runs) > 1
    assert shows(README, "headline", headline(runs))


def test_the_last_of_the_runs_is_the_one_that_the_docs_show_in_full():
    assert json.loads(text_of(RUNS))[-1] == summary(kept("comparison"))


def test_a_table_replaces_the_one_behind_its_mark_and_nothing_else(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- a -->\n\nold\n\n## Next\n\n<!-- b -->\n\nlast\n", encoding="utf-8")
    show_in(page, "a", "new\n")
    show_in(page, "b", "newest\n")
    assert text_of(page) == "before\n\n<!-- a -->\n\nnew\n\n## Next\n\n<!-- b -->\n\nnewest\n"
    with pytest.raises(ValueError, match="no mark <!-- c -->"):
        show_in(page, "c", "new\n")


# --- what operators look up ----------------------------------------------------------------------------------------


def test_operators_find_every_error_and_every_metric(tmp_path):
    shown = set(re.findall(r"`(\w+)`", text_of(ROOT / "docs" / "operators.md")))
    known = [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, CheckpointError)]
    assert {cls.__name__ for cls in known if cls is not CheckpointError} - shown == set()
    assert {*AsyncCheckpointer(tmp_path).metrics()} - shown == set()


# --- links ---------------------------------------------------------------------------------------------------------


def links_of(page):
    """Targets of links and pictures, code left out."""
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text_of(page), flags=re.S)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors_of(page):
    """As GitHub makes them of headings."""
    prose = re.sub(r"```.*?```", "", text_of(page), flags=re.S)
    headings = re.findall(r"^#+ (.*)$", prose, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file_and_its_heading(page):
    for link in links_of(page):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_every_page_of_the_docs_is_linked_from_their_first_page_and_that_from_the_readme():
    index = ROOT / "docs" / "index.md"
    linked = {link.partition("#")[0] for link in links_of(index)}
    assert {page.name for page in (ROOT / "docs").glob("*.md")} - {index.name} <= linked
    assert "docs/index.md" in links_of(README)


def test_the_docs_have_the_pictures_that_there_are():
    named = re.findall(r"!\[[^]]*\]\(\.\./benchmarks/results/([^)]+)\)", text_of(BENCHMARKS))
    assert sorted(named) == sorted(path.name for path in RESULTS.glob("*.png"))
