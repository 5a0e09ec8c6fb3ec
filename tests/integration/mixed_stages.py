"""What lies between the engines of `mixed_cases.py`."""

from __future__ import annotations

from sgl_omni.runtime.stage import FunctionStage, Payload, Request


def turn(outputs: int) -> FunctionStage:
    """What the first engine said is the second one's prompt."""

    async def run(payload: Payload, request: Request) -> Payload:
        return {
            "prompt_ids": list(payload["token_ids"]),
            "max_new_tokens": outputs,
            "first": list(payload["token_ids"]),
        }

    return FunctionStage(run, 64)
