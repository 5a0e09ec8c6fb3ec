"""The tensors of a model folder: names and shapes that the families' own loaders ask for, from modules without data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from benchmarks.sizes.published import Files
from torch import nn

from sgl_omni.engine.checkpoint import Slot
from sgl_omni.engine.weights import tensors_of

Shapes = dict[str, tuple[int, ...]]
"""Of the tensors of one folder, in the order in which they are written."""


def shapes_of(family: str, files: Files) -> dict[str, Shapes]:
    """The tensors of each folder within the model's (``""`` is its own), for the configs that it has."""
    with torch.device("meta"):
        return {part: dict(found) for part, found in _FAMILIES[family](files).items()}


Named = Iterable[tuple[str, tuple[int, ...]]]


def _slots(slots: Iterable[Slot]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for slot in slots:
        yield slot.name, tuple(slot.shape)


def _module(module: nn.Module, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, tensor in module.state_dict().items():
        yield prefix + name, tuple(tensor.shape)


def _text_llm(files: Files) -> Mapping[str, Named]:
    from sgl_omni.engine.decoder_config import DecoderConfig
    from sgl_omni.models.text_llm.model import TextModel

    return {"": _slots(TextModel(DecoderConfig.parse(files["config.json"])).slots("model.", "lm_head"))}


def _higgs_tts(files: Files) -> Mapping[str, Named]:
    from sgl_omni.models.higgs_audio_v2.codec_decoder import dac_decoder
    from sgl_omni.models.higgs_audio_v2.codec_encoder import CodecEncoder
    from sgl_omni.models.higgs_audio_v2.codec_spec import CodecSpec
    from sgl_omni.models.higgs_tts.checkpoint import CODEC_PREFIX
    from sgl_omni.models.higgs_tts.model import HiggsTts3Model
    from sgl_omni.models.higgs_tts.spec import HiggsTts3Spec

    spec = CodecSpec.parse(files.get("audio_tokenizer/config.json", {}), "the published audio tokenizer")
    encoder = CodecEncoder(spec)
    parts: dict[str, nn.Module] = {
        name: getattr(encoder, name) for name in ("acoustic_encoder", "encoder_semantic", "semantic_model", "fc")
    }
    parts |= {
        "acoustic_decoder": dac_decoder(spec),
        "fc2": nn.Linear(spec.hidden_size, int(spec.acoustic["hidden_size"])),
    }

    def codec() -> Iterator[tuple[str, tuple[int, ...]]]:
        for name, module in parts.items():
            for key, tensor in tensors_of(module).items():
                yield f"{CODEC_PREFIX}{name}.{key}", tuple(tensor.shape)
        for k in range(spec.num_codebooks):
            quantizer = f"{CODEC_PREFIX}quantizer.quantizers.{k}."
            yield f"{quantizer}codebook.embed", tuple(encoder.books[k].shape)
            yield from _module(encoder.project_in[k], f"{quantizer}project_in.")
            yield from _module(encoder.project_out[k], f"{quantizer}project_out.")

    model = HiggsTts3Model(HiggsTts3Spec.parse(files["config.json"]))
    return {"": [*_slots(model.slots()), *codec()]}


def _qwen3_tts(files: Files) -> Mapping[str, Named]:
    from sgl_omni.engine.code_predictor import CodeSampling
    from sgl_omni.models.qwen3_tts.codec import CodecDecoder
    from sgl_omni.models.qwen3_tts.spec import TalkerSpec
    from sgl_omni.models.qwen3_tts.talker import TalkerModel

    talker = TalkerModel(TalkerSpec.parse(files["config.json"]), CodeSampling(temperature=0.9, top_k=50, top_p=1.0))
    codec = CodecDecoder(files["speech_tokenizer/config.json"]["decoder_config"])
    return {"": _slots(talker.slots()), "speech_tokenizer": _module(codec, "decoder.")}


def _moss_tts_local(files: Files) -> Mapping[str, Named]:
    from sgl_omni.models.moss_tts_local.codec import Quantizer
    from sgl_omni.models.moss_tts_local.codec_spec import CodecSpec
    from sgl_omni.models.moss_tts_local.codec_stack import CodecStack
    from sgl_omni.models.moss_tts_local.model import MossModel
    from sgl_omni.models.moss_tts_local.spec import MossSpec

    spec = CodecSpec.parse(files["audio_tokenizer/config.json"])
    encoder = CodecStack(spec.encoder, down=True, frame_places=spec.frame_samples * spec.channels)
    decoder = CodecStack(spec.decoder, down=False, frame_places=1)
    quantizer = Quantizer(spec.quantizer, spec.quantizer.num_codebooks)
    codec = [*encoder.slots("encoder."), *decoder.slots("decoder."), *quantizer.slots("quantizer.")]
    model = MossModel(MossSpec.parse(files["config.json"]))
    return {"": _slots(model.slots()), "audio_tokenizer": _slots(codec)}


def _ming_omni_tts(files: Files) -> Mapping[str, Named]:
    from sgl_omni.models.ming_omni_tts.spec import MingSpec, engine_shapes, vae_shapes

    spec = MingSpec.parse(files["config.json"])
    return {"": [*engine_shapes(spec), *vae_shapes(spec.vae)]}


def _csm(files: Files) -> Mapping[str, Named]:
    from transformers import CsmConfig, CsmForConditionalGeneration

    config: Any = CsmConfig(**files["config.json"])
    named = dict(_module(CsmForConditionalGeneration(config), ""))
    named.pop("depth_decoder.model.embed_tokens.weight", None)  # the backbone's
    return {"": [(_beside(name), shape) for name, shape in named.items()]}


def _beside(name: str) -> str:
    """Newer transformers hold the parts of Mimi's halves below one module, checkpoints beside each other."""
    halves = {"encoder": ("encoder_transformer", "downsample"), "decoder": ("decoder_transformer", "upsample")}
    for half, others in halves.items():
        prefix = f"codec_model.{half}."
        first, _, rest = name.removeprefix(prefix).partition(".")
        if name.startswith(prefix) and first == f"{half}_seanet":
            return prefix + rest
        if name.startswith(prefix) and first in others:
            return f"codec_model.{first}.{rest}"
    return name


def _whisper(files: Files) -> Mapping[str, Named]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config: Any = WhisperConfig(**files["config.json"])
    named = dict(_module(WhisperForConditionalGeneration(config), ""))
    named.pop("proj_out.weight", None)  # the embedding
    return {"": named.items()}


def _qwen3_asr(files: Files) -> Mapping[str, Named]:
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    from sgl_omni.engine.decoder_config import DecoderConfig
    from sgl_omni.models.text_llm.model import TextModel

    config = files["config.json"]["thinker_config"]
    decoder = TextModel(DecoderConfig.parse({**config["text_config"], "model_type": "qwen3"}))
    audio = {key: value for key, value in config["audio_config"].items() if key != "model_type"}
    tower = Qwen3OmniMoeAudioEncoder._from_config(Qwen3OmniMoeAudioEncoderConfig(**audio), dtype=torch.bfloat16)
    return {
        "": [*_slots(decoder.slots("thinker.model.", "thinker.lm_head")), *_module(tower, "thinker.audio_tower.")],
    }


def _qwen3_omni(files: Files) -> Mapping[str, Named]:
    from transformers import Qwen3OmniMoeConfig
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as omni

    from sgl_omni.models.qwen3_omni.spec import TalkerSpec, parse_multi_axis
    from sgl_omni.models.qwen3_omni.talker import TalkerModel
    from sgl_omni.models.text_llm.model import TextModel

    config = files["config.json"]
    whole: Any = Qwen3OmniMoeConfig(**config)
    thinker = TextModel(parse_multi_axis(config["thinker_config"]["text_config"]))
    towers: list[tuple[Any, Any, str]] = [
        (omni.Qwen3OmniMoeVisionEncoder, whole.thinker_config.vision_config, "thinker.visual."),
        (omni.Qwen3OmniMoeAudioEncoder, whole.thinker_config.audio_config, "thinker.audio_tower."),
        (omni.Qwen3OmniMoeCode2Wav, whole.code2wav_config, "code2wav."),
    ]
    named = [
        *_slots(thinker.slots("thinker.model.", "thinker.lm_head")),
        *_slots(TalkerModel(TalkerSpec.parse(config)).slots()),
    ]
    for architecture, part, prefix in towers:
        named += _module(architecture._from_config(part, dtype=torch.bfloat16), prefix)
    return {"": named}


_FAMILIES: dict[str, Callable[[Files], Mapping[str, Named]]] = {
    "text_llm": _text_llm,
    "higgs_tts": _higgs_tts,
    "qwen3_tts": _qwen3_tts,
    "moss_tts_local": _moss_tts_local,
    "csm": _csm,
    "ming_omni_tts": _ming_omni_tts,
    "ming_omni_tts_moe": _ming_omni_tts,
    "whisper": _whisper,
    "qwen3_asr": _qwen3_asr,
    "qwen3_omni": _qwen3_omni,
}
