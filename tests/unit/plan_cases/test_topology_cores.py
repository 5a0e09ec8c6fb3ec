"""CPU cores that the plan derives for instances on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planning import plan

from sgl_omni.config.scalars import core_numbers
from sgl_omni.topology.host import Cores, Host, cuda_host, virtual_host
from sgl_omni.topology.host_file import read_host

GIB = 2**30


def cores_of(*nodes: str, threads: int = 2, allowed: str | None = None) -> Cores:
    cpus = sorted(cpu for node in nodes for cpu in core_numbers(node))
    half = len(cpus) // threads
    siblings = {cpu: frozenset(cpus[i % half :: half]) for i, cpu in enumerate(cpus)}
    usable = frozenset(cpus if allowed is None else core_numbers(allowed))
    return Cores({i: frozenset(core_numbers(node)) for i, node in enumerate(nodes)}, siblings, usable)


TWO_NODES = cores_of("0-7,16-23", "8-15,24-31")


def machine(cores: Cores | None = TWO_NODES, gpus: Sequence[int | None] = (0, 1)) -> Host:
    return cuda_host(len(gpus), 80 * GIB, cores=cores, gpu_nodes=gpus)


def derived(host: Host, *flags: str, text: str = "") -> dict[str, tuple[tuple[int, ...], int]]:
    return {i.name: (i.cpu_cores, i.threads) for i in plan(text, *flags, host=host).plan.instances}


def test_each_instance_gets_whole_cores_of_its_gpus_node() -> None:
    assert derived(machine()) == {
        "front": ((), 0),
        "engine": ((*range(8), *range(16, 24)), 8),
        "vocoder": ((*range(8, 16), *range(24, 32)), 8),
    }


REPLICAS = ("--processes.engine.num_replicas", "3", "--processes.engine.replica_devices", "0,0,0", "--vocoder.gpu", "0")
BUDGETS = ("--tts_engine.gpu_memory_fraction", "0.25")


def test_replicas_on_one_gpu_divide_its_node() -> None:
    sets = derived(machine(), *REPLICAS, *BUDGETS)
    assert sets["engine@r0"] == ((0, 1, 16, 17), 2)
    assert sets["engine@r2"] == ((4, 5, 20, 21), 2)
    assert sets["vocoder"] == ((6, 7, 22, 23), 2)


def test_gpus_of_one_node_have_a_part_each_used_or_not() -> None:
    four = machine(cores_of("0-15", threads=1), gpus=(0, 0, 0, 0))
    on_first_two = derived(four)
    assert [on_first_two[n][0] for n in ("engine", "vocoder")] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    on_last_two = derived(four, "--tts_engine.gpu", "2", "--vocoder.gpu", "3")
    assert [on_last_two[n][0] for n in ("engine", "vocoder")] == [(8, 9, 10, 11), (12, 13, 14, 15)]


def test_what_was_restricted_before_is_divided_whole() -> None:
    part = machine(cores_of("0-15", threads=1, allowed="4-9"), gpus=(0, 0, 0, 0))
    sets = derived(part)
    assert [sets[n][0] for n in ("engine", "vocoder")] == [(4, 5, 6), (7, 8, 9)]


def test_one_thread_of_a_core_may_be_all_there_is() -> None:
    part = machine(cores_of("0-15", allowed="0-2,9-10,13"), gpus=(0, 0))
    sets = derived(part)  # CPU 9 is a thread of core 1, 10 of core 2, 13 of core 5
    assert sets["engine"] == ((0, 1, 9), 2)
    assert sets["vocoder"] == ((2, 10, 13), 2)


def test_a_gpu_of_unknown_node_gets_cores_of_one_node() -> None:
    sets = derived(machine(gpus=(None, None)))
    assert sets["engine"][0] == (*range(8), *range(16, 24))
    assert sets["vocoder"][0] == (*range(8, 16), *range(24, 32))


def test_explicit_sets_win_and_their_cores_are_nobody_elses() -> None:
    sets = derived(machine(), "--processes.engine.cpu_cores", "8-9,16", "--vocoder.gpu", "1")
    assert sets["engine"] == ((8, 9, 16), 3)
    assert sets["vocoder"] == ((*range(10, 16), *range(26, 32)), 6)


def test_too_few_cores_derive_nothing_and_say_so() -> None:
    small = machine(cores_of("0-5"), gpus=(0,))
    planned = plan("", "--vocoder.gpu", "0", host=small).plan
    assert all(i.cpu_cores == () and i.threads == 0 for i in planned.instances)
    (note,) = planned.warnings
    assert "engine and vocoder would each need 2 physical cores, and NUMA node 0 has 3" in note
    forced = derived(small, "--vocoder.gpu", "0", "--placement.derive_cpu_cores", "on")
    assert forced["engine"] == ((0, 3), 1) and forced["vocoder"] == ((1, 4), 1)
    tiny = plan(
        "", "--vocoder.gpu", "0", "--placement.derive_cpu_cores", "on", host=machine(cores_of("0-1"), (0,))
    ).plan
    assert "would each need a physical core, and NUMA node 0 has 1" in tiny.warnings[0]


def test_where_nothing_is_derived_nothing_is_said() -> None:
    nothing = {"front": ((), 0), "engine": ((), 0), "vocoder": ((), 0)}
    assert derived(machine(), "--placement.derive_cpu_cores", "off") == nothing
    assert derived(machine(cores=None)) == nothing
    laptop = virtual_host(4 * GIB, cores=TWO_NODES)
    assert derived(laptop) == nothing
    assert plan("", host=laptop).plan.warnings == ()
    one = derived(machine(), text="stages: {vocoder: {gpu: null, gpu_memory_fraction: null}}\n")
    assert one == nothing


def test_the_cpu_platform_derives_when_asked() -> None:
    sets = derived(virtual_host(4 * GIB, cores=TWO_NODES), "--placement.derive_cpu_cores", "on")
    assert (sets["engine"][1], sets["vocoder"][1]) == (8, 8)
    assert not set(sets["engine"][0]) & set(sets["vocoder"][0])


def test_unknown_cores_are_told_only_to_who_asks() -> None:
    asked = plan("", "--placement.derive_cpu_cores", "on", host=cuda_host(2)).plan
    assert asked.warnings == ("derive_cpu_cores: on does nothing: the CPU cores of this machine are not known",)


def test_a_host_file_tells_where_cores_are(tmp_path: Path) -> None:
    path = tmp_path / "host.yaml"
    path.write_text(
        "devices: 3\ndevice_memory: 80GiB\nnuma_nodes: ['0-3,8-11', '4-7,12-15']\n"
        "threads_per_core: 2\ngpu_numa_nodes: [0, 1, -1]\n"
    )
    host = read_host(path)
    assert host.cores is not None and host.cores.siblings[12] == {4, 12}
    assert [(d.numa_node, d.node_part) for d in host.devices or ()] == [(0, (0, 1)), (1, (0, 1)), (None, None)]
    assert derived(host)["vocoder"] == ((4, 5, 6, 7, 12, 13, 14, 15), 4)
