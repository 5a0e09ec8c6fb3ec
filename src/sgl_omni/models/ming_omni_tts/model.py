"""The device side of Ming-Omni-TTS: a prompt and latents so far in, the next latents out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sgl_omni.engine.attention import Attend
from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.engine.decoder import Decoder
from sgl_omni.engine.kv_cache import KVShape
from sgl_omni.engine.layers import Embedding
from sgl_omni.engine.model import LoadedModel
from sgl_omni.engine.request import Chunk, Request
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.sampler import normal, seed_key, step_keys
from sgl_omni.engine.weights import SharePolicy, WeightStore
from sgl_omni.models.ming_omni_tts.blocks import TIMES, Aggregator, Flow, Linear
from sgl_omni.models.ming_omni_tts.files import ARCHITECTURE
from sgl_omni.models.ming_omni_tts.spec import SPEAKER_SIZE, MingSpec

SHARE_POLICY = SharePolicy(ARCHITECTURE)

GUIDANCE, STIRRING = 2.0, 0.25
"""As the model's authors sample: the weight of guidance, and of noise that a temperature above 0 adds to each step."""

_IGNORED = (
    "audio.*",
    "model.lm_head.weight",
    "model.model.layers.*.mlp.audio_gate.weight",
    "model.model.layers.*.mlp.image_gate.weight",
    "*.inv_freq",
)

_LEAST_STEPS = 4
"""The model may end its speech after one more than these."""


ENDS = 1
"""What a row begins with that ends the speech; others begin with 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Speech:
    """``heard`` float32 [history, latent_size]: what the flow looks back on at first, in the host's memory."""

    heard: Tensor
    speed: float


class MingModel(LoadedModel):
    """A row is ``ENDS`` where the speech ends with it, else 0, and the bits of its patch * latent_size float32.

    So outputs are ids for the engine, which hands them on to the next step. Device rows keep the history beside them.
    """

    def __init__(self, spec: MingSpec) -> None:
        super().__init__()
        self.spec = spec
        self.columns = 1 + spec.patch * spec.latent_size
        self.kept_shape = (spec.history, spec.latent_size)
        self.decoder = Decoder(spec.decoder)
        self.embedding = Embedding(spec.decoder.vocab_size, spec.decoder.hidden_size)
        self.flow = Flow(spec)
        self.aggregator = Aggregator(spec)
        self.end = Linear(spec.decoder.hidden_size, 2)
        self.speaker = Linear(SPEAKER_SIZE, spec.decoder.hidden_size)

    @classmethod
    def load(
        cls,
        folder: Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        weights: WeightStore | None = None,
    ) -> MingModel:
        """Reads a checkpoint but for the audio VAE, the unused text head, and the experts' gates for sound
        and pictures, as the published code chooses by the one for text.

        Its tensors live where ``weights`` says, in memory of their own by default.
        """
        checkpoint = Checkpoint(folder)
        with torch.device("meta"):
            model = cls(MingSpec.parse(checkpoint.config()))
        model.take_weights(
            checkpoint,
            weights,
            lambda: checkpoint.load(model.slots(), ignore=_IGNORED),
            device=device,
            dtype=dtype,
            policy=SHARE_POLICY,
        )
        return model

    @property
    def kv_shape(self) -> KVShape:
        return self.decoder.kv_shape

    @torch.inference_mode()
    def embed_prompt(self, ids: Tensor, speaker_at: int, latents: Tensor, speaker: Tensor | None = None) -> Tensor:
        """ids int64 [length], the place of a speaker or -1, a reference's latents [n * patch, latent_size], which
        follow, and the speaker's vector [192], or None for one that is not told -> float32 [length + n, hidden]."""
        x: Tensor = self.embedding(ids[:, None].to(self.device))
        if speaker_at >= 0:
            x[speaker_at] = 0 if speaker is None else self.speaker(speaker.to(x))
        if len(latents):
            heard = latents.to(x).unflatten(0, (-1, self.spec.patch))
            x = torch.cat([x, self.aggregator(heard)])
        return x.float().cpu()

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Of outputs; prompts are embedded already."""
        x: Tensor = self.aggregator(self.latents_of(ids).to(self.end.weight))
        return x

    def latents_of(self, rows: Tensor) -> Tensor:
        """Whole numbers [n, columns] -> float32 [n, patch, latent_size]"""
        return rows[:, 1:].to(torch.int32).contiguous().view(torch.float32).unflatten(1, (self.spec.patch, -1))

    def latents_said(self, request: Request, start: int = 0, stop: int | None = None) -> Tensor:
        """Of the request's outputs from ``start`` to ``stop``, of which there is one: float32 [n, patch, latent_size],
        in the host's memory."""
        return self.latents_of(torch.from_numpy(request.outputs.array(start, stop)))

    def history(self, request: Request) -> Tensor:
        """What the flow looks back on after the outputs so far: float32 [history, latent_size], in host memory."""
        heard: Tensor = request.task.heard
        if not request.outputs:
            return heard
        steps = math.ceil(self.spec.history / self.spec.patch)
        said = self.latents_said(request, max(0, len(request.outputs) - steps)).flatten(0, 1)
        return torch.cat([heard, said])[-self.spec.history :]

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
            start = max(chunk.start, split)
            if start < chunk.stop:
                said.append(
                    self.latents_said(request, start - request.prompt_length, chunk.stop - request.prompt_length)
                )
                places.extend(range(row + start - chunk.start, row + chunk.length))
            row += chunk.length
        if said:
            x[torch.tensor(places, device=x.device)] = self.aggregator(torch.cat(said).to(x))
        return x

    def forward(self, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden: Tensor = self.decoder(x, positions, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Whether the speech goes on or ends: [n, 1, 2]."""
        return self.end(hidden)[:, None]

    def rule(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        return _decided(logits, torch.tensor([len(request.outputs) for request in requests], device=logits.device))

    def rule_rows(self, logits: Tensor, state: RowState) -> Tensor:
        return _decided(logits, state.steps)

    def complete(self, rows: Tensor, hidden: Tensor, requests: Sequence[Request]) -> Tensor:
        seeds = torch.tensor([seed_key(request.sampling.seed) for request in requests], device=hidden.device)
        steps = torch.tensor([len(request.outputs) for request in requests], device=hidden.device)
        temperatures = torch.tensor([request.sampling.temperature for request in requests], device=hidden.device)
        history = torch.stack([self.history(request) for request in requests]).to(hidden.device)
        return _with_latents(rows, self._next_latents(hidden, history, step_keys(seeds, steps), temperatures))

    def finish_rows(self, ids: Tensor, hidden: Tensor, state: RowState) -> tuple[Tensor, None]:
        history = state.kept
        latents = self._next_latents(hidden, history, state.keys, state.temperatures)
        state.keep(torch.cat([history[:, self.spec.patch :], latents], 1))
        return _with_latents(ids, latents), None

    def begin_kept(self, request: Request) -> Tensor:
        return self.history(request)

    def _next_latents(self, hidden: Tensor, history: Tensor, keys: Tensor, temperatures: Tensor) -> Tensor:
        """Of n requests: float32 [n, patch, latent_size]."""
        shape = (len(TIMES), self.spec.patch, self.spec.latent_size)
        noise = normal(keys, math.prod(shape)).unflatten(1, shape).transpose(0, 1)
        stirring = noise[1:] * (STIRRING * temperatures.sqrt()[:, None, None])
        latents: Tensor = self.flow(hidden, history, noise[0], GUIDANCE, stirring)
        return latents

    def slots(self) -> Iterator[Slot]:
        yield from self.embedding.slots(f"model.model.{self.spec.decoder.names.embedding}")
        yield from self.decoder.slots("model.model.")
        yield from self.flow.slots("flowloss.cfm.model.")
        yield from self.aggregator.slots("linear_proj_audio.")
        yield from self.end.slots("stop_head")
        yield from self.speaker.slots("spk_head")


def _decided(logits: Tensor, steps: Tensor) -> Tensor:
    """Leaves one of the two outcomes, the likelier, whatever the temperature, which is the flow's."""
    ends = (logits[..., 1] > logits[..., 0]) & (steps[:, None] >= _LEAST_STEPS)
    return logits.masked_fill(torch.stack([ends, ~ends], -1), float("-inf"))


def _with_latents(rows: Tensor, latents: Tensor) -> Tensor:
    """int64 [n, 1] and float32 [n, patch, latent_size] -> whole rows int64 [n, columns]."""
    return torch.cat([rows, latents.contiguous().view(torch.int32).flatten(1).to(torch.int64)], 1)
