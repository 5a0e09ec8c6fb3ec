"""Model folders of published size with random weights, as the smoke run on a GPU needs them."""

from __future__ import annotations

import json
import math
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

from sgl_omni.engine.checkpoint import Checkpoint, Slot
from sgl_omni.models.ming_omni_tts.model import MingModel
from sgl_omni.models.ming_omni_tts.pipeline import MingOmniTTSPipelineConfig
from sgl_omni.models.qwen3_asr.decoder import load_decoder
from sgl_omni.models.qwen3_asr.prompt import PromptWriter
from sgl_omni.models.qwen3_asr.spec import AUTHORS, AsrSpec
from sgl_omni.text.tokenizer import TextTokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.real_size import CONFIGS, make, rules_of
from benchmarks.sizes import draw
from benchmarks.sizes.draw import Rules, write_weights
from benchmarks.sizes.tensors import shapes_of

NO_RULES = Rules(zero_rows={}, constants={})
PUBLISHED = {
    "text_llm": {"": 4_022_468_096},
    "whisper": {"": 808_878_080},
    "moss_tts_local": {"audio_tokenizer": 2_123_701_248},
}
"""Numbers that the published checkpoints have in all."""
FAMILIES = [*PUBLISHED, "qwen3_asr", "ming_omni_tts", "ming_omni_tts_moe"]
SHAPES = {
    "norm.weight": (8,),
    "layers.0.mlp.experts.0.up_proj.weight": (6, 8),
    "layers.0.mlp.experts.1.up_proj.weight": (6, 8),
    "head.weight": (64, 8),
    "decision.weight": (2, 8),
}


shapes = cache(lambda family, layers, tiny: shapes_of(family, CONFIGS[family](layers, tiny)))


def load(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
    Checkpoint(folder).load(Slot(name, tensor, tuple(tensor.shape)) for name, tensor in tensors.items())
    return tensors


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_folder_has_as_many_numbers_as_the_published_one(family: str) -> None:
    counted = {part: sum(map(math.prod, found.values())) for part, found in shapes(family, None, False).items()}
    assert counted | PUBLISHED[family] == counted


@pytest.mark.parametrize(
    ("family", "published", "head"), [("ming_omni_tts", 494_032_768, 0), ("ming_omni_tts_moe", 16_801_974_272, 126464)]
)
def test_ming_speaks_with_language_models_of_published_size(family: str, published: int, head: int) -> None:
    """Qwen2.5-0.5B and Ling-lite; the head of the latter is not used in speech."""
    found = {name: shape for name, shape in shapes(family, None, False)[""].items() if name.startswith("model.model.")}
    assert sum(map(math.prod, found.values())) + head * 2048 == published


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_layers_and_a_small_model_have_fewer_numbers(family: str) -> None:
    def count(layers: int | None, tiny: bool) -> int:
        return sum(math.prod(shape) for shape in shapes(family, layers, tiny)[""].values())

    assert count(None, True) < count(2, False) < count(None, False)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_keeps_a_model_from_ending_is_in_its_folder(family: str) -> None:
    found, rules = shapes(family, None, False)[""], rules_of(family, CONFIGS[family](None, False))
    assert rules.zero_rows or rules.constants
    for name, rows in rules.zero_rows.items():
        assert max(rows) < found[name][0]
    for name, values in rules.constants.items():
        assert len(values) == found[name][0]


def test_weights_are_read_as_they_were_ruled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "BLOCK", 80)  # ten rows of the head at a time
    rules = Rules(zero_rows={"head.weight": (3, 63)}, constants={"decision.weight": (1.0, -1.0)})
    written = write_weights(tmp_path, SHAPES, rules, seed=1)
    assert (written.tensors, written.numbers, written.hole_bytes) == (5, 632, 0)
    found = load(tmp_path)
    assert torch.equal(found["norm.weight"], torch.ones(8))
    assert torch.equal(found["decision.weight"], torch.tensor([[1.0], [-1.0]]).expand(2, 8))
    zero = (found["head.weight"] == 0).all(1)
    assert zero.nonzero().flatten().tolist() == [3, 63]
    assert 0.2 < found["head.weight"].std() < 0.5


def test_shards_have_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "SHARD_BYTES", 400)
    write_weights(tmp_path, SHAPES, NO_RULES, seed=1)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 3
    assert all(torch.isfinite(tensor).all() for tensor in load(tmp_path).values())


def test_experts_beyond_what_may_be_drawn_are_zeros_that_take_no_room(tmp_path: Path) -> None:
    written = write_weights(tmp_path, SHAPES, NO_RULES, seed=1, drawn_bytes=632 * 2 - 96)
    assert (written.drawn_bytes, written.hole_bytes) == (1168, 96)
    found = load(tmp_path)
    assert not found["layers.0.mlp.experts.1.up_proj.weight"].any()
    assert found["layers.0.mlp.experts.0.up_proj.weight"].all()
    assert found["head.weight"].all()


def test_what_is_no_expert_must_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be drawn"):
        write_weights(tmp_path, SHAPES, NO_RULES, seed=1, drawn_bytes=632)


def test_a_rule_for_a_tensor_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tensors to rule: \['lm_head.weight'\]"):
        write_weights(tmp_path, SHAPES, Rules(zero_rows={"lm_head.weight": (1,)}, constants={}), seed=1)


def test_one_stage_gets_its_tensors_alone(tmp_path: Path) -> None:
    made = make("moss_tts_local", tmp_path, tiny=True, only=("audio_tokenizer/quantizer.",))
    assert made["written"]["."]["tensors"] == 0
    names = Checkpoint(tmp_path / "audio_tokenizer").names()
    assert names
    assert all(name.startswith("quantizer.") for name in names)


@pytest.mark.parametrize("family", ["ming_omni_tts", "ming_omni_tts_moe"])
def test_a_folder_of_ming_is_one_that_its_family_takes(family: str, tmp_path: Path) -> None:
    make(family, tmp_path, tiny=True)
    speech = MingOmniTTSPipelineConfig.tasks(str(tmp_path)).speech
    assert speech is not None and speech.sample_rate == 44100
    model = MingModel.load(tmp_path)
    states = torch.randn(5, 64)
    assert torch.equal(model.end(states), torch.tensor([[1.0, 0.0]]).expand(5, 2))  # it never ends by itself
    assert model.spec.patch * model.spec.vae.patch * model.spec.vae.hop / 44100 == 0.32


def test_a_folder_of_qwen3_asr_is_one_that_its_family_takes(tmp_path: Path) -> None:
    make("qwen3_asr", tmp_path, tiny=True)
    spec = AsrSpec.load(str(tmp_path))
    assert (spec.layout, spec.eos_ids, spec.audio_id) == (AUTHORS, (151643, 151645), 151676)
    assert load_decoder(spec).config.tied_embeddings
    assert (
        PromptWriter(TextTokenizer.load(tmp_path), spec.audio_id).write([], 3, "English").ids.tolist().count(151676)
        == 3
    )
