"""docs/adding-a-model.md, followed to the letter: its files serve a checkpoint and say what transformers says, and what
it shows of a family that ships stands in that family's files."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from servers import ROOT, Server, serving

PAGE = ROOT / "docs" / "adding-a-model.md"
FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
PASSAGES = re.compile(r"^From `(models/[\w./]+)`:\n((?:\n```python\n.*?^```\n)+)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`((?:src|tests|models|engine|runtime|config)/[\w./]+?)(?:: [\w.]+)?`")
TEXT = "the bus arrived late"
LETTERS = "_ abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A VITS of random weights, as its authors publish it."""
    import torch
    from transformers import VitsConfig, VitsModel, VitsTokenizer

    folder = tmp_path_factory.mktemp("vits")
    (folder / "letters.json").write_text(json.dumps({letter: i for i, letter in enumerate(LETTERS)}))
    VitsTokenizer(folder / "letters.json", pad_token="_", phonemize=False).save_pretrained(folder)
    torch.manual_seed(0)
    config = VitsConfig(
        vocab_size=len(LETTERS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=16,
        flow_size=16,
        spectrogram_bins=9,
        upsample_initial_channel=16,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1]],
        prior_encoder_num_flows=1,
        prior_encoder_num_wavenet_layers=1,
        posterior_encoder_num_wavenet_layers=1,
        duration_predictor_num_flows=1,
        depth_separable_num_layers=1,
        depth_separable_channels=2,
    )
    VitsModel(config).eval().save_pretrained(folder)
    return folder


@pytest.fixture
def server(checkpoint: Path, tmp_path: Path, own_run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    files = dict(FILE.findall(PAGE.read_text(encoding="utf-8")))
    assert {*files} == {"mms_tts/pipeline.py", "mms_tts/stages.py", "mms.yaml"}
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.replace("CHECKPOINT", str(checkpoint)), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with serving("--config", "mms.yaml", "--platform", "cpu", run_folder=own_run_folder, cwd=tmp_path) as running:
        yield running


def test_what_is_shown_of_a_family_stands_in_its_files() -> None:
    page, source = PAGE.read_text(encoding="utf-8"), ROOT / "src" / "sgl_omni"
    shown = [(name, block) for name, blocks in PASSAGES.findall(page) for block in BLOCK.findall(blocks)]
    assert len(shown) + sum(name.endswith(".py") for name, _ in FILE.findall(page)) == len(BLOCK.findall(page))
    assert len(shown) >= 8
    for name, block in shown:
        assert block in (source / name).read_text(encoding="utf-8"), f"{name} no longer says:\n{block}"


def test_the_files_and_names_that_it_points_to_are_there() -> None:
    names = NAMED.findall(PAGE.read_text(encoding="utf-8"))
    assert len(names) > 20
    for name in names:
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "src" / "sgl_omni")), name


def expected(checkpoint: Path, text: str, seed: int) -> np.ndarray:
    import torch
    from transformers import AutoTokenizer, VitsModel

    model = VitsModel.from_pretrained(checkpoint).eval()
    ids = torch.tensor([AutoTokenizer.from_pretrained(checkpoint)(text)["input_ids"]])
    with torch.inference_mode():
        torch.manual_seed(seed)
        return model(ids).waveform[0].numpy()


async def test_the_page_as_it_is_written(server: Server, checkpoint: Path) -> None:
    def body(**fields: object) -> dict[str, object]:
        return {"model": "mms-tts", "input": TEXT, "response_format": "wav", **fields}

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/audio/speech", json=body(seed=s, stream=False)) for s in (1, 2, 1))
        )
        for seed, answer in zip((1, 2, 1), answers, strict=True):
            assert answer.status_code == 200, answer.text
            samples = np.frombuffer(answer.content[44:], np.int16) / 32767
            want = expected(checkpoint, TEXT, seed)
            assert len(samples) == len(want)
            np.testing.assert_allclose(samples, want.clip(-1, 1), atol=2e-4)
        faster = await client.post("/v1/audio/speech", json=body(seed=1, speed=2.0, stream=False))
        assert len(faster.content) - 44 == pytest.approx((len(answers[0].content) - 44) / 2, abs=4)
        refused = await client.post("/v1/audio/speech", json=body(input="12345 !"))
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "input"
