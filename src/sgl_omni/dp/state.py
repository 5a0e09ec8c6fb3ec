"""What is recorded of a run: a folder `<state root>/<run id>` with `run.json`, the servers' logs and `mps_attach.txt`.

The folder is locked for as long as someone starts, checks or ends the run. A claim in the user's run folder says which
run has a GPU, whatever its state root.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from sgl_omni.dp.marks import Mark, boot_id
from sgl_omni.errors import LaunchFailed, LaunchRefused
from sgl_omni.run_folder import base_folder, private_folder

RECORD = "run.json"
ATTACH_FILE = "mps_attach.txt"
LOCK = "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedModel:
    """An engine's weights as its server reports them: by which backend they are shared, and their size."""

    backend: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process of a server. ``computes``: it uses the GPU, so under MPS it has to be a client."""

    name: str
    mark: Mark
    computes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One server; ``server`` is None until it was started."""

    index: int
    port: int
    cores: tuple[int, ...]
    log: str
    server: Mark | None = None
    workers: tuple[Worker, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """``gpu_key`` is the GPU's UUID, or ``virtual-<id>``; ``capacity`` the tokens that each engine stage must resolve;
    ``runtime`` the folder of the servers' sockets and of the run's own MPS daemon; ``weights`` what the first server
    has loaded, by engine stage, where ``weight_share`` says that the others attach to it."""

    id: str
    created: str
    boot: str
    launcher: Mark
    pipeline: str
    platform: str
    gpu: int
    gpu_key: str
    node: int | None
    mps: bool
    capacity: dict[str, int]
    runtime: str
    replicas: tuple[Replica, ...]
    ready: bool = False
    weight_share: bool = False
    weights: dict[str, SharedModel] = field(default_factory=dict[str, SharedModel])

    def marks(self) -> list[Mark]:
        """The recorded processes that are alive: none of an earlier boot of the machine."""
        if self.boot != boot_id():
            return []
        recorded = [r.server for r in self.replicas if r.server] + [w.mark for r in self.replicas for w in r.workers]
        return [mark for mark in recorded if mark.alive]

    @property
    def mps_root(self) -> Path:
        return Path(self.runtime) / "sgl-omni" / "mps"


def default_root() -> Path:
    """``$XDG_STATE_HOME/sgl-omni/dp``, else ``~/.local/state/sgl-omni/dp``."""
    home = os.environ.get("XDG_STATE_HOME", "")
    return (Path(home) if home else Path.home() / ".local/state") / "sgl-omni" / "dp"


class Store:
    """The runs below one state root."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()

    def folder(self, run_id: str) -> Path:
        return self.root / run_id

    def ids(self) -> list[str]:
        return sorted(path.parent.name for path in self.root.glob(f"*/{RECORD}"))

    def load(self, run_id: str) -> Run:
        """
        Raises:
            LaunchFailed: there is no such run here, or its record cannot be read; then nothing of it is touched.
        """
        path = self.folder(run_id) / RECORD
        if os.sep in run_id or not path.is_file():
            known = ", ".join(self.ids()) or "none"
            raise LaunchFailed(f"there is no run '{run_id}' in {self.root} (it may be down already); runs: {known}")
        try:
            return msgspec.json.decode(path.read_bytes(), type=Run)
        except msgspec.DecodeError as error:
            raise LaunchFailed(
                f"run '{run_id}': {path} cannot be read ({error}); nothing of it is touched. Once no server of it is "
                f"left (their logs lie beside it), remove it: rm -r {path.parent}"
            ) from error

    def logs_of_failed(self) -> list[str]:
        """Runs whose start failed and was undone: nothing but their servers' logs is left, to be read."""
        folders = {path.parent for path in self.root.glob("*/replica-*.log")}
        return sorted(folder.name for folder in folders if not (folder / RECORD).exists())

    def forget_logs(self, run_id: str) -> None:
        """Removes what is left of a run whose start failed."""
        shutil.rmtree(self.folder(run_id))

    def save(self, run: Run) -> None:
        """Whole or not at all."""
        path = self.folder(run.id) / RECORD
        partial = path.with_suffix(".partial")
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(run)))
        partial.replace(path)

    def create(self, run: Run) -> None:
        """Records a run that has not started anything, and claims its GPU for it.

        Raises:
            LaunchRefused: another run has the GPU, or has left its state; the folders cannot be made.
        """
        claims = _claims()
        with _locked(claims / LOCK):
            self._refuse_second(run.gpu, run.gpu_key, claims)
            try:
                self.folder(run.id).mkdir(mode=0o700, parents=True)
            except OSError as error:
                raise LaunchRefused(f"cannot make {self.folder(run.id)}: {error.strerror}; set STATE_ROOT") from error
            self.save(run)
            (claims / run.gpu_key).write_text(str(self.folder(run.id)))

    def refuse_second(self, gpu: int, gpu_key: str) -> None:
        """Raises ``LaunchRefused`` where the GPU has a run, or what is left of one.

        A look that locks and makes nothing; ``create`` decides.
        """
        self._refuse_second(gpu, gpu_key, base_folder() / "dp")

    def _refuse_second(self, gpu: int, gpu_key: str, claims: Path) -> None:
        """Runs of this root, and the one that the GPU's claim names. One that another GPU claims is no matter here."""
        claimed = _claimed(claims)
        known = {self.folder(run_id) for run_id in self.ids()} - set(claimed.values())
        known |= {folder for key, folder in claimed.items() if key == gpu_key}
        for folder in sorted(known):
            store, run_id = Store(folder.parent), folder.name
            other = store.load(run_id)
            if other.gpu_key != gpu_key:
                continue
            end = f"end it first: sgl-omni dp down {run_id} --state-root {store.root}"
            if other.marks() or store.is_held(run_id):
                raise LaunchRefused(f"GPU {gpu} ({gpu_key}) already has run '{run_id}'; {end}")
            raise LaunchRefused(f"GPU {gpu} ({gpu_key}) has the stale run '{run_id}', whose processes are gone; {end}")

    def forget(self, run: Run, *, keep_logs: bool = False) -> None:
        """Removes the record of a run of which nothing is left, and its claim."""
        claims = _claims()
        with _locked(claims / LOCK):
            claim = claims / run.gpu_key
            if claim.is_file() and claim.read_text() == str(self.folder(run.id)):
                claim.unlink()
            (self.folder(run.id) / RECORD).unlink()
        shutil.rmtree(run.runtime, ignore_errors=True)
        if not keep_logs:
            shutil.rmtree(self.folder(run.id))

    def is_held(self, run_id: str) -> bool:
        try:
            with self.hold(run_id):
                return False
        except LaunchFailed:
            return True

    @contextmanager
    def hold(self, run_id: str) -> Iterator[None]:
        """One at a time changes a run. Raises ``LaunchFailed`` where another process does."""
        fd = os.open(self.folder(run_id), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                message = (
                    f"run '{run_id}' is being started, checked or ended by another process; wait for it, or end it"
                )
                raise LaunchFailed(message) from error
            yield
        finally:
            os.close(fd)


def cores_in_use() -> dict[int, str]:
    """The cores that servers of this user's living runs are pinned to, with the run's id, whatever its state root.

    Raises:
        LaunchFailed: the record of a run cannot be read, so nobody knows its cores.
    """
    claims = base_folder() / "dp"
    if not claims.is_dir():
        return {}
    with _locked(claims / LOCK):
        folders = _claimed(claims).values()
    used: dict[int, str] = {}
    for folder in folders:
        run = Store(folder.parent).load(folder.name)
        if run.marks():
            used |= {core: run.id for replica in run.replicas for core in replica.cores}
    return used


def new_id() -> str:
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def make_runtime() -> Path:
    """A folder for sockets. Its path is as short as can be: an MPS daemon's socket adds 78 characters, of 107."""
    parent = base_folder().parent
    while True:
        folder = parent / f"dp{secrets.token_hex(2)}"
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder


def _claims() -> Path:
    private_folder(base_folder())
    folder = base_folder() / "dp"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _claimed(claims: Path) -> dict[str, Path]:
    """The folder of the run that has a GPU, by the GPU's key."""
    if not claims.is_dir():
        return {}
    folders = {path.name: Path(path.read_text()) for path in claims.iterdir() if path.name != LOCK}
    return {key: folder for key, folder in folders.items() if (folder / RECORD).is_file()}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
