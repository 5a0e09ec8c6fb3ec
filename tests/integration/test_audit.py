"""`sgl-omni audit` on real processes: a model that keeps to reading passes, one that writes is caught."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from running import HERE
from test_weight_share import PROMPTS

CONFIG = """
model_path: {model}
stages:
  - name: llm
    factory_path: weight_stages.decoder
    process: llm
    gpu: 0
    gpu_memory_fraction: 0.2
    engine: {{max_total_tokens: 512}}
    terminal: true
"""


def audit(folder: Path, model: Path, payloads: list[dict[str, Any]], *arguments: str) -> tuple[int, dict[str, Any]]:
    config, lines = folder / "audit.yaml", folder / "payloads.jsonl"
    config.write_text(CONFIG.format(model=model))
    lines.write_text("\n".join(map(json.dumps, payloads)))
    command = [sys.executable, "-m", "sgl_omni.cli.main", "audit", "--platform", "cpu", "--json"]
    command += ["--config", str(config), "--payloads", str(lines), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=HERE, timeout=120)
    assert done.stdout, done.stderr
    verdict: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, verdict


def prompts(**fields: Any) -> list[dict[str, Any]]:
    return [{"prompt_ids": prompt, "max_new_tokens": 8, **fields} for prompt in PROMPTS[:4]]


def test_a_model_that_only_reads_its_weights_passes(tmp_path: Path, checkpoint: Path) -> None:
    status, verdict = audit(tmp_path, checkpoint, prompts(), "--rounds", "2")
    assert (status, verdict["passed"], verdict["problems"]) == (0, True, [])
    assert (verdict["backend"], verdict["requests"]) == ("shm", 8 + 16 + 8)


def test_a_model_that_writes_to_its_weights_is_caught(tmp_path: Path, checkpoint: Path) -> None:
    status, verdict = audit(tmp_path, checkpoint, prompts(write=True))
    assert (status, verdict["passed"]) == (1, False)
    (problem,) = verdict["problems"]
    assert problem.startswith("while sharing: ") and "instance 'llm@r0'" in problem and "SIGSEGV" in problem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give MODEL or --config FILE"),
        (("demo-voice",), "pins no KV capacity"),
        (("nobody/nothing", "--platform", "cpu"), "nobody/nothing"),
    ],
)
def test_what_cannot_be_audited_is_refused(arguments: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "sgl_omni.cli.main", "audit", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
