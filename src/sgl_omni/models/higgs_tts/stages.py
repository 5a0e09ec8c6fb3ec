"""The factories of the Higgs models' stages. This module imports no torch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sgl_omni.models.defaults import most_streams
from sgl_omni.models.dtypes import dtype_of
from sgl_omni.models.higgs_tts.checkpoint import HiggsCheckpoint
from sgl_omni.models.higgs_tts.cuts import CHUNK_FRAMES, frames_wanted
from sgl_omni.models.higgs_tts.preprocess import SpeechPreprocessor
from sgl_omni.models.higgs_tts.prompts import ChatPrompts, PromptWriter, TaggedPrompts
from sgl_omni.runtime.stage import EngineStage, FunctionStage, Stage
from sgl_omni.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from sgl_omni.engine.weights import WeightStore

V2_REFERENCES, V3_REFERENCES = 4, 1


def max_references(checkpoint: HiggsCheckpoint) -> int:
    return V2_REFERENCES if checkpoint.is_v2 else V3_REFERENCES


def create_preprocessing(model_path: str) -> FunctionStage:
    """Text to pieces of prompt ids, and every option filled in."""
    checkpoint = HiggsCheckpoint.load(model_path)
    tokenizer = TextTokenizer.load(checkpoint.folder)
    prompts: PromptWriter
    if checkpoint.is_v2:
        prompts = ChatPrompts(tokenizer, checkpoint.config["audio_token_id"])
        prompts.pieces("a", [], None)  # a template of another model is found now
    else:
        prompts = TaggedPrompts(tokenizer)
    return FunctionStage(SpeechPreprocessor(prompts, checkpoint.defaults, max_references(checkpoint)))


def create_audio_encoder(
    model_path: str, gpu_id: int | None = None, device: str = "cpu", num_threads: int = 1
) -> Stage:
    """Recordings of voices to rows of codes, and the whole prompt."""
    from sgl_omni.models.higgs_audio_v2.codec_encoder import CodecEncoder
    from sgl_omni.models.higgs_tts import references
    from sgl_omni.models.rehearsal import hearing

    checkpoint = HiggsCheckpoint.load(model_path)
    encoder = CodecEncoder.load(
        checkpoint.codec_folder, checkpoint.codec, prefix=checkpoint.codec_prefix, device=device
    )
    encode = references.encoding(encoder, num_threads)
    rehearsal = hearing(lambda file: encode(file, "references"))
    voices = references.EncodedVoices(encode)
    begin, end = checkpoint.codebook_size - 2, checkpoint.codebook_size - 1
    if checkpoint.is_v2:
        config = checkpoint.config
        begin, end = config["audio_stream_bos_id"], config["audio_stream_eos_id"]
        places = references.v2_places(
            checkpoint.num_codebooks, config["audio_token_id"], config["audio_delay_token_id"]
        )

        def rows_of(codes: references.Codes) -> references.Codes:
            return references.delayed(references.framed(codes, begin, end), begin, end)

        builder = references.PromptBuilder(voices, rows_of, places)
        return FunctionStage(builder, concurrency=4, rehearsal=rehearsal)
    from sgl_omni.models.higgs_tts.model import AUDIO

    delay = partial(references.delayed, begin=begin, end=end)
    builder = references.PromptBuilder(voices, delay, references.uniform_places(AUDIO))
    return FunctionStage(builder, concurrency=4, rehearsal=rehearsal)


def create_engine(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    budget_bytes: int | None = None,
    num_threads: int = 1,
) -> EngineStage:
    """Prompt to frames of codes, each codebook a row later than the one before."""
    import torch

    from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
    from sgl_omni.engine.model import StepModel
    from sgl_omni.engine.task import Task

    checkpoint = HiggsCheckpoint.load(model_path)
    options = engine or {}
    dtype = dtype_of(options.get("dtype"), device, "engine.dtype")
    if device == "cpu":
        torch.set_num_threads(num_threads)
    wanted = partial(frames_wanted, ahead=checkpoint.codec.context[1])
    model: StepModel
    task: Task
    if checkpoint.is_v2:
        from sgl_omni.models.higgs_audio_v2.model import HiggsModel
        from sgl_omni.models.higgs_audio_v2.task import HiggsTask

        model = v2 = HiggsModel.load(checkpoint.folder, device, dtype, weights=weights)
        task, positions = HiggsTask(v2.spec, frames_wanted=wanted), v2.spec.decoder.max_positions
    else:
        from sgl_omni.models.higgs_tts.model import HiggsTts3Model
        from sgl_omni.models.higgs_tts.task import HiggsTts3Task

        model = v3 = HiggsTts3Model.load(checkpoint.folder, device, dtype, weights=weights)
        task, positions = HiggsTts3Task(v3.spec, frames_wanted=wanted), v3.spec.decoder.max_positions
    model.verify_weights()
    settings = EngineSettings.parse(options, budget_bytes=budget_bytes)
    return EngineStage(AutoregressiveEngine.build(model, task, settings, max_positions=positions))


def create_vocoder(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    num_threads: int = 1,
    max_batch: int | None = None,
    budget_bytes: int | None = None,
) -> Stage:
    """Codes to audio, at the asked speed; ``max_batch`` as `most_streams` says, and on a GPU what the budget holds."""
    from sgl_omni.models.higgs_audio_v2.codec_decoder import CodecDecoder
    from sgl_omni.models.higgs_tts.vocoder import HiggsVocoder
    from sgl_omni.models.rehearsal import rehearsed

    checkpoint = HiggsCheckpoint.load(model_path)
    decoder = CodecDecoder.load(
        checkpoint.codec_folder, checkpoint.codec, prefix=checkpoint.codec_prefix, device=device
    )
    (before, after), streams = decoder.spec.context, most_streams(max_batch, device)
    frames = before + CHUNK_FRAMES + after
    if device != "cpu" and budget_bytes is not None:
        streams = decoder.windows_within(budget_bytes, frames, streams)
    decoder.capture(streams, frames)
    return rehearsed(HiggsVocoder(decoder, num_threads, streams), decoder.spec.num_codebooks)
