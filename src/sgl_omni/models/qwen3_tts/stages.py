"""The factories of Qwen3-TTS's stages. What is heavy is imported when one is called."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_omni.errors import StartupError
from sgl_omni.models.defaults import most_streams
from sgl_omni.models.qwen3_tts.facts import BASE, MOST_FRAMES, SPEECH_TOKENIZER, ModelFacts
from sgl_omni.runtime.stage import EngineStage, FunctionStage, StreamStage

if TYPE_CHECKING:
    import torch

    from sgl_omni.engine.weights import WeightStore

_DTYPES = ("float32", "bfloat16", "float16")


def create_preprocessing(model_path: str, gpu_id: int | None = None, device: str = "cpu") -> FunctionStage:
    """Text, a voice and its instruction to ids; a recording, where voices are cloned, to embedding and frames."""
    from sgl_omni.models.qwen3_tts.preprocess import SpeechPreprocessor
    from sgl_omni.text.tokenizer import TextTokenizer

    facts = ModelFacts.load(model_path)
    tokenizer = TextTokenizer.load(facts.folder)
    if facts.kind != BASE:
        return FunctionStage(SpeechPreprocessor(facts, tokenizer, None))
    from sgl_omni.models.qwen3_tts.references import References
    from sgl_omni.models.rehearsal import hearing

    references = References.load(facts.folder, device)
    # While one request's recording is encoded, others whose voice is known already go past it.
    return FunctionStage(
        SpeechPreprocessor(facts, tokenizer, references),
        concurrency=4,
        rehearsal=hearing(lambda file: references.encoded(file, with_codes=True)),
    )


def create_engine(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    budget_bytes: int | None = None,
) -> EngineStage:
    """A prepared request to codec frames: the talker and its code predictor."""
    from sgl_omni.engine.code_predictor import CodeSampling
    from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
    from sgl_omni.models.qwen3_tts.prompt import PromptBuilder
    from sgl_omni.models.qwen3_tts.talker import TalkerModel
    from sgl_omni.models.qwen3_tts.task import TalkerTask

    facts, options = ModelFacts.load(model_path), engine or {}
    drawn = facts.generation
    sampling = CodeSampling(
        temperature=float(drawn["subtalker_temperature"]) if drawn["subtalker_dosample"] else 0.0,
        top_k=max(0, int(drawn["subtalker_top_k"])),
        top_p=float(drawn["subtalker_top_p"]),
    )
    model = TalkerModel.load(facts.folder, sampling, device, _dtype(options.get("dtype"), device), weights=weights)
    settings = EngineSettings.parse(options, budget_bytes=budget_bytes)
    task = TalkerTask(model.spec, PromptBuilder(model))
    positions = model.spec.decoder.max_positions
    return EngineStage(AutoregressiveEngine.build(model, task, settings, max_positions=positions))


def create_vocoder(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    num_threads: int = 1,
    max_batch: int | None = None,
) -> StreamStage[Any]:
    """Codec frames to audio, at the asked speed; ``max_batch`` as `most_streams` says."""
    from sgl_omni.models.qwen3_tts.codec import CodecDecoder
    from sgl_omni.models.qwen3_tts.vocoder import Vocoder
    from sgl_omni.models.rehearsal import rehearsed

    facts, most = ModelFacts.load(model_path), most_streams(max_batch, device)
    codec = CodecDecoder.load(facts.folder / SPEECH_TOKENIZER, device)
    codec.capture(most, MOST_FRAMES)
    return rehearsed(Vocoder(codec, facts.sample_rate, num_threads, most), codec.num_codes)


def _dtype(name: str | None, device: str) -> torch.dtype:
    """Raises ``StartupError`` for a type that the engine does not have."""
    import torch

    if name is None:
        return torch.bfloat16 if device.startswith("cuda") else torch.float32
    if name not in _DTYPES:
        raise StartupError(f"engine.dtype is {name!r}, not one of {', '.join(_DTYPES)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype
