"""Short ways to read and plan a configuration written in a test."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import dedent
from typing import Any, ClassVar

from sgl_omni.config.load import resolve
from sgl_omni.config.resolved import ResolvedConfig
from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.violations import PlanError, Violation
from sgl_omni.config.yaml_source import read_yaml
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.builder import Planned, plan_config
from sgl_omni.topology.host import Host, cuda_host

GIB = 2**30


class SpeechPipelineConfig(PipelineConfig):
    """Three stages: the host, the engine on GPU 0, the vocoder on GPU 1."""

    engine_stages: ClassVar[tuple[str, ...]] = ("tts_engine",)
    default_stages: ClassVar[dict[str, dict[str, Any]]] = {
        "preprocessing": {"factory_path": "dummy.cpu_stage", "process": "front", "next": "tts_engine"},
        "tts_engine": {
            "factory_path": "dummy.engine",
            "process": "engine",
            "gpu": 0,
            "gpu_memory_fraction": 0.3,
            "next": "vocoder",
            "stream_to": ["vocoder"],
        },
        "vocoder": {
            "factory_path": "dummy.gpu_stage",
            "process": "vocoder",
            "gpu": 1,
            "gpu_memory_fraction": 0.2,
            "terminal": True,
        },
    }


FULL = """
stages:
  - {name: a, factory_path: dummy.cpu_stage, process: pa, next: b}
  - {name: b, factory_path: dummy.engine, process: pb, gpu: 0, gpu_memory_fraction: 0.3, next: c, engine: {}}
  - {name: c, factory_path: dummy.gpu_stage, process: pc, gpu: 0, gpu_memory_fraction: 0.2, terminal: true}
"""


def load(text: str, *flags: str, cls: type[PipelineConfig] | None = SpeechPipelineConfig) -> ResolvedConfig:
    return resolve(read_yaml(dedent(text), "f.yaml"), flags, registry=PipelineRegistry(), cls=cls)


def plan(
    text: str,
    *flags: str,
    cls: type[PipelineConfig] | None = SpeechPipelineConfig,
    host: Host | None = None,
    environ: Mapping[str, str] | None = None,
) -> Planned:
    return plan_config(load(text, *flags, cls=cls), host or cuda_host(None), environ or {})


def refusals(text: str, *flags: str, **options: Any) -> list[Violation]:
    """What is wrong; empty where the plan is accepted."""
    try:
        plan(text, *flags, **options)
    except PlanError as error:
        return list(error.violations)
    return []


def codes(text: str, *flags: str, **options: Any) -> list[str]:
    return [violation.code for violation in refusals(text, *flags, **options)]
