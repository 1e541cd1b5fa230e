"""Prometheus: a collector with the metrics of every save, publication, restore and pull of this process.

In: operations that have ended. Out: metrics for the registry of `prometheus_client`. Knows nothing of: how they are
scraped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
    from prometheus_client import Metric as MetricFamily
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError('this needs the client of Prometheus: pip install "async_ckpt[prometheus]"') from error

from ..plumbing import operations
from .metric_table import ACTIVE, METRICS, ActiveOperations, Metric, measured

_UNITS: Final = {"s": "seconds", "By": "bytes"}


class CheckpointCollector(Collector):
    """Collects the metrics of this process. Constructing it registers it with `prometheus_client`.

        from prometheus_client import start_http_server

        collector = CheckpointCollector()
        start_http_server(9464)  # http://localhost:9464/metrics

    It counts all operations that end from then on, of all checkpointers, publishers and subscribers. Construct one in
    each process that is scraped. It counts on a separate thread, for which no save waits.

    Args:
        registry: the registry to register with. With None, it is not registered: call `collect` yourself.

    Raises ValueError if the registry already has such a collector.
    """

    def __init__(self, registry: CollectorRegistry | None = REGISTRY) -> None:
        self._instruments = {metric: _instrument(metric) for metric in METRICS if metric is not ACTIVE}
        self._active = ActiveOperations()
        self._registry = registry
        if registry is not None:
            registry.register(self)
        self._listening = operations.listen(self._count, hears_all=True)

    def collect(self) -> Iterable[MetricFamily]:
        """All metrics, with their current values."""
        for instrument in self._instruments.values():
            yield from instrument.collect()
        active = GaugeMetricFamily(_name_of(ACTIVE), ACTIVE.description, labels=ACTIVE.attributes)
        for measurement in self._active.measured():
            active.add_metric([*measurement.attributes.values()], measurement.value)
        yield active

    def describe(self) -> Iterable[MetricFamily]:
        """The metrics, by whose names a registry refuses a second collector."""
        return self.collect()

    def flush(self, timeout: float = 10.0) -> bool:
        """Wait until all operations that have ended are counted. Returns False after `timeout` seconds."""
        return self._listening.flush(timeout)

    def close(self) -> None:
        """Stop counting, and leave the registry. May be called again."""
        self._listening.close()
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.unregister(self)

    def _count(self, ended: operations.Ended) -> None:
        self._active.note(ended.kind, ended.run)
        for metric, value, attributes in measured(ended):
            child = self._instruments[metric].labels(**attributes)
            if isinstance(child, Counter):
                child.inc(value)
            elif isinstance(child, Histogram):
                child.observe(value)
            else:
                child.set(value)


def _instrument(metric: Metric) -> Counter | Gauge | Histogram:
    name, unit = _name_of(metric), _UNITS.get(metric.unit, "")
    if metric.kind == "histogram":
        return Histogram(name, metric.description, metric.attributes, unit=unit, buckets=metric.buckets, registry=None)
    kind = Counter if metric.kind == "counter" else Gauge
    return kind(name, metric.description, metric.attributes, unit=unit, registry=None)


def _name_of(metric: Metric) -> str:
    """The name in Prometheus, without the suffixes that the client appends: the unit, and `_total`."""
    return metric.name.replace(".", "_")
