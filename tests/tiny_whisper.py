"""A tiny multilingual Whisper of random weights, in the format that real checkpoints have, and what transformers makes
of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.modeling_outputs import BaseModelOutput

from sgl_omni.models.whisper.task import repeats_itself

WIDTH, MELS, FRAMES, POSITIONS = 32, 16, 50, 64
RATE = 16_000
LANGUAGES = ("en", "de", "fr")
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
_TIMES = [f"<|{n / 50:.2f}|>" for n in range(FRAMES + 1)]
IDS = {token: i for i, token in enumerate([*_ALPHABET, *_SPECIAL, *_TIMES])}
EOS, START, PREVIOUS = IDS["<|endoftext|>"], IDS["<|startoftranscript|>"], IDS["<|startofprev|>"]
NO_TIMESTAMPS, FIRST_TIME = IDS["<|notimestamps|>"], IDS["<|0.00|>"]
SUPPRESSED = [
    *(i for letter, i in IDS.items() if len(letter) == 1 and not (letter.isascii() and letter.isalpha())),
    *range(START, NO_TIMESTAMPS),
]
SUPPRESSED_FIRST = [IDS["a"], IDS["b"], IDS["c"], EOS]

_SCALES = {"conv": 0.3, "embed_tokens": 0.3, "embed_positions": 1.0, "encoder_attn": 0.6, "": 0.4}


def build(folder: Path, *, multilingual: bool = True, seed: int = 8) -> Any:
    """Fills the folder; returns transformers' own model of what is in it."""
    torch.manual_seed(seed)
    config = transformers.WhisperConfig(
        vocab_size=len(IDS),
        d_model=WIDTH,
        num_mel_bins=MELS,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=FRAMES,
        max_target_positions=POSITIONS,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    reference = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "layer_norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.05)  # larger ones would choose the tokens by themselves
            elif "encoder.embed_positions" not in name:
                parameter.normal_(0, next(scale for part, scale in _SCALES.items() if part in name))
    _say_more_than_one_thing(reference)
    generation = reference.generation_config
    facts = {
        "suppress_tokens": SUPPRESSED,
        "begin_suppress_tokens": SUPPRESSED_FIRST,
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": PREVIOUS,
        "max_initial_timestamp_index": 25,
        "is_multilingual": multilingual,
    }
    for name, value in facts.items():
        setattr(generation, name, value)
    if multilingual:
        generation.lang_to_id = {f"<|{code}|>": IDS[f"<|{code}|>"] for code in LANGUAGES}
        generation.task_to_id = {task: IDS[f"<|{task}|>"] for task in ("transcribe", "translate")}
    reference.save_pretrained(folder, max_shard_size="60KB")
    _tokenizer().save_pretrained(folder)
    extractor().save_pretrained(folder)
    return reference


@torch.no_grad()
def _say_more_than_one_thing(reference: Any) -> None:
    """Takes away what all outputs have in common, which would choose the tokens by itself."""
    decoder = reference.model.decoder
    table = decoder.embed_tokens.weight
    table *= 2 / table.norm(dim=-1, keepdim=True)
    table[EOS] *= 1.35
    table[FIRST_TIME:] *= 0.8
    clips = [noise(seed, 1.0) for seed in range(48)]
    heard = torch.cat([extractor()(clip, sampling_rate=RATE, return_tensors="pt").input_features for clip in clips])
    allowed = torch.tensor(sorted(set(IDS.values()) - set(SUPPRESSED)))
    said = allowed[torch.randint(len(allowed), (48, POSITIONS))]
    for _ in range(3):
        hidden = reference.model(heard, decoder_input_ids=said).last_hidden_state.flatten(0, 1)
        decoder.layer_norm.weight /= hidden.std(0)
        decoder.layer_norm.bias -= hidden.mean(0)


def noise(seed: int, seconds: float) -> np.ndarray:
    """A sound that changes ten times a second, float32 [samples]: it says nothing, and each says something else."""
    rng = np.random.default_rng(seed)
    pieces = []
    for _ in range(round(seconds * 10)):
        time = np.arange(RATE // 10) / RATE
        tones = [np.sin(2 * np.pi * rng.uniform(80, 6000) * time) for _ in range(3)]
        pieces.append(rng.uniform(0, 0.3) * sum(tones) + rng.normal(0, rng.uniform(0.001, 0.2), len(time)))
    return (np.concatenate(pieces) * 0.3).astype(np.float32)


def extractor() -> Any:
    """Windows of one second."""
    return transformers.WhisperFeatureExtractor(feature_size=MELS, chunk_length=1)


def _tokenizer() -> Any:
    """Bytes are its only tokens, beside those that Whisper has for itself."""
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(_ALPHABET)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in _TIMES])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


class HearsToTheEnd(LogitsProcessor):
    """This project's own rule: no end after a pair of times, while more than half a second is left of the window."""

    def __init__(self, generation: Any, prompt_length: int, seconds: float, time_step: float) -> None:
        self._eos, self._first_time = generation.eos_token_id, generation.no_timestamps_token_id + 1
        self._prompt_length = prompt_length
        self._heard_until = max(0, int((seconds - 0.5) / time_step))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = input_ids[0, self._prompt_length :].tolist()
        pair = len(said) > 1 and min(said[-2:]) >= self._first_time
        if pair and said[-1] - self._first_time < self._heard_until:
            scores = scores.clone()
            scores[:, self._eos] = float("-inf")
        return scores


def states_of(reference: Any, features: Any) -> torch.Tensor:
    """features [mels, frames] -> states [frames / 2, width]."""
    with torch.no_grad():
        states: torch.Tensor = reference.model.encoder(torch.as_tensor(features)[None]).last_hidden_state[0]
    return states


def generate(
    reference: Any,
    states: torch.Tensor,
    prompt: Sequence[int],
    *,
    timestamps: bool = False,
    seconds: float = 1.0,
    time_step: float = 0.02,
) -> list[int]:
    """What transformers says after a prompt, with its own rules, end and all; ``states`` [frames, width]."""
    generation, rules = reference.generation_config, list[LogitsProcessor]()
    if timestamps:
        rules.append(HearsToTheEnd(generation, len(prompt), seconds, time_step))
        rules.append(WhisperTimeStampLogitsProcessor(generation, len(prompt)))
    said: list[int] = GenerationMixin.generate(
        reference,
        logits_processor=LogitsProcessorList(rules),
        encoder_outputs=BaseModelOutput(last_hidden_state=states[None]),
        decoder_input_ids=torch.tensor([list(prompt)]),
        max_new_tokens=reference.config.max_target_positions - len(prompt),
        do_sample=False,
    )[0, len(prompt) :].tolist()
    return said


def detect_language(reference: Any, states: torch.Tensor) -> int:
    """The id of the language that transformers hears."""
    heard = BaseModelOutput(last_hidden_state=states[None])
    return int(reference.detect_language(encoder_outputs=heard, generation_config=reference.generation_config)[0])


def transcribe(
    reference: Any,
    windows: Sequence[torch.Tensor],
    *,
    seconds: Sequence[float] | None = None,
    language: str | None = None,
    task: str = "transcribe",
    timestamps: bool = False,
    history: Sequence[int] = (),
) -> list[list[int]]:
    """What is said in each window, one after another, each with its end where it has one.

    ``seconds``: how long each is, by default one.
    """
    generation, length = reference.generation_config, reference.config.max_target_positions
    base = [generation.decoder_start_token_id or START]
    if generation.is_multilingual:
        found = detect_language(reference, windows[0]) if language is None else generation.lang_to_id[f"<|{language}|>"]
        base += [found, generation.task_to_id[task]]
    base += [] if timestamps else [generation.no_timestamps_token_id]
    said, before = [], list(history)
    for states, length_heard in zip(windows, seconds or [1.0] * len(windows), strict=True):
        kept = before[-(length // 2 - 1) :]
        prompt = [*([generation.prev_sot_token_id, *kept] if kept else []), *base]
        tokens = generate(reference, states, prompt, timestamps=timestamps, seconds=length_heard)
        said.append(tokens)
        ended = tokens[-1] == generation.eos_token_id
        before = [*before, *tokens[:-1]] if ended and not repeats_itself(tokens[:-1]) else []
    return said
