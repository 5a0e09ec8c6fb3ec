"""Tokenizers of the published vocabularies' sizes without what was learned: letters are tokens, ids of marks are real.

All other ids are words of their own, which no text is split into, so that whatever a random model says can be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.sizes.published import ASR_IDS, OMNI_IDS, QWEN_IDS, ROLE_IDS

CHAT_TEMPLATE = (
    "{% for turn in messages %}<|im_start|>{{ turn.role }}\n{{ turn.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HIGGS_MARKS = ("<|tts|>", "<|ref_text|>", "<|ref_audio|>", "<|text|>", "<|audio|>", "<|text_end|>", "<|audio_end|>")
MOSS_IDS = {**QWEN_IDS, "<|spoken|>": 151656, "<|heard|>": 151654, "<|audio_start|>": 151669, "<|audio_end|>": 151670}
CSM_IDS = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|AUDIO|>": 128002, "<|audio_eos|>": 128003}
MING_IDS = {
    **QWEN_IDS,
    "<|vision_start|>": 151652,
    "<|vision_end|>": 151653,
    "<|vision_pad|>": 151654,
    "<audioPatch>": 151705,
    "<audio>": 151706,
}
MING_MOE_IDS = {
    "<|endoftext|>": 126081,
    "<role>": 126089,  # assumed, as the next one and </spk>: the others are known from code that reads the checkpoint
    "</role>": 126090,
    "<audioPatch>": 126357,
    "<audio>": 126358,
    "<spk>": 126368,
    "</spk>": 126369,
}
LING_WORDS = 126080
LLAMA_WORDS = 128000
QWEN_WORDS = 151643
WHISPER_WORDS = 50257


def write_words(family: str, folder: Path) -> None:
    """The tokenizer of a family, and what else of its folder belongs to text and features."""
    if family == "whisper":
        _whisper(folder)
    elif family == "csm":
        _save(folder, LLAMA_WORDS, CSM_IDS, end="<|end_of_text|>")
    elif family == "text_llm":
        _save(folder, QWEN_WORDS, QWEN_IDS, template=CHAT_TEMPLATE)
    elif family == "higgs_tts":
        marks = {mark: 151669 + i for i, mark in enumerate(HIGGS_MARKS)}
        _save(folder, QWEN_WORDS, QWEN_IDS | marks)
    elif family == "moss_tts_local":
        _save(folder, QWEN_WORDS, MOSS_IDS)
    elif family == "ming_omni_tts":
        _save(folder, QWEN_WORDS, MING_IDS)
    elif family == "ming_omni_tts_moe":
        _save(folder, LING_WORDS, MING_MOE_IDS, end="<|endoftext|>")
    elif family == "qwen3_asr":
        _save(folder, QWEN_WORDS, ASR_IDS, words=ROLE_IDS, plain={"<asr_text>": 151704})
    else:
        _save(folder, QWEN_WORDS, OMNI_IDS, words=ROLE_IDS)


def _save(
    folder: Path,
    size: int,
    marks: Mapping[str, int],
    *,
    words: Mapping[str, int] | None = None,
    plain: Mapping[str, int] | None = None,
    template: str | None = None,
    end: str = "<|im_end|>",
) -> None:
    """``words`` are found in texts, ``marks`` are special; ``plain`` are added tokens that are not."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary: dict[str, int] = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    named = {**(words or {}), **(plain or {})}
    taken = set(named.values())
    vocabulary |= {f"Ġw{i:x}": i for i in range(len(vocabulary), size) if i not in taken}
    tokenizer = Tokenizer(models.BPE({**vocabulary, **named, **marks}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.add_tokens([AddedToken(word, special=False) for word in named])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _whisper(folder: Path) -> None:
    from transformers import WhisperFeatureExtractor
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    languages = [f"<|{code}|>" for code in LANGUAGES]
    marks = ["<|endoftext|>", "<|startoftranscript|>", *languages, "<|translate|>", "<|transcribe|>"]
    marks += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    ids = {mark: WHISPER_WORDS + i for i, mark in enumerate(marks)}
    times = {f"<|{i * 0.02:.2f}|>": WHISPER_WORDS + len(marks) + i for i in range(1501)}
    _save(folder, WHISPER_WORDS, ids, plain=times, end="<|endoftext|>")
    extractor: Any = WhisperFeatureExtractor(feature_size=128)  # type: ignore[no-untyped-call]
    extractor.save_pretrained(folder)
    generation = {
        "is_multilingual": True,
        "lang_to_id": {language: ids[language] for language in languages},
        "task_to_id": {task: ids[f"<|{task}|>"] for task in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "begin_suppress_tokens": [220, ids["<|endoftext|>"]],
        "suppress_tokens": [*range(ids["<|startoftranscript|>"], ids["<|notimestamps|>"])],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
