"""The KV pool's bytes where they are not said outright: from a budget and what this process itself holds.

Never from the memory that is free now, so neither neighbours nor the order of starts can change it, and replicas of
one stage come to the same capacity.
"""

from __future__ import annotations

from sgl_omni.errors import StartupError

WORKING_BYTES = 2 << 30
"""Of a stage's budget, what the pool leaves to the CUDA context, the graphs and the activations of a step."""


def kv_bytes(
    held: int,
    *,
    static_bytes: int | None = None,
    budget_bytes: int | None = None,
    working_bytes: int = WORKING_BYTES,
) -> int:
    """Bytes for the pool of a process whose weights take ``held`` bytes.

    Args:
        static_bytes: for weights and pool together (``mem_fraction_static`` of the card); wins over the budget.
        budget_bytes: for all that the stage holds of the card, ``working_bytes`` of which are not the pool's.

    Raises:
        StartupError: neither is given, or nothing is left.
    """
    if static_bytes is not None:
        left, of = static_bytes - held, f"engine.mem_fraction_static, {_gib(static_bytes)},"
    elif budget_bytes is not None:
        left, of = budget_bytes - held - working_bytes, f"the stage's budget, {_gib(budget_bytes)},"
    else:
        raise StartupError(
            "nothing says how large the KV pool is: give engine.max_total_tokens, engine.kv_cache_bytes or "
            "engine.mem_fraction_static, or the stage gpu_memory_fraction or total_reserve_bytes"
        )
    if left <= 0:
        working = "" if static_bytes is not None else f" and {_gib(working_bytes)} of working memory"
        raise StartupError(f"{of} leaves nothing for a KV pool beside weights of {_gib(held)}{working}")
    return left


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
