"""A TTS pipeline of real size with random weights: prompts of ids, a decoder, and a codec of the Higgs kind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sgl_omni.runtime.stage import BatchStage, EngineStage, FunctionStage, Payload, Request, StreamStage

if TYPE_CHECKING:
    from sgl_omni.engine.weights import WeightStore

sys.path.insert(0, str(Path(__file__).parents[1]))

CODEC_CODES = 1024


def create_frontend(prompt_tokens: int, columns: int, codebook: int) -> FunctionStage:
    """A seed becomes a prompt of that many rows, as a text and a reference voice would."""

    async def prompt(payload: Payload, request: Request) -> Payload:
        rng = np.random.default_rng(payload["seed"])
        ids = rng.integers(0, codebook - 2, (prompt_tokens, columns))
        return {**payload, "prompt_ids": ids}

    return FunctionStage(prompt, concurrency=64)


def create_engine(
    shape: str,
    device: str = "cpu",
    gpu_id: int | None = None,
    engine: dict[str, Any] | None = None,
    weights: WeightStore | None = None,
    budget_bytes: int | None = None,
    chunk_frames: int = 25,
    reuse_prefixes: bool = True,
) -> EngineStage:
    """The decoder of ``benchmarks/engine.py`` of that name; frames go on ``chunk_frames`` at a time."""
    import torch

    from engine import SHAPES, build_model
    from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
    from sgl_omni.engine.task import FrameTask, HandOver, InputSpec

    found, target = SHAPES[shape], torch.device(device)
    model = build_model(found, target, torch.bfloat16 if target.type == "cuda" else torch.float32, weights)
    assert model.pattern is not None
    inputs = InputSpec(vocab_sizes=(found.codebook,) * found.columns, hidden_size=model.config.hidden_size)
    task = FrameTask(inputs, model.pattern, hand_over=HandOver(chunk_frames, chunk_frames))
    settings = EngineSettings.parse(engine or {}, budget_bytes=budget_bytes, reuse_prefixes=reuse_prefixes)
    return EngineStage(AutoregressiveEngine.build(model, task, settings, max_positions=8192))


class Collector(StreamStage[list[np.ndarray[Any, Any]]]):
    """Codes until the last, then all of them at once."""

    concurrency = 4

    def open(self, request: Request) -> list[np.ndarray[Any, Any]]:
        return []

    def feed(self, state: list[np.ndarray[Any, Any]], chunk: Payload) -> tuple[()]:
        state.append(np.array(chunk["codes"]))
        return ()

    def flush(self, state: list[np.ndarray[Any, Any]]) -> tuple[()]:
        return ()

    def result(self, state: list[np.ndarray[Any, Any]], payload: Payload) -> Payload:
        return {"codes": np.concatenate(state), "output_tokens": payload["output_tokens"]}


def create_collector() -> Collector:
    return Collector()


def create_vocoder(
    device: str = "cpu", gpu_id: int | None = None, max_batch: int = 16, decoder_width: int = 1024
) -> BatchStage:
    """transformers' DAC, shaped as the decoder of the Higgs codec, with random weights.

    Codes [frames, columns] -> 16-bit samples at 24 kHz, 960 a frame.
    """
    import torch
    from transformers import DacConfig, DacModel

    target = torch.device(device)
    ratios = [8, 5, 4, 2, 3]
    config = DacConfig(
        sampling_rate=24000,
        hidden_size=256,
        encoder_hidden_size=8,  # encodes nothing here
        downsampling_ratios=ratios,
        decoder_hidden_size=decoder_width,
        upsampling_ratios=ratios,
        n_codebooks=8,
        codebook_size=CODEC_CODES,
        codebook_dim=64,
    )
    torch.manual_seed(0)  # the same audio of the same codes, whenever it was started
    model = DacModel(config).eval().to(target, torch.bfloat16 if target.type == "cuda" else torch.float32)

    @torch.inference_mode()
    def decode(payloads: list[Payload]) -> list[Payload]:
        lengths = [len(payload["codes"]) for payload in payloads]
        codes = np.zeros((len(payloads), payloads[0]["codes"].shape[1], max(lengths)), dtype=np.int64)
        for row, payload in enumerate(payloads):
            codes[row, :, : lengths[row]] = np.clip(payload["codes"].T, 0, CODEC_CODES - 1)
        samples = model.decode(audio_codes=torch.from_numpy(codes).to(target)).audio_values.float()
        pcm = (samples.view(len(payloads), -1).clamp(-1, 1) * 32767).to(torch.int16).cpu().numpy()
        hop = pcm.shape[1] // max(lengths)
        return [{"pcm": pcm[row, : length * hop], "frames": length} for row, length in enumerate(lengths)]

    return BatchStage(decode, max_size=max_batch, max_wait_ms=4.0)
