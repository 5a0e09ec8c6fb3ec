"""How fast the vocoder stages make audio: many streams at once through a stage as its process runs it, codes at random.

    python -m benchmarks.vocoders --streams 32 --seconds 10 --json

Of each family the model folder gets the codec's tensors alone (``benchmarks/real_size.py``), published sizes, random
weights. The figure is the seconds of audio of all streams together in a second; `cpu_s` is what the process computed
on the host meanwhile: near the wall clock's time, the host is the limit. ``--tiny`` is a rehearsal on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.real_size import make

from sgl_omni.runtime.stage import StreamStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """``factory`` names the vocoder's; ``parts`` are its tensors. The engine hands over ``chunk`` frames at a time."""

    factory: str
    parts: tuple[str, ...]
    books: int
    size: int
    frames_per_s: float
    chunk: int


CODECS = {
    "higgs_tts": Codec(
        factory="higgs_tts.stages.create_vocoder",
        parts=("tied.embedding.modality_embeddings.0.model.",),
        books=8,
        size=1024,
        frames_per_s=25.0,
        chunk=24,
    ),
    "qwen3_tts": Codec(
        factory="qwen3_tts.stages.create_vocoder",
        parts=("speech_tokenizer/",),
        books=16,
        size=2048,
        frames_per_s=12.5,
        chunk=16,
    ),
    "moss_tts_local": Codec(
        factory="moss_tts_local.stages.create_vocoder",
        parts=("audio_tokenizer/decoder.", "audio_tokenizer/quantizer."),
        books=12,
        size=1024,
        frames_per_s=12.5,
        chunk=12,
    ),
    "csm": Codec(
        factory="csm.stages.create_vocoder",
        parts=("codec_model.",),
        books=32,
        size=2048,
        frames_per_s=12.5,
        chunk=12,
    ),
    "qwen3_omni": Codec(
        factory="qwen3_omni.stages.create_code2wav",
        parts=("code2wav.",),
        books=16,
        size=2048,
        frames_per_s=12.5,
        chunk=24,
    ),
}


class OneRequest:
    """Stands for a request that nobody aborts."""

    aborted = False


async def speak(stage: StreamStage[Any], pool: ThreadPoolExecutor, codec: Codec, frames: int, seed: int) -> float:
    """One stream from its first chunk to its end; seconds of audio that came. Raises ``ValueError`` for no audio."""
    loop = asyncio.get_running_loop()
    codes = np.random.default_rng(seed).integers(0, codec.size, (frames, codec.books)).astype(np.int16)
    request: Any = OneRequest()
    state = await loop.run_in_executor(pool, stage.open, request)

    def all_of(produce: Callable[[], Any]) -> float:
        pieces = list(produce())
        if not all(np.isfinite(piece["audio"]).all() and piece["audio"].any() for piece in pieces):
            raise ValueError("the vocoder makes silence, or what is no number")
        return float(sum(len(piece["audio"]) / piece["sample_rate"] for piece in pieces))

    audio_s = 0.0
    for start in range(0, frames, codec.chunk):
        chunk = {"codes": codes[start : start + codec.chunk], "speed": 1.0, "reference_codes": None}
        audio_s += await loop.run_in_executor(pool, all_of, partial(stage.feed, state, chunk))
    audio_s += await loop.run_in_executor(pool, all_of, partial(stage.flush, state))
    await loop.run_in_executor(pool, stage.close, state)
    return audio_s


async def one_round(stage: StreamStage[Any], pool: ThreadPoolExecutor, codec: Codec, streams: int, frames: int) -> Any:
    begun, cpu = time.perf_counter(), time.process_time()
    audio_s = sum(await asyncio.gather(*(speak(stage, pool, codec, frames, seed) for seed in range(streams))))
    took = time.perf_counter() - begun
    return {
        "audio_s": audio_s,
        "seconds": took,
        "cpu_s": time.process_time() - cpu,
        "audio_seconds_per_s": audio_s / took,
    }


def measure(family: str, options: argparse.Namespace, device: str) -> dict[str, Any]:
    import torch

    from sgl_omni.runtime.stage import Stage

    codec = CODECS[family]
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-codec-", dir=options.folder))
    try:
        made = make(family, folder, tiny=options.tiny, only=codec.parts)
        stage: Stage = _function(codec.factory)(str(folder), device=device)
    finally:
        shutil.rmtree(folder)
    assert isinstance(stage, StreamStage)
    frames = max(codec.chunk, round(options.seconds * codec.frames_per_s))
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    with ThreadPoolExecutor(stage.concurrency) as pool:
        rounds = [
            asyncio.run(one_round(stage, pool, codec, options.streams, frames)) for _ in range(options.rounds + 1)
        ]
    whole = options.streams * frames / codec.frames_per_s
    least = whole - options.streams / codec.frames_per_s  # some never make the samples that lean on a next frame
    return {
        "streams": options.streams,
        "frames": frames,
        "concurrency": stage.concurrency,
        "made": made["written"],
        "warm_up": rounds[0],
        "rounds": rounds[1:],
        "all_audio_came": all(least < each["audio_s"] < whole + 1e-6 for each in rounds),
        "slowest_audio_seconds_per_s": min(each["audio_seconds_per_s"] for each in rounds[1:]),
        "peak_gpu_bytes": torch.cuda.max_memory_allocated() if device != "cpu" else None,
    }


def _function(name: str) -> Any:
    import importlib

    module, _, function = f"sgl_omni.models.{name}".rpartition(".")
    return getattr(importlib.import_module(module), function)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default=",".join(CODECS), help="names, separated by commas; all by default")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where models are made")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="of audio of each stream")
    parser.add_argument("--rounds", type=int, default=3, help="after one that is not counted")
    parser.add_argument("--tiny", action="store_true", help="small models, for a rehearsal on a CPU")
    parser.add_argument("--json", action="store_true", help="no line for each family, only the last one")
    options = parser.parse_args()
    import torch

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {}
    for family in options.family.split(","):
        try:
            found[family] = measure(family, options, device)
        except Exception as error:  # noqa: BLE001 - it is this family's result, and the next one is to run
            found[family] = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        if device != "cpu":
            torch.cuda.empty_cache()
        if not options.json:
            print(json.dumps({family: found[family]}), flush=True)
    name = torch.cuda.get_device_name() if device != "cpu" else "cpu"
    facts = {"benchmark": "vocoders", "device": name, "torch": torch.__version__, "tiny": options.tiny}
    print(json.dumps({**facts, "families": found}))


if __name__ == "__main__":
    main()
