"""From the thinker to the talker: hidden states as they come, to a prompt and to rows that are added to outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sgl_omni.engine.interface import Payload
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.qwen3_omni.talker import TalkerModel
from sgl_omni.models.qwen3_omni.turns import HEADER, rows_of_users


class TalkerFeed:
    """One request between thinker and talker.

    The thinker's rows are [n, 2, thinker's hidden]: the input of layer 0 and that of the ``accept_layer``. The talker
    hears the users' turns, text by the first and media by the second, then its voice and the answer's first token;
    every further token is added to one output, and the mark of the end after the last.
    """

    def __init__(self, model: TalkerModel, prompt_ids: Sequence[int], speaker: str, positions: Any = None) -> None:
        """``positions`` int64 [3, rows]: where the talker's prompt has rows of pictures; else they count rows.

        Raises ``InvalidRequest`` for an unknown voice, or a prompt that does not end with a header.
        """
        spec = model.spec
        if speaker.lower() not in spec.speakers:
            raise InvalidRequest(f"voice {speaker!r} is not one of {', '.join(sorted(spec.speakers))}", param="voice")
        if len(prompt_ids) < HEADER or [*prompt_ids[-HEADER:-1]] != [spec.start_id, spec.assistant_id]:
            raise InvalidRequest("the prompt must end with the header of the assistant's turn", param="prompt_ids")
        self._model = model
        self._speaker = spec.speakers[speaker.lower()]
        self._heard = torch.tensor(rows_of_users(prompt_ids, spec.start_id, spec.user_id), dtype=torch.int64)
        self._is_media = torch.tensor([prompt_ids[i] in spec.media_ids for i in self._heard.tolist()], dtype=torch.bool)
        self._positions = {} if positions is None else {"positions": positions}
        self._length = len(prompt_ids)
        self._rows: list[Tensor] = []
        self._seen = 0
        self._begun = False

    @torch.inference_mode()
    def take(self, rows: Tensor) -> Payload | None:
        """More of the thinker's rows; what the talker's engine is given for them, if it is time for that.

        The first payload opens the request and the others extend it.
        """
        rows = rows.to(self._model.head)
        self._seen += len(rows)
        if self._begun:
            return {"added_embeddings": self._model.text_projection(rows[:, 0])} if len(rows) else None
        self._rows.append(rows)
        if self._seen <= self._length:
            return None
        self._begun = True
        known = torch.cat(self._rows)
        self._rows.clear()
        return {
            "prompt_embeddings": self._prompt(known[: self._length + 1]),
            "added_embeddings": self._model.text_projection(known[self._length + 1 :, 0]),
            "input_open": True,
            **self._positions,
        }

    def end(self) -> Payload | None:
        """The thinker has ended, and with this the input; none where it never said anything."""
        return {"added_embeddings": self._model.marks()[1:2]} if self._begun else None

    def _prompt(self, known: Tensor) -> Tensor:
        """[length, hidden] of the thinker's prompt and the answer's first token, [rows, 2, thinker's hidden]."""
        model, spec = self._model, self._model.spec
        begin, _, padding = model.marks()
        heard = known[self._heard.to(known.device)]
        media = self._is_media.to(known.device)[:, None]
        users = torch.where(media, model.hidden_projection(heard[:, 1]), model.text_projection(heard[:, 0]))
        own = model.text_projection(known[self._length - HEADER :, 0])
        text = torch.cat([padding.expand(4, -1), begin[None], own[HEADER:]])
        ids = torch.tensor([*spec.think_ids, self._speaker, spec.pad_id, spec.bos_id], device=known.device)
        return torch.cat([users, own[:HEADER], text + model.codec_embedding[ids]])
