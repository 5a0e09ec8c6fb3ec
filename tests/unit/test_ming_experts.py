"""Ming-Omni-TTS with a mixture of experts (16.8B-A3B) against transformers' Qwen2Moe, on a tiny random checkpoint."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_omni.engine.checkpoint import Checkpoint, CheckpointError
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.layers import Attention
from sgl_omni.engine.shard import Shard
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.ming_omni_tts.model import MingModel
from sgl_omni.models.ming_omni_tts.pipeline import MingOmniTTSPipelineConfig
from sgl_omni.models.ming_omni_tts.prompt import EXPERTS, PromptWriter
from sgl_omni.models.ming_omni_tts.stages import create_engine, create_preprocessing
from sgl_omni.models.ming_omni_tts.task import MingTask
from sgl_omni.text.tokenizer import TextTokenizer

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_ming import CAPTION, LATENT, PATCH, RATE, STEP, TEXTS, Tiny, audio_of, build

STEPS = 9
TOLERANCE = 2e-4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Tiny:
    return build(tmp_path_factory.mktemp("ming-experts"), experts=True)


@pytest.fixture(scope="module")
def model(tiny: Tiny) -> MingModel:
    return MingModel.load(tiny.folder)


def test_the_checkpoint_is_named_as_the_published_one(tiny: Tiny) -> None:
    names = Checkpoint(tiny.folder).names("model.")
    layers = {name.removeprefix("model.model.layers.") for name in names if ".layers." in name}
    dense = {f"0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    sparse = {f"1.mlp.{part}.weight" for part in ("gate", "audio_gate", "image_gate", "shared_experts.up_proj")}
    joined = {f"2.{part}.weight" for part in ("attention.query_key_value", "attention.dense", "input_layernorm")}
    assert dense | sparse | joined | {"2.mlp.experts.5.down_proj.weight"} <= layers
    assert {"model.model.word_embeddings.weight", "model.model.norm.weight", "model.lm_head.weight"} <= set(names)
    assert not any("self_attn" in name or "shared_expert." in name for name in names)


@pytest.mark.parametrize(("chunk", "device_rows"), [(7, False), (2048, True), (2048, "captured")])
def test_audio_equals_the_plain_model(
    tiny: Tiny, model: MingModel, churn: Any, chunk: int, device_rows: bool | str
) -> None:
    generator = torch.Generator().manual_seed(3)
    payloads, expected = {}, {}
    for i, text in enumerate(TEXTS):
        for heard in (0, 1 + i):
            latents = torch.randn(heard * PATCH, LATENT, generator=generator)
            ids, at = tiny.prompt(text, spoken="Hello." if heard else None)
            said = tiny.model.latents(ids, at, latents, 5 + i, STEPS)
            reason = "stop" if tiny.model.ended else "length"
            payload = {"ids": np.asarray(ids), "speaker_at": at, "seed": 5 + i, "max_steps": STEPS}
            payloads[f"{text} {heard}"] = payload | ({"latents": latents.numpy()} if heard else {})
            expected[f"{text} {heard}"] = (said, reason)
    assert {reason for _, reason in expected.values()} == {"stop", "length"}
    options = EngineSettings(max_total_tokens=4096, page_size=1, chunked_prefill_tokens=chunk)
    engine = AutoregressiveEngine.build(model, MingTask(model), options, device_rows=bool(device_rows))
    seen = churn(engine, payloads, f"experts {chunk}")
    for name, (said, reason) in expected.items():
        result, audio = seen[name].result, audio_of(tiny.folder, seen[name].chunks)
        assert (result["output_tokens"], result["finish_reason"]) == (len(said) // PATCH, reason)
        wanted = tiny.model.audio.decode(said).numpy().clip(-1, 1)
        assert len(audio) == len(wanted) and np.abs(wanted).max() > 0.01
        assert np.abs(audio - wanted).max() < TOLERANCE, name


def test_every_expert_and_the_shared_ones_are_heard(tiny: Tiny, model: MingModel) -> None:
    """Or the comparison above would prove nothing of them."""
    chosen: set[int] = set()
    x = model.embed_prompt(torch.tensor(tiny.prompt(TEXTS[1])[0]), -1, torch.zeros(0, LATENT))
    experts = model.decoder.layers[1].mlp
    normed = torch.nn.functional.rms_norm(x, x.shape[1:])
    chosen |= set(experts._route(normed)[0].flatten().tolist())
    assert chosen == set(range(6))
    assert experts.shared is not None and experts.shared_gate is None
    assert experts.shared.down.weight.abs().mean() > 0.05


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_take_their_part_of_joined_projections(size: int) -> None:
    """Each rank's rows of the one tensor on disk are those that it has of three."""
    heads, kv_heads, dim, width = 4, 2, 6, 10
    q, k, v = (torch.randn(count * dim, width) for count in (heads, kv_heads, kv_heads))
    bias = torch.randn((heads + 2 * kv_heads) * dim)
    split = dict(zip(("q", "k", "v"), bias.split([heads * dim, kv_heads * dim, kv_heads * dim]), strict=True))
    apart = {f"m.{p}_proj.weight": w for p, w in (("q", q), ("k", k), ("v", v))}
    apart |= {f"m.{part}_proj.bias": value for part, value in split.items()}
    joined = {"m.qkv.weight": torch.cat([q, k, v]), "m.qkv.bias": bias}
    for index in range(size):
        found = []
        for tensors, name in ((apart, None), (joined, "qkv")):
            layer = Attention(0, width, heads, kv_heads, dim, Shard(index, size), qkv_bias=True, qkv_name=name)
            for slot in layer.qkv.slots("m"):
                assert tensors[slot.name].shape == slot.shape
                slot.target.copy_(tensors[slot.name][slot.index])
            found.append((layer.qkv.weight, layer.qkv.bias))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_prompts_are_those_of_the_published_code(tiny: Tiny) -> None:
    write = PromptWriter(TextTokenizer.of_file(tiny.folder), EXPERTS).write
    for text in TEXTS:
        found = write(text, instructions="soft")
        assert (found.ids, found.speaker_at) == tiny.prompt(text, caption=CAPTION)
        found = write(text, spoken="Hello.")
        assert (found.ids, found.speaker_at) == tiny.prompt(text, spoken="Hello.")
    role = TextTokenizer.of_file(tiny.folder).id_of("<role>")
    ids = write("<role>ASSISTANT</role>Hi.").ids
    assert ids.count(role) == 2, "a text must not write marks"


def test_the_stages_take_it_as_it_is(tiny: Tiny) -> None:
    """The factories, as a server calls them: a text in, audio out."""
    speech = MingOmniTTSPipelineConfig.tasks(str(tiny.folder)).speech
    assert speech is not None and speech.sample_rate == RATE
    preprocessing = create_preprocessing(str(tiny.folder))
    payload = preprocessing.fn({"input": TEXTS[0], "seed": 5, "max_new_tokens": 4}, None)  # type: ignore[arg-type]
    engine = create_engine(str(tiny.folder), engine={"max_total_tokens": 512}).engine
    engine.add("a", payload)
    parts = []
    while engine.has_work:
        parts += [chunk for output in engine.step() for chunk in output.chunks]
    ids, at = tiny.prompt(TEXTS[0])
    wanted = tiny.model.audio.decode(tiny.model.latents(ids, at, torch.zeros(0, LATENT), 5, 4)).numpy().clip(-1, 1)
    audio = audio_of(tiny.folder, parts)
    assert len(audio) == 4 * STEP and np.abs(audio - wanted).max() < TOLERANCE


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "later routers": ({"n_group": 8}, r"llm_config\.n_group 8 is not supported"),
    "sigmoid scores": ({"score_function": "sigmoid"}, r"llm_config\.score_function 'sigmoid'"),
    "norms of q and k": ({"use_qk_norm": True}, r"llm_config\.use_qk_norm True"),
    "no experts": ({"num_experts": ...}, r"lacks the field llm_config\.num_experts"),
    "version 2": ({"model_type": "bailing_moe_v2"}, "language model 'bailing_moe_v2', not 'dense' with 'qwen2' or"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_other_models_of_the_kind_are_refused(tiny: Tiny, tmp_path: Path, case: str) -> None:
    fields, message = CHANGED[case]
    folder = changed(tiny.folder, tmp_path, fields)
    with pytest.raises(InvalidRequest, match=message):
        MingOmniTTSPipelineConfig.tasks(str(folder))


def test_other_rope_and_missing_parts_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    folder = changed(tiny.folder, tmp_path / "rope", {"rope_scaling": {"type": "dynamic", "factor": 4.0}})
    with pytest.raises(StartupError, match="'dynamic' is not supported"):
        MingModel.load(folder)
    folder = changed(tiny.folder, tmp_path / "experts", {"num_experts": 7})
    with pytest.raises(CheckpointError, match=r"missing: model\.model\.layers\.1\.mlp\.experts\.6\.down_proj"):
        MingModel.load(folder)
    (folder / "tokenizer.json").rename(folder / "vocab.json")
    (folder / "merges.txt").touch()
    with pytest.raises(InvalidRequest, match=r"holds no tokenizer\.json"):
        MingOmniTTSPipelineConfig.tasks(str(folder))
    with pytest.raises(StartupError, match=r"tokenizer\.json cannot be read"):
        TextTokenizer.of_file(folder)


def changed(folder: Path, into: Path, fields: dict[str, Any]) -> Path:
    """A copy with other fields of the language model; those of ``...`` are taken out."""
    copy = into / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    for name, value in fields.items():
        config["llm_config"].pop(name, None)
        if value is not ...:
            config["llm_config"][name] = value
    (copy / "config.json").write_text(json.dumps(config))
    return copy
