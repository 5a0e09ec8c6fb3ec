"""From what was seen of one replica to a configuration, on figures that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sgl_omni.config.load import load_config, read_document, resolve
from sgl_omni.config.views import effective_tree
from sgl_omni.dp.advice import Room, advise
from sgl_omni.dp.advised import Seen, configuration, measured, replicas_forced, verdict, weights_in
from sgl_omni.dp.watch import Reading
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import cuda_host

MIB, GIB = 2**20, 2**30
CONFIG = Path(__file__).parents[2] / "examples/mps_dp/configs/demo_cpu_dp2.yaml"


def reading(peak: int, *, rows: float = 0, steps: float = 0, launching: float = 0, token: int = 1000) -> Reading:
    return Reading(
        kv_peak=peak,
        kv_capacity=100_000,
        page_tokens=64,
        bytes_per_token=token,
        generated_rows=rows,
        steps=steps,
        launch_seconds=launching,
    )


def seen(*readings: Reading, active: float = 0.3) -> Seen:
    return Seen(
        active=active,
        cpu_seconds=24.0,
        seconds=10.0,
        device_bytes=800 * MIB,
        weights_bytes=500 * MIB,
        readings=readings or (reading(1000, rows=100), reading(3000, rows=2500), reading(5000, rows=4900)),
    )


def test_what_was_seen_becomes_what_the_rule_takes() -> None:
    found = measured(seen())
    assert (found.sm_active, found.host_cores, found.tokens_needed, found.page_tokens) == (0.3, 2.4, 5000, 64)
    assert found.bytes_per_token == 1000
    assert found.other_bytes == 300 * MIB - 100_000 * 1000
    assert seen().host_ms_a_row == 5.0
    assert seen().host_ms_a_step is None
    counted = seen(reading(1, steps=100, launching=1.0), reading(1, steps=600, launching=2.5))
    assert counted.host_ms_a_step == 3.0


def test_of_an_engine_that_does_not_tell_all_memory_beside_the_weights_is_its_pool() -> None:
    found = measured(seen(reading(500, token=0)))
    assert found.bytes_per_token == 300 * MIB // 100_000
    assert found.other_bytes < 100_000


def test_the_configuration_is_one_that_plans(tmp_path: Path) -> None:
    resolved = resolve(read_document(CONFIG), registry=PipelineRegistry())
    found = measured(seen())
    advice = advise(found, Room(memory_bytes=8 * GIB, cores=9))
    assert (advice.replicas, advice.cores_each, advice.bound) == (3, 3, "multiprocessors")
    tree = configuration(
        effective_tree(resolved),
        advice,
        found,
        process="tts_engine",
        stage="tts_engine",
        device=0,
        memory_bytes=10 * GIB,
        mps=True,
        blocks=[(0, 1, 2), (3, 4, 5), (6, 7, 8)],
    )
    path = tmp_path / "advised.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    made = load_config(path, [], registry=PipelineRegistry(), model_path=None)
    plan = build_plan(made, cuda_host(1, 10 * GIB, mps=True))
    copies = plan.instances_of("tts_engine")
    assert [c.cpu_cores for c in copies] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
    assert all(c.mps for c in copies) and plan.mps_mode == "on"
    engine = plan.stage("tts_engine").engine or {}
    assert engine["max_total_tokens"] == advice.max_total_tokens
    budget = plan.stage("tts_engine").budget_bytes
    assert budget is not None and budget >= 500 * MIB + found.other_bytes + 1000 * advice.max_total_tokens
    assert plan.sharing_groups == ()


def test_shared_weights_and_no_mps_are_written_as_such() -> None:
    resolved = resolve(read_document(CONFIG), registry=PipelineRegistry())
    found = measured(seen())
    advice = advise(found, Room(memory_bytes=1200 * MIB, cores=9, can_share=True))
    assert advice.weight_share and advice.replicas == 3
    made = configuration(
        effective_tree(resolved),
        advice,
        found,
        process="tts_engine",
        stage="tts_engine",
        device=0,
        memory_bytes=4 * GIB,
        mps=False,
        blocks=(),
    )
    assert (made["weight_share"], made["mps"]) == ("on", "off")
    assert "cpu_cores" not in made["processes"]["tts_engine"]


def test_a_number_that_is_to_be_tried_divides_the_same_pools() -> None:
    found, room = measured(seen(active=0.9)), Room(memory_bytes=8 * GIB, cores=9)
    advice = advise(found, room)
    assert advice.replicas == 1
    forced = replicas_forced(advice, found, room, 2)
    assert (forced.replicas, forced.cores_each, forced.mps) == (2, 4, True)
    each = found.weights_bytes + found.other_bytes + forced.max_total_tokens * found.bytes_per_token
    assert 2 * each <= 0.95 * room.memory_bytes < 2 * (each + found.page_tokens * found.bytes_per_token)
    with pytest.raises(ValueError, match="99 replicas leave no room for KV pools"):
        replicas_forced(advice, found, room, 99)


@pytest.mark.parametrize(
    ("before", "after", "seconds", "says"),
    [
        (10.0, 16.0, 60.0, "worth it: 3 replicas served 16.00 requests/s, one 10.00 (+60%)"),
        (10.0, 10.4, 600.0, "not worth it: 3 replicas served 10.40"),
        (10.0, 8.0, 60.0, "not worth it: 3 replicas served 8.00 requests/s, one 10.00 (-20%)"),
        (0.125, 0.25, 8.0, "not shown: 3 replicas served 0.25"),
    ],
)
def test_verdicts(before: float, after: float, seconds: float, says: str) -> None:
    assert verdict(before, after, seconds, 3).startswith(says)


def test_weights_are_what_a_checkpoint_holds(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 100)
    (tmp_path / "config.json").write_text("{}")
    assert weights_in(str(tmp_path)) == 100
    assert weights_in(None) == weights_in("org/model") == 0
