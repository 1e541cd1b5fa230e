"""OpenTelemetry: spans and metrics of every save, publication, restore and pull of this process.

In: operations that have ended. Out: spans and metrics for the API of OpenTelemetry. Knows nothing of: exporters.

Only the API is used. Unless the program sets up an SDK, its tracers and meters do nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

try:
    from opentelemetry import context, metrics, trace
except ImportError as error:
    raise ImportError('this needs the API of OpenTelemetry: pip install "async_ckpt[opentelemetry]"') from error

from .. import SaveReport, __version__
from ..plumbing import operations
from .metric_table import ACTIVE, IO, METRICS, RETRIES, STALL, ActiveOperations, measured

_SCOPE: Final = "async_ckpt"


class CheckpointTelemetry:
    """Exports the spans and metrics of this process to OpenTelemetry, from its construction on.

        CheckpointTelemetry()  # once, beside the set-up of the SDK

    A save is a span `async_ckpt.save` with the parts `async_ckpt.save.call`, `.stage`, `.write` and `.commit`; a
    publication has the same parts. A restore has the parts `.find`, `.plan`, `.read` and `.fill`, and a pull is a
    single span. A span's parent is the span that was current in the call. Spans are created on a separate thread when
    the operation has ended, with the times of its parts: a save does not wait for an exporter.

    Args:
        tracer_provider: by default the global one, even if that is set later.
        meter_provider: by default the global one, even if that is set later.
    """

    def __init__(
        self,
        *,
        tracer_provider: trace.TracerProvider | None = None,
        meter_provider: metrics.MeterProvider | None = None,
    ) -> None:
        self._tracer = trace.get_tracer(_SCOPE, __version__, tracer_provider)
        meter = metrics.get_meter(_SCOPE, __version__, meter_provider)
        self._recorders = {metric: _recorder(meter, metric) for metric in METRICS if metric is not ACTIVE}
        self._active: ActiveOperations | None = ActiveOperations()
        meter.create_observable_up_down_counter(ACTIVE.name, [self._observe], ACTIVE.unit, ACTIVE.description)
        self._listening = operations.listen(self._record, hears_all=True)

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until the SDK has all operations that have ended. Returns False after `timeout` seconds."""
        return self._listening.flush(timeout)

    def close(self) -> None:
        """Stop recording. May be called again."""
        self._listening.close()
        self._active = None

    # --- metrics ----------------------------------------------------------------------------------------------

    def _observe(self, _: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        active = self._active
        measurements = [] if active is None else active.measured()
        return [metrics.Observation(int(m.value), _keys(m.attributes)) for m in measurements]

    def _record(self, ended: operations.Ended) -> None:
        if (active := self._active) is not None:
            active.note(ended.kind, ended.run)
        if ended.kind not in ("train", "mark"):  # these have no duration
            self._span(ended)
        for metric, value, attributes in measured(ended):
            self._recorders[metric](value, _keys(attributes))

    # --- spans ------------------------------------------------------------------------------------------------

    def _span(self, ended: operations.Ended) -> None:
        # A copy, since only one thread at a time may enter a context, and other listeners have this one, too.
        parent = ended.context.copy().run(context.get_current)
        name = f"{_SCOPE}.{ended.kind}"
        span = self._tracer.start_span(name, parent, attributes=_facts(ended), start_time=_nanoseconds(ended.begin))
        for phase in ended.phases if span.is_recording() else ():
            part = self._tracer.start_span(
                f"{name}.{phase.name}", trace.set_span_in_context(span, parent), start_time=_nanoseconds(phase.begin)
            )
            part.end(_nanoseconds(phase.end))
        if ended.outcome == "failed":
            span.set_status(trace.StatusCode.ERROR, ended.error)
        span.end(_nanoseconds(ended.end))


def _recorder(meter: metrics.Meter, metric: Any) -> Any:
    """The method of a new instrument that records a value."""
    if metric.kind == "counter":
        return meter.create_counter(metric.name, metric.unit, metric.description).add
    if metric.kind == "gauge":
        return meter.create_gauge(metric.name, metric.unit, metric.description).set
    return meter.create_histogram(
        metric.name, metric.unit, metric.description, explicit_bucket_boundaries_advisory=metric.buckets
    ).record


def _facts(ended: operations.Ended) -> dict[str, str | float]:
    """The attributes of a span."""
    named = {"run": ended.run, "outcome": ended.outcome, "error_type": ended.error_type}
    facts: dict[str, str | float] = {**_keys(named)}
    if ended.step is not None:
        facts[f"{_SCOPE}.step"] = ended.step
    if ended.report is not None:
        facts[IO.name] = ended.num_bytes
    if isinstance(ended.report, SaveReport):
        facts |= {STALL.name: ended.report.stall_seconds, RETRIES.name: ended.report.retries}
    return facts


def _keys(attributes: Mapping[str, str]) -> dict[str, str]:
    """The attributes that are not empty, by OpenTelemetry's names, or else with the library's prefix."""
    return {
        "error.type" if name == "error_type" else f"{_SCOPE}.{name}": value
        for name, value in attributes.items()
        if value
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
