"""What Prometheus is told."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
            "smi_first_token_seconds", "Until the first token", buckets=_SECONDS, registry=self.registry
        )
        self.in_flight = Gauge("smi_requests_in_flight", "Requests being answered", registry=self.registry)
