"""Codes to audio: the decoding half of the Higgs audio tokenizer, in float32."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Checkpoint
from sgl_omni.models.higgs_audio_v2.codec_spec import CodecSpec
from sgl_omni.models.higgs_audio_v2.codec_weights import CodecWeights

_OTHERS = ("acoustic_encoder.*", "encoder_semantic.*", "semantic_model.*", "fc.*", "quantizer.*.project_in.*")


class CodecDecoder:
    """transformers' DAC decoder behind a table that has codebooks and projections multiplied out."""

    def __init__(self, spec: CodecSpec, decoder: nn.Module, table: Tensor, bias: Tensor) -> None:
        """``table`` [codebooks * codebook_size, width] of what each code adds; ``bias`` [width]."""
        self.spec = spec
        self._decoder = decoder
        self._table = table
        self._bias = bias
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

    @torch.inference_mode()
    def decode(self, codes: Tensor) -> Tensor:
        """codes int64 [batch, frames, codebooks] -> float32 [batch, frames * hop], about -1 to 1."""
        latent = F.embedding(codes + self._offsets, self._table).sum(-2) + self._bias
        audio: Tensor = self._decoder(latent.transpose(1, 2))
        return audio[:, 0]


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
