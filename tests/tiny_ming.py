"""A tiny Ming-Omni-TTS: a checkpoint in real format, and a plain model of the same.

The model is written from the published description, one request at a time: transformers' Qwen2 as the language model
and in the audio VAE, everything again in each step, and recordings decoded whole. Its modules have the names on disk.

With ``experts`` the language model is of the kind of Ming-omni-tts-16.8B-A3B, for which transformers has no class. Its
Qwen2Moe computes the same where the gate of the shared expert is zero, which counts that expert half, and the expert's
last weights are twice those on disk; ``bailing_tensors`` renames and joins the tensors as they lie there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

WIDTH, LATENT, PATCH, HISTORY = 32, 6, 2, 5
RATE, HOP, VAE_PATCH = 8000, 8, 4
STEP = PATCH * VAE_PATCH * HOP
SPEAKER_RATE, BANDS = 16000, 80
TEXTS = ("Good morning.", "The bus arrived ten minutes late.", "Why?", "äöü 你好")
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<audio>",
    "<audioPatch>",
)
EXPERT_SPECIALS = ("<|endoftext|>", "<role>", "</role>", "<spk>", "</spk>", "<audio>", "<audioPatch>")
CAPTION = (
    '{"audio_sequence": [{"序号": 1, "说话人": "speaker_1", "方言": null, "风格": "soft", "语速": null, "基频": null, '
    '"音量": null, "情感": null, "BGM": {"Genre": null, "Mood": null, "Instrument": null, "Theme": null, "ENV": null, '
    '"SNR": null}, "IP": null}]}'
)


class PlainNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class PlainBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = PlainNorm(width), PlainNorm(width)
        self.attn = nn.ModuleDict({name: nn.Linear(width, width) for name in ("to_q", "to_k", "to_v")})
        self.attn["to_out"] = nn.ModuleList([nn.Linear(width, width)])
        gelu = nn.GELU(approximate="tanh")
        inner = nn.Sequential(nn.Linear(width, 2 * width), gelu)
        self.mlp = nn.ModuleDict({"ff": nn.Sequential(inner, nn.Identity(), nn.Linear(2 * width, width))})

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        q, k, v = (
            self.attn[name](normed).view(len(x), self.heads, -1).transpose(0, 1) for name in ("to_q", "to_k", "to_v")
        )
        q, k = turned(q), turned(k)
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + self.attn["to_out"][0]((scores @ v).transpose(0, 1).reshape(x.shape))
        return x + self.mlp["ff"](self.norm2(x))


class PlainBlocks(nn.Module):
    def __init__(self, width: int, depth: int, out: int) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(LATENT, width)
        self.blocks = nn.ModuleList(PlainBlock(width, 2) for _ in range(depth))
        self.final_layer = nn.ModuleDict({"norm_final": PlainNorm(width), "linear": nn.Linear(width, out)})

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.final_layer["linear"](self.final_layer["norm_final"](x))


class PlainAggregator(PlainBlocks):
    def __init__(self) -> None:
        super().__init__(16, 2, WIDTH)
        self.word_embedder = nn.Embedding(1, 16)

    def forward(self, latents: Tensor) -> Tensor:
        return self.run(torch.cat([self.word_embedder.weight, self.x_embedder(latents)]))[0]


class PlainFlow(PlainBlocks):
    def __init__(self) -> None:
        super().__init__(24, 2, LATENT)
        self.t_embedder = nn.ModuleDict({"time_mlp": nn.Sequential(nn.Linear(256, 24), nn.SiLU(), nn.Linear(24, 24))})
        self.c_embedder = nn.ModuleDict({"cond_embedder": nn.Linear(WIDTH, 24)})

    def field(self, x: Tensor, time: float, state: Tensor, history: Tensor) -> Tensor:
        frequencies = torch.exp(-math.log(10000) / 127 * torch.arange(128))
        angles = 1000 * time * frequencies
        y = self.t_embedder["time_mlp"](torch.cat([angles.sin(), angles.cos()])) + self.c_embedder["cond_embedder"](
            state
        )
        return self.run(torch.cat([y[None], self.x_embedder(history), self.x_embedder(x)]))[-PATCH:]

    def sample(self, state: Tensor, history: Tensor, noise: Tensor, temperature: float) -> Tensor:
        x = noise[0]
        times = torch.tensor([0, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32]) / 32
        times = times - (torch.cos(torch.pi / 2 * times) - 1 + times)
        for i in range(10):
            told = self.field(x, float(times[i]), state, history)
            untold = self.field(x, float(times[i]), torch.zeros_like(state), history)
            length = times[i + 1] - times[i]
            x = x + length * (told + 2.0 * (told - untold))
            if i < 9:
                x = x + 0.25 * temperature**0.5 * length**0.5 * noise[1 + i]
        return x


class PlainVae(nn.Module):
    def __init__(self, backbone: Any, layers: Any) -> None:
        super().__init__()
        import transformers

        made = transformers.Qwen2Model
        self.encoder = nn.ModuleDict(
            {
                "encoder": made(backbone),
                "aggregator": made(layers(4)),
                "fc1": nn.Linear(HOP, WIDTH, bias=False),
                "fc2": nn.Linear(WIDTH, WIDTH),
                "fc3": nn.Linear(WIDTH, 2 * LATENT),
                "norm": nn.LayerNorm(WIDTH),
            }
        )
        self.encoder.cls_embed = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.decoder = nn.ModuleDict(
            {
                "decoder": made(layers(2)),
                "fc1": nn.Linear(LATENT, WIDTH),
                "head": nn.ModuleDict({"out": nn.Linear(WIDTH, 4 * HOP + 2), "istft": nn.Module()}),
            }
        )
        self.decoder["head"]["istft"].register_buffer("window", torch.hann_window(4 * HOP))

    @torch.no_grad()
    def encode(self, samples: Tensor, noise: Tensor) -> Tensor:
        frames = F.pad(samples, (0, -len(samples) % HOP)).view(-1, HOP)
        x = self.encoder["fc2"](self.encoder["fc1"](frames))
        x = self.encoder["encoder"](inputs_embeds=x[None]).last_hidden_state[0]
        x = F.pad(x, (0, 0, 0, -len(x) % VAE_PATCH)).view(-1, VAE_PATCH, WIDTH)
        x = torch.cat([x, self.encoder.cls_embed.expand(len(x), 1, WIDTH)], 1).reshape(1, -1, WIDTH)
        x = self.encoder["aggregator"](inputs_embeds=x).last_hidden_state[0].view(-1, VAE_PATCH + 1, WIDTH)[:, -1]
        mean, scale = self.encoder["fc3"](x).chunk(2, -1)
        return mean + (F.softplus(scale) + 1e-4) * noise

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """The whole recording, by torch's own inverse transform."""
        x = self.decoder["fc1"](latents)
        x = F.interpolate(x.T[None], scale_factor=VAE_PATCH, mode="linear", align_corners=False)[0].T
        x = self.decoder["decoder"](inputs_embeds=x[None]).last_hidden_state[0]
        size, phase = self.decoder["head"]["out"](x).chunk(2, -1)
        frames = torch.fft.irfft(size.exp().clamp(max=100) * torch.exp(1j * phase), 4 * HOP)
        window = self.decoder["head"]["istft"].window
        audio, weight = (torch.zeros((len(frames) + 3) * HOP) for _ in range(2))
        for i, frame in enumerate(frames):
            audio[i * HOP : (i + 4) * HOP] += frame * window
            weight[i * HOP : (i + 4) * HOP] += window**2
        edge = 3 * HOP // 2
        return (audio / weight.clamp(min=1e-11))[edge:-edge]


class PlainSpeakers:
    """Stands for CAM++: how a net of one layer is filled over the frames of a recording, on average, projected.

    Its features come from Kaldi's own code, by a library that needs no torch.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(11)
        self.inner = torch.randn(BANDS, 16, generator=generator) * 0.2
        self.outer = torch.randn(16, 192, generator=generator) * 2

    def vector(self, samples: np.ndarray) -> Tensor:
        features = kaldi_features(samples)
        filled = torch.relu(torch.from_numpy(features - features.mean(0)) @ self.inner)
        return filled.mean(0) @ self.outer

    def save(self, file: Path, *, bands: int = BANDS, size: int = 192) -> None:
        """As an ONNX file, whose names are those of the published export."""
        import onnx
        from onnx import TensorProto, helper, numpy_helper

        weights = {"inner": self.inner[:bands].numpy(), "outer": self.outer[:, :size].numpy()}
        nodes = [
            helper.make_node("MatMul", ["input", "inner"], ["projected"]),
            helper.make_node("Relu", ["projected"], ["filled"]),
            helper.make_node("ReduceMean", ["filled"], ["mean"], axes=[1], keepdims=0),
            helper.make_node("MatMul", ["mean", "outer"], ["output"]),
        ]
        graph = helper.make_graph(
            nodes,
            "speakers",
            [helper.make_tensor_value_info("input", TensorProto.FLOAT, ["batch", "frames", bands])],
            [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["batch", size])],
            [numpy_helper.from_array(array, name) for name, array in weights.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
        onnx.checker.check_model(model)
        onnx.save(model, str(file))


def kaldi_features(samples: np.ndarray) -> np.ndarray:
    """float32 [samples] at 16 kHz -> [frames, 80]"""
    import kaldi_native_fbank as kaldi

    options = kaldi.FbankOptions()
    options.frame_opts.dither = 0
    options.mel_opts.num_bins = BANDS
    bank = kaldi.OnlineFbank(options)
    bank.accept_waveform(SPEAKER_RATE, samples)
    bank.input_finished()
    return np.stack([bank.get_frame(i) for i in range(bank.num_frames_ready)])


class PlainMing(nn.Module):
    def __init__(self, model: Any, vae: PlainVae) -> None:
        super().__init__()
        self.model, self.audio = model, vae
        self.linear_proj_audio = PlainAggregator()
        self.flowloss = nn.ModuleDict({"cfm": nn.ModuleDict({"model": PlainFlow()})})
        self.stop_head = nn.Linear(WIDTH, 2)
        self.spk_head = nn.Linear(192, WIDTH)

    @torch.no_grad()
    def latents(
        self,
        ids: list[int],
        speaker_at: int,
        heard: Tensor,
        seed: int,
        steps: int,
        temperature: float = 0.0,
        speaker: Tensor | None = None,
    ) -> Tensor:
        """Ids and the reference's latents [n * PATCH, LATENT] -> latents [steps * PATCH, LATENT]; ``ended`` says
        whether the model ended them itself."""
        x = self.model.model.embed_tokens(torch.tensor(ids))
        if speaker_at >= 0:
            x[speaker_at] = 0 if speaker is None else self.spk_head(speaker)
        x = torch.cat([x, *(self.linear_proj_audio(part)[None] for part in heard.split(PATCH) if len(part))])
        history, said = torch.cat([torch.zeros(HISTORY, LATENT), heard])[-HISTORY:], []
        self.ended = False
        for step in range(steps):
            state = self.model.model(inputs_embeds=x[None]).last_hidden_state[0, -1]
            noise = noise_of(seed, step)
            said.append(self.flowloss["cfm"]["model"].sample(state, history, noise, temperature))
            if step > 3 and self.stop_head(state).softmax(-1)[1] > 0.5:
                self.ended = True
                break
            x = torch.cat([x, self.linear_proj_audio(said[-1])[None]])
            history = torch.cat([history, said[-1]])[-HISTORY:]
        return torch.cat(said)


def noise_of(seed: int, step: int) -> Tensor:
    """The random numbers are the engine's to choose: of a seed and a step, whatever else runs."""
    from sgl_omni.engine.sampler import normal, seed_key, step_keys

    keys = step_keys(torch.tensor([seed_key(seed)]), torch.tensor([step]))
    return normal(keys, 11 * PATCH * LATENT).view(11, PATCH, LATENT)


def audio_of(folder: Path, chunks: Iterable[dict[str, Any]], **options: Any) -> np.ndarray:
    """What the vocoder stage, as a server makes it, says to an engine's chunks."""
    from sgl_omni.models.ming_omni_tts.stages import create_vocoder

    return speak(create_vocoder(str(folder), **options), chunks)


def speak(vocoder: Any, chunks: Iterable[dict[str, Any]]) -> np.ndarray:
    state = vocoder.open(SimpleNamespace(id="r", aborted=False))
    try:
        made = [piece for chunk in chunks for piece in vocoder.feed(state, chunk)]
        made += vocoder.flush(state)
    finally:
        vocoder.close(state)
    assert {piece["sample_rate"] for piece in made} <= {RATE}
    return np.concatenate([np.zeros(0, np.float32), *(piece["audio"] for piece in made)])


def turned(x: Tensor) -> Tensor:
    size = x.shape[-1]
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** -(torch.arange(0, size, 2) / size)
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(numbers * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@dataclass(frozen=True)
class Tiny:
    folder: Path
    model: PlainMing
    tokenizer: Any
    experts: bool = False

    def prompt(
        self, text: str, spoken: str | None = None, caption: str | None = None, *, speaker: bool = False
    ) -> tuple[list[int], int]:
        """Ids and the place of the speaker, as the published code puts them together."""
        encode, experts = self.tokenizer.encode, self.experts
        begins, holds, ends = "<|vision_start|>", "<|vision_pad|>", "<|vision_end|>\n"
        if experts:
            begins, holds, ends = "<spk>", "<audioPatch>", "</spk>\n"
            ids = encode("<role>HUMAN</role>")
        else:
            ids = encode("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n") + encode("<|im_start|>user\n")
        ids += encode("Please generate speech based on the following description.\n")
        at = -1
        if speaker or spoken is None:
            ids += encode("  speaker_1:") + encode(begins)
            at = len(ids)
            ids += encode(holds) + encode(ends)
        ids += encode(" Text input:\n") + encode(spoken or "") + encode(text)
        if experts:
            ids += encode("<role>ASSISTANT</role>")
        else:
            ids += encode("<|im_end|>\n") + encode("<|im_start|>assistant\n")
        if caption is not None:
            ids += encode(caption) + encode("<|endoftext|>")
        return ids + encode("<audio>"), at


def build(folder: Path, *, experts: bool = False, speakers: bool = False, windowed_layers: int = 1) -> Tiny:
    """``speakers``: with the ONNX file of `PlainSpeakers`. ``windowed_layers``: of the two that each half of the audio
    VAE has, the last."""
    import transformers

    torch.manual_seed(7)
    tokenizer = write_tokenizer(folder, EXPERT_SPECIALS if experts else SPECIALS)

    def backbone(layers: int, **options: Any) -> Any:
        return transformers.Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            **options,
        )

    def windowed(layers: int) -> Any:
        config = backbone(layers, use_sliding_window=True, sliding_window=7, max_window_layers=2 - windowed_layers)
        config._attn_implementation = "eager"
        return config

    vae = PlainVae(windowed(2), windowed)
    plain = mixed(tokenizer) if experts else transformers.Qwen2ForCausalLM(backbone(2, tie_word_embeddings=True))
    model = PlainMing(plain, vae).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.25)
        # A strong field would enlarge rounding from step to step.
        model.flowloss["cfm"]["model"].final_layer["linear"].weight.mul_(0.25)
        vae.decoder["head"]["out"].weight.mul_(0.5)
        for name, parameter in model.named_parameters():
            if "shared_expert_gate" in name:
                parameter.zero_()
    balance(Tiny(folder, model, tokenizer, experts))
    said = {"latent_dim": LATENT}
    config = {
        "architectures": ["BailingMMNativeForConditionalGeneration"],
        "model_type": "bailingmm" if experts else "dense",
        "llm_config": BAILING | {"vocab_size": len(tokenizer)} if experts else as_json(model.model.config),
        "ditar_config": {
            "hidden_size": 24,
            "depth": 2,
            "num_heads": 2,
            "mlp_ratio": 2.0,
            "patch_size": PATCH,
            "history_patch_size": HISTORY,
        },
        "aggregator_config": {"hidden_size": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0},
        "audio_tokenizer_config": {
            "sample_rate": RATE,
            "patch_size": VAE_PATCH,
            "enc_kwargs": {**said, "backbone": as_json(windowed(2)), "input_dim": HOP, "hop_size": HOP},
            "dec_kwargs": {**said, "backbone": as_json(windowed(2)), "output_dim": HOP},
            "semantic_module_kwargs": None,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {n: t.detach().clone().contiguous() for n, t in model.state_dict().items() if n != "model.lm_head.weight"}
    save_file(bailing_tensors(tensors) if experts else tensors, folder / "model.safetensors")
    if speakers:
        PlainSpeakers().save(folder / "campplus.onnx")
    return Tiny(folder, model, tokenizer, experts)


BAILING = {
    "model_type": "bailing_moe",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 600000,
    "rope_scaling": {"type": "3D", "factor": None},
    "max_position_embeddings": 512,
    "first_k_dense_replace": 1,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "num_shared_experts": 2,
    "norm_topk_prob": True,
    "multi_gate": True,
    "norm_head": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
}


def mixed(tokenizer: Any) -> Any:
    """The language model that ``BAILING`` says, as transformers' Qwen2Moe."""
    import transformers

    copied = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    copied += ("rms_norm_eps", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    config = transformers.Qwen2MoeConfig(
        vocab_size=len(tokenizer),
        shared_expert_intermediate_size=2 * 12,
        mlp_only_layers=[0],
        qkv_bias=False,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 600000.0},
        tie_word_embeddings=True,  # so that there is no head to leave on disk; the model has no use for one
        **{name: BAILING[name] for name in copied},
    )
    return transformers.Qwen2MoeForCausalLM(config)


def bailing_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As BailingMoe's lie on disk; with gates for sound and pictures, which are not used in speech."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith("model.model."):
            found[name] = tensor
        elif "embed_tokens" in name:
            found[name.replace("embed_tokens", "word_embeddings")] = tensor
        elif name.endswith("q_proj.weight"):
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            found[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif name.endswith("o_proj.weight"):
            found[name.replace("self_attn.o_proj", "attention.dense")] = tensor
        elif name.endswith("experts.gate_up_proj"):
            for i, expert in enumerate(tensor):
                for part, weight in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                    found[name.replace("gate_up_proj", f"{i}.{part}.weight")] = weight.clone()
        elif name.endswith("experts.down_proj"):
            for i, weight in enumerate(tensor):
                found[name.replace("down_proj", f"{i}.down_proj.weight")] = weight.clone()
        elif ".shared_expert." in name:
            half = 0.5 if "down_proj" in name else 1.0
            found[name.replace("shared_expert", "shared_experts")] = tensor * half
        elif name.endswith("mlp.gate.weight"):
            found |= {name: tensor, **{name.replace("gate.", f"{k}_gate."): -tensor for k in ("audio", "image")}}
        elif not name.endswith(("k_proj.weight", "v_proj.weight", "shared_expert_gate.weight")):
            found[name] = tensor
    found["model.lm_head.weight"] = torch.zeros(found["model.model.word_embeddings.weight"].shape)
    return found


def as_json(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string(use_diff=False))


def balance(tiny: Tiny) -> None:
    """Sharp attention, and a head of the end that is as often above as below a half."""
    model = tiny.model
    with torch.no_grad():
        for layer in model.model.model.layers:
            layer.self_attn.q_proj.weight.mul_(1.5)
        model.stop_head.weight.mul_(0.0)
        model.stop_head.bias.copy_(torch.tensor([1.0, 0.0]))
        states: list[Tensor] = []
        hook = model.stop_head.register_forward_pre_hook(lambda _, given: states.append(given[0].clone()))
        for i, text in enumerate(TEXTS):
            ids, at = tiny.prompt(text)
            model.latents(ids, at, torch.zeros(0, LATENT), i, 10)
        hook.remove()
        found = torch.stack(states)
        direction = torch.randn(WIDTH)
        sizes = found @ direction
        model.stop_head.weight[1] = direction
        model.stop_head.bias.copy_(torch.tensor([0.0, float(-sizes.mean() - 0.8 * sizes.std())]))


def write_tokenizer(folder: Path, specials: tuple[str, ...]) -> Any:
    """With ``EXPERT_SPECIALS``, its class is said to be code of the model's authors."""
    import tokenizers
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(specials),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([*TEXTS, "You are a helpful assistant user speech based description"], trainer)
    end = "<|endoftext|>" if specials is EXPERT_SPECIALS else "<|im_end|>"
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end)
    tokenizer.save_pretrained(folder)
    if specials is EXPERT_SPECIALS:
        own = {"AutoTokenizer": ["tokenization_bailing.BailingTokenizer", None]}
        config = {"tokenizer_class": "BailingTokenizer", "auto_map": own, "eos_token": end, "add_bos_token": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer
