"""Keeps what the sharing groups' leaders have published, so that weights outlive whoever loaded them.

The server process holds the descriptors, of which none needs a GPU: a leader that dies takes nothing with it, and any
replica that is started again attaches to what is here. Weights that a backend ties to its leader are forgotten with it.

Followers start together with their leader, and those who ask too early are answered when it has published.

Another server of this user, on the same GPU, may borrow them where the plan says so. From then on both keep them, and
neither needs the other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from sgl_omni.errors import WeightShareError
from sgl_omni.gpu.weights.exchange import SOCKET_NAME, Message, Offer, borrow
from sgl_omni.topology.plan import InstancePlan

log = logging.getLogger("sgl_omni.weights")

_CREDENTIALS = struct.Struct("3i")

InstanceOf = Callable[[int], InstancePlan | None]
Place = tuple[str, str]
"""A Process, and a GPU by the name that all servers have for it."""


class WeightKeeper:
    """Answers the members of sharing groups on a socket in the run folder. All methods belong to the event loop."""

    def __init__(
        self, run_dir: Path, instance_of: InstanceOf, is_ready: Callable[[str], bool] = lambda leader: False
    ) -> None:
        """`instance_of(pid)`: the instance that a process is, or None for a stranger. `is_ready(leader)`: whether it is
        built, so that it will publish nothing more."""
        self.path = run_dir / SOCKET_NAME
        self._instance_of = instance_of
        self._is_ready = is_ready
        self._waiting: dict[socket.socket, tuple[str, str]] = {}
        self._offers: dict[str, dict[str, Offer]] = {}
        self._lent: dict[Place, str] = {}
        self._listener: socket.socket | None = None
        self._clients: set[socket.socket] = set()

    def listen(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)

    def lend(self, leaders: Mapping[Place, str]) -> None:
        """From now on, other servers may borrow the weights of these groups, given by their leaders."""
        self._lent = dict(leaders)

    async def borrow(self, source: Path, place: Place, models: Sequence[str], leader: str) -> set[str]:
        """Takes the weights of a group over from another server's keeper; returns the models of which it had any.

        Raises:
            WeightShareError: there is no such server any more, or it refuses; what the group had is kept.
        """
        process, card = place
        offers: dict[str, Offer] = {}
        try:
            for model in models:
                offer = await asyncio.to_thread(borrow, source, process, model, card)
                if offer is not None:
                    offers[model] = offer
        except BaseException:
            for offer in offers.values():
                offer.close()
            raise
        self.forget(leader)
        if offers:
            self._offers[leader] = offers
            log.info("the weights of %s for '%s' are borrowed from %s", ", ".join(offers), leader, source)
        return set(offers)

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

    def leader_ready(self, leader: str) -> None:
        """A leader is built: who still waits for weights of it that it has not published waits for nothing."""
        for client in [c for c, (whose, _) in self._waiting.items() if whose == leader]:
            self._reply(client, Message("nothing"))

    def close(self) -> None:
        """Ends the service and drops everything; harmless when called again."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
            self._listener = None
            self.path.unlink(missing_ok=True)
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
            answer = self._answer(client)
        except (OSError, WeightShareError) as error:
            log.warning("a question about shared weights was not answered: %s", error)
            self._drop(client)
            return
        if answer is not None:
            self._reply(client, answer)

    def _reply(self, client: socket.socket, answer: Message) -> None:
        try:
            answer.send(client)
        except OSError as error:
            log.warning("a question about shared weights was not answered: %s", error)
        finally:
            self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(client.fileno())
        self._clients.discard(client)
        self._waiting.pop(client, None)
        client.close()

    def _wait(self, client: socket.socket, leader: str, model: str) -> None:
        """The question stays open. A process that ends meanwhile closes its socket; nothing else can come of it."""
        self._waiting[client] = (leader, model)
        asyncio.get_running_loop().add_reader(client.fileno(), self._drop, client)

    def _answer(self, client: socket.socket) -> Message | None:
        """None: not before the leader has published."""
        question = Message.receive(client)
        pid, user, _ = _CREDENTIALS.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        instance = self._instance_of(pid)
        if question.kind == "publish" and question.offer is not None:
            refusal = self._take(instance, question.model, question.offer)
            if refusal:
                question.offer.close()
            return Message("refused", reason=refusal) if refusal else Message("done")
        if question.offer is not None:
            question.offer.close()
        if question.kind == "borrow":
            return self._lend(question, pid, user)
        if question.kind == "withdraw" and instance is not None and instance.weight_role in ("leader", "borrower"):
            self._withdraw(instance, question.model)
            return Message("done")
        if question.kind not in ("fetch", "await") or instance is None or instance.weight_role == "own":
            return Message("refused", reason=f"process {pid} shares no weights here")
        leader = instance.weight_leader or instance.name
        offer = self._offers.get(leader, {}).get(question.model)
        if offer is not None:
            return Message("offer", offer=offer)
        if question.kind == "await" and instance.weight_role == "follower" and not self._is_ready(leader):
            self._wait(client, leader, question.model)
            return None
        return Message("nothing")

    def _withdraw(self, instance: InstancePlan, model: str) -> None:
        log.warning("'%s' cannot use the weights of '%s' that were kept, and needs others", instance.name, model)
        if instance.weight_role == "borrower":
            self.forget(instance.weight_leader or instance.name)  # all are borrowed again, together
            return
        offer = self._offers.get(instance.name, {}).pop(model, None)
        if offer is not None:
            offer.close()

    def _lend(self, question: Message, pid: int, user: int) -> Message:
        """To any process of this user, since those of another server are unknown here."""
        if user != os.getuid():
            return Message("refused", reason=f"process {pid} belongs to another user ({user})")
        leader = self._lent.get((question.process, question.card))
        if leader is None:
            lent = ", ".join(f"Process '{process}' on {card}" for process, card in self._lent) or "none"
            asked = f"Process '{question.process}' on {question.card}"
            return Message("refused", reason=f"it lends no weights of {asked}; what it lends: {lent}")
        offer = self._offers.get(leader, {}).get(question.model)
        if offer is None:
            return Message("nothing")
        if not offer.outlives_leader:
            return Message(
                "refused", reason=f"weights shared by '{offer.backend}' end with the process that loaded them"
            )
        log.info("weights of '%s' are lent to process %d", question.model, pid)
        return Message("offer", offer=offer)

    def _take(self, instance: InstancePlan | None, model: str, offer: Offer) -> str:
        """Why not; empty where the offer is kept."""
        if instance is None or instance.weight_role != "leader":
            return "only the leader of a sharing group publishes weights"
        if model in self._offers.get(instance.name, {}):
            return f"'{instance.name}' has published weights of '{model}' already"
        if instance.name in self._lent.values() and not offer.outlives_leader:
            return f"other servers are to share weights that end with their leader ('{offer.backend}')"
        self._offers.setdefault(instance.name, {})[model] = offer
        log.info("'%s' has loaded the weights of '%s' for its group (%s)", instance.name, model, offer.backend)
        for client in [c for c, wanted in self._waiting.items() if wanted == (instance.name, model)]:
            self._reply(client, Message("offer", offer=offer))
        return ""
