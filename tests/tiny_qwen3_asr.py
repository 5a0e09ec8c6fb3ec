"""A tiny random Qwen3-ASR in both published layouts, and what transformers' own model and processor make of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from sgl_omni.audio.windows import cut_at_quiet_places

WIDTH, MELS, POSITIONS, RATE = 32, 32, 1024, 16_000
WINDOW = 1.5
"""Seconds, where tests cut recordings."""

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>")
MARK = "<asr_text>"
TEMPLATE = (
    "{% set ns = namespace(context='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.context = m.content if m.content is string else m.content[0].text %}{% endfor %}"
    "<|im_start|>system\n{{ ns.context }}<|im_end|>\n"
    "<|im_start|>user\n<|audio_start|><|audio_pad|><|audio_end|><|im_end|>\n<|im_start|>assistant\n"
    "{% if messages[-1].role == 'assistant' %}"
    "{{ messages[-1].content if messages[-1].content is string else messages[-1].content[0].text }}{% endif %}"
)


def build(folder: Path, *, authors: bool = True, tied: bool = True, seed: int = 6) -> Reference:
    """Fills the folder, in the layout of the model's ``authors`` or in that of transformers."""
    import transformers

    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    audio = {
        "num_mel_bins": MELS,
        "encoder_layers": 2,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "d_model": 32,
        "n_window": 50,
        "n_window_infer": 200,
        "output_dim": WIDTH,
        "downsample_hidden_size": 8,
    }
    text = {
        "model_type": "qwen3",
        "vocab_size": len(tokenizer),
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": POSITIONS,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (*SPECIALS, MARK)}
    ends = [ids["<|endoftext|>"], ids["<|im_end|>"]]
    config = transformers.Qwen3ASRConfig(
        audio_config=audio,
        text_config=text,
        audio_token_id=ids["<|audio_pad|>"],
        pad_token_id=ends[1],
        eos_token_id=ends,
        tie_word_embeddings=tied,
    )
    model = transformers.Qwen3ASRForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_post" in name:
                parameter.uniform_(0.5, 1.5) if name.endswith("weight") else parameter.zero_()
            elif name.endswith("bias"):
                parameter.normal_(0, 0.05)
            else:
                parameter.normal_(0, 1.5 * parameter[0].numel() ** -0.5)
        table = model.lm_head.weight
        table *= 2 / table.norm(dim=-1, keepdim=True)
        table[ends] *= 1.4
        table[ids[MARK]] *= 1.8
        table[[ids[token] for token in SPECIALS if token not in ("<|endoftext|>", "<|im_end|>")]] *= 0.1
    model.generation_config.eos_token_id = ends
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    extractor = transformers.Qwen3ASRFeatureExtractor(feature_size=MELS)
    processor = transformers.Qwen3ASRProcessor(extractor, tokenizer, chat_template=TEMPLATE)
    if authors:
        _as_authors_do(folder, config.to_dict() | {"audio_config": audio, "text_config": text}, model)
    else:
        processor.save_pretrained(folder)
    return Reference(folder, model, processor)


def _as_authors_do(folder: Path, config: dict[str, Any], model: Any) -> None:
    """Their names of tensors and fields, and their positions of three axes."""
    names = {
        "model.language_model.": "thinker.model.",
        "model.audio_tower.": "thinker.audio_tower.",
        "model.multi_modal_projector.linear_1.": "thinker.audio_tower.proj1.",
        "model.multi_modal_projector.linear_2.": "thinker.audio_tower.proj2.",
        "lm_head.": "thinker.lm_head.",
    }
    tensors = {}
    for name, tensor in model.state_dict().items():
        old = next(old for old in names if name.startswith(old))
        if not (old == "lm_head." and config["tie_word_embeddings"]):
            tensors[name.replace(old, names[old])] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    text = {**config["text_config"], "model_type": "qwen3_asr_text", "rope_theta": 10000.0}
    text["rope_scaling"] = {"mrope_section": [3, 3, 2], "mrope_interleaved": True, "rope_type": "default"}
    del text["rope_parameters"]
    thinker = {
        "model_type": "qwen3_asr_thinker",
        "audio_config": {**config["audio_config"], "model_type": "qwen3_asr_audio_encoder", "conv_chunksize": 500},
        "text_config": text,
        "audio_token_id": config["audio_token_id"],
    }
    write(
        folder / "config.json",
        {
            "architectures": ["Qwen3ASRForConditionalGeneration"],
            "model_type": "qwen3_asr",
            "thinker_config": thinker,
            "support_languages": ["Chinese", "English", "German"],
        },
    )
    mel = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS, "sampling_rate": RATE}
    write(folder / "preprocessor_config.json", {**mel, "hop_length": 160, "n_fft": 400, "chunk_length": 30})


def write(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value))


def _tokenizer() -> Any:
    """Bytes are its only tokens, beside the marks; as in the published ones, that of the text is no special one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    tokenizer.add_tokens([AddedToken(MARK, special=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
    )


def noise(seed: int, seconds: float) -> np.ndarray:
    """A sound that changes ten times a second, float32 [samples]: it says nothing, and each says something else."""
    rng = np.random.default_rng(seed)
    pieces = []
    for _ in range(max(1, round(seconds * 10))):
        time = np.arange(RATE // 10) / RATE
        tones = [np.sin(2 * np.pi * rng.uniform(80, 6000) * time) for _ in range(3)]
        pieces.append(rng.uniform(0, 0.3) * sum(tones) + rng.normal(0, rng.uniform(0.001, 0.2), len(time)))
    return (np.concatenate(pieces) * 0.3).astype(np.float32)[: max(1, round(seconds * RATE))]


@dataclass(frozen=True)
class Reference:
    """The same weights in transformers, greedy; recordings cut where the pipeline cuts them."""

    folder: Path
    model: Any
    processor: Any

    def inputs(self, samples: np.ndarray, language: str | None = None, prompt: str | None = None) -> Any:
        """``language``: a code."""
        return self.processor.apply_transcription_request(samples, language=language, prompt=prompt)

    def ids(self, samples: np.ndarray, most: int | None = None, **way: Any) -> list[int]:
        """Of what is said in one window, the end included."""
        inputs = self.inputs(samples, **way)
        rows = int((inputs["input_ids"] == self.model.config.audio_token_id).sum())
        most = 2 * rows + 64 if most is None else min(most, 2 * rows + 64)
        with torch.no_grad():
            found = self.model.generate(**inputs, max_new_tokens=most, do_sample=False)
        return list(found[0, inputs["input_ids"].shape[1] :].tolist())

    def windows(self, samples: np.ndarray, **way: Any) -> list[list[int]]:
        return [self.ids(samples[a:b], **way) for a, b in cut_at_quiet_places(samples, RATE, WINDOW)]

    def decode(self, ids: list[int]) -> str:
        return str(self.processor.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
