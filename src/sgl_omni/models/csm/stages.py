"""The factories of CSM's stages. This module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_omni.models.defaults import most_streams
from sgl_omni.models.dtypes import dtype_of
from sgl_omni.models.folder import find_folder, read_json
from sgl_omni.runtime.stage import EngineStage, FunctionStage, StreamStage

if TYPE_CHECKING:
    from sgl_omni.engine.weights import WeightStore

FIRST_FRAMES, THEN_FRAMES = 2, 12
"""Frames (of 80 ms) that are decoded together: at the beginning, so that audio is there soon, and later."""


def create_preprocessing(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> FunctionStage:
    """Text to rows of a prompt, and recordings to codes by Mimi's encoder, which runs on ``device``."""
    import torch

    from sgl_omni.models.csm.codec import CodecEncoder
    from sgl_omni.models.csm.preprocess import Recordings, SpeechPreprocessor
    from sgl_omni.models.csm.prompt import PromptSpec, PromptWriter
    from sgl_omni.models.rehearsal import hearing
    from sgl_omni.text.tokenizer import TextTokenizer

    folder = find_folder(model_path)
    writer = PromptWriter(PromptSpec.parse(read_json(folder)), TextTokenizer.load(folder))
    codec = CodecEncoder.load(folder, device)
    recordings = Recordings(lambda samples: codec.encode(torch.from_numpy(samples)).numpy(), codec.sample_rate)
    own = folder / "generation_config.json"
    generation = read_json(folder, own.name) if own.is_file() else {}
    preprocess = SpeechPreprocessor(writer, recordings, generation)
    return FunctionStage(preprocess, concurrency=4, rehearsal=hearing(recordings.encoded))


def create_engine(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    budget_bytes: int | None = None,
    default_max_frames: int = 1125,
) -> EngineStage:
    """Prompts to frames of codes, at most ``default_max_frames`` where a request says nothing else."""
    from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
    from sgl_omni.engine.task import HandOver
    from sgl_omni.models.csm.model import CsmModel
    from sgl_omni.models.csm.task import CsmTask

    settings = EngineSettings.parse(engine or {}, budget_bytes=budget_bytes)
    dtype = dtype_of((engine or {}).get("dtype"), device, "engine.dtype")
    model = CsmModel.load(find_folder(model_path), device, dtype, weights=weights)
    task = CsmTask(model.spec, default_max_frames=default_max_frames, hand_over=HandOver(FIRST_FRAMES, THEN_FRAMES))
    positions = model.spec.backbone.max_positions
    return EngineStage(AutoregressiveEngine.build(model, task, settings, max_positions=positions))


def create_vocoder(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    num_threads: int = 1,
    max_batch: int | None = None,
) -> StreamStage[Any]:
    """Frames of codes to audio by Mimi's decoder, at the asked speed; ``max_batch`` as `most_streams` says."""
    from sgl_omni.engine.task import HandOver
    from sgl_omni.models.csm.codec import CodecDecoder
    from sgl_omni.models.csm.vocoder import CsmVocoder
    from sgl_omni.models.rehearsal import rehearsed

    most = most_streams(max_batch, device)
    codec = CodecDecoder.load(find_folder(model_path), device)
    vocoder = CsmVocoder(codec, HandOver(FIRST_FRAMES, THEN_FRAMES), num_threads, most)
    return rehearsed(vocoder, codec.num_codebooks)
