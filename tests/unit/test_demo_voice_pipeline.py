"""What the pipeline declares, without loading the model."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from sgl_omni.errors import InvalidRequest
from sgl_omni.models.demo_voice.pipeline import DemoVoicePipelineConfig
from sgl_omni.models.demo_voice.spec import PACKAGED_WEIGHTS


def test_the_model_id_resolves_to_the_packaged_weights() -> None:
    assert DemoVoicePipelineConfig.resolve_model_path("demo-voice") == str(PACKAGED_WEIGHTS)
    with pytest.raises(InvalidRequest, match="another-model"):
        DemoVoicePipelineConfig.resolve_model_path("another-model")


def test_the_speech_task_names_the_voices() -> None:
    task = DemoVoicePipelineConfig.tasks("demo-voice").speech
    assert task is not None
    assert (task.voices, task.default_voice, task.sample_rate) == (("slt", "rms", "awb", "kal16"), "rms", 16000)


def test_every_factory_exists() -> None:
    for stage in DemoVoicePipelineConfig.default_stages.values():
        module, _, name = stage["factory_path"].rpartition(".")
        assert callable(getattr(importlib.import_module(module), name))


def test_declaring_the_pipeline_imports_no_torch() -> None:
    code = "import sys, sgl_omni.models.demo_voice.pipeline; print('torch' in sys.modules)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "False"
