"""`serve` runs exactly what `config resolve` prints for the same configuration and flags."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from servers import ROOT, Server, fetch, serving
from sgl_omni.gpu.affinity import read_cores

CORES = sorted(os.sched_getaffinity(0))

VOICE = """
config_cls: DemoVoicePipelineConfig
model_path: demo-voice
stages:
  vocoder:
    env: {SPEECH_MODE: studio, OMP_NUM_THREADS: "97"}
processes:
  tts_engine:
    num_replicas: 2
    replica_devices: [0, 1]
    replica_policy: least_inflight
"""

PROBE = """
import json, os, threading
from pathlib import Path
from sgl_omni.runtime.stage import FunctionStage

def create(folder, mark, model_path, gpu_id=None, device="", engine=None):
    facts = {"pid": os.getpid(), "gpu_id": gpu_id, "device": device, "engine": engine, "model_path": model_path}
    (Path(folder) / f"{mark}.{os.getpid()}").write_text(json.dumps(facts))
    return FunctionStage(lambda payload, request: payload)

def merge(inputs):
    return {}
"""

PROBED = """
name: probed
model_path: nowhere
stages:
  - {name: a, factory_path: probe.create, factory: {mark: a}, process: front, next: [b, c]}
  - {name: b, factory_path: probe.create, factory: {mark: b}, process: front, gpu: 0, gpu_memory_fraction: 0.1, next: d}
  - name: c
    factory_path: probe.create
    factory: {mark: c}
    process: engine
    gpu: 0
    gpu_memory_fraction: 0.2
    next: d
    engine: {max_total_tokens: 100}
  - name: d
    factory_path: probe.create
    factory: {mark: d}
    process: back
    wait_for: [b, c]
    merge_fn: probe.merge
    terminal: true
processes:
  engine: {num_replicas: 2, replica_devices: [0, 1]}
"""


def planned(*arguments: str, cwd: Path = ROOT) -> dict[str, Any]:
    """What `config resolve` prints for these arguments."""
    command = [sys.executable, "-m", "sgl_omni.cli.main", "config", "resolve", "--show", "plan", "--format", "json"]
    plan: dict[str, Any] = json.loads(subprocess.check_output([*command, *arguments], cwd=cwd, text=True))
    return plan


def environment(pid: int) -> dict[str, str]:
    """What a process was started with."""
    pairs = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def assert_is_run(plan: dict[str, Any], server: Server) -> dict[str, int]:
    """Compares each process of the server with its instance in the plan. Returns the pids by instance."""
    running = fetch(f"{server.url}/health").json()["instances"]
    pids = {instance["name"]: instance["pid"] for instance in running}
    assert sorted(pids.values()) == sorted(child.pid for child in psutil.Process(server.process.pid).children())
    assert list(pids) == [instance["name"] for instance in plan["instances"]]
    known = [{key: i[key] for key in ("name", "process", "replica", "stages", "device")} for i in plan["instances"]]
    assert [{key: i[key] for key in known[0]} for i in running] == known
    settings = {pair for instance in plan["instances"] for pair in instance["env"].items()}
    for instance in plan["instances"]:
        process = psutil.Process(pids[instance["name"]])
        command = process.cmdline()
        assert command[command.index("--name") + 1] == instance["name"]
        assert settings & environment(process.pid).items() == instance["env"].items()
        assert sorted(process.cpu_affinity()) == (instance["cpu_cores"] or CORES)
        if instance["threads"] and "OMP_NUM_THREADS" not in instance["env"]:
            assert environment(process.pid)["OMP_NUM_THREADS"] == str(instance["threads"])
    return pids


def test_the_demo_voice_with_replicas_an_environment_and_cores(own_run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "voice.yaml").write_text(VOICE)
    flags = ["--config", str(tmp_path / "voice.yaml"), "--platform", "cpu", "--vocoder.process", "sound"]
    if len(CORES) > 1:
        flags += ["--processes.tts_engine.cpu_cores", f"{CORES[0]} {CORES[1]}"]
    plan = planned(*flags)
    assert [i["name"] for i in plan["instances"]] == ["preprocessing", "tts_engine@r0", "tts_engine@r1", "sound"]
    assert [i["device"] for i in plan["instances"]] == [None, 0, 1, 0]
    with serving(*flags, run_folder=own_run_folder) as server:
        pids = assert_is_run(plan, server)
        assert environment(pids["sound"])["SPEECH_MODE"] == "studio"
        assert environment(pids["sound"])["OMP_NUM_THREADS"] == "97"
        assert "SPEECH_MODE" not in environment(pids["preprocessing"])


def test_the_echo_pipeline(own_run_folder: Path) -> None:
    flags = ["--config", "examples/echo_pipeline/pipeline.yaml", "--platform", "cpu", "--shout.env.LOUD", "yes"]
    plan = planned(*flags)
    with serving(*flags, run_folder=own_run_folder) as server:
        pids = assert_is_run(plan, server)
        assert {name: environment(pid).get("LOUD") for name, pid in pids.items()} == {
            "front": None,
            "shout@r0": "yes",
            "shout@r1": "yes",
            "back": None,
        }


@pytest.mark.skipif(len(read_cores().physical(None)) < 2, reason="needs two physical cores")
def test_derived_cores(own_run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "probed.yaml").write_text(PROBED)
    (tmp_path / "built").mkdir()
    arguments = ["--config", "probed.yaml", "--platform", "cpu", "--placement.derive_cpu_cores", "on"]
    arguments += ["--processes.engine.num_replicas", "1", "--processes.engine.replica_devices", "0"]
    for stage in "abcd":
        arguments += [f"--{stage}.factory.folder", str(tmp_path / "built")]
    plan = planned(*arguments, cwd=tmp_path)
    sets = {i["name"]: i["cpu_cores"] for i in plan["instances"]}
    assert sets["front"] and sets["engine"] and not set(sets["front"]) & set(sets["engine"])
    assert sets["back"] == []
    with serving(*arguments, run_folder=own_run_folder, cwd=tmp_path) as server:
        assert_is_run(plan, server)


def test_each_stage_is_built_where_the_plan_says(own_run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "probed.yaml").write_text(PROBED)
    (tmp_path / "built").mkdir()
    arguments = ["--config", "probed.yaml", "--platform", "cpu", "--max-running-requests", "3"]
    for stage in "abcd":
        arguments += [f"--{stage}.factory.folder", str(tmp_path / "built")]
    plan = planned(*arguments, cwd=tmp_path)
    with serving(*arguments, run_folder=own_run_folder, cwd=tmp_path) as server:
        pids = assert_is_run(plan, server)
    built = [(f.name.partition(".")[0], json.loads(f.read_text())) for f in (tmp_path / "built").iterdir()]
    stages = {stage["name"]: stage for stage in plan["stages"]}
    expected = {(stage, pids[i["name"]]): i["device"] for i in plan["instances"] for stage in i["stages"]}
    assert {(stage, facts["pid"]) for stage, facts in built} == expected.keys()
    for stage, facts in built:
        assert facts["gpu_id"] == (expected[stage, facts["pid"]] if stages[stage]["gpu"] else None)
        assert facts["device"] == "cpu"
        assert facts["engine"] == (stages[stage]["engine"] or {})
        assert facts["model_path"] == "nowhere"
