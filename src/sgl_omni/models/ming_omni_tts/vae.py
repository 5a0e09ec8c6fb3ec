"""The audio VAE: samples to latents, and latents to samples, patch by patch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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


class SequenceAttend:
    """Attention of one sequence over all of itself, or the last ``window`` places of it."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        places = torch.arange(k.shape[0], device=q.device)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        return _attended(q, k, v, _mask(places[:, None] - places, window))[0].transpose(0, 1)


def _attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])


def _mask(distance: Tensor, window: int | None) -> Tensor:
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


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


@dataclass(slots=True)
class VaeStream:
    """Of one recording that is being decoded: latents that wait for the next, places so far, keys and values of the
    last of them [layers, 2, places, KV heads, head_dim], and audio not complete yet."""

    seen: int = 0
    kept: Tensor | None = None
    last: Tensor | None = None
    waiting: Tensor | None = None
    audio: Tensor | None = None
    envelope: Tensor | None = None


class StreamsAttend:
    """Attention of several streams, each over the last of its own places; all have as many new ones."""

    def __init__(
        self, streams: Sequence[VaeStream], new: int, windows: Sequence[int | None], device: torch.device
    ) -> None:
        """``windows``: of each layer."""
        self._seen = torch.tensor([stream.seen for stream in streams], device=device)[:, None]
        self._streams, self._new, self._layers = streams, new, len(windows)
        old = [stream.kept for stream in streams if stream.kept is not None]
        self._before = max((kept.shape[2] for kept in old), default=0)
        self._old = torch.stack([self._filled(kept) for kept in old]) if self._before else None
        widest = [window for window in windows if window is not None]
        total = self._before + new
        self._keep = min(total, max(widest) - 1) if len(widest) == len(windows) else total
        self._kept: Tensor | None = None
        self._masks: dict[int | None, Tensor] = {}

    def _filled(self, kept: Tensor) -> Tensor:
        return F.pad(kept, (0, 0, 0, 0, self._before - kept.shape[2], 0))

    def positions(self) -> Tensor:
        """int64 [streams * new]"""
        return (self._seen + torch.arange(self._new, device=self._seen.device)).flatten()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        q, k, v = (part.unflatten(0, (len(self._streams), self._new)) for part in (q, k, v))
        if self._old is not None:
            k, v = (torch.cat([self._old[:, layer, i], part], 1) for i, part in enumerate((k, v)))
        if self._kept is None:
            self._kept = k.new_empty(len(self._streams), self._layers, 2, self._keep, *k.shape[2:])
        for i, part in enumerate((k, v)):
            self._kept[:, layer, i] = part[:, part.shape[1] - self._keep :]
        if window not in self._masks:
            places = torch.arange(-self._before, self._new, device=q.device)
            distance = _mask(places[self._before :, None] - places, window)
            self._masks[window] = distance & (places >= -self._seen[:, None, None])
        mixed = _attended(*(part.transpose(1, 2) for part in (q, k, v)), self._masks[window])
        return mixed.transpose(1, 2).flatten(0, 1)

    def leave(self) -> None:
        """Gives each stream what it has to keep."""
        assert self._kept is not None
        for stream, kept in zip(self._streams, self._kept, strict=True):
            stream.kept = kept
            stream.seen += self._new


class Piece(NamedTuple):
    """The next latents [n, latent_size] of a stream, and whether they are its ``last``."""

    latents: Tensor
    stream: VaeStream
    last: bool

    @property
    def shape(self) -> tuple[int, int, bool, bool, bool]:
        """Pieces of the same shape can be decoded together."""
        stream = self.stream
        waiting = 0 if stream.waiting is None else len(stream.waiting)
        return len(self.latents), waiting, stream.last is None, stream.audio is None, self.last


def _joined(before: Sequence[Tensor | None], x: Tensor) -> Tensor:
    """``before`` [k, width] of each, which all have or none, in front of x [streams, n, width]."""
    known = [each for each in before if each is not None]
    return torch.cat([torch.stack(known), x], 1) if known else x


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
    def decode(self, pieces: Sequence[Piece]) -> list[Tensor]:
        """Of each stream the float32 samples that are complete by now, in host memory; all of them at the last piece.

        Pieces of one shape, as those in the middle of speeches are, go through the decoder together.
        """
        alike: dict[tuple[int, int, bool, bool, bool], list[int]] = {}
        for i, piece in enumerate(pieces):
            alike.setdefault(piece.shape, []).append(i)
        found = [torch.empty(0)] * len(pieces)
        for places in alike.values():
            some = [pieces[i] for i in places]
            latents = torch.stack([piece.latents for piece in some]).to(self.into.weight)
            audio = self._decode(latents, [piece.stream for piece in some], some[0].last).cpu()
            for i, samples in zip(places, audio, strict=True):
                found[i] = samples
        return found

    def _decode(self, latents: Tensor, streams: Sequence[VaeStream], last: bool) -> Tensor:
        """Latents [streams, n, latent_size] -> samples [streams, samples]."""
        x = self._drawn_out(self.into(latents), streams, last)
        if not x.shape[1]:
            return x.new_zeros(len(streams), 0, dtype=torch.float32)
        attend = StreamsAttend(streams, x.shape[1], self.spec.decoder.windows, x.device)
        hidden = self.decoder(x.flatten(0, 1), attend.positions()[None], attend)
        attend.leave()
        size, phase = self.spectrum(hidden).float().unflatten(0, x.shape[:2]).chunk(2, -1)
        frames = torch.fft.irfft(torch.polar(size.exp().clamp(max=100.0), phase), self._fft) * self._window
        first, left = streams[0].audio is None, self._fft - self.spec.output_hop
        audio = self._overlapped(frames, [stream.audio for stream in streams])
        envelope = self._overlapped(self._window.square().expand_as(frames), [stream.envelope for stream in streams])
        for stream, audio_left, envelope_left in zip(streams, audio[:, -left:], envelope[:, -left:], strict=True):
            stream.audio, stream.envelope = audio_left, envelope_left
        edge = left // 2
        complete = slice(edge if first else 0, audio.shape[1] - (edge if last else left))
        return audio[:, complete] / envelope[:, complete]

    def _drawn_out(self, x: Tensor, streams: Sequence[VaeStream], last: bool) -> Tensor:
        """Linear interpolation between places; it needs the place after, so the newest ones wait."""
        scale = self.spec.patch
        if scale == 1:
            return x
        waiting = _joined([stream.waiting for stream in streams], x)
        ready = waiting.shape[1] - (not last)
        if ready < 1:
            for stream, rows in zip(streams, waiting, strict=True):
                stream.waiting = rows
            return x[:, :0]
        around = _joined([stream.last for stream in streams], waiting)
        drawn = F.interpolate(around.transpose(1, 2).float(), scale_factor=scale, mode="linear", align_corners=False)
        start = 0 if streams[0].last is None else scale
        for stream, rows in zip(streams, waiting, strict=True):
            stream.last, stream.waiting = rows[ready - 1 : ready], rows[ready:]
        return drawn.transpose(1, 2)[:, start : start + ready * scale].to(x.dtype)

    def _overlapped(self, frames: Tensor, before: Sequence[Tensor | None]) -> Tensor:
        """Frames [streams, n, size], each a hop after the one before, summed; ``before`` lies over their beginning."""
        hop, (count, size) = self.spec.output_hop, frames.shape[1:]
        total = F.fold(frames.transpose(1, 2), (1, (count - 1) * hop + size), (1, size), stride=(1, hop))[:, 0, 0]
        known = [each for each in before if each is not None]
        if known:
            total[:, : len(known[0])] += torch.stack(known)
        return total

    def slots(self, prefix: str) -> Iterator[Slot]:
        yield from self.into.slots(f"{prefix}fc1")
        yield from self.decoder.slots(f"{prefix}decoder.")
        yield from self.spectrum.slots(f"{prefix}head.out")
