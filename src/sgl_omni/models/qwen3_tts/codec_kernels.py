"""The 12 Hz speech tokenizer's decoder on a GPU: its products and convolutions are one kernel each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sgl_omni.audio.causal import Batch
from sgl_omni.engine.kernels.causal import carry, with_room
from sgl_omni.engine.kernels.convolution import Convolution, factors, halved
from sgl_omni.engine.rope import rotate
from sgl_omni.models.qwen3_tts.waveform_kernels import WaveformKernels


class CodecKernels:
    """Does what ``CodecDecoder``'s modules do, from tensors of its own, of which a stream keeps as many numbers.

    Factors are as ``factors`` says: rounded to float16, unless cuDNN may round nothing.
    """

    def __init__(self, decoder: Any) -> None:
        """``decoder``: a ``CodecDecoder`` on its device."""
        self._dtype = factors()
        parts = decoder.quantizer.rvq_first, decoder.quantizer.rvq_rest
        tables = [F.linear(part.entries(), part.output_proj.weight[..., 0]).flatten(0, 1) for part in parts]
        self._table = torch.cat(tables)
        books = torch.arange(decoder.num_codes, device=decoder.device)
        self._offsets = books * (len(self._table) // decoder.num_codes)
        self._before = Convolution.causal(decoder.pre_conv.conv, None, self._dtype, past=True)
        self._transformer = decoder.pre_transformer
        self._into = self._product(self._transformer.input_proj)
        self._layers = [_Layer(layer, self._dtype) for layer in self._transformer.layers]
        self._out = self._product(self._transformer.output_proj)
        self._waveform = WaveformKernels(decoder.upsample, decoder.decoder, streams=True)

    def kept(self) -> dict[Any, tuple[int, ...]]:
        """The shape of what each part needs of a stream."""
        before = {self._before: (self._before.behind, self._before.inputs)}
        return before | {layer: layer.kept for layer in self._layers} | self._waveform.kept()

    def latent(self, codes: Tensor, batch: Batch) -> Tensor:
        """codes int64 [batch, frames, codebooks] -> float32 [batch, width, frames], as it lies the other way round."""
        x = with_room(F.embedding(codes + self._offsets, self._table).sum(-2), self._before.behind, self._dtype)
        lengths = batch.lengths()
        self._past(batch, lengths)(self._before, x, 1)
        x = batch.filled(self._before(x, lengths, 1))
        rows, frames, _ = x.shape
        every = lengths.new_full((1,), rows * frames)
        rotation = self._transformer.rotation(batch.positions(frames), x.dtype)
        near = self._transformer.near(batch, frames)
        x = self._into(halved(x.view(1, rows * frames, -1), self._dtype), every, 1)
        for layer in self._layers:
            x = layer(x, every, rotation, near, batch)
        x = self._out(self._transformer.norm(x).to(self._dtype), every, 1)
        return x.view(rows, frames, -1).transpose(1, 2)

    def waveform(self, x: Tensor, batch: Batch) -> Tensor:
        """[batch, width, frames] -> float32 [batch, samples]; those behind a row's frames are anything."""
        lengths = batch.lengths()
        return self._waveform(x.transpose(1, 2), lengths, self._past(batch, lengths))

    def _past(self, batch: Batch, lengths: Tensor) -> Any:
        def past(part: Any, x: Tensor, scale: int) -> None:
            carry(x, batch.kept(part), part.behind, lengths, scale)

        return past

    def _product(self, linear: Any) -> Convolution:
        return Convolution.product(linear.weight, linear.bias, self._dtype)


class _Layer:
    """A layer of the transformer: rows of all streams at once, [1, batch * frames, width]. Factors hold the scales."""

    def __init__(self, layer: Any, dtype: torch.dtype) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._dtype = dtype
        self.kept = attention.kept
        self._head_dim, self._kv_heads = attention.kept[3], attention.kept[2]
        self._norms = layer.input_layernorm, layer.post_attention_layernorm
        qkv = attention.q_proj, attention.k_proj, attention.v_proj
        biases = None if qkv[0].bias is None else torch.cat([part.bias for part in qkv])
        self._qkv = Convolution.product(torch.cat([part.weight for part in qkv]), biases, dtype)
        self._mixed = _scaled(attention.o_proj, layer.self_attn_layer_scale.scale, dtype)
        self._gate_up = Convolution.product(torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]), None, dtype)
        self._down = _scaled(mlp.down_proj, layer.mlp_layer_scale.scale, dtype)

    def __call__(self, x: Tensor, every: Tensor, rotation: tuple[Tensor, Tensor], near: Tensor, batch: Batch) -> Tensor:
        rows, frames = rotation[0].shape[:2]
        qkv = self._qkv(self._norms[0](x).to(self._dtype), every, 1).view(rows, frames, -1, self._head_dim)
        turned, v = qkv.split([qkv.shape[2] - self._kv_heads, self._kv_heads], 2)
        q, k = rotate(turned, rotation).split([turned.shape[2] - self._kv_heads, self._kv_heads], 2)
        mixed = batch.attention(self, q, k, v, near).view(1, rows * frames, -1)
        x = self._mixed(halved(mixed, self._dtype), every, 1, x)
        gate, up = self._gate_up(self._norms[1](x).to(self._dtype), every, 1).chunk(2, -1)
        return self._down(halved(F.silu(gate) * up, self._dtype), every, 1, x)


def _scaled(linear: Any, scale: Tensor, dtype: torch.dtype) -> Convolution:
    bias = None if linear.bias is None else scale * linear.bias
    return Convolution.product(scale[:, None] * linear.weight, bias, dtype)
