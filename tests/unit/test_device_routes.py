"""The ways between GPUs: which are tried, with what verdict, and who is told to go by the host."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import socket
import threading
from typing import Any

import pytest

from sgl_omni.gpu.peer_probe import PROBE_BYTES, HostGround, make, open_and_compare
from sgl_omni.gpu.weights.cuda_driver import READ_WRITE, CudaDriver, DriverError
from sgl_omni.runtime.routes import Look, Routes, probe_route
from sgl_omni.runtime.visibility import Sight, sight
from sgl_omni.topology.plan import EdgePlan, InstancePlan, Plan, PlatformName, ProcessPlan, StagePlan, Transport


def plan_of(*instances: InstancePlan, transport: Transport = "cuda_ipc", platform: PlatformName = "cpu") -> Plan:
    """`a` hands its tensors to `b`, as payload and as a stream."""
    stages = (
        StagePlan(name="a", process="a", factory_path="x.y", next=("b",), stream_to=("b",), gpu=True),
        StagePlan(name="b", process="b", factory_path="x.y", terminal=True, gpu=True),
    )
    return Plan(
        name="routes",
        model_path=None,
        platform=platform,
        entry="a",
        stages=stages,
        processes=tuple(ProcessPlan(name=name, stages=(name,)) for name in "ab"),
        instances=instances,
        edges=(
            EdgePlan(source="a", target="b", kind="payload", transport=transport),
            EdgePlan(source="a", target="b", kind="stream", transport=transport),
        ),
        spawn_waves=(),
        shutdown_order=(),
    )


def at(name: str, device: int | None, **fields: Any) -> InstancePlan:
    return InstancePlan(name=name, process=name[0], stages=(name[0],), device=device, **fields)


def as_here(instance: InstancePlan) -> Sight:
    return Sight(instance.device, dict(os.environ))


class Verdicts:
    """Refuses what leads to GPU 1, and remembers what was tried."""

    def __init__(self) -> None:
        self.tried: list[tuple[str, str]] = []

    async def __call__(self, plan: Plan, source: InstancePlan, target: InstancePlan, look: Look) -> str:
        self.tried.append((source.name, target.name))
        return "no peers" if target.device == 1 and source.device != 1 else ""


async def found(plan: Plan) -> tuple[Routes, Verdicts]:
    verdicts = Verdicts()
    routes = Routes(plan, verdicts)
    await routes.find(as_here)
    return routes, verdicts


async def test_each_pair_of_places_is_tried_once() -> None:
    a0, a1 = at("a@r0", 0, replica=0), at("a@r1", 1, replica=1)
    b = [at(f"b@r{i}", device, replica=i) for i, device in enumerate((0, 1, 1))]
    routes, verdicts = await found(plan_of(a0, a1, *b))
    assert verdicts.tried == [("a@r0", "b@r0"), ("a@r0", "b@r1"), ("a@r1", "b@r0"), ("a@r1", "b@r1")]
    assert routes.by_host_from(a0) == ["a@r1", "b@r1", "b@r2"]
    assert routes.by_host_from(a1) == []


async def test_an_mps_client_is_another_place_than_a_rank_on_the_same_gpu() -> None:
    client, plain = at("a@r0", 0, mps=True), at("a@r1", 0, replica=1)
    routes, verdicts = await found(plan_of(client, plain, at("b", 1, mps=True)))
    assert verdicts.tried == [("a@r0", "b"), ("a@r1", "b")]
    assert [r.describe()["from"] for r in routes.all] == ["GPU 0 under MPS", "GPU 0"]
    assert routes.all[0].describe() == {
        "from": "GPU 0 under MPS",
        "to": "GPU 1 under MPS",
        "by": "host",
        "reason": "no peers",
    }


async def test_of_a_group_of_ranks_only_the_first_hands_tensors_on() -> None:
    ranks = [at(f"a_tp{k}", k, rank=k) for k in range(2)]
    _, verdicts = await found(plan_of(*ranks, at("b", 0)))
    assert verdicts.tried == [("a_tp0", "b")]


@pytest.mark.parametrize("plan", [plan_of(at("a", 0), at("b", 1), transport="shm"), plan_of(at("a", None), at("b", 1))])
async def test_what_never_leaves_a_device_is_not_tried(plan: Plan) -> None:
    routes, verdicts = await found(plan)
    assert verdicts.tried == [] and routes.all == () and routes.by_host_from(plan.instances[0]) == []


# The trial itself ----------------------------------------------------------------------------------------------------


async def test_two_processes_find_that_memory_arrives() -> None:
    a, b = at("a", 0), at("b", 1)
    assert await probe_route(plan_of(a, b), a, b, as_here) == ""


async def test_without_a_driver_the_trial_says_so() -> None:
    a, b = at("a", 0), at("b", 1)
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    refusal = await probe_route(plan_of(a, b, platform="cuda"), a, b, lambda instance: Sight(0, hidden))
    assert "driver cannot be loaded" in refusal or "cuInit failed" in refusal or "cuDeviceGet failed" in refusal


async def test_an_end_that_dies_is_a_refusal() -> None:
    a, b = at("a", 0), at("b", 1)
    broken = {"PATH": os.environ["PATH"], "PYTHONPATH": "/nowhere", "PYTHONHOME": "/nowhere"}
    refusal = await probe_route(plan_of(a, b), a, b, lambda i: Sight(0, broken) if i is b else as_here(i))
    assert refusal.startswith("the trial ended with status 1: ")


class Deaf(HostGround):
    """A link that loses one page in the middle, as some virtual machines do."""

    def read(self, fd: int, size: int, count: int) -> bytes:
        whole = super().read(fd, size, count)
        return whole[:8192] + bytes(4096) + whole[12288:]


def test_bytes_that_arrive_changed_are_counted() -> None:
    ours, theirs = socket.socketpair()
    maker = threading.Thread(target=make, args=(HostGround(), ours))
    maker.start()
    verdict = open_and_compare(Deaf(), theirs)
    theirs.close()
    maker.join()
    ours.close()
    zeros = sum((i % 251) == 0 for i in range(8192, 12288))
    assert verdict == f"{4096 - zeros} of {PROBE_BYTES} bytes arrive changed"


class Library:
    """The driver's library, where one call fails."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return 101 if name == self.fails else 0

        return call


@pytest.mark.parametrize(
    ("fails", "after"),
    [
        ("cuMemAddressReserve", []),
        ("cuMemMap", ["cuMemAddressFree"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree"]),
    ],
)
def test_memory_of_a_gpu_that_is_no_peer_leaves_no_mapping(fails: str, after: list[str]) -> None:
    library = Library(fails)
    driver = object.__new__(CudaDriver)
    driver._library, driver._device = library, 1  # type: ignore[assignment]
    with pytest.raises(DriverError, match=f"{fails} failed"):
        driver.map(7, 2**21, READ_WRITE)
    assert library.calls[library.calls.index(fails) + 1 :] == ["cuGetErrorName", *after]


def test_access_is_asked_for_the_gpu_that_opens() -> None:
    """Not for the one that the memory lies on."""
    asked: list[tuple[int, int]] = []

    class Granting(Library):
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> int:
                if name == "cuMemSetAccess":
                    description = ctypes.cast(arguments[2], ctypes.POINTER(ctypes.c_int))
                    asked.append((description[1], description[2]))
                return 0

            return call

    driver = object.__new__(CudaDriver)
    driver._library, driver._device = Granting(""), 3  # type: ignore[assignment]
    driver.map(7, 2**21, READ_WRITE)
    assert asked == [(3, READ_WRITE)]


# Which GPU a process takes for its first -----------------------------------------------------------------------------


def seen(device: int | None, inherited: str | None = None, **fields: Any) -> tuple[int | None, str | None]:
    instance = at("a", device, **fields)
    found = sight(plan_of(instance, at("b", 2), platform="cuda"), instance, inherited)
    return found.device, found.environment.get("CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("device", "inherited", "visible"),
    [
        (0, None, "0,1,2"),
        (1, None, "1,0,2"),
        (2, None, "2,0,1"),
        (1, "4,5,6", "5,4,6"),
        (2, "GPU-aa, GPU-bb ,GPU-cc", "GPU-cc,GPU-aa,GPU-bb"),
        (0, "3", "3"),
    ],
)
def test_its_own_gpu_comes_first(device: int, inherited: str | None, visible: str) -> None:
    assert seen(device, inherited) == (0, visible)


def test_who_says_what_it_sees_is_left_alone() -> None:
    assert seen(None) == (None, None)
    assert seen(1, env={"CUDA_VISIBLE_DEVICES": "0,1"}) == (1, None)
    assert seen(1, mps=True) == (0, None), "the daemon's environment has the one GPU"
    assert seen(3, "0,1") == (3, None), "the start will say that there is no such GPU"
    virtual = at("a", 1)
    assert sight(plan_of(virtual, at("b", 0)), virtual, None) == Sight(1)


def test_a_device_named_in_a_factorys_arguments_is_the_plans() -> None:
    instance = at("a", 1)
    plan = plan_of(instance, at("b", 0), platform="cuda")
    named = dataclasses.replace(plan.stages[0], factory_args={"codec": {"device": "cuda:0"}})
    assert sight(dataclasses.replace(plan, stages=(named, plan.stages[1])), instance, None) == Sight(1)
