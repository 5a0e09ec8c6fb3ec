"""The device side of Ming-Omni-TTS: a prompt and latents so far in, the next latents out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sgl_omni.audio.stretch import TimeStretch
from sgl_omni.engine.attention import Attend
from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.decoder import Decoder, materialise
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import Embedding
from sgl_omni.engine.model import StepModel
from sgl_omni.engine.request import Chunk, Request
from sgl_omni.models.ming_omni_tts.blocks import TIMES, Aggregator, Flow, Linear
from sgl_omni.models.ming_omni_tts.spec import MingSpec
from sgl_omni.models.ming_omni_tts.vae import VaeStream

GUIDANCE, STIRRING = 2.0, 0.25
"""As the model's authors sample: the weight of guidance, and of noise that a temperature above 0 adds to each step."""

_LEAST_STEPS = 4
"""The model may end its speech after one more than these."""


@dataclass(slots=True, eq=False)
class Speech:
    """What a request has said: ``latents``, each [patch, latent_size], and the last ones as the flow sees them,
    ``history`` [history, latent_size]."""

    history: Tensor
    seed: int
    temperature: float
    speed: float
    latents: list[Tensor] = field(default_factory=list[Tensor])
    stream: VaeStream = field(default_factory=VaeStream)
    stretch: TimeStretch | None = None

    def noise(self, spec: MingSpec) -> Tensor:
        """The next step's, float32 [1 + steps, patch, latent_size]: the beginning, then what stirs each step."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + len(self.latents)) & 0x7FFFFFFFFFFFFFFF)
        drawn = torch.randn(len(TIMES), spec.patch, spec.latent_size, generator=generator)
        drawn[1:] *= STIRRING * math.sqrt(self.temperature)
        return drawn

    def say(self, latents: Tensor) -> None:
        self.latents.append(latents)
        self.history = torch.cat([self.history[len(latents) :], latents])


class MingModel(nn.Module, StepModel):
    """A row is 1 where the speech ends with it, else 0; the latents of a row lie in its request's ``Speech``."""

    def __init__(self, spec: MingSpec) -> None:
        super().__init__()
        self.spec = spec
        self.decoder = Decoder(spec.decoder)
        self.embedding = Embedding(spec.decoder.vocab_size, spec.decoder.hidden_size)
        self.flow = Flow(spec)
        self.aggregator = Aggregator(spec)
        self.end = Linear(spec.decoder.hidden_size, 2)

    @classmethod
    def load(cls, folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> MingModel:
        """Reads a checkpoint but for its audio VAE, the unused text head, and the projection of speakers' vectors."""
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(MingSpec.parse(checkpoint.config()))
        ignored = ["audio.*", "model.lm_head.weight", "spk_head.*", "*.inv_freq"]
        checkpoint.check(model.slots(), ignore=ignored)
        materialise(model, device, dtype)
        checkpoint.load(model.slots(), ignore=ignored)
        return model.eval()

    @property
    def kv_shape(self) -> KVShape:
        return self.decoder.kv_shape

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    @torch.inference_mode()
    def embed_prompt(self, ids: Tensor, speaker_at: int, latents: Tensor) -> Tensor:
        """ids int64 [length], the place of a speaker that is not told or -1, and a reference's latents
        [n * patch, latent_size], which follow -> float32 [length + n, hidden]."""
        x = self.embed_ids(ids[:, None].to(self.device))
        if speaker_at >= 0:
            x[speaker_at] = 0
        if len(latents):
            heard = latents.to(x).unflatten(0, (-1, self.spec.patch))
            x = torch.cat([x, self.aggregator(heard)])
        return x.float().cpu()

    def embed_ids(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        return x

    def embed(self, chunks: Sequence[Chunk]) -> Tensor:
        weight = self.embedding.weight
        x = weight.new_empty(sum(chunk.length for chunk in chunks), weight.shape[1])
        said: list[Tensor] = []
        places: list[int] = []
        row = 0
        for chunk in chunks:
            request, split = chunk.request, min(chunk.stop, chunk.request.prompt_length)
            if chunk.start < split:
                x[row : row + split - chunk.start] = request.prompt.rows[chunk.start : split].to(x)
            for position in range(max(chunk.start, split), chunk.stop):
                said.append(request.task.latents[position - request.prompt_length])
                places.append(row + position - chunk.start)
            row += chunk.length
        if said:
            x[torch.tensor(places, device=x.device)] = self.aggregator(torch.stack(said).to(x))
        return x

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden: Tensor = self.decoder(x, positions, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Whether the speech goes on or ends: [n, 1, 2]."""
        return self.end(hidden)[:, None]

    def rule(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        early = torch.tensor([len(request.outputs) < _LEAST_STEPS for request in requests], device=logits.device)
        forbidden = F.pad(early[:, None, None], (1, 0))
        return logits.masked_fill(forbidden, float("-inf"))

    def complete(self, rows: Tensor, hidden: Tensor, requests: Sequence[Request]) -> Tensor:
        """Makes the rows' latents, and leaves the rows as they are."""
        speeches: list[Speech] = [request.task for request in requests]
        noise = torch.stack([speech.noise(self.spec) for speech in speeches], 1).to(hidden.device)
        history = torch.stack([speech.history for speech in speeches])
        for speech, latents in zip(speeches, self.flow(hidden, history, noise[0], GUIDANCE, noise[1:]), strict=True):
            speech.say(latents)
        return rows

    def slots(self) -> Iterator[Slot]:
        yield from self.embedding.slots("model.model.embed_tokens")
        yield from self.decoder.slots("model.model.")
        yield from self.flow.slots("flowloss.cfm.model.")
        yield from self.aggregator.slots("linear_proj_audio.")
        yield from self.end.slots("stop_head")
