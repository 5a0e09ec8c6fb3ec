"""The encoder of the audio VAE: samples to latents."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.decoder import Decoder, materialise
from sgl_omni.engine.layers import parameter
from sgl_omni.models.ming_omni_tts.blocks import Linear
from sgl_omni.models.ming_omni_tts.spec import MingSpec, VaeSpec

IGNORED = ("*.embed_tokens.weight", "*.rotary_emb.inv_freq")
"""What both halves of the VAE have on disk and no use for."""


_AT_ONCE = 1024
"""Places that look at once: what is masked for all of a recording would grow with the square of its length."""


class SequenceAttend:
    """Attention of one sequence over all of itself, or the last ``window`` places of it."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        places, mixed = torch.arange(k.shape[2], device=q.device), []
        for start in range(0, len(places), _AT_ONCE):
            stop = min(start + _AT_ONCE, len(places))
            first = 0 if window is None else max(0, start + 1 - window)
            distance = places[start:stop, None] - places[first:stop]
            mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
            seen = (part[:, :, first:stop] for part in (k, v))
            part = F.scaled_dot_product_attention(q[:, :, start:stop], *seen, mask, enable_gqa=q.shape[1] != k.shape[1])
            mixed.append(part)
        return torch.cat(mixed, 2)[0].transpose(0, 1)


def _run(decoder: Decoder, x: Tensor) -> Tensor:
    """x [places, hidden] of one sequence, all of it."""
    out: Tensor = decoder(x, torch.arange(x.shape[0], device=x.device)[None], SequenceAttend())
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
        ignored = [*IGNORED, f"{prefix}norm.*"]
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
        x = _run(self.encoder, self.second(self.first(frames)))
        if self.aggregator is not None and self.mark is not None:
            patches = F.pad(x, (0, 0, 0, -count % spec.patch)).unflatten(0, (-1, spec.patch))
            marked = torch.cat([patches, self.mark.expand(patches.shape[0], 1, -1)], 1)
            x = _run(self.aggregator, marked.flatten(0, 1)).unflatten(0, (-1, spec.patch + 1))[:, -1]
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
