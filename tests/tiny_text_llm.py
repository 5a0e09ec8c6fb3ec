"""Tiny language models of random weights, with a real tokenizer, as their makers publish them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCABULARY = 384
TEXT = (
    "the quick brown fox jumps over the lazy dog",
    "what is the weather like in the mountains today",
    "a quiet river runs past the old stone bridge and on to the sea",
    "naïve café déjà vu, größer, señor, 日本語の文章, привет мир",
)
TEMPLATE = (
    "{% if tone is defined %}{{ '[' + tone + ']' }}{% endif %}"
    "{% for turn in messages %}"
    "{% if turn['role'] == 'system' and not loop.first %}{{ raise_exception('the system speaks first') }}{% endif %}"
    "{{ '<|im_start|>' + turn['role'] + '\\n' + turn['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.4,  # far from a tie between the two likeliest tokens
}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Qwen3Moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "Qwen2": {},
    "Llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "Mistral": {"sliding_window": None},
}


def build(folder: Path, kind: str = "Qwen3", *, seed: int = 0, generation: dict[str, Any] | None = None) -> Path:
    """The folder, with weights that are the same each time. ``generation``: the file of that name; greedy if none."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SHAPE, **KINDS[kind])
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():  # norms that do nothing would prove nothing
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    fields = {"do_sample": False, "eos_token_id": [2, 0]} if generation is None else generation
    (folder / "generation_config.json").write_text(json.dumps(fields))
    save_tokenizer(folder, marks_beginning=kind == "Llama")
    return folder


def save_tokenizer(folder: Path, *, marks_beginning: bool = False, template: str | None = TEMPLATE) -> None:
    """Byte-level BPE, trained on a few lines, so that many characters are split over tokens."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 3, trainer)
    if marks_beginning:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
        )
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[2], chat_template=template
    )
    whole.save_pretrained(folder)


class Reference:
    """The same checkpoint in transformers, greedy."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def chat_ids(self, *texts: str, **options: Any) -> list[int]:
        """Of a conversation that the user begins, in turns."""
        roles = ("user", "assistant")
        turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def ids(self, prompt: list[int], most: int, **options: Any) -> list[int]:
        """Of the answer, the end included."""
        asked = torch.tensor([prompt])
        found = self.model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
            **{"eos_token_id": [2, 0], **options},
        )
        return list(found[0, len(prompt) :].tolist())

    def text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
