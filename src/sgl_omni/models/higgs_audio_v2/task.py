"""The host side of Higgs Audio: prompts with reference audio in, frames of codes out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.delay import undelayed
from sgl_omni.engine.interface import Payload
from sgl_omni.engine.request import Prompt, Request
from sgl_omni.engine.task import InputSpec, Task, frames_asked, number, parse_sampling
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.higgs_audio_v2.spec import HiggsSpec

HAND_OVER_FRAMES = 5
"""Frames of a chunk where nothing says what its receiver can do with them: a message for each would cost more than it
tells."""


class FramesSpec(Protocol):
    """What a task needs to know of a model that speaks frames of delayed codebooks."""

    @property
    def decoder(self) -> DecoderConfig: ...

    @property
    def num_codebooks(self) -> int: ...

    @property
    def codebook_size(self) -> int: ...

    @property
    def stream_eos_id(self) -> int: ...

    @property
    def codec_size(self) -> int: ...


def _a_few_more(known: int) -> int:
    return known + HAND_OVER_FRAMES if known else 1


Spec = TypeVar("Spec", bound=FramesSpec)


class FramesTask(Task, Generic[Spec]):
    """Requests of ``prompt_ids``, ``audio_rows``, ``max_frames`` and sampling options, answered with frames.

    Results are arrays ``codes`` int16 [frames, codebooks], with the ``speed`` asked for where it is not 1. Codebook
    k of frame f lies in output row ``lead`` + f + k.
    A chunk goes on as soon as ``frames_wanted`` of the frames that were known are. A request's ``frame_end`` is the
    output that brings the end. An id that no codec knows and that the model put
    inside the audio all the same becomes the codec's last.
    """

    lead: int
    """Output rows before the first that holds a code of a frame."""

    end_columns = slice(1, None)

    def __init__(
        self, spec: Spec, *, default_max_frames: int = 2048, frames_wanted: Callable[[int], int] | None = None
    ) -> None:
        self._spec = spec
        self._frames_wanted = frames_wanted or _a_few_more
        self._delays = tuple(range(spec.num_codebooks))
        self.end_ids = frozenset([spec.stream_eos_id])
        self._default_max_frames = default_max_frames
        hidden = spec.decoder.hidden_size
        self._text = InputSpec(vocab_sizes=(spec.decoder.vocab_size,), hidden_size=hidden)
        self._audio = InputSpec(vocab_sizes=(spec.codebook_size,) * spec.num_codebooks, hidden_size=hidden)

    @abstractmethod
    def _prompt_rows(self, payload: Payload) -> Tensor:
        """int64 [length, 1 + codebooks]."""

    @abstractmethod
    def _ends(self, row: list[int], step: int) -> bool:
        """Whether this row, the ``step``-th output, brings the end of the audio."""

    def parse(self, request_id: str, payload: Payload) -> Request:
        prompt, positions = Prompt(self._prompt_rows(payload)), self._spec.decoder.max_positions
        delay = self.lead + self._spec.num_codebooks - 1
        room = None if positions is None else positions - len(prompt) - delay
        frames = frames_asked(payload, self._default_max_frames, room, param="max_frames")
        return Request(
            request_id,
            prompt,
            max_outputs=frames + delay,
            sampling=parse_sampling(payload),
            due=delay + self._frames_wanted(0),
            task=number(payload, "speed", 1.0),
        )

    def _rows(self, text: Tensor, places: Tensor, payload: Payload) -> Tensor:
        """Text ids [length, 1] with the payload's ``audio_rows`` beside those that ``places`` [length] marks."""
        given = payload.get("audio_rows")
        audio = None if given is None else self._audio.prompt({"prompt_ids": given}).rows
        count = 0 if audio is None else len(audio)
        if int(places.sum()) != count:
            raise InvalidRequest(
                f"the prompt has {int(places.sum())} places for audio rows, and {count} rows are given",
                param="audio_rows",
            )
        rows = torch.zeros(len(text), 1 + self._spec.num_codebooks, dtype=torch.int64)
        rows[:, :1] = text
        if audio is not None:
            rows[places, 1:] = audio
        return rows

    def take(self, request: Request, row: list[int]) -> bool:
        if request.frame_end < 0 and self._ends(row, len(request.outputs)):
            request.frame_end = len(request.outputs)
        request.outputs.append(row)
        end = request.frame_end
        if end >= 0 and (self._known(request) == end - self.lead or set(row[1:]) == {self._spec.stream_eos_id}):
            request.finish_reason = "stop"
        elif request.is_at_limit:
            request.finish_reason = "length"
        return request.finish_reason is not None

    def quiet_rows(self, request: Request) -> int:
        if request.frame_end >= 0:
            return 0
        return request.max_outputs - 1 - len(request.outputs)

    def chunk(self, request: Request) -> Payload | None:
        known, sent = self._known(request), request.sent
        if known <= sent:
            return None
        request.sent = known
        request.due = self.lead + self._frames_wanted(known) + self._spec.num_codebooks - 1
        outputs = request.outputs.array(self.lead + sent, self.lead + known + self._spec.num_codebooks - 1)
        codes = np.minimum(undelayed(outputs[:, 1:], self._delays, known - sent), self._spec.codec_size - 1)
        return {"codes": codes} if request.task == 1.0 else {"codes": codes, "speed": request.task}

    def result(self, request: Request) -> Payload:
        return {
            "finish_reason": request.finish_reason,
            "input_tokens": request.prompt_length,
            "output_tokens": self._known(request),
        }

    def _known(self, request: Request) -> int:
        """Frames whose every codebook is among the outputs."""
        known = max(0, len(request.outputs) - self.lead - self._spec.num_codebooks + 1)
        end = request.frame_end
        return known if end < 0 else min(known, max(0, end - self.lead))


class HiggsTask(FramesTask[HiggsSpec]):
    """Higgs Audio v2. Placeholders among the ``prompt_ids`` [length] stand for ``audio_rows`` [rows, codebooks].

    The prompt ends with the id that begins audio. Reference audio is in its delay pattern already. The first output
    row holds begin ids alone; the row that brings an end id in any column ends the audio with the frame before it.
    """

    lead = 1

    def _prompt_rows(self, payload: Payload) -> Tensor:
        spec = self._spec
        text = self._text.prompt({"prompt_ids": payload.get("prompt_ids", [])}).rows
        if int(text[-1, 0]) != spec.audio_bos_id:
            raise InvalidRequest(
                f"the prompt must end with the id that begins audio, {spec.audio_bos_id}, not {int(text[-1, 0])}",
                param="prompt_ids",
            )
        places = (text[:, 0] == spec.placeholder) | (text[:, 0] == spec.delay_placeholder)
        return self._rows(text, places, payload)

    def _ends(self, row: list[int], step: int) -> bool:
        return self._spec.stream_eos_id in row[1:]
