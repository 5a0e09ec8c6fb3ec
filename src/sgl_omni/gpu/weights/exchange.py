"""How weights get from the replica that loaded them to the others: by the server's keeper, on a unix socket. Another
server of the same user may borrow them there, for its own keeper.

Every message is one packet and all descriptors ride with it: the manifest in a sealed memory file, since it may be
longer than a packet, and the memory itself where a descriptor is its handle. A client asks one question a connection.
"""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sgl_omni.errors import WeightShareError
from sgl_omni.gpu.weights.backend import Handle

if TYPE_CHECKING:
    from sgl_omni.gpu.weights.manifest import Manifest

SOCKET_NAME = "weights.sock"
ANSWER_SECONDS = 10.0

_PACKET = 16 * 1024
_DESCRIPTORS = socket.CMSG_SPACE(2 * array.array("i").itemsize)
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Kind = Literal["publish", "fetch", "await", "withdraw", "borrow", "offer", "nothing", "done", "refused"]


@dataclass(frozen=True, slots=True)
class Offer:
    """Weights that may be attached to. Owns its descriptors: whoever has it closes it."""

    backend: str
    outlives_leader: bool
    handle: Handle
    manifest_fd: int

    @classmethod
    def of(cls, backend: str, outlives_leader: bool, handle: Handle, manifest: Manifest) -> Offer:
        """Takes over the handle's descriptor."""
        fd = os.memfd_create("sgl-omni-manifest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(fd, manifest.to_bytes())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return cls(backend, outlives_leader, handle, fd)

    def manifest(self) -> Manifest:
        """Raises ``WeightShareError`` for a manifest that does not hold."""
        from sgl_omni.gpu.weights.manifest import Manifest  # with torch, which the server's process does without

        return Manifest.from_bytes(os.pread(self.manifest_fd, os.fstat(self.manifest_fd).st_size, 0))

    def close(self) -> None:
        for fd in self.descriptors:
            os.close(fd)

    @property
    def descriptors(self) -> list[int]:
        return [self.manifest_fd] + ([] if self.handle.fd is None else [self.handle.fd])


@dataclass(frozen=True, slots=True)
class Message:
    """A packet. ``model`` says which of a process's models, by its stage's name; to another server, ``process`` and
    ``card`` say whose: the Process, and the GPU by a name that all servers have for it."""

    kind: Kind
    model: str = ""
    offer: Offer | None = None
    reason: str = ""
    process: str = ""
    card: str = ""

    def send(self, sock: socket.socket) -> None:
        fields: dict[str, object] = {"kind": self.kind, "model": self.model, "reason": self.reason}
        fields |= {"process": self.process, "card": self.card}
        fds: list[int] = []
        if self.offer is not None:
            fds = self.offer.descriptors
            fields["backend"] = self.offer.backend
            fields["outlives_leader"] = self.offer.outlives_leader
            fields["data"] = self.offer.handle.data.hex()
        socket.send_fds(sock, [json.dumps(fields).encode()], fds)

    @classmethod
    def receive(cls, sock: socket.socket) -> Message:
        """Raises ``WeightShareError`` for a packet that is none of these, ``OSError`` where none comes."""
        data, fds, flags, _ = socket.recv_fds(sock, _PACKET, 2)
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not data:
                raise ValueError("cut short")
            fields = json.loads(data)
            offer = None
            if "backend" in fields:
                handle = Handle(fds[1] if len(fds) > 1 else None, bytes.fromhex(fields["data"]))
                offer = Offer(fields["backend"], bool(fields["outlives_leader"]), handle, fds[0])
            return cls(fields["kind"], fields["model"], offer, fields["reason"], fields["process"], fields["card"])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            for fd in fds:
                os.close(fd)
            raise WeightShareError(f"a message about shared weights cannot be read: {error!r}") from error


class Exchange:
    """A replica's side: asks the server's keeper, and waits for the answer."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / SOCKET_NAME

    def fetch(self, model: str) -> Offer | None:
        """The group's weights, or None where nobody has published them yet. The caller closes the offer."""
        return ask(self._path, Message("fetch", model)).offer

    def wait_for(self, model: str) -> Offer | None:
        """The group's weights, as soon as its leader has published them; None where it is ready and has published none.
        The caller closes the offer. Waits as long as the leader takes: the server ends whoever waits in vain."""
        return ask(self._path, Message("await", model), seconds=None).offer

    def publish(self, model: str, offer: Offer) -> None:
        """Hands the weights over for the group. Raises ``WeightShareError`` where that is not this process's to do."""
        ask(self._path, Message("publish", model, offer))

    def withdraw(self, model: str) -> None:
        """Says that the group's weights are of no use any more. Only its leader may, and those who borrow."""
        ask(self._path, Message("withdraw", model))


def borrow(path: Path, process: str, model: str, card: str) -> Offer | None:
    """Weights that another server's keeper holds; None where it has none, or none yet. The caller closes the offer.

    Raises:
        WeightShareError: there is no such server any more, or it refuses.
    """
    return ask(path, Message("borrow", model, process=process, card=card)).offer


def ask(path: Path, question: Message, seconds: float | None = ANSWER_SECONDS) -> Message:
    """One question and its answer, for which `seconds` are waited at most, or as long as it takes.

    Raises:
        WeightShareError: nobody answers there, or the answer is a refusal.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(seconds)
        try:
            sock.connect(str(path))
            question.send(sock)
            answer = Message.receive(sock)
        except OSError as error:
            raise WeightShareError(f"the server does not answer about shared weights: {error}") from error
    if answer.kind == "refused":
        raise WeightShareError(f"the server refuses: {answer.reason}")
    return answer
