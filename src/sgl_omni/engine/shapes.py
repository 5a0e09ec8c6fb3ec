"""Names and shapes that the decoders' tensors have on disk, from their configs. Imports no torch.

They are those of ``Decoder.slots`` and ``CodePredictor.slots``, known before anything is built; tests hold both equal.
"""

from __future__ import annotations

from collections.abc import Iterator

from sgl_omni.engine.decoder_config import DecoderConfig, MoEConfig
from sgl_omni.engine.headers import Shape

Named = Iterator[tuple[str, Shape]]


def causal_shapes(config: DecoderConfig, prefix: str, head: str | None) -> Named:
    """A language model: embedding, decoder, and below ``head`` the head, where it is not the embedding."""
    table = (config.vocab_size, config.hidden_size)
    yield f"{prefix}{config.names.embedding}.weight", table
    yield from decoder_shapes(config, prefix)
    if head is not None and not config.tied_embeddings:
        yield f"{head}.weight", table


def decoder_shapes(config: DecoderConfig, prefix: str) -> Named:
    """Layers and the last norm. ``prefix`` ends with a dot."""
    for i, sparse in enumerate(config.sparse):
        name = f"{prefix}layers.{i}"
        yield f"{name}.input_layernorm.weight", (config.hidden_size,)
        yield from attention_shapes(config, f"{name}.{config.names.attention}")
        yield f"{name}.post_attention_layernorm.weight", (config.hidden_size,)
        if sparse and config.moe is not None:
            yield from _experts(config.hidden_size, config.moe, f"{name}.mlp")
        else:
            yield from mlp_shapes(config.hidden_size, config.intermediate_size, f"{name}.mlp", bias=config.mlp_bias)
    yield f"{prefix}norm.weight", (config.hidden_size,)


def attention_shapes(config: DecoderConfig, name: str) -> Named:
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    apart, together = (("q_proj", q), ("k_proj", kv), ("v_proj", kv)), config.names.qkv
    for part, size in apart if together is None else ((together, q + 2 * kv),):
        yield from linear_shapes(f"{name}.{part}", config.hidden_size, size, bias=config.qkv_bias)
    yield from linear_shapes(f"{name}.{config.names.out}", q, config.hidden_size, bias=config.out_bias)
    if config.qk_norm:
        yield f"{name}.q_norm.weight", (config.head_dim,)
        yield f"{name}.k_norm.weight", (config.head_dim,)


def mlp_shapes(hidden_size: int, size: int, name: str, *, bias: bool = False) -> Named:
    yield from linear_shapes(f"{name}.gate_proj", hidden_size, size, bias=bias)
    yield from linear_shapes(f"{name}.up_proj", hidden_size, size, bias=bias)
    yield from linear_shapes(f"{name}.down_proj", size, hidden_size, bias=bias)


def predictor_shapes(config: DecoderConfig, num_codes: int, input_size: int, prefix: str) -> Named:
    """A code predictor of ``num_codes`` codes beside a decoder of width ``input_size``. ``prefix`` ends with a dot."""
    yield from decoder_shapes(config, f"{prefix}model.")
    for i in range(num_codes):
        yield f"{prefix}model.codec_embedding.{i}.weight", (config.vocab_size, input_size)
        yield f"{prefix}lm_head.{i}.weight", (config.vocab_size, config.hidden_size)
    if input_size != config.hidden_size:
        yield from linear_shapes(f"{prefix}small_to_mtp_projection", input_size, config.hidden_size, bias=True)


def projection_shapes(name: str, input_size: int, inner_size: int, output_size: int) -> Named:
    yield from linear_shapes(f"{name}.linear_fc1", input_size, inner_size, bias=True)
    yield from linear_shapes(f"{name}.linear_fc2", inner_size, output_size, bias=True)


def linear_shapes(name: str, input_size: int, output_size: int, *, bias: bool) -> Named:
    yield f"{name}.weight", (output_size, input_size)
    if bias:
        yield f"{name}.bias", (output_size,)


def conv_shapes(name: str, inputs: int, outputs: int, kernel: int, *, bias: bool = True) -> Named:
    """A convolution of the time axis."""
    yield f"{name}.weight", (outputs, inputs, kernel)
    if bias:
        yield f"{name}.bias", (outputs,)


def grown_shapes(name: str, inputs: int, outputs: int, kernel: int) -> Named:
    """A transposed convolution of the time axis."""
    yield f"{name}.weight", (inputs, outputs, kernel)
    yield f"{name}.bias", (outputs,)


def square_attention_shapes(name: str, width: int, *, key_bias: bool = True) -> Named:
    """Four square projections of one width, as encoders have them."""
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield from linear_shapes(f"{name}.{part}", width, width, bias=key_bias or part != "k_proj")


def norm_shapes(name: str, size: int) -> Named:
    """A layer norm with its bias."""
    yield f"{name}.weight", (size,)
    yield f"{name}.bias", (size,)


def _experts(hidden_size: int, moe: MoEConfig, name: str) -> Named:
    yield f"{name}.gate.weight", (moe.num_experts, hidden_size)
    for i in range(moe.num_experts):
        yield from mlp_shapes(hidden_size, moe.intermediate_size, f"{name}.experts.{i}")
    if moe.shared_size:
        shared = f"{name}.shared_expert" if moe.shared_gated else f"{name}.shared_experts"
        yield from mlp_shapes(hidden_size, moe.shared_size, shared)
    if moe.shared_size and moe.shared_gated:
        yield f"{name}.shared_expert_gate.weight", (1, hidden_size)
