"""What both completion routes may be asked, and the body of ``POST /v1/completions``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from starlette.requests import Request

from sgl_omni.errors import InvalidRequest
from sgl_omni.server.json_body import Body, Count, Int, TopK, check_model, read_body

MOST_STOPS = 4
LONGEST_STOP = 256
DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's, for texts; an answer in a chat may be as long as there is room."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]],
    Field(max_length=MOST_STOPS, description="A text or up to four; the answer ends before the first of them"),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]
Id = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = Field(None, description="Accepted for OpenAI's clients; has no effect")


class Generation(Body):
    """OpenAI's options of sampling and streaming, and four of our own: top_k, repetition_penalty, ignore_eos."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
    }
    """Fields that are not supported, and what they may say all the same, because it asks for nothing."""

    model: str
    temperature: float | None = Field(None, ge=0.0, le=2.0)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    top_k: TopK | None = None
    repetition_penalty: float | None = Field(None, gt=0.0, le=10.0)
    seed: Int | None = None
    max_tokens: Count | None = None
    stop: Stops | None = None
    ignore_eos: bool = Field(False, description="Goes on to max_tokens whatever the model says")
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted for OpenAI's clients; has no effect")
    n: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None

    def refuse_unsupported(self) -> None:
        """Raises ``InvalidRequest`` for a field that would change the answer if it were understood."""
        for name, neutral in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                only = f"; it may only be {' or '.join(map(repr, neutral))}" if neutral else ""
                raise InvalidRequest(f"{name} is not supported by this server{only}", name)
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is for streams; set stream to true", "stream_options")

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a count of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def options(self) -> dict[str, Any]:
        """The entry stage's part of what was asked, as ``config.tasks.ChatTask`` has it."""
        given: dict[str, Any] = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "repetition_penalty": self.repetition_penalty,
            "seed": self.seed,
            "stop": self.stop or None,
            "ignore_eos": self.ignore_eos or None,
        }
        return {"stream": self.stream, **{name: value for name, value in given.items() if value is not None}}


class CreateCompletion(Generation):
    """OpenAI's request for the continuation of a text."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **Generation.neutral,
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (),
        "suffix": ("",),
    }

    prompt: Any = Field(description="A text, or a list of token ids", json_schema_extra={"type": ["string", "array"]})
    best_of: Any = None
    echo: Any = None
    logprobs: Any = None
    suffix: Any = None


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A valid request: the entry stage's payload, and how the text travels."""

    payload: dict[str, Any]
    model: str
    stream: bool
    usage: bool


async def read_completion_call(request: Request, models: Sequence[str]) -> CompletionCall:
    """Reads and checks the body. Raises ``InvalidRequest``, or ``HTTPException`` for what is not JSON at all."""
    asked = await read_body(request, CreateCompletion)
    check_model(asked.model, models)
    asked.refuse_unsupported()
    payload = {
        "prompt": one_prompt(asked.prompt),
        "modalities": ["text"],
        "max_new_tokens": asked.max_tokens or DEFAULT_COMPLETION_TOKENS,
        **asked.options(),
    }
    return CompletionCall(payload, asked.model, asked.stream, asked.wants_usage)


def one_prompt(value: Any) -> str | list[int]:
    """OpenAI's four shapes of a prompt, as long as there is only one in them."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise InvalidRequest("prompt must be a text or a list of token ids", "prompt")
    if all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        if not all(0 <= each < 2**31 for each in value):
            raise InvalidRequest("prompt: token ids are whole numbers from 0 to 2147483647", "prompt")
        return value
    if not all(isinstance(each, (str, list)) for each in value):
        raise InvalidRequest("prompt must be a text or a list of token ids", "prompt")
    if len(value) > 1:
        raise InvalidRequest("several prompts in one request are not supported; send a request for each", "prompt")
    if isinstance(value[0], list) and any(not isinstance(each, int) for each in value[0]):
        raise InvalidRequest("prompt must be a text or a list of token ids", "prompt")
    return one_prompt(value[0])
