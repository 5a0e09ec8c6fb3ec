"""The stage behind preprocessing: recordings of voices to rows of codes, and the prompt with these in it."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import torch
from numpy.typing import NDArray

from sgl_omni.audio.decode import decode_audio
from sgl_omni.models.higgs_audio_v2.codec_encoder import CodecEncoder
from sgl_omni.models.higgs_tts.checkpoint import MAX_REFERENCE_SECONDS
from sgl_omni.runtime.stage import Payload, Request

Codes = NDArray[np.int64]

SHORTEST_SECONDS = 1.0
"""A shorter recording is followed by silence."""

KEPT_VOICES = 512
"""A minute of one takes 100 KB."""


class EncodedVoices:
    """Codes [frames, codebooks] of recordings, each encoded once as long as it is remembered.

    Requests that come with a recording while it is being encoded wait for that.
    """

    def __init__(self, encode: Callable[[bytes | memoryview, str], Codes], most: int = KEPT_VOICES) -> None:
        """``encode`` takes a file's bytes and the name of the field that they came in."""
        self._encode = encode
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, Future[Codes]] = OrderedDict()

    def codes(self, audio: bytes | memoryview, param: str) -> Codes:
        """Raises ``InvalidRequest`` that names ``param`` for what is no audio."""
        key = hashlib.blake2b(audio, digest_size=16).digest()
        with self._lock:
            known = self._found.get(key)
            mine: Future[Codes] = Future()
            if known is None:
                self._found[key] = mine
                while len(self._found) > self._most:
                    self._found.popitem(last=False)
            else:
                self._found.move_to_end(key)
        if known is not None:
            return known.result()
        try:
            mine.set_result(self._encode(audio, param))
        except Exception as error:  # noqa: BLE001 - those that wait for it must learn of it too
            with self._lock:
                self._found.pop(key, None)
            mine.set_exception(error)
        return mine.result()


class PromptBuilder:
    """``(payload, request) -> payload``: ``prompt_ids`` int64 [length] and ``audio_rows`` int64 [rows, codebooks]."""

    def __init__(
        self, voices: EncodedVoices, rows_of: Callable[[Codes], Codes], places: Callable[[int], Codes]
    ) -> None:
        """``rows_of``: a recording's codes as the model reads them, delayed; ``places``: the ids that stand for so
        many rows."""
        self._voices = voices
        self._rows_of = rows_of
        self._places = places

    def __call__(self, payload: Payload, request: Request) -> Payload:
        pieces, references = payload.pop("pieces"), payload.pop("references")
        rows = [
            self._rows_of(self._voices.codes(audio, f"references[{index}].audio"))
            for index, audio in enumerate(references)
        ]
        ids = [np.asarray(pieces[0], np.int64)]
        for piece, each in zip(pieces[1:], rows, strict=True):
            ids += [self._places(len(each)), np.asarray(piece, np.int64)]
        payload["prompt_ids"] = np.concatenate(ids)
        payload["audio_rows"] = np.concatenate(rows) if rows else None
        return payload


def encoding(encoder: CodecEncoder, num_threads: int = 1) -> Callable[[bytes | memoryview, str], Codes]:
    """What ``EncodedVoices`` asks: a file's bytes to codes. On a CPU with so many threads."""
    spec = encoder.spec
    shortest = round(SHORTEST_SECONDS * spec.sample_rate)

    def encode(audio: bytes | memoryview, param: str) -> Codes:
        samples = decode_audio(audio, spec.sample_rate, param=param, max_seconds=MAX_REFERENCE_SECONDS)
        samples = np.pad(samples, (0, max(0, shortest - len(samples))))
        if encoder.device.type == "cpu":  # OpenMP keeps the count per thread
            torch.set_num_threads(num_threads)
        codes: Codes = encoder.encode(torch.from_numpy(samples).to(encoder.device)).cpu().numpy()
        return codes

    return encode


def delayed(codes: Codes, begin: int, end: int) -> Codes:
    """Codes [frames, codebooks] in the delay pattern: column k is k rows late, between ids of begin and end."""
    frames, books = codes.shape
    rows = np.full((frames + books - 1, books), end, np.int64)
    for k in range(books):
        rows[:k, k] = begin
        rows[k : k + frames, k] = codes[:, k]
    return rows


def framed(codes: Codes, begin: int, end: int) -> Codes:
    """Codes with a frame of begin ids before and one of end ids behind."""
    edge = np.ones((1, codes.shape[1]), np.int64)
    return np.concatenate([edge * begin, codes, edge * end])


def v2_places(num_codebooks: int, placeholder: int, delay_placeholder: int) -> Callable[[int], Codes]:
    """Higgs Audio v2 tells the rows that complete the last frames from those before."""
    late = num_codebooks - 1
    return lambda rows: np.asarray([placeholder] * (rows - late) + [delay_placeholder] * late, np.int64)


def uniform_places(id: int) -> Callable[[int], Codes]:
    return lambda rows: np.full(rows, id, np.int64)
