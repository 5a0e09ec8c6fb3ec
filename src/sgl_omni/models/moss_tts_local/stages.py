"""The factories of MOSS-TTS-Local's stages. This module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_omni.models.defaults import most_streams
from sgl_omni.models.dtypes import dtype_of
from sgl_omni.models.folder import find_folder, read_json
from sgl_omni.models.moss_tts_local.files import codec_folder
from sgl_omni.runtime.stage import EngineStage, FunctionStage, StreamStage

if TYPE_CHECKING:
    from sgl_omni.engine.weights import WeightStore

FIRST_FRAMES, THEN_FRAMES = 3, 12
"""Frames (of 80 ms) that are decoded together: at the beginning, so that audio is there soon, and later."""


def create_preprocessing(
    model_path: str, gpu_id: int | None = None, device: str = "cpu", dtype: str | None = None
) -> FunctionStage:
    """Text and a reference voice to rows of a prompt; the voice's encoder runs on ``device``.

    ``dtype`` is the encoder's: float32 unless it is given.
    """
    import torch

    from sgl_omni.models.moss_tts_local.codec import CodecEncoder
    from sgl_omni.models.moss_tts_local.preprocess import ReferenceVoices, SpeechPreprocessor
    from sgl_omni.models.moss_tts_local.prompt import PromptSpec, PromptWriter
    from sgl_omni.models.rehearsal import hearing
    from sgl_omni.text.tokenizer import TextTokenizer

    folder = find_folder(model_path)
    spec = PromptSpec.parse(read_json(folder))
    writer = PromptWriter(spec, TextTokenizer.load(folder))
    codec = CodecEncoder.load(codec_folder(folder), spec.num_codebooks, device, dtype_of(dtype or "float32", device))
    voices = ReferenceVoices(
        lambda samples: codec.encode(torch.from_numpy(samples)).numpy(), codec.spec.sample_rate, codec.spec.channels
    )
    return FunctionStage(SpeechPreprocessor(writer, voices), concurrency=4, rehearsal=hearing(voices.encoded))


def create_engine(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    budget_bytes: int | None = None,
    default_max_frames: int = 4096,
) -> EngineStage:
    """Prompts to frames of codes, at most ``default_max_frames`` where a request says nothing else."""
    from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
    from sgl_omni.engine.task import HandOver
    from sgl_omni.models.moss_tts_local.model import MossModel
    from sgl_omni.models.moss_tts_local.task import MossTask

    settings = EngineSettings.parse(engine or {}, budget_bytes=budget_bytes)
    model = MossModel.load(
        find_folder(model_path), device, dtype_of((engine or {}).get("dtype"), device), weights=weights
    )
    task = MossTask(model.spec, default_max_frames=default_max_frames, hand_over=HandOver(FIRST_FRAMES, THEN_FRAMES))
    positions = model.spec.decoder.max_positions
    return EngineStage(AutoregressiveEngine.build(model, task, settings, max_positions=positions))


def create_vocoder(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    max_batch: int | None = None,
    budget_bytes: int | None = None,
) -> StreamStage[Any]:
    """Frames of codes to audio, at the asked speed; ``max_batch`` as `most_streams` says, and on a GPU what the budget
    holds."""
    from sgl_omni.engine.task import HandOver
    from sgl_omni.models.moss_tts_local.codec import CodecDecoder
    from sgl_omni.models.moss_tts_local.vocoder import MossVocoder
    from sgl_omni.models.rehearsal import rehearsed

    folder = find_folder(model_path)
    books = read_json(folder)["n_vq"]
    codec = CodecDecoder.load(codec_folder(folder), books, device, dtype_of(dtype, device))
    streams = slots = most_streams(max_batch, device)
    if device != "cpu" and budget_bytes is not None:
        streams, slots = codec.streams_within(budget_bytes, max(FIRST_FRAMES, THEN_FRAMES), streams)
    codec.make_room(slots)
    codec.capture(streams, {FIRST_FRAMES, THEN_FRAMES})
    return rehearsed(MossVocoder(codec, books, HandOver(FIRST_FRAMES, THEN_FRAMES), streams), books)
