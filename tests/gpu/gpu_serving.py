"""What the GPU tests of models have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sgl_omni.engine.engine import AutoregressiveEngine


def serve(engine: AutoregressiveEngine, payloads: Mapping[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """What each request hands on, its result last."""
    for name, payload in payloads.items():
        engine.add(name, payload)
    handed: dict[str, list[dict[str, Any]]] = {name: [] for name in payloads}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            handed[output.request_id] += output.chunks
            if output.result is not None:
                handed[output.request_id].append(output.result)
    assert engine.stats()["kv_used_tokens"] == 0
    return handed


def codes(parts: list[dict[str, Any]]) -> list[list[int]]:
    return [row for part in parts for row in part.get("codes", torch.empty(0)).tolist()]
