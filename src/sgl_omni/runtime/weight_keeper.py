"""Keeps what the sharing groups' leaders have published, so that weights outlive whoever loaded them.

The server process holds the descriptors, of which none needs a GPU: a leader that dies takes nothing with it, and any
replica that is started again attaches to what is here. Weights that a backend ties to its leader are forgotten with it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from sgl_omni.errors import WeightShareError
from sgl_omni.gpu.weights.exchange import SOCKET_NAME, Message, Offer
from sgl_omni.topology.plan import InstancePlan

log = logging.getLogger("sgl_omni.weights")

_CREDENTIALS = struct.Struct("3i")

InstanceOf = Callable[[int], InstancePlan | None]


class WeightKeeper:
    """Answers the members of sharing groups on a socket in the run folder. All methods belong to the event loop."""

    def __init__(self, run_dir: Path, instance_of: InstanceOf) -> None:
        """`instance_of(pid)`: the instance that a process is, or None for a stranger."""
        self._path = run_dir / SOCKET_NAME
        self._instance_of = instance_of
        self._offers: dict[str, dict[str, Offer]] = {}
        self._listener: socket.socket | None = None
        self._clients: set[socket.socket] = set()

    def listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(self._path))
        self._listener.listen(16)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def holds(self, leader: str) -> bool:
        """Whether the group of this leader has weights to attach to."""
        return bool(self._offers.get(leader))

    def ends_with_leader(self, leader: str) -> bool:
        """Whether the group's weights are gone when its leader is."""
        return any(not offer.outlives_leader for offer in self._offers.get(leader, {}).values())

    def forget(self, leader: str) -> None:
        """Drops a group's weights; the next leader loads them again."""
        for offer in self._offers.pop(leader, {}).values():
            offer.close()

    def close(self) -> None:
        """Ends the service and drops everything; harmless when called again."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self._path.unlink(missing_ok=True)
        for client in list(self._clients):
            self._drop(client)
        for leader in list(self._offers):
            self.forget(leader)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        client.setblocking(False)
        self._clients.add(client)
        asyncio.get_running_loop().add_reader(client.fileno(), self._asked, client)

    def _asked(self, client: socket.socket) -> None:
        try:
            self._answer(client).send(client)
        except (OSError, WeightShareError) as error:
            log.warning("a question about shared weights was not answered: %s", error)
        finally:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(client.fileno())
        self._clients.discard(client)
        client.close()

    def _answer(self, client: socket.socket) -> Message:
        question = Message.receive(client)
        pid, _, _ = _CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        instance = self._instance_of(pid)
        if question.kind == "publish" and question.offer is not None:
            refusal = self._take(instance, question.model, question.offer)
            if refusal:
                question.offer.close()
            return Message("refused", reason=refusal) if refusal else Message("done")
        if question.offer is not None:
            question.offer.close()
        if question.kind == "withdraw" and instance is not None and instance.weight_role == "leader":
            self._withdraw(instance.name, question.model)
            return Message("done")
        if question.kind != "fetch" or instance is None or instance.weight_role == "own":
            return Message("refused", reason=f"process {pid} shares no weights here")
        offer = self._offers.get(instance.weight_leader or instance.name, {}).get(question.model)
        return Message("nothing") if offer is None else Message("offer", offer=offer)

    def _withdraw(self, leader: str, model: str) -> None:
        offer = self._offers.get(leader, {}).pop(model, None)
        if offer is not None:
            log.warning("'%s' cannot use the weights of '%s' that were kept, and loads them again", leader, model)
            offer.close()

    def _take(self, instance: InstancePlan | None, model: str, offer: Offer) -> str:
        """Why not; empty where the offer is kept."""
        if instance is None or instance.weight_role != "leader":
            return "only the leader of a sharing group publishes weights"
        if model in self._offers.get(instance.name, {}):
            return f"'{instance.name}' has published weights of '{model}' already"
        self._offers.setdefault(instance.name, {})[model] = offer
        log.info("'%s' has loaded the weights of '%s' for its group (%s)", instance.name, model, offer.backend)
        return ""
