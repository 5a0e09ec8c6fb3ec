"""The entry stage: a conversation to ids, positions, pixel patches and mel frames, on the host. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sgl_omni.audio.decode import decode_audio
from sgl_omni.errors import InvalidRequest
from sgl_omni.media.images import ImageFacts, decode_image, image_facts
from sgl_omni.models.folder import find_folder
from sgl_omni.models.qwen3_omni.conversation import Conversation, Medium
from sgl_omni.models.qwen3_omni.patches import image_patches, video_patches
from sgl_omni.models.qwen3_omni.positions import Grid, audio_tokens, three_axes, token_count
from sgl_omni.models.qwen3_omni.prompt_spec import PromptSpec
from sgl_omni.models.qwen3_omni.turns import OWN_ROWS, rows_of_users
from sgl_omni.runtime.stage import Payload, Request
from sgl_omni.text.tokenizer import TextTokenizer

_THINKER_OPTIONS = ("temperature", "top_k", "top_p", "repetition_penalty", "seed", "max_new_tokens", "ignore_eos")


@dataclass(slots=True)
class EncoderInput:
    """What the encoders are given: patches and grids of what is seen, mel frames of what is heard.

    ``counts``: rows of the prompt that each medium takes, all kinds in order; ``digests``: what it is, in 64 bits.
    """

    patches: list[NDArray[np.uint8]] = field(default_factory=list[NDArray[np.uint8]])
    grids: list[Grid] = field(default_factory=list[Grid])
    mels: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])
    counts: list[int] = field(default_factory=list[int])
    digests: list[int] = field(default_factory=list[int])

    def note(self, count: int, values: NDArray[Any], *facts: object) -> None:
        digest = hashlib.blake2b(repr((values.shape, facts)).encode(), digest_size=8)
        digest.update(np.ascontiguousarray(values).data)
        self.counts.append(count)
        self.digests.append(int.from_bytes(digest.digest(), "little"))

    @property
    def tags(self) -> NDArray[np.int64]:
        """One for each row of the prompt that is a medium's, equal where the same row of the same medium is."""
        parts = [
            np.uint64(digest) + np.arange(count, dtype=np.uint64)
            for digest, count in zip(self.digests, self.counts, strict=True)
        ]
        return np.concatenate(parts).view(np.int64)


class Preprocessor:
    """``__call__`` is the stage's function: the payload of a ``ChatTask`` to what encoders and thinker take.

    ``prompt_ids`` int64 [length], ``positions`` int64 [3, length] where there are pictures, the thinker's options and
    ``stop``; ``pixels`` uint8 [patches, values] and ``grids`` int64 [pictures, 3], whose tokens stand at ``vision_at``;
    ``mels`` float32 [bins, frames] and ``mel_lengths`` int64 [recordings], at ``audio_at``; ``inserted_tags`` of all
    these places in order; and ``speech`` for the talker, where speech is wanted.
    """

    def __init__(self, model_path: str, *, max_audio_seconds: float, max_frames: int, max_pixels: int) -> None:
        """Raises ``InvalidRequest`` or ``StartupError`` that names what the folder lacks."""
        from transformers import WhisperFeatureExtractor

        folder = find_folder(model_path)
        self._spec = PromptSpec.load(model_path)
        self._tokenizer = TextTokenizer.load(folder)
        self._tokenizer.check_chat()
        self._mel = WhisperFeatureExtractor.from_pretrained(folder)
        self._max_audio_seconds = max_audio_seconds
        self._max_frames = max_frames
        self._max_pixels = max_pixels

    def __call__(self, payload: Payload, request: Request) -> Payload:
        if "messages" not in payload:
            raise InvalidRequest("this model takes messages, not a prompt", "prompt")
        conversation = Conversation.parse(payload["messages"], payload.get("media") or [])
        template = payload.get("template") or {}
        ids = self._tokenizer.encode(self._tokenizer.chat(conversation.messages, **template))
        self._check_pictures(conversation)
        media = self._media(conversation)
        prompt = self._expanded(ids, conversation, media.counts)
        made: Payload = {"prompt_ids": prompt, **self._options(payload)}
        if media.counts:
            made["inserted_tags"] = media.tags
        if media.patches:
            made["positions"] = three_axes(prompt, media.grids, self._spec, self._spec.positions_per_second)
            made["pixels"] = np.concatenate(media.patches)
            made["grids"] = np.asarray(media.grids, dtype=np.int64)
            made["vision_at"] = np.flatnonzero((prompt == self._spec.image_id) | (prompt == self._spec.video_id))
        if media.mels:
            made["mels"] = np.concatenate(media.mels, 1)
            made["mel_lengths"] = np.asarray([mel.shape[1] for mel in media.mels], dtype=np.int64)
            made["audio_at"] = np.flatnonzero(prompt == self._spec.audio_id)
        if _is_spoken(payload):
            made["speech"] = self._speech(payload, prompt, media.grids)
        return made

    def _media(self, conversation: Conversation) -> EncoderInput:
        """Stops at the first medium for which the prompt has no room."""
        made = EncoderInput()
        for medium in conversation.media:
            if medium.kind == "audio":
                mels = self._mels(medium)
                made.mels.append(mels)
                made.note(audio_tokens(mels.shape[1], self._spec.audio_window), mels)
            else:
                patches, grid = self._pixels(medium)
                made.patches.append(patches)
                made.grids.append(grid)
                made.note(token_count(grid, self._spec.vision.merge), patches, medium.kind, grid)
            self._check_room(sum(made.counts), medium.param)
        return made

    def _check_pictures(self, conversation: Conversation) -> None:
        """Looks at the headers of all pictures and frames before the first is decoded."""
        total = 0
        for medium in conversation.media:
            if medium.kind == "audio":
                continue
            if len(medium.files) > self._max_frames:
                raise InvalidRequest(
                    f"a video of {len(medium.files)} frames; the limit is {self._max_frames}", medium.param
                )
            for file, param in zip(medium.files, medium.params, strict=True):
                total += _facts(file, medium.kind, param).pixels
                if total > self._max_pixels:
                    raise InvalidRequest(
                        f"the request's pictures and frames have {total} pixels up to this one; the limit is "
                        f"{self._max_pixels} in all",
                        param,
                    )

    def _pixels(self, medium: Medium) -> tuple[NDArray[np.uint8], Grid]:
        pairs = zip(medium.files, medium.params, strict=True)
        images = (decode_image(file, param=param) for file, param in pairs)
        if medium.kind == "image":
            return image_patches(next(images), self._spec.vision, medium.param)
        return video_patches(images, self._spec.vision, medium.param)

    def _mels(self, medium: Medium) -> NDArray[np.float32]:
        """float32 [bins, frames] of one recording; each by itself, so that none depends on another's length."""
        rate = int(self._mel.sampling_rate)
        samples = decode_audio(medium.files[0], rate, param=medium.param, max_seconds=self._max_audio_seconds)
        if len(samples) < self._mel.n_fft:
            raise InvalidRequest(f"a recording of {len(samples) / rate:.3f} s is too short", medium.param)
        made = self._mel(samples, sampling_rate=rate, padding=True, truncation=False, return_attention_mask=True)
        known = np.asarray(made["attention_mask"][0], dtype=bool)
        mels: NDArray[np.float32] = np.asarray(made["input_features"][0], dtype=np.float32)[:, known]
        return mels

    def _expanded(self, ids: list[int], conversation: Conversation, counts: Sequence[int]) -> NDArray[np.int64]:
        """The prompt with as many rows for each medium as its encoder makes of it."""
        spec = self._spec
        kinds = {spec.image_id: "image", spec.video_id: "video", spec.audio_id: "audio"}
        found = [kinds[token] for token in ids if token in kinds]
        if found != [medium.kind for medium in conversation.media]:
            raise InvalidRequest(
                f"the prompt has places for {found}, and the messages hold {[m.kind for m in conversation.media]}; a "
                "text must not spell a medium's place",
                "messages",
            )
        remaining = iter(counts)
        repeats = [next(remaining) if token in kinds else 1 for token in ids]
        self._check_room(sum(repeats), "messages")
        return np.repeat(np.asarray(ids, dtype=np.int64), repeats)

    def _check_room(self, tokens: int, param: str) -> None:
        if tokens >= self._spec.max_positions:
            raise InvalidRequest(
                f"the messages make {tokens} tokens; the model takes less than {self._spec.max_positions}", param
            )

    def _options(self, payload: Payload) -> Payload:
        """The thinker's: the caller's, else the checkpoint's. The talker reads along, whoever else does."""
        given = {key: payload[key] for key in _THINKER_OPTIONS if payload.get(key) is not None}
        return {
            **self._spec.thinker_defaults,
            **given,
            "stop": list(payload.get("stop") or []),
            "stream": payload.get("stream") is not False or _is_spoken(payload),
            "prompt_field": "messages",
        }

    def _speech(self, payload: Payload, prompt: NDArray[np.int64], grids: list[Grid]) -> Payload:
        """What the talker is told: whom to speak as, where its rows stand, and how to sample.

        Its own options are the checkpoint's, because a caller's are about text; a temperature of 0 makes both greedy.
        """
        spec = self._spec
        voice = payload.get("voice") or spec.default_voice
        if voice.lower() not in {name.lower() for name in spec.voices}:
            raise InvalidRequest(f"voice {voice!r} is not one of {', '.join(spec.voices)}", "voice")
        options = {key: value for key, value in spec.talker_defaults.items() if key != "max_new_tokens"}
        options["max_frames"] = spec.talker_defaults["max_new_tokens"]
        if payload.get("temperature") == 0:
            options["temperature"] = 0.0
        if payload.get("seed") is not None:
            options["seed"] = payload["seed"]
        heard = prompt[rows_of_users(prompt.tolist(), spec.start_id, spec.user_id)]
        rows = np.concatenate([heard, np.full(OWN_ROWS, spec.pad_id, dtype=np.int64)])
        positions = three_axes(rows, grids, spec, spec.talker_positions_per_second)
        speech: Payload = {"prompt_ids": prompt, "voice": voice, "options": options}
        return speech if positions is None else {**speech, "positions": positions}


def _facts(file: bytes | memoryview, kind: str, param: str) -> ImageFacts:
    """Raises ``InvalidRequest`` for a frame that is no single picture, with what to send in its place."""
    if kind != "video":
        return image_facts(file, param=param)
    wanted = 'a video is taken as its frames, pictures one by one: {"type": "video", "video": [URL, ...]}'
    try:
        facts = image_facts(file, param=param)
    except InvalidRequest as error:
        raise InvalidRequest(f"{error}; {wanted}", param) from error
    if facts.is_animated:
        raise InvalidRequest(f"the file is an animation; {wanted}", param)
    return facts


def _is_spoken(payload: Payload) -> bool:
    return "audio" in (payload.get("modalities") or ())
