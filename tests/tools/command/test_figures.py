"""The figures of one save at all faces of a run: its report, the log, metrics, the history, `ls`, `watch` and `page`."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from commands import run_command, store_options
from states import open_run

import async_ckpt
from async_ckpt import SaveReport
from async_ckpt.core.events.kinds import event
from async_ckpt.core.host.operations import Ended, listen
from async_ckpt.core.report import sized
from async_ckpt.integrations.metric_table import DURATION, IO, STALL, STEP_SIZE, measured
from async_ckpt.tools.command.listing import Best
from async_ckpt.tools.command.output import in_table, shown_seconds
from async_ckpt.tools.command.page.columns import columns_of
from async_ckpt.tools.command.page.pictures import pictures_of
from async_ckpt.tools.command.page.summary import facts_of

# The history rounds times.
ROUNDED = 1e-5


class Figures(NamedTuple):
    """The figures of a save, as one face has them."""

    num_bytes: float
    seconds: float
    bandwidth: float
    stall: float


def figures_of(report: SaveReport) -> Figures:
    return Figures(report.num_bytes, report.total_seconds, report.bandwidth, report.stall_seconds)


def by_faces(where: Any, options: Sequence[str] = (), **keys: str) -> dict[str, dict[int, Figures]]:
    """The figures of all saves of a run, by the names of the faces and by steps."""

    def documented(*words: str) -> Any:
        ended = run_command(*words, *options, "--json", **keys)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    text = str(where.url if isinstance(where, async_ckpt.Place) else where)
    listed, watched = documented("ls", text)["steps"], documented("watch", text, "--once")
    told = [one for one in async_ckpt.history(where) if one["kind"] == "save"]
    page = columns_of("run", told)

    def of_event(one: Mapping[str, Any]) -> Figures:
        seconds = one["total_seconds"]
        return Figures(one["num_bytes"], seconds, one["num_bytes"] / seconds, one["stall_seconds"])

    columns = [
        page.columns[name].values for name in ("step", "num_bytes", "total_seconds", "bandwidth", "stall_seconds")
    ]
    return {
        "ls": {
            one["step"]: Figures(one["num_bytes"], one["seconds"], one["bandwidth"], one["stall_seconds"])
            for one in listed
        },
        "watch": {one["step"]: of_event(one) for one in watched["saves"]},
        "the trend of watch": {
            one["step"]: of_event(one)._replace(bandwidth=rate, stall=stall)
            for one, rate, stall in zip(
                reversed(watched["saves"]), watched["bandwidths"], watched["stalls"], strict=True
            )
        },
        "history": {one["step"]: of_event(one) for one in told},
        "page": {step: Figures(*values) for step, *values in zip(*columns, strict=True)},  # type: ignore[arg-type]
    }


def agree(faces: Mapping[str, Mapping[int, Figures]], reports: Sequence[SaveReport]) -> None:
    for face, by_step in faces.items():
        assert {*by_step} == {report.step for report in reports}, face
        for report in reports:
            ours, theirs = figures_of(report), by_step[report.step or 0]
            digits = 1e-3 if face == "page" else 1e-9  # which shows four digits
            assert theirs.num_bytes == pytest.approx(ours.num_bytes, rel=digits), face
            assert theirs.seconds == pytest.approx(ours.seconds, abs=ROUNDED, rel=digits), face
            assert theirs.stall == pytest.approx(ours.stall, abs=ROUNDED, rel=digits), face
            rate = theirs.num_bytes / theirs.seconds
            assert theirs.bandwidth == pytest.approx(rate, rel=1e-3), face
            assert theirs.bandwidth == pytest.approx(ours.bandwidth, rel=1e-3 + ROUNDED / ours.seconds), face


def test_all_faces_of_a_save_have_the_same_figures(tmp_path, caplog):
    ended: list[Ended] = []
    listening = listen(ended.append)
    caplog.set_level(logging.INFO, "async_ckpt")
    base = {"w": torch.arange(50_000.0)}
    with open_run(tmp_path) as ckpt:
        reports = [
            ckpt.save(
                {"m": torch.ones(step * 10_000), "base": base}, step, unchanged="base", record={"x": step}
            ).result()
            for step in (1, 2, 3)
        ]
        ckpt.wait()
        faces = by_faces(tmp_path)
        metrics = ckpt.metrics()
    agree(faces, reports)

    last = reports[-1]
    row = last.as_dict()
    assert Figures(row["num_bytes"], row["total_seconds"], row["bandwidth"], row["stall_seconds"]) == figures_of(last)
    told = [metrics[f"last_{name}"] for name in ("num_bytes", "total_seconds", "bandwidth", "stall_seconds")]
    assert Figures(*told) == figures_of(last)
    journal = [json.loads(line) for line in (tmp_path / "checkpoints.jsonl").read_text().splitlines()]
    assert [line["num_bytes"] for line in journal] == [report.num_bytes for report in reports]
    assert [message for message in caplog.messages if message.startswith("step ")] == [*map(str, reports)]

    assert listening.flush(60)
    listening.close()
    for one, report in zip(ended, reports, strict=True):
        values = {measurement.metric: measurement.value for measurement in measured(one)}
        assert values[DURATION] == pytest.approx(report.total_seconds, abs=1e-6)
        assert (values[IO], values[STEP_SIZE], values[STALL]) == (
            report.num_bytes, report.num_bytes, report.stall_seconds,
        )  # fmt: skip


def test_the_tables_of_ls_and_watch_show_the_same_texts(tmp_path):
    with open_run(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save({"m": torch.ones(step * 10_000)}, step).result()
    saves = {one["step"]: one for one in async_ckpt.history(tmp_path) if one["kind"] == "save"}
    listed, watched = run_command("ls", tmp_path).stdout, run_command("watch", tmp_path, "--once").stdout
    for step, one in saves.items():
        shown = [
            in_table(one["num_bytes"]),
            shown_seconds(one["total_seconds"]),
            f"{sized(one['num_bytes'] / one['total_seconds'])}/s",
            shown_seconds(one["stall_seconds"]),
        ]
        for table in (listed, watched):
            (line,) = [line for line in table.splitlines() if re.match(rf" *{step}  ", line)]
            assert all(text in re.split(r"  +", line) for text in shown), (line, shown)


def test_a_step_that_the_history_does_not_know_has_no_times_at_any_face(tmp_path):
    with open_run(tmp_path / "a") as ckpt:
        for step in (1, 2):
            ckpt.save({"m": torch.ones(100)}, step).result()
    assert run_command("cp", tmp_path / "a", tmp_path / "b", "--steps", "2").returncode == 0

    (row,) = json.loads(run_command("ls", tmp_path / "b", "--json").stdout)["steps"]
    assert (row["seconds"], row["bandwidth"], row["stall_seconds"]) == (None, None, None)
    (one,) = async_ckpt.history(tmp_path / "b")
    (seen,) = json.loads(run_command("watch", tmp_path / "b", "--once", "--json").stdout)["saves"]
    for save in (one, seen):
        assert (save["total_seconds"], save["stall_seconds"], save["num_bytes"]) == (None, None, row["num_bytes"])


def test_all_faces_of_a_save_to_a_store_have_the_same_figures(bucket):
    with async_ckpt.AsyncCheckpointer(bucket.place("run")) as ckpt:
        reports = [ckpt.save({"m": torch.ones(step * 10_000)}, step).result() for step in (1, 2)]
    options, keys = store_options(bucket.server.options)
    faces = by_faces(async_ckpt.Place(bucket.url("run"), options=bucket.server.options), options, **keys)
    agree(faces, reports)


_SAVE = """
from async_ckpt.core.host.operations import listen
ended = []
listening = listen(ended.append)
with open_run({root!r}) as ckpt:
    report = ckpt.save(fsdp(), 1, driver={{"data": torch.ones(1000)}} if here.rank == 0 else None).result()
    ckpt.wait()
listening.flush(60)
here.tell([report.num_bytes, report.total_seconds, report.bandwidth, report.stall_seconds, ended[0].num_bytes])
"""


def test_all_faces_of_a_save_of_several_ranks_have_the_same_figures(worlds, tmp_path):
    root = tmp_path / "run"
    first, second = ((end.told[-1]) for end in worlds.run(2, _SAVE.format(root=str(root))))
    (manifest,) = root.glob("step_*/manifest.json")
    files = list(manifest.parent.glob("*.tar"))

    assert first[0] == second[0] == sum(path.stat().st_size for path in files)
    assert first[4] + second[4] == first[0]  # each has counted what it wrote itself
    for num_bytes, seconds, rate, *_ in (first, second):
        assert rate == pytest.approx(num_bytes / seconds)
    report = SaveReport("committed", 1, "", first[0], total_seconds=first[1], stall_seconds=first[3])
    agree(by_faces(root), [report])


def test_the_page_gives_the_groups_of_rank_0_as_parts_of_nothing_else():
    told = [
        {
            **event("save", 2e9, step, num_bytes=4000, world_size=world, groups={"model": 700, "optim": 200}),
            "kept": True,
        }
        for step, world in ((1, 1), (2, 4))
    ]
    alone, joint = (next(one for one in pictures_of(columns_of("a", told[:n])) if one.name == "sizes") for n in (1, 2))
    assert alone.caption.startswith("The last save wrote 4.0 kB: model 700 bytes, optim 200 bytes.")
    assert joint.caption.startswith("The last save wrote 4.0 kB on 4 ranks, and of that rank 0: model 700 bytes, optim")
    assert (alone.title, joint.title) == (
        "Size by entry of the state",
        "Size by entry of the state, as rank 0 wrote them",
    )


def test_the_page_says_which_kept_steps_are_broken():
    told = [{**event("save", 2e9, step, num_bytes=1), "kept": True} for step in (1, 2)]
    run = columns_of("a", told, {2: "x.tar is missing"})
    assert [*run.columns["fate"].values] == ["kept", "broken: x.tar is missing"]
    assert facts_of(run, 2e9)["broken"] == "1: step 2"
    assert facts_of(columns_of("a", told), 2e9)["broken"] == "none"


def test_the_page_says_which_kept_steps_are_marked_and_leaves_bad_ones_out_of_the_best():
    told = [{**event("save", 2e9, step, num_bytes=1, record={"loss": step}), "kept": step > 1} for step in (1, 2, 3)]
    told.append({**event("mark", 2e9, 2, mark="bad", note="loss is nan")})
    run = columns_of("a", told, marks={1: "bad: gone", 2: "bad: loss is nan", 3: "good"})
    assert [*run.columns["fate"].values] == ["gone", "kept, bad: loss is nan", "kept, good", None]
    assert run.columns["about"].values[-1] == "bad: loss is nan"
    assert facts_of(run, 2e9)["marked bad"] == "1: step 2"
    pictures = {one.name: one for one in pictures_of(run, [Best("loss", "max", 3)])}
    (best,) = [one.rows for one in pictures["record entry 0"].series if one.colour == "best"]
    assert best == [2, 0]
    assert [one.rows for one in pictures["timeline"].series if one.label == "marked bad"] == [(1,)]
