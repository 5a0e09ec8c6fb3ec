"""`dp up` on a machine without a GPU, through MPS: the launcher with a GPU that is told of, and servers whose processes
attach to the stand-in of the control program as CUDA processes would. Everything else is the real thing.

    dp_stand_in.py up STATE_ROOT REPLICAS [--parallel] [--detached INDEX]     dp_stand_in.py serve --port PORT
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
from pathlib import Path

from plans import plan_of, stage
from sgl_omni.cli.dp import launch, new_run
from sgl_omni.config.tasks import Tasks
from sgl_omni.dp.launch import Servers
from sgl_omni.dp.preflight import Asked, Machine, place
from sgl_omni.dp.state import Store
from sgl_omni.gpu.affinity import read_cores
from sgl_omni.gpu.devices import GpuFacts
from sgl_omni.listening import bind
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.server.app import create_app
from sgl_omni.server.serve import HttpServer
from sgl_omni.topology.plan import Plan

UUID = "GPU-aeba05c4-8610-6a4f-ea69-3f4479a5f33f"


def plan(attach: bool) -> Plan:
    client = stage("talker", "mps_client", terminal=True, gpu=True, factory_args={"attach": attach})
    base = plan_of(client)
    instances = tuple(dataclasses.replace(i, device=0, mps=True) for i in base.instances)
    return dataclasses.replace(base, instances=instances, mps={0: ("talker",)})


async def serve(port: int, attach: bool) -> None:
    sock = bind("127.0.0.1", port)
    pipeline = Pipeline(plan(attach), facts=lambda ordinal: GpuFacts(os.environ["CUDA_VISIBLE_DEVICES"], ()))
    http = HttpServer(create_app(pipeline, Tasks(), "stand-in"), sock, grace=1.0)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    serving = asyncio.create_task(http.run())
    try:
        await pipeline.start()
        failed, signalled = asyncio.create_task(pipeline.failed()), asyncio.create_task(ended.wait())
        await asyncio.wait([failed, signalled], return_when=asyncio.FIRST_COMPLETED)
    finally:
        await pipeline.stop(drain_timeout=0)
        http.stop()
        await serving


def up(root: Path, replicas: int, parallel: bool, detached: str) -> None:
    asked = Asked(replicas=replicas, core_blocks=" ".join(map(str, sorted(os.sched_getaffinity(0))[:replicas])))
    machine = Machine(cores=read_cores(), gpu=GpuFacts(UUID, ()), node=min(read_cores().nodes), has_mps=True)
    store = Store(root)
    run = new_run(store, asked, place(asked, machine), {}, "stand-in")
    servers = Servers(
        arguments=("serve", *(("--detached", str(run.replicas[int(detached)].port)) if detached else ())),
        environment={"CUDA_VISIBLE_DEVICES": UUID},
        program=(sys.executable, __file__),
        seconds=60.0,
        parallel=parallel,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    launch(store, run, servers, machine)


def main(arguments: list[str]) -> None:
    logging.basicConfig(level=logging.INFO)
    if arguments[0] == "serve":
        port = arguments[arguments.index("--port") + 1]
        asyncio.run(serve(int(port), attach="--detached" not in arguments or port not in arguments[1:3]))
        return
    detached = arguments[arguments.index("--detached") + 1] if "--detached" in arguments else ""
    up(Path(arguments[1]), int(arguments[2]), "--parallel" in arguments, detached)


if __name__ == "__main__":
    main(sys.argv[1:])
