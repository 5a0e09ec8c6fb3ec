"""Where a checkpoint's parts lie, and a look at all of them before anything starts. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.folder import check_folder, check_tensors, find_folder, read_json, read_sizes
from sgl_omni.models.moss_tts_local.codec_shapes import codec_shapes
from sgl_omni.models.moss_tts_local.codec_spec import CodecSpec
from sgl_omni.models.moss_tts_local.spec import MossSpec, engine_shapes
from sgl_omni.models.numbers import check_ids
from sgl_omni.models.tokens import check_tokens

ARCHITECTURE = "MossTTSLocalModel"
MAX_REFERENCE_SECONDS = 60.0
_CODEC_ID = "OpenMOSS-Team/MOSS-Audio-Tokenizer-v2"
UNREAD = ("text_lm_head.weight", "audio_lm_heads.*.weight", "*.rotary_emb.inv_freq")
"""What checkpoints may hold besides: heads are the embeddings."""
_FIELDS = (
    "qwen3_config.hidden_size",
    "gpt2_config.n_embd",
    "n_vq",
    "sampling_rate",
    "im_start_token_id",
    "im_end_token_id",
    "audio_start_token_id",
    "audio_end_token_id",
    "audio_user_slot_token_id",
    "audio_assistant_slot_token_id",
)
_SLOT = "audio_assistant_gen_slot_token_id"
"""In place of the last, where it is there."""
_TOKENS = {"im_start_token_id": "<|im_start|>", "im_end_token_id": "<|im_end|>"}


def checked(model_path: str) -> dict[str, Any]:
    """The model's config. Raises ``InvalidRequest`` that names the file or field that is missing or wrong."""
    folder = find_folder(model_path)
    config = check_folder(folder, (ARCHITECTURE,), weights=(), fields=_FIELDS)
    codec = codec_folder(folder)
    try:
        spec = CodecSpec.parse(read_sizes(codec))
    except StartupError as error:
        raise InvalidRequest(f"{codec / 'config.json'}: {error}", param="model_path") from error
    if spec.sample_rate != config["sampling_rate"]:
        raise InvalidRequest(
            f"{folder / 'config.json'}: sampling_rate is {config['sampling_rate']}, and the audio tokenizer in {codec} "
            f"has {spec.sample_rate}",
            param="model_path",
        )
    check_tensors(folder, lambda: engine_shapes(MossSpec.parse(config)), ignore=UNREAD)
    check_ids(config, (*_FIELDS, _SLOT), folder / "config.json", config["qwen3_config"]["vocab_size"])
    check_tokens(folder, config, "qwen3_config.vocab_size", ids=_TOKENS)
    books, known = MossSpec.parse(config).num_codebooks, spec.quantizer.num_codebooks
    if books > known:
        raise InvalidRequest(
            f"{folder / 'config.json'}: n_vq is {books}, and the audio tokenizer in {codec} has {known} codebooks",
            param="model_path",
        )
    check_tensors(
        codec,
        lambda: codec_shapes(spec, books),
        parts=["encoder.", "decoder.", "quantizer."],
        ignore=["quantizer.quantizers.*"],  # a model may have fewer than the codec
    )
    return config


def codec_folder(folder: Path) -> Path:
    """The audio tokenizer of a model: ``audio_tokenizer`` in its folder, or what its config names: a folder, or a
    downloaded model. Raises ``InvalidRequest`` where it is not there."""
    own = folder / "audio_tokenizer"
    if own.is_dir():
        return find_folder(str(own))
    named = read_json(folder).get("audio_tokenizer_name_or_path") or _CODEC_ID
    inside = folder / str(named)
    if inside.is_dir():
        return find_folder(str(inside))
    try:
        return find_folder(str(named))
    except InvalidRequest as error:
        raise InvalidRequest(
            f"the audio tokenizer {str(named)!r} of {folder} is neither a folder nor a downloaded model; download it "
            f"with `hf download {named}`, or put it into {own}",
            param="model_path",
        ) from error
