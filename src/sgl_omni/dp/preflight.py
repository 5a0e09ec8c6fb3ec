"""Everything that can be refused before a server exists. Pure, but for looking whether ports are free."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sgl_omni.config.resolved import ResolvedConfig
from sgl_omni.config.scalars import core_text
from sgl_omni.errors import LaunchRefused
from sgl_omni.gpu.affinity import block_problems, parse_blocks
from sgl_omni.gpu.devices import GpuFacts
from sgl_omni.gpu.mps import PROGRAM
from sgl_omni.topology.cores import split_cores
from sgl_omni.topology.host import Cores
from sgl_omni.topology.plan import Plan

FIRST_PORT = 8100
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the user wants, as on the command line. ``core_blocks`` is text; ``base_port`` None takes free ports."""

    replicas: int
    gpu: int = 0
    platform: str = "cuda"
    core_blocks: str | None = None
    numa_node: int | None = None
    base_port: int | None = None
    mps: bool = True
    weight_share: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is there: ``gpu`` is None where there is none of that ordinal, with ``why`` saying so.

    ``taken``: cores that living runs have, with the run's id.
    """

    cores: Cores
    gpu: GpuFacts | None = None
    why: str = ""
    node: int | None = None
    has_mps: bool = False
    taken: Mapping[int, str] = field(default_factory=dict[int, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the servers go: a GPU by its key, a NUMA node (None: any), a core block and a port for each."""

    gpu_key: str
    node: int | None
    blocks: tuple[tuple[int, ...], ...]
    ports: tuple[int, ...]


def gpu_key(asked: Asked, machine: Machine) -> str:
    """What a GPU is called in the records of runs; one of the CPU platform has no UUID."""
    return machine.gpu.uuid if machine.gpu is not None else f"virtual-{asked.gpu}"


def place(asked: Asked, machine: Machine) -> Place:
    """
    Raises:
        LaunchRefused: lists all that is wrong with GPU, MPS, NUMA node, cores and ports.
    """
    problems: list[str] = []
    if asked.platform == "cuda":
        problems += _gpu_problems(asked, machine)
    elif asked.mps:
        problems.append("the CPU platform has no MPS; leave --mps out")
    node, node_problem = _node(asked, machine)
    problems += [node_problem] if node_problem else []
    blocks, block_faults = _blocks(asked, machine, node)
    problems += block_faults
    ports = find_ports(asked.replicas, asked.base_port, problems)
    if problems:
        raise LaunchRefused(joined(problems))
    return Place(gpu_key=gpu_key(asked, machine), node=node, blocks=blocks, ports=ports)


def _gpu_problems(asked: Asked, machine: Machine) -> list[str]:
    problems = []
    if machine.gpu is None:
        problems.append(f"no GPU {asked.gpu}: {machine.why}; set GPU_ID, or --platform cpu to try without a GPU")
    if asked.mps and not machine.has_mps:
        problems.append(f"no MPS: {PROGRAM} is not on the PATH; install it, or --mps off lets the servers take turns")
    return problems


def _node(asked: Asked, machine: Machine) -> tuple[int | None, str | None]:
    """The node asked for, else the GPU's; without a GPU any."""
    known = ", ".join(f"{n} (cores {core_text(c)})" for n, c in sorted(machine.cores.nodes.items()))
    if asked.numa_node is not None:
        if asked.numa_node in machine.cores.nodes:
            return asked.numa_node, None
        return None, f"there is no NUMA node {asked.numa_node}; nodes: {known}"
    if asked.platform == "cpu" or machine.gpu is None or machine.node is not None:
        return machine.node, None
    return None, f"the machine does not say which NUMA node GPU {asked.gpu} is on; set NUMA_NODE to one of {known}"


def _blocks(asked: Asked, machine: Machine, node: int | None) -> tuple[tuple[tuple[int, ...], ...], list[str]]:
    """The blocks asked for, which may be those of other runs; else the cores of the node that no living run has."""
    cores = machine.cores
    try:
        if asked.core_blocks is None:
            return _free_blocks(cores, machine.taken, node, asked.replicas), []
        blocks = parse_blocks(asked.core_blocks)
    except ValueError as error:
        return (), [f"CORE_BLOCKS: {error}"]
    problems = block_problems(blocks, cores, node)
    if len(blocks) != asked.replicas:
        given = f"{len(blocks)} block{'s' * (len(blocks) != 1)}"
        problems.insert(0, f"{given} for {asked.replicas} replica{'s' * (asked.replicas != 1)}; write one for each")
    return blocks, [f"CORE_BLOCKS: {problem}" for problem in problems]


def _free_blocks(cores: Cores, taken: Mapping[int, str], node: int | None, count: int) -> tuple[tuple[int, ...], ...]:
    """Raises ``ValueError`` that names the runs which have the rest, where too few cores are left."""
    physical = cores.physical(node)
    free = [cpu for cpu in physical if not cores.siblings[cpu] & taken.keys()]
    if len(free) < count <= len(physical):
        others = {taken[other]: None for cpu in physical for other in sorted(cores.siblings[cpu] & taken.keys())}
        raise ValueError(
            f"{count} blocks of cores are asked for, and of {len(physical)} physical cores {len(free)} are free: "
            f"{'run' if len(others) == 1 else 'runs'} {', '.join(others)} {'has' if len(others) == 1 else 'have'} the "
            "rest; name cores to share them"
        )
    return split_cores(free, count)


def find_ports(count: int, base: int | None, problems: list[str]) -> tuple[int, ...]:
    """``base`` and those after it, which must be free; without it, the first free ones from 8100 on."""
    if base is not None:
        wanted = tuple(range(base, base + count))
        if wanted[-1] > 65535:
            problems.append(f"BASE_PORT {base}: {count} ports from there on go beyond 65535")
            return ()
        busy = [port for port in wanted if not _is_free(port)]
        if busy:
            problems.append(
                f"BASE_PORT {base}: busy: {', '.join(map(str, busy))}; choose another, or none for free ports"
            )
        return wanted
    free = [port for port in range(FIRST_PORT, FIRST_PORT + 1000 + count) if _is_free(port)][:count]
    if len(free) < count:
        problems.append(f"no {count} free ports from {FIRST_PORT} on; set BASE_PORT")
    return tuple(free)


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def check_plan(asked: Asked, plan: Plan, resolved: ResolvedConfig, memory: int | None) -> dict[str, int]:
    """Whether so many servers of this plan can share a GPU of that much memory in bytes (None: unknown).

    Returns:
        The KV capacity in tokens that each engine stage pins; empty for one server that pins none.

    Raises:
        LaunchRefused: lists all that is wrong.
    """
    engines = resolved.engine_stages
    pinned = {name: (plan.stage(name).engine or {}).get("max_total_tokens") for name in engines}
    problems = [
        f"'{i.name}' is placed on GPU {i.device}: a run has one GPU, which its servers see as 0"
        for i in plan.instances
        if i.device not in (None, 0)
    ]
    problems += _sharing_problems(asked, plan)
    if asked.replicas > 1:
        for i in plan.instances:
            if i.cpu_cores:
                problems.append(
                    f"processes.{i.process}.cpu_cores would pin all servers to the same cores; leave it out"
                )
        for name in (name for name, tokens in pinned.items() if tokens is None):
            problems.append(
                f"stage '{name}' pins no max_total_tokens, which {asked.replicas} servers need in common: set "
                f"MAX_TOTAL_TOKENS, or stages.{name}.engine.max_total_tokens in the file"
            )
        problems += _budget_problems(asked, plan, resolved, memory)
    if problems:
        raise LaunchRefused(joined(problems))
    return {name: tokens for name, tokens in pinned.items() if tokens is not None}


def _sharing_problems(asked: Asked, plan: Plan) -> list[str]:
    """Who lends and who borrows is the run's own to say; whether the plan can share at all, its rules have."""
    problems = []
    if plan.weights_from is not None:
        problems.append("weights_from: in a run the first server lends the others its weights; leave it out")
    if plan.lends_weights and not asked.weight_share:
        problems.append(
            "weight_share: servers: set WEIGHT_SHARE=1 to share the weights of all servers, or leave it out"
        )
    return problems


def _budget_problems(asked: Asked, plan: Plan, resolved: ResolvedConfig, memory: int | None) -> list[str]:
    """As within one server, what is declared for the card counts once for each copy, and all of it is declared."""
    placement = resolved.config.placement
    sizes = [(i, plan.stage(s)) for i in plan.instances if i.device is not None for s in i.stages if plan.stage(s).gpu]
    silent = sorted({s.name for _, s in sizes if s.budget_fraction is None and s.budget_bytes is None})
    if silent and placement.require_memory_fraction_for_colocation:
        return [f"stage '{name}' declares no budget on the shared GPU; set its gpu_memory_fraction" for name in silent]
    one = sum(s.budget_fraction or (s.budget_bytes or 0) / (memory or float("inf")) for _, s in sizes)
    limit = placement.max_total_gpu_memory_fraction_per_gpu
    if asked.replicas * one <= limit + _EPSILON:
        return []
    return [
        f"{asked.replicas} servers that declare {one:.3g} of the GPU's memory each make {asked.replicas * one:.3g}, "
        f"more than {limit:g}; declare at most {limit / asked.replicas:.3g} (gpu_memory_fraction), or start fewer"
    ]


def joined(problems: Sequence[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return "nothing was started:" + "".join(f"\n  - {problem}" for problem in problems)
