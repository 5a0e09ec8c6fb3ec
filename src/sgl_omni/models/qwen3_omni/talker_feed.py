"""From the thinker to the talker: hidden states as they come, to a prompt and to rows that are added to outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sgl_omni.engine.interface import Payload
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.qwen3_omni.spec import TalkerSpec
from sgl_omni.models.qwen3_omni.talker import TalkerModel
from sgl_omni.models.qwen3_omni.turns import HEADER, rows_of_users


class TalkerFeed:
    """One request between thinker and talker; all that it keeps lies in the host's memory.

    The thinker's rows are [n, 2, thinker's hidden]: the input of layer 0 and that of the ``accept_layer``. The talker
    hears the users' turns, text by the first and media by the second, then its voice and the answer's first token;
    every further token is added to one output, and the mark of the end after the last.
    """

    def __init__(self, spec: TalkerSpec, prompt_ids: Sequence[int], speaker: str, positions: Any = None) -> None:
        """``positions`` int64 [3, rows]: where the talker's prompt has rows of pictures; else they count rows.

        Raises ``InvalidRequest`` for an unknown voice, or a prompt that does not end with a header.
        """
        if speaker.lower() not in spec.speakers:
            raise InvalidRequest(f"voice {speaker!r} is not one of {', '.join(sorted(spec.speakers))}", param="voice")
        if len(prompt_ids) < HEADER or [*prompt_ids[-HEADER:-1]] != [spec.start_id, spec.assistant_id]:
            raise InvalidRequest("the prompt must end with the header of the assistant's turn", param="prompt_ids")
        self.speaker = spec.speakers[speaker.lower()]
        self.begun = False
        self.ended = False
        self._width = spec.thinker_hidden_size
        self._heard = torch.tensor(rows_of_users(prompt_ids, spec.start_id, spec.user_id), dtype=torch.int64)
        self._is_media = torch.tensor([prompt_ids[i] in spec.media_ids for i in self._heard.tolist()], dtype=torch.bool)
        self._positions = {} if positions is None else {"positions": positions}
        self._length = len(prompt_ids)
        self._rows: list[Tensor] = []
        self._seen = 0

    @property
    def is_due(self) -> bool:
        """Whether there is something to give to the talker's engine."""
        return self._seen > self._length and (bool(self._rows) or self.ended)

    def take(self, rows: Tensor) -> None:
        """More of the thinker's rows. Raises ``InvalidRequest`` for those of another shape."""
        if rows.dim() != 3 or rows.shape[1:] != (2, self._width) or not rows.is_floating_point():
            raise InvalidRequest(
                f"hidden_states must be floats [n, 2, {self._width}], not {rows.dtype} {[*rows.shape]}",
                param="hidden_states",
            )
        if len(rows):
            self._rows.append(rows.cpu())
            self._seen += len(rows)

    def end(self) -> None:
        """The thinker has ended, and with this the input."""
        self.ended = True

    def heard(self) -> tuple[Tensor, Tensor]:
        """Of what is due: the rows [n, thinker's hidden] to be projected as text, and those [m, ...] of media."""
        known = torch.cat(self._rows) if self._rows else torch.empty(0, 2, self._width)
        self._rows.clear()
        if self.begun:
            return known[:, 0], known[:0, 1]
        users = known[self._heard]
        return torch.cat([users[~self._is_media, 0], known[self._length - HEADER :, 0]]), users[self._is_media, 1]

    def piece(self, text: Tensor, media: Tensor, frame: Frame) -> Payload:
        """What the talker's engine is given for those rows, now projected: the first opens the request."""
        prompt: Payload = {}
        if not self.begun:
            users = text.new_empty(len(self._heard), text.shape[1])
            spoken = len(users) - len(media)
            users[~self._is_media], users[self._is_media] = text[:spoken], media
            header, first, text = text[spoken:].tensor_split([HEADER, HEADER + 1])
            rows = torch.cat([users, header, frame.around(first[0], self.speaker)])
            prompt = {"prompt_embeddings": rows, "input_open": True, **self._positions}
        return {**prompt, "added_embeddings": torch.cat([text, frame.end[None]]) if self.ended else text}


class Frame:
    """What stands around the text that is spoken, in the host's memory."""

    def __init__(self, model: TalkerModel) -> None:
        spec = model.spec
        self._begin, self.end, self._padding = model.marks().cpu()
        ids = [*spec.think_ids, spec.pad_id, spec.bos_id, *spec.speakers.values()]
        rows = model.codec_embedding[torch.tensor(ids, device=model.device)].cpu()
        self._codec = dict(zip(ids, rows, strict=True))
        self._spec = spec

    def around(self, first: Tensor, speaker: int) -> Tensor:
        """The last rows of a prompt, [6, hidden]: padding, the begin and the first token, with codes along."""
        text = [self._padding] * 4 + [self._begin, first]
        ids = [*self._spec.think_ids, speaker, self._spec.pad_id, self._spec.bos_id]
        return torch.stack(text) + torch.stack([self._codec[i] for i in ids])


class Feeds:
    """Brings what the feeds have heard to the talker's width, for all that are due at once.

    On a GPU this runs beside the engine's own stream, where it would wait for the step that is under way.
    """

    @torch.inference_mode()
    def __init__(self, model: TalkerModel) -> None:
        self._model = model
        self._frame = Frame(model)
        self._beside = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None

    @torch.inference_mode()
    def pieces(self, feeds: Sequence[TalkerFeed]) -> list[Payload]:
        """One for each of the feeds, which are due and have begun with it; in the host's memory."""
        model, found = self._model, []
        heard = [feed.heard() for feed in feeds]
        texts, media = ([rows[i] for rows in heard] for i in (0, 1))
        with self._aside():
            spoken = _projected(texts, model.text_projection, model.head)
            shown = _projected(media, model.hidden_projection, model.head)
        for feed, text, pictures in zip(feeds, spoken, shown, strict=True):
            found.append(feed.piece(text, pictures, self._frame))
            feed.begun = True
        return found

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._beside is None else torch.cuda.stream(self._beside)


def _projected(parts: Sequence[Tensor], projection: torch.nn.Module, like: Tensor) -> Sequence[Tensor]:
    """All parts by one call on the device of ``like``, and each by itself in the host's memory again."""
    rows = torch.cat([*parts])
    found: Tensor = projection(rows.to(like)).cpu() if len(rows) else rows.new_empty(0, like.shape[1], dtype=like.dtype)
    return found.split([len(part) for part in parts])
