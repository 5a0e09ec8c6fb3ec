"""Requests of every kind that the families serve, and what their answers were: audio, text, first of each, errors."""

from __future__ import annotations

import base64
import io
import json
import time
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np

SPEECH, CHAT, TRANSCRIPTION = "/v1/audio/speech", "/v1/chat/completions", "/v1/audio/transcriptions"
SENTENCE = "The ferry leaves at nine, and those who miss it walk along the shore for an hour or so."
_RATE = 16_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request: a JSON ``body``, or form ``fields`` with a recording."""

    kind: str
    route: str
    body: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    file: bytes = b""

    def nth(self, number: int) -> Ask:
        """The same with a text and a seed of its own, so that the engine knows nothing of its prompt."""
        if not self.body:
            return self
        body = {**self.body, "seed": number}
        if "input" in body:
            body["input"] = f"{number}. {body['input']}"
        else:
            body["messages"] = [{"role": "system", "content": f"Request {number}."}, *body["messages"]]
        return replace(self, body=body)


@dataclass(slots=True, kw_only=True)
class Answer:
    """Times in seconds from the request on; ``audio_s`` of audio and ``characters`` of text came."""

    kind: str
    seconds: float = 0.0
    first_audio_s: float | None = None
    first_text_s: float | None = None
    audio_s: float = 0.0
    characters: int = 0
    tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much each request gets: codec ``frames``, text ``tokens``, ``recording_s`` to transcribe, ``side`` of a
    picture in pixels."""

    frames: int
    tokens: int
    recording_s: float
    side: int


def asks_of(family: str, size: Size) -> dict[str, Ask]:
    """One request of each kind that a family serves, by its name."""
    if family in ("whisper", "qwen3_asr"):
        return {ask.kind: ask for ask in _transcriptions(size)}
    if family == "text_llm":
        return {ask.kind: ask for ask in _chats(size, omni=False)}
    if family == "qwen3_omni":
        return {ask.kind: ask for ask in _chats(size, omni=True)}
    found = {ask.kind: ask for ask in _speeches(size)}
    if family == "qwen3_tts":  # the kind of checkpoint with voices of its own clones none
        del found["reference"]
    return found


def _speeches(size: Size) -> list[Ask]:
    body = {"model": "smoke", "input": SENTENCE, "response_format": "pcm", "max_new_tokens": size.frames, "seed": 1}
    reference = {"audio": _data_url("audio/wav", recording(3.0)), "text": "What is said in this recording."}
    return [
        Ask(kind="plain", route=SPEECH, body={**body, "stream": False}),
        Ask(kind="streamed", route=SPEECH, body={**body, "stream": True}),
        Ask(kind="reference", route=SPEECH, body={**body, "stream": True, "references": [reference]}),
    ]


def _chats(size: Size, *, omni: bool) -> list[Ask]:
    def ask(kind: str, *parts: dict[str, Any], **more: Any) -> Ask:
        content: Any = [{"type": "text", "text": SENTENCE}, *parts] if parts else SENTENCE
        body = {"model": "smoke", "messages": [{"role": "user", "content": content}], "max_tokens": size.tokens}
        body |= {"seed": 1, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        return Ask(kind=kind, route=CHAT, body=body | more)

    found = [ask("text")]
    if omni:
        sound = base64.b64encode(recording(3.0)).decode()
        found += [
            ask("picture", {"type": "image_url", "image_url": {"url": _data_url("image/png", picture(size.side))}}),
            ask("sound", {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}),
            ask("spoken", modalities=["text", "audio"], audio={"voice": "ethan", "format": "pcm16"}),
        ]
    return found


def _transcriptions(size: Size) -> list[Ask]:
    fields = {"model": "smoke", "language": "en", "max_new_tokens": str(size.tokens)}
    file = recording(size.recording_s)
    unlimited = {key: value for key, value in fields.items() if key != "max_new_tokens"}
    return [
        Ask(kind="transcription", route=TRANSCRIPTION, fields=fields, file=file),
        Ask(kind="transcription streamed", route=TRANSCRIPTION, fields={**fields, "stream": "true"}, file=file),
        # A random model says no end: every window gets all the tokens that it has room for.
        Ask(kind="transcription to the last token", route=TRANSCRIPTION, fields=unlimited, file=file),
    ]


async def send(client: httpx.AsyncClient, ask: Ask) -> Answer:
    """The answer, read to its end. Whatever goes wrong is its ``error``."""
    answer, begun = Answer(kind=ask.kind), time.perf_counter()
    form: dict[str, Any] = {"data": ask.fields, "files": {"file": ("sound.wav", ask.file)}} if ask.file else {}
    form = form or {"json": ask.body}
    try:
        async with client.stream("POST", ask.route, **form) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                answer.error = f"status {response.status_code}: {text[:400]}"
            elif response.headers["content-type"].startswith("text/event-stream"):
                rate = int(response.headers.get("x-sample-rate", 24_000))
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        _event(answer, json.loads(line[6:]), rate, time.perf_counter() - begun)
            elif ask.route == SPEECH:
                rate = int(response.headers["x-sample-rate"])
                async for data in response.aiter_bytes():
                    answer.first_audio_s = answer.first_audio_s or time.perf_counter() - begun
                    answer.audio_s += len(data) / 2 / rate
            else:
                answer.characters = len(json.loads(await response.aread())["text"])
    except (httpx.HTTPError, ValueError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - begun
    if answer.error is None and not answer.audio_s and not answer.characters:
        answer.error = "an answer without audio or text"
    return answer


def _event(answer: Answer, event: dict[str, Any], rate: int, at: float) -> None:
    if "error" in event:
        answer.error = str(event["error"])[:400]
        return
    said, sound = str(event.get("delta") or ""), ""
    for choice in event.get("choices", ()):
        delta = choice["delta"]
        heard = delta.get("audio") or {}
        said = delta.get("content") or heard.get("transcript") or ""
        sound = heard.get("data") or ""
    if said:
        answer.first_text_s = answer.first_text_s or at
        answer.characters += len(said)
    if sound:
        answer.first_audio_s = answer.first_audio_s or at
        answer.audio_s += len(base64.b64decode(sound)) / 2 / rate
    if usage := event.get("usage"):
        answer.tokens = int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)


def recording(seconds: float) -> bytes:
    """A WAV file, 16 kHz, 16 bits: a voice-like buzz with pauses, and some noise."""
    import soundfile

    at = np.arange(round(seconds * _RATE)) / _RATE
    noise = np.random.default_rng(5).standard_normal(len(at))
    loud = np.clip(np.sin(2 * np.pi * 0.4 * at) + 0.6, 0, 1)
    samples = loud * (0.3 * np.sign(np.sin(2 * np.pi * (140 + 30 * np.sin(3 * at)) * at)) + 0.02 * noise)
    file = io.BytesIO()
    soundfile.write(file, samples.astype(np.float32), _RATE, format="WAV", subtype="PCM_16")
    return file.getvalue()


def picture(side: int) -> bytes:
    """A PNG of that many pixels squared."""
    from PIL import Image

    pixels = np.random.default_rng(5).integers(0, 255, (side // 16, side // 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((side, side)).save(file, "PNG")
    return file.getvalue()


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
