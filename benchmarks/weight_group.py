"""A sharing group without a pipeline: members that load or attach and obey commands, and the keeper between them.

`weight_share.py` and the GPU tests drive it; as a program it is one member.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.weights import SharePolicy
from sgl_omni.gpu.weights.exchange import Exchange
from sgl_omni.gpu.weights.share import SharedWeights, backend_named
from sgl_omni.runtime.weight_keeper import WeightKeeper
from sgl_omni.topology.plan import InstancePlan

ROWS, COLUMNS = 8192, 8192
TENSOR_BYTES = ROWS * COLUMNS * 2
POLICY = SharePolicy("Benchmark", private=("t0000",))
LEADER, FOLLOWER = "group@r0", "group@r1"


def make_checkpoint(folder: Path, tensors: int) -> Path:
    """`tensors` bfloat16 matrices of 128 MiB each in files of at most 1 GiB; the first of them is private.

    Random bits are drawn for one of them; the others are it with bits turned, each with its own, so that no two are
    alike: to draw 8 GiB would take most of a minute.
    """
    block = np.frombuffer(np.random.default_rng(0).bytes(TENSOR_BYTES), dtype=np.int16)
    parts = {f"model-{first:04d}.safetensors": range(first, min(first + 8, tensors)) for first in range(0, tensors, 8)}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda name: _write(folder / name, block, parts[name]), parts))
    files = {f"t{i:04d}": name for name, part in parts.items() for i in part}
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def _write(file: Path, block: NDArray[np.int16], numbers: range) -> None:
    header = {
        f"t{i:04d}": {
            "dtype": "BF16",
            "shape": [ROWS, COLUMNS],
            "data_offsets": [at * TENSOR_BYTES, (at + 1) * TENSOR_BYTES],
        }
        for at, i in enumerate(numbers)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as opened:
        opened.write(len(text).to_bytes(8, "little") + text)
        for i in numbers:
            opened.write((block ^ np.int16(i)).data)


class Member:
    """One process of the group, which has its imports and its device, and takes its weights when told."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.facts: dict[str, Any] = {}

    async def ask(self, command: str) -> dict[str, Any]:
        """Its answer, or {"died": status} where it gave none."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        return await self.answer()

    async def go(self) -> Member:
        """Returns once it has its weights; its `facts` say how. Raises ``RuntimeError`` where it ended instead."""
        self.facts = await self.ask("go")
        if "died" in self.facts:
            raise RuntimeError(f"a member ended with status {self.facts['died']}")
        return self

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            return {"died": await self.process.wait()}
        found: dict[str, Any] = json.loads(line)
        return found

    async def end(self, *, kill: bool = False) -> None:
        if self.process.returncode is None:
            if kill:
                self.process.kill()
            elif self.process.stdin is not None:
                self.process.stdin.close()
        await self.process.wait()


class Group:
    """The keeper, and the members started so far."""

    def __init__(self, folder: Path, checkpoint: Path, device: str, backend: str) -> None:
        self._folder = folder
        self._checkpoint = checkpoint
        self._device = device
        self._backend = backend
        self._plans: dict[int, InstancePlan] = {}
        self.members: list[Member] = []
        self.keeper = WeightKeeper(folder, self._plans.get)
        self.keeper.listen()

    async def start(self, role: str, environment: Mapping[str, str] | None = None) -> Member:
        """A leader or follower, once it has its weights; its `facts` say how."""
        return await (await self.prepare(role, environment)).go()

    async def prepare(self, role: str, environment: Mapping[str, str] | None = None) -> Member:
        """A leader or follower that has everything but weights: what starts before takes nothing of what is timed."""
        arguments = (str(self._folder), str(self._checkpoint), role, self._device, self._backend)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | dict(environment or {}),
        )
        leads = role == "leader"
        self._plans[process.pid] = InstancePlan(
            name=LEADER if leads else FOLLOWER,
            process="group",
            stages=("model",),
            weight_role="leader" if leads else "follower",
            weight_leader=None if leads else LEADER,
        )
        member = Member(process)
        self.members.append(member)
        if "died" in await member.answer():
            raise RuntimeError(f"the {role} did not start")
        return member


@asynccontextmanager
async def group(checkpoint: Path, device: str, backend: str) -> AsyncIterator[Group]:
    """Ends every member and drops the weights afterwards."""
    with tempfile.TemporaryDirectory(prefix="omni-") as folder:
        found = Group(Path(folder), checkpoint, device, backend)
        try:
            yield found
        finally:
            for member in found.members:
                await member.end()
            found.keeper.close()


# One member ---------------------------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.zeros(1, device=device)
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """Exact and of every bit: the sum of all 64-bit words, modulo 2**64, weighted by the tensors' order."""
    total = 0
    for i, (_, tensor) in enumerate(sorted(tensors.items()), 1):
        total += i * int(tensor.view(-1).view(torch.int64).sum())
    return total % 2**64


def write(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Any]:
    tensor = tensors[max(tensors)]
    try:
        tensor[0, :4] = 7.0
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError as error:
        return {"write": "faulted", "error": str(error).splitlines()[0]}
    return {"write": "went through"}


def say(answer: Mapping[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("folder", "checkpoint", "role", "device", "backend"):
        parser.add_argument(name)
    options = parser.parse_args()
    device = torch.device(options.device)
    checkpoint = Checkpoint(Path(options.checkpoint))
    wanted = {n: torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="meta") for n in checkpoint.names()}
    loading = 0.0

    def fill(targets: Mapping[str, Tensor]) -> None:
        nonlocal loading
        begin = time.perf_counter()
        checkpoint.load(Slot(name, target, (ROWS, COLUMNS)) for name, target in targets.items())
        loading = time.perf_counter() - begin

    backend = backend_named(options.backend)
    store = SharedWeights(
        "model", Exchange(Path(options.folder)), may_load=options.role == "leader", choose_backend=lambda _: backend
    )
    free_bytes(device)
    say({"ready": True})
    if sys.stdin.readline().strip() != "go":
        return
    before = free_bytes(device)
    begin = time.perf_counter()
    tensors = store.obtain(wanted, device, fill, policy=POLICY, fingerprint=checkpoint.fingerprint())
    seconds = time.perf_counter() - begin
    store.verify(tensors)
    taken = before - free_bytes(device)
    say({**store.describe(), "seconds": seconds, "load_seconds": loading, "device_bytes": taken})
    for line in sys.stdin:
        command = line.strip()
        say({"sum": checksum(tensors)} if command == "sum" else write(tensors, device))
    os._exit(0)


if __name__ == "__main__":
    main()
