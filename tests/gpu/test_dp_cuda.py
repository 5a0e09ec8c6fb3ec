"""Two servers of the demo voice on one GPU under MPS, by `sgl-omni dp`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sgl_omni.dp.state import Store
from sgl_omni.gpu.affinity import gpu_node, read_cores
from sgl_omni.gpu.devices import gpu_facts

pytestmark = pytest.mark.gpu
CONFIG = Path(__file__).parents[2] / "examples/mps_dp/configs/demo_cpu_dp2.yaml"


@pytest.mark.parametrize(("parallel", "share"), [(False, "off"), (True, "off"), (False, "on"), (True, "on")])
def test_two_servers_attach_to_mps_and_nothing_is_left(tmp_path: Path, parallel: bool, share: str) -> None:
    def dp(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sgl_omni.cli.main", "dp", *arguments, "--state-root", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    before = set(gpu_facts(0).compute_pids)
    options = ["--config", str(CONFIG), "--replicas", "2", "--weight-share", share]
    options += ["--parallel-start"] if parallel else []
    if gpu_node(gpu_facts(0).bus_id) is None:
        options += ["--numa-node", str(min(read_cores().nodes))]
    up = dp("up", *options)
    assert up.returncode == 0, up.stdout + up.stderr
    store = Store(tmp_path)
    (run_id,) = store.ids()
    run = store.load(run_id)
    attached = {int(line.split()[1]) for line in (tmp_path / run_id / "mps_attach.txt").read_text().splitlines()}
    assert attached == {w.mark.pid for r in run.replicas for w in r.workers if w.computes} and len(attached) == 4
    assert "attached to MPS" in dp("verify").stdout
    assert {stage: model.backend for stage, model in run.weights.items()} == (
        {"tts_engine": "vmm"} if share == "on" else {}
    ), "and `verify` compares each server's with the first's"
    down = dp("down", run_id)
    assert down.returncode == 0, down.stderr
    assert set(gpu_facts(0).compute_pids) <= before and not Path(run.runtime).exists()
