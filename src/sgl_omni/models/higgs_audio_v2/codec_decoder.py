"""Codes to audio: the decoding half of the Higgs audio tokenizer, in float32."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Checkpoint
from sgl_omni.engine.decoder_graphs import DecoderGraphs, doubling
from sgl_omni.engine.graphs import can_capture
from sgl_omni.engine.platform import for_kernels
from sgl_omni.models.defaults import CONTEXT_BYTES
from sgl_omni.models.higgs_audio_v2.codec_spec import CodecSpec
from sgl_omni.models.higgs_audio_v2.codec_weights import CodecWeights

log = logging.getLogger("sgl_omni.models")

_OTHERS = ("acoustic_encoder.*", "encoder_semantic.*", "semantic_model.*", "fc.*", "quantizer.*.project_in.*")


class CodecDecoder:
    """transformers' DAC decoder behind a table that has codebooks and projections multiplied out."""

    def __init__(self, spec: CodecSpec, decoder: nn.Module, table: Tensor, bias: Tensor) -> None:
        """``table`` [codebooks * codebook_size, width] of what each code adds; ``bias`` [width]."""
        self.spec = spec
        self._decoder = decoder
        self._kernels = _kernels(decoder) if for_kernels(table) else None
        self._table = table
        self._bias = bias
        self._graphs: DecoderGraphs | None = None
        self._offsets = torch.arange(spec.num_codebooks, device=table.device) * spec.codebook_size

    @classmethod
    def load(
        cls, folder: Path, spec: CodecSpec, *, prefix: str = "", device: torch.device | str = "cpu"
    ) -> CodecDecoder:
        """Reads the tensors below ``prefix``. Raises ``CheckpointError`` for what is missing or of other shapes."""
        width = int(spec.acoustic["hidden_size"])
        decoder = dac_decoder(spec)
        decoder.to_empty(device="cpu")
        books = [torch.empty(spec.codebook_size, spec.codebook_dim) for _ in range(spec.num_codebooks)]
        projections = [nn.Linear(spec.codebook_dim, spec.hidden_size) for _ in books]
        narrow = nn.Linear(spec.hidden_size, width)
        weights = CodecWeights(Checkpoint(folder), prefix)
        weights.module("acoustic_decoder", decoder)
        weights.module("fc2", narrow)
        for k, (book, projection) in enumerate(zip(books, projections, strict=True)):
            weights.tensor(f"quantizer.quantizers.{k}.codebook.embed", book)
            weights.module(f"quantizer.quantizers.{k}.project_out", projection)
        weights.load(_OTHERS)
        with torch.no_grad():
            added = [
                F.linear(projection(book).double(), narrow.weight.double())
                for book, projection in zip(books, projections, strict=True)
            ]
        table = torch.cat(added).float().to(device)
        bias = narrow.bias.detach().to(device)
        return cls(spec, decoder.eval().requires_grad_(False).to(device), table, bias)

    @property
    def device(self) -> torch.device:
        return self._table.device

    @property
    def takes_any_lengths(self) -> bool:
        """Whether pieces of different lengths can be decoded together."""
        return self._kernels is not None

    def decode_pieces(self, pieces: Sequence[NDArray[np.int16]]) -> list[NDArray[np.float32]]:
        """Codes [frames, codebooks] of each -> its samples, float32 [frames * hop], about -1 to 1.

        They are of one length unless ``takes_any_lengths``. For one thread at a time after ``capture``.
        """
        frames = [len(piece) for piece in pieces]
        graphs = self._graphs
        if graphs is not None and graphs.hold(pieces):
            return graphs(pieces)
        codes = np.zeros((len(pieces), max(frames), self.spec.num_codebooks), np.int64)
        for row, piece in zip(codes, pieces, strict=True):
            row[: len(piece)] = piece
        audio = self.decode(torch.from_numpy(codes).to(self.device), frames).cpu().numpy()
        return [row[: length * self.spec.hop] for row, length in zip(audio, frames, strict=True)]

    @torch.inference_mode()
    def decode(self, codes: Tensor, frames: Sequence[int] | None = None) -> Tensor:
        """codes int64 [batch, frames, codebooks] -> float32 [batch, frames * hop].

        ``frames``: how many there are in each row, where not all; samples behind these are anything.
        Raises ``ValueError`` for rows of different lengths unless ``takes_any_lengths``.
        """
        lengths = [codes.shape[1]] * codes.shape[0] if frames is None else frames
        if self._kernels is not None:
            return self._by_kernels(codes, torch.tensor(lengths, dtype=torch.int32, device=self.device))
        if set(lengths) != {codes.shape[1]}:
            raise ValueError(f"rows of {sorted(set(lengths))} frames cannot be decoded together")
        audio: Tensor = self._decoder(self._latent(codes).transpose(1, 2))
        return audio[:, 0]

    def windows_within(self, budget_bytes: int, frames: int, most: int) -> int:
        """How many windows of so many frames a GPU's process with that budget can decode together, ``most`` at most."""
        weights = sum(p.nbytes for p in self._decoder.parameters()) + self._table.nbytes
        left = budget_bytes - CONTEXT_BYTES - 3 * weights // 2  # the kernels have theirs, of half the size
        windows = max(1, min(most, left // self.spec.decoding_bytes(frames)))
        if windows < most:
            log.info("chunks of %d requests are decoded together; %d would take more than the budget", windows, most)
        return windows

    def capture(self, windows: int, frames: int) -> None:
        """On a GPU, takes what ``decode_pieces`` does to up to so many pieces of up to so many frames into graphs."""
        if self._kernels is not None and can_capture(self.device):
            self._graphs = DecoderGraphs(
                lambda codes, numbers: self._by_kernels(codes, numbers[0]),
                buckets=doubling(windows),
                frames=frames,
                codebooks=self.spec.num_codebooks,
                device=self.device,
            )

    def _by_kernels(self, codes: Tensor, lengths: Tensor) -> Tensor:
        assert self._kernels is not None
        return self._kernels(self._latent(codes), lengths)

    def _latent(self, codes: Tensor) -> Tensor:
        return F.embedding(codes + self._offsets, self._table).sum(-2) + self._bias


def _kernels(decoder: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    from sgl_omni.models.higgs_audio_v2.dac_kernels import DacKernels

    return DacKernels(decoder)


def dac_decoder(spec: CodecSpec) -> nn.Module:
    """transformers' decoder on the meta device, as the tokenizer changes it: odd strides are padded at their end to
    whole frames, and nothing bends the output."""
    from transformers import DacConfig
    from transformers.models.dac.modeling_dac import DacDecoder

    with torch.device("meta"):
        decoder: nn.Module = DacDecoder(DacConfig(**spec.acoustic_options))
    for module in decoder.modules():
        if isinstance(module, nn.ConvTranspose1d):
            module.output_padding = (module.stride[0] % 2,)
    decoder.tanh = nn.Identity()
    return decoder
