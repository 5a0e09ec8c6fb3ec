"""The talker's stage: what the thinker streams goes through ``TalkerFeed``s into an engine of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sgl_omni.engine.engine import AutoregressiveEngine
from sgl_omni.engine.interface import EngineOutput, Payload
from sgl_omni.models.qwen3_omni.talker import TalkerModel
from sgl_omni.models.qwen3_omni.talker_feed import Feeds, TalkerFeed

_SILENCE: Payload = {"finish_reason": "stop", "input_tokens": 0, "output_tokens": 0}


@dataclass(slots=True)
class _Speech:
    feed: TalkerFeed
    options: Payload


class TalkerEngine:
    """Implements ``FedEngine``: takes the thinker's chunks and result, yields the talker's ``codes``.

    A request enters the engine within with the answer's first token. It makes no frame of an answer without any, nor
    for a request that did not ask for speech. What has come of all requests is brought in together, before a step: a
    word at a time, each with launches of its own, took this thread longer than the steps.
    """

    def __init__(self, engine: AutoregressiveEngine, model: TalkerModel) -> None:
        self._engine = engine
        self._model = model
        self._feeds = Feeds(model)
        self._speeches: dict[str, _Speech] = {}
        self._due: dict[str, _Speech] = {}
        self._unspoken: set[str] = set()
        self._silent: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._due) or bool(self._silent) or self._engine.has_work

    def add(self, request_id: str, payload: Payload) -> None:
        """Raises ``InvalidRequest`` for a voice that is not there."""
        speech = payload.get("speech")
        if speech is None:
            self._unspoken.add(request_id)
            return
        prompt = [int(token) for token in speech["prompt_ids"]]
        feed = TalkerFeed(self._model.spec, prompt, speech["voice"], speech.get("positions"))
        self._speeches[request_id] = _Speech(feed, speech["options"])
        self.extend(request_id, payload)

    def extend(self, request_id: str, payload: Payload) -> None:
        speech, rows = self._speeches.get(request_id), payload.get("hidden_states")
        if speech is None or rows is None:  # it has ended, or this is the thinker's result
            return
        speech.feed.take(torch.as_tensor(rows))
        self._note(request_id, speech)

    def finish_input(self, request_id: str) -> None:
        if request_id in self._unspoken:
            self._unspoken.discard(request_id)
            self._silent.append(request_id)
        speech = self._speeches.get(request_id)
        if speech is None:
            return
        speech.feed.end()
        self._note(request_id, speech)
        if request_id not in self._due:  # the thinker said nothing
            del self._speeches[request_id]
            self._silent.append(request_id)

    def abort(self, request_id: str) -> None:
        self._speeches.pop(request_id, None)
        self._due.pop(request_id, None)
        self._unspoken.discard(request_id)
        self._silent = [silent for silent in self._silent if silent != request_id]
        self._engine.abort(request_id)

    def step(self) -> Sequence[EngineOutput]:
        outputs = [EngineOutput(request_id, result=dict(_SILENCE)) for request_id in self._silent]
        self._silent = []
        if self._due:
            outputs += self._bring_in()
        if self._engine.has_work:
            outputs += self._engine.step()
        for output in outputs:
            if output.result is not None or output.error is not None:
                self._speeches.pop(output.request_id, None)
        return outputs

    def stats(self) -> dict[str, float]:
        stats = self._engine.stats()
        waiting = sum(not speech.feed.begun for speech in self._speeches.values())
        return {**stats, "queued": stats["queued"] + waiting + len(self._silent)}

    def _note(self, request_id: str, speech: _Speech) -> None:
        if speech.feed.is_due:
            self._due[request_id] = speech

    def _bring_in(self) -> list[EngineOutput]:
        """Gives the engine within what is due; returns the ends of the requests whose input it refused."""
        due, self._due = self._due, {}
        refused = []
        pieces = self._feeds.pieces([speech.feed for speech in due.values()])
        for (request_id, speech), piece in zip(due.items(), pieces, strict=True):
            try:
                if "prompt_embeddings" in piece:
                    self._engine.add(request_id, {**speech.options, **piece})
                else:
                    self._engine.extend(request_id, piece)
                if speech.feed.ended:
                    self._engine.finish_input(request_id)
            except Exception as error:  # noqa: BLE001 - as in the runner: what is refused fails alone
                self.abort(request_id)
                refused.append(EngineOutput(request_id, error=error))
        return refused
