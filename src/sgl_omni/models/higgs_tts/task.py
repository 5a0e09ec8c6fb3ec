"""The host side of Higgs TTS 3: prompts with reference audio in, frames of codes out."""

from __future__ import annotations

import torch
from torch import Tensor

from sgl_omni.engine.interface import Payload
from sgl_omni.models.higgs_audio_v2.task import FramesTask
from sgl_omni.models.higgs_tts.model import AUDIO
from sgl_omni.models.higgs_tts.spec import HiggsTts3Spec


class HiggsTts3Task(FramesTask[HiggsTts3Spec]):
    """``prompt_ids`` [length] of text, in which -1 stands for the rows of ``audio_rows`` [rows, codebooks].

    Reference audio is in its delay pattern already. Codebook k of frame f lies in output row f + k. The row whose
    first codebook holds the end id, the ``codebooks``-th at the earliest, ends the audio with the frame before it.
    """

    lead = 0

    def _prompt_rows(self, payload: Payload) -> Tensor:
        given = torch.as_tensor(payload.get("prompt_ids", []))
        places = given == AUDIO
        text = self._text.prompt({"prompt_ids": given.masked_fill(places, 0)}).rows
        return self._rows(torch.where(places[:, None], AUDIO, text), places, payload)

    def _ends(self, row: list[int], step: int) -> bool:
        return step >= self._spec.num_codebooks and row[1] == self._spec.stream_eos_id
