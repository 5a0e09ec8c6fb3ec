"""The decoder of the audio VAE: the next latents of several recordings to samples, in one call of one shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.decoder import Decoder, materialise
from sgl_omni.models.ming_omni_tts.blocks import Linear
from sgl_omni.models.ming_omni_tts.spec import MingSpec, VaeSpec
from sgl_omni.models.ming_omni_tts.vae import IGNORED

_PREFIX = "audio.decoder."
_WINDOW = f"{_PREFIX}head.istft.window"
_OVERLAP = 4
"""Hops in a frame; so many frames lie over each sample."""


@dataclass(slots=True)
class VaeMemory:
    """What the decoder keeps of recordings between calls, each in a row: the last two ``latents`` [rows, 2, hidden], of
    which the newer waits for the one after it; the keys and values that are still seen, ``kept`` [rows, layers, 2,
    places, KV heads, head_dim], the newest at the end; and ``audio`` float32 [rows, samples] that is not complete."""

    latents: Tensor
    kept: Tensor
    audio: Tensor

    @property
    def places(self) -> int:
        return self.kept.shape[3]

    def grow(self, rows: int, places: int) -> VaeMemory:
        """The same with at least so many rows and places, in other memory."""
        more, further = rows - self.latents.shape[0], places - self.places
        return VaeMemory(
            F.pad(self.latents, (0, 0, 0, 0, 0, more)),
            F.pad(self.kept, (0, 0, 0, 0, further, 0, 0, 0, 0, 0, 0, more)),
            F.pad(self.audio, (0, 0, 0, more)),
        )


class StreamsAttend:
    """Attention of several streams, each over its own places: those that are kept, and the new ones before itself."""

    def __init__(self, kept: Tensor, known: Tensor, ready: Tensor, left: Tensor) -> None:
        """Of each stream: ``kept`` as in ``VaeMemory``, which are replaced by what is to be kept now; bool ``known``
        [streams, kept places] and ``ready`` [streams, new places], which of both there are; and int64 ``left``
        [streams, places] of kept and new ones, side by side, to keep."""
        self.kept = kept
        self._seen = torch.cat([known, ready], 1)
        self._left = left[:, None, :, None, None]
        self._streams, self._new = ready.shape
        self._masks: dict[int | None, Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        q, k, v = (part.unflatten(0, (self._streams, self._new)) for part in (q, k, v))
        kept = self.kept[:, layer]
        whole = torch.cat([kept[:, :, kept.shape[2] - self._before :], torch.stack([k, v], 1)], 2)
        kept.copy_(torch.take_along_dim(whole, self._left, 2))
        # Heads that share keys and values are rows of one product, so that no kernel has to repeat these.
        groups = q.shape[2] // k.shape[2]
        q = q.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        k, v = whole.transpose(2, 3).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v, self._mask(window, groups, q))
        return mixed.unflatten(2, (groups, self._new)).permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)

    @property
    def _before(self) -> int:
        return self._seen.shape[1] - self._new

    def _mask(self, window: int | None, groups: int, like: Tensor) -> Tensor:
        """[streams, 1, groups * new, before + new], to be added to the products. Every place sees itself, so that those
        which are not there stay numbers."""
        if window not in self._masks:
            places = torch.arange(-self._before, self._new, device=like.device)
            distance = places[self._before :, None] - places
            near = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            sees = (near & self._seen[:, None]) | (distance == 0)
            mask = torch.zeros(sees.shape, dtype=like.dtype, device=like.device).masked_fill(~sees, float("-inf"))
            self._masks[window] = mask.repeat(1, groups, 1)[:, None]
        return self._masks[window]


class VaeDecoder(nn.Module):
    """Latents, drawn out in time and through a decoder, are the spectra of overlapping frames."""

    def __init__(self, spec: VaeSpec) -> None:
        super().__init__()
        self.spec = spec
        width, fft = spec.decoder.hidden_size, _OVERLAP * spec.output_hop
        self.into = Linear(spec.latent_size, width)
        self.decoder = Decoder(spec.decoder)
        self.spectrum = Linear(width, fft + 2)
        self._window = torch.hann_window(fft, device="cpu")
        windows = [window for window in spec.decoder.windows if window is not None]
        self.sees_all = len(windows) < len(spec.decoder.windows)
        """Whether a layer sees a recording from its beginning, however long it is."""
        self._places = max(windows, default=1) - 1

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> VaeDecoder:
        """Raises ``CheckpointError`` for what is missing or of other shapes."""
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(MingSpec.parse(checkpoint.config()).vae)
        ignored = [*IGNORED, _WINDOW]
        checkpoint.check(model.slots(_PREFIX), prefix=_PREFIX, ignore=ignored)
        materialise(model, device, dtype)
        checkpoint.load(model.slots(_PREFIX), prefix=_PREFIX, ignore=ignored)
        model._read_window(checkpoint, device)
        return model.eval()

    def _read_window(self, checkpoint: Checkpoint, device: torch.device | str) -> None:
        """Of the frames: float32 whatever the weights are. A checkpoint need not have it."""
        self._window = self._window.to(device)
        if checkpoint.names(_WINDOW):
            checkpoint.load([Slot(_WINDOW, self._window, tuple(self._window.shape))], prefix=_WINDOW)

    @property
    def device(self) -> torch.device:
        return self.spectrum.weight.device

    def memory(self, rows: int) -> VaeMemory:
        shape, weight = self.decoder.kv_shape, self.spectrum.weight
        return VaeMemory(
            weight.new_zeros(rows, 2, self.spec.decoder.hidden_size),
            weight.new_zeros(rows, shape.layers, 2, self._places, shape.kv_heads, shape.head_dim),
            weight.new_zeros(rows, (_OVERLAP - 1) * self.spec.output_hop, dtype=torch.float32),
        )

    def seen(self, heard: int) -> int:
        """Places that are through the decoder once it has ``heard`` so many latents: the newest waits."""
        return max(0, heard - 1) * self.spec.patch

    def samples(self, heard: int, count: int, last: bool) -> slice:
        """Which of the samples that ``forward`` makes are complete and new."""
        hop, left = self.spec.output_hop, (_OVERLAP - 1) * self.spec.output_hop
        scale, edge = self.spec.patch, left // 2
        start = scale * hop * (heard == 0) + max(0, edge - self.seen(heard) * hop)
        stop = (count + last) * scale * hop + (left - edge) * last
        return slice(start, max(start, stop))

    def forward(self, latents: Tensor, facts: Tensor, memory: VaeMemory, before: int) -> Tensor:
        """The next latents float32 [n, most, latent_size] of n recordings -> samples float32 [n, all of them].

        ``facts`` int64 [4, n]: the row of each in the memory, which is changed; latents heard before; how many of the
        latents there are, the rest being zeros; and 1 where they are the last. ``before``: kept places that are looked
        at, no fewer than any of them has. Which samples count, ``samples`` says. A recording never heard of with no
        latents is one that is not there. What lies in a row before its first latents does not matter.
        """
        row, heard, count, last = facts
        scale, hop = self.spec.patch, self.spec.output_hop
        seen = (heard - 1).clamp(min=0) * scale
        begin, end = (heard == 0).long() * scale, (count + last) * scale
        known = torch.cat([memory.latents[row], self.into(latents.to(self.into.weight))], 1)
        x = self._drawn_out(known, heard, count)
        places = torch.arange(x.shape[1], device=x.device)
        ready = (places >= begin[:, None]) & (places < end[:, None])
        x = x.masked_fill(~ready[..., None], 0)

        past = torch.arange(-before, 0, device=x.device) >= -seen[:, None]
        left = end[:, None] + torch.arange(before - memory.places, before, device=x.device)
        fresh = heard[:, None, None] < 2
        kept = memory.kept[row].masked_fill(fresh[..., None, None, None], 0)
        attend = StreamsAttend(kept, past, ready, left.clamp(min=0))
        positions = (seen - begin)[:, None] + places
        hidden = self.decoder(x.flatten(0, 1), positions.clamp(min=0).flatten()[None], attend)

        frames = self._frames(hidden).unflatten(0, x.shape[:2]).masked_fill(~ready[..., None], 0)
        audio = _overlapped(frames.unflatten(2, (_OVERLAP, hop))).flatten(1)
        audio[:, : memory.audio.shape[1]] += memory.audio[row].masked_fill(fresh[..., 0], 0)
        samples = audio / self._envelope(ready, seen).flatten(1)

        memory.kept.index_copy_(0, row, attend.kept)
        memory.latents.index_copy_(0, row, torch.take_along_dim(known, (count[:, None] + places[:2])[..., None], 1))
        edges = (end * hop)[:, None] + torch.arange(memory.audio.shape[1], device=x.device)
        memory.audio.index_copy_(0, row, torch.take_along_dim(audio, edges, 1))
        return samples

    def _drawn_out(self, known: Tensor, heard: Tensor, count: Tensor) -> Tensor:
        """Linear interpolation around all latents but the first of ``known`` [n, m, hidden] -> [n, (m - 1) * patch,
        hidden]. A recording's own first and last one have themselves for the neighbour they lack."""
        scale = self.spec.patch
        at = torch.arange(known.shape[1] - 1, device=known.device)
        previous, own = known[:, :-1].float(), known[:, 1:].float()
        following = F.pad(own[:, 1:], (0, 0, 0, 1))
        previous = torch.where((heard[:, None] + at == 1)[..., None], own, previous)
        following = torch.where((at == count[:, None])[..., None], own, following)
        offsets = ((torch.arange(scale, device=known.device) + 0.5) / scale - 0.5)[:, None]
        drawn = own[:, :, None] * (1 - offsets.abs())
        drawn = drawn + previous[:, :, None] * (-offsets).clamp(min=0) + following[:, :, None] * offsets.clamp(min=0)
        return drawn.flatten(1, 2).to(known.dtype)

    def _frames(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> float32 [rows, samples of a frame]"""
        size, phase = self.spectrum(hidden).float().chunk(2, -1)
        spectrum = torch.polar(size.exp().clamp(max=100.0), phase)
        return torch.fft.irfft(spectrum, len(self._window)) * self._window

    def _envelope(self, ready: Tensor, seen: Tensor) -> Tensor:
        """What the windows over each sample add up to: [n, hops, hop]."""
        earlier = torch.arange(1 - _OVERLAP, 0, device=ready.device) >= -seen[:, None]
        there = F.pad(torch.cat([earlier, ready], 1).float(), (0, _OVERLAP - 1))
        parts = self._window.square().unflatten(0, (_OVERLAP, -1))
        hops = ready.shape[1] + _OVERLAP - 1
        total = there.new_zeros(*there.shape[:1], hops, parts.shape[1])
        for i, part in enumerate(parts):
            start = _OVERLAP - 1 - i
            total += there[:, start : start + hops, None] * part
        return total

    def slots(self, prefix: str) -> Iterator[Slot]:
        yield from self.into.slots(f"{prefix}fc1")
        yield from self.decoder.slots(f"{prefix}decoder.")
        yield from self.spectrum.slots(f"{prefix}head.out")


def _overlapped(frames: Tensor) -> Tensor:
    """Frames [n, m, hops in one, hop], each a hop after the one before, summed: [n, m + hops in one - 1, hop]."""
    n, count, overlap, hop = frames.shape
    total = frames.new_zeros(n, count + overlap - 1, hop)
    for i in range(overlap):
        total[:, i : i + count] += frames[:, :, i]
    return total
