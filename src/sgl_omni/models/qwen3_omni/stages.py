"""The factories of Qwen3-Omni's stages, its route and its merge. Imports no torch: preprocessing starts fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_omni.errors import StartupError
from sgl_omni.models.defaults import engine_settings
from sgl_omni.models.dtypes import dtype_of
from sgl_omni.models.folder import find_folder
from sgl_omni.models.qwen3_omni.prompt_spec import ARCHITECTURE, PromptSpec, check_checkpoint, eos_ids
from sgl_omni.runtime.stage import BatchStage, EngineStage, FunctionStage, Payload, StreamStage

if TYPE_CHECKING:
    from sgl_omni.engine.shard import Shard
    from sgl_omni.engine.weights import WeightStore


def create_preprocessing(
    model_path: str,
    max_audio_seconds: float = 2400.0,
    max_frames: int = 768,
    max_pixels: int = 256 << 20,
    concurrency: int = 4,
) -> FunctionStage:
    """A conversation to prompt ids, pixel patches and mel frames, on the host, in threads.

    A recording may last ``max_audio_seconds``, a video have ``max_frames``, and all pictures and frames of a request
    together ``max_pixels``.
    """
    from sgl_omni.models.qwen3_omni.preprocess import Preprocessor

    preprocessor = Preprocessor(
        model_path, max_audio_seconds=max_audio_seconds, max_frames=max_frames, max_pixels=max_pixels
    )
    return FunctionStage(preprocessor, concurrency=concurrency)


def create_image_encoder(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    max_batch: int = 8,
    max_patches: int = 16384,
) -> BatchStage:
    """Pixel patches of images and video frames to embeddings."""
    from sgl_omni.models.qwen3_omni.towers import ImageEncoder

    spec = PromptSpec.load(model_path).vision
    encoder = ImageEncoder(find_folder(model_path), spec, device, dtype_of(dtype, device), max_patches)
    return BatchStage(encoder, max_size=max_batch, rehearsal=encoder.rehearse)


def create_audio_encoder(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    max_batch: int = 8,
    max_frames: int = 60_000,
) -> BatchStage:
    """Mel frames to embeddings; ``max_frames`` of several recordings in one pass."""
    from sgl_omni.models.qwen3_omni.towers import AudioEncoder

    encoder = AudioEncoder.load(find_folder(model_path), device, dtype_of(dtype, device), max_frames)
    return BatchStage(encoder, max_size=max_batch, rehearsal=encoder.rehearse)


def create_thinker(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    budget_bytes: int | None = None,
    shard: Shard | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    nccl_port: int | None = None,
) -> EngineStage:
    """The mixture-of-experts language model: prompt and embeddings to text tokens and hidden states."""
    from sgl_omni.engine.engine import AutoregressiveEngine
    from sgl_omni.engine.task import InputSpec
    from sgl_omni.engine.weights import SharePolicy
    from sgl_omni.models.qwen3_omni.thinker import load_thinker
    from sgl_omni.models.qwen3_omni.thinker_task import ThinkerTask
    from sgl_omni.text.tokenizer import TextTokenizer

    folder = find_folder(model_path)
    facts = check_checkpoint(folder)
    settings = engine_settings(engine, device, budget_bytes)
    accept = facts["talker_config"]["accept_hidden_layer"]
    model = load_thinker(
        folder,
        device,
        dtype_of((engine or {}).get("dtype"), device),
        kept_layers=[0, accept],
        shard=shard,
        weights=weights,
        policy=SharePolicy(ARCHITECTURE),
    )
    config = model.config
    task = ThinkerTask(
        InputSpec(
            vocab_sizes=(config.vocab_size,),
            hidden_size=config.hidden_size,
            axes=config.rope.num_axes,
            levels=len(facts["thinker_config"]["vision_config"]["deepstack_visual_indexes"]),
        ),
        TextTokenizer.load(folder),
        kept_layers=model.kept_layers,
        accept_layer=accept,
        eos_ids=eos_ids(facts, folder),
        pool_tokens=settings.pages(model.kv_shape, model.device) * settings.page_size,
        max_positions=config.max_positions,
    )
    return EngineStage(AutoregressiveEngine.build(model, task, settings))


def create_decode(model_path: str) -> StreamStage[Any]:
    """Text tokens to text, on the host."""
    from sgl_omni.models.text_llm.decode import TextDecoder
    from sgl_omni.text.tokenizer import TextTokenizer

    return TextDecoder(TextTokenizer.load(find_folder(model_path)))


def create_talker(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    budget_bytes: int | None = None,
) -> EngineStage:
    """The thinker's hidden states, as they come, to codec frames."""
    from sgl_omni.engine.engine import AutoregressiveEngine
    from sgl_omni.engine.weights import SharePolicy
    from sgl_omni.models.qwen3_omni.talker import TalkerModel
    from sgl_omni.models.qwen3_omni.talker_engine import TalkerEngine
    from sgl_omni.models.qwen3_omni.talker_task import TalkerTask

    folder = find_folder(model_path)
    check_checkpoint(folder)
    dtype = dtype_of((engine or {}).get("dtype"), device)
    model = TalkerModel.load(folder, device, dtype, weights=weights, policy=SharePolicy(ARCHITECTURE))
    task = TalkerTask(model.spec, model.marks()[2].cpu())
    settings = engine_settings(engine, device, budget_bytes)
    return EngineStage(TalkerEngine(AutoregressiveEngine.build(model, task, settings), model))


def create_code2wav(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    first_frames: int = 4,
    chunk_frames: int = 24,
    context_frames: int = 25,
    max_batch: int = 32,
) -> StreamStage[Any]:
    """Codec frames to audio at 24 kHz, the first after ``first_frames``, then more and more up to ``chunk_frames``."""
    from sgl_omni.models.qwen3_omni.code2wav import Code2Wav, Cuts, Vocoder
    from sgl_omni.models.rehearsal import rehearsed

    cuts = Cuts(first=first_frames, most=chunk_frames, context=context_frames)
    vocoder = Vocoder(find_folder(model_path), device, dtype_of(dtype, device))
    return rehearsed(Code2Wav(vocoder, cuts, max_batch), vocoder.codebooks)


def route_to_encoders(request_id: str, payload: Payload) -> list[str]:
    """The encoders whose input a request has, and the thinker."""
    encoders = {"image_encoder": "pixels", "audio_encoder": "mels"}
    return [*(stage for stage, key in encoders.items() if key in payload), "thinker"]


def merge_embeddings(inputs: dict[str, Payload]) -> Payload:
    """The prompt of the thinker with the encoders' embeddings in their places."""
    import numpy as np
    import torch

    made = dict(inputs["preprocessing"])
    for key in ("pixels", "grids", "mels", "mel_lengths"):
        made.pop(key, None)
    places, rows = [], []
    for stage, key in (("image_encoder", "vision_at"), ("audio_encoder", "audio_at")):
        at = made.pop(key, None)
        if at is None:
            continue
        found = inputs[stage]
        if len(found["embeddings"]) != len(at):
            raise StartupError(f"{stage} made {len(found['embeddings'])} rows for {len(at)} places of the prompt")
        places.append(at)
        rows.append(found["embeddings"])
        if stage == "image_encoder" and len(found["layered"]):
            made |= {"layered_at": at, "layered_embeddings": found["layered"]}
    if places:
        at, embeddings = np.concatenate(places), torch.cat(rows)
        order = np.argsort(at)
        made |= {"inserted_at": at[order], "inserted_embeddings": embeddings[torch.from_numpy(order)]}
    return made
