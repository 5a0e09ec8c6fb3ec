"""Pieces that several threads want decoded, decoded together."""

from __future__ import annotations

from threading import Lock

import torch
from torch import Tensor

from sgl_omni.audio.gathering import Gathering
from sgl_omni.models.moss_tts_local.codec import CodecDecoder, CodecStream


class GatheringDecoder:
    """A codec for many threads, up to ``max_batch`` pieces at a time; only pieces of one length go together."""

    def __init__(self, codec: CodecDecoder, max_batch: int) -> None:
        self._codec = codec
        self._rows = Lock()
        """Streams lie in rows of tensors, which grow."""
        self._decode: Gathering[tuple[Tensor, CodecStream], Tensor] = Gathering(
            self._decode_all, max_batch, lambda piece: len(piece[0])
        )

    def open(self) -> CodecStream:
        with self._rows:
            stream = self._codec.open()
        self._decode.join()
        return stream

    def close(self, stream: CodecStream) -> None:
        self._decode.leave()
        with self._rows:
            self._codec.close(stream)

    def decode(self, codes: Tensor, stream: CodecStream) -> Tensor:
        """The stream's next codes int64 [frames, codebooks] -> float32 [channels, samples]."""
        return self._decode((codes, stream))

    def _decode_all(self, pieces: list[tuple[Tensor, CodecStream]]) -> list[Tensor]:
        codes, streams = zip(*pieces, strict=True)
        with self._rows:
            return [*self._codec.decode(torch.stack(codes), streams)]
