"""What a pipeline serves, as facts the API process can know without loading the model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechTask:
    """The pipeline answers ``/v1/audio/speech``.

    Its entry stage takes ``{"input": str, "voice": str | None, "speed": float}`` and, where the caller gave them,
    ``seed``, ``temperature``, ``top_k``, ``top_p``, ``repetition_penalty``, ``max_new_tokens``, ``instructions``,
    ``language``, and ``references``: a list of ``{"audio": bytes of a file, "text": str | None}``. Its terminal
    stage streams chunks ``{"audio": float32 array [samples] in [-1, 1], "sample_rate": int}``, already at the asked
    speed, and ends with a payload that holds at least ``{"finish_reason": str, "input_tokens": int,
    "output_tokens": int}``.
    """

    voices: tuple[str, ...]
    default_voice: str | None
    """None where the model has no voice of its own: a request then needs a reference, or gets a random voice."""
    sample_rate: int
    max_input_characters: int = 4096
    max_references: int = 0
    """Reference recordings that a request may give; 0 where the model does not clone voices."""
    least_reference_seconds: float = 0.0
    max_reference_seconds: float = 60.0
    needs_reference_text: bool = False
    """Whether a recording is of no use without what is said in it."""
    takes_instructions: bool = False
    languages: tuple[str, ...] = ()
    """What ``language`` may say; empty where the model has no such choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTask:
    """The pipeline answers ``/v1/chat/completions``, and ``/v1/completions`` where ``completes_text``.

    Its entry stage takes ``messages`` (a list of ``{"role": str, "content": [part, ...]}``, a part being
    ``{"type": "text", "text": str}`` or ``{"type": "image" | "audio" | "video", "media": [index, ...], "params": [str,
    ...]}``; a video is its frames, and ``params`` are the places of the files in the caller's request, for errors),
    ``media`` (a list of files as bytes), ``modalities`` (``["text"]`` or ``["text", "audio"]``),
    ``voice``, and where the caller gave them ``temperature``, ``top_p``, ``top_k``, ``repetition_penalty``, ``seed``,
    ``max_new_tokens``, ``stop`` (a list of texts), ``ignore_eos`` and ``template`` (a dict for the chat template). For
    ``/v1/completions`` it takes ``prompt`` (str, or a list of ids) in place of ``messages``. ``stream`` is false where
    nobody reads the text before its end, so that ``text_output`` need not stream any.

    The stage ``text_output`` streams chunks ``{"text": str}`` and ends with ``{"text", "finish_reason": "stop" |
    "length", "input_tokens", "output_tokens"}``; ``audio_output`` is as a speech task's terminal stage.
    """

    text_output: str
    audio_output: str | None = None
    inputs: tuple[str, ...] = ("text",)
    """Kinds of content parts: text, image, audio, video."""
    voices: tuple[str, ...] = ()
    default_voice: str | None = None
    sample_rate: int | None = None
    completes_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionTask:
    """The pipeline answers ``/v1/audio/transcriptions``, and ``/v1/audio/translations`` where ``translates``.

    Its entry stage takes ``{"audio": bytes of a file, "task": "transcribe" | "translate", "timestamps": bool}`` and,
    where the caller gave them, ``language``, ``prompt``, ``temperature``, ``seed``, ``max_new_tokens``. Its terminal
    stage streams chunks ``{"text": str}`` and ends with ``{"text", "language": str | None, "duration": seconds,
    "segments": [{"start", "end", "text", ...}], "finish_reason", "input_tokens", "output_tokens"}``: counts of what the
    caller gave and of the text, without what the model is told besides; ``input_audio_tokens`` of the input are audio.
    """

    languages: tuple[str, ...] = ()
    """Codes as in ISO 639-1 that ``language`` may say; empty where the model takes none."""
    translates: bool = False
    timestamps: bool = False
    max_seconds: float = 4 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tasks:
    """All that a pipeline serves. A pipeline without a task has no route for it."""

    speech: SpeechTask | None = None
    chat: ChatTask | None = None
    transcription: TranscriptionTask | None = None

    @property
    def takes_media(self) -> bool:
        """Whether bodies may carry recordings or pictures, and are large then."""
        chat = self.chat is not None and len(self.chat.inputs) > 1
        cloning = self.speech is not None and self.speech.max_references > 0
        return chat or cloning or self.transcription is not None
