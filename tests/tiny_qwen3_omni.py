"""A tiny random Qwen3-Omni in the format of the published ones, and what transformers' own model makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY, CODES, GROUPS = 320, 64, 5
AUDIO, IMAGE, VIDEO, EOS = 190, 191, 192, 2
THINKER_WIDTH, TALKER_WIDTH = 48, 32
TALKER_VOCABULARY = CODES + 1024
TALKER_EOS = CODES + 5
FRAMES = 28
"""Of an answer at most. So few that every window of the vocoder reaches back to the first, and audio is comparable."""

SPECIALS = {
    "<|pad|>": 0,
    "<|bos|>": 1,
    "<|im_end|>": EOS,
    "<|im_start|>": 10,
    "<tts_pad>": 20,
    "<tts_bos>": 21,
    "<tts_eos>": 22,
    "<|audio_pad|>": AUDIO,
    "<|image_pad|>": IMAGE,
    "<|video_pad|>": VIDEO,
    "<|audio_start|>": 193,
    "<|audio_end|>": 194,
    "<|vision_start|>": 195,
    "<|vision_end|>": 196,
}
ROLES = {"system": 11, "user": 12, "assistant": 13}

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def config(vocabulary: int = VOCABULARY, layers: int = 4, levels: int = 2) -> Any:
    """``levels``: layers of the vision encoder that reach into the thinker's first ones."""
    import transformers

    def rope(**options: Any) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": 10000.0, **options}

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
    axes = rope(mrope_section=[2, 3, 3], mrope_interleaved=True)
    text = {
        "vocab_size": vocabulary,
        "hidden_size": THINKER_WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "rope_parameters": axes,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": EOS,
        **heads,
        **experts,
    }
    audio = {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 128,
        "output_dim": THINKER_WIDTH,
        "downsample_hidden_size": 16,
        "n_window": 50,
        "n_window_infer": 100,
    }
    vision = {
        "depth": max(1, levels),
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": THINKER_WIDTH,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": list(range(levels)),
    }
    marks = {
        "audio_token_id": AUDIO,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "audio_start_token_id": 193,
        "vision_start_token_id": 195,
        "position_id_per_seconds": 25,
    }
    talker_text = {
        "vocab_size": TALKER_VOCABULARY,
        "hidden_size": TALKER_WIDTH,
        "intermediate_size": 40,
        "shared_expert_intermediate_size": 24,
        "num_hidden_layers": 2,
        "rope_parameters": axes,
        "max_position_embeddings": 512,
        **heads,
        **experts,
    }
    predictor = {
        "vocab_size": CODES,
        "hidden_size": TALKER_WIDTH,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_code_groups": GROUPS,
        "max_window_layers": 2,
        **heads,
    }
    return transformers.Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": text,
            "audio_config": audio,
            "vision_config": vision,
            "audio_end_token_id": 194,
            "vision_end_token_id": 196,
            "user_token_id": 12,
            **marks,
        },
        talker_config={
            "text_config": talker_text,
            "code_predictor_config": predictor,
            "num_code_groups": GROUPS,
            "thinker_hidden_size": THINKER_WIDTH,
            "accept_hidden_layer": layers - 1,
            "codec_eos_token_id": TALKER_EOS,
            "codec_nothink_id": CODES + 6,
            "codec_think_bos_id": CODES + 7,
            "codec_think_eos_id": CODES + 8,
            "codec_pad_id": CODES + 9,
            "codec_bos_id": CODES + 10,
            "speaker_id": {"ethan": CODES + 20, "chelsie": CODES + 21},
            "spatial_merge_size": 2,
            **marks,
        },
        code2wav_config={
            "codebook_size": CODES,
            "num_quantizers": GROUPS,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 32,
            "decoder_dim": 64,
        },
        enable_audio_output=True,
        im_start_token_id=10,
        im_end_token_id=EOS,
        system_token_id=11,
        user_token_id=12,
        assistant_token_id=13,
        tts_pad_token_id=20,
        tts_bos_token_id=21,
        tts_eos_token_id=22,
    )


def build(folder: Path, *, seed: int = 0, shard_size: str = "400KB", **shapes: Any) -> Any:
    """Writes weights and config, and returns transformers' model of them. ``shapes``: see ``config``."""
    import transformers

    torch.manual_seed(seed)
    reference = transformers.Qwen3OmniMoeForConditionalGeneration(config(**shapes)).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if name.startswith("code2wav"):
                _spread_vocoder(name, parameter)
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.25)
            else:
                parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.3)
    reference.save_pretrained(folder, max_shard_size=shard_size)
    return reference


def _spread_vocoder(name: str, parameter: torch.Tensor) -> None:
    """Loud enough to be heard and quiet enough not to be cut off."""
    if parameter.dim() > 1:
        fan = parameter[0].numel()
        parameter.normal_(0, 1.0 if "embedding" in name else 0.77 * fan**-0.5)
    elif name.endswith(("gamma", "scale")):
        parameter.fill_(0.5)


def write_processors(folder: Path) -> None:
    """Tokenizer, template, and settings of the feature extractor and of pictures, as a published folder has them."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    taken = set(SPECIALS.values()) | set(ROLES.values())
    free = (i for i in range(VOCABULARY) if i not in taken)
    vocabulary = {symbol: next(free) for symbol in sorted(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE({**vocabulary, **SPECIALS, **ROLES}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    tokenizer.add_tokens([AddedToken(name, special=False) for name in ROLES])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"},
    )
    _write(folder / "chat_template.json", {"chat_template": TEMPLATE})
    _write(
        folder / "preprocessor_config.json",
        {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": 128,
            "sampling_rate": 16000,
            "hop_length": 160,
            "n_fft": 400,
            "chunk_length": 300,
            "return_attention_mask": True,
            "image_processor_type": "Qwen2VLImageProcessor",
            "image_mean": [0.5, 0.4, 0.3],
            "image_std": [0.5, 0.6, 0.7],
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": 3136,
            "max_pixels": 40000,
        },
    )
    _write(folder / "video_preprocessor_config.json", {"size": {"shortest_edge": 1024, "longest_edge": 8192}})
    _write(
        folder / "generation_config.json",
        {"talker_temperature": 0.8, "talker_top_k": 40, "talker_max_new_tokens": FRAMES, "eos_token_id": EOS},
    )


def _write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value))
