"""What a server's /metrics say of its engines, read by those in front of it: the router and the benchmark."""

from __future__ import annotations

from dataclasses import dataclass

PREFIX = "sgl_omni_instance_"
CAPACITY = "_kv_capacity_tokens"
"""Every engine reports it and nothing else does, so it tells which stages are engines."""


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """Over all engines of a server: requests in them and in their queues, tokens of KV cache."""

    running: int
    queued: int
    kv_capacity: float
    kv_used: float


def read_engine_gauges(metrics: bytes) -> EngineGauges | None:
    """Reads Prometheus text; None where it tells of no engine."""
    sums: dict[str, float] = {}
    for line in metrics.decode(errors="replace").splitlines():
        if not line.startswith(PREFIX):
            continue
        name = line.partition("{")[0].removeprefix(PREFIX)
        try:
            sums[name] = sums.get(name, 0.0) + float(line.rpartition(" ")[2])
        except ValueError:
            continue  # no sample of ours; a server may export what it likes
    engines = [name.removesuffix(CAPACITY) for name in sums if name.endswith(CAPACITY)]
    if not engines:
        return None

    def total(gauge: str) -> float:
        return sum(sums.get(f"{engine}_{gauge}", 0.0) for engine in engines)

    return EngineGauges(
        int(total("running")), int(total("queued")), total("kv_capacity_tokens"), total("kv_used_tokens")
    )
