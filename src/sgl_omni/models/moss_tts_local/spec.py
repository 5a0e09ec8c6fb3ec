"""What the ``config.json`` of a MOSS-TTS-Local checkpoint says. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.shapes import Named, decoder_shapes, linear_shapes, norm_shapes
from sgl_omni.errors import StartupError

_ACTIVATIONS = ("silu", "gelu_new")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSpec:
    """Shapes of the transformer that runs over the codebooks of one frame."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    rope_theta: float
    activation: str

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class MossSpec:
    """A row is a text id and ``num_codebooks`` codes of 0..``codebook_size`` - 1; ``pad_code`` stands for no code.

    ``slot_id`` is the text id of a frame that the model speaks, ``reference_slot_id`` of one that it hears, and
    ``start_id`` and ``end_id`` frame both. ``binary_decision``: whether the choice between another frame and the end
    has a head of its own, or uses two rows of the text embedding.
    """

    decoder: DecoderConfig
    local: LocalSpec
    num_codebooks: int
    codebook_size: int
    slot_id: int
    end_id: int
    binary_decision: bool

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> MossSpec:
        """Raises ``StartupError`` that names the field for a checkpoint of another kind."""
        backbone = config.get("qwen3_config") or config.get("language_config")
        if not isinstance(backbone, Mapping):
            raise StartupError("MOSS-TTS-Local: the config lacks the field qwen3_config")
        decoder = DecoderConfig.parse({"model_type": "qwen3", **backbone})
        books, size = _codebooks(config)
        slot = config.get("audio_assistant_gen_slot_token_id")
        return cls(
            decoder=decoder,
            local=_local(config, decoder.hidden_size),
            num_codebooks=books,
            codebook_size=size,
            slot_id=int(_field(config, "audio_assistant_slot_token_id") if slot is None else slot),
            end_id=int(_field(config, "audio_end_token_id")),
            binary_decision=str(config.get("local_text_head_mode", "binary")).strip().lower() == "binary",
        )

    @property
    def pad_code(self) -> int:
        return self.codebook_size

    @property
    def column_offsets(self) -> tuple[int, ...]:
        """Where in the table of all embeddings each column's ids begin: the text's, then each codebook's with its
        ``pad_code``, whose embedding is zero."""
        vocabulary, rows = self.decoder.vocab_size, self.codebook_size + 1
        return (0, *(vocabulary + book * rows for book in range(self.num_codebooks)))

    @property
    def table_rows(self) -> int:
        return self.column_offsets[-1] + self.codebook_size + 1


def engine_shapes(spec: MossSpec) -> Named:
    """What the engine reads of a checkpoint."""
    width, local = spec.decoder.hidden_size, spec.local
    yield from decoder_shapes(spec.decoder, "transformer.")
    for i in range(local.num_layers):
        name = f"local_transformer.h.{i}"
        yield from norm_shapes(f"{name}.ln_1", width)
        yield from linear_shapes(f"{name}.attn.c_attn", width, 3 * width, bias=True)
        yield from linear_shapes(f"{name}.attn.c_proj", width, width, bias=True)
        yield from norm_shapes(f"{name}.ln_2", width)
        yield from linear_shapes(f"{name}.mlp.fc_in", width, local.intermediate_size, bias=True)
        yield from linear_shapes(f"{name}.mlp.fc_out", local.intermediate_size, width, bias=True)
    yield from norm_shapes("local_transformer.ln_f", width)
    yield "transformer.embed_tokens.weight", (spec.decoder.vocab_size, width)
    for book in range(spec.num_codebooks):
        yield f"audio_embeddings.{book}.weight", (spec.codebook_size, width)
    if spec.binary_decision:
        yield "local_text_lm_head.weight", (2, width)


def _codebooks(config: Mapping[str, Any]) -> tuple[int, int]:
    books = int(_field(config, "n_vq"))
    sizes = config.get("audio_codebook_sizes") or [int(_field(config, "audio_vocab_size"))] * books
    if books < 1 or len(sizes) != books:
        raise StartupError(f"MOSS-TTS-Local: audio_codebook_sizes has {len(sizes)} entries for n_vq {books}")
    if len(set(sizes)) != 1:
        raise StartupError(f"MOSS-TTS-Local: audio_codebook_sizes {sizes} differ, which is not supported")
    return books, int(sizes[0])


def _local(config: Mapping[str, Any], hidden_size: int) -> LocalSpec:
    local = config.get("gpt2_config")
    if not isinstance(local, Mapping):
        raise StartupError("MOSS-TTS-Local: the config lacks the field gpt2_config; v1.0 checkpoints are not supported")
    spec = LocalSpec(
        hidden_size=int(_field(local, "n_embd", "gpt2_config.")),
        intermediate_size=int(local.get("n_inner") or 4 * int(local["n_embd"])),
        num_layers=int(config.get("local_transformer_layers") or _field(local, "n_layer", "gpt2_config.")),
        num_heads=int(_field(local, "n_head", "gpt2_config.")),
        norm_eps=float(local.get("layer_norm_epsilon", 1e-5)),
        rope_theta=float(local.get("rope_base", 10000.0)),
        activation=str(local.get("activation_function", "gelu_new")),
    )
    if spec.hidden_size != hidden_size:
        raise StartupError(f"MOSS-TTS-Local: gpt2_config.n_embd {spec.hidden_size} is not the backbone's {hidden_size}")
    if spec.hidden_size % spec.num_heads or spec.head_dim % 2:
        raise StartupError(f"MOSS-TTS-Local: gpt2_config.n_head {spec.num_heads} does not divide the width into pairs")
    expected = {"position_embedding_type": "rope", "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}
    defaults = {"position_embedding_type": "absolute", "scale_attn_weights": True}
    for key, value in expected.items():
        found = local.get(key, defaults.get(key, False))
        if found != value:
            raise StartupError(f"MOSS-TTS-Local: gpt2_config.{key} {found!r} is not supported, only {value!r}")
    if spec.activation not in _ACTIVATIONS:
        raise StartupError(
            f"MOSS-TTS-Local: gpt2_config.activation_function {spec.activation!r} is not one of {_ACTIVATIONS}"
        )
    return spec


def _field(config: Mapping[str, Any], name: str, prefix: str = "") -> Any:
    if config.get(name) is None:
        raise StartupError(f"MOSS-TTS-Local: the config lacks the field {prefix}{name}")
    return config[name]
