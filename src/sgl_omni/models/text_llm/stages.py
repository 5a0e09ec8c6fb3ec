"""The factories of a language model's stages. This module imports no torch, so that the host's stages start fast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sgl_omni.models.defaults import engine_settings
from sgl_omni.models.dtypes import dtype_of
from sgl_omni.models.folder import find_folder, read_json
from sgl_omni.models.text_llm.decode import TextDecoder
from sgl_omni.models.text_llm.generation import GenerationDefaults
from sgl_omni.models.text_llm.preprocess import TextPreprocessor
from sgl_omni.runtime.stage import EngineStage, FunctionStage, StreamStage
from sgl_omni.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from sgl_omni.engine.shard import Shard
    from sgl_omni.engine.weights import WeightStore


def create_preprocessing(model_path: str) -> FunctionStage:
    """A conversation or a text to token ids and options."""
    folder = find_folder(model_path)
    tokenizer = TextTokenizer.load(folder)
    tokenizer.check_chat()
    return FunctionStage(TextPreprocessor(tokenizer, GenerationDefaults.load(folder)))


def create_llm(
    model_path: str,
    gpu_id: int | None = None,
    device: str = "cpu",
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    budget_bytes: int | None = None,
    shard: Shard | None = None,
    num_threads: int | None = None,
) -> EngineStage:
    """Token ids to token ids. ``num_threads``: of each step on a CPU; torch's own choice if left out."""
    import torch

    from sgl_omni.engine.engine import AutoregressiveEngine
    from sgl_omni.engine.task import InputSpec
    from sgl_omni.engine.weights import SharePolicy
    from sgl_omni.models.text_llm.model import TextModel
    from sgl_omni.models.text_llm.task import TextTask

    if num_threads is not None:
        torch.set_num_threads(num_threads)
    folder, asked = find_folder(model_path), engine or {}
    settings = engine_settings(asked, device, budget_bytes)
    policy = SharePolicy(str(read_json(folder)["architectures"][0]))
    dtype = dtype_of(asked.get("dtype"), device, "engine.dtype")
    model = TextModel.load(folder, device, dtype, weights=weights, policy=policy, shard=shard)
    config = model.config
    task = TextTask(
        InputSpec(vocab_sizes=(config.vocab_size,), hidden_size=config.hidden_size),
        TextTokenizer.load(folder),
        eos_ids=GenerationDefaults.load(folder).eos_ids,
        pool_tokens=settings.pages(model.kv_shape, model.device) * settings.page_size,
        max_positions=config.max_positions,
    )
    return EngineStage(AutoregressiveEngine.build(model, task, settings, max_positions=config.max_positions))


def create_decode(model_path: str) -> StreamStage[Any]:
    """Token ids to text."""
    return TextDecoder(TextTokenizer.load(find_folder(model_path)))
