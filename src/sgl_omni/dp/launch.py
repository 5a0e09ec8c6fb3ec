"""Starts the servers of a run, and proves that they are what was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sgl_omni.dp.down import tear_down
from sgl_omni.dp.marks import Mark
from sgl_omni.dp.probe import attachment, health, lent_at, replica_problems, shared_models, with_workers
from sgl_omni.dp.state import ATTACH_FILE, Replica, Run, Store
from sgl_omni.errors import LaunchFailed, OmniError
from sgl_omni.gpu.devices import GpuFacts
from sgl_omni.gpu.mps import MpsDaemon

GATE = 'read -r go || exit 125; exec "$0" "$@" </dev/null'
"""A server begins once its process is recorded; where its launcher is killed before, it ends without having begun."""

LAST_LINES = 20
SERVER = (sys.executable, "-m", "sgl_omni.cli.main", "serve")

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """How servers are started: ``arguments`` follow ``program``; ``--port`` is added for each. ``seconds`` may pass
    until one is ready; ``parallel`` starts all at once, or all but the first where it lends them its weights."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    program: tuple[str, ...] = SERVER
    seconds: float = 600.0
    parallel: bool = False


class Launch:
    """One `up`. ``run`` is what is recorded at any time."""

    def __init__(self, store: Store, run: Run, servers: Servers, gpu: GpuFacts | None, tell: Tell) -> None:
        self.run = run
        self._store = store
        self._servers = servers
        self._tell = tell
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._lent_at: str | None = None
        self._daemon: MpsDaemon | None = None
        if run.mps:
            self._daemon = MpsDaemon(run.mps_root, run.gpu_key, "launcher")
        self._gpu = gpu

    def up(self) -> Run:
        """Returns when all servers answer, have the common capacity, their cores, and are MPS clients.

        Raises:
            LaunchRefused: the GPU has another run; nothing was started.
            LaunchFailed, MpsError: names the replica; what had been started was ended, or the state is kept and the
                message says what remains to be done.
        """
        try:
            self._store.create(self.run)
        except OmniError:
            Path(self.run.runtime).rmdir()
            raise
        count = len(self.run.replicas)
        servers = f"{count} server{'s' * (count != 1)}"
        self._tell(f"run {self.run.id}: {servers} on GPU {self.run.gpu} ({self.run.gpu_key})")
        with self._store.hold(self.run.id):
            try:
                self._start()
                return self.run
            except BaseException as error:
                self._give_up(error)
                raise

    def _start(self) -> None:
        if self._daemon is not None and self._gpu is not None:
            self.run.mps_root.mkdir(mode=0o700, parents=True)
            self._daemon.acquire(list(self._gpu.compute_pids))
        for wave in self._waves():
            for planned in wave:
                self._spawn(planned)
            for planned in wave:
                self._wait_ready(planned.index)
        self._note(replace(check(self._store, self.run), ready=True))
        if self._daemon is not None:
            self._daemon.release()

    def _waves(self) -> list[tuple[Replica, ...]]:
        """Servers that share weights start when the first has loaded them."""
        first, rest = self.run.replicas[:1], self.run.replicas[1:]
        if not self._servers.parallel:
            return [(r,) for r in self.run.replicas]
        return [first, rest] if self.run.weight_share and rest else [self.run.replicas]

    def _spawn(self, planned: Replica) -> None:
        own = ["--weights-from", self._lent_at] if planned.index and self._lent_at else []
        command = [*self._servers.program, *self._servers.arguments, *own, "--port", str(planned.port)]
        with open(planned.log, "wb") as log:
            child = subprocess.Popen(
                ["/bin/sh", "-c", GATE, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._servers.environment, "XDG_RUNTIME_DIR": self.run.runtime},
                start_new_session=True,
            )
        assert child.stdin is not None
        with child.stdin as gate:
            os.sched_setaffinity(child.pid, planned.cores)
            self._children[planned.index] = child
            self._record(replace(planned, server=Mark.of(child.pid)))
            gate.write(b"go\n")
        self._tell(f"replica {planned.index}: pid {child.pid}, port {planned.port}, log {planned.log}")

    def _wait_ready(self, index: int) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < self._servers.seconds:
            self._refuse_dead()
            planned = self.run.replicas[index]
            state = health(planned)
            if state is not None and state["status"] == "ready":
                self._record(with_workers(planned, state))
                if self.run.weight_share and index == 0:
                    self._lent_at = lent_at(state)
                    self._note(replace(self.run, weights=shared_models(state)))
                problems = replica_problems(self.run, self.run.replicas[index], state)
                if problems:
                    raise LaunchFailed("; ".join(problems))
                self._tell(f"replica {index}: ready after {time.monotonic() - begun:.1f} s")
                return
            time.sleep(0.1)
        raise LaunchFailed(f"replica {index} is not ready after {self._servers.seconds:g} s{self._tail(index)}")

    def _refuse_dead(self) -> None:
        for index, child in self._children.items():
            status = child.poll()
            if status is not None:
                raise LaunchFailed(f"replica {index} ended with status {status} during the start{self._tail(index)}")

    def _tail(self, index: int) -> str:
        path = Path(self.run.replicas[index].log)
        lines = path.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return f"; the end of {path}:" + "".join(f"\n    {line}" for line in lines)

    def _record(self, changed: Replica) -> None:
        replicas = tuple(changed if r.index == changed.index else r for r in self.run.replicas)
        self._note(replace(self.run, replicas=replicas))

    def _note(self, run: Run) -> None:
        self._store.save(run)
        self.run = run

    def _give_up(self, error: BaseException) -> None:
        """Ends what was started. The logs stay, to be read; the state stays where that cannot be confirmed."""
        self._tell(f"the start of run '{self.run.id}' failed; ending what was started")
        if self._daemon is not None:
            self._daemon.release()  # what it cannot end is looked at again below
        try:
            problems = tear_down(self.run)
        except KeyboardInterrupt:
            problems = ["the clean-up was interrupted"]
        for child in self._children.values():
            child.poll()
        if problems:
            raise LaunchFailed(kept(self._store, self.run, [str(error), *problems])) from error
        self._store.forget(self.run, keep_logs=True)


def check(store: Store, run: Run) -> Run:
    """Asks every server again and writes `mps_attach.txt`; returns the run with the processes that it has now.

    Raises:
        LaunchFailed: lists what is wrong with each replica.
        MpsError: names the processes that are not attached.
    """
    states = {r.index: health(r) for r in run.replicas}
    replicas = tuple(with_workers(r, state) if (state := states[r.index]) else r for r in run.replicas)
    run = replace(run, replicas=replicas)
    problems = [p for r in run.replicas for p in replica_problems(run, r, states[r.index])]
    if problems:
        raise LaunchFailed(f"run '{run.id}': " + "; ".join(problems))
    if run.mps:
        lines = attachment(run)
        (store.folder(run.id) / ATTACH_FILE).write_text("".join(f"{line}\n" for line in lines))
    return run


def kept(store: Store, run: Run, problems: Sequence[str]) -> str:
    """What a person is told whose run could not be ended for certain."""
    lines = "".join(f"\n  - {p}" for p in problems if p)
    again = f"sgl-omni dp down {run.id} --state-root {store.root}"
    return f"run '{run.id}' is kept in {store.folder(run.id)}:{lines}\nthen: {again}"
