"""The facts of a checkpoint folder, read from its JSON files. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.shapes import Named, conv_shapes, decoder_shapes, linear_shapes, norm_shapes
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.folder import read_sizes, require
from sgl_omni.models.numbers import check_ids, check_size

MODEL_ID = "demo-voice"
INPUT_TAPS, CODE_REACH, REACH = 3, (2, 1), (3, 2)
"""Of the codec's convolutions: taps of the first, and frames that a block looks back and ahead, before and after the
frames are cut finer."""
PACKAGED_WEIGHTS = Path(__file__).with_name("weights")


def resolve_folder(model_path: str) -> Path:
    """Folder of the model id ``demo-voice`` or of a path. Raises ``InvalidRequest`` for anything else."""
    folder = PACKAGED_WEIGHTS if model_path == MODEL_ID else Path(model_path)
    if not (folder / "config.json").is_file():
        raise InvalidRequest(
            f"model_path {model_path!r} is neither {MODEL_ID!r} nor a folder with a config.json", param="model_path"
        )
    return folder


def _fields(folder: Path, name: str = "config.json") -> Callable[[str], Any]:
    """A file's values by name. Raises ``InvalidRequest`` that names file and field for what is absent or no number."""
    config = read_sizes(folder, name)
    check_ids(config, tuple(config), folder / name)
    return lambda field: require(config, field, folder / name)


@dataclass(frozen=True, slots=True, kw_only=True)
class VoiceSpec:
    """Shapes, ids and limits of the decoder (``config.json`` and ``generation_config.json``)."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    num_codebooks: int
    codebook_size: int
    column_vocab_size: int
    head_vocab_size: int
    eos_id: int
    pad_id: int
    text_offset: int
    sep_id: int
    voice_offset: int
    max_text_length: int
    max_frames: int
    top_k: int
    voices: tuple[str, ...]
    default_voice: str
    sample_rate: int

    @property
    def longest_sequence(self) -> int:
        """Positions of the longest piece: voice, characters, separator, and its delayed audio rows."""
        return self.max_text_length + 2 + self.max_frames + self.num_codebooks

    @property
    def kv_bytes_per_token(self) -> int:
        """Float32 keys and values of one position in every layer."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * 4

    @classmethod
    def load(cls, folder: Path) -> VoiceSpec:
        config, generation = _fields(folder), _fields(folder, "generation_config.json")
        return cls(
            hidden_size=config("hidden_size"),
            intermediate_size=config("intermediate_size"),
            num_layers=config("num_hidden_layers"),
            num_heads=config("num_attention_heads"),
            num_kv_heads=config("num_key_value_heads"),
            head_dim=config("head_dim"),
            rms_norm_eps=config("rms_norm_eps"),
            rope_theta=config("rope_theta"),
            max_positions=config("max_position_embeddings"),
            num_codebooks=config("num_codebooks"),
            codebook_size=config("codebook_size"),
            column_vocab_size=config("column_vocab_size"),
            head_vocab_size=config("head_vocab_size"),
            eos_id=config("audio_eos_token_id"),
            pad_id=config("audio_pad_token_id"),
            text_offset=config("text_token_offset"),
            sep_id=config("sep_token_id"),
            voice_offset=config("voice_token_offset"),
            max_text_length=config("max_text_length"),
            max_frames=generation("max_audio_frames"),
            top_k=generation("top_k"),
            voices=tuple(config("voices")),
            default_voice=config("default_voice"),
            sample_rate=config("sampling_rate"),
        )


def tensor_shapes(spec: VoiceSpec, config: Mapping[str, Any]) -> Named:
    """What the engine reads of a checkpoint: a decoder as Llama's under its usual names."""
    yield "model.embed_tokens.weight", (spec.num_codebooks * spec.column_vocab_size, spec.hidden_size)
    yield from decoder_shapes(DecoderConfig.parse({**config, "model_type": "llama"}), "model.")
    yield "lm_head.weight", (spec.num_codebooks * spec.head_vocab_size, spec.hidden_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodecSpec:
    """Shapes of the codec decoder (``codec/config.json``)."""

    sample_rate: int
    samples_per_frame: int
    num_codebooks: int
    codebook_size: int
    latent_dim: int
    dim: int
    intermediate_size: int
    code_blocks: int
    blocks: int
    upsample: int
    n_fft: int
    hop_length: int
    left_context: int
    right_context: int

    @property
    def bins(self) -> int:
        """Of a spectrum."""
        return self.n_fft // 2 + 1

    @classmethod
    def load(cls, folder: Path) -> CodecSpec:
        config = _fields(folder / "codec")
        for field in ("dim", "blocks", "upsample", "code_blocks", "intermediate_size", "latent_dim", "n_fft"):
            check_size(config(field), field, folder / "codec" / "config.json")
        return cls(
            sample_rate=config("sampling_rate"),
            samples_per_frame=config("samples_per_frame"),
            num_codebooks=config("num_codebooks"),
            codebook_size=config("codebook_size"),
            latent_dim=config("latent_dim"),
            dim=config("dim"),
            intermediate_size=config("intermediate_size"),
            code_blocks=config("code_blocks"),
            blocks=config("blocks"),
            upsample=config("upsample"),
            n_fft=config("n_fft"),
            hop_length=config("hop_length"),
            left_context=config("left_context_frames"),
            right_context=config("right_context_frames"),
        )


def codec_shapes(spec: CodecSpec) -> Named:
    """What the vocoder reads of the codec's folder."""
    yield "quantizer.codebooks", (spec.num_codebooks, spec.codebook_size, spec.latent_dim)
    yield from conv_shapes("decoder.inp", spec.latent_dim, spec.dim, INPUT_TAPS)
    for part, count, (left, right) in (("code_blocks", spec.code_blocks, CODE_REACH), ("blocks", spec.blocks, REACH)):
        for i in range(count):
            block = f"decoder.{part}.{i}"
            yield f"{block}.gamma", (spec.dim,)
            yield from conv_shapes(f"{block}.dwconv", 1, spec.dim, left + 1 + right)
            yield from norm_shapes(f"{block}.norm", spec.dim)
            yield from linear_shapes(f"{block}.pw1", spec.dim, spec.intermediate_size, bias=True)
            yield from linear_shapes(f"{block}.pw2", spec.intermediate_size, spec.dim, bias=True)
    yield from linear_shapes("decoder.up", spec.dim, spec.upsample * spec.dim, bias=True)
    yield from norm_shapes("decoder.norm", spec.dim)
    yield from linear_shapes("decoder.head", spec.dim, 2 * spec.bins, bias=True)
