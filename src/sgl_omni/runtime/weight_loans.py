"""Weights that several servers on one GPU share: what this one lends, and what it has from another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from sgl_omni.errors import StartupError, WeightShareError
from sgl_omni.gpu.devices import GpuFacts
from sgl_omni.runtime.weight_keeper import Place, WeightKeeper
from sgl_omni.topology.plan import Plan, SharingGroup

log = logging.getLogger("sgl_omni.weights")

RENEW_SECONDS = 1.0
"""Between two questions whether the other server has loaded its weights again."""


class WeightLoans:
    """Acts on a plan's `lends_weights` and `weights_from` through the server's keeper."""

    def __init__(self, plan: Plan, keeper: WeightKeeper, facts: Callable[[int], GpuFacts]) -> None:
        """`facts(ordinal)` asks the driver; only servers on CUDA that share with others need it."""
        self._plan = plan
        self._keeper = keeper
        self._facts = facts
        self._places: dict[str, Place] = {}
        self._renewing = asyncio.Lock()

    async def begin(self) -> None:
        """Lends and borrows as planned; returns when the keeper has all that is borrowed.

        Raises:
            StartupError: the other server is not there, refuses, or has not loaded its weights.
        """
        if not self._plan.lends_weights:
            return
        for group in self._plan.sharing_groups:
            self._places[group.leader] = (group.process, await self._card(group.device))
        self._keeper.lend({place: leader for leader, place in self._places.items()})
        source = self._plan.weights_from
        for group in self._plan.sharing_groups if source is not None else ():
            try:
                there = await self._borrow(group)
            except WeightShareError as error:
                raise StartupError(f"weights_from {source}: {error}") from error
            if not there:
                raise StartupError(
                    f"weights_from {source}: that server has no weights of Process '{group.process}' yet; start this "
                    "one when that one is ready"
                )

    async def renew(self, leader: str) -> None:
        """Returns when the keeper has weights of a borrowing group; asks the other server for them as long as it is
        there. They are never read from the checkpoint: memory was counted for one set.

        Raises:
            WeightShareError: the other server has ended or refuses, so the weights are gone for good.
        """
        (group,) = (g for g in self._plan.sharing_groups if g.leader == leader)
        async with self._renewing:
            while not self._keeper.holds(leader):
                try:
                    there = await self._borrow(group)
                except WeightShareError as error:
                    raise WeightShareError(
                        f"the weights of Process '{group.process}', borrowed from {self._plan.weights_from}, are gone, "
                        f"and they cannot be had again: {error}. Start the servers that share them again"
                    ) from error
                if not there:
                    log.info("'%s' waits until the other server has its weights again", leader)
                    await asyncio.sleep(RENEW_SECONDS)

    def describe(self) -> dict[str, str | None]:
        """For /health. ``lent_at``: the socket that other servers may name in `weights_from`."""
        return {
            "lent_at": str(self._keeper.path) if self._plan.lends_weights else None,
            "borrowed_from": self._plan.weights_from,
        }

    async def _borrow(self, group: SharingGroup) -> bool:
        """Whether the engine's weights are there now. Other models of the Process may have none to share."""
        assert self._plan.weights_from is not None
        stages = [self._plan.stage(name) for name in self._plan.process(group.process).stages]
        models = [stage.name for stage in stages if stage.gpu]
        source = Path(self._plan.weights_from)
        found = await self._keeper.borrow(source, self._places[group.leader], models, group.leader)
        if all(stage.name in found for stage in stages if stage.engine is not None):
            return True
        self._keeper.forget(group.leader)
        return False

    async def _card(self, device: int) -> str:
        """Names a GPU so that servers which number their GPUs otherwise mean the same one."""
        if self._plan.platform == "cpu":
            return f"virtual GPU {device}"
        return (await asyncio.to_thread(self._facts, device)).uuid
