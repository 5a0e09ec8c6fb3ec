"""Prometheus metrics: what the routes count themselves, and the pipeline's own numbers read at each scrape."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import ClientDisconnect

from sgl_omni.errors import InvalidRequest, Overloaded, RequestAborted
from sgl_omni.server.backend import Backend

FIRST_AUDIO_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 30.0)
REQUEST_BUCKETS = (0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)
OUTCOMES = ("ok", "invalid", "rejected", "aborted", "error")


def outcome_of(error: BaseException) -> str:
    """The ``outcome`` label of a request that ended with this error."""
    if isinstance(error, InvalidRequest):
        return "invalid"
    if isinstance(error, Overloaded):
        return "rejected"
    if isinstance(error, (RequestAborted, ClientDisconnect)) or not isinstance(error, Exception):
        return "aborted"
    status = getattr(error, "status_code", 500)
    return "invalid" if status < 500 else "error"


class Metrics:
    """One server's metrics, in a registry of their own."""

    def __init__(self, backend: Backend) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("sgl_omni_requests", "Requests by outcome.", ["outcome"], registry=self.registry)
        for outcome in OUTCOMES:
            self._requests.labels(outcome)
        self._first_audio = Histogram(
            "sgl_omni_time_to_first_audio_seconds",
            "From the request's arrival to its first audio.",
            buckets=FIRST_AUDIO_BUCKETS,
            registry=self.registry,
        )
        self._first_text = Histogram(
            "sgl_omni_time_to_first_text_seconds",
            "From the request's arrival to its first text; to all of it where it is not streamed.",
            buckets=FIRST_AUDIO_BUCKETS,
            registry=self.registry,
        )
        self._duration = Histogram(
            "sgl_omni_request_duration_seconds",
            "From the request's arrival to the end of its answer, for those that ended well.",
            buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )
        self._audio = Counter("sgl_omni_audio_seconds", "Seconds of audio made.", registry=self.registry)
        self.registry.register(PipelineCollector(backend))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def begin(self) -> Measurement:
        return Measurement(self)


class Measurement:
    """What one request adds to the metrics."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._begun = time.perf_counter()
        self._heard = False
        self._read = False
        self._ended = False

    def audio(self, samples: int, sample_rate: int) -> None:
        """Called for each chunk of audio, the first of which is the first audio."""
        if not self._heard:
            self._heard = True
            self._metrics._first_audio.observe(time.perf_counter() - self._begun)
        self._metrics._audio.inc(samples / sample_rate)

    def text(self) -> None:
        """Called for each piece of text, the first of which is the first text."""
        if not self._read:
            self._read = True
            self._metrics._first_text.observe(time.perf_counter() - self._begun)

    def end(self, outcome: str) -> None:
        """Counts the request; a second call changes nothing."""
        if self._ended:
            return
        self._ended = True
        self._metrics._requests.labels(outcome).inc()
        if outcome == "ok":
            self._metrics._duration.observe(time.perf_counter() - self._begun)

    def fail(self, error: BaseException) -> None:
        self.end(outcome_of(error))


class PipelineCollector(Collector):
    """Reads ``backend.stats()`` when scraped."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._backend.stats()
        yield self._outcomes(stats.get("requests_total", {}))
        yield GaugeMetricFamily("sgl_omni_requests_in_flight", "Requests in the pipeline.", stats.get("in_flight", 0))
        yield CounterMetricFamily(
            "sgl_omni_late_messages", "Messages dropped because their request was gone.", stats.get("late_messages", 0)
        )
        yield from instance_metrics(stats.get("instances", {}))

    def _outcomes(self, totals: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily("sgl_omni_pipeline_requests", "Pipeline requests by outcome.", labels=["outcome"])
        for outcome, count in totals.items():
            family.add_metric([outcome], count)
        return family


def instance_metrics(instances: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
    """One family for each number that instances report: ``sgl_omni_instance_<name>{instance="..."}``."""
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for instance, numbers in instances.items():
        for key, value in numbers.items():
            if not isinstance(value, (int, float)):
                continue
            if key not in families:
                families[key] = _instance_family(key)
            families[key].add_metric([instance], float(value))
    yield from families.values()


def _instance_family(key: str) -> CounterMetricFamily | GaugeMetricFamily:
    name = "sgl_omni_instance_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
    text = f"{key} of each process instance."
    if key == "restarts" or key.endswith("_total"):
        return CounterMetricFamily(name, text, labels=["instance"])
    return GaugeMetricFamily(name, text, labels=["instance"])
