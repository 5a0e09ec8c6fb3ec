"""A tiny checkpoint of every family, in the format of the published ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_csm
import tiny_higgs
import tiny_ming
import tiny_moss
import tiny_qwen3_asr
import tiny_qwen3_omni
import tiny_qwen3_tts
import tiny_text_llm
import tiny_whisper

from sgl_omni.models.demo_voice.spec import PACKAGED_WEIGHTS

BUILDERS: dict[str, Callable[[Path], Any]] = {
    "csm": lambda folder: tiny_csm.build(folder, 8),
    "demo_voice": lambda folder: shutil.copytree(PACKAGED_WEIGHTS, folder, dirs_exist_ok=True),
    "higgs_v2": tiny_higgs.save_v2,
    "higgs_v3": tiny_higgs.save_v3,
    "ming": tiny_ming.build,
    "ming_experts": lambda folder: tiny_ming.build(folder, experts=True),
    "moss": tiny_moss.build,
    "qwen3_asr": tiny_qwen3_asr.build,
    "qwen3_asr_new": lambda folder: tiny_qwen3_asr.build(folder, authors=False),
    "qwen3_omni": lambda folder: (tiny_qwen3_omni.build(folder), tiny_qwen3_omni.write_processors(folder)),
    "qwen3_tts": lambda folder: tiny_qwen3_tts.build(folder, "base"),
    "text_llm": tiny_text_llm.build,
    "text_llm_moe": lambda folder: tiny_text_llm.build(folder, "Qwen3Moe"),
    "whisper": tiny_whisper.build,
}
