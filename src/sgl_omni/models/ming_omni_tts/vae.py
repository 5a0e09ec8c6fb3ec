"""The audio VAE: samples to latents, and latents to samples, patch by patch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.decoder import Decoder, materialise
from sgl_omni.engine.layers import parameter
from sgl_omni.models.ming_omni_tts.blocks import Linear
from sgl_omni.models.ming_omni_tts.spec import MingSpec, VaeSpec

_IGNORED = ("*.embed_tokens.weight", "*.rotary_emb.inv_freq")
WINDOW = "audio.decoder.head.istft.window"


class GrowingAttend:
    """Attention of one sequence over all of itself so far, or the last ``window`` places of it."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self.seen = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        if layer in self._kept:
            k, v = (torch.cat([old, new]) for old, new in zip(self._kept[layer], (k, v), strict=True))
        kept = slice(None) if window is None else slice(max(0, k.shape[0] - window + 1), None)
        self._kept[layer] = (k[kept], v[kept])
        places = torch.arange(k.shape[0], device=q.device)
        distance = places[-q.shape[0] :, None] - places
        mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])
        return mixed[0].transpose(0, 1)


def _run(decoder: Decoder, x: Tensor, attend: GrowingAttend) -> Tensor:
    """x [places, hidden], which follow those that ``attend`` has seen."""
    positions = torch.arange(attend.seen, attend.seen + x.shape[0], device=x.device)
    attend.seen += x.shape[0]
    out: Tensor = decoder(x, positions[None], attend)
    return out


class VaeEncoder(nn.Module):
    def __init__(self, spec: VaeSpec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.encoder.hidden_size
        self.encoder = Decoder(spec.encoder)
        self.first, self.second = Linear(spec.window, width, bias=False), Linear(width, width)
        self.last = Linear(width, 2 * spec.latent_size)
        self.aggregator = None if spec.aggregator is None else Decoder(spec.aggregator)
        self.mark = None if spec.aggregator is None else parameter(1, 1, width)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> VaeEncoder:
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(MingSpec.parse(checkpoint.config()).vae)
        prefix = "audio.encoder."
        ignored = [*_IGNORED, f"{prefix}norm.*"]
        checkpoint.check(model.slots(prefix), prefix=prefix, ignore=ignored)
        materialise(model, device, dtype)
        checkpoint.load(model.slots(prefix), prefix=prefix, ignore=ignored)
        return model.eval()

    @torch.inference_mode()
    def encode(self, samples: Tensor, noise: Tensor) -> Tensor:
        """float32 [samples] -> latents float32 [n, latent_size], drawn with ``noise`` of that shape."""
        spec = self.spec
        count = math.ceil(len(samples) / spec.hop)
        padded = F.pad(samples, (0, (count - 1) * spec.hop + spec.window - len(samples)))
        frames = padded.unfold(0, spec.window, spec.hop).to(self.last.weight)
        x = _run(self.encoder, self.second(self.first(frames)), GrowingAttend())
        if self.aggregator is not None and self.mark is not None:
            patches = F.pad(x, (0, 0, 0, -count % spec.patch)).unflatten(0, (-1, spec.patch))
            marked = torch.cat([patches, self.mark.expand(patches.shape[0], 1, -1)], 1)
            x = _run(self.aggregator, marked.flatten(0, 1), GrowingAttend()).unflatten(0, (-1, spec.patch + 1))[:, -1]
        mean, scale = self.last(x).float().chunk(2, -1)
        return mean + (F.softplus(scale) + 1e-4) * noise.to(mean)

    def latents_of(self, samples: int) -> int:
        """Latents that so many samples become."""
        return math.ceil(math.ceil(samples / self.spec.hop) / self.spec.patch)

    def slots(self, prefix: str) -> Iterator[Slot]:
        yield from self.encoder.slots(f"{prefix}encoder.")
        for i, part in enumerate((self.first, self.second, self.last), 1):
            yield from part.slots(f"{prefix}fc{i}")
        if self.aggregator is not None and self.mark is not None:
            yield from self.aggregator.slots(f"{prefix}aggregator.")
            yield Slot(f"{prefix}cls_embed", self.mark, tuple(self.mark.shape))


@dataclass(slots=True)
class VaeStream:
    """Of one recording that is being decoded: latents that wait for the next, attention, and audio not complete yet."""

    attend: GrowingAttend = field(default_factory=GrowingAttend)
    last: Tensor | None = None
    waiting: Tensor | None = None
    audio: Tensor | None = None
    envelope: Tensor | None = None


class VaeDecoder(nn.Module):
    """Latents, drawn out in time and through a decoder, are the spectra of overlapping frames."""

    def __init__(self, spec: VaeSpec) -> None:
        super().__init__()
        self.spec = spec
        width = spec.decoder.hidden_size
        self._fft = 4 * spec.output_hop
        self.into = Linear(spec.latent_size, width)
        self.decoder = Decoder(spec.decoder)
        self.spectrum = Linear(width, self._fft + 2)

    def read_window(self, checkpoint: Checkpoint, device: torch.device | str) -> None:
        """Of the frames: float32 whatever the weights are, so it is none of them. A checkpoint need not have it."""
        window = torch.hann_window(self._fft, device=device)
        if checkpoint.names(WINDOW):
            checkpoint.load([Slot(WINDOW, window, tuple(window.shape))], prefix=WINDOW)
        self._window = window

    @torch.inference_mode()
    def decode(self, latents: Tensor, stream: VaeStream, *, last: bool) -> Tensor:
        """The stream's next latents [n, latent_size] -> float32 samples that are complete by now; all of them at the
        ``last``."""
        x = self._drawn_out(self.into(latents.to(self.into.weight)), stream, last)
        if not len(x):
            return x.new_zeros(0, dtype=torch.float32)
        size, phase = self.spectrum(_run(self.decoder, x, stream.attend)).float().chunk(2, -1)
        frames = torch.fft.irfft(torch.polar(size.exp().clamp(max=100.0), phase), self._fft) * self._window
        audio = self._overlapped(frames, stream.audio)
        envelope = self._overlapped(self._window.square().expand(len(frames), -1), stream.envelope)
        first, left = stream.audio is None, self._fft - self.spec.output_hop
        stream.audio, stream.envelope = audio[-left:], envelope[-left:]
        edge = left // 2
        complete = slice(edge if first else 0, len(audio) - (edge if last else left))
        return audio[complete] / envelope[complete]

    def _drawn_out(self, x: Tensor, stream: VaeStream, last: bool) -> Tensor:
        """Linear interpolation between places; it needs the place after, so the newest ones wait."""
        scale = self.spec.patch
        if scale == 1:
            return x
        waiting = x if stream.waiting is None else torch.cat([stream.waiting, x])
        ready = len(waiting) if last else len(waiting) - 1
        around = waiting if stream.last is None else torch.cat([stream.last, waiting])
        if ready < 1:
            stream.waiting = waiting
            return x[:0]
        drawn = F.interpolate(around.T[None].float(), scale_factor=scale, mode="linear", align_corners=False)[0].T
        start = 0 if stream.last is None else scale
        stream.last, stream.waiting = waiting[ready - 1 : ready], waiting[ready:]
        return drawn[start : start + ready * scale].to(x.dtype)

    def _overlapped(self, frames: Tensor, before: Tensor | None) -> Tensor:
        """Frames [n, size], each a hop after the one before it, summed; ``before`` lies over their beginning."""
        hop, (count, size) = self.spec.output_hop, frames.shape
        total = F.fold(frames.T[None], (1, (count - 1) * hop + size), (1, size), stride=(1, hop))[0, 0, 0]
        if before is not None:
            total[: len(before)] += before
        return total

    def slots(self, prefix: str) -> Iterator[Slot]:
        yield from self.into.slots(f"{prefix}fc1")
        yield from self.decoder.slots(f"{prefix}decoder.")
        yield from self.spectrum.slots(f"{prefix}head.out")
