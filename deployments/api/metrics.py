"""What Prometheus is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from deployments.recorder.spool import RecorderStatus

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The API's own figures. One registry per application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "smi_requests", "Requests answered", ("route", "status"), registry=self.registry
        )
        self.latency = Histogram(
            "smi_request_seconds", "Until the last byte", ("route",), buckets=_SECONDS, registry=self.registry
        )
        self.ttft = Histogram(
            "smi_first_token_seconds",
            "Until a streamed answer begins: its first token, or piece of sound",
            ("route",),
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.in_flight = Gauge("smi_requests_in_flight", "Requests being answered", registry=self.registry)


class Surroundings(Collector):
    """What is asked for only when somebody looks: the record and the nodes."""

    def __init__(self, record: Callable[[], RecorderStatus], nodes: Callable[[], int]) -> None:
        self._record, self._nodes = record, nodes

    def collect(self) -> Iterator[Metric]:
        record = self._record()
        yield GaugeMetricFamily("smi_nodes", "Nodes connected", self._nodes())
        yield GaugeMetricFamily("smi_recorder_backlog", "Lines not yet in Prefect", record.backlog)
        yield GaugeMetricFamily("smi_recorder_lag_seconds", "The record is behind by", record.lag_s)
        yield CounterMetricFamily("smi_recorder_recorded", "Runs recorded", record.recorded)
        yield CounterMetricFamily("smi_recorder_dropped", "Runs never recorded: no room", record.dropped)
        yield CounterMetricFamily("smi_recorder_failed", "Runs that Prefect refused", record.failed)
