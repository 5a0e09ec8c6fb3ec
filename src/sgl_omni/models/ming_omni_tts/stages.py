"""The factories of Ming-Omni-TTS's stages. This module imports no torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sgl_omni.models.defaults import most_streams
from sgl_omni.models.dtypes import dtype_of
from sgl_omni.models.folder import find_folder, read_json
from sgl_omni.models.ming_omni_tts.files import EXPERTS, SPEAKER_MODEL, why_no_speakers
from sgl_omni.runtime.stage import EngineStage, FunctionStage, Payload, Request, StreamStage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sgl_omni.engine.weights import WeightStore


logger = logging.getLogger(__name__)

FIRST_STEPS, THEN_STEPS = 1, 3
"""Steps (of 0.32 s) that are decoded together: at the beginning, so that audio is there soon, and later."""


def create_preprocessing(model_path: str) -> FunctionStage:
    """Text, style and reference audio to prompt tokens and samples, on the host."""
    from sgl_omni.models.ming_omni_tts import prompt
    from sgl_omni.models.ming_omni_tts.preprocess import SpeechPreprocessor
    from sgl_omni.text.tokenizer import TextTokenizer

    folder = find_folder(model_path)
    config = read_json(folder)
    audio = config["audio_tokenizer_config"]
    frames = config["ditar_config"]["patch_size"] * max(1, audio.get("patch_size", -1))
    step_samples = frames * audio["enc_kwargs"].get("hop_size", 320)
    if config["model_type"] == EXPERTS:
        writer = prompt.PromptWriter(TextTokenizer.of_file(folder), prompt.EXPERTS)
    else:
        writer = prompt.PromptWriter(TextTokenizer.load(folder))
    hears = why_no_speakers(folder) is None
    return FunctionStage(
        SpeechPreprocessor(writer, audio["sample_rate"], step_samples, hears_speakers=hears), concurrency=4
    )


def create_reference_encoder(
    model_path: str, gpu_id: int | None = None, device: str = "cpu", dtype: str | None = None
) -> FunctionStage:
    """A reference's samples to the latents of the prompt, and to its speaker's vector, the latter on the CPU."""
    import torch

    from sgl_omni.models.ming_omni_tts.speaker import SpeakerEncoder
    from sgl_omni.models.ming_omni_tts.spec import SPEAKER_RATE
    from sgl_omni.models.ming_omni_tts.vae import VaeEncoder
    from sgl_omni.models.rehearsal import SECONDS, noise

    folder = find_folder(model_path)
    lacking = why_no_speakers(folder)
    if lacking is not None:
        logger.warning("references are heard without the speaker's vector: %s", lacking)
    speakers = SpeakerEncoder.load(folder / SPEAKER_MODEL, torch.get_num_threads()) if lacking is None else None
    encoder = VaeEncoder.load(folder, device, dtype_of(dtype, device))

    def latents(samples: NDArray[np.float32], seed: int) -> NDArray[np.float32]:
        shape = (encoder.latents_of(len(samples)), encoder.spec.latent_size)
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed & 0x7FFFFFFFFFFFFFFF))
        made: NDArray[np.float32] = encoder.encode(torch.as_tensor(samples).to(device), drawn.to(device)).cpu().numpy()
        return made

    def encode(payload: Payload, request: Request) -> Payload:
        samples, voice = payload.pop("samples", None), payload.pop("voice", None)
        if speakers is not None and voice is not None:
            payload = {**payload, "speaker": speakers.vector(voice)}
        if samples is None:
            return payload
        return {**payload, "latents": latents(samples, payload["seed"])}

    def rehearse() -> None:
        for seconds in SECONDS:
            latents(noise(seconds, encoder.spec.sample_rate), seed=0)
            if speakers is not None:
                speakers.encoded(noise(seconds, SPEAKER_RATE))

    return FunctionStage(encode, rehearsal=rehearse)


def create_engine(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    budget_bytes: int | None = None,
    default_max_steps: int = 200,
) -> EngineStage:
    """Prompts to latents."""
    from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
    from sgl_omni.engine.task import HandOver
    from sgl_omni.models.ming_omni_tts.model import MingModel
    from sgl_omni.models.ming_omni_tts.task import MingTask

    dtype = dtype_of((engine or {}).get("dtype"), device, "engine.dtype")
    model = MingModel.load(find_folder(model_path), device, dtype, weights=weights)
    task = MingTask(model, default_max_steps=default_max_steps, hand_over=HandOver(FIRST_STEPS, THEN_STEPS))
    settings = EngineSettings.parse(engine or {}, budget_bytes=budget_bytes)
    positions = model.spec.decoder.max_positions
    return EngineStage(AutoregressiveEngine.build(model, task, settings, max_positions=positions))


def create_vocoder(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    num_threads: int = 1,
    max_batch: int | None = None,
) -> StreamStage[Any]:
    """Latents to audio, at the asked speed; ``max_batch`` as `most_streams` says."""
    from sgl_omni.engine.task import HandOver
    from sgl_omni.models.ming_omni_tts.vae_decoder import VaeDecoder
    from sgl_omni.models.ming_omni_tts.vae_streams import VaeStreams
    from sgl_omni.models.ming_omni_tts.vocoder import MingVocoder
    from sgl_omni.models.rehearsal import rehearsed

    folder, most = find_folder(model_path), most_streams(max_batch, device)
    patch = read_json(folder)["ditar_config"]["patch_size"]
    pieces = HandOver(FIRST_STEPS * patch, THEN_STEPS * patch)
    streams = VaeStreams(VaeDecoder.load(folder, device, dtype_of(dtype, device)), rows=4 * most)
    streams.capture(most, pieces.then)
    vocoder = MingVocoder(streams, pieces, num_threads, most)
    return rehearsed(vocoder, streams.decoder.spec.latent_size, "latents")
