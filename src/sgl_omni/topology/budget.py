"""What each stage may hold of its GPU, and whether that fits (rules 7 and 8)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from sgl_omni.config.schema import StageConfig
from sgl_omni.config.violations import KeyPath
from sgl_omni.topology.findings import Findings, gpus, listed, quoted
from sgl_omni.topology.host import GIB
from sgl_omni.topology.placement import Placed

_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class Claim:
    """One stage of one OS process on one GPU."""

    placed: Placed
    stage: str
    fraction: float | None
    size: int | None

    @property
    def label(self) -> str:
        return self.placed.group.stage_label(self.stage, self.placed.replica)

    @property
    def declared(self) -> bool:
        return self.fraction is not None or self.size is not None


def claims_by_gpu(stages: dict[str, StageConfig], placed: tuple[Placed, ...]) -> dict[int, list[Claim]]:
    """What is asked of each GPU ordinal, in plan order."""
    claims: dict[int, list[Claim]] = defaultdict(list)
    for p in placed:
        if p.device is None:
            continue
        for name in p.group.gpu_stages:
            stage = stages[name]
            claims[p.device].append(Claim(p, name, stage.gpu_memory_fraction, stage.total_reserve_bytes))
    return dict(sorted(claims.items()))


def check_budgets(found: Findings, placed: tuple[Placed, ...]) -> None:
    for name, stage in found.stages.items():
        _check_stage(found, name, stage)
    cards: dict[int, list[Claim]] = defaultdict(list)
    for device, claims in claims_by_gpu(found.stages, placed).items():
        cards[found.host.card(device)] += claims
        for claim in {c.stage: c for c in claims}.values():
            _check_pool(found, claim)
    for card, claims in cards.items():
        if _check_declared(found, card, claims):
            _check_sum(found, card, claims)
        _check_pools(found, card, claims)


def enforced_budget(found: Findings, instance: Placed) -> int | None:
    """Bytes of its GPU that an instance is held to where a stage of it says `enforce_total_reserve`.

    None where none does, where a GPU stage declares no budget, or where a fraction is of a memory that is unknown.
    """
    stages = [found.stages[name] for name in instance.group.gpu_stages]
    if instance.device is None or not any(stage.enforce_total_reserve for stage in stages):
        return None
    memory = found.host.memory(instance.device)
    sizes = [_budget_of(stage, memory) for stage in stages]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _budget_of(stage: StageConfig, memory: int | None) -> int | None:
    if stage.gpu_memory_fraction is not None:
        return int(memory * stage.gpu_memory_fraction) if memory is not None else None
    return stage.total_reserve_bytes


def _card_name(claims: list[Claim]) -> str:
    """``GPU 0``, or ``the card of GPU 0 and GPU 1``."""
    devices = sorted({c.placed.device for c in claims if c.placed.device is not None})
    return gpus(devices) if len(devices) == 1 else f"the card of {gpus(devices)}"


def _check_stage(found: Findings, name: str, stage: StageConfig) -> None:
    at: KeyPath = ("stages", name)
    if stage.gpu_memory_fraction is not None and stage.total_reserve_bytes is not None:
        message = f"stage '{name}' has two budgets, gpu_memory_fraction and total_reserve_bytes"
        origin = found.resolved.origin(*at, "gpu_memory_fraction")
        other = "gpu_memory_fraction: null" if origin.kind == "class" else "one of the two"
        found.refuse("PLAN-007", message, (*at, "total_reserve_bytes"), hint=other)
    elif not stage.gpu and (stage.gpu_memory_fraction is not None or stage.total_reserve_bytes is not None):
        key = "gpu_memory_fraction" if stage.gpu_memory_fraction is not None else "total_reserve_bytes"
        message = f"stage '{name}' has a {key} but no GPU, so it holds no GPU memory"
        found.refuse("PLAN-007", message, (*at, key), hint=f"stages.{name}.gpu, or no {key}")
    elif stage.enforce_total_reserve and stage.gpu_memory_fraction is None and stage.total_reserve_bytes is None:
        message = f"stage '{name}' has enforce_total_reserve but no budget to enforce"
        found.refuse("PLAN-007", message, (*at, "enforce_total_reserve"), hint=f"stages.{name}.gpu_memory_fraction")
    _check_engine(found, name, stage)


def _check_engine(found: Findings, name: str, stage: StageConfig) -> None:
    engine = stage.engine
    if engine is None:
        return
    at: KeyPath = ("stages", name, "engine")
    if name not in found.resolved.engine_stages:
        message = f"stage '{name}' drives no engine, so it takes no engine settings"
        found.refuse("PLAN-008", message, at, hint=f"engine settings on {listed(found.resolved.engine_stages, 'or')}")
        return
    for key in ("mem_fraction_static", "max_total_tokens"):
        if engine.kv_cache_bytes is not None and getattr(engine, key) is not None:
            message = f"stage '{name}': engine.kv_cache_bytes and engine.{key} both pin the KV pool"
            where: KeyPath = (*at, "kv_cache_bytes")
            found.refuse(
                "PLAN-008", message, where, hint="one of the two; the other null", about=(stage.process or "",)
            )
    static, budget = engine.mem_fraction_static, stage.gpu_memory_fraction
    if static is not None and budget is not None and static > budget + _EPSILON:
        message = (
            f"stage '{name}': engine.mem_fraction_static {static:g} is more than the stage's budget, "
            f"gpu_memory_fraction {budget:g}"
        )
        found.refuse("PLAN-008", message, (*at, "mem_fraction_static"), hint=f"at most {budget:g}")


def _check_pool(found: Findings, claim: Claim) -> None:
    """What an engine pins in bytes, or against a budget in bytes, must fit its stage's budget on this GPU."""
    engine, memory = found.stages[claim.stage].engine, found.host.memory(claim.placed.device or 0)
    budget = claim.size
    if budget is None and memory is not None and claim.fraction is not None:
        budget = int(memory * claim.fraction)
    if engine is None or budget is None:
        return
    who = f"stage '{claim.stage}' of Process '{claim.placed.group.name}'"
    at: KeyPath = ("stages", claim.stage, "engine")
    hint = f"less than {size_text(budget)}, or a larger budget"
    if engine.kv_cache_bytes is not None and engine.kv_cache_bytes > budget:
        message = (
            f"{who}: a KV pool of {size_text(engine.kv_cache_bytes)} (engine.kv_cache_bytes) exceeds the stage's "
            f"budget of {size_text(budget)}"
        )
        found.refuse("PLAN-008", message, (*at, "kv_cache_bytes"), hint=hint)
    static = engine.mem_fraction_static
    if static is not None and memory is not None and claim.size is not None and static * memory > claim.size:
        message = (
            f"{who}: engine.mem_fraction_static {static:g}, {size_text(int(static * memory))} of GPU "
            f"{claim.placed.device}, exceeds the stage's budget of {size_text(claim.size)}"
        )
        found.refuse("PLAN-008", message, (*at, "mem_fraction_static"), hint=hint)


def _check_declared(found: Findings, gpu: int, claims: list[Claim]) -> bool:
    """Where two OS processes meet on a GPU, each GPU stage there declares a budget."""
    if len({c.placed.name for c in claims}) < 2:
        return True
    caused = [c.placed.group.name for c in claims if c.placed.group.replica_devices is not None]
    if not caused and not found.resolved.config.placement.require_memory_fraction_for_colocation:
        return True
    silent = [c for c in claims if not c.declared]
    if not silent:
        return True
    names = list(dict.fromkeys(c.stage for c in silent))
    instances = list(dict.fromkeys(c.label for c in silent if c.label != c.stage))
    detail = f" (as {listed(instances)})" if instances else ""
    because = (
        ""
        if found.resolved.config.placement.require_memory_fraction_for_colocation
        else (
            f"; replica_devices of {quoted(dict.fromkeys(caused))} put them there, so the check cannot be switched off"
        )
    )
    sharers = listed(dict.fromkeys(c.placed.name for c in claims))
    message = f"{_card_name(claims)} is shared by {sharers}, but {quoted(names)}{detail} declares no budget{because}"
    hint = ", ".join(f"stages.{n}.gpu_memory_fraction: <of GPU {gpu}'s total>" for n in names)
    about = {c.stage for c in claims}
    found.refuse("PLAN-007", message, ("stages", names[0]), hint=hint, about=about)
    return False


def _check_sum(found: Findings, gpu: int, claims: list[Claim]) -> None:
    limit = found.resolved.config.placement.max_total_gpu_memory_fraction_per_gpu
    memory = found.host.memory(gpu)
    total = 0.0
    for claim in claims:
        total += claim.fraction or 0.0
        if claim.size is not None and memory:
            total += claim.size / memory
    if total <= limit + _EPSILON:
        if memory is None and any(c.size is not None for c in claims):
            found.warn(f"GPU {gpu}: its memory is unknown, so budgets in bytes are not checked against it")
        return
    parts = listed(f"{c.label} {_claim_text(c)}" for c in claims if c.declared)
    of = f" of {size_text(memory)}" if memory else ""
    message = f"{_card_name(claims)} is over budget: {parts} sum to {total:.3g}{of}, more than the limit {limit:g}"
    hint = f"budgets that sum to at most {limit:g}, fewer replicas, or another GPU"
    largest = max(claims, key=lambda c: c.fraction or (c.size or 0) / (memory or 1))
    key = "gpu_memory_fraction" if largest.size is None else "total_reserve_bytes"
    at: KeyPath = ("stages", largest.stage, key)
    found.refuse("PLAN-007", message, at, hint=hint, about={c.stage for c in claims})


def _claim_text(claim: Claim) -> str:
    return f"{claim.fraction:g}" if claim.fraction is not None else size_text(claim.size or 0)


def _check_pools(found: Findings, gpu: int, claims: list[Claim]) -> None:
    """KV pools in bytes alone must fit the card, budgets declared or not."""
    memory = found.host.memory(gpu)
    pools = [(c, e.kv_cache_bytes) for c in claims if (e := found.stages[c.stage].engine) and e.kv_cache_bytes]
    total = sum(size for _, size in pools)
    if memory is None or total <= memory:
        return
    parts = listed(f"{c.label} {size_text(size)}" for c, size in pools)
    message = f"{_card_name(claims)} has {size_text(memory)}, and the KV pools on it sum to {size_text(total)}: {parts}"
    at: KeyPath = ("stages", pools[0][0].stage, "engine", "kv_cache_bytes")
    found.refuse("PLAN-008", message, at, hint="smaller pools or fewer replicas", about={c.stage for c, _ in pools})


def size_text(size: int) -> str:
    """``2 GiB``, ``512 MiB`` or bytes, whichever reads exactly or best."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.4g} {unit}"
    return f"{size} bytes"
