"""The HTML that notebooks show of reports, handles, histories and checkpoints: whole, and safe whatever a name says."""

from html.parser import HTMLParser

import pytest
import torch
from scripted_disk import scripted
from states import open_run, save, state_at

import async_ckpt
from async_ckpt import PullReport, StorageUnavailableError, VerifyReport
from async_ckpt.core.report import Destination, Progress, SaveReport
from async_ckpt.face.run_history import History

ATTACK = "<script>alert(1)</script>&\"'<img src=x onerror=y>"
VOID = {"img"}


class Reader(HTMLParser):
    """The tags of a text, which are closed in their order, and its words."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.words = ""
        self._open: list[str] = []
        self.feed(html)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") or name in ("href", "src", "style") for name, _ in attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += f" {data}"


def read(value: object) -> Reader:
    reader = Reader(value._repr_html_())  # type: ignore[attr-defined]
    assert reader.tags <= {"p", "table", "thead", "tr", "th", "td"}
    return reader


@pytest.mark.parametrize(
    "value",
    [
        SaveReport("committed", 7, ATTACK, 10**9, destinations=(Destination(ATTACK, 1, 1.0),)),
        SaveReport("skipped", 7, ATTACK),
        SaveReport("committed", None, ATTACK, unchanged_groups=(ATTACK,)),
        VerifyReport(ATTACK, 1, 2, 0.5, steps=(1,), notes=(ATTACK,)),
        PullReport(3, None, 1, 10, 0.1),
        Progress(10, 5, 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_report_is_a_table_below_its_text(value):
    reader = read(value)

    assert "table" in reader.tags
    assert str(value) in reader.words
    assert ATTACK in reader.words or ATTACK not in repr(value)


def test_a_handle_shows_its_progress_then_its_report_and_else_its_error(tmp_path):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        held = disk.stop("write", times=1)
        handle = ckpt.save(state_at(1), step=1)
        held.wait_reached()
        assert "<SaveHandle step=1" in read(handle).words
        assert "total_bytes" in read(handle).words
        held.release()
        report = handle.result()
        assert read(handle).words == read(report).words
        disk.fail("write", error=StorageUnavailableError(ATTACK, path=""))
        failed = ckpt.save(state_at(2), step=2)
        assert failed.exception() is not None
        assert ATTACK in read(failed).words


def test_a_history_is_a_table_of_its_last_events(tmp_path):
    with open_run(tmp_path, keep=2) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(state_at(step), step=step, record={ATTACK: ATTACK}).result()
        ckpt.wait()
        history = ckpt.history()
    history.append({**history[0], "kind": "failed", "error": ATTACK, "message": ATTACK})

    reader = read(history)

    assert "table" in reader.tags
    assert "3 save, 1 retention, 1 failed; last stall" in reader.words
    assert "deleted 1" in reader.words
    assert ATTACK in reader.words
    assert read(History()).words == " no events time kind step"


def test_a_history_is_a_data_frame(tmp_path):
    pandas = pytest.importorskip("pandas")
    with open_run(tmp_path) as ckpt:
        save(ckpt, 1, 2)
        ckpt.wait()
        frame = pandas.DataFrame(ckpt.history())

    assert frame["step"].tolist() == [1, 2]
    assert (frame["stall_seconds"] > 0).all()


def test_a_checkpoint_shows_its_names_and_the_sizes_of_its_entries(tmp_path):
    state = {ATTACK: {"w": torch.zeros(3, 4)}, "optimizer": {"m": torch.zeros(100), "lr": 0.1, "note": ATTACK}}
    async_ckpt.save(state, tmp_path / "x.tar").result()

    found = async_ckpt.inspect(tmp_path / "x.tar")
    reader = read(found)

    assert [*found.entries.values()] == [48, 400]
    assert found.num_bytes == 448
    assert [(row.dtype, row.shape) for row in found.names if row.kind == "tensor"] == [
        ("float32", (3, 4)),
        ("float32", (100,)),
    ]
    assert next(row.value for row in found.names if row.name == "optimizer.lr") == 0.1
    assert "3x4" in str(found)
    assert "table" in reader.tags
    assert ATTACK in reader.words


def test_a_large_checkpoint_is_shown_in_part(tmp_path):
    async_ckpt.save({f"w{number}": torch.zeros(1) for number in range(300)}, tmp_path / "x.tar").result()

    reader = read(async_ckpt.inspect(tmp_path / "x.tar"))

    assert "300 names" in reader.words
    assert "and 200 more" in reader.words
