"""From a stage's plan to a running stage: calls its factory and wraps what it returns."""

from __future__ import annotations

import inspect
import logging
from typing import TYPE_CHECKING, Any

from sgl_omni.gpu.memory import cap_allocator, total_memory
from sgl_omni.runtime.engine_runner import EngineRunner
from sgl_omni.runtime.runners import AsyncFunctionRunner, BatchRunner, Runner, ThreadFunctionRunner
from sgl_omni.runtime.stage import BatchStage, EngineStage, FunctionStage, Stage, StreamStage
from sgl_omni.runtime.stream_runner import StreamRunner
from sgl_omni.runtime.tp import Ranks
from sgl_omni.runtime.tp_engine import FollowingRunner, lead
from sgl_omni.runtime.wiring import load_object
from sgl_omni.topology.plan import InstancePlan, Plan, StagePlan

if TYPE_CHECKING:
    from sgl_omni.engine.weights import WeightStore

log = logging.getLogger("sgl_omni.build")


def build_runner(
    stage: StagePlan, plan: Plan, device: int | None, weights: WeightStore | None, ranks: Ranks | None = None
) -> Runner:
    """Calls the stage's factory with its own arguments and those of the offered ones that its signature names.

    Args:
        device: the GPU of this instance; None for a CPU stage.
        weights: gives the stage's model its tensors; None where it has memory of its own.
        ranks: where the stage is tensor-parallel, this process's place among its ranks.

    Raises:
        TypeError: the factory returned no stage, or one that cannot take the stream that leads to it.
        Exception: whatever the factory raises.
    """
    factory = load_object(stage.factory_path)
    offered: dict[str, Any] = {
        "model_path": plan.model_path,
        "gpu_id": device,
        "device": f"cuda:{device}" if device is not None and plan.platform == "cuda" else "cpu",
        "engine": stage.engine or {},
        "weights": weights,
        "budget_bytes": budget_bytes(stage, plan, device),
    }
    if ranks is not None:
        offered |= {"shard": ranks.shard(), "tp_rank": ranks.rank, "tp_size": ranks.size, "nccl_port": ranks.port}
    declared = inspect.signature(factory).parameters
    arguments = {key: value for key, value in offered.items() if key in declared} | stage.factory_args
    built = factory(**arguments)
    runner = runner_for(built, stage.name) if ranks is None else rank_runner(built, stage.name, ranks)
    fed = (
        runner.takes_streams if isinstance(runner, EngineRunner | FollowingRunner) else isinstance(runner, StreamRunner)
    )
    if any(stage.name in s.stream_to for s in plan.stages) and not fed:
        raise TypeError(
            f"stage '{stage.name}' receives a stream, so its factory must return a StreamStage, or an EngineStage "
            "whose engine has `extend` and `finish_input`"
        )
    return runner


def budget_bytes(stage: StagePlan, plan: Plan, device: int | None) -> int | None:
    """What the stage itself may hold of its GPU, without the buffers in which its tensors travel; None where nothing
    says so, or there is no GPU to take a fraction of."""
    budget = stage.budget_bytes
    if stage.budget_fraction is not None and device is not None and plan.platform == "cuda":
        budget = int(stage.budget_fraction * total_memory(device))
    return None if budget is None else budget - stage.transport_bytes


def enforce_budgets(plan: Plan, instance: InstancePlan, device: int | None, beside: int = 0) -> None:
    """Holds this process to the budgets of its GPU stages, where one of them says `enforce_total_reserve`.

    `beside`: bytes of them that are held outside torch's allocator.
    """
    stages = [plan.stage(name) for name in instance.stages]
    if device is None or not any(stage.enforce_budget for stage in stages):
        return
    if plan.platform != "cuda":
        log.warning(
            "enforce_total_reserve has no effect on the CPU platform: torch allocates from the machine's memory"
        )
        return
    fraction = sum(stage.budget_fraction or 0.0 for stage in stages)
    size = sum(stage.budget_bytes or 0 for stage in stages)
    beside += sum(stage.transport_bytes for stage in stages)
    cap = cap_allocator(device, fraction=fraction, size=size, beside=beside)
    log.info("this process's torch allocator is held to %.2f GiB of GPU %d", cap / 2**30, device)


def rank_runner(stage: Stage, name: str, ranks: Ranks) -> Runner:
    """Rank 0's engine leads, the others follow. Raises TypeError for a stage that is no engine."""
    if not isinstance(stage, EngineStage):
        raise TypeError(
            f"stage '{name}' is tensor-parallel, but its factory returned a {type(stage).__name__}; return an "
            "EngineStage, or set tp_size to 1"
        )
    if ranks.rank:
        return FollowingRunner(stage, name, ranks)
    return EngineRunner(EngineStage(lead(stage.engine, ranks, name)), name)


def runner_for(stage: Stage, name: str) -> Runner:
    """Raises TypeError when a factory returned something that is no stage."""
    if isinstance(stage, FunctionStage):
        asynchronous = inspect.iscoroutinefunction(stage.fn)
        return AsyncFunctionRunner(stage) if asynchronous else ThreadFunctionRunner(stage, name)
    if isinstance(stage, BatchStage):
        return BatchRunner(stage, name)
    if isinstance(stage, StreamStage):
        return StreamRunner(stage, name)
    if isinstance(stage, EngineStage):
        return EngineRunner(stage, name)
    raise TypeError(
        f"the factory of stage '{name}' returned a {type(stage).__name__}; "
        "return a FunctionStage, BatchStage, StreamStage or EngineStage"
    )
