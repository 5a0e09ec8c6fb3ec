"""Three small stages: words of a text, the same words shouted, and both together."""

from __future__ import annotations

from sgl_omni.errors import InvalidRequest
from sgl_omni.runtime.stage import FunctionStage, Payload, Request


def create_words() -> FunctionStage:
    """{"text": str} -> {"words": list[str]}, in a thread."""

    def words(payload: Payload, request: Request) -> Payload:
        if not payload["text"].strip():
            raise InvalidRequest("the text is empty", "text")
        return {"words": payload["text"].split()}

    return FunctionStage(words, concurrency=2)


def create_shout(mark: str = "!") -> FunctionStage:
    """{"words"} -> {"words"} in capitals, on the event loop. `mark` is set in pipeline.yaml."""

    async def shout(payload: Payload, request: Request) -> Payload:
        return {"words": [word.upper() + mark for word in payload["words"]]}

    return FunctionStage(shout, concurrency=64)


def create_echo() -> FunctionStage:
    """{"quiet", "loud"} -> {"text": str}: what `both` has merged, as one line."""

    async def echo(payload: Payload, request: Request) -> Payload:
        pairs = zip(payload["quiet"], payload["loud"], strict=True)
        return {"text": " ".join(f"{quiet} {loud}" for quiet, loud in pairs)}

    return FunctionStage(echo, concurrency=64)


def both(inputs: dict[str, Payload]) -> Payload:
    """The fan-in of `echo`: source stage -> its payload."""
    return {"quiet": inputs["words"]["words"], "loud": inputs["shout"]["words"]}
