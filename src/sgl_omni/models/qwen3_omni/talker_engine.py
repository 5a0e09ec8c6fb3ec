"""The talker's stage: what the thinker streams goes through a ``TalkerFeed`` into an engine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from sgl_omni.engine.engine import AutoregressiveEngine
from sgl_omni.engine.interface import EngineOutput, Payload
from sgl_omni.models.qwen3_omni.talker import TalkerModel
from sgl_omni.models.qwen3_omni.talker_feed import TalkerFeed

_SILENCE: Payload = {"finish_reason": "stop", "input_tokens": 0, "output_tokens": 0}


@dataclass(slots=True)
class _Speech:
    feed: TalkerFeed
    options: Payload
    begun: bool = False


class TalkerEngine:
    """Implements ``FedEngine``: takes the thinker's chunks and result, yields the talker's ``codes``.

    A request enters the engine within with the answer's first token. It makes no frame of an answer without any, nor
    for a request that did not ask for speech.
    """

    def __init__(self, engine: AutoregressiveEngine, model: TalkerModel) -> None:
        self._engine = engine
        self._model = model
        self._speeches: dict[str, _Speech] = {}
        self._unspoken: set[str] = set()
        self._silent: list[str] = []
        # Projections on the engine's own stream would wait for the step that is under way there.
        self._beside = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None

    @property
    def has_work(self) -> bool:
        return bool(self._silent) or self._engine.has_work

    def add(self, request_id: str, payload: Payload) -> None:
        """Raises ``InvalidRequest`` for a voice that is not there."""
        speech = payload.get("speech")
        if speech is None:
            self._unspoken.add(request_id)
            return
        prompt = [int(token) for token in speech["prompt_ids"]]
        feed = TalkerFeed(self._model, prompt, speech["voice"], speech.get("positions"))
        self._speeches[request_id] = _Speech(feed, speech["options"])
        self.extend(request_id, payload)

    def extend(self, request_id: str, payload: Payload) -> None:
        speech, rows = self._speeches.get(request_id), payload.get("hidden_states")
        if speech is None or rows is None:  # it has ended, or this is the thinker's result
            return
        with self._aside():
            piece = speech.feed.take(torch.as_tensor(rows))
            piece = None if piece is None else _on_host(piece)
        self._hand_on(request_id, speech, piece)

    def finish_input(self, request_id: str) -> None:
        if request_id in self._unspoken:
            self._unspoken.discard(request_id)
            self._silent.append(request_id)
        speech = self._speeches.get(request_id)
        if speech is None:
            return
        with self._aside():
            piece = speech.feed.end()
            piece = None if piece is None else _on_host(piece)
        if piece is None:
            del self._speeches[request_id]
            self._silent.append(request_id)
            return
        self._hand_on(request_id, speech, piece)
        self._engine.finish_input(request_id)

    def abort(self, request_id: str) -> None:
        self._speeches.pop(request_id, None)
        self._unspoken.discard(request_id)
        self._silent = [silent for silent in self._silent if silent != request_id]
        self._engine.abort(request_id)

    def step(self) -> Sequence[EngineOutput]:
        outputs = [EngineOutput(request_id, result=dict(_SILENCE)) for request_id in self._silent]
        self._silent = []
        if self._engine.has_work:
            outputs += self._engine.step()
        for output in outputs:
            if output.result is not None:
                self._speeches.pop(output.request_id, None)
        return outputs

    def stats(self) -> dict[str, float]:
        stats = self._engine.stats()
        waiting = sum(not speech.begun for speech in self._speeches.values())
        return {**stats, "queued": stats["queued"] + waiting + len(self._silent)}

    def _hand_on(self, request_id: str, speech: _Speech, piece: Payload | None) -> None:
        if piece is None:
            return
        if speech.begun:
            self._engine.extend(request_id, piece)
            return
        self._engine.add(request_id, {**speech.options, **piece})
        speech.begun = True

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._beside is None else torch.cuda.stream(self._beside)


def _on_host(piece: Payload) -> Payload:
    """The same in host memory, which on a GPU waits for the projections alone."""
    return {key: value.cpu() if torch.is_tensor(value) else value for key, value in piece.items()}
