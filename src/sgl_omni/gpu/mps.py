"""CUDA MPS: one daemon per physical GPU, shared by the servers of one user, ended by the last of them.

The state of a GPU lies in ``<root>/<GPU-UUID>/``: ``pipe`` and ``log`` (the daemon's own), ``owners`` (a file for each
server, locked for as long as that server lives) and ``lock`` (held while the state is looked at or changed).
Whoever dies loses its locks, so what it has left is known to be left. Nothing outside this folder is ever touched.

What the control program answers was read from version 13.0 (driver 580): commands arrive on standard input; without a
daemon it says so and exits 1; a killed server is started again for the next client; a killed daemon takes its server
along.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from sgl_omni.errors import OmniError

PROGRAM = "nvidia-cuda-mps-control"
COMMAND_SECONDS = 10.0
QUIT_SECONDS = 10.0
"""How long the processes of a daemon that has quit may take to end."""

DETACH_SECONDS = 5.0
"""How long clients that are ending get to leave the daemon's list."""

ATTACH_SECONDS = 5.0
T = TypeVar("T")
LONGEST_SOCKET_PATH = 107


class MpsError(OmniError):
    """MPS cannot be used as asked. The message names the GPU and says what to do."""

    code = "mps"


@dataclass(frozen=True, slots=True)
class MpsServer:
    """One server process of a daemon and the client processes attached to it."""

    pid: int
    clients: tuple[int, ...]


class MpsControl:
    """Speaks to the daemon of one pipe folder, alive or not."""

    def __init__(self, folder: Path) -> None:
        self.pipe = folder / "pipe"
        self.log = folder / "log"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to find this daemon."""
        return {"CUDA_MPS_PIPE_DIRECTORY": str(self.pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.log)}

    def start(self, uuid: str) -> None:
        """Starts a daemon that shows its clients one GPU.

        Raises:
            MpsError: the program is missing or refuses.
        """
        self.pipe.mkdir(mode=0o700, exist_ok=True)
        self.log.mkdir(mode=0o700, exist_ok=True)
        if len(os.fsencode(self.pipe / "control_privileged")) > LONGEST_SOCKET_PATH:
            raise MpsError(f"GPU {uuid}: {self.pipe} is too long a path for MPS; set XDG_RUNTIME_DIR to a shorter one")
        done = self._run(["-d"], None, CUDA_VISIBLE_DEVICES=uuid)
        if done.returncode != 0:
            raise MpsError(f"GPU {uuid}: {PROGRAM} -d failed: {(done.stdout + done.stderr).strip()}")
        end = time.monotonic() + COMMAND_SECONDS
        while not self.answers():
            if time.monotonic() > end:
                raise MpsError(f"GPU {uuid}: the MPS daemon does not answer; its log is {self.log / 'control.log'}")
            time.sleep(0.02)

    def answers(self) -> bool:
        """Whether a daemon listens here."""
        return self._run([], "get_server_list").returncode == 0

    def servers(self) -> tuple[MpsServer, ...]:
        """The daemon's servers with their clients; empty before the first client came."""
        pids = [int(line) for line in self._ask("get_server_list").split()]
        return tuple(MpsServer(pid, self._clients(pid)) for pid in pids)

    def clients(self) -> set[int]:
        """The pids attached to any server of this daemon."""
        return {pid for server in self.servers() for pid in server.clients}

    def processes(self) -> list[psutil.Process]:
        """The daemon and its servers, as far as they are found."""
        pids = [server.pid for server in self.servers()]
        pid_file = self.pipe / f"{PROGRAM}.pid"
        if pid_file.exists() and (written := pid_file.read_text().strip()).isdigit():
            pids.append(int(written))
        return [process for pid in pids if (process := _process(pid)) is not None]

    def quit(self) -> None:
        """Ends the daemon and its server, and waits until they are gone: it answers no more before its process ends.

        Raises:
            MpsError: it did not end in time.
        """
        processes = self.processes()
        self._ask("quit")
        if _wait(self.answers, until=lambda answers: not answers, seconds=COMMAND_SECONDS):
            raise MpsError(f"the MPS daemon of {self.pipe} did not quit; {self.by_hand()}")
        left = _wait(lambda: [p.pid for p in processes if _lives(p)], until=lambda pids: not pids, seconds=QUIT_SECONDS)
        if left:
            raise MpsError(f"the MPS daemon of {self.pipe} has quit, but its processes {left} do not end")

    def by_hand(self) -> str:
        """The command that ends this daemon."""
        return f"to end it by hand: echo quit | CUDA_MPS_PIPE_DIRECTORY={self.pipe} {PROGRAM}"

    def _clients(self, server: int) -> tuple[int, ...]:
        answer = self._ask(f"get_client_list {server}")
        return () if "not found" in answer else tuple(int(line) for line in answer.split())

    def _ask(self, command: str) -> str:
        done = self._run([], command)
        if done.returncode != 0:
            raise MpsError(f"the MPS daemon of {self.pipe} does not answer: {(done.stdout + done.stderr).strip()}")
        return done.stdout

    def _run(self, arguments: list[str], command: str | None, **extra: str) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [PROGRAM, *arguments],
                input=None if command is None else f"{command}\n",
                stdin=subprocess.DEVNULL if command is None else None,
                capture_output=True,
                text=True,
                timeout=COMMAND_SECONDS,
                env=os.environ | self.environment | extra,
            )
        except FileNotFoundError as error:
            raise MpsError(f"{PROGRAM} is not installed, so MPS cannot be used; set mps: off") from error
        except subprocess.TimeoutExpired as error:
            message = f"{PROGRAM} gave no answer within {COMMAND_SECONDS:g} s; {self.by_hand()}"
            raise MpsError(message) from error


class MpsDaemon:
    """One server's share in the daemon of one GPU: acquired before processes start, released after they are gone."""

    def __init__(self, root: Path, uuid: str, owner: str) -> None:
        self.uuid = uuid
        self._folder = root / uuid
        self._owner_path = self._folder / "owners" / owner
        self._owner_fd = -1
        self.control = MpsControl(self._folder)

    def acquire(self, compute_pids: list[int]) -> None:
        """Joins the GPU's daemon, or starts one.

        Args:
            compute_pids: the processes that compute on the GPU now, among which another daemon's server would be.

        Raises:
            MpsError: another daemon serves this GPU, a dead server's clients still hang on ours, or the program fails.
        """
        _refuse_foreign_environment()
        (self._folder / "owners").mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(self._folder):
            foreign = foreign_servers(compute_pids, self.control)
            if foreign:
                raise MpsError(f"GPU {self.uuid}: another MPS daemon serves it (server pid {foreign[0]}); set mps: off")
            alive = self.control.answers()
            if alive and not live_owners(self._folder):
                self._adopt()
            if not alive:
                shutil.rmtree(self.control.pipe, ignore_errors=True)
                self.control.start(self.uuid)
            self._owner_fd = os.open(self._owner_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._owner_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _adopt(self) -> None:
        """A dead server's daemon is taken over once that server's processes have left it."""
        clients = _wait(self.control.clients, until=lambda found: not found, seconds=DETACH_SECONDS)
        if clients:
            raise MpsError(
                f"GPU {self.uuid}: processes {sorted(clients)} of a server that died are still attached to its MPS "
                f"daemon; end them and run `sgl-omni mps clean`"
            )

    def verify(
        self, expected: dict[int, str], given_up: Callable[[], bool] = lambda: False
    ) -> dict[int, dict[int, str]]:
        """{server pid: {client pid: name}} of the processes in `expected` ({pid: name}).

        Waits for those that are not attached yet, unless `given_up` says that nobody needs the answer any more.

        Raises:
            MpsError: names each process that is not attached: it would time-slice instead of overlapping.
        """

        def attached() -> dict[int, dict[int, str]]:
            found = {s.pid: {c: expected[c] for c in s.clients if c in expected} for s in self.control.servers()}
            return {pid: clients for pid, clients in found.items() if clients}

        def complete(found: dict[int, dict[int, str]]) -> bool:
            return sum(map(len, found.values())) == len(expected)

        found = _wait(attached, until=lambda found: complete(found) or given_up(), seconds=ATTACH_SECONDS)
        if not complete(found):
            present = {pid for clients in found.values() for pid in clients}
            missing = ", ".join(f"'{name}' (pid {pid})" for pid, name in expected.items() if pid not in present)
            raise MpsError(f"GPU {self.uuid}: not attached to MPS: {missing}")
        return found

    def release(self) -> str | None:
        """Gives the share back; the last owner ends the daemon.

        Returns:
            None, or why the daemon was left running and the command that ends it.
        """
        if self._owner_fd < 0:
            return None
        with _locked(self._folder):
            self._owner_path.unlink(missing_ok=True)
            os.close(self._owner_fd)
            self._owner_fd = -1
            if live_owners(self._folder):
                return None
            try:
                return self._end()
            except MpsError as error:
                return str(error)

    def _end(self) -> str | None:
        if self.control.answers():
            clients = _wait(self.control.clients, until=lambda found: not found, seconds=DETACH_SECONDS)
            if clients:
                return f"GPU {self.uuid}: clients {sorted(clients)} are still attached; {self.control.by_hand()}"
            self.control.quit()
        shutil.rmtree(self._folder, ignore_errors=True)
        return None


def live_owners(folder: Path) -> list[str]:
    """The servers that hold a share in the daemon of a GPU's folder; files of dead ones are removed."""
    alive = []
    for path in sorted((folder / "owners").glob("*")):
        with path.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alive.append(path.name)
                continue
        path.unlink(missing_ok=True)
    return alive


@dataclass(frozen=True, slots=True)
class MpsStatus:
    """What is known of one GPU's folder."""

    uuid: str
    running: bool
    owners: tuple[str, ...]
    servers: tuple[MpsServer, ...]


def status(root: Path) -> list[MpsStatus]:
    """Every GPU that a server of this user uses, or has left, MPS on."""
    found = []
    for folder in sorted(root.glob("*/")):
        with _locked(folder):
            control = MpsControl(folder)
            running = control.answers()
            servers = control.servers() if running else ()
            found.append(MpsStatus(folder.name, running, tuple(live_owners(folder)), servers))
    return found


def clean(root: Path) -> Iterator[tuple[str, str]]:
    """Ends daemons without a living owner and removes their folders; yields (GPU, what was done or why not)."""
    for folder in sorted(root.glob("*/")):
        with _locked(folder):
            control = MpsControl(folder)
            owners = live_owners(folder)
            if owners:
                yield folder.name, f"in use by {', '.join(owners)}"
                continue
            clients = control.clients() if control.answers() else set()
            if clients:
                yield folder.name, f"left alone: processes {sorted(clients)} are still attached"
                continue
            if control.answers():
                control.quit()
            shutil.rmtree(folder, ignore_errors=True)
            yield folder.name, "removed"


def foreign_servers(compute_pids: list[int], ours: MpsControl) -> list[int]:
    """MPS servers among a GPU's compute processes that belong to another daemon."""
    own = {server.pid for server in ours.servers()} if ours.answers() else set()
    return [pid for pid in compute_pids if pid not in own and _name_of(pid) == "nvidia-cuda-mps-server"]


def _process(pid: int) -> psutil.Process | None:
    """Known by its start time too, so that another one which gets its number is not taken for it."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _lives(process: psutil.Process) -> bool:
    """A zombie has ended; its parent, often the container's first process, has yet to be told."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _name_of(pid: int) -> str:
    try:
        return Path(psutil.Process(pid).cmdline()[0]).name
    except (psutil.Error, IndexError):
        return ""


def _refuse_foreign_environment() -> None:
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        raise MpsError(
            f"CUDA_MPS_PIPE_DIRECTORY={os.environ['CUDA_MPS_PIPE_DIRECTORY']} is set: this server manages its own MPS "
            "daemon; unset it, or set mps: off to use yours"
        )


def _wait(look: Callable[[], T], *, until: Callable[[T], bool], seconds: float) -> T:
    """What `look` finds once `until` holds of it, or when the time is up."""
    end = time.monotonic() + seconds
    while not until(found := look()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One server at a time looks at and changes a GPU's state. The lock lies beside the folder, which may go."""
    fd = os.open(folder.with_suffix(".lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
