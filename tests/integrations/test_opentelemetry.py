"""Spans and metrics by OpenTelemetry's real SDK, and nothing without it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from racing import PATIENCE, until
from scripted_disk import scripted
from states import open_run, save_into, state_at

import async_ckpt
from async_ckpt import StorageUnavailableError

pytest.importorskip("opentelemetry.sdk", reason="needs opentelemetry-sdk")
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from async_ckpt.integrations.metric_table import METRICS
from async_ckpt.integrations.opentelemetry import CheckpointTelemetry


class Telemetry:
    """An SDK of one test, with what it was given."""

    def __init__(self) -> None:
        self._exporter, self._reader = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers, self.meters = TracerProvider(), MeterProvider([self._reader])
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.ours = CheckpointTelemetry(tracer_provider=self.tracers, meter_provider=self.meters)

    def spans(self) -> dict[str, ReadableSpan]:
        """The spans by their names, each of which is there once."""
        assert self.ours.flush(PATIENCE)
        finished = self._exporter.get_finished_spans()
        found = {span.name: span for span in finished}
        assert len(found) == len(finished)
        return found

    def metrics(self) -> dict[str, Any]:
        assert self.ours.flush(PATIENCE)
        data = self._reader.get_metrics_data()
        if data is None:
            return {}
        return {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}

    def points(self, name: str) -> dict[tuple[tuple[str, Any], ...], Any]:
        """The points of a metric, by their sorted attributes."""
        return {tuple(sorted(point.attributes.items())): point for point in self.metrics()[name].data.data_points}


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    sdk = Telemetry()
    yield sdk
    sdk.ours.close()
    sdk.tracers.shutdown()
    sdk.meters.shutdown()


def key(**attributes: str) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted((f"async_ckpt.{name}", value) for name, value in attributes.items()))


def test_a_save_is_a_span_with_its_parts_below_the_caller_s_span(tmp_path, telemetry):
    tracer = telemetry.tracers.get_tracer("training")
    with open_run(tmp_path) as ckpt:
        with tracer.start_as_current_span("step"):
            handle = ckpt.save(state_at(1), step=1)
        report = handle.result()

    spans = telemetry.spans()
    save = spans["async_ckpt.save"]
    parts = {name.rpartition(".")[2]: span for name, span in spans.items() if name.startswith("async_ckpt.save.")}
    assert set(parts) == {"call", "stage", "write", "commit"}
    assert save.parent is not None
    assert save.parent.span_id == spans["step"].context.span_id
    assert {span.context.trace_id for span in spans.values()} == {spans["step"].context.trace_id}
    for part in parts.values():
        assert part.parent is not None
        assert part.parent.span_id == save.context.span_id
        assert save.start_time <= part.start_time <= part.end_time <= save.end_time
    assert save.attributes == {
        "async_ckpt.run": str(tmp_path),
        "async_ckpt.outcome": "done",
        "async_ckpt.step": 1,
        "async_ckpt.io": report.num_bytes,
        "async_ckpt.stall.duration": report.stall_seconds,
        "async_ckpt.retries": 0,
    }
    assert save.status.status_code is StatusCode.UNSET


def test_restores_publications_and_pulls_are_spans(tmp_path, telemetry):
    model, weights = torch.nn.Linear(4, 4), tmp_path / "weights"
    with open_run(tmp_path / "run") as ckpt:
        ckpt.restore({"model": model})
    with async_ckpt.Publisher(weights, encoding=None) as publisher:
        publisher.publish(model, version=5).result()
    async_ckpt.Subscriber(weights).pull(tmp_path / "pulled")

    spans = telemetry.spans()
    assert {"async_ckpt.restore", "async_ckpt.publish", "async_ckpt.publish.write", "async_ckpt.pull"} <= set(spans)
    assert spans["async_ckpt.pull"].attributes["async_ckpt.step"] == 5
    assert spans["async_ckpt.restore"].parent is None


def test_the_parts_of_a_restore_are_spans_below_it_and_a_training_is_none(tmp_path, telemetry):
    with open_run(tmp_path) as ckpt:
        ckpt.save(state_at(1), step=1).result()
        ckpt.restore(state_at(0))

    spans = telemetry.spans()
    restore = spans["async_ckpt.restore"]
    parts = {name.rpartition(".")[2]: span for name, span in spans.items() if name.startswith("async_ckpt.restore.")}
    assert set(parts) == {"find", "plan", "read", "fill"}
    assert {part.parent.span_id for part in parts.values()} == {restore.context.span_id}
    assert "async_ckpt.train" not in spans


def test_a_failed_save_is_a_span_with_its_error(tmp_path, telemetry):
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        disk.fail("write", error=StorageUnavailableError("the disk is gone", path=str(tmp_path)))
        assert ckpt.save(state_at(1), step=1).exception() is not None

    span = telemetry.spans()["async_ckpt.save"]
    assert span.status.status_code is StatusCode.ERROR
    assert "the disk is gone" in span.status.description
    assert span.attributes["error.type"] == "StorageUnavailableError"
    assert span.attributes["async_ckpt.outcome"] == "failed"
    (point,) = telemetry.points("async_ckpt.operations").values()
    assert point.attributes["error.type"] == "StorageUnavailableError"


def test_metrics_have_the_values_of_the_report_and_the_units_of_ucum(tmp_path, telemetry):
    with open_run(tmp_path) as ckpt:
        report = ckpt.save(state_at(1), step=1).result()
        ckpt.mark(1, "bad")

    metrics, of = telemetry.metrics(), key(operation="save", run=str(tmp_path))
    assert telemetry.points("async_ckpt.marks")[key(run=str(tmp_path), mark="bad")].value == 1
    assert "async_ckpt.mark" not in telemetry.spans()
    assert {name: (m.unit, m.description) for name, m in metrics.items()} == {
        metric.name: (metric.unit, metric.description) for metric in METRICS
    }
    stall = telemetry.points("async_ckpt.stall.duration")[of]
    assert (stall.count, stall.sum) == (1, report.stall_seconds)
    assert stall.explicit_bounds == next(m.buckets for m in METRICS if m.name == "async_ckpt.stall.duration")
    assert telemetry.points("async_ckpt.io")[of].value == report.num_bytes
    assert telemetry.points("async_ckpt.recovery_point.step")[key(run=str(tmp_path))].value == 1
    assert telemetry.points("async_ckpt.active_operations")[of].value == 0


def test_a_save_is_active_until_it_has_ended(tmp_path, telemetry):
    of = key(operation="save", run=str(tmp_path))
    with open_run(tmp_path) as ckpt, scripted(ckpt) as disk:
        stop = disk.stop("write")
        handle = ckpt.save(state_at(1), step=1)
        until(lambda: "async_ckpt.active_operations" in telemetry.metrics())
        assert telemetry.points("async_ckpt.active_operations")[of].value == 1
        stop.release()
        handle.result()

    assert telemetry.points("async_ckpt.active_operations")[of].value == 0


def test_after_close_nothing_is_recorded(tmp_path, telemetry):
    telemetry.ours.close()
    telemetry.ours.close()
    save_into(tmp_path, 1)

    assert telemetry.spans() == {}
    assert telemetry.metrics() == {}


def test_without_an_sdk_a_save_is_as_ever_and_nothing_of_the_sdk_is_imported(tmp_path, nursery):
    script = """
import sys
from async_ckpt.integrations.opentelemetry import CheckpointTelemetry
from states import open_run, state_at

telemetry = CheckpointTelemetry()
open_run(sys.argv[1]).save(state_at(1), step=1).result()
print(telemetry.flush(60), [name for name in sys.modules if name.startswith("opentelemetry.sdk")])
"""
    assert nursery.out_of(script, tmp_path / "run") == "True []\n"


def test_an_sdk_that_is_set_up_later_has_the_last_save_at_the_exit(tmp_path, nursery):
    script = """
import atexit, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from async_ckpt.integrations.opentelemetry import CheckpointTelemetry
from states import open_run, state_at

class Printing(SpanExporter):
    def export(self, spans):
        print(*sorted(span.name for span in spans), flush=True)
        return SpanExportResult.SUCCESS

CheckpointTelemetry()
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(Printing()))
trace.set_tracer_provider(provider)
open_run(sys.argv[1]).save(state_at(1), step=1)
"""
    out = nursery.out_of(script, tmp_path / "run", whole_exit=True)

    parts = [f"async_ckpt.save.{part}" for part in ("call", "commit", "stage", "write")]
    assert out.split() == ["async_ckpt.save", *parts]
