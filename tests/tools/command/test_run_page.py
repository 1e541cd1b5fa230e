"""`async-ckpt page`: the file that shows a run, by what is in it and by what a browser shows of it."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import documented, run_command, store_options
from states import open_run

from async_ckpt.core.events.kinds import Event, event
from async_ckpt.tools.command.listing import Best
from async_ckpt.tools.command.page.columns import columns_of, stored_bytes
from async_ckpt.tools.command.page.document import page_of
from async_ckpt.tools.command.page.pictures import lanes_of, pictures_of
from benchmarks.browser import MISSING, Chromium, OpenPage, opened, program
from benchmarks.run_events import BEGIN, events_of_run

ATTACK = '"><script>document.title = "attacked"</script><img src=x onerror="document.title=1">'
LATER = BEGIN + 1e6


class Tags(HTMLParser):
    """The elements of a page: their names, and the text of its scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.scripts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes.append(dict(attributes))

    def handle_data(self, data: str) -> None:
        if self.names and self.names[-1] == "script" and len(data) > 1:
            self.scripts.append(data)


def saved(step: int, time: float = BEGIN, *, kept: bool = True, **facts: Any) -> Event:
    return {**event("save", time, step, **{"num_bytes": 1000, **facts}), "kept": kept}


def text_of(*runs: Sequence[Event], names: Sequence[str] = "abcdefgh", best: Sequence[Best] = ()) -> str:
    return page_of([columns_of(name, run) for name, run in zip(names, runs, strict=False)], LATER, best).decode()


def content_of(page: str) -> Any:
    """The values that the page has for its pictures."""
    (packed,) = re.findall(r'id="data">([^<]*)<', page)
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def says(events: Sequence[Event], name: str, best: Sequence[Best] = ()) -> str:
    """The sentence of a picture."""
    (picture,) = [one for one in pictures_of(columns_of("a", events), best) if one.name == name]
    return picture.caption


def names_of(events: Sequence[Event]) -> list[str]:
    return [one.name for one in pictures_of(columns_of("a", events))]


# --- what is in the file ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five saves, of which two are kept."""
    root = tmp_path_factory.mktemp("runs") / "a"
    base = {"w": torch.arange(1000.0)}
    with open_run(root, keep=2) as ckpt:
        for step in range(1, 6):
            state = {"model": {"w": torch.full((1000,), float(step))}, "base": base}
            ckpt.save(state, step, unchanged="base", record={"loss": 1 / step, "note": ATTACK}).result()
    return root


def test_a_run_becomes_one_file_that_says_how_it_went(root, tmp_path):
    target = tmp_path / "run.html"
    told = documented("page", root, "-o", target)

    page = target.read_text(encoding="utf-8")
    name = f"{root.parent.name}/a"
    assert told["runs"] == [{"name": name, "num_events": 5 + 3, "num_saves": 5}]
    assert told["num_bytes"] == target.stat().st_size
    assert f"<title>{name}: checkpoints</title>" in page
    assert "<dt>last durable step</dt><dd>5</dd>" in page
    assert "5 saves committed; none failed." in page
    assert "Step 5 borrows base of step 1." in page
    assert "Lowest 0.2 at step 5, highest 1;" in page


def test_a_folder_of_runs_and_several_runs_are_compared(root, tmp_path):
    told = documented("page", root.parent, "-o", tmp_path / "folder.html")
    assert [run["name"] for run in told["runs"]] == [f"{root.parent.name}/a"]

    told = documented("page", root, root, "-o", tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert len(told["runs"]) == 2
    assert page.count("<h2>Side by side</h2>") == 1
    assert page.count("<dt>last durable step</dt>") == 2


def test_the_page_asks_for_nothing_and_runs_only_its_own_scripts():
    page = text_of(events_of_run(30))

    tags = Tags(page)
    assert tags.names.count("script") == 3
    assert not {"link", "img", "iframe", "base", "object"} & {*tags.names}
    assert not [one for one in tags.attributes if {"src", "srcset", "onclick", "onload", "style"} & one.keys()]
    assert "url(" not in page[: page.index("</style>")]
    (policy,) = [str(one["content"]) for one in tags.attributes if one.get("http-equiv") == "Content-Security-Policy"]
    allowed = re.findall(r"'sha256-([^']+)'", policy)
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in tags.scripts[1:]]
    assert policy.startswith("default-src 'none';")
    assert allowed == digests
    assert len(digests) == 2


def test_the_time_of_each_start_is_a_stacked_bar_of_its_shares():
    events = [
        saved(10, BEGIN + 100, opened=BEGIN, stall_seconds=10, total_seconds=0),
        event("progress", BEGIN + 200, 20, opened=BEGIN),
        event("restore", BEGIN + 1050, 10, opened=BEGIN + 1000, total_seconds=50),
        saved(30, BEGIN + 1100, opened=BEGIN + 1000, total_seconds=0, interval="42 s by overhead: a save costs 1 s"),
    ]
    text = text_of(events)
    page = Tags(text)

    bars = [one for one in page.attributes if one.get("class") == "bar"]
    assert len(bars) == 2
    widths = [(one["class"], float(one["width"])) for one in page.attributes if one.get("height") == "1"]
    first, second = dict(widths[:5]), dict(widths[5:])
    assert first == {"trained": 50.0, "stall": 5.0, "slower": 0.0, "restore": 0.0, "redone": 45.0}
    assert second == {"trained": 50.0, "stall": 0.0, "slower": 0.0, "restore": 50.0, "redone": 0.0}
    assert "50.0% of 300.00 s was training that counts, in 2 starts.\n1 of them lost work." in text
    assert "The last interval between saves was 42 s by overhead: a save costs 1 s." in text
    assert "<dt>interval</dt><dd>42 s by overhead</dd>" in text


def test_the_license_of_the_library_is_in_the_page():
    page = text_of(events_of_run(3))
    assert "The MIT License (MIT)" in page
    assert "Copyright (c) 2022 Leon Sorokin" in page
    assert "The above copyright notice and this permission notice shall be" in page


def test_names_with_markup_are_text():
    """Wherever a user's text comes to the page: the run, records, groups, errors."""
    events = [
        saved(1, groups={ATTACK: 10, "b": 5}, record={ATTACK: 0.5, "note": ATTACK}),
        saved(2, groups={"b": 5}, borrowed={ATTACK: 1}, unchanged=[ATTACK], record={ATTACK: 0.4, "note": ATTACK}),
        event("failed", BEGIN, 3, error=ATTACK, message=ATTACK),
    ]
    plain = [
        saved(1, groups={"x": 10, "b": 5}, record={"x": 0.5, "note": "x"}),
        saved(2, groups={"b": 5}, borrowed={"x": 1}, unchanged=["x"], record={"x": 0.4, "note": "x"}),
        event("failed", BEGIN, 3, error="x", message="x"),
    ]

    assert Tags(text_of(events, names=[ATTACK])).names == Tags(text_of(plain, names=["x"])).names


def test_a_page_of_ten_thousand_saves_is_less_than_a_megabyte():
    page = text_of(events_of_run(10_000))
    assert len(page) < 1_000_000
    content = content_of(page)
    assert len(content["runs"][0]["saves"]) > 9_900


def test_the_file_is_replaced_only_when_that_is_asked_for_and_as_a_whole(root, tmp_path, monkeypatch):
    target = tmp_path / "run.html"
    target.write_text("mine", encoding="utf-8")

    ended = run_command("page", root, "-o", target)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "pass --overwrite to replace it" in ended.stderr

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("async_ckpt.core.storage.local.sync_file", no_space)
        ended = run_command("page", root, "-o", target, "--overwrite")
    assert ended.returncode in (1, 74)
    assert target.read_text(encoding="utf-8") == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["run.html"]

    assert run_command("page", root, "-o", target, "--overwrite").returncode == 0
    assert target.read_bytes().startswith(b"<!doctype html>")


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        (("-o", "{tmp}"), 1, "already exists"),
        (("-o", "/proc/x.html"), 74, "/proc/x.html"),
    ],
)
def test_an_output_that_cannot_be_is_said(root, tmp_path, output, status, said):
    ended = run_command("page", root, *(one.format(tmp=tmp_path) for one in output))
    assert (ended.returncode, ended.stdout) == (status, "")
    assert said in ended.stderr


def test_a_page_of_a_bucket_goes_to_a_bucket(bucket, tmp_path):
    with open_run(bucket.place("run")) as ckpt:
        ckpt.save({"w": torch.ones(10)}, 1).result()
    options, keys = store_options(bucket.place().options or {})

    ended = run_command("page", bucket.url("run"), "-o", bucket.url("run.html"), *options, **keys)

    assert ended.returncode == 0, ended.stderr
    assert bucket.read("run.html").startswith(b"<!doctype html>")


def test_best_marks_the_best_steps_of_a_metric(root, tmp_path):
    events = [saved(step, BEGIN + step, record={"acc": value}) for step, value in ((1, 0.1), (2, 0.9), (3, 0.7))]
    best = [Best("acc", "max", 2)]
    (picture,) = [one for one in pictures_of(columns_of("a", events), best) if one.name.startswith("record")]
    (marked,) = [one for one in picture.series if one.label == "best"]
    assert marked.rows == [1, 2]
    assert picture.caption.startswith("Best 0.9 at step 2;")

    ended = run_command("page", root, "-o", tmp_path / "x.html", "--best", "speed")
    assert (ended.returncode, ended.stderr) == (1, "async-ckpt: no record of these runs has the metric 'speed'\n")


# --- what is known ------------------------------------------------------------------------------------------------


def test_pictures_of_which_nothing_is_known_are_left_out():
    assert names_of([saved(1, record={"note": "text"})]) == ["timeline", "sizes", "storage"]
    assert names_of([event("failed", BEGIN, 1, error="E", message="m")]) == ["timeline"]
    assert names_of(events_of_run(60, num_ranks=4)) == [
        *("timeline", "phases", "stall", "bandwidth", "sizes", "borrowing", "record entry 0", "record entry 1"),
        *("storage", "free", "ranks", "rank stalls"),
    ]


def test_the_bytes_on_storage_follow_saves_deletions_and_rollbacks():
    events = [
        saved(1, num_bytes=10, kept=False),
        saved(2, num_bytes=20, kept=False),
        event("retention", BEGIN, 2, deleted=[1]),
        saved(3, num_bytes=30, kept=False),
        event("rollback", BEGIN, 2, retired=[3]),
        saved(2, num_bytes=25),  # replaces the earlier one
    ]
    assert stored_bytes(events) == [10, 30, 20, 50, 20, 25]


def test_a_step_that_was_deleted_without_an_event_is_not_on_storage_at_the_end():
    assert stored_bytes([saved(1, num_bytes=10, kept=False), saved(2, num_bytes=20)]) == [10, 20]


def test_lanes_show_where_a_group_was_written_and_whose_it_is():
    saves = [
        saved(1, groups={"base": 5, "head": 1}),
        saved(2, groups={"head": 1}, borrowed={"base": 1}),
        saved(3, groups={"head": 1}, borrowed={"base": 1}),
        saved(4, groups={"base": 5, "head": 1}),
        saved(5, groups={"head": 1}, borrowed={"base": 4}),
    ]
    (lane,) = lanes_of(saves)
    assert lane.name == "base"
    assert [*lane.spans] == [(1, 1, None), (2, 3, 1), (4, 4, None), (5, 5, 4)]


def test_sentences_name_what_is_worth_a_look():
    events = events_of_run(200, num_ranks=8)
    assert re.search(r"19\d saves committed; 1 failed and 3 skipped beside them\.", says(events, "timeline"))
    assert "at the most, at step 100." in says(events, "stall")
    assert "Rank 3 was the slowest most often" in says(events, "ranks")


def test_records_of_text_and_without_a_number_are_in_tables_only():
    events = [
        saved(1, record={"loss": None, "note": "a", "deep": {"x": [1]}, "flag": True}),
        saved(2, record={"loss": 0.5, "huge": 1e300, "many": 10**40}),
        saved(3, record={"loss": "diverged"}),
    ]
    (run,) = content_of(text_of(events))["runs"]
    by_title = {column["title"]: column.get("values") for column in run["columns"].values()}
    assert by_title["loss"] == [None, 0.5, None]
    assert by_title["note"] == ["a", None, None]
    assert by_title["deep"] == ['{"x": [1]}', None, None]
    assert by_title["huge"] == [None, 1e300, None]


def test_events_of_several_runs_are_summed_up_beside_each_other():
    page = text_of(events_of_run(40), events_of_run(30, seed=1), names=["first", "second"])
    assert page.index("Side by side") < page.index("<h2>first</h2>") < page.index("<h2>second</h2>")
    assert len(content_of(page)["runs"]) == 2


# --- runs in a bad state ------------------------------------------------------------------------------------------


def test_a_run_that_is_being_written_and_has_damage_is_shown_as_far_as_it_goes(tmp_path):
    root = tmp_path / "a"
    with open_run(root) as ckpt:
        for step in (1, 2, 3):
            ckpt.save({"w": torch.ones(10)}, step).result()
        (root / "step_00000004").mkdir()  # of a save that is under way
        (root / "step_00000004/rank_00000.0123abcd.tar").write_bytes(b"begun")
        (root / "step_00000002/manifest.json").write_bytes(b"torn")
        with (root / "history.jsonl").open("ab") as file:
            file.write(
                b'{"kind": "save", "time": 1, "st\n\xff\xfe\nnull\n{"kind": "unheard of", "time": 1, "step": 9}\n'
            )

        told = documented("page", root, "-o", tmp_path / "x.html")
    assert told["runs"][0]["num_saves"] == 3


def test_a_run_without_a_history_is_shown_by_its_manifests(root, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(root, old)
    (old / "history.jsonl").unlink()

    told = documented("page", old, "-o", tmp_path / "x.html")

    assert told["runs"][0]["num_saves"] == 3  # two are kept, and one lends
    assert "Record: loss" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_a_place_without_a_run_has_no_page(tmp_path):
    (tmp_path / "empty").mkdir()
    for place in ("empty", "nowhere"):
        ended = run_command("page", tmp_path / place, "-o", tmp_path / "x.html")
        assert (ended.returncode, ended.stdout) == (1, "")
    assert not (tmp_path / "x.html").exists()


def test_a_hundred_thousand_lines_of_a_journal_are_no_matter(root, tmp_path):
    long = tmp_path / "long"
    shutil.copytree(root, long)
    line = (long / "checkpoints.jsonl").read_bytes().splitlines()[0] + b"\n"
    (long / "checkpoints.jsonl").write_bytes(line * 100_000)
    lines = [json.dumps({"kind": "skipped", "time": BEGIN + at, "step": at, "count": 1}) for at in range(100_000)]
    with (long / "history.jsonl").open("a", encoding="utf-8") as file:
        file.write("\n".join(lines))

    told = documented("page", long, "-o", tmp_path / "x.html")

    assert told["runs"][0]["num_events"] == 8 + 100_000
    assert "skipped</dt><dd>100,000</dd>" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_clocks_that_run_back_and_times_of_no_clock_are_taken_as_they_are():
    events = [saved(step, time) for step, time in ((1, BEGIN), (2, BEGIN - 5000), (3, -1.0), (4, 1e17), (5, BEGIN + 1))]
    (run,) = content_of(text_of(events))["runs"]
    assert run["columns"]["time"]["differences"] == [BEGIN * 1e3, -5_000_000, None, None, 5_001_000]


# --- in a browser -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    found = program()
    if found is None:
        pytest.skip(MISSING)
    with Chromium(found, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "run.html"
    file.write_text(text_of(events_of_run(400, num_ranks=8)), encoding="utf-8")
    return file


@pytest.fixture
def page(browser: Chromium, file: Path) -> Iterator[OpenPage]:
    with opened(browser, file) as page:
        yield page
        assert page.complaints() == []


INK = """((canvas) => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  const seen = new Set();
  for (let at = 0; at < data.length; at += 4) if (data[at + 3] > 200) seen.add(data.slice(at, at + 3).join());
  return seen.size;
})"""


def test_every_picture_is_drawn_and_has_a_key_a_readout_and_a_table(page):
    count = len(page.texts("figure"))
    assert count == 12
    assert min(page.evaluate(f"[...document.querySelectorAll('figure canvas')].map({INK})")) > 3
    assert page.evaluate("document.querySelectorAll('figure canvas').length") == count
    assert all(text.strip() for text in [*page.texts("figure .key"), *page.texts("figure .readout")])

    page.evaluate("document.querySelectorAll('figure details').forEach((one) => { one.open = true; })")
    page.evaluate("new Promise((resolve) => setTimeout(resolve))")
    assert page.evaluate("document.querySelectorAll('figure details table').length") == count
    heads = page.texts("[data-picture=phases] th")
    assert heads[:4] == ["step", "when", "size", "call"]


def test_every_picture_is_there_when_the_page_has_loaded(file, tmp_path):
    """As a browser without a screen takes it, which waits for nothing else."""
    file.write_text(text_of(events_of_run(5000, num_ranks=8)), encoding="utf-8")
    found = program()
    if found is None:
        pytest.skip(MISSING)
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    told = subprocess.run([found, *options, file.as_uri()], capture_output=True, text=True, check=True, timeout=60)
    names = Tags(told.stdout).names
    assert names.count("canvas") == names.count("figure") == 12
    assert "iframe" not in names


def test_a_long_table_shows_the_newest_rows_and_then_all(page):
    page.evaluate("document.querySelector('[data-picture=stall] details').open = true")
    page.evaluate("new Promise((resolve) => setTimeout(resolve))")
    steps = page.texts("[data-picture=stall] tbody td:first-child")
    assert len(steps) == 100
    assert int(steps[0].replace(",", "")) > int(steps[-1].replace(",", ""))

    page.evaluate("document.querySelector('[data-picture=stall] button').click()")
    assert len(page.texts("[data-picture=stall] tbody tr")) > 390
    assert page.texts("[data-picture=stall] button") == []


def test_the_mouse_tells_the_report_of_a_save(page):
    box = page.box("[data-picture=phases] .u-over")
    newest = page.texts("[data-picture=phases] .readout")[0]
    page.mouse("mouseMoved", box["x"] + box["width"] / 2, box["y"] + 20)
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    told = page.texts("[data-picture=phases] .readout")[0]
    assert told != newest
    assert re.search(
        r"step\s*[\d,]+.*when\s*2026-.* UTC.*size\s*1\.50 GB.*call\s*[\d.]+ ms.*bandwidth\s*[\d.]+ GB/s", told, re.S
    )


def test_the_keyboard_goes_from_save_to_save_and_says_so_to_screen_readers(page):
    chart = "document.querySelector('[data-picture=stall] .chart')"
    page.evaluate(f"{chart}.focus()")
    spoken = f"{chart}.getAttribute('aria-valuetext')"
    newest = page.evaluate(spoken)
    page.press("ArrowLeft")
    assert page.evaluate(spoken) != newest
    page.press("ArrowRight")
    assert page.evaluate(spoken) == newest
    page.press("Home")
    assert page.evaluate(spoken).startswith("step 100, ")
    page.press("End")
    assert page.evaluate(spoken) == newest
    roles = f"[{chart}.getAttribute('role'), {chart}.tabIndex, {chart}.getAttribute('aria-label')]"
    assert page.evaluate(roles) == ["slider", 0, "Stall, save by save"]


def picture_of(page: OpenPage, name: str) -> str:
    """The pixels of a picture."""
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    pixels: str = page.evaluate(f"document.querySelector('[data-picture={name}] canvas').toDataURL()")
    return pixels


@pytest.mark.parametrize("way", ["drag", "keys", "choice"])
def test_a_zoom_into_one_picture_is_one_into_all_and_ends(page, way):
    whole = {name: picture_of(page, name) for name in ("timeline", "stall", "free")}
    if way == "drag":
        box = page.box("[data-picture=stall] .u-over")
        for kind, share in (("mouseMoved", 0.4), ("mousePressed", 0.4), ("mouseMoved", 0.5), ("mouseReleased", 0.5)):
            page.mouse(kind, box["x"] + share * box["width"], box["y"] + 30)
    elif way == "keys":
        page.evaluate("document.querySelector('[data-picture=stall] .chart').focus()")
        page.press("+")
    else:
        assert page.texts(".range label") == [" last 20", " last 100", " all"]
        page.evaluate("document.querySelector('.range input').click()")
    assert all(picture_of(page, name) != before for name, before in whole.items())

    if way == "keys":
        page.press("Escape")
    elif way == "choice":
        page.evaluate("[...document.querySelectorAll('.range input')].pop().click()")
    else:
        page.evaluate(
            "document.querySelector('[data-picture=stall] .u-over')"
            ".dispatchEvent(new MouseEvent('dblclick', { bubbles: true }))"
        )
        page.mouse("mouseMoved", 1, 1)
    assert all(picture_of(page, name) == before for name, before in whole.items())


def test_dark_and_light_have_colours_of_their_own(page):
    light = page.evaluate("getComputedStyle(document.body).backgroundColor"), picture_of(page, "stall")
    page.scheme(dark=True)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor"), picture_of(page, "stall")
    assert (light[0], dark[0]) == ("rgb(255, 255, 255)", "rgb(21, 24, 27)")
    assert light[1] != dark[1]


@pytest.mark.parametrize("width", [320, 390, 1440])
def test_nothing_is_wider_than_the_window(browser, file, width):
    with opened(browser, file, width=width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("Math.max(...[...document.querySelectorAll('canvas')].map((e) => e.clientWidth))") <= width


def test_a_window_that_becomes_narrow_redraws_the_pictures(page):
    page.size(390, 800)
    page.evaluate("new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_scripts_in_names_are_shown_and_never_run(browser, tmp_path):
    events = [
        saved(1, groups={ATTACK: 10}, record={ATTACK: 0.5, "note": ATTACK}, total_seconds=1.0),
        saved(
            2, BEGIN + 9, groups={"b": 5}, borrowed={ATTACK: 1}, record={ATTACK: 0.4, "note": ATTACK}, total_seconds=1.0
        ),
        event("failed", BEGIN + 10, 3, error=ATTACK, message=ATTACK),
    ]
    file = tmp_path / "x.html"
    file.write_text(text_of(events, events, names=[ATTACK, "b"]), encoding="utf-8")
    with opened(browser, file) as page:
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 0))")
        assert page.texts("img") == []
        assert "attacked" not in page.evaluate("document.title").removeprefix(ATTACK)
        assert any(ATTACK in text for text in page.texts("td"))
        assert any(ATTACK in text for text in page.texts(".key"))
        assert page.complaints() == []


@pytest.mark.parametrize(
    "events",
    [
        [saved(1)],
        [saved(1, stall_seconds=0.0, total_seconds=0.0, free_bytes=0, record={"x": 0})],
        [event("failed", BEGIN, 1, error="E", message="m")],
        [saved(step, time) for step, time in ((1, BEGIN), (2, BEGIN - 5000), (3, -1.0), (4, 1e17), (5, 5.0))],
        [saved(2**62, record={"x": 1e300}), saved(2**53, record={"x": -1e300}), saved(3, record={"x": 1e-300})],
        [saved(7, total_seconds=1e12, stall_seconds=1e-12), saved(7), saved(7, total_seconds=1.0, stall_seconds=0.1)],
    ],
    ids=["one", "zeros", "no save", "clocks", "huge", "one step thrice"],
)
def test_odd_histories_are_drawn(browser, tmp_path, events):
    file = tmp_path / "x.html"
    for runs in ((events,), (events, events_of_run(5))):
        file.write_text(text_of(*runs), encoding="utf-8")
        with opened(browser, file) as page:
            assert page.complaints() == []
            assert page.texts(".error") == []
            assert page.evaluate(
                "document.querySelectorAll('canvas').length === document.querySelectorAll('figure').length"
            )


def test_a_browser_that_cannot_unpack_the_values_says_so(browser, file):
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(r'(id="data">)[^<]*', r"\1!", text), encoding="utf-8")
    with opened(browser, file, drawn=False) as page:
        page.evaluate("""new Promise((resolve) => {
            const look = () => document.querySelector('.error') && resolve();
            new MutationObserver(look).observe(document, { subtree: true, childList: true });
            look();
        })""")
        assert page.texts(".error")[0].startswith("The pictures cannot be drawn")
