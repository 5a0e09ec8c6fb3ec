"""What a server says of itself at /health, compared with what was recorded of it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import httpx

from sgl_omni.config.scalars import core_text
from sgl_omni.dp.marks import Mark
from sgl_omni.dp.state import Replica, Run, SharedModel, Worker
from sgl_omni.errors import LaunchFailed
from sgl_omni.gpu.mps import MpsDaemon, MpsError

HEALTH_SECONDS = 5.0


def health(replica: Replica) -> dict[str, Any] | None:
    """The answer of /health; None where there is none, or it is none of a server's."""
    try:
        answer = httpx.get(f"{replica.url}/health", timeout=HEALTH_SECONDS, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return None
    return answer if isinstance(answer, dict) and isinstance(answer.get("instances"), list) else None


def with_workers(replica: Replica, state: dict[str, Any]) -> Replica:
    """The record with the processes that the server has now."""
    found = []
    for instance in state["instances"]:
        mark = Mark.of(int(instance["pid"])) if instance["pid"] else None
        if mark is not None:
            found.append(Worker(name=instance["name"], mark=mark, computes=instance["device"] is not None))
    return replace(replica, workers=tuple(found))


def replica_problems(run: Run, replica: Replica, state: dict[str, Any] | None) -> list[str]:
    """What is not as it should be with one server: gone, not ready, another capacity, other cores, other weights."""
    who = f"replica {replica.index} (port {replica.port})"
    if replica.server is None or not replica.server.alive:
        pid = "it was never started" if replica.server is None else f"its server, pid {replica.server.pid}, is gone"
        return [f"{who}: {pid}; log {replica.log}"]
    if state is None:
        return [f"{who}: /health does not answer; log {replica.log}"]
    if state["status"] != "ready":
        return [f"{who}: it is {state['status']}; log {replica.log}"]
    found = _capacity_problems(run, who, state) + _core_problems(replica, who)
    return found + (_weight_problems(run, replica, who, state) if run.weight_share else [])


def shared_models(state: dict[str, Any]) -> dict[str, SharedModel]:
    """The weights that a server shares, by stage."""
    told = (instance["weights"] for instance in state["instances"] if instance["weights"])
    models = {stage: model for weights in told for stage, model in weights["models"].items()}
    return {s: SharedModel(backend=str(m["backend"]), bytes=int(m["bytes"])) for s, m in models.items()}


def lent_at(state: dict[str, Any]) -> str:
    """The socket at which a server lends its weights to others.

    Raises:
        LaunchFailed: it lends none.
    """
    path = (state.get("weights") or {}).get("lent_at")
    if path is None:
        raise LaunchFailed("replica 0 was to lend the others its weights, and its /health says that it lends none")
    return str(path)


def _weight_problems(run: Run, replica: Replica, who: str, state: dict[str, Any]) -> list[str]:
    """The first server may have loaded its weights, every other has attached to those."""
    problems = []
    for instance in state["instances"]:
        weights = instance["weights"] or {"role": "own", "models": {}}
        attached = all(model["attached"] for model in weights["models"].values())
        if replica.index and weights["role"] != "own" and not attached:
            problems.append(f"{who}: '{instance['name']}' has loaded weights, and was to attach to those of replica 0")
    found = shared_models(state)
    for stage in sorted(run.capacity.keys() | run.weights.keys()):
        if stage not in found:
            problems.append(f"{who}: stage '{stage}' shares no weights")
        elif stage in run.weights and found[stage] != run.weights[stage]:
            loaded = run.weights[stage]
            problems.append(
                f"{who}: stage '{stage}' shares {found[stage].bytes} bytes by {found[stage].backend}, and replica 0 "
                f"loaded {loaded.bytes} by {loaded.backend}"
            )
    return problems


def _capacity_problems(run: Run, who: str, state: dict[str, Any]) -> list[str]:
    problems = []
    for instance in state["instances"]:
        for stage, tokens in instance["kv_capacity_tokens"].items():
            wanted = run.capacity.get(stage)
            if wanted is not None and tokens != wanted:
                problems.append(
                    f"{who}: stage '{stage}' resolved {tokens} tokens, not the common max_total_tokens {wanted}; where "
                    f"whole pages round it down, set {tokens}"
                )
    stages = {stage for instance in state["instances"] for stage in instance["kv_capacity_tokens"]}
    silent = sorted(run.capacity.keys() - stages)
    return problems + [f"{who}: stage '{stage}' reports no KV capacity" for stage in silent]


def _core_problems(replica: Replica, who: str) -> list[str]:
    problems = []
    named = [("its server", replica.server), *((f"'{w.name}'", w.mark) for w in replica.workers)]
    for name, mark in named:
        try:
            used = os.sched_getaffinity(mark.pid) if mark is not None and mark.alive else None
        except ProcessLookupError:
            used = None
        if mark is None or used is None:
            problems.append(f"{who}: {name} is gone")
        elif strays := used - set(replica.cores):
            problems.append(f"{who}: {name} (pid {mark.pid}) runs on cores {core_text(strays)} beyond its block")
    return problems


def attachment(run: Run) -> list[str]:
    """Lines ``<server pid> <client pid> <replica> <instance>`` of all processes that compute on the GPU.

    Raises:
        MpsError: names those that the run's daemon does not know as clients.
    """
    expected = {w.mark.pid: f"replica {r.index} {w.name}" for r in run.replicas for w in r.workers if w.computes}
    if not expected:
        raise MpsError(f"run '{run.id}': none of its servers has a process on the GPU")
    servers = MpsDaemon(run.mps_root, run.gpu_key, "verify").verify(expected)
    lines = [(server, pid, name) for server, clients in servers.items() for pid, name in clients.items()]
    return [f"{server} {pid} {name}" for server, pid, name in sorted(lines, key=lambda line: line[2])]
