"""The gate that replicas of one Process have room for the same: requests are spread as if they had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sgl_omni.topology.plan import Plan

CAPACITY = "kv_capacity_tokens"
"""The gauge by which an engine says what its KV pool holds."""


def kv_capacity(facts: Mapping[str, Any]) -> dict[str, int]:
    """Stage -> tokens, for the engine stages that say, from an instance's ready report."""
    engines: dict[str, dict[str, float]] = facts.get("engines", {})
    return {stage: int(gauges[CAPACITY]) for stage, gauges in engines.items() if CAPACITY in gauges}


def unequal_capacity(plan: Plan, facts: Mapping[str, Mapping[str, Any]]) -> str | None:
    """What is wrong where replicas resolved different KV capacities, listing each; None where all are alike.

    Args:
        facts: ready reports by instance; those absent are left out.
    """
    problems: list[str] = []
    for process in plan.processes:
        reports = {i.name: kv_capacity(facts[i.name]) for i in plan.instances_of(process.name) if i.name in facts}
        for stage in process.stages:
            tokens = {name: report.get(stage) for name, report in reports.items()}
            if len(set(tokens.values())) > 1:
                listed = ", ".join(f"{name} {count if count is not None else 'none'}" for name, count in tokens.items())
                problems.append(f"stage '{stage}' of Process '{process.name}': {listed}")
    if not problems:
        return None
    return (
        f"replicas resolved different KV capacities (tokens): {'; '.join(problems)}. "
        "Pin engine.max_total_tokens or engine.kv_cache_bytes"
    )
