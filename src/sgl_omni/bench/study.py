"""Several configurations, measured with one discipline: interleaved, fresh servers in every run, the same cores in
all, and every attempt in the report."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sgl_omni.bench.child import before_exec
from sgl_omni.bench.measure import BenchError, Load, measure
from sgl_omni.bench.workload import Workload, load_texts, parse_mix

READY = re.compile(r"ready: \S+ on (http://\S+)")
STOP_SECONDS = 60.0


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RouterSpec(_Strict):
    """The clients talk to a router in front of the replicas."""

    policy: str = "least_inflight"
    arguments: list[str] = Field(default_factory=list)


class Configuration(_Strict):
    """``serve``: arguments of `sgl-omni serve`, the same for each replica. ``concurrency`` is each client's; there is
    a client a replica. ``environment`` is added to the servers'."""

    serve: list[str] = Field(min_length=1)
    replicas: int = Field(1, ge=1)
    concurrency: int | None = Field(None, ge=1)
    router: RouterSpec | None = None
    environment: dict[str, str] = Field(default_factory=dict)


class WorkloadSpec(_Strict):
    texts: str = "english"
    seed: int = 0
    mix: str | None = None
    model: str = "demo-voice"
    voice: str | None = None
    max_new_tokens: int | None = Field(None, ge=1)

    def build(self) -> Workload:
        mix = parse_mix(self.mix) if self.mix is not None else None
        return Workload(load_texts(self.texts), self.seed, mix, self.model, self.voice, self.max_new_tokens)


class StudySpec(_Strict):
    """Seconds; ``cores`` as `0-3,8`: all the servers' cores together, split evenly and in whole cores over the
    replicas. ``client_cores``: the clients' and the router's, anywhere if left out."""

    name: str
    configurations: dict[str, Configuration] = Field(min_length=1)
    workload: WorkloadSpec = Field(default_factory=WorkloadSpec)
    repeats: int = Field(3, ge=1)
    concurrency: int | None = Field(None, ge=1)
    rate: float | None = Field(None, gt=0)
    warmup: float = Field(3.0, ge=0)
    seconds: float = Field(15.0, gt=0)
    timeout: float = Field(120.0, gt=0)
    start_timeout: float = Field(300.0, gt=0)
    cores: str | None = None
    client_cores: str | None = None
    gpu: int | None = 0
    degraded_below: float = Field(0.7, gt=0, le=1)

    @model_validator(mode="after")
    def _can_be_run(self) -> StudySpec:
        total = len(parse_cores(self.cores)) if self.cores is not None else None
        if self.client_cores is not None:
            parse_cores(self.client_cores)
        for name, each in self.configurations.items():
            if self.rate is None and self.concurrency is None and each.concurrency is None:
                raise ValueError(f"configuration {name!r} has no load: write concurrency there, or rate for all")
            if total is not None and total % each.replicas:
                raise ValueError(
                    f"configuration {name!r}: {total} cores cannot be split evenly over {each.replicas} replicas; "
                    "choose a number of cores that all configurations divide"
                )
        return self


def parse_cores(text: str) -> list[int]:
    """``0-3,8`` as [0, 1, 2, 3, 8]. Raises ``ValueError`` that quotes it, also for cores that this machine lacks."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or int(last or first) < int(first):
            raise ValueError(f"cores {text!r}: write numbers and ranges, as 0-3,8")
        found += range(int(first), int(last or first) + 1)
    if len(set(found)) != len(found):
        raise ValueError(f"cores {text!r}: a core is named twice")
    if missing := sorted(set(found) - os.sched_getaffinity(0)):
        raise ValueError(f"cores {text!r}: this process has no core {', '.join(map(str, missing))}")
    return found


def load_study(path: Path) -> StudySpec:
    """Reads STUDY.yaml. Raises ``BenchError`` that says everything that is wrong with it."""
    try:
        return StudySpec.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BenchError(f"{path}: {error}") from error
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc'])) or 'study'}: {e['msg']}" for e in error.errors()]
        raise BenchError(f"{path}: " + "; ".join(faults)) from error


class Launched:
    """A server, or a router, in a process group of its own, pinned to its cores; ends on leaving, whatever happened."""

    def __init__(self, arguments: Sequence[str], cores: Sequence[int] | None, environment: Mapping[str, str]) -> None:
        self._arguments = [sys.executable, "-m", "sgl_omni.cli.main", *arguments]
        self._cores = cores
        self._environment = {**os.environ, **environment}
        self._tail: deque[str] = deque(maxlen=20)
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def __aenter__(self) -> Launched:
        self._process = await asyncio.create_subprocess_exec(
            *self._arguments,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
            preexec_fn=before_exec(self._cores, signal.SIGTERM),  # a server ends its processes itself
        )
        self._reading = asyncio.ensure_future(self._read(self._process))
        return self

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._tail.append(text)
            if (found := READY.search(text)) and not self._url.done():
                self._url.set_result(found[1])
        if not self._url.done():
            status = await process.wait()
            self._url.set_exception(
                BenchError(f"a process ended with status {status} before it was ready: {self.tail}")
            )

    @property
    def tail(self) -> str:
        return " / ".join(list(self._tail)[-3:])

    @property
    def ended(self) -> int | None:
        return self._process.returncode if self._process is not None else None

    async def url(self, seconds: float) -> str:
        """Where it listens, once it is ready. Raises ``BenchError``."""
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.shield(self._url)
        except TimeoutError as error:
            raise BenchError(f"a process was not ready within {seconds:g} s: {self.tail}") from error

    async def __aexit__(self, *_: object) -> None:
        process = self._process
        assert process is not None and self._reading is not None
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await process.wait()
            except TimeoutError:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        await self._reading
        if self._url.done() and not self._url.cancelled():
            self._url.exception()  # it is in the report, or another's was first


async def run_once(spec: StudySpec, name: str, streams: int) -> dict[str, Any]:
    """One run of a configuration over fresh servers. Raises ``BenchError`` where it cannot be completed."""
    each = spec.configurations[name]
    cores = parse_cores(spec.cores) if spec.cores is not None else None
    client_cores = parse_cores(spec.client_cores) if spec.client_cores is not None else None
    share = len(cores) // each.replicas if cores is not None else 0
    load = Load(
        0 if spec.rate is not None else (each.concurrency or spec.concurrency or 0),
        spec.rate / each.replicas if spec.rate is not None else 0.0,
        spec.warmup,
        spec.seconds,
        spec.timeout,
    )
    async with AsyncExitStack() as stack:
        servers = []
        for i in range(each.replicas):
            own = cores[i * share : (i + 1) * share] if cores is not None else None
            arguments = ["serve", "--port", "0", *each.serve]
            servers.append(await stack.enter_async_context(Launched(arguments, own, each.environment)))
        urls = [await server.url(spec.start_timeout) for server in servers]
        driven = urls
        if each.router is not None:
            arguments = ["router", "--port", "0", "--worker-urls", ",".join(urls), "--policy", each.router.policy]
            router = Launched([*arguments, *each.router.arguments], client_cores, {})
            await stack.enter_async_context(router)
            driven = [await router.url(spec.start_timeout)] * each.replicas
            servers.append(router)
        figures = await measure(
            driven, spec.workload.build(), load, watched=urls, gpu=spec.gpu, cores=client_cores, streams=streams
        )
        if died := [server for server in servers if server.ended is not None]:
            raise BenchError(f"a process ended with status {died[0].ended} during the run: {died[0].tail}")
        if not figures["requests"]:
            raise BenchError(f"no request ended well: {'; '.join(figures['error_examples']) or 'none was complete'}")
        return figures


async def run_study(
    spec: StudySpec, tell: Callable[[str], None], keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All runs, configurations in turn, so that a drifting machine touches all of them alike. ``tell`` is called with
    a line for each run, and ``keep`` with the report so far, as a study may be ended before it is through."""
    runs: list[dict[str, Any]] = []

    def report() -> dict[str, Any]:
        return {
            "name": spec.name,
            "spec": spec.model_dump(),
            "configurations": list(spec.configurations),
            "cores": sorted(os.sched_getaffinity(0)),
            "runs": judge(runs, spec.degraded_below),
        }

    for repeat in range(spec.repeats):
        for name, each in spec.configurations.items():
            run: dict[str, Any] = {"configuration": name, "repeat": repeat, "clients": each.replicas}
            try:
                figures = await run_once(spec, name, streams=repeat * 64)
                runs.append({**run, "outcome": "nominal", "reason": "", "figures": figures})
                tell(f"{name}, repeat {repeat + 1}: {figures['requests_per_s']:.2f} requests/s")
            except BenchError as error:
                runs.append({**run, "outcome": "failed", "reason": str(error), "figures": None})
                tell(f"{name}, repeat {repeat + 1}: failed: {error}")
            except asyncio.CancelledError:
                runs.append({**run, "outcome": "failed", "reason": "the study was ended", "figures": None})
                raise
            finally:
                keep(report())
    return report()


def judge(runs: Sequence[dict[str, Any]], degraded_below: float) -> list[dict[str, Any]]:
    """A completed run is degraded if it had errors, or less than that share of its configuration's median."""
    judged = []
    for run in runs:
        if run["figures"] is None:
            judged.append(run)
            continue
        own = [
            r["figures"]["requests_per_s"] for r in runs if r["figures"] and r["configuration"] == run["configuration"]
        ]
        rate, usual = run["figures"]["requests_per_s"], median(own)
        reason = ""
        if run["figures"]["errors"]:
            reason = f"{run['figures']['errors']} errors: {'; '.join(run['figures']['error_examples'])}"
        elif not rate:
            reason = "no request ended within the window; a longer one may show some"
        elif rate < degraded_below * usual:
            reason = f"{rate:.2f} requests/s, {rate / usual:.2f} of this configuration's median"
        judged.append({**run, "outcome": "degraded" if reason else "nominal", "reason": reason})
    return judged
