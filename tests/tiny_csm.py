"""A tiny CSM: a random checkpoint in real format, made and spoken by transformers' own classes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

BOOKS, CODES, SPECIAL_CODES, WIDTH, WINDOW = 4, 32, 3, 32, 6
RATE, FRAME = 24000, 1920
TEXTS = ("Good morning.", "The bus was late.", "Why?", "One, two, <|AUDIO|> three.")
SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|AUDIO|>", "<|audio_eos|>")


@dataclass(frozen=True)
class Tiny:
    """``folder`` holds the checkpoint, and the others are transformers' own of it."""

    folder: Path
    model: Any
    processor: Any

    def codes(self, text: str, frames: int, speaker: str = "0", heard: Sequence[tuple[str, np.ndarray]] = ()) -> Tensor:
        """The most likely codes int64 [at most frames, BOOKS], without the frame of the end.

        ``heard``: words and samples of what the speaker said before.
        """
        turns = "".join(f"{_turn(speaker, words)}<|AUDIO|><|audio_eos|>" for words, _ in heard)
        inputs = self.processor(text=turns or " ", audio=[samples for _, samples in heard] or None)
        first, last = (self.processor.tokenizer.convert_tokens_to_ids(token) for token in SPECIALS[:2])
        # what a caller writes is never a special token
        said = self.processor.tokenizer(f"[{speaker}]{text}", add_special_tokens=False, split_special_tokens=True)
        row = torch.tensor([[first, *said["input_ids"], last]])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], row], 1) if heard else row
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        found = self.model.generate(
            **inputs, max_new_tokens=frames, do_sample=False, depth_decoder_do_sample=False, output_audio=False
        )[0]
        return found[~(found == 0).all(1)]

    @torch.no_grad()
    def audio(self, codes: Tensor) -> np.ndarray:
        """Samples of codes [frames, BOOKS]."""
        return self.model.codec_model.decode(codes.T[None]).audio_values[0, 0].numpy()


def _turn(speaker: str, text: str) -> str:
    return f"<|begin_of_text|>[{speaker}]{text}<|end_of_text|>"


def build(folder: Path, frames: int) -> Tiny:
    """Writes the checkpoint. One of the texts ends by itself within ``frames``."""
    import transformers

    torch.manual_seed(5)
    tokenizer = _tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
    depth = {"num_codebooks": BOOKS, "backbone_hidden_size": WIDTH, "vocab_size": CODES + SPECIAL_CODES}
    config = transformers.CsmConfig(
        num_codebooks=BOOKS,
        vocab_size=CODES + SPECIAL_CODES,
        text_vocab_size=len(tokenizer),
        **_decoder(2, 4, WIDTH),
        max_position_embeddings=256,
        pad_token_id=ids["<|AUDIO|>"],
        codebook_pad_token_id=CODES + 2,
        codebook_eos_token_id=0,
        bos_token_id=ids["<|begin_of_text|>"],
        audio_token_id=ids["<|AUDIO|>"],
        audio_eos_token_id=ids["<|audio_eos|>"],
        depth_decoder_config={**depth, **_decoder(2, 2, 16)},
        codec_config=_codec(),
    )
    model = transformers.CsmForConditionalGeneration(config).eval()
    # transformers before 5.24 ties the two only where a checkpoint is read
    model.depth_decoder.model.embed_tokens.weight = model.backbone_model.embed_tokens.embed_audio_tokens.weight
    _scatter(model)
    model.generation_config.update(do_sample=True, temperature=0.9, top_k=20)
    processor = transformers.CsmProcessor(transformers.EncodecFeatureExtractor(sampling_rate=RATE), tokenizer)
    tiny = Tiny(folder, model, processor)
    _let_end(tiny, TEXTS[1], frames // 2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return tiny


def _decoder(layers: int, heads: int, width: int) -> dict[str, Any]:
    """The long positions of the published model's RoPE, on a smaller scale."""
    rope = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 0.125, "high_freq_factor": 0.5}
    return {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": 8,
        "rope_parameters": {**rope, "original_max_position_embeddings": 16},
    }


def _codec() -> dict[str, Any]:
    return {
        "model_type": "mimi",
        "num_quantizers": BOOKS,
        "codebook_size": CODES,
        "codebook_dim": 8,
        "hidden_size": 16,
        "num_filters": 2,
        "vector_quantization_hidden_dimension": 8,
        "upsample_groups": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": WINDOW,
    }


@torch.no_grad()
def _scatter(model: Any) -> None:
    """Weights far from those that a new model has, so that all of them matter."""
    for name, tensor in model.named_parameters():
        if name.startswith("codec_model."):
            if name.endswith("scale.scale"):
                tensor.uniform_(0.3, 0.9)
        elif "norm" in name:
            tensor.uniform_(0.5, 1.5)
        else:
            tensor.normal_(0, 0.4)
    for layer in [*model.backbone_model.layers, *model.depth_decoder.model.layers]:
        layer.self_attn.q_proj.weight.mul_(2)
    # ids that are no codes are never the most likely ones, as the codec could not decode them
    model.lm_head.weight[CODES:] = 0
    model.depth_decoder.codebooks_head.weight[:, :, CODES:] = 0
    for part in model.codec_model.modules():
        if isinstance(part, torch.nn.Conv1d) and part.out_channels == 1:  # the samples, which are to be small
            part.weight.mul_(0.05)
            part.bias.mul_(0.05)
        if hasattr(part, "embed_sum"):
            part.embed_sum.normal_(0, 1)
            part.cluster_usage.uniform_(0.5, 2)


@torch.no_grad()
def _let_end(tiny: Tiny, text: str, place: int) -> None:
    """Renames codes so that the frame of a text at a place is the one that means the end."""
    model = tiny.model
    model.config.codebook_eos_token_id = -1
    frame = tiny.codes(text, place + 1)[place].tolist()
    model.config.codebook_eos_token_id = 0
    table = model.backbone_model.embed_tokens.embed_audio_tokens.weight.view(BOOKS, -1, WIDTH)
    heads = [model.lm_head.weight, *(head.T for head in model.depth_decoder.codebooks_head.weight)]
    for book, code in enumerate(frame):
        for rows in (table[book], heads[book]):
            rows[[0, code]] = rows[[code, 0]]


def _tokenizer() -> Any:
    """Of bytes, with merges, which puts a mark before and after a text of its own, as Llama's."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS, "[0] [1] [2]"], trainer)
    first, last = SPECIALS[:2]
    marks = [(token, made.token_to_id(token)) for token in (first, last)]
    made.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", special_tokens=marks)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=first, eos_token=last, pad_token=last)


def recording(seconds: float, rate: int = RATE, seed: int = 0) -> bytes:
    """A file of noise."""
    import soundfile

    file = io.BytesIO()
    samples = np.random.default_rng(seed).normal(0, 0.3, round(seconds * rate)).astype(np.float32)
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()
