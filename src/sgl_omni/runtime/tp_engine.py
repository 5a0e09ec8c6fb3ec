"""An engine in each rank of a group: rank 0's is driven by its stage and leads, the others follow it."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from sgl_omni.engine.interface import Engine, EngineOutput, FedEngine
from sgl_omni.runtime.engine_runner import EXIT_ENGINE_FAILED, EngineRunner
from sgl_omni.runtime.requests import StageRequest
from sgl_omni.runtime.runners import Runner
from sgl_omni.runtime.stage import EngineStage, Payload
from sgl_omni.runtime.tp import (
    Add,
    Command,
    Drop,
    Extend,
    FinishInput,
    GroupBroken,
    PeerLost,
    Ranks,
    Step,
    lost,
    seeded,
)

log = logging.getLogger("sgl_omni.tp")


class RankEngine:
    """One rank's engine, and a digest of all that has come of it so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.digest = 0

    def obey(self, command: Command) -> list[EngineOutput]:
        """Raises what the engine raises; `GroupBroken` for a step, in which the ranks may have come apart."""
        if isinstance(command, Step):
            return self._step()
        try:
            if isinstance(command, Add):
                self.engine.add(command.request_id, command.payload)
            elif isinstance(command, Extend):
                cast(FedEngine, self.engine).extend(command.request_id, command.payload)
            elif isinstance(command, FinishInput):
                cast(FedEngine, self.engine).finish_input(command.request_id)
            else:
                self.engine.abort(command.request_id)
        except Exception as error:
            self._note(f"{command.request_id} {type(error).__name__}".encode())
            raise
        return []

    def _step(self) -> list[EngineOutput]:
        try:
            outputs = list(self.engine.step())
        except PeerLost as error:
            lost(str(error), error)
        except Exception as error:
            raise GroupBroken("a step failed in this rank, and the other ranks may be elsewhere by now") from error
        for output in outputs:
            self._note(output.request_id.encode())
            for part in (*output.chunks, output.result, type(output.error).__name__):
                self._note(summary(part))
        return outputs

    def _note(self, data: bytes) -> None:
        self.digest = zlib.crc32(data, self.digest)


def summary(value: Any) -> bytes:
    """Bytes that differ where decisions do. Of what may be rounded, fractions and raw data, only how much there is."""
    if isinstance(value, dict):
        return b"".join(summary(key) + summary(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return b"".join(summary(item) for item in value) + str(len(value)).encode()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return b"T" + str(tuple(value.shape)).encode() if value.is_floating_point() else summary(value.cpu().numpy())
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.dtype.kind in "iub" else str(value.shape).encode()
    if isinstance(value, float):
        return b"f"
    return str(len(value)).encode() if isinstance(value, bytes | bytearray | memoryview) else repr(value).encode()


class LeadingEngine:
    """Rank 0's engine, as its stage sees it: all that it is told, every other rank is told first."""

    def __init__(self, engine: Engine, ranks: Ranks, stage: str) -> None:
        self._mine = RankEngine(engine)
        self._ranks = ranks
        self._stage = stage
        self._bound = False

    @property
    def has_work(self) -> bool:
        return self._mine.engine.has_work

    def add(self, request_id: str, payload: Payload) -> None:
        self._do(Add(request_id, seeded(payload, secrets.randbits(62))))

    def abort(self, request_id: str) -> None:
        self._do(Drop(request_id))

    def step(self) -> Sequence[EngineOutput]:
        return self._do(Step(self._mine.digest))

    def stats(self) -> dict[str, float]:
        return self._mine.engine.stats()

    def _do(self, command: Command) -> list[EngineOutput]:
        if not self._bound:  # here, as it is the engine's thread that calls
            self._ranks.bind_thread()
            self._bound = True
        self._ranks.tell(command, self._stage)
        return self._mine.obey(command)


class LeadingFedEngine(LeadingEngine):
    """The same for an engine whose requests' input may arrive over time."""

    def extend(self, request_id: str, payload: Payload) -> None:
        self._do(Extend(request_id, payload))

    def finish_input(self, request_id: str) -> None:
        self._do(FinishInput(request_id))


def lead(engine: Engine, ranks: Ranks, stage: str) -> LeadingEngine:
    return (LeadingFedEngine if isinstance(engine, FedEngine) else LeadingEngine)(engine, ranks, stage)


class FollowingRunner(Runner):
    """Runs the engine of any rank but 0, in a thread that does what rank 0 tells. What comes of it is thrown away."""

    def __init__(self, stage: EngineStage, name: str, ranks: Ranks) -> None:
        self._mine = RankEngine(stage.engine)
        self._ranks = ranks
        self._gauges = dict(stage.engine.stats())
        threading.Thread(target=self._run_or_die, name=f"{name}-engine", daemon=True).start()

    @property
    def takes_streams(self) -> bool:
        return isinstance(self._mine.engine, FedEngine)

    def submit(self, request: StageRequest, payload: Payload) -> None:
        raise TypeError(f"stage '{request.stage}': a payload reached rank {self._ranks.rank}; only rank 0 takes any")

    def abort(self, request: StageRequest) -> None:
        request.discard()

    def gauges(self) -> dict[str, float]:
        return self._gauges

    def _run_or_die(self) -> None:
        """A rank that cannot follow would hold up all others, so the process ends."""
        try:
            self._run()
        except BaseException:
            log.exception("rank %d can follow no longer, and this process ends", self._ranks.rank)
            os._exit(EXIT_ENGINE_FAILED)

    def _run(self) -> None:
        self._ranks.bind_thread()
        reported = 0.0
        while True:
            command = self._ranks.next_command()
            if isinstance(command, Step):
                self._check(command)
                self._mine.obey(command)
            else:
                self._take(command)
            now = time.monotonic()
            if now - reported >= EngineRunner.STATS_INTERVAL or not self._mine.engine.has_work:
                reported = now
                self._gauges = dict(self._mine.engine.stats())

    def _check(self, step: Step) -> None:
        if step.digest != self._mine.digest:
            raise GroupBroken(
                f"rank {self._ranks.rank} and rank 0 came to different results; what an engine decides must follow "
                "from what it was told alone"
            )

    def _take(self, command: Command) -> None:
        try:
            self._mine.obey(command)
        except Exception as error:  # rank 0 was told the same, and answers whoever asked
            if isinstance(command, Drop):
                raise
            log.debug("refused in every rank: %s", error)
