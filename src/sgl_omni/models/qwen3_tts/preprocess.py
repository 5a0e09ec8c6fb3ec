"""The entry stage: a speech task's text, voice and options to what the talker's engine takes. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.qwen3_tts.facts import AUTO, BASE, CUSTOM_VOICE, ModelFacts
from sgl_omni.runtime.stage import Payload, Request
from sgl_omni.text.tokenizer import TextTokenizer

SLOWEST, FASTEST = 0.25, 4.0
_SAMPLING = ("temperature", "top_k", "top_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Voice:
    """What is taken of a recording: ``speaker`` float32 [hidden] and, if asked for, ``codes`` int16 [frames, codes]."""

    speaker: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int16] | None


class VoiceReader(Protocol):
    def read(self, audio: bytes | memoryview, *, with_codes: bool) -> Voice:
        """Raises ``InvalidRequest`` for what is no recording of a voice."""
        ...


class SpeechPreprocessor:
    """``(payload, request) -> payload``: ids of all texts, the voice, and every option filled in."""

    def __init__(self, facts: ModelFacts, tokenizer: TextTokenizer, voices: VoiceReader | None) -> None:
        """``voices``: where the checkpoint clones them. Raises ``StartupError`` for a tokenizer of another model."""
        self._facts = facts
        self._tokenizer = tokenizer
        self._voices = voices
        self._role = tokenizer.encode("<|im_start|>assistant\n")
        if len(self._role) != 3:
            raise StartupError(
                f"the tokenizer in {facts.folder} makes {len(self._role)} tokens, not 3, of what begins an answer"
            )

    def __call__(self, payload: Payload, request: Request) -> Payload:
        """Raises ``InvalidRequest`` for what this checkpoint cannot speak, and for options out of range."""
        return {
            "role_ids": self._role,
            "text_ids": self._text(payload.get("input"), "input"),
            "instruction_ids": self._instruction(payload.get("instructions")),
            **self._voice(payload),
            **self._options(payload),
            "speed": self._speed(payload.get("speed")),
            "seed": payload.get("seed"),
        }

    def _text(self, text: object, param: str) -> list[int]:
        if not isinstance(text, str):
            raise InvalidRequest(f"{param} must be a text", param=param)
        ids = self._tokenizer.encode_plain(text.strip())
        if not ids:
            raise InvalidRequest(f"{param} is empty", param=param)
        return ids

    def _instruction(self, text: str | None) -> list[int]:
        """A turn of the user's; none where nothing is asked."""
        if text is None or not text.strip():
            return []
        if not self._facts.takes_instructions:
            raise InvalidRequest("this checkpoint takes no instructions", param="instructions")
        encode = self._tokenizer.encode
        return [*encode("<|im_start|>user\n"), *self._text(text, "instructions"), *encode("<|im_end|>\n")]

    def _voice(self, payload: Payload) -> Payload:
        facts = self._facts
        language = self._language(payload.get("language"))
        found: Payload = {
            "language_id": None if language == AUTO else facts.languages[language],
            "speaker_id": None,
            "speaker_embedding": None,
            "reference_ids": None,
            "reference_codes": None,
            "whole_text": facts.kind != BASE,
        }
        if facts.kind == BASE:
            return found | self._cloned(payload)
        if payload.get("references"):
            raise InvalidRequest("this checkpoint clones no voices", param="references")
        if facts.kind == CUSTOM_VOICE:
            name = str(payload.get("voice") or next(iter(facts.speakers))).lower()
            if name not in facts.speakers:
                raise InvalidRequest(f"unknown voice {name!r}; choose from {', '.join(facts.speakers)}", param="voice")
            found["speaker_id"] = facts.speakers[name]
            if name in facts.dialects and language in (AUTO, "chinese"):
                found["language_id"] = facts.languages[facts.dialects[name]]
        return found

    def _cloned(self, payload: Payload) -> Payload:
        """With the recording's words the talker goes on from it; without, it only takes the timbre."""
        references = payload.get("references") or []
        if len(references) != 1 or self._voices is None:
            raise InvalidRequest(
                f"this checkpoint speaks with the voice of one recording, not {len(references)}", param="references"
            )
        words = references[0].get("text")
        if words is None or not words.strip():
            return {"speaker_embedding": self._voices.read(references[0]["audio"], with_codes=False).speaker}
        ids = self._text(words, "references[0].text")
        voice = self._voices.read(references[0]["audio"], with_codes=True)
        return {"speaker_embedding": voice.speaker, "reference_ids": ids, "reference_codes": voice.codes}

    def _language(self, name: str | None) -> str:
        name = AUTO if name is None else name.lower()
        if name not in self._facts.spoken_languages:
            known = ", ".join(self._facts.spoken_languages)
            raise InvalidRequest(f"unknown language {name[:40]!r}; choose from {known}", param="language")
        return name

    def _options(self, payload: Payload) -> dict[str, Any]:
        defaults = self._facts.generation
        found = {key: defaults[key] if payload.get(key) is None else payload[key] for key in _SAMPLING}
        if payload.get("temperature") is None and not defaults["do_sample"]:
            found["temperature"] = 0.0
        found["temperature"] = float(found["temperature"])
        limit = payload.get("max_new_tokens")
        return found | {"max_frames": defaults["max_new_tokens"] if limit is None else limit}

    def _speed(self, speed: float | None) -> float:
        speed = 1.0 if speed is None else float(speed)
        if not (math.isfinite(speed) and SLOWEST <= speed <= FASTEST):
            raise InvalidRequest(f"speed must lie between {SLOWEST} and {FASTEST}, not {speed}", param="speed")
        return speed
