"""All stages of Qwen3-Omni on a GPU, in float32: what they write and speak is what transformers' whole model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_qwen3_omni as tiny
import torch
from qwen3_omni_reference import Reference, picture, tone, user
from test_qwen3_omni_stages import TOKENS, converse, prompt_of

from sgl_omni.models.qwen3_omni import stages
from sgl_omni.models.qwen3_omni.code2wav import Vocoder

pytestmark = pytest.mark.gpu

ASKED = {
    "text": user("hello", system="be brief"),
    "audio": user("what ", ("audio", [0]), media=[tone(1.3)]),
    "image": user(("image", [0]), "and", ("image", [1]), media=[picture(90, 60), picture(40, 150, 1)]),
    "video": user(("video", [0, 1, 2]), "now", media=[picture(90, 60, seed) for seed in range(3)]),
}


@pytest.fixture(autouse=True)
def whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions would round their inputs to TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.parametrize("graphs", [0, 8])
@pytest.mark.parametrize("chunk", [2048, 11])
def test_the_stages_together(tmp_path: Path, graphs: int, chunk: int) -> None:
    model = tiny.build(tmp_path, seed=1)
    tiny.write_processors(tmp_path)
    reference, folder = Reference(model, tmp_path), str(tmp_path)
    on_gpu: dict[str, Any] = {"gpu_id": 0, "device": "cuda:0"}
    engine = {
        "dtype": "float32",
        "max_total_tokens": 2048,
        "max_running_requests": 8,
        "cuda_graph_max_bs": graphs,
        "chunked_prefill_tokens": chunk,
    }
    preprocess = stages.create_preprocessing(folder).fn
    encoders = {
        "image_encoder": stages.create_image_encoder(folder, dtype="float32", **on_gpu).fn,
        "audio_encoder": stages.create_audio_encoder(folder, dtype="float32", **on_gpu).fn,
    }
    thinker = stages.create_thinker(folder, engine=engine, **on_gpu).engine
    talker = stages.create_talker(folder, engine=engine, **on_gpu).engine
    vocoder = stages.create_code2wav(folder, dtype="float32", **on_gpu)
    prompts = {name: prompt_of(preprocess, encoders, asked) for name, asked in ASKED.items()}
    said: dict[tuple[str, str], list[Any]] = {}
    for name, what, new in converse(thinker, talker, prompts):
        said.setdefault((name, what), []).extend(new)
    for name, asked in ASKED.items():
        expected = reference.answer(asked, tokens=TOKENS, frames=tiny.FRAMES)
        assert said[name, "tokens"] == [token for token in expected.token_ids if token != tiny.EOS]
        assert said[name, "codes"] == expected.codes
        state: Any = vocoder.open(None)  # type: ignore[arg-type]
        audio = [*vocoder.feed(state, {"codes": np.asarray(expected.codes)}), *vocoder.flush(state)]
        made = np.concatenate([chunk["audio"] for chunk in audio])
        assert np.abs(made - expected.audio).max() < 1e-3


@pytest.mark.parametrize(("rounded", "most"), [(False, 1e-4), (True, 1e-2)])
def test_windows_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounded: bool, most: float
) -> None:
    """Several at once, of several lengths, by kernels; against transformers' module on the CPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", rounded)
    tiny.build(tmp_path, seed=1)
    rng = np.random.default_rng(5)
    windows = [rng.integers(0, tiny.CODES, (tiny.GROUPS, frames)) for frames in (3, 40, 1, 17)]
    plain = Vocoder(tmp_path, "cpu", torch.float32)
    ours = Vocoder(tmp_path, "cuda:0", torch.float32)
    assert ours.lookahead == plain.lookahead
    for found, window in zip(ours.decode(windows), windows, strict=True):
        [expected] = plain.decode([window])
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() / np.abs(expected).max() < most
