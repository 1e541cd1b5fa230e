"""The collector for Prometheus, by its real client; the dashboard and the alerts, by Grafana's types and promtool."""

import json
import math
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from racing import PATIENCE, until
from scripted_disk import scripted
from states import open_run, state_at

import async_ckpt
from async_ckpt import NonFinite, StorageUnavailableError
from async_ckpt.core.events.goodput import PARTS

prometheus_client = pytest.importorskip("prometheus_client", reason="needs prometheus_client")
from prometheus_client import CollectorRegistry, start_http_server  # noqa: E402
from prometheus_client.openmetrics.parser import text_string_to_metric_families  # noqa: E402

from async_ckpt.integrations.metric_table import METRICS  # noqa: E402
from async_ckpt.integrations.prometheus import CheckpointCollector  # noqa: E402

DOCS = Path(async_ckpt.__file__).parent.parent / "docs"
DASHBOARD = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
ALERTS = (DOCS / "alerts.yml").read_text(encoding="utf-8")
PROMTOOL = shutil.which("promtool")
MIB = 1 << 20


class Scraped:
    """A collector of one test, and what a scrape of its endpoint gives."""

    def __init__(self, url: str, collector: CheckpointCollector) -> None:
        self._url, self.collector = url, collector

    def families(self) -> list[Any]:
        assert self.collector.flush(PATIENCE)
        request = urllib.request.Request(self._url, headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(request) as answer:
            return list(text_string_to_metric_families(answer.read().decode()))

    def series(self) -> dict[str, list[tuple[dict[str, str], float]]]:
        """The labels and the value of each series, by the name of the sample."""
        found: dict[str, list[tuple[dict[str, str], float]]] = {}
        for family in self.families():
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, sample.value))
        return found

    def value(self, name: str, **labels: str) -> float | None:
        """The value of the only series with these labels; None if there is none."""
        fitting = [v for given, v in self.series().get(name, []) if labels.items() <= given.items()]
        assert len(fitting) <= 1
        return fitting[0] if fitting else None


@pytest.fixture
def scraped() -> Iterator[Scraped]:
    registry = CollectorRegistry()
    collector = CheckpointCollector(registry)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    yield Scraped(f"http://127.0.0.1:{server.server_port}/metrics", collector)
    collector.close()
    server.shutdown()
    server.server_close()
    thread.join()


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\basync_ckpt_\w+", expression))


def test_the_time_of_a_training_and_the_parts_of_a_restore_are_told(tmp_path, scraped):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), 1).result()
        ckpt.restore(state_at(0))
        run = ckpt.root
        spent = {part: scraped.value("async_ckpt_training_time_seconds", run=run, part=part) for part in PARTS}
        told = ckpt.metrics()

    assert spent["stall"] == told["stall_seconds_total"] > 0
    assert spent["restore"] == told["time_restore_seconds"] > 0
    assert spent["trained"] > 0
    for phase in ("find", "plan", "read", "fill"):
        assert scraped.value("async_ckpt_phase_duration_seconds_count", operation="restore", phase=phase) == 1
    assert scraped.value("async_ckpt_operations_total", operation="train") is None
    assert scraped.value("async_ckpt_active_operations", operation="train") is None


def test_marks_are_counted_also_those_of_a_check(tmp_path, scraped):
    with open_run(tmp_path, check=NonFinite(every=1)) as ckpt:
        ckpt.save({"w": torch.tensor([math.nan])}, 1).result()
        ckpt.save({"w": torch.ones(1)}, 2).result()
        ckpt.mark(2, "good")
        ckpt.mark(2, None)

    counts = {
        mark: scraped.value("async_ckpt_marks_total", run=str(tmp_path), mark=mark) for mark in ("bad", "good", "none")
    }
    assert counts == {"bad": 1, "good": 1, "none": 1}


def test_a_save_is_counted_and_measured_as_its_report_says(tmp_path, scraped):
    run = str(tmp_path)
    with open_run(run) as ckpt:
        first = ckpt.save(state_at(1), step=1).result()
        second = ckpt.save(state_at(2, 2), step=2).result()

    of = {"operation": "save", "run": run}
    assert scraped.value("async_ckpt_operations_total", **of, outcome="done", error_type="") == 2
    assert scraped.value("async_ckpt_operation_duration_seconds_count", **of) == 2
    assert scraped.value("async_ckpt_io_bytes_total", **of) == first.num_bytes + second.num_bytes
    assert scraped.value("async_ckpt_stall_duration_seconds_count", **of) == 2
    stalls = first.stall_seconds + second.stall_seconds
    assert scraped.value("async_ckpt_stall_duration_seconds_sum", **of) == pytest.approx(stalls)
    for phase in ("stage", "write", "commit"):
        seconds = sum(getattr(report, f"{phase}_seconds") for report in (first, second))
        assert scraped.value("async_ckpt_phase_duration_seconds_sum", **of, phase=phase) == pytest.approx(seconds)
    assert scraped.value("async_ckpt_recovery_point_step", run=run) == 2
    assert scraped.value("async_ckpt_step_size_bytes", run=run) == second.num_bytes
    assert scraped.value("async_ckpt_retries_total", **of) == 0
    assert (scraped.value("async_ckpt_storage_free_bytes", run=run, root=run) or 0) > MIB


def test_the_recovery_point_is_the_call_of_the_newest_save_that_is_committed(tmp_path, scraped):
    run, before = str(tmp_path), async_ckpt.core.timing.wall_time()
    with open_run(run) as ckpt, scripted(ckpt) as disk:
        ckpt.save(state_at(1), step=1).result()
        first = scraped.value("async_ckpt_recovery_point_timestamp_seconds", run=run)
        disk.fail("write", error=StorageUnavailableError("the disk is gone", path=run))
        assert ckpt.save(state_at(2), step=2).exception() is not None
        unchanged = scraped.value("async_ckpt_recovery_point_timestamp_seconds", run=run)
        stop = disk.stop("write")
        third = ckpt.save(state_at(3), step=3)
        called = async_ckpt.core.timing.wall_time()
        stop.release()
        third.result()

    assert first is not None
    assert before <= first == unchanged
    last = scraped.value("async_ckpt_recovery_point_timestamp_seconds", run=run)
    assert last is not None
    assert first < last <= called


def test_a_restore_is_a_recovery_point_also_where_there_is_nothing_yet(tmp_path, scraped):
    run = str(tmp_path)
    with open_run(run) as ckpt:
        assert ckpt.restore({"model": torch.nn.Linear(2, 2)}) is None

    assert scraped.value("async_ckpt_recovery_point_timestamp_seconds", run=run) is not None
    assert scraped.value("async_ckpt_recovery_point_step", run=run) is None


def test_a_save_without_a_run_is_no_recovery_point(tmp_path, scraped):
    async_ckpt.save(state_at(1), tmp_path / "x.tar").result()

    assert scraped.value("async_ckpt_operations_total", operation="save", run="") == 1
    assert scraped.series().get("async_ckpt_recovery_point_timestamp_seconds") is None


def test_failed_and_skipped_saves_are_counted_by_their_outcome(tmp_path, scraped):
    run = str(tmp_path)
    with open_run(run, on_overlap="skip") as ckpt, scripted(ckpt) as disk:
        stop = disk.stop("write")
        first = ckpt.save(state_at(1), step=1)
        ckpt.save(state_at(2), step=2)
        stop.release(StorageUnavailableError("the disk is gone", path=run))
        assert first.exception() is not None

    of = {"operation": "save", "run": run}
    failed = scraped.value("async_ckpt_operations_total", **of, outcome="failed", error_type="StorageUnavailableError")
    assert failed == 1
    assert scraped.value("async_ckpt_operations_total", **of, outcome="skipped") == 1
    assert scraped.value("async_ckpt_operation_duration_seconds_count", **of) is None


def test_a_save_is_active_until_it_has_ended(tmp_path, scraped):
    of = {"operation": "save", "run": str(tmp_path)}
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        stop = disk.stop("write")
        handle = ckpt.save(state_at(1), step=1)
        until(lambda: scraped.value("async_ckpt_active_operations", **of) == 1)
        stop.release()
        handle.result()

    assert scraped.value("async_ckpt_active_operations", **of) == 0


def test_publications_and_pulls_are_series_of_their_own(tmp_path, scraped):
    root = str(tmp_path / "weights")
    with async_ckpt.Publisher(root, encoding=None) as publisher:
        published = publisher.publish(torch.nn.Linear(4, 4), version=1).result()
    pulled = async_ckpt.Subscriber(root).pull(tmp_path / "pulled")

    assert scraped.value("async_ckpt_io_bytes_total", operation="publish", run=root) == published.num_bytes
    assert scraped.value("async_ckpt_io_bytes_total", operation="pull", run=root) == pulled.num_bytes
    assert scraped.value("async_ckpt_operation_duration_seconds_count", operation="pull", run=root) == 1


def test_names_have_the_units_and_suffixes_of_prometheus(scraped):
    families = {family.name: family for family in scraped.families()}

    assert len(families) == len(METRICS)
    for metric in METRICS:
        unit = {"s": "seconds", "By": "bytes"}.get(metric.unit, "")
        name = metric.name.replace(".", "_") + (f"_{unit}" if unit else "")
        family = families[name]
        assert family.documentation == metric.description
        assert family.type == {"active": "gauge"}.get(metric.kind, metric.kind)


def test_the_page_lists_the_metrics_that_there_are_and_no_others(scraped):
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(async_ckpt_\w+)` \| (\w+) \| (.+?) \|", page, flags=re.M)

    listed = {(name.removesuffix("_total"), kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    kinds = {family.name: family.type for family in scraped.families()}
    units = {"s": "_seconds", "By": "_bytes"}
    names = {metric: metric.name.replace(".", "_") + units.get(metric.unit, "") for metric in METRICS}
    assert listed == {(name, kinds[name], metric.attributes) for metric, name in names.items()}
    assert all(f"`{metric.name}`" in page for metric in METRICS)
    assert all(name.endswith("_total") == (kind == "counter") for name, kind, _ in rows)


def test_a_closed_collector_is_in_no_registry_and_another_may_take_its_place():
    registry = CollectorRegistry()
    first = CheckpointCollector(registry)
    with pytest.raises(ValueError, match="Duplicated"):
        CheckpointCollector(registry)
    first.close()
    first.close()
    assert list(registry.collect()) == []
    CheckpointCollector(registry).close()


# --- the dashboard and the alerts ------------------------------------------------------------------------------------


@pytest.fixture
def exported(tmp_path, scraped) -> set[str]:
    """The names of all series that are there when everything has happened."""
    run, model = tmp_path / "run", torch.nn.Linear(4, 4)
    with open_run(run) as ckpt, scripted(ckpt) as disk:
        ckpt.save({"model": model}, step=1).result()
        disk.fail("write", error=StorageUnavailableError("the disk is gone", path=str(run)))
        assert ckpt.save({"model": model}, step=2).exception() is not None
        ckpt.restore({"model": model})
    return set(scraped.series())


def test_each_query_of_the_dashboard_asks_for_what_is_exported(exported):
    queries = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    queries += [one["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]

    assert all(names_in(query) for query in queries)
    assert {name for query in queries for name in names_in(query)} <= exported


def test_the_dashboard_is_one_that_grafana_s_types_keep_as_it_is():
    """A field that Grafana does not know, or a value of another type, does not come back."""
    pytest.importorskip("grafana_foundation_sdk", reason="needs Grafana's Foundation SDK")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    known = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(DASHBOARD)))

    assert lost(DASHBOARD, known) == []


def lost(given: Any, known: Any, path: str = "") -> list[str]:
    """Where `known` lacks a value of `given`, or has another."""
    if isinstance(given, dict) and isinstance(known, dict):
        return [at for key, value in given.items() for at in lost(value, known.get(key), f"{path}.{key}")]
    if isinstance(given, list) and isinstance(known, list) and len(given) == len(known):
        return [
            at
            for n, (one, other) in enumerate(zip(given, known, strict=True))
            for at in lost(one, other, f"{path}[{n}]")
        ]
    return [] if given == known else [path]


def test_panels_have_numbers_of_their_own_and_do_not_overlap():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_each_alert_asks_for_what_is_exported_and_leads_to_its_runbook(exported):
    yaml = pytest.importorskip("yaml", reason="needs PyYAML")
    rules = [rule for group in yaml.safe_load(ALERTS)["groups"] for rule in group["rules"]]

    assert [rule["alert"] for rule in rules] == [
        "CheckpointTooOld", "CheckpointsFail", "CheckpointStallHigh", "CheckpointBandwidthLow", "StorageSpaceLow",
    ]  # fmt: skip
    for rule in rules:
        assert names_in(rule["expr"])
        assert names_in(rule["expr"]) <= exported
        assert rule["annotations"]["runbook_url"].endswith(f"/docs/operations.md#{rule['alert'].lower()}")


OF = 'job="train", instance="a:9464", run="runs/a"'
SAVE = f'{OF}, operation="save"'
FAILED = f'async_ckpt_operations_total{{{SAVE}, outcome="failed", error_type="StorageFullError"}}'
# For each alert: series at one value a minute, the minute that is looked at, and whether the alert fires then.
CASES: list[tuple[str, dict[str, str], str, bool]] = [
    ("CheckpointTooOld", {f"async_ckpt_recovery_point_timestamp_seconds{{{OF}}}": "0x90"}, "60m", False),
    ("CheckpointTooOld", {f"async_ckpt_recovery_point_timestamp_seconds{{{OF}}}": "0x90"}, "66m", True),
    ("CheckpointTooOld", {f"async_ckpt_recovery_point_timestamp_seconds{{{OF}}}": "0+60x90"}, "80m", False),
    (
        "CheckpointTooOld",
        {'async_ckpt_recovery_point_timestamp_seconds{job="train", instance="a:9464", run=""}': "0x90"},
        "80m",
        False,
    ),
    ("CheckpointsFail", {FAILED: "_x9 1x80"}, "12m", True),  # a series that begins with its first failure
    ("CheckpointsFail", {FAILED: "_x9 1x80"}, "75m", False),
    ("CheckpointsFail", {FAILED: "1x100 2x100"}, "105m", True),
    ("CheckpointsFail", {FAILED: "1x100 2x100"}, "170m", False),
    ("CheckpointStallHigh", {f"async_ckpt_stall_duration_seconds_sum{{{SAVE}}}": "0+6x90"}, "80m", True),
    ("CheckpointStallHigh", {f"async_ckpt_stall_duration_seconds_sum{{{SAVE}}}": "0+1x90"}, "80m", False),
    (
        "CheckpointBandwidthLow",  # ten hours as before, then saves that take four times as long
        {
            f"async_ckpt_io_bytes_total{{{SAVE}}}": "0+1000x800",
            f"async_ckpt_operation_duration_seconds_sum{{{SAVE}}}": "0+1x600 604+4x200",
        },
        "720m",
        True,
    ),
    (
        "CheckpointBandwidthLow",  # twice as many bytes in twice the time
        {
            f"async_ckpt_io_bytes_total{{{SAVE}}}": "0+1000x600 602000+2000x200",
            f"async_ckpt_operation_duration_seconds_sum{{{SAVE}}}": "0+1x600 602+2x200",
        },
        "720m",
        False,
    ),
    (
        "StorageSpaceLow",  # two ranks, each of which writes half of the step
        {
            f'async_ckpt_storage_free_bytes{{{OF}, root="runs/a"}}': "150x9",
            f"async_ckpt_step_size_bytes{{{OF}}}": "40x9",
            f"async_ckpt_step_size_bytes{{{OF.replace('a:', 'b:')}}}": "40x9",
        },
        "5m",
        True,
    ),
    (
        "StorageSpaceLow",
        {
            f'async_ckpt_storage_free_bytes{{{OF}, root="runs/a"}}': "150x9",
            f"async_ckpt_step_size_bytes{{{OF}}}": "40x9",
        },
        "5m",
        False,
    ),
]


@pytest.mark.skipif(PROMTOOL is None, reason="needs promtool, which is in Debian's package prometheus")
def test_alerts_fire_when_they_should_and_only_then(tmp_path):
    assert PROMTOOL is not None
    tests = [
        {
            "interval": "1m",
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'count(ALERTS{{alertname="{alert}", alertstate="firing"}}) or vector(0)',
                    "eval_time": minute,
                    "exp_samples": [{"labels": "{}", "value": int(fires)}],
                }
            ],
        }
        for alert, series, minute, fires in CASES
    ]
    file = tmp_path / "alerts_test.yml"  # JSON is YAML
    file.write_text(json.dumps({"rule_files": [str(DOCS / "alerts.yml")], "evaluation_interval": "1m", "tests": tests}))

    for command in (["check", "rules", str(DOCS / "alerts.yml")], ["test", "rules", str(file)]):
        done = subprocess.run([PROMTOOL, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
