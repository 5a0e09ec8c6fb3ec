"""Configurations with something changed at random: each is planned, or refused with a code. Nothing else is raised."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from planning import FULL

from sgl_omni.cli.config import app
from sgl_omni.config.load import resolve
from sgl_omni.config.violations import PlanError
from sgl_omni.config.yaml_source import Document, read_yaml
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.topology.builder import plan_config
from sgl_omni.topology.host import cuda_host, virtual_host
from sgl_omni.topology.render import layout_text

ROOT = Path(__file__).parents[3]
EXAMPLES = [
    *sorted((ROOT / "examples" / "configs").glob("*.yaml")),
    ROOT / "examples" / "echo_pipeline" / "pipeline.yaml",
]
HOSTS = (cuda_host(None), cuda_host(4, 80 << 30), cuda_host(4, same_physical=[[0, 1]]), virtual_host())

JUNK: tuple[Any, ...] = (
    None,
    True,
    2.0,
    -1,
    0,
    10**30,
    "",
    "x",
    "2",
    [],
    {},
    [[]],
    {"a": {}},
    "a@r0",
    "4GiB",
    float("nan"),
)


TOKENS = (
    "null",
    "&a",
    "*a",
    "<<: *a",
    "!!int",
    "- ",
    "\t",
    "0x1F",
    ".nan",
    "1e400",
    "@",
    "\x00",
    "\u2028",
    "? ",
    "|",
    "%",
    "[[[",
    "}",
    "#",
    "9" * 5000,
)


def plan_and_draw(document: Document, rng: random.Random) -> None:
    try:
        made = plan_config(resolve(document, registry=PipelineRegistry()), rng.choice(HOSTS), {})
    except PlanError as error:
        assert error.violations
        assert all(v.code.startswith("PLAN-") and v.message for v in error.violations)
        return
    layout_text(made.plan, made.host, made.eligible)


def mutated(data: Any, rng: random.Random) -> Any:
    """A copy with one value replaced, removed or repeated under another key."""
    data = copy.deepcopy(data)
    node = data
    while isinstance(node, dict | list) and node:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not isinstance(node[key], dict | list) or rng.random() < 0.3:
            if rng.random() < 0.2:
                del node[key]
            elif isinstance(node, dict) and rng.random() < 0.2:
                node[rng.choice(["gpus", "name", "stages", "process", "engine", "x"])] = node[key]
            else:
                node[key] = rng.choice(JUNK)
            break
        node = node[key]
    return data


def scribbled(text: str, rng: random.Random) -> str:
    """The text with up to three places overwritten."""
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice([*TOKENS, "", chr(rng.randrange(32, 300))]) + text[at + rng.randint(0, 6) :]
    return text


@pytest.mark.parametrize("seed", range(4))
def test_mutated_configurations_are_planned_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    sources = [yaml.safe_load(FULL), {"model_path": "demo-voice", "stages": {"vocoder": {"gpu": 0}}, "mps": "auto"}]
    sources[0]["processes"] = {"pb": {"num_replicas": 2, "replica_devices": [0, 0], "cpu_cores": ["0", "1"]}}
    sources[0] |= {"fused_stages": [["a", "b"]], "weight_share": "on", "placement": {}, "name": "n"}
    for _ in range(300):
        data = rng.choice(sources)
        for _ in range(rng.randint(1, 3)):
            data = mutated(data, rng)
        plan_and_draw(Document("f", data), rng)


@pytest.mark.parametrize("seed", range(4))
def test_mutated_text_is_read_or_refused(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        text = scribbled(FULL, rng)
        plan_and_draw(read_yaml(text, "f.yaml"), rng)


VIEWS = ("layout", "layout", "config", "plan", "diff", "provenance")


def resolve_mutated_example(rng: random.Random, folder: Path) -> int:
    """`config resolve` of an example with something changed in its text or its values; the exit status."""
    text = rng.choice(EXAMPLES).read_text(encoding="utf-8")
    if rng.random() < 0.5:
        text = scribbled(text, rng)
    else:
        data = yaml.safe_load(text)
        for _ in range(rng.randint(1, 3)):
            data = mutated(data, rng)
        text = yaml.safe_dump(data)
    path = folder / "mutated.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    view = ["--show", rng.choice(VIEWS), "--format", rng.choice(["text", "json"])]
    result = CliRunner().invoke(
        app, ["resolve", "--config", str(path), "--platform", rng.choice(["cpu", "auto"]), *view]
    )
    assert result.exception is None or isinstance(result.exception, SystemExit), text
    assert result.exit_code in (0, 2), text
    if result.exit_code == 2:
        assert "PLAN-" in result.output
    return result.exit_code


@pytest.mark.parametrize("seed", range(4))
def test_mutated_examples_exit_with_0_or_2(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    statuses = [resolve_mutated_example(rng, tmp_path) for _ in range(60)]
    assert set(statuses) == {0, 2}
