"""Stages for the GPU tests."""

from __future__ import annotations

from sgl_omni.runtime.stage import FunctionStage, Payload, Request


def take(gib: float, gpu_id: int | None = None, device: str = "cpu") -> FunctionStage:
    """Holds `gib` GiB of the GPU."""
    import torch

    held = torch.zeros(int(gib * 2**30), dtype=torch.uint8, device=device)

    async def run(payload: Payload, request: Request) -> Payload:
        return {"held": held.numel()}

    return FunctionStage(run)
