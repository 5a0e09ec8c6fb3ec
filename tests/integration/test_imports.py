"""What a new process imports is a second or more of every start: only what its stage needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from running import HERE

HEAVY = ("torch", "torch._dynamo", "triton", "transformers", "fastapi", "pydantic", "httpx", "rich")
ENGINE = """
from weight_stages import decoder
decoder({folder!r}, engine={{"max_total_tokens": 512}})
"""


def imported(code: str) -> list[str]:
    """The heavy ones among the modules of a process that has run this."""
    told = f"import sys\nsys.path.insert(0, {HERE!r})\n{code}\nprint(*(m for m in {HEAVY} if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_a_worker_imports_what_its_stage_does(checkpoint: Path) -> None:
    assert imported("import sgl_omni.runtime.worker") == []
    assert imported(ENGINE.format(folder=str(checkpoint))) == ["torch"]


@pytest.mark.parametrize("stage", ["preprocessing", "vocoder"])
def test_a_stage_of_the_demo_voice_imports_what_it_needs(stage: str) -> None:
    build = f"""
import sgl_omni.runtime.worker
from sgl_omni.models.demo_voice.spec import resolve_folder
from sgl_omni.models.demo_voice.stages import create_{stage}
create_{stage}(str(resolve_folder("demo-voice")))
"""
    assert imported(build) == (["torch"] if stage == "vocoder" else [])
