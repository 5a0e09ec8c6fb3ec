"""Who may publish weights, who gets them, and that no descriptor stays behind."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from sgl_omni.errors import WeightShareError
from sgl_omni.gpu.weights.backend import Handle
from sgl_omni.gpu.weights.exchange import SOCKET_NAME, Exchange, Message, Offer, borrow
from sgl_omni.gpu.weights.manifest import Manifest
from sgl_omni.runtime.capacity import unequal_capacity
from sgl_omni.runtime.weight_keeper import WeightKeeper
from sgl_omni.topology.plan import InstancePlan, Plan, ProcessPlan, WeightRole

MANIFEST = Manifest.lay_out({"w": torch.empty(3, device="meta")}, architecture="Tiny", fingerprint="f")


class Me:
    """This process, as the keeper sees it."""

    plan: InstancePlan | None = None
    ready: frozenset[str] = frozenset()

    def be(self, name: str, role: WeightRole, leader: str | None = None) -> None:
        self.plan = InstancePlan(name=name, process="p", stages=("s",), weight_role=role, weight_leader=leader)


@pytest.fixture
def me() -> Me:
    return Me()


@pytest.fixture
async def keeper(tmp_path: Path, me: Me) -> AsyncIterator[WeightKeeper]:
    before = len(os.listdir("/proc/self/fd"))
    found = WeightKeeper(
        tmp_path, lambda pid: me.plan if pid == os.getpid() else None, lambda leader: leader in me.ready
    )
    found.listen()
    yield found
    found.close()
    found.close()
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor stayed open"
    assert not (tmp_path / SOCKET_NAME).exists()


def an_offer(*, outlives_leader: bool = True, content: bytes = b"weights") -> Offer:
    fd = os.memfd_create("memory")
    os.write(fd, content)
    return Offer.of("shm", outlives_leader, Handle(fd), MANIFEST)


async def publish(folder: Path, model: str, offer: Offer) -> None:
    try:
        await asyncio.to_thread(Exchange(folder).publish, model, offer)
    finally:
        offer.close()


async def fetch(folder: Path, model: str) -> bytes | None:
    """The content behind what is offered."""
    offer = await asyncio.to_thread(Exchange(folder).fetch, model)
    if offer is None:
        return None
    assert offer.manifest() == MANIFEST and offer.handle.fd is not None
    content = os.pread(offer.handle.fd, 100, 0)
    offer.close()
    return content


async def test_what_a_leader_publishes_its_group_gets(keeper: WeightKeeper, me: Me, tmp_path: Path) -> None:
    me.be("p@r0", "leader")
    assert await fetch(tmp_path, "s") is None and not keeper.holds("p@r0")
    await publish(tmp_path, "s", an_offer())
    assert await fetch(tmp_path, "s") == b"weights"
    assert await fetch(tmp_path, "another") is None
    me.be("p@r1", "follower", "p@r0")
    assert await fetch(tmp_path, "s") == b"weights"
    me.be("p@r3", "follower", "p@r2")
    assert await fetch(tmp_path, "s") is None
    assert keeper.holds("p@r0") and not keeper.ends_with_leader("p@r0") and not keeper.holds("p@r2")
    keeper.forget("p@r0")
    me.be("p@r1", "follower", "p@r0")
    assert await fetch(tmp_path, "s") is None


async def wait_for(folder: Path, model: str) -> bytes | None:
    """The content behind what is offered, whenever that is."""
    offer = await asyncio.to_thread(Exchange(folder).wait_for, model)
    if offer is None:
        return None
    assert offer.handle.fd is not None
    content = os.pread(offer.handle.fd, 100, 0)
    offer.close()
    return content


async def test_followers_that_ask_early_are_answered_when_their_leader_has_published(
    keeper: WeightKeeper, me: Me, tmp_path: Path
) -> None:
    me.be("p@r1", "follower", "p@r0")
    early = [asyncio.create_task(wait_for(tmp_path, model)) for model in ("s", "s", "another")]
    await asyncio.sleep(0.2)
    assert not any(task.done() for task in early)
    me.be("p@r0", "leader")
    await publish(tmp_path, "s", an_offer())
    assert await asyncio.gather(*early[:2]) == [b"weights", b"weights"]
    await asyncio.sleep(0.1)
    assert not early[2].done(), "its leader may publish that too"
    me.ready = frozenset({"p@r0"})
    keeper.leader_ready("p@r0")
    assert await early[2] is None
    me.be("p@r1", "follower", "p@r0")
    assert await wait_for(tmp_path, "s") == b"weights" and await wait_for(tmp_path, "another") is None


async def test_who_waits_and_ends_is_forgotten_and_the_end_of_the_server_ends_the_wait(
    keeper: WeightKeeper, me: Me, tmp_path: Path
) -> None:
    me.be("p@r1", "follower", "p@r0")
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(tmp_path / SOCKET_NAME))
        Message("await", "s").send(sock)
        await asyncio.sleep(0.1)
        assert len(os.listdir("/proc/self/fd")) == before + 2
    await asyncio.sleep(0.1)
    assert len(os.listdir("/proc/self/fd")) == before
    waiting = asyncio.create_task(wait_for(tmp_path, "s"))
    await asyncio.sleep(0.1)
    keeper.close()
    with pytest.raises(WeightShareError, match="cut short"):
        await waiting


async def test_only_the_leader_withdraws(keeper: WeightKeeper, me: Me, tmp_path: Path) -> None:
    me.be("p@r0", "leader")
    await publish(tmp_path, "s", an_offer())
    me.be("p@r1", "follower", "p@r0")
    with pytest.raises(WeightShareError, match="refuses"):
        await asyncio.to_thread(Exchange(tmp_path).withdraw, "s")
    assert await fetch(tmp_path, "s") == b"weights"
    me.be("p@r0", "leader")
    for _ in range(2):
        await asyncio.to_thread(Exchange(tmp_path).withdraw, "s")
    assert await fetch(tmp_path, "s") is None and not keeper.holds("p@r0")
    await publish(tmp_path, "s", an_offer(content=b"again"))
    assert await fetch(tmp_path, "s") == b"again"


async def test_weights_may_end_with_their_leader(keeper: WeightKeeper, me: Me, tmp_path: Path) -> None:
    me.be("p@r0", "leader")
    await publish(tmp_path, "s", an_offer(outlives_leader=False))
    assert keeper.ends_with_leader("p@r0") and not keeper.ends_with_leader("p@r1")


async def test_handles_that_are_no_descriptor_travel_too(keeper: WeightKeeper, me: Me, tmp_path: Path) -> None:
    me.be("p@r0", "leader")
    await publish(tmp_path, "s", Offer.of("ipc", False, Handle(data=bytes(range(64))), MANIFEST))
    offer = await asyncio.to_thread(Exchange(tmp_path).fetch, "s")
    assert offer is not None and offer.handle == Handle(None, bytes(range(64))) and offer.backend == "ipc"
    offer.close()


async def test_others_are_refused(keeper: WeightKeeper, me: Me, tmp_path: Path) -> None:
    me.be("p@r1", "follower", "p@r0")
    with pytest.raises(WeightShareError, match="only the leader of a sharing group publishes"):
        await publish(tmp_path, "s", an_offer())
    me.be("q", "own")
    with pytest.raises(WeightShareError, match=f"process {os.getpid()} shares no weights here"):
        await fetch(tmp_path, "s")
    me.plan = None
    with pytest.raises(WeightShareError, match="shares no weights here"):
        await fetch(tmp_path, "s")
    me.be("p@r0", "leader")
    await publish(tmp_path, "s", an_offer())
    with pytest.raises(WeightShareError, match="'p@r0' has published weights of 's' already"):
        await publish(tmp_path, "s", an_offer(content=b"others"))
    assert await fetch(tmp_path, "s") == b"weights"


# Other servers ------------------------------------------------------------------------------------------------------

LENT = {("p", "GPU-1"): "p@r0"}


async def borrowed(folder: Path, model: str = "s", process: str = "p", card: str = "GPU-1") -> bytes | None:
    """What a stranger gets, who is no process of this server."""
    offer = await asyncio.to_thread(borrow, folder / SOCKET_NAME, process, model, card)
    if offer is None:
        return None
    assert offer.manifest() == MANIFEST and offer.handle.fd is not None
    content = os.pread(offer.handle.fd, 100, 0)
    offer.close()
    return content


@pytest.fixture
async def lender(keeper: WeightKeeper, me: Me, tmp_path: Path) -> WeightKeeper:
    """It lends what its leader 'p@r0' has published; whoever asks from now on is a stranger."""
    keeper.lend(LENT)
    me.be("p@r0", "leader")
    await publish(tmp_path, "s", an_offer())
    me.plan = None
    return keeper


async def test_other_servers_borrow_what_is_lent_and_nothing_else(lender: WeightKeeper, tmp_path: Path) -> None:
    assert await borrowed(tmp_path) == b"weights"
    assert await borrowed(tmp_path, "another model") is None
    for process, card in (("q", "GPU-1"), ("p", "GPU-2")):
        with pytest.raises(WeightShareError, match=f"no weights of Process '{process}' on {card}; .* 'p' on GPU-1"):
            await borrowed(tmp_path, process=process, card=card)
    with pytest.raises(WeightShareError, match="shares no weights here"):
        await fetch(tmp_path, "s")
    lender.forget("p@r0")
    assert await borrowed(tmp_path) is None


async def test_a_server_that_lends_nothing_refuses(keeper: WeightKeeper, me: Me, tmp_path: Path) -> None:
    me.be("p@r0", "leader")
    await publish(tmp_path, "s", an_offer())
    with pytest.raises(WeightShareError, match=r"refuses: it lends no weights of Process 'p' .*lends: none"):
        await borrowed(tmp_path)


async def test_processes_of_another_user_get_nothing(
    lender: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)  # the keeper's server is theirs, and we are the strangers
    with pytest.raises(WeightShareError, match=rf"process {os.getpid()} belongs to another user \({user}\)"):
        await borrowed(tmp_path)


async def test_weights_that_end_with_their_leader_are_not_lent(keeper: WeightKeeper, me: Me, tmp_path: Path) -> None:
    me.be("p@r0", "leader")
    await publish(tmp_path, "s", an_offer(outlives_leader=False))
    keeper.lend(LENT)
    with pytest.raises(WeightShareError, match="refuses: weights shared by 'shm' end with the process"):
        await borrowed(tmp_path)
    keeper.forget("p@r0")
    with pytest.raises(WeightShareError, match="other servers are to share weights that end with their leader"):
        await publish(tmp_path, "s", an_offer(outlives_leader=False))


async def test_who_borrowed_keeps_what_the_lender_forgets(lender: WeightKeeper, me: Me, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = WeightKeeper(tmp_path / "other", lambda pid: me.plan)
    other.listen()
    other.lend({("p", "GPU-1"): "p"})
    try:
        assert await other.borrow(tmp_path / SOCKET_NAME, ("p", "GPU-1"), ["s", "t"], "p") == {"s"}
        lender.forget("p@r0")
        me.be("p", "borrower", "p")
        assert await fetch(tmp_path / "other", "s") == b"weights" and other.holds("p")
        me.plan = None
        assert await borrowed(tmp_path / "other") == b"weights", "and lends it on"
        me.be("p", "borrower", "p")
        with pytest.raises(WeightShareError, match="only the leader of a sharing group publishes"):
            await publish(tmp_path / "other", "s", an_offer())
        await asyncio.to_thread(Exchange(tmp_path / "other").withdraw, "s")
        assert not other.holds("p")
        assert await other.borrow(tmp_path / SOCKET_NAME, ("p", "GPU-1"), ["s"], "p") == set()
    finally:
        other.close()


async def test_a_lender_that_is_gone_is_said_and_what_was_kept_stays(
    lender: WeightKeeper, me: Me, tmp_path: Path
) -> None:
    with pytest.raises(WeightShareError, match="does not answer about shared weights"):
        await lender.borrow(tmp_path / "gone" / SOCKET_NAME, ("p", "GPU-1"), ["s"], "p@r0")
    assert lender.holds("p@r0")


@pytest.mark.parametrize("packet", [b"x", b"{}", b"[]", b"null", b'{"kind": "fetch"}', bytes(20_000), b""])
async def test_garbage_is_answered_by_the_end_of_the_connection(
    keeper: WeightKeeper, me: Me, tmp_path: Path, packet: bytes
) -> None:
    me.be("p@r0", "leader")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(str(tmp_path / SOCKET_NAME))
        with open("/dev/null") as extra:
            socket.send_fds(sock, [packet], [extra.fileno()])
        assert await asyncio.to_thread(sock.recv, 100) == b""
    await publish(tmp_path, "s", an_offer())
    assert await fetch(tmp_path, "s") == b"weights"


async def test_without_a_server_the_reason_is_said(tmp_path: Path) -> None:
    with pytest.raises(WeightShareError, match=r"does not answer about shared weights: .*No such file"):
        await fetch(tmp_path, "s")


def test_unequal_capacities_are_listed_by_stage_and_instance() -> None:
    instances = tuple(InstancePlan(name=f"p@r{i}", process="p", stages=("s", "v"), replica=i) for i in range(3))
    process = ProcessPlan(name="p", stages=("s", "v"), num_replicas=3)
    plan = Plan(
        name="t", model_path=None, platform="cpu", entry="s", stages=(), processes=(process,),
        instances=instances, edges=(), spawn_waves=(), shutdown_order=(),
    )  # fmt: skip

    def report(tokens: float) -> dict[str, object]:
        return {"engines": {"s": {"running": 0, "kv_capacity_tokens": tokens}}}

    assert unequal_capacity(plan, {f"p@r{i}": report(100) for i in range(3)}) is None
    assert unequal_capacity(plan, {}) is None
    found = unequal_capacity(plan, {"p@r0": report(100), "p@r1": report(96), "p@r2": {}})
    assert found is not None
    assert "stage 's' of Process 'p': p@r0 100, p@r1 96, p@r2 none. Pin engine.max_total_tokens" in found
