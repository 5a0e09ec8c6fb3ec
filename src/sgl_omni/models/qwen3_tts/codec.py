"""The 12 Hz speech tokenizer's decoder: frames of codes to waveforms, piece by piece and several streams at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sgl_omni.audio.causal import Batch, CausalStream, Codes, Layout, Pieces, filled_up
from sgl_omni.engine.checkpoint import Checkpoint, Slot, read_config
from sgl_omni.engine.graphs import can_capture
from sgl_omni.engine.platform import for_kernels
from sgl_omni.engine.rope import Rope
from sgl_omni.engine.rope_config import RopeConfig
from sgl_omni.errors import StartupError
from sgl_omni.models.qwen3_tts.codec_layers import (
    CausalConv,
    CausalUpsample,
    ConvNeXtBlock,
    GatedMLP,
    Quantizer,
    Scale,
    SnakeBeta,
    UpsampleBlock,
    WindowAttention,
)

if TYPE_CHECKING:
    from sgl_omni.models.qwen3_tts.codec_kernels import CodecKernels
    from sgl_omni.models.stream_graphs import StreamGraphs


class TransformerLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        eps = config.get("rms_norm_eps", 1e-5)
        self.self_attn = WindowAttention(
            width,
            heads,
            config.get("num_key_value_heads") or heads,
            head_dim(config),
            config["sliding_window"],
            bool(config.get("attention_bias", False)),
        )
        self.mlp = GatedMLP(width, config["intermediate_size"])
        self.input_layernorm = nn.RMSNorm(width, eps)
        self.post_attention_layernorm = nn.RMSNorm(width, eps)
        self.self_attn_layer_scale = Scale(width)
        self.mlp_layer_scale = Scale(width)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], near: Tensor, pieces: Batch) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rotation, near, pieces))
        found: Tensor = x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))
        return found


class Transformer(nn.Module):
    """[batch, n, latent] -> [batch, n, latent]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, latent = config["hidden_size"], config["latent_dim"]
        self.input_proj = nn.Linear(latent, width)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(width, config.get("rms_norm_eps", 1e-5))
        self.output_proj = nn.Linear(width, latent)
        self._rope_config = RopeConfig.parse(config)
        self._head_dim, self._window = head_dim(config), config["sliding_window"]
        self._rope: Rope | None = None

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions int64 [batch, n], each [batch, n, 1, head_dim / 2]."""
        if self._rope is None:
            self._rope = Rope(self._rope_config, self._head_dim, positions.device)
        cosine, sine = self._rope(positions.reshape(1, -1), dtype)
        return cosine.view(*positions.shape, 1, -1), sine.view(*positions.shape, 1, -1)

    def near(self, batch: Batch, n: int) -> Tensor:
        """What each of the next n places sees."""
        return batch.near(self._window, n)

    def forward(self, x: Tensor, pieces: Batch) -> Tensor:
        n = x.shape[1]
        rotation, near = self.rotation(pieces.positions(n), x.dtype), self.near(pieces, n)
        x = self.input_proj(x)
        for layer in self.layers:
            x = layer(x, rotation, near, pieces)
        found: Tensor = self.output_proj(self.norm(x))
        return found


class SplitQuantizer(nn.Module):
    """The first code of a frame says what is spoken, the others how it sounds; each part has a projection."""

    def __init__(self, books: int, size: int, width: int) -> None:
        super().__init__()
        self.rvq_first = Quantizer(1, size, width // 2, width)
        self.rvq_rest = Quantizer(books - 1, size, width // 2, width)

    def forward(self, codes: Tensor) -> Tensor:
        """codes int64 [batch, time, books] -> [batch, width, time]."""
        found: Tensor = self.rvq_first(codes[..., :1]) + self.rvq_rest(codes[..., 1:])
        return found


class CodecDecoder(nn.Module):
    """The next frames of several streams -> their samples, ``samples_per_frame`` each."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """``config``: the ``decoder_config`` of a speech tokenizer."""
        super().__init__()
        latent, books, width = config["latent_dim"], config["num_quantizers"], config["codebook_dim"]
        ratios, rates, channels = config["upsampling_ratios"], config["upsample_rates"], config["decoder_dim"]
        self.num_codes = books
        self.samples_per_frame = prod(ratios) * prod(rates)
        self.quantizer = SplitQuantizer(books, config["codebook_size"], width)
        self.pre_conv = CausalConv(width, latent, 3)
        self.pre_transformer = Transformer(config)
        self._grown = [(CausalUpsample(latent, latent, ratio, ratio), ConvNeXtBlock(latent)) for ratio in ratios]
        self.upsample = nn.ModuleList(nn.ModuleList(pair) for pair in self._grown)
        self._blocks = [UpsampleBlock(channels >> i, channels >> (i + 1), rate) for i, rate in enumerate(rates)]
        last = channels >> len(rates)
        self._ends = CausalConv(latent, channels, 7), SnakeBeta(last), CausalConv(last, 1, 7)
        self.decoder = nn.ModuleList([self._ends[0], *self._blocks, *self._ends[1:]])
        self._context = self._frames_behind()
        self._layout = Layout({part: part.kept for part in self.modules() if hasattr(part, "kept")})
        self._kernels: CodecKernels | None = None
        self._graphs: StreamGraphs | None = None

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu") -> CodecDecoder:
        """Reads the decoder of a speech tokenizer's folder, in float32: it is small, and rounding can be heard."""
        config = read_config(folder).get("decoder_config")
        if not isinstance(config, dict):
            raise StartupError(f"{folder / 'config.json'} lacks the field decoder_config")
        try:
            with torch.device("meta"):
                decoder = cls(config)
        except KeyError as error:
            raise StartupError(f"{folder / 'config.json'} lacks the field decoder_config.{error.args[0]}") from error
        checkpoint, ignored = Checkpoint(folder), ("*.input_proj.weight",)
        fill(decoder, checkpoint, "decoder.", ignore=ignored)  # on the meta device: only a check
        decoder = decoder.to_empty(device=device).eval().requires_grad_(False)
        fill(decoder, checkpoint, "decoder.", ignore=ignored)
        if for_kernels(decoder.pre_conv.conv.weight):
            decoder._take_kernels()
        return decoder

    def _take_kernels(self) -> None:
        from sgl_omni.models.qwen3_tts.codec_kernels import CodecKernels

        self._kernels = CodecKernels(self)
        self._layout = Layout(self._kernels.kept())

    def capture(self, streams: int, frames: int) -> None:
        """On a GPU, takes what pieces of up to so many streams, of up to so many frames, go through into graphs.
        Decoding is for one thread at a time afterwards."""
        if self._kernels is None or not can_capture(self.device):
            return
        from sgl_omni.models.stream_graphs import StreamGraphs

        sizes = {"streams": streams, "frames": frames, "codebooks": self.num_codes}
        self._graphs = StreamGraphs(self._decoded, self._layout, device=self.device, **sizes)

    @property
    def device(self) -> torch.device:
        return self.pre_conv.conv.weight.device

    def open(self) -> CausalStream:
        return self._layout.open(self.device)

    @torch.inference_mode()
    def forward(self, codes: Sequence[Codes], streams: Sequence[CausalStream]) -> list[Tensor]:
        """The next codes [frames, num_codes] of as many streams -> float32 [samples] of each, about -1 to 1, on the
        host."""
        if self._graphs is not None and self._graphs.holds(codes):
            return [torch.from_numpy(samples) for samples in self._graphs(codes, streams)]
        pieces = Pieces(self._layout, streams, [len(each) for each in codes])
        audio = self._decoded(filled_up(codes).to(self.device), pieces).cpu()
        pieces.finish()
        return [row[: len(each) * self.samples_per_frame] for row, each in zip(audio, codes, strict=True)]

    @torch.inference_mode()
    def prime(self, codes: Sequence[Codes], streams: Sequence[CausalStream]) -> None:
        """As if these frames had been decoded first, of which nobody wants the audio: only the last of it is made."""
        pieces = Pieces(self._layout, streams, [len(each) for each in codes])
        latent = self._network.latent(filled_up(codes).to(self.device), pieces)
        self._network.waveform(pieces.keep_last(latent, self._context), pieces)
        pieces.finish()

    @property
    def _network(self) -> CodecDecoder | CodecKernels:
        return self if self._kernels is None else self._kernels

    def _decoded(self, codes: Tensor, pieces: Batch) -> Tensor:
        return self._network.waveform(self._network.latent(codes, pieces), pieces)

    def latent(self, codes: Tensor, pieces: Batch) -> Tensor:
        """codes int64 [batch, frames, num_codes] -> [batch, latent, frames]"""
        x = self.pre_conv(self.quantizer(codes), pieces)
        latent: Tensor = self.pre_transformer(x.transpose(1, 2), pieces)
        return latent.transpose(1, 2)

    def waveform(self, x: Tensor, pieces: Batch) -> Tensor:
        """[batch, latent, frames] -> [batch, samples]"""
        first, snake, last = self._ends
        for grow, convnext in self._grown:
            x = convnext(grow(x, pieces), pieces)
        x = first(x, pieces)
        for block in self._blocks:
            x = block(x, pieces)
        found: Tensor = last(snake(x), pieces)[:, 0]
        return found

    def _frames_behind(self) -> int:
        """How many frames back the parts behind the transformer look, all together."""
        reach, steps = 0.0, 1  # steps of a part's input in a frame
        for grow, convnext in self._grown:
            reach += grow.left / steps
            steps *= grow.stride
            reach += convnext.dwconv.left / steps
        first, _, last = self._ends
        reach += first.left / steps
        for block in self._blocks:
            _, grow, units = block.parts
            reach += grow.left / steps
            steps *= grow.stride
            reach += sum(unit.conv1.left for unit in units) / steps
        return ceil(reach + last.left / steps)


def head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def fill(module: nn.Module, checkpoint: Checkpoint, prefix: str, *, ignore: tuple[str, ...] = ()) -> None:
    """Reads all tensors of a module, which on disk have its own names below ``prefix``; those that are on the meta
    device are checked and not read."""
    tensors = module.state_dict()
    checkpoint.load(
        [Slot(prefix + name, tensor, tuple(tensor.shape)) for name, tensor in tensors.items()],
        prefix=prefix,
        ignore=ignore,
    )
