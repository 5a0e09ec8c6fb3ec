"""Runs the pipeline without HTTP: `python -m examples.echo_pipeline.run "some words"` in the project's folder."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sgl_omni.config.load import load_config
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import virtual_host


async def main(text: str) -> None:
    config = load_config(Path(__file__).parent / "pipeline.yaml", registry=PipelineRegistry())
    async with Pipeline(build_plan(config, virtual_host())) as pipeline:
        result = await pipeline.submit({"text": text}).result()
        print(result["echo"]["text"])


if __name__ == "__main__":
    asyncio.run(main(" ".join(sys.argv[1:]) or "hello out there"))
