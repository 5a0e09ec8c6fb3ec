"""The router's numbers: a snapshot of one process, several added up, and as Prometheus writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from sgl_omni.router.dispatch import Dispatcher
from sgl_omni.router.health import State
from sgl_omni.router.workers import FIRST_BYTE_BUCKETS

Snapshot = dict[str, Any]

WORST_FIRST = (State.DOWN, State.STARTING, State.HALF_OPEN, State.UP)
REFUSALS = ("full", "waited_too_long", "no_worker", "draining")


def snapshot(dispatcher: Dispatcher) -> Snapshot:
    """``{"draining", "in_flight", "queued", "tally": {...}, "workers": [{"url", "state", "reason", "draining",
    "in_flight", "work", "load", "outcomes": {...}, "first_byte": {"total", "buckets"}}]}`` of this process."""
    return {
        "processes": 1,
        "draining": dispatcher.draining,
        "in_flight": dispatcher.in_flight,
        "queued": dispatcher.queued,
        "tally": asdict(dispatcher.tally),
        "workers": [
            {
                "url": worker.address.url,
                "state": str(worker.health.state),
                "reason": worker.health.reason,
                "draining": worker.draining,
                "in_flight": worker.in_flight,
                "work": round(worker.work, 1),
                "load": None if worker.load is None else asdict(worker.load),
                "outcomes": dict(worker.outcomes),
                "first_byte": asdict(worker.first_byte),
            }
            for worker in dispatcher.workers
        ],
    }


def merge(snapshots: Sequence[Snapshot]) -> Snapshot:
    """The numbers of several processes added up; of a worker's states the worst, as some requests meet it."""
    merged: Snapshot = {
        "processes": len(snapshots),
        "draining": any(s["draining"] for s in snapshots),
        "in_flight": sum(s["in_flight"] for s in snapshots),
        "queued": sum(s["queued"] for s in snapshots),
        "tally": add(*(s["tally"] for s in snapshots)),
    }
    workers: dict[str, list[dict[str, Any]]] = {}
    for one in snapshots:
        for worker in one["workers"]:
            workers.setdefault(worker["url"], []).append(worker)
    merged["workers"] = [_merge_worker(views) for views in workers.values()]
    return merged


def _merge_worker(views: Sequence[dict[str, Any]]) -> dict[str, Any]:
    worst = min(views, key=lambda view: WORST_FIRST.index(State(view["state"])))
    buckets = [sum(column) for column in zip(*(v["first_byte"]["buckets"] for v in views), strict=True)]
    return worst | {
        "draining": any(v["draining"] for v in views),
        "in_flight": sum(v["in_flight"] for v in views),
        "work": round(sum(v["work"] for v in views), 1),
        "outcomes": add(*(v["outcomes"] for v in views)),
        "first_byte": {"total": sum(v["first_byte"]["total"] for v in views), "buckets": buckets},
    }


def add(*counts: dict[str, int]) -> dict[str, int]:
    return {key: sum(each[key] for each in counts) for key in counts[0]}


def render(found: Snapshot) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Snapshot(found))
    return generate_latest(registry)


class _Snapshot(Collector):
    def __init__(self, found: Snapshot) -> None:
        self._found = found

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        found = self._found
        tally = found["tally"]
        yield GaugeMetricFamily("sgl_omni_router_in_flight", "Requests that are with workers.", found["in_flight"])
        yield GaugeMetricFamily("sgl_omni_router_queued", "Requests that wait for their turn.", found["queued"])
        refused = CounterMetricFamily("sgl_omni_router_refused", "Requests answered 503 here.", labels=["reason"])
        for reason in REFUSALS:
            refused.add_metric([reason], tally[reason])
        yield refused
        yield CounterMetricFamily(
            "sgl_omni_router_retries",
            "Requests tried at another worker, as the first was not there or was lost before it answered.",
            tally["retries"],
        )
        yield from self._workers()

    def _workers(self) -> Iterator[Metric]:
        label = ["worker"]
        up = GaugeMetricFamily("sgl_omni_router_worker_up", "1 while it takes requests.", labels=label)
        in_flight = GaugeMetricFamily("sgl_omni_router_worker_in_flight", "Requests with it.", labels=label)
        work = GaugeMetricFamily("sgl_omni_router_worker_work", "Their text, in characters.", labels=label)
        ended = CounterMetricFamily(
            "sgl_omni_router_requests", "Requests by worker and outcome.", labels=["worker", "outcome"]
        )
        first = HistogramMetricFamily(
            "sgl_omni_router_first_byte_seconds", "From a request's arrival to its answer's head.", labels=label
        )
        for worker in self._found["workers"]:
            url = worker["url"]
            up.add_metric([url], float(worker["state"] == State.UP and not worker["draining"]))
            in_flight.add_metric([url], worker["in_flight"])
            work.add_metric([url], worker["work"])
            for outcome, count in worker["outcomes"].items():
                ended.add_metric([url, outcome], count)
            first.add_metric([url], _cumulative(worker["first_byte"]["buckets"]), worker["first_byte"]["total"])
        yield from (up, in_flight, work, ended, first)


def _cumulative(buckets: Sequence[int]) -> list[tuple[str, float]]:
    edges = [*(str(edge) for edge in FIRST_BYTE_BUCKETS), "+Inf"]
    return [(edge, float(sum(buckets[: i + 1]))) for i, edge in enumerate(edges)]
