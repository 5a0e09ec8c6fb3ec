"""What a causal transformer remembers of each recording that it goes through piece by piece."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sgl_omni.models.moss_tts_local.codec_spec import BlockSpec, TransformerSpec

NOBODY = 0
"""The slot in which nothing is looked for: what need not be remembered is written there."""


@dataclass(slots=True, eq=False)
class Place:
    """Where the memory of a stream lies: in a slot, or, for as long as others have them all, outside."""

    slot: int = NOBODY
    outside: Tensor | None = None


class StreamMemory:
    """Of each layer, keys and values of the last places of every stream.

    A stream's are the numbers of one slot. A layer has a ring of places in it, each [2 * heads * head_dim]: place p of
    the stream lies at p modulo ``ring``, and what those before it need is there until it is overwritten.

    There are as many slots as at the beginning, where they are, so that CUDA graphs may read and write them. More
    streams may be open: ``slots_of`` brings those that are to run into slots, in exchange for streams that are not.
    """

    def __init__(self, blocks: Sequence[BlockSpec], slots: int, like: Tensor) -> None:
        """In the type and on the device of ``like``."""
        self.slots = slots
        transformers = {i: block for i, block in enumerate(blocks) if isinstance(block, TransformerSpec)}
        unit = math.lcm(*(_place_size(spec) for spec in transformers.values()))
        numbers = sum(spec.num_layers * ring(spec) * _place_size(spec) for spec in transformers.values())
        self._rows = like.new_zeros(1 + slots, -(-numbers // unit) * unit)
        self.strides = {i: self._rows.shape[1] // _place_size(spec) for i, spec in transformers.items()}
        """Places from a slot to the next, of each transformer's layers."""
        self.layers: dict[tuple[int, int], Tensor] = {}
        """Of each transformer and layer, places of all slots [places, 2 * heads * head_dim], from its own first on."""
        flat, start = self._rows.view(-1), 0
        for i, spec in transformers.items():
            size = _place_size(spec)
            for layer in range(spec.num_layers):
                room = (len(flat) - start) // size
                self.layers[i, layer] = flat[start : start + room * size].view(room, size)
                start += ring(spec) * size
        self._free = list(range(slots, 0, -1))
        self._held: dict[int, Place] = {}
        """Who has each slot; the one that ran last is last."""

    @property
    def stream_bytes(self) -> int:
        return self._rows[NOBODY].nbytes

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def open(self) -> Place:
        """For a stream of which there is nothing to remember yet."""
        if self._free:
            return self._hold(Place(), self._free.pop())
        return Place(outside=torch.zeros_like(self._rows[NOBODY]))

    def close(self, place: Place) -> None:
        if place.slot != NOBODY:
            del self._held[place.slot]
            self._free.append(place.slot)

    def slots_of(self, places: Sequence[Place]) -> list[int]:
        """The slots of streams that are to run together. Raises ``ValueError`` if there are fewer slots.

        Who has to leave one is who ran last: streams mostly take turns, so its turn is the furthest.
        """
        if len(places) > self.slots:
            raise ValueError(f"{len(places)} streams cannot run together in {self.slots} slots")
        wanted = {place.slot for place in places}
        others = [slot for slot in self._held if slot not in wanted]
        for place in places:
            if place.outside is not None:
                self._bring(place, self._free.pop() if self._free else others.pop())
            self._hold(place, place.slot)
        return [place.slot for place in places]

    def _bring(self, place: Place, slot: int) -> None:
        assert place.outside is not None
        row = self._rows[slot]
        if slot in self._held:
            former = self._held[slot]
            former.slot, former.outside = NOBODY, row.clone()
        row.copy_(place.outside)
        place.slot, place.outside = slot, None

    def _hold(self, place: Place, slot: int) -> Place:
        self._held.pop(slot, None)
        self._held[slot] = place
        place.slot = slot
        return place


def ring(spec: TransformerSpec) -> int:
    """Places of a stream that a layer remembers."""
    return max(1, spec.context - 1)


def _place_size(spec: TransformerSpec) -> int:
    return 2 * spec.width
