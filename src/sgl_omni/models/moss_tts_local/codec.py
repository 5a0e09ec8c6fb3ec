"""MOSS-Audio-Tokenizer: samples to frames of codes, and frames to samples."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from sgl_omni.audio.causal import Codes, filled_up
from sgl_omni.audio.features import check_features
from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.decoder import materialise
from sgl_omni.engine.decoder_graphs import DecoderGraphs
from sgl_omni.engine.graphs import can_capture, decode_buckets
from sgl_omni.engine.layers import parameter
from sgl_omni.errors import StartupError
from sgl_omni.models.defaults import CONTEXT_BYTES
from sgl_omni.models.moss_tts_local.codec_spec import CodecSpec, QuantizerSpec
from sgl_omni.models.moss_tts_local.codec_stack import CodecStack, Pieces
from sgl_omni.models.moss_tts_local.stream_memory import Place

log = logging.getLogger("sgl_omni.models")

Samples = NDArray[np.float32]

_ENCODED_FRAMES = 25
"""Frames that are encoded together, which bounds the memory that attention takes."""


class _Projection(nn.Module):
    """A linear layer whose matrix has the direction of ``direction`` and the lengths ``length`` of its rows."""

    def __init__(self, in_size: int, out_size: int) -> None:
        super().__init__()
        self.length = parameter(out_size, 1, 1)
        self.direction = parameter(out_size, in_size, 1)
        self.bias = parameter(out_size)

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.direction[..., 0] * (self.length[..., 0] / self.direction[..., 0].norm(dim=1, keepdim=True))
        return F.linear(x, matrix, self.bias)

    def slots(self, name: str) -> Iterator[Slot]:
        yield Slot(f"{name}.parametrizations.weight.original0", self.length, tuple(self.length.shape))
        yield Slot(f"{name}.parametrizations.weight.original1", self.direction, tuple(self.direction.shape))
        yield Slot(f"{name}.bias", self.bias, tuple(self.bias.shape))


def _projection(in_size: int, out_size: int) -> _Projection | None:
    return None if in_size == out_size else _Projection(in_size, out_size)


class _Codebook(nn.Module):
    def __init__(self, spec: QuantizerSpec) -> None:
        super().__init__()
        self._normalised = spec.normalised
        self.into = _projection(spec.size, spec.codebook_dim)
        self.out_of = _projection(spec.codebook_dim, spec.size)
        self.vectors = parameter(spec.codebook_size, spec.codebook_dim)

    def table(self) -> Tensor:
        """What each code stands for, [codebook_size, size]."""
        return self.vectors if self.out_of is None else self.out_of(self.vectors)

    def nearest(self, x: Tensor) -> Tensor:
        """x [n, size] -> codes int64 [n]."""
        x = x if self.into is None else self.into(x)
        vectors: Tensor = self.vectors
        if self._normalised:
            x, vectors = F.normalize(x), F.normalize(vectors)
        distances = x.pow(2).sum(1, keepdim=True) - 2 * x @ vectors.T + vectors.pow(2).sum(1)
        return distances.argmin(1)

    def slots(self, name: str) -> Iterator[Slot]:
        yield Slot(f"{name}.codebook.weight", self.vectors, tuple(self.vectors.shape))
        for key, part in (("in_proj", self.into), ("out_proj", self.out_of)):
            if part is not None:
                yield from part.slots(f"{name}.{key}")


class Quantizer(nn.Module):
    """The first ``num_codebooks`` of the codec's, each of which says what those before it left; all in float32."""

    def __init__(self, spec: QuantizerSpec, num_codebooks: int) -> None:
        super().__init__()
        if not 1 <= num_codebooks <= spec.num_codebooks:
            raise StartupError(
                f"the audio tokenizer has {spec.num_codebooks} codebooks; the model needs {num_codebooks}"
            )
        self.into = _projection(spec.in_size, spec.size)
        self.out_of = _projection(spec.size, spec.out_size)
        self.codebooks = nn.ModuleList(_Codebook(spec) for _ in range(num_codebooks))

    def tables(self) -> Tensor:
        """[codebooks, codebook_size, size]"""
        return torch.stack([book.table() for book in self._books()])

    def encode(self, x: Tensor) -> Tensor:
        """x [frames, in_size] -> codes int64 [frames, codebooks]."""
        left = x if self.into is None else self.into(x)
        codes = []
        for book in self._books():
            codes.append(book.nearest(left))
            left = left - F.embedding(codes[-1], book.table())
        check_features(left)
        return torch.stack(codes, 1)

    def decode(self, codes: Tensor, tables: Tensor) -> Tensor:
        """codes int64 [..., codebooks] and what ``tables`` returns -> [..., out_size]."""
        books = torch.arange(len(self.codebooks), device=codes.device)
        total = tables[books, codes].sum(-2)
        projected: Tensor = total if self.out_of is None else self.out_of(total)
        return projected

    def slots(self, prefix: str) -> Iterator[Slot]:
        for key, part in (("input_proj", self.into), ("output_proj", self.out_of)):
            if part is not None:
                yield from part.slots(f"{prefix}{key}")
        for i, book in enumerate(self._books()):
            yield from book.slots(f"{prefix}quantizers.{i}")

    def _books(self) -> list[_Codebook]:
        return [book for book in self.codebooks if isinstance(book, _Codebook)]


def _read(
    folder: Path, part: str, num_codebooks: int, device: torch.device | str, dtype: torch.dtype
) -> tuple[CodecSpec, CodecStack, Quantizer]:
    """The quantizer, and the codec's ``encoder`` or ``decoder``."""
    checkpoint = Checkpoint(folder)
    spec = CodecSpec.parse(checkpoint.config())
    with torch.device("meta"):
        stack = (
            CodecStack(spec.encoder, down=True, frame_places=spec.frame_samples * spec.channels)
            if part == "encoder"
            else CodecStack(spec.decoder, down=False, frame_places=1)
        )
        quantizer = Quantizer(spec.quantizer, num_codebooks)

    def read() -> None:
        checkpoint.load(stack.slots(f"{part}."), prefix=f"{part}.")
        checkpoint.load(quantizer.slots("quantizer."), prefix="quantizer.", ignore=["quantizer.quantizers.*"])

    read()  # on the meta device: only a check
    materialise(stack, device, dtype)
    materialise(quantizer, device, torch.float32)
    read()
    return spec, stack.eval(), quantizer.eval()


class CodecEncoder(nn.Module):
    def __init__(self, spec: CodecSpec, stack: CodecStack, quantizer: Quantizer) -> None:
        super().__init__()
        self.spec, self.stack, self.quantizer = spec, stack, quantizer
        self._device, self._dtype = next(stack.parameters()).device, next(stack.parameters()).dtype

    @classmethod
    def load(
        cls,
        folder: Path,
        num_codebooks: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> CodecEncoder:
        return cls(*_read(folder, "encoder", num_codebooks, device, dtype))

    @torch.inference_mode()
    def encode(self, samples: Tensor) -> Tensor:
        """float32 [channels, samples] -> codes int64 [frames, codebooks]; what fills no frame is left out."""
        spec = self.spec
        frames = samples.shape[1] // spec.frame_samples
        flat = samples[:, : frames * spec.frame_samples].T.reshape(-1, 1).to(self._device, self._dtype)
        memory, codes = self.stack.memory(1), []
        slots = memory.slots_of([memory.open()])
        for start in range(0, frames, _ENCODED_FRAMES):
            count = min(_ENCODED_FRAMES, frames - start)
            places = slice(*(at * spec.frame_samples * spec.channels for at in (start, start + count)))
            pieces = Pieces(*torch.tensor([slots, [start], [count]], device=self._device))
            x = self.stack(flat[None, places], memory, pieces)
            codes.append(self.quantizer.encode(x[0].float()))
        return torch.cat(codes).cpu() if codes else torch.zeros(0, len(self.quantizer.codebooks), dtype=torch.int64)


@dataclass(slots=True)
class CodecStream:
    """A recording that is being decoded: where its memory lies, and frames so far."""

    place: Place
    frames: int = 0


class CodecDecoder(nn.Module):
    """Codes to samples, as the next pieces of streams, up to ``slots`` of them at a time; any number may be open."""

    def __init__(self, spec: CodecSpec, stack: CodecStack, quantizer: Quantizer) -> None:
        super().__init__()
        self.spec, self.stack, self.quantizer = spec, stack, quantizer
        with torch.inference_mode():
            self._tables = quantizer.tables()
        self._dtype = next(stack.parameters()).dtype
        self._graphs: list[DecoderGraphs] = []
        """Of pieces of up to so many frames, fewer first."""
        self.make_room(1)

    @classmethod
    def load(
        cls,
        folder: Path,
        num_codebooks: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> CodecDecoder:
        return cls(*_read(folder, "decoder", num_codebooks, device, dtype))

    @property
    def device(self) -> torch.device:
        return self._tables.device

    @torch.inference_mode()
    def make_room(self, slots: int) -> None:
        """For so many streams at a time, before any is open and anything is captured."""
        self._memory = self.stack.memory(slots)

    @torch.inference_mode()
    def open(self) -> CodecStream:
        return CodecStream(self._memory.open())

    def close(self, stream: CodecStream) -> None:
        self._memory.close(stream.place)

    @torch.inference_mode()
    def decode(self, codes: Sequence[Codes], streams: Sequence[CodecStream]) -> list[Samples]:
        """The next codes [frames, codebooks] of as many streams -> float32 [channels, frames * frame_samples] of each.

        Raises ``ValueError`` for more streams than slots.
        """
        frames, seen = [len(each) for each in codes], [stream.frames for stream in streams]
        slots = self._memory.slots_of([stream.place for stream in streams])
        graphs = next((graphs for graphs in self._graphs if graphs.hold(codes)), None)
        if graphs is None:
            numbers = torch.tensor([frames, slots, seen], dtype=torch.int32, device=self.device)
            audio = self._decoded(filled_up(codes).to(self.device), numbers).cpu().numpy()
            found = [row[:, : count * self.spec.frame_samples] for row, count in zip(audio, frames, strict=True)]
        else:
            found = graphs(codes, [slots, seen])
        for stream, count in zip(streams, frames, strict=True):
            stream.frames += count
        return found

    def capture(self, streams: int, lengths: Collection[int]) -> None:
        """On a GPU, takes what ``decode`` does to up to so many pieces into graphs, of up to each of these lengths."""
        if not can_capture(self.device):
            return
        for frames in sorted({*lengths}, reverse=True):
            graphs = DecoderGraphs(
                self._decoded,
                buckets=decode_buckets(streams),  # rows to spare cost as much as others
                frames=frames,
                codebooks=len(self.quantizer.codebooks),
                device=self.device,
                facts=2,
                beside=self._graphs[0] if self._graphs else None,
            )
            self._graphs.insert(0, graphs)

    def streams_within(self, budget_bytes: int, frames: int, most: int) -> tuple[int, int]:
        """How many pieces of so many frames a GPU's process with that budget can decode together, ``most`` at most,
        and how many streams can then have slots, at most twice as many as ``most``."""
        kept = self._memory.stream_bytes
        weights = sum(p.nbytes for p in self.parameters()) + self._tables.nbytes
        left = budget_bytes - CONTEXT_BYTES - weights - kept  # which is the slot of nobody
        piece = 2 * self.stack.piece_bytes(frames)  # once in the graphs, and once where these were tried
        streams = max(1, min(most, left // (piece + kept)))
        if streams < most:
            log.info("pieces of %d requests are decoded together; %d would take more than the budget", streams, most)
        return streams, max(streams, min(2 * most, (left - streams * piece) // kept))

    def _decoded(self, codes: Tensor, numbers: Tensor) -> Tensor:
        """codes int64 [batch, frames, codebooks] and, int32 [3, batch], frames there are of these, slots, and frames
        before -> float32 [batch, channels, frames * frame_samples]. This is captured."""
        lengths, slots, seen = numbers.long()
        x = self.quantizer.decode(codes, self._tables).to(self._dtype)
        flat: Tensor = self.stack(x, self._memory, Pieces(slots, seen, lengths))
        return flat.float().view(len(codes), -1, self.spec.channels).transpose(1, 2).contiguous()
