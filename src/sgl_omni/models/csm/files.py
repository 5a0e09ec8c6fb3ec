"""What is known of the model without loading it, and a look at a checkpoint before anything starts.

The pipeline class imports it, so it imports neither torch nor numpy.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

from sgl_omni.engine.headers import FLOATS
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.csm.spec import CsmSpec, engine_shapes
from sgl_omni.models.folder import check_folder, check_tensors, check_weights, find_folder, require
from sgl_omni.models.mimi_shapes import mimi_shapes
from sgl_omni.models.tokens import check_tokens

TEXT_END = "<|end_of_text|>"
ARCHITECTURE = "CsmForConditionalGeneration"
SPEAKERS = tuple(map(str, range(10)))
MAX_REFERENCES, MAX_REFERENCE_SECONDS = 8, 60.0
TABLES = ("backbone_model.embed_tokens.embed_audio_tokens.weight", "depth_decoder.model.embed_tokens.weight")
"""Backbone and depth decoder have one table of codes, which a checkpoint holds under either name, or both."""
UNREAD = ("*.rotary_emb.inv_freq", "*.audio_tokens_offsets", *TABLES)
"""What checkpoints may hold besides."""
_FIELDS = (
    "hidden_size",
    "text_vocab_size",
    "vocab_size",
    "num_codebooks",
    "max_position_embeddings",
    "bos_token_id",
    "audio_token_id",
    "audio_eos_token_id",
    "codebook_eos_token_id",
    "depth_decoder_config.hidden_size",
    "codec_config.codebook_size",
    "codec_config.hidden_size",
    "codec_config.upsampling_ratios",
)
_CODEC = {
    "model_type": "mimi",
    "audio_channels": 1,
    "use_causal_conv": True,
    "pad_mode": "constant",
    "trim_right_ratio": 1.0,
    "use_conv_shortcut": False,
    "hidden_act": "gelu",
}
"""What the streamed decoder takes for granted; a config that does not say it has these values."""


def checked(model_path: str) -> dict[str, Any]:
    """The model's config. Raises ``InvalidRequest`` that names the file or field that is missing or wrong."""
    folder = find_folder(model_path)
    file = folder / "config.json"
    config = check_folder(folder, (ARCHITECTURE,), weights=(), fields=_FIELDS)
    if not config.get("tie_codebooks_embeddings", True):
        raise _wrong(file, "tie_codebooks_embeddings", False, "only true is supported")
    codec = config["codec_config"]
    for field, value in _CODEC.items():
        if codec.get(field, value) != value:
            raise _wrong(file, f"codec_config.{field}", codec[field], f"only {value!r} is supported")
    books, size = config["num_codebooks"], config["vocab_size"]
    if not isinstance(books, int) or books < 2:
        raise _wrong(file, "num_codebooks", books, "a frame has 2 codes or more")
    same = {"codec_config.num_quantizers": books, "depth_decoder_config.num_codebooks": books}
    for field, value in {**same, "depth_decoder_config.vocab_size": size}.items():
        found = require(config, field, file)
        if found != value:
            raise _wrong(file, field, found, f"the backbone has {value}")
    if codec["codebook_size"] > size:
        raise _wrong(file, "codec_config.codebook_size", codec["codebook_size"], f"vocab_size is {size}")
    for field in ("audio_token_id", "audio_eos_token_id", "bos_token_id"):
        if not (isinstance(config[field], int) and 0 <= config[field] < config["text_vocab_size"]):
            raise _wrong(file, field, config[field], f"text_vocab_size is {config['text_vocab_size']}")
    end = config["codebook_eos_token_id"]
    if not (isinstance(end, int) and 0 <= end < codec["codebook_size"]):
        raise _wrong(file, "codebook_eos_token_id", end, f"codes are 0..{codec['codebook_size'] - 1}")
    entries = check_weights(folder, FLOATS)
    table = next((name for name in TABLES if name in entries), TABLES[0])
    check_tensors(
        folder,
        lambda: chain(engine_shapes(CsmSpec.parse(config), table), mimi_shapes(codec, "codec_model.")),
        parts=["codec_model."],
        ignore=UNREAD,
        entries=entries,
    )
    check_tokens(folder, config, "text_vocab_size", [TEXT_END])
    return config


def _wrong(file: Path, field: str, value: Any, why: str) -> InvalidRequest:
    return InvalidRequest(f"{file}: {field} is {value!r}; {why}", param="model_path")
