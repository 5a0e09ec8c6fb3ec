"""Cores, blocks and records of a same-GPU run, without a process."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sgl_omni.config.load import read_document, resolve
from sgl_omni.config.scalars import core_text
from sgl_omni.config.yaml_source import read_yaml
from sgl_omni.dp.marks import Mark, boot_id, wait_gone
from sgl_omni.dp.preflight import Asked, Machine, check_plan, place
from sgl_omni.dp.probe import lent_at, replica_problems, shared_models
from sgl_omni.dp.state import Replica, Run, Store, Worker, cores_in_use
from sgl_omni.errors import LaunchFailed, LaunchRefused
from sgl_omni.gpu.affinity import block_problems, gpu_node, parse_blocks, read_cores
from sgl_omni.gpu.devices import GpuFacts
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.cores import split_cores
from sgl_omni.topology.host import GIB, Cores, cuda_host, virtual_host

CONFIGS = Path(__file__).parents[2] / "examples/mps_dp/configs"
UUID = "GPU-aeba05c4-8610-6a4f-ea69-3f4479a5f33f"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two nodes of four physical cores; CPU n and n + 8 are threads of one. The GPU at 1b:00.0 is on node 1, the one at
    3d:00.0 does not say."""

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")

    write("devices/system/cpu/online", "0-15")
    write("devices/system/node/node0/cpulist", "0-3,8-11")
    write("devices/system/node/node1/cpulist", "4-7,12-15")
    for cpu in range(16):
        write(f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 8},{cpu % 8 + 8}")
    write("bus/pci/devices/0000:1b:00.0/numa_node", "1")
    write("bus/pci/devices/0000:3d:00.0/numa_node", "-1")
    return tmp_path


@pytest.fixture
def cores(sysfs: Path) -> Cores:
    return read_cores(sysfs, range(16))


def test_nodes_and_threads_are_read_from_sysfs(sysfs: Path, cores: Cores) -> None:
    assert {n: core_text(c) for n, c in cores.nodes.items()} == {0: "0-3,8-11", 1: "4-7,12-15"}
    assert cores.siblings[5] == cores.siblings[13] == {5, 13}
    assert cores.physical(1) == (4, 5, 6, 7) and cores.physical(None) == tuple(range(8))
    assert read_cores(sysfs, [1, 9, 10, 99]).physical(0) == (1, 10)


def test_a_gpus_node_is_found_by_its_address_as_nvml_writes_it(sysfs: Path) -> None:
    assert gpu_node("00000000:1B:00.0", sysfs) == 1
    assert gpu_node("00000000:3D:00.0", sysfs) is None
    assert gpu_node("00000000:FF:00.0", sysfs) is None


def test_a_machine_that_tells_nothing_has_one_node_of_single_cores(tmp_path: Path) -> None:
    bare = read_cores(tmp_path, [0, 1])
    assert bare.nodes == {0: {0, 1}} and bare.physical(0) == (0, 1)


def test_blocks_are_lists_of_cores() -> None:
    assert parse_blocks("0-3  8,10-11") == ((0, 1, 2, 3), (8, 10, 11))
    for wrong in ("0-", "3-1", "0,5-2", "a", "0;1", "-1"):
        with pytest.raises(ValueError, match=f"core block '{wrong}'"):
            parse_blocks(wrong)


def test_cores_are_split_evenly_and_a_remainder_is_left_out() -> None:
    assert split_cores((0, 1, 2, 3, 4, 5, 6), 3) == ((0, 1), (2, 3), (4, 5))
    with pytest.raises(ValueError, match="3 blocks of cores are asked for, and there are 2 physical cores"):
        split_cores((0, 1), 3)


@pytest.mark.parametrize(
    ("blocks", "problem"),
    [
        ("4-5 5-6", "core blocks 0 and 1 overlap: both have core 5"),
        ("4 12", "cores 4,12 are threads of one physical core: name one of them"),
        ("4,12 5", "cores 4,12 are threads of one physical core: name one of them"),
        ("0-1 4", "cores 0-1 are not on NUMA node 1, whose physical cores here are 4-6,15"),
        ("4 64-65", "this machine has no cores 64-65 (online: 0-15)"),
        ("4 7", "this process may not run on core 7, only on 0-6,8-15"),
    ],
)
def test_wrong_blocks_are_named(sysfs: Path, blocks: str, problem: str) -> None:
    allowed = read_cores(sysfs, [cpu for cpu in range(16) if cpu != 7])
    assert block_problems(parse_blocks(blocks), allowed, 1) == [problem]


def test_good_blocks_have_no_problem(cores: Cores) -> None:
    assert block_problems(parse_blocks("4-5 6-7"), cores, 1) == []
    assert block_problems(parse_blocks("0 7"), cores, None) == []


def machine(cores: Cores, **fields: Any) -> Machine:
    return Machine(cores=cores, **{"gpu": GpuFacts(UUID, ()), "node": 1, "has_mps": True} | fields)


def test_cores_of_living_runs_are_left_to_them(cores: Cores) -> None:
    taken = {5: "20260101-one", 12: "20260101-two"}  # 12 is a thread of core 4
    found = place(Asked(replicas=2), machine(cores, taken=taken))
    assert found.blocks == ((6,), (7,))
    with pytest.raises(
        LaunchRefused, match=r"of 4 physical cores 2 are free: runs 20260101-two, 20260101-one have the "
    ):
        place(Asked(replicas=3), machine(cores, taken=taken))
    by_hand = place(Asked(replicas=2, core_blocks="4 5"), machine(cores, taken=taken))
    assert by_hand.blocks == ((4,), (5,)), "who names cores gets them"


def test_a_run_gets_its_gpus_node_blocks_of_it_and_ports(cores: Cores) -> None:
    found = place(Asked(replicas=2), machine(cores))
    assert (found.gpu_key, found.node, found.blocks) == (UUID, 1, ((4, 5), (6, 7)))
    assert len(set(found.ports)) == 2
    elsewhere = place(Asked(replicas=2, numa_node=0, core_blocks="0-1 2-3"), machine(cores, node=None))
    assert (elsewhere.node, elsewhere.blocks) == (0, ((0, 1), (2, 3)))


@pytest.mark.parametrize(
    ("asked", "there", "problem"),
    [
        (Asked(replicas=2), {"gpu": None, "why": "there is none here"}, "no GPU 0: there is none here"),
        (Asked(replicas=2), {"has_mps": False}, "no MPS: nvidia-cuda-mps-control is not on the PATH"),
        (Asked(replicas=2), {"node": None}, r"set NUMA_NODE to one of 0 \(cores 0-3,8-11\), 1 \(cores 4-7,12-15\)"),
        (Asked(replicas=2, numa_node=2), {}, "there is no NUMA node 2"),
        (Asked(replicas=2, core_blocks="4 5 6"), {}, "3 blocks for 2 replicas"),
        (Asked(replicas=5), {}, "5 blocks of cores are asked for, and there are 4 physical cores"),
        (Asked(replicas=2, base_port=65535), {}, "go beyond 65535"),
        (Asked(replicas=2, platform="cpu"), {}, "the CPU platform has no MPS"),
    ],
)
def test_what_a_machine_cannot_do_is_refused_by_name(
    cores: Cores, asked: Asked, there: dict[str, Any], problem: str
) -> None:
    with pytest.raises(LaunchRefused, match=problem):
        place(asked, machine(cores, **there))


def test_without_mps_no_control_program_is_needed(cores: Cores) -> None:
    assert place(Asked(replicas=1, mps=False), machine(cores, has_mps=False)).node == 1


def test_all_that_is_wrong_is_said_at_once(cores: Cores) -> None:
    with pytest.raises(LaunchRefused) as refused:
        place(Asked(replicas=2, core_blocks="0 0"), machine(cores, has_mps=False))
    assert str(refused.value).count("\n  - ") == 3


def pool(asked: Asked, *, text: str | None = None, config: str = "demo_cpu_dp2.yaml", memory: int = 4 * GIB) -> Any:
    """What `check_plan` says of a shipped configuration, or of one written here."""
    document = read_document(CONFIGS / config) if text is None else read_yaml(text, "test.yaml")
    resolved = resolve(document, registry=PipelineRegistry())
    host = virtual_host(memory) if config.startswith("demo") else cuda_host(1, memory, mps=True)
    return check_plan(asked, build_plan(resolved, host), resolved, memory)


@pytest.mark.parametrize(
    ("config", "replicas", "memory", "tokens"),
    [
        ("demo_cpu_dp2.yaml", 2, 4 * GIB, 9936),
        ("higgs_h100_dp3.yaml", 3, 80 * GIB, 100000),
        ("higgs_h200_dp8.yaml", 8, 140 * GIB, 30000),
    ],
)
def test_the_shipped_configurations_fit_as_often_as_they_say(
    config: str, replicas: int, memory: int, tokens: int
) -> None:
    assert pool(Asked(replicas=replicas), config=config, memory=memory) == {"tts_engine": tokens}
    with pytest.raises(LaunchRefused, match=f"{replicas + 1} servers that declare"):
        pool(Asked(replicas=replicas + 1), config=config, memory=memory)


VOICE = "model_path: demo-voice\nstages:\n  tts_engine: {gpu_memory_fraction: 0.3, engine: {max_total_tokens: 9936}}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model_path: demo-voice", "stage 'tts_engine' pins no max_total_tokens, which 2 servers need in common"),
        (f"{VOICE}processes: {{tts_engine: {{cpu_cores: ['0']}}}}", r"processes\.tts_engine\.cpu_cores would pin all"),
        (f"{VOICE}  vocoder: {{gpu_memory_fraction: null, process: tts_engine}}", "stage 'vocoder' declares no budget"),
        (
            f"{VOICE}  vocoder: {{gpu_memory_fraction: null, total_reserve_bytes: 1GiB}}",
            r"2 servers that declare 0\.55 of the GPU's memory each make 1\.1, more than 1; declare at most 0\.5 ",
        ),
        (f"{VOICE}  vocoder: {{gpu: 1}}", "'vocoder' is placed on GPU 1"),
    ],
)
def test_a_plan_that_cannot_be_copied_on_one_gpu_is_refused(text: str, problem: str) -> None:
    with pytest.raises(LaunchRefused, match=problem):
        pool(Asked(replicas=2), text=text)


def test_one_server_needs_no_common_capacity() -> None:
    assert pool(Asked(replicas=1), text="model_path: demo-voice") == {}


SHARED = f"{VOICE}  vocoder: {{gpu_memory_fraction: 0.1}}\nweight_share: servers\n"


def test_who_shares_weights_is_the_runs_to_say() -> None:
    asked = Asked(replicas=2, weight_share=True)
    assert pool(asked, text=SHARED) == {"tts_engine": 9936}
    with pytest.raises(LaunchRefused, match="weight_share: servers: set WEIGHT_SHARE=1"):
        pool(Asked(replicas=2), text=SHARED)
    with pytest.raises(LaunchRefused, match="weights_from: in a run the first server lends the others its weights"):
        pool(asked, text=f"{SHARED}weights_from: /run/weights.sock\n")


@pytest.mark.parametrize(
    ("value", "passed"), [("", ""), ("0", ""), ("off", ""), ("1", "--weight-share on"), ("on", "--weight-share on")]
)
def test_weight_share_of_the_script_is_a_flag(tmp_path: Path, value: str, passed: str) -> None:
    done = script(tmp_path, WEIGHT_SHARE=value)
    assert done.stdout.strip() == f"dp up --config c.yaml --replicas 2 {passed}".strip()


def test_the_script_refuses_another_weight_share(tmp_path: Path) -> None:
    done = script(tmp_path, WEIGHT_SHARE="yes")
    assert (done.returncode, done.stdout) == (2, "") and "WEIGHT_SHARE is 0 or 1, not 'yes'" in done.stderr


def script(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`launch.sh up` where `sgl-omni` tells what it was given."""
    program = folder / "sgl-omni"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    environment |= {"PATH": f"{folder}:{os.environ['PATH']}", "CONFIG": "c.yaml", "N": "2"}
    command = ["bash", str(CONFIGS.parent / "launch.sh"), "up"]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


# Records ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Its run folder has a short path, as socket addresses are."""
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        runtime = Path(folder) / "dp1234"
        runtime.mkdir()
        me = Mark.of(os.getpid())
        assert me is not None
        server = Replica(index=0, port=8100, cores=(0, 1), log="replica-0.log", server=me)
        yield Run(
            id="one",
            created="2026-01-01T00:00:00+00:00",
            boot=boot_id(),
            launcher=me,
            pipeline="demo-voice",
            platform="cuda",
            gpu=0,
            gpu_key=UUID,
            node=None,
            mps=True,
            capacity={"tts_engine": 9936},
            runtime=str(runtime),
            replicas=(dataclasses.replace(server, workers=(Worker(name="tts_engine", mark=me, computes=True),)),),
        )


def test_a_record_is_read_as_it_was_written_and_goes_with_its_run(tmp_path: Path, run: Run) -> None:
    store = Store(tmp_path / "state")
    store.create(run)
    assert store.load("one") == run and store.ids() == ["one"]
    store.forget(run)
    assert store.ids() == [] and not store.folder("one").exists() and not Path(run.runtime).exists()
    with pytest.raises(LaunchFailed, match=r"no run 'one' .*runs: none"):
        store.load("one")


def test_a_gpu_has_one_run_whatever_the_state_root(tmp_path: Path, run: Run) -> None:
    Store(tmp_path / "state").create(run)
    second = dataclasses.replace(run, id="two")
    for root in ("state", "elsewhere"):
        with pytest.raises(LaunchRefused, match=f"already has run 'one'; end it first: .*{tmp_path}/state"):
            Store(tmp_path / root).create(second)
    Store(tmp_path / "elsewhere").create(dataclasses.replace(second, gpu_key="GPU-other"))


def test_a_run_of_an_earlier_boot_is_stale(tmp_path: Path, run: Run) -> None:
    store = Store(tmp_path / "state")
    store.create(dataclasses.replace(run, boot="an earlier one"))
    assert store.load("one").marks() == []
    with pytest.raises(LaunchRefused, match="has the stale run 'one', whose processes are gone"):
        store.create(dataclasses.replace(run, id="two"))


def test_a_record_that_cannot_be_read_is_named_and_left(tmp_path: Path, run: Run) -> None:
    store = Store(tmp_path / "state")
    store.create(run)
    path = store.folder("one") / "run.json"
    told = rf"nothing of it is touched\. .* rm -r {store.folder('one')}$"
    for broken in ("", "{", '{"id": "one"}', path.read_text().replace("8100", '"8100"')):
        path.write_text(broken)
        with pytest.raises(LaunchFailed, match=rf"run 'one': .*run\.json cannot be read .*{told}"):
            store.load("one")
        with pytest.raises(LaunchFailed, match=told):
            store.create(dataclasses.replace(run, id="two"))
        store.create(other := dataclasses.replace(run, id="three", gpu_key="GPU-other"))
        store.forget(other)
        Path(run.runtime).mkdir()
        assert path.read_text() == broken


def test_the_cores_of_living_runs_are_known(tmp_path: Path, run: Run) -> None:
    assert cores_in_use() == {}
    Store(tmp_path / "state").create(run)
    gone = dataclasses.replace(run, id="two", gpu_key="GPU-other", boot="an earlier one")
    Store(tmp_path / "elsewhere").create(gone)
    assert cores_in_use() == {0: "one", 1: "one"}


def test_one_at_a_time_changes_a_run(tmp_path: Path, run: Run) -> None:
    store = Store(tmp_path / "state")
    store.create(run)
    with store.hold("one"):
        assert store.is_held("one")
        with pytest.raises(LaunchFailed, match="is being started, checked or ended"), Store(store.root).hold("one"):
            pass
    assert not store.is_held("one")


@pytest.mark.parametrize("run_id", ["../one", "", ".", "/"])
def test_a_run_id_is_no_path(tmp_path: Path, run: Run, run_id: str) -> None:
    Store(tmp_path / "one").create(dataclasses.replace(run, id="x"))
    with pytest.raises(LaunchFailed, match="there is no run"):
        Store(tmp_path / "one").load(run_id)


def told(role: str, *, attached: bool, size: int = 45) -> dict[str, Any]:
    """What /health says of a server whose engine is this process."""
    models = {} if role == "own" else {"tts_engine": {"backend": "shm", "attached": attached, "bytes": size}}
    instance = {"name": "tts_engine", "pid": os.getpid(), "weights": {"role": role, "models": models}}
    instance["kv_capacity_tokens"] = {"tts_engine": 9936}
    return {"status": "ready", "instances": [instance], "weights": {"lent_at": None}}


def test_a_server_that_does_not_share_is_named(run: Run) -> None:
    cores = tuple(os.sched_getaffinity(0))
    first = dataclasses.replace(run.replicas[0], cores=cores)
    second = dataclasses.replace(first, index=1)
    weights = shared_models(told("leader", attached=False))
    run = dataclasses.replace(run, weight_share=True, weights=weights, replicas=(first, second))
    assert replica_problems(run, first, told("leader", attached=False)) == []
    assert replica_problems(run, second, told("borrower", attached=True)) == []
    (own,) = replica_problems(run, second, told("leader", attached=False))
    assert "replica 1" in own and "'tts_engine' has loaded weights, and was to attach to those of replica 0" in own
    (none,) = replica_problems(run, second, told("own", attached=False))
    assert "stage 'tts_engine' shares no weights" in none
    (other,) = replica_problems(run, second, told("borrower", attached=True, size=46))
    assert "shares 46 bytes by shm, and replica 0 loaded 45 by shm" in other
    unshared = dataclasses.replace(run, weight_share=False, weights={})
    assert replica_problems(unshared, second, told("own", attached=False)) == []
    with pytest.raises(LaunchFailed, match="its /health says that it lends none"):
        lent_at(told("leader", attached=False))


def test_a_mark_is_one_process_and_not_the_next_with_its_pid() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        mark = Mark.of(child.pid)
        assert mark is not None and mark.alive
        earlier = Mark(mark.pid, mark.started - 1)
        earlier.send(signal.SIGKILL)
        assert not earlier.alive and wait_gone([earlier, mark], 0.1) == [mark]
        mark.send(signal.SIGKILL)
        assert wait_gone([mark], 5) == [] and Mark.of(child.pid) is None  # its status was not even asked for yet
