"""What several tests of the engine have in common."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import captured_steps, churn, one_thread

__all__ = ["captured_steps", "churn", "one_thread"]

sys.path.insert(0, str(Path(__file__).parent))  # tests of all families take the models of each family's own


@dataclass(frozen=True)
class TinyCheckpoint:
    """A random checkpoint on disk, and transformers' own model of it."""

    folder: Path
    reference: Any


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.Qwen3Config(
        vocab_size=131,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        initializer_range=0.3,
    )
    reference = transformers.Qwen3ForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("qwen3")
    reference.save_pretrained(folder)
    return TinyCheckpoint(folder, reference)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's checkpoint. Whoever changes a file of it puts it back."""

    from tiny_checkpoints import BUILDERS  # here, as it imports transformers

    @cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        BUILDERS[family](path)
        return path

    return folder
