"""Pieces that several threads want decoded, decoded together."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from sgl_omni.models.moss_tts_local.codec import CodecDecoder, CodecStream


@dataclass(slots=True, eq=False)
class _Piece:
    codes: Tensor
    stream: CodecStream
    audio: Tensor | None = None
    error: Exception | None = None


class GatheringDecoder:
    """A codec for many threads: what comes while it is busy is decoded in one go, up to ``max_batch`` pieces.

    Only pieces of one length go together.
    """

    def __init__(self, codec: CodecDecoder, max_batch: int) -> None:
        self._codec = codec
        self._max_batch = max_batch
        self._waiting: list[_Piece] = []
        self._changing = Lock()
        self._busy = Lock()

    def open(self) -> CodecStream:
        with self._busy:
            return self._codec.open()

    def close(self, stream: CodecStream) -> None:
        with self._busy:
            self._codec.close(stream)

    def decode(self, codes: Tensor, stream: CodecStream) -> Tensor:
        """The stream's next codes int64 [frames, codebooks] -> float32 [channels, samples]."""
        piece = _Piece(codes, stream)
        with self._changing:
            self._waiting.append(piece)
        with self._busy:
            if piece.audio is None and piece.error is None:
                self._run(self._with(piece))
        if piece.error is not None:
            raise piece.error
        assert piece.audio is not None
        return piece.audio

    def _with(self, piece: _Piece) -> list[_Piece]:
        """The piece, and those of its length that wait."""
        with self._changing:
            others = [p for p in self._waiting if p is not piece and len(p.codes) == len(piece.codes)]
            batch = [piece, *others[: self._max_batch - 1]]
            self._waiting = [p for p in self._waiting if p not in batch]
        return batch

    def _run(self, batch: list[_Piece]) -> None:
        try:
            audio = self._codec.decode(torch.stack([p.codes for p in batch]), [p.stream for p in batch])
        except Exception as error:  # noqa: BLE001 - it belongs to each of the requests, and is raised in their threads
            for piece in batch:
                piece.error = error
            return
        for piece, samples in zip(batch, audio, strict=True):
            piece.audio = samples
