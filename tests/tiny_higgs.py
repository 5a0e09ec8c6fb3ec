"""Tiny random checkpoints of Higgs Audio v2 and Higgs TTS 3 in their real formats, and what they should say.

Reference: transformers' own classes. Its class of the audio tokenizer wants torchaudio for one call of ``resample``;
the stand-in here serves that call with the filter under test, so all else of it is a reference and that filter is not.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

CODES, BOOKS = 64, 4
BOC, EOC = CODES, CODES + 1
RATE, HOP = 24_000, 960
V2_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|scene_desc_start|>",
    "<|scene_desc_end|>",
    "<|audio_out_bos|>",
    "<|audio_eos|>",
    "<|AUDIO_OUT|>",
    "<|reserved_special_token_6|>",
)
V3_SPECIALS = (
    "<|endoftext|>",
    "<|tts|>",
    "<|ref_text|>",
    "<|ref_audio|>",
    "<|text|>",
    "<|audio|>",
    "<|laugh|>",
)
TEXT = "Generate audio following instruction. Audio is recorded from a quiet room. The sun rises in the east."

CODEC = {
    "target_bandwidths": [0.6],
    "sample_rate": RATE,
    "codebook_size": CODES,
    "codebook_dim": 8,
    "downsample_factor": 320,
    "acoustic_model_config": {
        "model_type": "dac",
        "encoder_hidden_size": 4,
        "downsampling_ratios": [8, 5, 4, 2, 3],
        "decoder_hidden_size": 32,
        "upsampling_ratios": [8, 5, 4, 2, 3],
        "hidden_size": 16,
        "n_codebooks": 1,
        "codebook_size": CODES,
        "codebook_dim": 8,
    },
    "semantic_model_config": {
        "model_type": "hubert",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "conv_dim": [16] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 2,
        "mask_time_prob": 0.0,
    },
}

# A template of the tests' own, in the layout that Higgs Audio v2 conversations have.
TEMPLATE = """{{ bos_token }}<|start_header_id|>system<|end_header_id|>

{{ messages[0].content[0].text | trim }}

<|scene_desc_start|>
{% for part in messages[1].content -%}
{% if part.type == 'audio' %} <|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>
{% else %}{{ part.text | trim }}{% if loop.first and not loop.last %}

{% endif %}{% endif %}{%- endfor %}
<|scene_desc_end|><|eot_id|>
{%- for message in messages[2:] -%}
<|start_header_id|>{{ message.role }}<|end_header_id|>

{% if message.role == 'assistant' %}<|audio_out_bos|><|AUDIO_OUT|><|audio_eos|>
{%- else %}{{ message.content[0].text | trim }}{% endif %}<|eot_id|>
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

<|audio_out_bos|>{% endif %}"""


def reference_codec() -> Any:
    """transformers' audio tokenizer of random weights."""
    from sgl_omni.models.higgs_audio_v2.codec_encoder import resample

    if "torchaudio" not in sys.modules:
        stand_in = types.ModuleType("torchaudio")
        stand_in.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        functional = types.SimpleNamespace(resample=lambda x, rate, target: resample(x[0, 0], rate, target)[None, None])
        stand_in.functional = functional  # type: ignore[attr-defined]
        sys.modules["torchaudio"] = stand_in
    try:
        from transformers.models.higgs_audio_v2_tokenizer.modeling_higgs_audio_v2_tokenizer import (
            HiggsAudioV2TokenizerConfig,
            HiggsAudioV2TokenizerModel,
        )
    finally:
        sys.modules.pop("torchaudio")
    torch.manual_seed(3)
    codec = HiggsAudioV2TokenizerModel(HiggsAudioV2TokenizerConfig(**CODEC)).eval()
    with torch.no_grad():
        for name, parameter in codec.named_parameters():
            if parameter.dim() > 1 and "alpha" not in name:
                parameter.normal_(std=0.7 / parameter[0].numel() ** 0.5)
        for quantizer in codec.quantizer.quantizers:
            quantizer.codebook.embed.normal_()
    return codec


def save_tokenizer(folder: Path, specials: tuple[str, ...], template: str | None = None) -> Any:
    """A byte-level tokenizer, trained on a sentence, that splits as Llama 3's does."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    split = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator([TEXT, "room.\n a.\n\n"], trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=specials[0],
        eos_token=specials[1],
        pad_token=specials[1],
        additional_special_tokens=list(specials[2:]),
        chat_template=template,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_v2(folder: Path) -> Any:
    """Returns transformers' model; the audio tokenizer lies in ``audio_tokenizer``."""
    from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

    tokenizer = save_tokenizer(folder, V2_SPECIALS, TEMPLATE)
    torch.manual_seed(11)
    config = HiggsAudioV2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        num_codebooks=BOOKS,
        codebook_size=CODES + 2,
        audio_token_id=tokenizer.convert_tokens_to_ids("<|AUDIO_OUT|>"),
        audio_bos_token_id=tokenizer.convert_tokens_to_ids("<|audio_out_bos|>"),
        audio_delay_token_id=tokenizer.convert_tokens_to_ids("<|reserved_special_token_6|>"),
        audio_stream_bos_id=BOC,
        audio_stream_eos_id=EOC,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = HiggsAudioV2ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
        model.audio_lm_head.weight.view(BOOKS, CODES + 2, -1)[:, EOC] *= 0.5  # not all end at once
    model.save_pretrained(folder)
    reference_codec().save_pretrained(folder / "audio_tokenizer")
    return model


@dataclass(frozen=True)
class TinyV3:
    """transformers' Qwen3 and the table of all codebooks' ids [BOOKS * (CODES + 2), hidden]."""

    body: Any
    table: Tensor

    @torch.no_grad()
    def rows(self, prompt: list[int], audio_rows: np.ndarray | None, frames: int) -> list[list[int]]:
        """Greedy output rows; ids of -1 in the prompt stand for rows of audio."""
        ids = torch.tensor(prompt)
        x = self.body.embed_tokens(ids.clamp(min=0))
        if audio_rows is not None:
            x[ids < 0] = self._embed(torch.as_tensor(audio_rows))
        rows: list[list[int]] = []
        end = None
        while len(rows) < frames + BOOKS - 1 and (end is None or len(rows) < end + BOOKS - 1):
            hidden = self.body(inputs_embeds=x[None]).last_hidden_state[0, -1]
            row = (self.table @ hidden).view(BOOKS, -1).argmax(1).tolist()
            row = [code if k <= len(rows) else BOC for k, code in enumerate(row)]
            if end is None and len(rows) >= BOOKS and row[0] == EOC:
                end = len(rows)
            rows.append(row)
            x = torch.cat([x, self._embed(torch.tensor([row]))])
        return rows

    def _embed(self, codes: Tensor) -> Tensor:
        return self.table[codes + torch.arange(BOOKS) * (CODES + 2)].sum(1)


def v3_frames(rows: list[list[int]], frames: int) -> list[list[int]]:
    """The frames that rows hold, out of their diagonals."""
    end = next((i for i, row in enumerate(rows) if i >= BOOKS and row[0] == EOC), frames)
    count = min(end, len(rows) - BOOKS + 1)
    return [[min(rows[f + k][k], CODES - 1) for k in range(BOOKS)] for f in range(count)]


def save_v3(folder: Path) -> TinyV3:
    """All weights in one file, the audio tokenizer's among them, as published."""
    from safetensors.torch import save_file
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = save_tokenizer(folder, V3_SPECIALS)
    torch.manual_seed(17)
    text = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )
    body = Qwen3Model(text).eval()
    table = torch.randn(BOOKS * (CODES + 2), 32) * 0.4
    table[EOC] *= 1.15
    with torch.no_grad():
        for name, parameter in body.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    tensors = {f"body.{name}": tensor for name, tensor in body.state_dict().items() if name != "embed_tokens.weight"}
    tensors["tied.embedding.text_embedding.weight"] = body.embed_tokens.weight.detach()
    tensors["tied.embedding.modality_embeddings.0.embedding.weight"] = table
    codec = {f"tied.embedding.modality_embeddings.0.model.{k}": v for k, v in reference_codec().state_dict().items()}
    save_file({name: tensor.contiguous() for name, tensor in (tensors | codec).items()}, folder / "model.safetensors")
    sizes = text.to_dict()
    sizes |= {"rope_theta": None, "rope_parameters": None, "tie_word_embeddings": True}
    audio = {"encoder_type": "discrete", "num_codebooks": BOOKS, "vocab_size": CODES + 2, "out_dim": 32}
    config = {
        "architectures": ["HiggsMultimodalQwen3ForConditionalGeneration"],
        "model_type": "higgs_multimodal_qwen3",
        "audio_token_id": -100,
        "text_config": sizes,
        "audio_encoder_config": {**audio, "tie_word_embeddings": True, "use_delay_pattern": True},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "audio_tokenizer").mkdir()
    (folder / "audio_tokenizer" / "config.json").write_text(json.dumps(CODEC))
    return TinyV3(body, table)


def recording(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """Samples of noise that swells and fades."""
    count = round(seconds * rate)
    noise = np.random.default_rng(seed).standard_normal(count)
    return (0.2 * noise * np.sin(np.linspace(0, 9, count))).astype(np.float32)
