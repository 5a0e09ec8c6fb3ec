"""Every family once as a real server with a model of published size: start, one request of each kind, a load, the end.

    python -m benchmarks.smoke --family higgs_tts,text_llm --json

For each family it makes the model folder (``benchmarks/real_size.py``), starts `sgl-omni serve`, asks, loads it with
``--concurrency`` callers for ``--seconds``, records times, memory and gauges, ends the server, looks for what is left
and deletes the folder. A family that fails is a result, with the last lines of its log, and the next one is begun. A
line of JSON is printed as soon as a family is done, so that a run that is cut has told what it knew (``--out`` keeps
them in a file); the last line is a summary of all. Standard error tells when a family's folder is made and when its
server is ready; ``--log FOLDER`` keeps what each server says in ``FOLDER/<family>.log``, line by line as it comes, with
the seconds since the server's start. ``--tiny`` is a rehearsal with small models on a CPU: its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ending import exit_when_told
from benchmarks.real_size import CONFIGS
from benchmarks.serving.asking import Size, asks_of
from benchmarks.serving.load import closed_loop, one_by_one
from benchmarks.serving.server import ROOT, Server, ServerFailed, gpu_memory

LOADS = {
    "higgs_tts": ("streamed", "reference"),
    "qwen3_tts": ("streamed",),
    "moss_tts_local": ("streamed",),
    "csm": ("streamed",),
    "ming_omni_tts": ("streamed", "reference"),
    "ming_omni_tts_moe": ("streamed",),
    "whisper": ("transcription",),
    "qwen3_asr": ("transcription",),
    "text_llm": ("text",),
    "qwen3_omni": ("text", "spoken"),
}
_EXAMPLES = {
    **{name: f"{name}.yaml" for name in ("higgs_tts", "csm", "whisper", "qwen3_asr", "text_llm", "qwen3_omni")},
    **dict.fromkeys(("ming_omni_tts", "ming_omni_tts_moe"), "ming_omni_tts.yaml"),
}
_FLAGS = {
    # The shipped topology encodes reference voices on the host; beside the engine there is room for them here.
    "moss_tts_local": [
        *("--preprocessing.gpu", "0", "--preprocessing.gpu_memory_fraction", "0.05"),
        *("--preprocessing.factory.dtype", "bfloat16", "--tts_engine.gpu_memory_fraction", "0.70"),
        *("--vocoder.gpu_memory_fraction", "0.15"),
    ],
}
_POOLS = {
    "qwen3_omni": ("thinker", "talker_ar"),
    "text_llm": ("llm",),
    "whisper": ("asr_engine",),
    "qwen3_asr": ("asr_engine",),
}
_FRAMES = {"higgs_tts": 95, "ming_omni_tts": 12, "ming_omni_tts_moe": 12}
"""Of 40 ms, and steps of 320 ms; other codecs here have frames of 80 ms, and get 48 for the same 3.8 s."""
LOG_LINES = 40
LOAD_FACTS = ("requests_per_s", "audio_seconds_per_s", "tokens_per_s", "first_audio_s", "first_text_s", "failed")
INSTANCE_FACTS = ("name", "device", "state", "kv_capacity_tokens", "restarts")


def arguments(family: str, folder: Path, *, tiny: bool, more: list[str]) -> list[str]:
    """Of `sgl-omni serve`: the family's layout for one card."""
    config = ["--config", str(ROOT / "examples" / "configs" / _EXAMPLES[family])] if family in _EXAMPLES else []
    pools = [
        part
        for stage in _POOLS.get(family, ("tts_engine",)) * tiny
        for part in (f"--{stage}.engine.max_total_tokens", "16384")
    ]
    return [*config, "--model-path", str(folder), "--name", "smoke", *_FLAGS.get(family, []), *pools, *more]


def size_of(family: str, tiny: bool) -> Size:
    if tiny:
        return Size(frames=8, tokens=8, recording_s=2.0, side=96)
    tokens = 160 if family in ("whisper", "qwen3_asr") else 64  # about what is said in a minute, or a short answer
    return Size(frames=_FRAMES.get(family, 48), tokens=tokens, recording_s=60.0, side=448)


def run_family(family: str, options: argparse.Namespace) -> dict[str, Any]:
    """All that was found out about a family; never raises for what its server does."""
    result: dict[str, Any] = {"family": family, "tiny": options.tiny, "memory": {"before": gpu_memory()}}
    folder = Path(tempfile.mkdtemp(prefix=f"{family}-", dir=options.folder))
    begun = time.perf_counter()
    try:
        _make(family, folder, options, result)
        _serve(family, folder, options, result)
    except Exception as error:  # noqa: BLE001 - it is this family's result, and the next one is to run
        result["error"] = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result["memory"]["end"] = gpu_memory()
    result["seconds"] = time.perf_counter() - begun
    result["ok"] = "error" not in result and not _complaints(result)
    return result


def _make(family: str, folder: Path, options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Draws no more than fits the disk with 3 GB to spare, in a process whose GPU memory ends with it.

    Raises ``RuntimeError`` with what that process said last.
    """
    room = shutil.disk_usage(folder).free / 1e9 - 3
    drawn = min(room, options.drawn_gb) if options.drawn_gb else room
    command = [sys.executable, "-m", "benchmarks.real_size", "--family", family, "--out", str(folder)]
    command += ["--drawn-gb", str(drawn), *["--tiny"] * options.tiny]
    command += ["--layers", str(options.layers)] if options.layers else []
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the folder could not be made: {done.stderr[-2000:]}")
    result["made"] = json.loads(done.stdout.splitlines()[-1])
    _tell(f"{family}: the model folder was made in {time.perf_counter() - begun:.1f} s")


def _serve(family: str, folder: Path, options: argparse.Namespace, result: dict[str, Any]) -> None:
    asks = asks_of(family, size_of(family, options.tiny))
    log = options.log / f"{family}.log" if options.log is not None else None
    with Server(*arguments(family, folder, tiny=options.tiny, more=options.serve), log=log) as server:
        try:
            result["seconds_to_ready"] = server.wait_ready(options.start_timeout)
            _tell(f"{family}: the server was ready after {result['seconds_to_ready']:.1f} s")
            result["memory"]["ready"] = server.memory()
            result["instances"] = [{key: i[key] for key in INSTANCE_FACTS} for i in server.health()["instances"]]
            result["requests"] = asyncio.run(one_by_one(server.url, asks, options.times, options.timeout))
            result["loads"] = []
            for kind in LOADS[family]:
                found = closed_loop(server.url, asks[kind], options.concurrency, options.seconds, options.timeout)
                result["loads"].append(asyncio.run(found))
            result["memory"]["loaded"] = server.memory()
            result["gauges"] = server.gauges()
            result["ended"] = server.stop()
        except Exception as error:
            result["log"] = server.lines[-LOG_LINES:]
            if isinstance(error, ServerFailed):
                raise
            state = server.process.poll()
            raise ServerFailed(f"{type(error).__name__}: {error}; the server's exit status is {state}") from error
        if _complaints(result):
            result["log"] = server.lines[-LOG_LINES:]


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _complaints(result: dict[str, Any]) -> list[str]:
    """What is not as it should be in a run that came to its end."""
    asked = [f"{r['kind']}: {r['error']}" for r in result.get("requests", ()) if r["error"] is not None]
    loads = [f"{r['kind']}: {r['failed']} failed" for r in result.get("loads", ()) if r["failed"] or not r["requests"]]
    ended = result.get("ended", {})
    left = [f"{key} is {value}" for key, value in ended.items() if key != "seconds" and value]
    return [*asked, *loads, *left]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default=",".join(CONFIGS), help="names, separated by commas; all by default")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where models are made")
    parser.add_argument("--layers", type=int, help="layers of the main decoder, in place of all")
    parser.add_argument("--tiny", action="store_true", help="small models, for a rehearsal on a CPU")
    parser.add_argument("--drawn-gb", type=float, help="draw no more than that; by default what the disk has room for")
    parser.add_argument("--times", type=int, default=3, help="each kind of request alone, so often")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a request may take")
    parser.add_argument("--start-timeout", type=float, default=240.0, help="seconds until the server must be ready")
    parser.add_argument("--until", type=float, help="seconds after which no other family is begun")
    parser.add_argument("--serve", nargs=argparse.REMAINDER, default=[], help="the rest goes to `sgl-omni serve`")
    parser.add_argument("--out", type=Path, help="a file for all results, written anew after each family")
    parser.add_argument("--log", type=Path, help="a folder for what each server says; made where there is none")
    parser.add_argument("--json", action="store_true", help="nothing but JSON on standard output")
    options = parser.parse_args()
    exit_when_told()
    families = options.family.split(",")
    if unknown := set(families) - CONFIGS.keys():
        parser.error(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(CONFIGS)}")
    if options.out is not None and not options.out.absolute().parent.is_dir():
        parser.error(f"--out: there is no folder {options.out.absolute().parent}")
    if options.log is not None:
        try:
            options.log.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--log: {error}")
    results: list[dict[str, Any]] = []
    begun = time.perf_counter()
    for family in families:
        if options.until is not None and time.perf_counter() - begun > options.until:
            results.append({"family": family, "ok": False, "error": "not begun: the time is over", "memory": {}})
        else:
            results.append(run_family(family, options))
        print(json.dumps(results[-1]), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(results))
        if not options.json:
            found = results[-1].get("error") or _complaints(results[-1]) or "ok"
            _tell(f"{family}: {found}")
    facts = {"benchmark": "smoke", "machine": platform.machine(), "tiny": options.tiny, "layers": options.layers}
    print(json.dumps({**facts, "families": {result["family"]: _summary(result) for result in results}}))
    sys.exit(0 if all(result["ok"] for result in results) else 1)


def _summary(result: dict[str, Any]) -> dict[str, Any]:
    """What one reads first of a family."""
    capacity = {k: v for i in result.get("instances", ()) for k, v in i["kv_capacity_tokens"].items()}
    return {
        "ok": result["ok"],
        "complaints": [*([result["error"]] if "error" in result else []), *_complaints(result)],
        "seconds": result.get("seconds"),
        "seconds_to_ready": result.get("seconds_to_ready"),
        "gpu_bytes_ready": result["memory"].get("ready", {}).get("used_bytes"),
        "kv_capacity_tokens": capacity,
        "loads": {load["kind"]: {key: load[key] for key in LOAD_FACTS} for load in result.get("loads", ())},
    }


if __name__ == "__main__":
    main()
