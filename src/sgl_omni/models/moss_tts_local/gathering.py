"""Pieces that several threads want decoded, decoded together."""

from __future__ import annotations

from threading import Lock

from sgl_omni.audio.causal import Codes
from sgl_omni.audio.gathering import Gathering
from sgl_omni.models.moss_tts_local.codec import CodecDecoder, CodecStream, Samples


class GatheringDecoder:
    """A codec for many threads, up to ``max_batch`` pieces at a time, on a CPU only those of one length: there, what
    fills the others up costs as much as they do."""

    def __init__(self, codec: CodecDecoder, max_batch: int) -> None:
        self._codec = codec
        self._places = Lock()
        """Which stream has which slot of the codec's memory."""
        on_cpu = codec.device.type == "cpu"
        self._decode: Gathering[tuple[Codes, CodecStream], Samples] = Gathering(
            self._decode_all, max_batch, lambda piece: len(piece[0]) if on_cpu else 0
        )

    def open(self) -> CodecStream:
        with self._places:
            stream = self._codec.open()
        self._decode.join()
        return stream

    def close(self, stream: CodecStream) -> None:
        self._decode.leave()
        with self._places:
            self._codec.close(stream)

    def decode(self, codes: Codes, stream: CodecStream) -> Samples:
        """The stream's next codes [frames, codebooks] -> float32 [channels, samples]."""
        return self._decode((codes, stream))

    def _decode_all(self, pieces: list[tuple[Codes, CodecStream]]) -> list[Samples]:
        codes, streams = zip(*pieces, strict=True)
        with self._places:
            return self._codec.decode(codes, streams)
