"""The shape of a decoder, read from a Hugging Face ``config.json``. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sgl_omni.engine.rope_config import RopeConfig
from sgl_omni.errors import StartupError


@dataclass(frozen=True, slots=True)
class Names:
    """What parts of a decoder are called on disk. ``qkv``: the layer that is q, k and v in one, where there is one."""

    embedding: str = "embed_tokens"
    attention: str = "self_attn"
    qkv: str | None = None
    out: str = "o_proj"


@dataclass(frozen=True, slots=True)
class Family:
    """What a model type does that its config does not say.

    ``qkv_bias`` and ``out_bias``: always (true), never (false), or as the fields ``bias_keys`` say (none).
    """

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    bias_keys: tuple[str, str] = ("attention_bias", "attention_bias")
    qk_norm: bool = False
    experts: bool = False
    window_everywhere: bool = False
    names: Names = Names()


_QWEN3 = Family(qk_norm=True)
_QWEN3_MOE = Family(qk_norm=True, experts=True)
_BAILING_MOE = Family(
    bias_keys=("use_qkv_bias", "use_bias"),
    experts=True,
    names=Names("word_embeddings", "attention", "query_key_value", "dense"),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(),
        "higgs_audio_v2": Family(),
        "mistral": Family(qkv_bias=False, out_bias=False, window_everywhere=True),
        "qwen2": Family(qkv_bias=True, out_bias=False),
        "qwen2_moe": Family(qkv_bias=True, out_bias=False, experts=True),
        "qwen3": _QWEN3,
        "qwen3_moe": _QWEN3_MOE,
        "qwen3_omni_moe_text": _QWEN3_MOE,
        "qwen3_omni_moe_talker_text": _QWEN3_MOE,
        "qwen3_omni_moe_talker_code_predictor": _QWEN3,
        "qwen3_tts_talker": _QWEN3,
        "qwen3_tts_talker_code_predictor": _QWEN3,
        "bailing_moe": _BAILING_MOE,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """``normalise``: the weights of the experts chosen sum to one. ``shared_size`` 0: no expert that all rows use.

    ``shared_gated``: that one counts as much as a gate of its own says; else it is added as it is.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalise: bool
    shared_size: int = 0
    shared_gated: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Shapes of a decoder. ``windows`` and ``sparse`` have one entry a layer: attention window, MoE or dense."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    sparse: tuple[bool, ...]
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoEConfig | None = None
    names: Names = Names()
    vocab_size: int = 0
    tied_embeddings: bool = False
    max_positions: int | None = None
    eos_ids: tuple[int, ...] = ()

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> DecoderConfig:
        """Raises ``StartupError`` for a model type or an option that the decoder does not have."""
        kind = config.get("model_type", "")
        family = FAMILIES.get(kind)
        if family is None:
            raise StartupError(f"model type {kind!r} is not one of {', '.join(FAMILIES)}")
        if config.get("hidden_act", "silu") != "silu":
            raise StartupError(f"activation {config['hidden_act']!r} is not supported; the decoder has silu")
        layers, heads = int(config["num_hidden_layers"]), int(config["num_attention_heads"])
        qkv_bias, out_bias = (bool(config.get(key, False)) for key in family.bias_keys)
        moe = _moe(config) if family.experts else None
        rope = RopeConfig.parse(config)
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            norm_eps=config["rms_norm_eps"],
            rope=rope,
            windows=_windows(config, family, layers),
            sparse=_sparse_layers(config, layers) if moe else (False,) * layers,
            qkv_bias=bool(config.get("qkv_bias", True)) if family.qkv_bias else family.qkv_bias is None and qkv_bias,
            out_bias=out_bias if family.out_bias is None else family.out_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            moe=moe,
            names=family.names,
            vocab_size=config.get("vocab_size", 0),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_positions=_positions(config, rope),
            eos_ids=_ids(config.get("eos_token_id")),
        )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    found = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) for each in found):
        raise StartupError(f"eos_token_id is {value!r}, not an id or a list of ids")
    return tuple(found)


def _positions(config: Mapping[str, Any], rope: RopeConfig) -> int | None:
    """A config to which only the stretching was added still says the positions without."""
    said = config.get("max_position_embeddings")
    return said if said is None else max(said, rope.stretched_positions)


def _moe(config: Mapping[str, Any]) -> MoEConfig | None:
    experts = config.get("num_experts") or config.get("num_local_experts")
    if not experts:
        return None
    size, together = config["moe_intermediate_size"], config.get("num_shared_experts") or 0
    if size is None:
        raise StartupError("moe_intermediate_size is null, and num_experts are there")
    return MoEConfig(
        num_experts=experts,
        experts_per_token=config["num_experts_per_tok"],
        intermediate_size=size,
        normalise=bool(config.get("norm_topk_prob", False)),
        shared_size=together * size or config.get("shared_expert_intermediate_size") or 0,
        shared_gated=not together,
    )


def _sparse_layers(config: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    dense, step = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step") or 1
    first = config.get("first_k_dense_replace") or 0
    return tuple(i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers))


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or not (family.window_everywhere or config.get("use_sliding_window", False)):
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = 0 if family.window_everywhere else config.get("max_window_layers") or 0
    return tuple(window if i >= first else None for i in range(layers))
