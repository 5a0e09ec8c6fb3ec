"""How fast the vocoder stages make audio: many streams at once through a stage as its process runs it, codes
or latents at random.

    python -m benchmarks.vocoders --streams 32 --seconds 10 --json

Of each family the model folder gets the codec's tensors alone (``benchmarks/real_size.py``), published sizes, random
weights. The figure is the seconds of audio of all streams together in a second; `cpu_s` is what the process computed
on the host meanwhile: near the wall clock's time, the host is the limit. Two stages, of which one decodes a piece at a
time (``alone``) and one what waits together (``together``), take turns. ``calls`` says how many pieces the calls of the
network had, and ``operations`` how many of torch's a call had, by its pieces: where a batch is one call, these grow by
a few for each piece, or by none. What runs as CUDA graphs calls none of them. ``--tiny`` is a rehearsal, for a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.real_size import make
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_omni.audio.gathering import Gathering
from sgl_omni.gpu.torch_setup import set_up_torch
from sgl_omni.models.moss_tts_local.gathering import GatheringDecoder
from sgl_omni.runtime.stage import StreamStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Codec:
    """``factory`` names the vocoder's; ``parts`` are its tensors. The engine hands over ``chunk`` frames at a time, of
    ``books`` codes below ``size`` each, or without a size of as many floats."""

    factory: str
    parts: tuple[str, ...]
    books: int
    size: int | None
    frames_per_s: float
    chunk: int

    def frames(self, count: int, seed: int) -> dict[str, np.ndarray]:
        """By the name that the stage takes them under: [count, books]."""
        random = np.random.default_rng(seed)
        if self.size is None:
            return {"latents": random.standard_normal((count, self.books), np.float32)}
        return {"codes": random.integers(0, self.size, (count, self.books)).astype(np.int16)}


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
    "ming_omni_tts": Codec(
        factory="ming_omni_tts.stages.create_vocoder",
        parts=("audio.decoder.",),
        books=64,
        size=None,
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


class Operations(TorchDispatchMode):
    """How many of torch's operations were called in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Watched:
    """A stage whose calls of the network are counted, by how many pieces they had."""

    def __init__(self, stage: StreamStage[Any]) -> None:
        self.stage = stage
        self.calls: Counter[int] = Counter()
        self.operations: dict[int, int] = {}
        self.counting = True
        gathering = _gathering_of(stage)
        make = gathering.make

        def watched(pieces: list[Any]) -> Any:
            self.calls[len(pieces)] += 1
            if not self.counting:
                return make(pieces)
            with Operations() as operations:
                made = make(pieces)
            self.operations[len(pieces)] = operations.count
            return made

        gathering.make = watched


def _gathering_of(part: Any) -> Gathering[Any, Any]:
    for value in vars(part).values():
        if isinstance(value, Gathering):
            return value
        if isinstance(value, GatheringDecoder):
            return _gathering_of(value)
    raise TypeError(f"{type(part).__name__} gathers no pieces")


async def speak(stage: StreamStage[Any], pool: ThreadPoolExecutor, codec: Codec, frames: int, seed: int) -> float:
    """One stream from its first chunk to its end; seconds of audio that came. Raises ``ValueError`` for no audio."""
    loop = asyncio.get_running_loop()
    [(name, said)] = codec.frames(frames, seed).items()
    request: Any = OneRequest()
    state = await loop.run_in_executor(pool, stage.open, request)

    def all_of(produce: Callable[[], Any]) -> float:
        pieces = list(produce())
        if not all(np.isfinite(piece["audio"]).all() and piece["audio"].any() for piece in pieces):
            raise ValueError("the vocoder makes silence, or what is no number")
        return float(sum(len(piece["audio"]) / piece["sample_rate"] for piece in pieces))

    audio_s = 0.0
    for start in range(0, frames, codec.chunk):
        chunk = {name: said[start : start + codec.chunk], "speed": 1.0, "reference_codes": None}
        audio_s += await loop.run_in_executor(pool, all_of, partial(stage.feed, state, chunk))
    audio_s += await loop.run_in_executor(pool, all_of, partial(stage.flush, state))
    await loop.run_in_executor(pool, stage.close, state)
    return audio_s


async def _speak_all(stage: StreamStage[Any], codec: Codec, streams: int, frames: int) -> float:
    with ThreadPoolExecutor(stage.concurrency) as pool:
        return sum(await asyncio.gather(*(speak(stage, pool, codec, frames, seed) for seed in range(streams))))


def timed(speak_all: Callable[[], float]) -> dict[str, float]:
    begun, cpu = time.perf_counter(), time.process_time()
    audio_s = speak_all()
    took = time.perf_counter() - begun
    return {
        "audio_s": audio_s,
        "seconds": took,
        "cpu_s": time.process_time() - cpu,
        "audio_seconds_per_s": audio_s / took,
    }


def measure(family: str, options: argparse.Namespace, device: str) -> dict[str, Any]:
    import torch

    codec = CODECS[family]
    ways = {"alone": 1, "together": options.streams}
    with made_folder(family, codec.parts, options) as (folder, made):
        stages = {way: _function(codec.factory)(str(folder), device=device, max_batch=n) for way, n in ways.items()}
    for stage in stages.values() if device != "cpu" else ():
        stage.rehearsal()
    watched = {way: Watched(stage) for way, stage in stages.items()}
    frames = max(codec.chunk, round(options.seconds * codec.frames_per_s))
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    peaks: dict[str, int] = {}
    for number in range(options.rounds + 1):
        for way, each in watched.items():
            if device != "cpu":
                torch.cuda.reset_peak_memory_stats()
            if number == 1:
                each.counting = False
                each.calls.clear()
            rounds[way].append(
                timed(lambda each=each: asyncio.run(_speak_all(each.stage, codec, options.streams, frames)))  # type: ignore[misc]
            )
            if device != "cpu":
                peaks[way] = torch.cuda.max_memory_allocated()
    whole = options.streams * frames / codec.frames_per_s
    least = whole - options.streams / codec.frames_per_s  # some never make the samples that lean on a next frame
    together = watched["together"]
    found: dict[str, Any] = {
        "streams": options.streams,
        "frames": frames,
        "made": made["written"],
        "all_audio_came": all(least < each["audio_s"] < whole + 1e-6 for way in ways for each in rounds[way]),
        "calls": {way: dict(sorted(each.calls.items())) for way, each in watched.items()},
        "operations": dict(sorted((watched["alone"].operations | together.operations).items())),
        "pieces_per_call": sum(n * count for n, count in together.calls.items()) / sum(together.calls.values()),
    }
    for way in ways:
        found[way] = {
            "warm_up": rounds[way][0],
            "rounds": rounds[way][1:],
            "slowest_audio_seconds_per_s": min(each["audio_seconds_per_s"] for each in rounds[way][1:]),
            "peak_gpu_bytes": peaks.get(way),
        }
    slowest = {way: statistics.median(each["seconds"] for each in rounds[way][1:]) for way in ways}
    return {**found, "times_faster_together": slowest["alone"] / slowest["together"]}


@contextmanager
def made_folder(
    family: str, parts: tuple[str, ...], options: argparse.Namespace
) -> Iterator[tuple[Path, dict[str, Any]]]:
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-codec-", dir=options.folder))
    try:
        yield folder, make(family, folder, tiny=options.tiny, only=parts)
    finally:
        shutil.rmtree(folder)


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
    parser.add_argument("--device", help="cpu or cuda:0; a GPU where there is one by default")
    parser.add_argument("--tiny", action="store_true", help="small models, for a rehearsal on a CPU")
    parser.add_argument("--json", action="store_true", help="no line for each family, only the last one")
    options = parser.parse_args()
    import torch

    device = options.device or ("cuda:0" if torch.cuda.is_available() else "cpu")
    if device != "cpu":
        set_up_torch()
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
