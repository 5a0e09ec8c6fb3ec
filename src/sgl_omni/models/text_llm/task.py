"""The host side: a prompt of ids in, tokens out, until an end id, a stop text or the limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Request
from sgl_omni.engine.task import InputSpec, Task, parse_sampling, whole_number
from sgl_omni.errors import InvalidRequest
from sgl_omni.text.stops import StopFinder
from sgl_omni.text.tokenizer import Detokenizer, TextTokenizer

_SPACING = ((8, 1), (24, 2))
"""Requests that run together, and tokens that each of them then hands on at once; ``_LARGEST_SPACING`` beyond that.
What a token costs on its way to the client is the host's work, and at that many no reader sees the difference."""
_LARGEST_SPACING = 4


def tokens_at_once(together: int) -> int:
    """How many tokens each of so many requests hands on together."""
    return next((n for most, n in _SPACING if together <= most), _LARGEST_SPACING)


@dataclass(slots=True)
class Answer:
    """How one request ends and is handed on. ``stops`` and ``words`` are there where it has stop texts.

    ``clear_tokens``: how many of its tokens surely lie before every stop, each with all of its text.
    """

    end_ids: frozenset[int]
    stream: bool
    stop: list[str]
    stops: StopFinder | None = None
    words: Detokenizer | None = None
    has_end_id: bool = False
    clear_tokens: int = 0
    _tokens: int = 0
    _length: int = 0
    _clear_length: int = 0
    _ends: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])

    def stops_with(self, token: int) -> bool:
        """Whether a stop text is complete with this token."""
        if self.stops is None or self.words is None:
            return False
        self._tokens += 1
        self._take(self.words.feed([token]))
        return self.stops.found

    def end(self) -> None:
        """No more tokens come: what might have become a stop is none."""
        if self.stops is None or self.words is None:
            return
        self._take(self.words.end())
        if not self.stops.found:
            self.clear_tokens = self._tokens

    def _take(self, text: str) -> None:
        assert self.stops is not None
        if text and not self.stops.found:
            self._length += len(text)
            self._ends.append((self._tokens, self._length))
            self._clear_length += len(self.stops.feed(text))
        while self._ends and self._ends[0][1] <= self._clear_length:
            self.clear_tokens, _ = self._ends.popleft()


class TextTask(Task):
    """Takes ``prompt_ids``, sampling options, ``max_new_tokens``, ``ignore_eos``, ``stop`` and ``stream``.

    Chunks are ``{"token_ids"}``, the first with ``stop``. The result has ``{"finish_reason", "input_tokens",
    "output_tokens"}``, and where ``stream`` is false ``token_ids`` and ``stop``. An end id is counted but not handed
    on. While many requests run, a chunk has several tokens. Stop texts are looked for here so that nothing is decoded
    beyond them; where in the last token's text one begins is for who reads the tokens to find.
    """

    def __init__(
        self,
        inputs: InputSpec,
        tokenizer: TextTokenizer,
        *,
        eos_ids: Sequence[int],
        pool_tokens: int,
        max_positions: int | None,
    ) -> None:
        """``pool_tokens``: what the KV pool holds. ``max_positions``: what the model can attend over."""
        self._inputs = inputs
        self._tokenizer = tokenizer
        self.end_ids = frozenset(eos_ids)
        # The last output is never run, so it takes neither a position nor room in the pool.
        self._limits = [(pool_tokens + 1, "the KV pool holds")]
        if max_positions is not None:
            self._limits.append((max_positions + 1, "the model attends over"))

    def parse(self, request_id: str, payload: Payload) -> Request:
        prompt = self._inputs.prompt(payload)
        stop = list(payload.get("stop") or [])
        answer = Answer(
            end_ids=frozenset() if payload.get("ignore_eos") else self.end_ids,
            stream=bool(payload.get("stream", True)),
            stop=stop,
        )
        if stop:
            answer.stops, answer.words = StopFinder(stop), Detokenizer(self._tokenizer)
        outputs = self._outputs(len(prompt), payload)
        return Request(
            request_id,
            prompt,
            max_outputs=outputs,
            sampling=parse_sampling(payload),
            due=0 if answer.stream else outputs,
            task=answer,
        )

    def _outputs(self, length: int, payload: Payload) -> int:
        """As many as the request says, or else as there is room for."""
        limit, what = min(self._limits)
        field = payload.get("prompt_field", "prompt_ids")
        if length >= limit:
            raise InvalidRequest(f"the prompt has {length} tokens; {what} {limit - 1}, the answer's included", field)
        asked = whole_number(payload, "max_new_tokens", limit - length)
        if asked < 1:
            raise InvalidRequest(f"max_tokens must be 1 or more, not {asked}", "max_tokens")
        if length + asked > limit:
            raise InvalidRequest(
                f"the prompt has {length} tokens and max_tokens asks for {asked} more; {what} {limit - 1} in all",
                "max_tokens",
            )
        return asked

    def take(self, request: Request, row: list[int]) -> bool:
        request.outputs.append(row)
        answer: Answer = request.task
        if row[0] in answer.end_ids:
            answer.has_end_id = True
            request.finish_reason = "stop"
        elif answer.stops_with(row[0]):
            request.finish_reason = "stop"
        elif request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def quiet_rows(self, request: Request) -> int:
        if request.task.stops is not None:
            return 0
        return request.max_outputs - 1 - len(request.outputs)

    def chunk(self, request: Request) -> Payload | None:
        answer: Answer = request.task
        if not answer.stream:
            return None
        first = request.sent == 0
        new = [row[0] for row in request.outputs[request.sent :]]
        request.sent = len(request.outputs)
        request.due = request.sent + tokens_at_once(self.running)
        if answer.has_end_id:
            new.pop()
        if not new:
            return None
        return {"token_ids": new, "stop": answer.stop} if first and answer.stop else {"token_ids": new}

    def result(self, request: Request) -> Payload:
        answer: Answer = request.task
        said = request.outputs[:-1] if answer.has_end_id else request.outputs
        return {
            **({} if answer.stream else {"token_ids": [row[0] for row in said], "stop": answer.stop}),
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": len(request.outputs),
        }
