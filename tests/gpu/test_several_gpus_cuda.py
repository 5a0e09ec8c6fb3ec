"""Two cards at once: sharing groups, MPS daemons and ranks of tensor-parallel stages, mixed, and what a kill does.

`tests/integration/test_mixed_placement.py` runs the same engines on virtual GPUs.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from checkpoints import save_llama
from mixed_cases import (
    check_answers,
    expected_tokens,
    generated,
    kill_under_load,
    mixed_plan,
    pids,
    weights,
)
from sgl_omni.gpu.devices import gpu_facts, usable_host
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.host import Host
from sgl_omni.topology.plan import Plan

pytestmark = pytest.mark.gpu

SMALLS = [f"small@r{i}" for i in range(4)]
SLACK = 128 * 2**20

Begin = Callable[[Plan], Awaitable[Pipeline]]


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run folder with a short path, as sockets need. NVLink multicast, which belongs to the fabric, stays off."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for key in ("NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.setenv(key, os.environ.get(key, "0" if key == "NCCL_NVLS_ENABLE" else "1"))
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture
async def begin(two_gpus: Path) -> AsyncIterator[Begin]:
    """Starts pipelines; after the test nothing of them may be left, on the cards neither."""
    pipelines: list[Pipeline] = []
    used = [memory_in_use(gpu) for gpu in range(2)]

    async def start(plan: Plan) -> Pipeline:
        pipelines.append(Pipeline(plan))
        await pipelines[-1].start()
        return pipelines[-1]

    yield start
    for pipeline in pipelines:
        await pipeline.stop(drain_timeout=0)
    assert not psutil.Process().children(recursive=True), "a process outlived its pipeline"
    assert not [*two_gpus.glob("sgl-omni/run-*"), *two_gpus.glob("sgl-omni/mps/GPU-*/")]
    assert all(memory_in_use(gpu) - before < SLACK for gpu, before in enumerate(used)), "GPU memory was left behind"


def memory_in_use(gpu: int) -> int:
    """Bytes, as the driver's management library counts them, which takes no context."""
    import pynvml

    pynvml.nvmlInit()
    used = int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)).used)
    pynvml.nvmlShutdown()
    return used


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    return expected_tokens(llama)


def host() -> Host:
    found = usable_host()
    assert found is not None
    return found


def attached(folder: Path) -> dict[str, dict[str, list[str]]]:
    """The clients of each MPS server, by the UUID of its GPU."""
    (record,) = folder.glob("sgl-omni/run-*/mps_attach.json")
    servers = json.loads(record.read_text())
    return {uuid: {pid: sorted(clients.values()) for pid, clients in found.items()} for uuid, found in servers.items()}


async def test_a_sharing_group_and_an_mps_daemon_on_each_card_beside_ranks_over_both(
    tmp_path: Path, two_gpus: Path, llama: Path, expected: list[list[int]], begin: Begin
) -> None:
    pipeline = await begin(mixed_plan(tmp_path, llama, host(), mps="auto"))
    await check_answers(pipeline, expected)
    assert [weights(pipeline, name)["role"] for name in SMALLS] == ["leader", "follower"] * 2
    assert [weights(pipeline, name)["attached"] for name in SMALLS] == [False, True] * 2
    assert all((await generated(pipeline, "small")).values())
    uuids = [gpu_facts(gpu).uuid for gpu in range(2)]
    found = attached(two_gpus)
    clients = {uuid: [name for names in servers.values() for name in names] for uuid, servers in found.items()}
    assert clients == {uuids[0]: SMALLS[:2], uuids[1]: SMALLS[2:]}, "of daemons of their own, without the ranks"

    await kill_under_load(pipeline, pids(pipeline)["wide_tp1"], ["wide_tp0", "wide_tp1"], expected)
    await kill_under_load(pipeline, pids(pipeline)["small@r2"], ["small@r2"], expected)
    assert weights(pipeline, "small@r2")["attached"] is True, "from what it once loaded, which is still there"
    (server,) = found[uuids[1]]
    await kill_under_load(pipeline, int(server), SMALLS[2:], expected)  # the other card's clients stay who they are
    await check_answers(pipeline, expected)


async def test_replicas_of_one_rank_and_of_two_side_by_side(
    tmp_path: Path, llama: Path, expected: list[list[int]], begin: Begin
) -> None:
    """Four ranks and two single processes on two cards; a rank is killed, and its pair alone starts again."""
    plan = mixed_plan(
        tmp_path,
        llama,
        host(),
        share="off",
        small="{num_replicas: 2, replica_devices: [0, 1]}",
        wide="{num_replicas: 2, replica_devices: [0, 1, 1, 0]}",
    )
    pipeline = await begin(plan)
    devices = {i["name"]: i["device"] for i in pipeline.health()["instances"] if i["device"] is not None}
    assert devices == {
        "small@r0": 0,
        "small@r1": 1,
        "wide@r0_tp0": 0,
        "wide@r0_tp1": 1,
        "wide@r1_tp0": 1,
        "wide@r1_tp1": 0,
    }
    await check_answers(pipeline, expected)
    rows = await generated(pipeline, "wide")
    assert rows["wide@r0_tp0"] == rows["wide@r0_tp1"] > 0 and rows["wide@r1_tp0"] == rows["wide@r1_tp1"] > 0
    await kill_under_load(pipeline, pids(pipeline)["wide@r1_tp1"], ["wide@r1_tp0", "wide@r1_tp1"], expected)
    await check_answers(pipeline, expected)
