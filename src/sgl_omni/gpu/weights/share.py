"""One model of a replica that shares its weights: attaches to those of its group, or loads them for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sgl_omni.errors import WeightShareError
from sgl_omni.gpu.weights.arena import Arena, views
from sgl_omni.gpu.weights.backend import Backend
from sgl_omni.gpu.weights.cuda_driver import DriverError
from sgl_omni.gpu.weights.exchange import Exchange, Offer
from sgl_omni.gpu.weights.ipc import IpcBackend
from sgl_omni.gpu.weights.manifest import Manifest
from sgl_omni.gpu.weights.shm import ShmBackend
from sgl_omni.gpu.weights.vmm import VmmBackend

log = logging.getLogger("sgl_omni.weights")

Fill = Callable[[Mapping[str, Tensor]], None]
ChooseBackend = Callable[[torch.device], Backend]


class Policy(Protocol):
    """What of an architecture is shared; `sgl_omni.engine.weights.SharePolicy` is one."""

    @property
    def architecture(self) -> str: ...

    @property
    def private(self) -> tuple[str, ...]: ...


def best_backend(device: torch.device) -> Backend:
    """`shm` on a CPU; `vmm` on a GPU, or `ipc` where the driver or the container forbids that."""
    if device.type != "cuda":
        return ShmBackend()
    refusal = VmmBackend.refusal(device)
    if refusal is None:
        return VmmBackend()
    log.warning(
        "weights are shared by CUDA IPC, unprotected from writes and gone with their leader, because %s", refusal
    )
    return IpcBackend()


def backend_named(name: str) -> Backend:
    """Raises ``WeightShareError`` for a name that is none of the three."""
    backends: tuple[Backend, ...] = (ShmBackend(), VmmBackend(), IpcBackend())
    for backend in backends:
        if backend.name == name:
            return backend
    raise WeightShareError(f"shared weights come by '{name}', which is no backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFacts:
    """What became of one model's weights in this process."""

    backend: str
    attached: bool
    bytes: int
    seconds: float
    waited: float
    """Seconds before that, until the leader had published them."""


class SharedWeights:
    """Implements `sgl_omni.engine.weights.WeightStore` for a member of a sharing group.

    Whoever may load looks first whether the group has weights already, so a leader that comes back attaches as a
    follower does.
    """

    def __init__(
        self,
        model: str,
        exchange: Exchange,
        *,
        may_load: bool,
        borrows: bool = False,
        lends: bool = False,
        choose_backend: ChooseBackend = best_backend,
    ) -> None:
        """``model``: the stage's name. ``may_load``: this process leads the group. ``borrows``: the group's weights are
        another server's. ``lends``: other servers may attach to those loaded here."""
        self._model = model
        self._exchange = exchange
        self._may_load = may_load
        self._borrows = borrows
        self._lends = lends
        self._choose_backend = choose_backend
        self._arena: Arena | None = None
        self.facts: SharedFacts | None = None

    def obtain(
        self,
        wanted: Mapping[str, Tensor],
        device: torch.device | str,
        fill: Fill,
        *,
        policy: Policy | None,
        fingerprint: str,
    ) -> dict[str, Tensor]:
        if policy is None:
            raise WeightShareError(f"stage '{self._model}': its architecture has no share policy; weight_share: off")
        self.refuse_update()
        expected = Manifest.lay_out(
            wanted, architecture=policy.architecture, fingerprint=fingerprint, private=policy.private
        )
        device = torch.device(device)
        asked = time.monotonic()
        offer = self._offer(device)
        started = time.monotonic()
        found = None if offer is None else self._attach(offer, expected, device)
        attached = found is not None
        name, memory = found or self._load(expected, fill, device)
        self._arena = Arena(expected, memory)
        self.facts = SharedFacts(
            backend=name,
            attached=attached,
            bytes=expected.shared_bytes,
            seconds=round(time.monotonic() - started, 3),
            waited=round(started - asked, 3),
        )
        log.info(
            "stage '%s' %s %.2f GiB of weights in %.3f s (%s)",
            self._model,
            "attached to" if self.facts.attached else "loaded",
            self.facts.bytes / 2**30,
            self.facts.seconds,
            name,
        )
        return self._arena.tensors()

    def verify(self, tensors: Mapping[str, Tensor]) -> None:
        if self._arena is None:
            raise WeightShareError(f"stage '{self._model}' never asked for its shared weights")
        self._arena.verify(tensors)

    def refuse_update(self) -> None:
        if self._arena is not None:
            raise WeightShareError(
                f"stage '{self._model}': weights cannot be changed while replicas share them; "
                "restart the server with the new checkpoint, or with weight_share: off"
            )

    def describe(self) -> dict[str, Any]:
        """For the instance's ready report. Raises ``WeightShareError`` where the factory made no use of sharing."""
        if self.facts is None:
            raise WeightShareError(
                f"stage '{self._model}' is to share its weights, but its factory did not load them from `weights`; "
                "weight_share: off, or a factory that does"
            )
        facts = self.facts
        return asdict(facts)

    def _offer(self, device: torch.device) -> Offer | None:
        """What there is to attach to; None: nothing, and this process is the one to load."""
        if self._may_load:
            return self._exchange.fetch(self._model)
        if self._borrows:
            offer = self._exchange.fetch(self._model)
            if offer is None:
                raise WeightShareError(f"stage '{self._model}': the other server lent no weights of it")
            return offer
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # makes the context, while the leader loads
        offer = self._exchange.wait_for(self._model)
        if offer is None:
            raise WeightShareError(f"stage '{self._model}': the group's leader has published no weights of it")
        return offer

    def _attach(self, offer: Offer, expected: Manifest, device: torch.device) -> tuple[str, Tensor] | None:
        """None: the driver no longer has them, and this process is the one to load."""
        try:
            expected.check_same(offer.manifest())
            return offer.backend, backend_named(offer.backend).attach(offer.handle, expected.size, device)
        except DriverError as error:
            if self._borrows:
                self._exchange.withdraw(self._model)  # so that they are borrowed again
            if not self._may_load:
                raise
            log.warning("stage '%s': the driver no longer has the weights that were kept: %s", self._model, error)
            self._exchange.withdraw(self._model)
            return None
        finally:
            offer.close()

    def _load(self, manifest: Manifest, fill: Fill, device: torch.device) -> tuple[str, Tensor]:
        backend = self._choose_backend(device)
        if self._lends and not backend.outlives_leader:
            raise WeightShareError(
                f"stage '{self._model}': here weights can be shared by '{backend.name}' alone, which ends with the "
                "process that loaded them, so separate servers cannot share them; replicas of one server can: "
                "weight_share: on"
            )
        allocation = backend.create(manifest.size, device)
        fill(views(manifest, allocation.bytes))
        memory, handle = allocation.seal()
        offer = Offer.of(backend.name, backend.outlives_leader, handle, manifest)
        try:
            self._exchange.publish(self._model, offer)
        finally:
            offer.close()
        return backend.name, memory
