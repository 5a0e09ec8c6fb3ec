"""Tiny Qwen3-TTS checkpoints of random weights, in the files and under the names that the published ones have.

Which tensors there are, and their shapes, is the model authors' own word: ``unit/data/qwen3_tts/make_goldens.py``
wrote ``tensors.json`` from their classes. The values come from numpy's frozen generator, so that they are the same
everywhere and for ever.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

DATA = Path(__file__).parent / "unit" / "data" / "qwen3_tts"
KINDS = ("custom_voice", "voice_design", "base")

CODES, GROUPS = 64, 5
SAMPLE_RATE, FRAME_SAMPLES = 24000, 96
MERGES = ("a s", "as s", "ass i", "assi s", "assis t", "assist a", "assista n", "assistan t", "t h", "th e")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
FIRST_SPECIAL = 256 + len(MERGES)


def config(kind: str) -> dict[str, Any]:
    """``config.json`` of a kind; the voice design has a code predictor as wide as its talker, and so no projection."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    predictor = {
        "model_type": "qwen3_tts_talker_code_predictor",
        "vocab_size": CODES,
        "hidden_size": 32 if kind == "voice_design" else 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_code_groups": GROUPS,
        "max_position_embeddings": 64,
        "rope_theta": 10000,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        **heads,
    }
    custom = kind == "custom_voice"
    talker = {
        "model_type": "qwen3_tts_talker",
        "vocab_size": CODES + 1024,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_code_groups": GROUPS,
        "max_position_embeddings": 512,
        "rope_theta": 10000,
        "rope_scaling": {"interleaved": True, "mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "text_hidden_size": 28,
        "text_vocab_size": FIRST_SPECIAL + len(SPECIALS) + 2,
        "codec_pad_id": CODES + 4,
        "codec_bos_id": CODES + 5,
        "codec_eos_token_id": CODES + 6,
        "codec_think_id": CODES + 10,
        "codec_nothink_id": CODES + 11,
        "codec_think_bos_id": CODES + 12,
        "codec_think_eos_id": CODES + 13,
        "codec_language_id": {"chinese": CODES + 20, "english": CODES + 21, "sichuan_dialect": CODES + 22},
        "spk_id": {"vivian": CODES + 30, "eric": CODES + 31} if custom else {},
        "spk_is_dialect": {"vivian": False, "eric": "sichuan_dialect"} if custom else {},
        "code_predictor_config": predictor,
        **heads,
    }
    found: dict[str, Any] = {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "tts_model_size": "1b7",
        "tts_model_type": kind,
        "im_start_token_id": FIRST_SPECIAL + 1,
        "im_end_token_id": FIRST_SPECIAL + 2,
        "tts_pad_token_id": FIRST_SPECIAL + 3,
        "tts_bos_token_id": FIRST_SPECIAL + 4,
        "tts_eos_token_id": FIRST_SPECIAL + 5,
        "talker_config": talker,
    }
    if kind == "base":
        found["speaker_encoder_config"] = {
            "enc_dim": 32,
            "sample_rate": SAMPLE_RATE,
            "enc_channels": [16, 16, 16, 16, 48],
            "enc_attention_channels": 8,
            "enc_res2net_scale": 4,
            "enc_se_channels": 8,
        }
    return found


def speech_tokenizer_config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3TTSTokenizerV2Model"],
        "model_type": "qwen3_tts_tokenizer_12hz",
        "encoder_valid_num_quantizers": GROUPS,
        "input_sample_rate": SAMPLE_RATE,
        "output_sample_rate": SAMPLE_RATE,
        "encode_downsample_rate": 1920,
        "decode_upsample_rate": FRAME_SAMPLES,
        "encoder_config": {
            "model_type": "mimi",
            "sampling_rate": SAMPLE_RATE,
            "frame_rate": 12.5,
            "hidden_size": 16,
            "num_filters": 4,
            "num_residual_layers": 1,
            "upsampling_ratios": [8, 6, 5, 4],
            "codebook_size": CODES,
            "codebook_dim": 8,
            "vector_quantization_hidden_dimension": 8,
            "num_quantizers": GROUPS + 1,
            "num_semantic_quantizers": 1,
            "num_hidden_layers": 2,
            "intermediate_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 24,  # more than the recording's, as the authors' transformers looks past it
            "upsample_groups": 16,
            "use_causal_conv": True,
            "max_position_embeddings": 512,
        },
        "decoder_config": {
            "codebook_size": CODES,
            "codebook_dim": 16,
            "num_quantizers": GROUPS,
            "latent_dim": 24,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 6,
            "rope_theta": 10000,
            "rms_norm_eps": 1e-5,
            "layer_scale_initial_scale": 0.01,
            "max_position_embeddings": 8000,
            "decoder_dim": 32,
            "upsample_rates": [3, 2, 2, 2],
            "upsampling_ratios": [2, 2],
        },
    }


GENERATION = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.05,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "max_new_tokens": 40,
}


def build(folder: Path, kind: str) -> Path:
    """The folder, filled with a checkpoint of a kind."""
    speech = folder / "speech_tokenizer"
    speech.mkdir(parents=True, exist_ok=True)
    names = json.loads((DATA / "tensors.json").read_text())
    _write(folder / "config.json", config(kind))
    _write(folder / "generation_config.json", GENERATION)
    _write(folder / "preprocessor_config.json", {"processor_class": "Qwen3TTSProcessor", "padding_side": "left"})
    _write(speech / "config.json", speech_tokenizer_config())
    _write(
        speech / "preprocessor_config.json",
        {"feature_extractor_type": "EncodecFeatureExtractor", "feature_size": 1, "sampling_rate": SAMPLE_RATE},
    )
    save_file({name: tensor(kind, name, shape) for name, shape in names[kind].items()}, folder / "model.safetensors")
    codec = {name: tensor("codec", name, shape) for name, shape in names["speech_tokenizer"].items()}
    save_file(codec, speech / "model.safetensors")
    _tokenizer(folder)
    return folder


def tensor(kind: str, name: str, shape: list[int]) -> NDArray[np.float32]:
    """Values that depend on the name alone, of a size at which nothing dies away."""
    draws = np.random.RandomState(zlib.crc32(f"{kind} {name}".encode()))
    last = name.rsplit(".", 1)[-1]
    if last == "initialized":
        return np.ones(shape, np.float32)
    if last == "cluster_usage" or (len(shape) == 1 and (last in ("scale", "gamma") or "norm" in name)):
        return draws.uniform(0.5, 1.5, shape).astype(np.float32)
    if len(shape) < 2:
        return (0.1 * draws.standard_normal(shape)).astype(np.float32)
    gain = 0.5 if name.startswith("decoder.decoder.") else 1.3  # the waveform shall not be clipped
    spread = 0.7 if "embed" in name else gain / np.sqrt(np.prod(shape[1:]))
    return (spread * draws.standard_normal(shape)).astype(np.float32)


def recording(seconds: float = 0.7, rate: int = SAMPLE_RATE) -> NDArray[np.float32]:
    """A buzzing sound with some noise, as a reference voice."""
    time = np.arange(int(seconds * rate)) / rate
    noise = np.random.RandomState(5).standard_normal(len(time))
    buzz = np.sin(2 * np.pi * 140 * time * (1 + 0.1 * time)) + 0.4 * np.sin(2 * np.pi * 830 * time)
    return (0.3 * buzz * (0.6 + 0.4 * np.sin(9 * time)) + 0.02 * noise).astype(np.float32)


def _tokenizer(folder: Path) -> None:
    """``vocab.json``, ``merges.txt`` and ``tokenizer_config.json``, as published: all bytes and one word or two."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [*map(chr, printable), *(chr(256 + i) for i in range(len(others)))]
    words = letters + [merge.replace(" ", "") for merge in MERGES]
    _write(folder / "vocab.json", {word: i for i, word in enumerate(words)})
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(MERGES) + "\n", encoding="utf-8")
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {str(FIRST_SPECIAL + i): {"content": content, **flags} for i, content in enumerate(SPECIALS)}
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_prefix_space": False,
            "added_tokens_decoder": added,
            "additional_special_tokens": list(SPECIALS[1:]),
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "errors": "replace",
            "model_max_length": 4096,
            "split_special_tokens": False,
        },
    )


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1), encoding="utf-8")
