"""Sharing groups on two virtual GPUs beside a tensor-parallel stage over both; `tests/gpu` has the same on cards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mixed_cases import check_answers, expected_tokens, generated, kill_under_load, mixed_plan, pids, weights
from running import Start
from sgl_omni.topology.host import virtual_host


@pytest.mark.slow
async def test_a_sharing_group_on_each_gpu_beside_ranks_over_both(
    start: Start, tmp_path: Path, checkpoint: Path
) -> None:
    expected = expected_tokens(checkpoint)
    plan = mixed_plan(tmp_path, checkpoint, virtual_host(4 * 2**30, os.cpu_count()))
    assert [(g.device, g.leader, g.followers) for g in plan.sharing_groups] == [
        (0, "small@r0", ("small@r1",)),
        (1, "small@r2", ("small@r3",)),
    ]
    pipeline = await start(plan)
    await check_answers(pipeline, expected)
    assert [weights(pipeline, f"small@r{i}")["role"] for i in range(4)] == ["leader", "follower"] * 2
    assert [weights(pipeline, f"small@r{i}")["attached"] for i in range(4)] == [False, True] * 2
    assert all((await generated(pipeline, "small")).values()), "every replica had its turn"
    ranks = await generated(pipeline, "wide")
    assert ranks["wide_tp0"] == ranks["wide_tp1"] > 0

    await kill_under_load(pipeline, pids(pipeline)["wide_tp1"], ["wide_tp0", "wide_tp1"], expected)
    await kill_under_load(pipeline, pids(pipeline)["small@r2"], ["small@r2"], expected)
    assert weights(pipeline, "small@r2")["attached"] is True, "from what it once loaded, which is still there"
    await check_answers(pipeline, expected)
