"""What sharing weights costs and saves: load rate, attach time, memory of a follower, what a write does.

Prints one JSON object as its last line, and on standard error what it knows by then. No figure of it is asserted
anywhere: machines are noisy.

    python benchmarks/weight_share.py --gib 8 --device cuda:0 --backend vmm
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from ending import run
from sgl_omni.engine.tensor_file import BLOCK_BYTES, MOST_THREADS
from weight_group import TENSOR_BYTES, Member, group, make_checkpoint


def read_rate(folder: Path, threads: int) -> float:
    """GB/s at which the checkpoint's files come from the disk or page cache into memory that is used again."""
    jobs = [
        (path, at) for path in sorted(folder.glob("*.safetensors")) for at in range(0, path.stat().st_size, BLOCK_BYTES)
    ]
    descriptors = {path: os.open(path, os.O_RDONLY) for path in {path for path, _ in jobs}}
    buffers = [bytearray(BLOCK_BYTES) for _ in range(threads)]

    def read(worker: int) -> int:
        return sum(os.preadv(descriptors[path], [buffers[worker]], at) for path, at in jobs[worker::threads])

    begin = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        total = sum(pool.map(read, range(threads)))
    seconds = time.perf_counter() - begin
    for fd in descriptors.values():
        os.close(fd)
    return total / seconds / 1e9


async def measure(checkpoint: Path, device: str, backend: str, followers: int) -> dict[str, Any]:
    async with group(checkpoint, device, backend) as found:
        roles = ["leader", *["follower"] * followers, *["leader", "leader"] * (backend != "ipc")]
        leader, *others = await asyncio.gather(*(found.prepare(role) for role in roles))
        await leader.go()
        attached = [await member.go() for member in others[:followers]]
        sums = {(await member.ask("sum"))["sum"] for member in (leader, *attached)}
        assert len(sums) == 1, "the members do not see the same weights"
        result: dict[str, Any] = {"leader": leader.facts, "followers": [member.facts for member in attached]}
        if backend != "ipc":
            result["follower_writes"] = await attached[-1].ask("write")
            result["afterwards"] = {"same_sum": {(await leader.ask("sum"))["sum"]} == sums}
            result |= await leader_dies([leader, *attached], others[followers:], sums)
    return result


async def leader_dies(members: list[Member], leaders: list[Member], sums: set[int]) -> dict[str, Any]:
    """Attach time of a leader that comes back, with and without another process that holds the weights."""
    again, alone = leaders
    await members[0].end(kill=True)
    await again.go()
    result: dict[str, Any] = {"leader_again": {**again.facts, "same_sum": {(await again.ask("sum"))["sum"]} == sums}}
    for member in (*members, again):
        await member.end(kill=True)
    await alone.go()
    result["from_the_descriptor_alone"] = {**alone.facts, "same_sum": {(await alone.ask("sum"))["sum"]} == sums}
    return result


def tell(found: dict[str, Any]) -> None:
    """What is known already, for a run that is cut short."""
    print(json.dumps(found), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="size of the weights")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--backend", choices=["shm", "vmm", "ipc"], default="vmm")
    parser.add_argument("--followers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made; a temporary folder by default")
    options = parser.parse_args()
    tensors = max(2, round(options.gib * 2**30 / TENSOR_BYTES))
    with tempfile.TemporaryDirectory(prefix="omni-", dir=options.folder) as folder:
        begin = time.perf_counter()
        checkpoint = make_checkpoint(Path(folder), tensors)
        tell({"checkpoint_seconds": time.perf_counter() - begin})
        size = tensors * TENSOR_BYTES
        rates = {f"{n}_threads": [round(read_rate(checkpoint, n), 2) for _ in range(3)] for n in (1, MOST_THREADS)}
        tell({"page_cache_gb_per_s": rates})
        runs = []
        for _ in range(options.repeat):
            begin = time.perf_counter()
            runs.append(run(measure(checkpoint, options.device, options.backend, options.followers)))
            tell({**runs[-1], "took_seconds": time.perf_counter() - begin})
    loads = [round(size / each["leader"]["load_seconds"] / 1e9, 2) for each in runs]
    gpu = torch.cuda.get_device_name(0) if options.device.startswith("cuda") else None
    print(
        json.dumps(
            {
                "bytes": size,
                "backend": options.backend,
                "machine": {"cpus": os.cpu_count(), "gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda},
                "python": platform.python_version(),
                "page_cache_gb_per_s": rates,
                "load_gb_per_s": loads,
                "load_to_page_cache": [round(load / max(map(max, rates.values())), 3) for load in loads],
                "attach_seconds": [[round(f["seconds"], 4) for f in each["followers"]] for each in runs],
                "follower_device_mib": [[f["device_bytes"] >> 20 for f in each["followers"]] for each in runs],
                "leader_device_mib": [each["leader"]["device_bytes"] >> 20 for each in runs],
                "runs": runs,
            }
        )
    )


if __name__ == "__main__":
    main()
