"""`sgl-omni config`, as typed."""

import json
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from sgl_omni.cli.config import app
from sgl_omni.cli.serve import command as serve
from sgl_omni.config.violations import PlanError

EXAMPLES = Path(__file__).parents[3] / "examples" / "configs"
REPLICAS = str(EXAMPLES / "demo_voice_replicas.yaml")
CPU = ("--platform", "cpu")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda p: p.stem)
def test_the_examples_resolve(path: Path) -> None:
    result = run("resolve", "--config", str(path), *CPU)
    assert result.exit_code == 0, result.output
    assert "GPU 0:" in result.output
    assert result.output.startswith(str(yaml.safe_load(path.read_text())["name"]))


def test_the_layout_of_the_replicas() -> None:
    output = run("resolve", "--config", REPLICAS, *CPU).output
    assert "GPU 0: tts_engine@r0 + tts_engine@r1 + vocoder" in output
    assert "75% declared (4 GiB)" in output


def test_without_a_gpu_the_size_is_unknown_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sgl_omni.cli.config.real_host", lambda: None)
    result = run("resolve", "--model-path", "demo-voice")
    assert "memory unknown" in result.stdout
    assert "no GPU here" in result.stderr


def test_the_plan_as_json() -> None:
    plan = json.loads(run("resolve", "--config", REPLICAS, "--show", "plan", *CPU).output)
    assert [i["name"] for i in plan["instances"]] == ["preprocessing", "tts_engine@r0", "tts_engine@r1", "vocoder"]


def test_the_shown_config_resolves_to_the_same_plan(tmp_path: Path) -> None:
    flags = ("--vocoder.gpu_memory_fraction", "none", "--vocoder.total_reserve_bytes", "1GiB", "--mps", "auto", *CPU)
    shown = run("resolve", "--config", REPLICAS, "--show", "config", *flags).output
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    assert yaml.safe_load(shown)["stages"]["vocoder"]["gpu_memory_fraction"] is None
    plans = [
        run("resolve", "--config", str(path), "--show", "plan", *options).output
        for path, options in ((REPLICAS, flags), (again, CPU))
    ]
    assert plans[0] == plans[1]


def test_diff_and_provenance() -> None:
    rows = json.loads(run("resolve", "--config", REPLICAS, "--show", "diff", "--format", "json", "--mps", "off").output)
    changed = {row["path"]: row["from"] for row in rows}
    assert changed["processes.tts_engine.num_replicas"].endswith("demo_voice_replicas.yaml:15")
    assert changed["mps"] == "--mps"
    assert "stages.vocoder.process" not in changed
    text = run("resolve", "--config", REPLICAS, "--show", "provenance").stdout
    assert "stages.vocoder.process: vocoder" in text
    assert "# default of DemoVoicePipelineConfig" in text


def test_a_refusal_exits_2_and_lists_everything() -> None:
    result = run("resolve", "--config", REPLICAS, "--vocoder.gpus", "1", "--tts_engine.gpu_memory_fraction", "0.6")
    assert result.exit_code == 2
    assert result.stderr.startswith("2 problems, nothing can start:\nPLAN-007 ")
    assert "write instead: gpu" in result.stderr
    result = run("resolve", "--config", REPLICAS, "--format", "json", "--mps", "always")
    assert result.exit_code == 2
    [violation] = json.loads(result.stdout)["violations"]
    assert violation["code"] == "PLAN-023"


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("devices: 0", "this host has 0 GPUs"),
        ("devices: x", "'devices' must be"),
        ("gpus: 2", "unknown key 'gpus'"),
        ("same_physical: 1", "lists of ordinals"),
        ("- 1", "a host is a mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_hosts_that_do_not_do(host: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "host.yaml").write_text(host)
    result = run("resolve", "--config", REPLICAS, "--host", str(tmp_path / "host.yaml"))
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_pretended_machine(tmp_path: Path) -> None:
    (tmp_path / "host.yaml").write_text("devices: 8\ndevice_memory: 80GiB\nmps_unsupported: true\ncpus: 64\n")
    flags = ("--host", str(tmp_path / "host.yaml"))
    assert "8 GPUs of 80 GiB" in run("resolve", "--config", REPLICAS, *flags).output
    assert run("resolve", "--config", REPLICAS, *flags, "--mps", "on").exit_code == 2


def test_a_picture() -> None:
    output = run("resolve", "--config", REPLICAS, "--format", "svg").stdout
    assert output.startswith("<svg")
    assert "tts_engine@r0" in output.replace("&#160;", " ")


@pytest.mark.parametrize("path", ["vocoder.gpu_memory_fraction", "--vocoder.gpu-memory-fraction"])
def test_explain_a_key_of_a_configuration(path: str) -> None:
    facts = json.loads(run("explain", path, "--config", REPLICAS, "--format", "json").output)
    assert facts["path"] == "stages.vocoder.gpu_memory_fraction"
    assert facts["value"] == 0.15
    assert facts["from"].endswith("demo_voice_replicas.yaml:11")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("mps", "CUDA MPS"),
        ("gpu", "stages.<stage>.gpu"),
        ("max_total_tokens", "stages.<stage>.engine.max_total_tokens"),
        ("processes", "<process>"),
        ("placement", "max_total_gpu_memory_fraction_per_gpu"),
        ("stages.x.engine", "kv_cache_bytes"),
    ],
)
def test_explain_without_a_configuration(path: str, says: str) -> None:
    result = run("explain", path)
    assert result.exit_code == 0
    assert says in result.output


def test_explain_what_is_not_there() -> None:
    result = run("explain", "processes.x.num_replica")
    assert result.exit_code == 2
    assert "write instead: num_replicas" in result.stderr


def test_the_json_schema_is_about_every_key() -> None:
    schema = json.loads(run("schema").output)
    assert set(schema["$defs"]) >= {"StageConfig", "NamedStageConfig", "ProcessConfig", "EngineConfig"}
    for definition in schema["$defs"].values():
        assert all("description" in field or "$ref" in field for field in definition["properties"].values())


def test_serve_refuses_what_resolve_refuses() -> None:
    flags = ["--config", REPLICAS, *CPU, "--processes.vocoder.cpu_cores", "9999", "--vocoder.gpu", "x"]
    with pytest.raises(PlanError) as refused:
        CliRunner().invoke(serve, flags, catch_exceptions=False)
    resolved = run("resolve", *flags)
    assert resolved.exit_code == 2
    assert str(refused.value) == resolved.stderr.partition("\n")[2].rstrip()


@pytest.mark.parametrize("command", [app.commands["resolve"], app.commands["explain"], serve])
@pytest.mark.parametrize("option", ["--config", "--model-path"])
def test_an_option_given_twice_with_two_values_is_refused(command: click.Command, option: str) -> None:
    result = CliRunner().invoke(command, ["mps", option, "a", option, "b"])
    assert result.exit_code == 2
    assert f"{option} is given as 'a' and 'b'" in result.stderr


def test_an_option_given_twice_alike_is_one() -> None:
    assert run("resolve", "--config", REPLICAS, "--config", REPLICAS, *CPU).exit_code == 0
