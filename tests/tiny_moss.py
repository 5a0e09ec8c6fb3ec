"""A tiny MOSS-TTS-Local with its audio tokenizer: a checkpoint in real format, and a plain model of the same.

The model here is written from the published description, one request at a time and without any cache: transformers'
Qwen3 as the backbone, and for every code a whole pass of the local transformer; the codec sees whole recordings. Its
modules have the names that the tensors have on disk.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

BOOKS, CODES, WIDTH = 4, 24, 32
CODEC_BOOKS, FRAME, RATE, CHANNELS = 6, 12, 8000, 2
TEXTS = ("Good morning.", "The bus arrived ten minutes late.", "Why?", "One, two, three, four.", "äöü 你好")
SPECIALS = ("<|im_start|>", "<|im_end|>", "<|heard|>", "<|spoken|>", "<|audio_start|>", "<|audio_end|>")


@dataclass(frozen=True)
class Tiny:
    """``folder`` holds the checkpoint, ``model`` and ``codec`` are the plain ones, ``ids`` the special tokens'."""

    folder: Path
    model: PlainMoss
    codec: PlainCodec
    ids: dict[str, int]
    tokenizer: Any

    def prompt(
        self, text: str, codes: Tensor | None = None, language: str = "None", instruction: str = "None"
    ) -> Tensor:
        """The rows int64 [length, 1 + BOOKS] that a processor of the model writes."""

        def written(text: str) -> Tensor:
            return rows(self.tokenizer.encode(text, add_special_tokens=False))

        def rows(ids: list[int]) -> Tensor:
            return torch.tensor([[i, *[CODES] * BOOKS] for i in ids], dtype=torch.int64).view(-1, 1 + BOOKS)

        ids = self.ids
        if codes is None:
            heard = written("None")
        else:
            frames = torch.cat([torch.full((len(codes), 1), ids["<|heard|>"]), codes], 1)
            heard = torch.cat([rows([ids["<|audio_start|>"]]), frames, rows([ids["<|audio_end|>"]])])
        fields = (
            f"\n- Instruction:\n{instruction}\n- Tokens:\nNone\n- Quality:\nNone\n- Sound Event:\nNone"
            f"\n- Ambient Sound:\nNone\n- Language:\n{language}\n- Text:\n"
        )
        parts = [
            rows([ids["<|im_start|>"]]),
            written("user\n"),
            written("<user_inst>\n- Reference(s):\n"),
            heard,
            written(fields),
            written(text),
            written("\n</user_inst>"),
            rows([ids["<|im_end|>"]]),
            written("\n"),
            rows([ids["<|im_start|>"]]),
            written("assistant\n"),
            rows([ids["<|audio_start|>"]]),
        ]
        return torch.cat(parts)

    def spoken(self, prompt: Tensor, frames: int) -> np.ndarray:
        """Samples of the greedy answer, the channels averaged."""
        codes = self.model.generate(prompt, frames)
        return self.codec.decode(codes).mean(0).numpy()


class PlainLayer(nn.Module):
    """As in GPT-2, with rotary positions of neighbouring pairs in place of learned ones."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH, eps=1e-6), nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(WIDTH, 3 * WIDTH), "c_proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"fc_in": nn.Linear(WIDTH, 48), "fc_out": nn.Linear(48, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p.view(len(x), self.heads, -1).transpose(0, 1) for p in self.attn["c_attn"](self.ln_1(x)).split(WIDTH, 1)
        )
        q, k = turned(q, 1e6), turned(k, 1e6)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
        x = x + self.attn["c_proj"]((scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), WIDTH))
        return x + self.mlp["fc_out"](F.silu(self.mlp["fc_in"](self.ln_2(x))))


class PlainMoss(nn.Module):
    def __init__(self, backbone: Any, slot: int, end: int) -> None:
        super().__init__()
        self.slot, self.end = slot, end
        self.transformer = backbone
        self.local_transformer = nn.ModuleDict(
            {"h": nn.ModuleList(PlainLayer(4) for _ in range(2)), "ln_f": nn.LayerNorm(WIDTH, eps=1e-6)}
        )
        self.audio_embeddings = nn.ModuleList(nn.Embedding(CODES, WIDTH) for _ in range(BOOKS))
        self.local_text_lm_head = nn.Linear(WIDTH, 2, bias=False)

    def embed(self, rows: Tensor) -> Tensor:
        x = self.transformer.embed_tokens(rows[:, 0])
        for book, table in enumerate(self.audio_embeddings):
            codes = rows[:, 1 + book]
            x = x + torch.where((codes != CODES)[:, None], table(codes.clamp(max=CODES - 1)), 0.0)
        return x

    def local(self, x: Tensor) -> Tensor:
        for layer in self.local_transformer["h"]:
            x = layer(x)
        return self.local_transformer["ln_f"](x)[-1]

    @torch.no_grad()
    def generate(self, prompt: Tensor, frames: int) -> Tensor:
        """The most likely codes int64 [at most frames, BOOKS]."""
        rows, spoken = prompt, []
        while len(spoken) < frames:
            hidden = self.transformer(inputs_embeds=self.embed(rows)[None]).last_hidden_state[0, -1:]
            if int(self.local_text_lm_head(self.local(hidden)).argmax()) == 1:
                break
            x, codes = hidden, []
            for table in self.audio_embeddings:
                codes.append(int((table.weight @ self.local(x)).argmax()))
                x = torch.cat([x, table.weight[codes[-1]][None]])
            spoken.append(codes)
            rows = torch.cat([rows, torch.tensor([[self.slot, *codes]])])
        return torch.tensor(spoken, dtype=torch.int64).view(-1, BOOKS)


class PlainCodecLayer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int, context: int) -> None:
        super().__init__()
        self.heads, self.context = heads, context
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attn = nn.ModuleDict(
            {"in_proj": nn.Linear(width, 3 * width, bias=False), "out_proj": nn.Linear(width, width, bias=False)}
        )
        self.ffn = nn.Sequential(nn.Linear(width, inner, bias=False), nn.GELU(), nn.Linear(inner, width, bias=False))
        self.layer_scale_1, self.layer_scale_2 = PlainScale(width), PlainScale(width)

    def forward(self, x: Tensor) -> Tensor:
        n, width = x.shape
        q, k, v = self.self_attn["in_proj"](self.norm1(x)).view(n, 3, self.heads, -1).permute(1, 2, 0, 3)
        q, k = turned(q, 10000.0), turned(k, 10000.0)
        distance = torch.arange(n)[:, None] - torch.arange(n)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill((distance < 0) | (distance >= self.context), float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(n, width)
        x = x + self.layer_scale_1(self.self_attn["out_proj"](mixed))
        return x + self.layer_scale_2(self.ffn(self.norm2(x)))


class PlainScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class PlainTransformer(nn.Module):
    def __init__(self, block: dict[str, Any], rate: float) -> None:
        super().__init__()
        width = block["d_model"]
        context = round(rate * block["context_duration"])
        self.input_proj = nn.Linear(block["input_dimension"], width, bias=False)
        self.output_proj = nn.Linear(width, block["output_dimension"], bias=False)
        sizes = (width, block["num_heads"], block["dim_feedforward"], context)
        self.transformer = nn.ModuleDict(
            {"layers": nn.ModuleList(PlainCodecLayer(*sizes) for _ in range(block["num_layers"]))}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.input_proj(x)
        for layer in self.transformer["layers"]:
            x = layer(x)
        return self.output_proj(x)


class PlainPatch(nn.Module):
    def __init__(self, size: int, down: bool) -> None:
        super().__init__()
        self.size, self.down = size, down

    def forward(self, x: Tensor) -> Tensor:
        x = x.T  # [channels, places]
        channels, places = x.shape
        if self.down:
            return x.reshape(channels, -1, self.size).permute(0, 2, 1).reshape(channels * self.size, -1).T
        return x.reshape(channels // self.size, self.size, places).permute(0, 2, 1).reshape(-1, places * self.size).T


class PlainBook(nn.Module):
    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.in_proj, self.out_proj = weight_norm(nn.Conv1d(size, dim, 1)), weight_norm(nn.Conv1d(dim, size, 1))
        self.codebook = nn.Embedding(CODES, dim)

    def of(self, codes: Tensor) -> Tensor:
        return self.out_proj(self.codebook(codes).T[None])[0].T

    def nearest(self, x: Tensor) -> Tensor:
        found = F.normalize(self.in_proj(x.T[None])[0].T)
        return torch.cdist(found, F.normalize(self.codebook.weight)).argmin(1)


class PlainCodec(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        rate = float(RATE * CHANNELS)
        halves = {}
        for name in ("encoder", "decoder"):
            blocks: list[nn.Module] = []
            for block in config[f"{name}_kwargs"]:
                if block["module_type"] == "Transformer":
                    blocks.append(PlainTransformer(block, rate))
                    continue
                blocks.append(PlainPatch(block["patch_size"], name == "encoder"))
                rate = rate / block["patch_size"] if name == "encoder" else rate * block["patch_size"]
            halves[name] = nn.ModuleList(blocks)
        self.encoder, self.decoder = halves["encoder"], halves["decoder"]
        sizes = config["quantizer_kwargs"]
        self.quantizer = nn.ModuleDict(
            {
                "input_proj": weight_norm(nn.Conv1d(sizes["input_dim"], sizes["rvq_dim"], 1)),
                "output_proj": weight_norm(nn.Conv1d(sizes["rvq_dim"], sizes["output_dim"], 1)),
                "quantizers": nn.ModuleList(
                    PlainBook(sizes["rvq_dim"], sizes["codebook_dim"]) for _ in range(CODEC_BOOKS)
                ),
            }
        )

    @torch.no_grad()
    def encode(self, samples: Tensor) -> Tensor:
        """float32 [CHANNELS, samples] -> codes int64 [frames, BOOKS]."""
        frames = samples.shape[1] // FRAME
        padded = F.pad(samples, (0, -samples.shape[1] % FRAME))
        x = padded.T.reshape(-1, 1)
        for block in self.encoder:
            x = block(x)
        left, codes = self.quantizer["input_proj"](x.T[None])[0].T, []
        for book in self.quantizer["quantizers"][:BOOKS]:
            codes.append(book.nearest(left))
            left = left - book.of(codes[-1])
        return torch.stack(codes, 1)[:frames]

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """int64 [frames, BOOKS] -> float32 [CHANNELS, frames * FRAME]."""
        x = sum(self.quantizer["quantizers"][i].of(codes[:, i]) for i in range(BOOKS))
        x = self.quantizer["output_proj"](x.T[None])[0].T
        for block in self.decoder:
            x = block(x)
        return x.view(-1, CHANNELS).T


def turned(x: Tensor, theta: float) -> Tensor:
    """x [heads, n, head_dim]: neighbouring elements are the parts of a complex number, which is turned."""
    size = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None] * theta ** -(torch.arange(0, size, 2) / size)
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def build(folder: Path) -> Tiny:
    """Writes the checkpoint, its audio tokenizer in a folder of its own within it, and reads nothing back."""
    import transformers

    torch.manual_seed(11)
    tokenizer = write_tokenizer(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIALS}
    backbone = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
    )
    model = PlainMoss(transformers.Qwen3Model(backbone), ids["<|spoken|>"], ids["<|audio_end|>"]).eval()
    scatter(model, 0.35)
    with torch.no_grad():  # sharp attention and small embeddings, so that what was said matters more than the last row
        for layer in model.transformer.layers:
            layer.self_attn.q_norm.weight.uniform_(2, 4)
            layer.self_attn.k_norm.weight.uniform_(2, 4)
            layer.self_attn.o_proj.weight.mul_(2)
        for layer in model.local_transformer["h"]:
            layer.ln_1.weight.uniform_(1, 3)
        for table in model.audio_embeddings:
            table.weight.normal_(0, 0.6)
    tiny = Tiny(folder, model, write_codec(folder / "codec"), ids, tokenizer)
    balance(tiny)
    config = {
        "architectures": ["MossTTSLocalModel"],
        "model_type": "moss_tts_local",
        "qwen3_config": json.loads(backbone.to_json_string(use_diff=False)),
        "gpt2_config": {
            "n_embd": WIDTH,
            "n_layer": 1,
            "n_head": 4,
            "n_inner": 48,
            "activation_function": "silu",
            "layer_norm_epsilon": 1e-6,
            "position_embedding_type": "rope",
            "rope_base": 1e6,
        },
        "local_transformer_layers": 2,
        "local_text_head_mode": "binary",
        "n_vq": BOOKS,
        "audio_vocab_size": CODES,
        "audio_codebook_sizes": [CODES] * BOOKS,
        "audio_pad_token_id": CODES,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "audio_start_token_id": ids["<|audio_start|>"],
        "audio_end_token_id": ids["<|audio_end|>"],
        "audio_user_slot_token_id": ids["<|heard|>"],
        "audio_assistant_slot_token_id": ids["<|spoken|>"],
        "sampling_rate": RATE,
        "audio_tokenizer_name_or_path": "codec",
    }
    save(folder, config, {**model.state_dict(), "text_lm_head.weight": model.transformer.embed_tokens.weight})
    return tiny


def balance(tiny: Tiny) -> None:
    """Turns the decision's head so that most frames have another after them, and not all."""
    model, begun = tiny.model, []
    head = model.local_text_lm_head.weight
    with torch.no_grad():
        head.zero_()  # of equal outcomes the first, another frame, is taken
        for text in TEXTS[:3]:
            prompt = tiny.prompt(text)
            codes = model.generate(prompt, 8)
            rows = torch.cat([prompt, torch.cat([torch.full((8, 1), model.slot), codes], 1)])
            hidden = model.transformer(inputs_embeds=model.embed(rows)[None]).last_hidden_state[0]
            begun += [model.local(hidden[i : i + 1]) for i in range(len(prompt) - 1, len(rows))]
        states = torch.stack(begun)
        mean = states.mean(0)
        head[1] = torch.randn(WIDTH)
        head[1] -= mean * (head[1] @ mean) / (mean @ mean)
        spread = (states @ head[1]).std()
        head[1] -= mean / (mean @ mean) * spread * 2.0


def write_codec(folder: Path) -> PlainCodec:
    def transformer(inside: int, outside: int, seconds: float, layers: int = 1) -> dict[str, Any]:
        return {
            "module_type": "Transformer",
            "input_dimension": inside,
            "output_dimension": outside,
            "d_model": 16,
            "num_heads": 2,
            "num_layers": layers,
            "dim_feedforward": 24,
            "causal": True,
            "norm": "layer_norm",
            "positional_embedding": "rope",
            "max_period": 10000,
            "gating": "none",
            "layer_scale": 0.01,
            "conv_layout": True,
            "context_duration": seconds,
        }

    def patch(size: int) -> dict[str, Any]:
        return {"module_type": "PatchedPretransform", "patch_size": size}

    frame = FRAME / RATE
    config = {
        "model_type": "moss-audio-tokenizer",
        "sampling_rate": RATE,
        "downsample_rate": FRAME,
        "number_channels": CHANNELS,
        "enable_channel_interleave": True,
        "encoder_kwargs": [patch(6), transformer(6, 5, 3 * frame), patch(4), transformer(20, 12, 5 * frame, 2)],
        "decoder_kwargs": [transformer(12, 20, 5 * frame, 2), patch(4), transformer(5, 6, 3 * frame), patch(6)],
        "quantizer_type": "rlfq",
        "quantizer_kwargs": {
            "input_dim": 12,
            "rvq_dim": 8,
            "output_dim": 12,
            "num_quantizers": CODEC_BOOKS,
            "codebook_size": CODES,
            "codebook_dim": 3,
            "quantizer_type": "rlfq",
        },
    }
    codec = PlainCodec(config).eval()
    scatter(codec, 0.3)
    folder.mkdir()
    save(folder, config, codec.state_dict())
    return codec


def scatter(module: nn.Module, spread: float) -> None:
    """Weights far from those that a new model has, so that all of them matter."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" in name or "ln_" in name or "scale" in name or "original0" in name:
                parameter.uniform_(0.4, 1.2)
            else:
                parameter.normal_(0, spread)


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )


def write_tokenizer(folder: Path) -> Any:
    """Of bytes, with merges of what the prompts say, as Qwen's tokenizer is."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS, "user assistant Reference Instruction Language None None None"], trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    tokenizer.save_pretrained(folder)
    return tokenizer


def recording(seconds: float, channels: int = 1, rate: int = RATE) -> bytes:
    """A file of noise."""
    import soundfile

    file = io.BytesIO()
    samples = np.random.default_rng(0).normal(0, 0.1, (round(seconds * rate), channels)).astype(np.float32)
    soundfile.write(file, samples, rate, format="WAV", subtype="FLOAT")
    return file.getvalue()
