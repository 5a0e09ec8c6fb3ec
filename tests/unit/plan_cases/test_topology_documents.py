"""The output shown in the documents is what the commands print."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from sgl_omni.cli.config import app

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"```console\n\$ sgl-omni config (.*)\n((?:.*\n)*?)```")
SHOWN = [
    pytest.param(shlex.split(command), output, id=f"{name}: {command}")
    for name in ("topology.md", "config.md")
    for command, output in BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))
]


def test_there_are_examples() -> None:
    assert len(SHOWN) > 8


@pytest.mark.parametrize(("command", "output"), SHOWN)
def test_the_command_prints_what_is_shown(command: list[str], output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert CliRunner().invoke(app, command).output == output
