"""Replicas that share weights, as real processes on the CPU platform."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from safetensors.torch import load_file

from running import Start, children, eventually
from servers import ROOT, Server, serving
from sgl_omni.config.load import load_config
from sgl_omni.errors import ProcessExited, StartupError
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.runtime.pipeline import Pipeline
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import virtual_host
from sgl_omni.topology.plan import Plan

CONFIG = """
model_path: {model}
weight_share: {share}
on_process_exit: {on_exit}
stages:
  - name: llm
    factory_path: weight_stages.{factory}
    factory: {arguments}
    process: llm
    gpu: 0
    gpu_memory_fraction: 0.2
    engine: {{max_total_tokens: 512}}
    terminal: true
processes:
  llm: {{num_replicas: {replicas}, replica_devices: {devices}}}
"""
PROMPTS = [[i, 3 * i % 97, 7, i + 1] for i in range(1, 9)]


def plan_for(folder: Path, checkpoint: Path, **changes: Any) -> Plan:
    values = {
        "model": checkpoint,
        "share": "on",
        "on_exit": "restart",
        "factory": "decoder",
        "arguments": "{}",
        "devices": "[0, 0]",
        **changes,
    }
    values["replicas"] = values["devices"].count(",") + 1
    path = folder / "share.yaml"
    path.write_text(CONFIG.format(**values))
    return build_plan(load_config(path, [], registry=PipelineRegistry()), virtual_host(4 * 2**30, os.cpu_count()))


async def ask(pipeline: Pipeline, prompt: list[int], **fields: Any) -> dict[str, Any]:
    result = await pipeline.submit({"prompt_ids": prompt, "max_new_tokens": 12, **fields}).result()
    found: dict[str, Any] = result["llm"]
    return found


async def answers(pipeline: Pipeline) -> list[list[int]]:
    """Each prompt to each of two replicas in turn."""
    return [(await ask(pipeline, prompt))["token_ids"] for prompt in PROMPTS for _ in range(2)]


def instances(pipeline: Pipeline) -> dict[str, dict[str, Any]]:
    return {i["name"]: i for i in pipeline.health()["instances"]}


def shared(pipeline: Pipeline, name: str) -> dict[str, Any]:
    found: dict[str, Any] = instances(pipeline)[name]["weights"]["models"]["llm"]
    return found


def mapped(pid: int, name: str = "sgl-omni-weights") -> dict[str, int]:
    """Bytes of a process's mappings of the weights: Rss, Pss, Private_Dirty, ... and their Size."""
    total: dict[str, int] = {}
    inside = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            inside = name in line
            assert not inside or words[1].startswith("r--"), f"the weights can be written: {line}"
        elif inside and words[-1] == "kB":
            total[words[0][:-1]] = total.get(words[0][:-1], 0) + int(words[1]) * 1024
    return total


@pytest.fixture(scope="module")
def unshared() -> list[list[int]]:
    """Filled by the first test that compares."""
    return []


@pytest.fixture
async def expected(start: Start, tmp_path: Path, checkpoint: Path, unshared: list[list[int]]) -> list[list[int]]:
    """What two replicas answer that share nothing."""
    if unshared:
        return unshared
    pipeline = await start(plan_for(tmp_path, checkpoint, share="off"))
    assert {i["weights"]["role"] for i in instances(pipeline).values()} == {"own"}
    found = await answers(pipeline)
    await pipeline.stop(drain_timeout=0)
    assert len({tuple(tokens) for tokens in found}) == len(PROMPTS)
    unshared.extend(found)
    return unshared


async def test_shared_replicas_answer_the_same_from_one_set_of_weights(
    start: Start, tmp_path: Path, checkpoint: Path, expected: list[list[int]]
) -> None:
    pipeline = await start(plan_for(tmp_path, checkpoint))
    assert await answers(pipeline) == expected
    size = sum(tensor.nbytes for tensor in load_file(checkpoint / "model.safetensors").values())
    found = instances(pipeline)
    assert [found[f"llm@r{i}"]["weights"]["role"] for i in range(2)] == ["leader", "follower"]
    assert [shared(pipeline, f"llm@r{i}")["attached"] for i in range(2)] == [False, True]
    assert {shared(pipeline, name)["bytes"] for name in found} == {size}
    assert {i["kv_capacity_tokens"]["llm"] for i in found.values()} == {512}
    memory = [mapped(i["pid"]) for i in found.values()]
    assert all(size <= m["Size"] < 1.01 * size for m in memory)
    assert all(m["Rss"] > 0.7 * size for m in memory), "the weights were not used from there"
    assert sum(m["Pss"] for m in memory) < 1.01 * size, "the weights are in memory more than once"
    assert all(m["Private_Dirty"] + m["Private_Clean"] < 0.2 * size for m in memory)


async def starting_shared(start: Start, folder: Path, checkpoint: Path, **fields: Any) -> asyncio.Task[Pipeline]:
    """A start in which both replicas have come to their weights, and the leader waits for `go` before it loads any."""
    plan = plan_for(folder, checkpoint, arguments=f"{{gate: {folder}}}")
    task = asyncio.ensure_future(start(plan, **fields))
    await eventually(lambda: task.done() or len(list(folder.glob("asks-*"))) == 2)
    assert not task.done()
    return task


def let_go(folder: Path, message: str = "") -> None:
    (folder / "going").write_text(message)
    (folder / "going").rename(folder / "go")


async def test_a_follower_starts_with_its_leader_and_waits_for_the_weights_alone(
    start: Start, tmp_path: Path, checkpoint: Path, expected: list[list[int]]
) -> None:
    starting = await starting_shared(start, tmp_path, checkpoint)
    await asyncio.sleep(0.5)
    assert not starting.done()
    let_go(tmp_path)
    pipeline = await starting
    assert await answers(pipeline) == expected
    leader, follower = (shared(pipeline, f"llm@r{i}") for i in range(2))
    assert not leader["attached"] and follower["attached"]
    assert follower["waited"] > max(0.4, leader["waited"]), "it was there, and waited"
    for name, found in instances(pipeline).items():
        times, model = found["start"], shared(pipeline, name)
        assert (times["wait"], times["weights"]) == (model["waited"], model["seconds"])
        assert times["seconds"] == pytest.approx(times["imports"] + times["build"], abs=0.01)
        assert times["build"] > times["wait"] + times["weights"] > 0 and times["imports"] > 0
    os.kill(instances(pipeline)["llm@r1"]["pid"], signal.SIGKILL)
    await eventually(lambda: instances(pipeline)["llm@r1"]["restarts"] == 1 and pipeline.status == "ready")
    assert shared(pipeline, "llm@r1")["waited"] < follower["waited"], "a follower that comes back finds what was kept"


async def test_a_leader_that_fails_ends_the_start_by_its_own_message(
    start: Start, tmp_path: Path, checkpoint: Path
) -> None:
    before = children()
    starting = await starting_shared(start, tmp_path, checkpoint)
    let_go(tmp_path, "the disk is gone")
    with pytest.raises(StartupError, match=r"stage 'llm' \(llm@r0\) could not be built: OSError\('the disk is gone'\)"):
        await starting
    assert children() <= before


async def test_a_follower_that_dies_while_it_waits_fails_the_start(
    start: Start, tmp_path: Path, checkpoint: Path
) -> None:
    before = children()
    starting = await starting_shared(start, tmp_path, checkpoint)
    pids = {name: pid for pid in children() - before if (name := name_of(pid))}
    os.kill(pids["llm@r1"], signal.SIGKILL)
    with pytest.raises(StartupError, match=r"instance 'llm@r1' was killed by SIGKILL .* before it was ready"):
        await starting
    assert children() <= before


def name_of(pid: int) -> str:
    """The instance that a worker's command line names; empty for other processes."""
    words = psutil.Process(pid).cmdline()
    return words[words.index("--name") + 1] if "--name" in words else ""


async def test_a_start_that_is_given_up_while_a_follower_waits_leaves_nothing(
    start: Start, tmp_path: Path, checkpoint: Path
) -> None:
    before = children()
    starting = await starting_shared(start, tmp_path, checkpoint)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() <= before


async def test_the_time_of_a_follower_does_not_count_while_it_waits(
    start: Start, tmp_path: Path, checkpoint: Path
) -> None:
    starting = await starting_shared(start, tmp_path, checkpoint, startup_timeout=12)
    with pytest.raises(StartupError, match=r"not ready within 12 s:\n  'llm@r0'") as info:
        await starting
    assert "llm@r1" not in str(info.value)


async def test_a_replica_alone_on_its_gpu_has_weights_of_its_own(
    start: Start, tmp_path: Path, checkpoint: Path
) -> None:
    pipeline = await start(plan_for(tmp_path, checkpoint, devices="[0, 1, 0]"))
    found = instances(pipeline)
    roles = {name: i["weights"]["role"] for name, i in found.items()}
    assert roles == {"llm@r0": "leader", "llm@r1": "own", "llm@r2": "follower"}
    assert not mapped(found["llm@r1"]["pid"]) and mapped(found["llm@r2"]["pid"])
    tokens = [(await ask(pipeline, PROMPTS[0]))["token_ids"] for _ in range(3)]
    assert tokens[0] == tokens[1] == tokens[2]


async def test_two_groups_share_apart(start: Start, tmp_path: Path, checkpoint: Path) -> None:
    pipeline = await start(plan_for(tmp_path, checkpoint, devices="[0, 1, 0, 1]"))
    attached = {name: shared(pipeline, name)["attached"] for name in instances(pipeline)}
    assert attached == {"llm@r0": False, "llm@r1": False, "llm@r2": True, "llm@r3": True}


async def test_a_follower_that_writes_dies_and_harms_nobody(
    start: Start, tmp_path: Path, checkpoint: Path, expected: list[list[int]]
) -> None:
    pipeline = await start(plan_for(tmp_path, checkpoint))
    await ask(pipeline, PROMPTS[0])  # to r0, so that the next goes to r1
    with pytest.raises(ProcessExited, match=r"'llm@r1' .* was killed by SIGSEGV"):
        await ask(pipeline, PROMPTS[0], write=True)
    assert (await ask(pipeline, PROMPTS[0]))["token_ids"] == expected[0]
    await eventually(lambda: pipeline.status == "ready", 60)
    assert await answers(pipeline) == expected


@pytest.mark.parametrize("victim", ["llm@r0", "llm@r1"])
async def test_whoever_is_killed_under_load_comes_back_without_reading_the_checkpoint(
    start: Start, tmp_path: Path, checkpoint: Path, expected: list[list[int]], victim: str
) -> None:
    """The file's content is destroyed, and its header, size and time are kept: only memory can give the answers."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((checkpoint / name).read_bytes())
    pipeline = await start(plan_for(tmp_path, copy))
    destroy(copy / "model.safetensors")

    load = [asyncio.ensure_future(ask(pipeline, PROMPTS[i % 8], max_new_tokens=120, tell_pid=True)) for i in range(24)]
    await asyncio.sleep(0.2)
    before = instances(pipeline)
    os.kill(before[victim]["pid"], signal.SIGKILL)
    outcomes = await asyncio.gather(*load, return_exceptions=True)
    survivor = next(i["pid"] for name, i in before.items() if name != victim)
    finished = [o for o in outcomes if isinstance(o, dict)]
    assert {o["pid"] for o in finished} == {survivor}, "nothing was in flight there"
    assert len(finished) + sum(isinstance(o, ProcessExited) and o.instance == victim for o in outcomes) == 24
    await eventually(lambda: pipeline.status == "ready", 60)
    after = instances(pipeline)
    assert after[victim]["restarts"] == 1 and shared(pipeline, victim)["attached"] is True
    assert await answers(pipeline) == expected
    size = shared(pipeline, victim)["bytes"]
    assert sum(mapped(i["pid"])["Pss"] for i in after.values()) < 1.01 * size


async def test_all_replicas_killed_at_once_attach_to_what_the_server_kept(
    start: Start, tmp_path: Path, checkpoint: Path, expected: list[list[int]]
) -> None:
    pipeline = await start(plan_for(tmp_path, checkpoint))
    for instance in instances(pipeline).values():
        os.kill(instance["pid"], signal.SIGKILL)
    await eventually(lambda: all(i["restarts"] == 1 for i in instances(pipeline).values()), 60)
    await eventually(lambda: pipeline.status == "ready", 60)
    assert all(shared(pipeline, name)["attached"] for name in instances(pipeline))
    assert await answers(pipeline) == expected


async def test_weights_that_go_with_their_leader_take_the_group_along(
    start: Start, tmp_path: Path, checkpoint: Path, expected: list[list[int]]
) -> None:
    pipeline = await start(plan_for(tmp_path, checkpoint, arguments="{mortal: true}"))
    assert await answers(pipeline) == expected
    before = instances(pipeline)
    os.kill(before["llm@r1"]["pid"], signal.SIGKILL)  # a follower goes alone
    await eventually(lambda: instances(pipeline)["llm@r1"]["restarts"] == 1 and pipeline.status == "ready", 60)
    assert instances(pipeline)["llm@r0"]["restarts"] == 0 and shared(pipeline, "llm@r1")["attached"] is True
    os.kill(before["llm@r0"]["pid"], signal.SIGKILL)
    await eventually(lambda: pipeline.status == "unavailable", 5)
    await eventually(lambda: pipeline.status == "ready", 60)
    after = instances(pipeline)
    assert (after["llm@r0"]["restarts"], after["llm@r1"]["restarts"]) == (1, 2)
    assert [shared(pipeline, f"llm@r{i}")["attached"] for i in range(2)] == [False, True]
    assert await answers(pipeline) == expected


async def test_under_stop_a_dead_leader_stops_the_pipeline(start: Start, tmp_path: Path, checkpoint: Path) -> None:
    pipeline = await start(plan_for(tmp_path, checkpoint, on_exit="stop"))
    os.kill(instances(pipeline)["llm@r0"]["pid"], signal.SIGKILL)
    assert "instance 'llm@r0'" in await asyncio.wait_for(pipeline.failed(), 5)


async def test_a_changed_checkpoint_is_not_mixed_with_the_weights_in_memory(
    start: Start, tmp_path: Path, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((checkpoint / name).read_bytes())
    pipeline = await start(plan_for(tmp_path, copy))
    os.utime(copy / "model.safetensors")
    with caplog.at_level(logging.ERROR):
        os.kill(instances(pipeline)["llm@r1"]["pid"], signal.SIGKILL)
        await eventually(lambda: "the checkpoint was changed after its weights had been loaded" in caplog.text, 20)
    assert pipeline.status == "degraded"


async def test_a_factory_that_ignores_sharing_fails_the_start(start: Start, tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(StartupError, match="'llm' is to share its weights, but its factory did not load them"):
        await start(plan_for(tmp_path, checkpoint, factory="oblivious"))


async def test_replicas_of_unequal_kv_capacity_fail_the_start(start: Start, tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(StartupError, match="replicas resolved different KV capacities") as info:
        await start(plan_for(tmp_path, checkpoint, factory="uneven", share="off", arguments=f"{{folder: {tmp_path}}}"))
    text = str(info.value)
    assert "stage 'llm' of Process 'llm': llm@r" in text
    assert "llm@r0" in text and "llm@r1" in text and " 100" in text and " 200" in text


# Two servers, each a pipeline of its own ------------------------------------------------------------------------------


async def test_a_second_server_has_its_weights_from_the_first_and_survives_it(
    start: Start, tmp_path: Path, checkpoint: Path, expected: list[list[int]]
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copy / name).write_bytes((checkpoint / name).read_bytes())
    first = await start(plan_for(tmp_path, copy, share="servers", devices="[0]"))
    assert await shared_answers(first) == expected[::2] and not shared(first, "llm")["attached"]
    lent_at = first.health()["weights"]["lent_at"]
    destroy(copy / "model.safetensors")  # so only memory can give the answers
    borrowing = plan_for(tmp_path, copy, share=f"servers\nweights_from: {lent_at}", devices="[0]")
    second = await start(borrowing)
    assert second.health()["weights"] == {**second.health()["weights"], "borrowed_from": lent_at}
    assert instances(second)["llm"]["weights"]["role"] == "borrower" and shared(second, "llm")["attached"]
    assert await shared_answers(second) == expected[::2]
    size = shared(first, "llm")["bytes"]
    memory = [mapped(instances(server)["llm"]["pid"])["Pss"] for server in (first, second)]
    assert sum(memory) < 1.01 * size, "the weights are in memory more than once"

    # The MPS server dies, as each supervisor notices by itself: the weights are gone for both.
    restore(copy / "model.safetensors", checkpoint / "model.safetensors")
    for server in (first, second):
        server.supervisor._mps_server_died(1, {"llm"})
    await eventually(lambda: all(instances(s)["llm"]["restarts"] == 1 for s in (first, second)), 60)
    await eventually(lambda: first.status == second.status == "ready", 60)
    assert [shared(server, "llm")["attached"] for server in (first, second)] == [False, True]
    assert await shared_answers(second) == expected[::2]

    await first.stop(drain_timeout=0)
    assert await shared_answers(second) == expected[::2]
    os.kill(instances(second)["llm"]["pid"], signal.SIGKILL)
    await eventually(lambda: second.status == "unavailable", 10)
    await eventually(lambda: second.status == "ready", 60)
    assert shared(second, "llm")["attached"] and await shared_answers(second) == expected[::2]

    second.supervisor._mps_server_died(1, {"llm"})
    reason = await asyncio.wait_for(second.failed(), 20)
    assert "the weights of Process 'llm', borrowed from" in reason and "cannot be had again" in reason


async def shared_answers(pipeline: Pipeline) -> list[list[int]]:
    return [(await ask(pipeline, prompt))["token_ids"] for prompt in PROMPTS]


def destroy(file: Path) -> None:
    """Its header, size and time are kept."""
    info = file.stat()
    with file.open("r+b") as opened:
        opened.seek(info.st_size // 4)
        opened.write(bytes(info.st_size // 2))
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


def restore(file: Path, original: Path) -> None:
    info = file.stat()
    with file.open("r+b") as opened:
        opened.write(original.read_bytes())
    os.utime(file, ns=(info.st_atime_ns, info.st_mtime_ns))


@pytest.mark.parametrize("arguments", ["{}", "{mortal: true}"])
async def test_servers_that_cannot_share_do_not_start(
    start: Start, tmp_path: Path, checkpoint: Path, arguments: str
) -> None:
    """There is no server to borrow from; and weights that would end with their leader are not lent."""
    gone = tmp_path / "weights.sock"
    share = f"servers\nweights_from: {gone}" if arguments == "{}" else "servers"
    message = f"weights_from {gone}: .*does not answer" if arguments == "{}" else "separate servers cannot share them"
    with pytest.raises(StartupError, match=message):
        await start(plan_for(tmp_path, checkpoint, share=share, devices="[0]", arguments=arguments))


# The demo voice, through the whole server -----------------------------------------------------------------------------

DEMO = ("--config", str(ROOT / "examples/configs/demo_voice_replicas.yaml"), "--platform", "cpu")
SHARE = ("--weight-share", "on", "--tts_engine.engine.max_total_tokens", "9000", "--on_process_exit", "restart")
TEXT = "The old bridge was closed for repairs."


def speak(server: Server) -> bytes:
    request = {"model": "demo-voice", "input": TEXT, "voice": "rms", "response_format": "pcm"}
    response = httpx.post(f"{server.url}/v1/audio/speech", json=request, timeout=60)
    assert response.status_code == 200, response.text
    return response.content


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.05)


def test_the_demo_voice_speaks_the_same_from_shared_weights(tmp_path: Path) -> None:
    with serving(*DEMO, run_folder=tmp_path) as server:
        alone = speak(server)
    with serving(*DEMO, *SHARE, run_folder=tmp_path) as server:
        assert all(speak(server) == alone for _ in range(4))
        names = ("tts_engine@r0", "tts_engine@r1")
        assert all(mapped(server.pid(name))["Rss"] > 30e6 for name in names)
        assert sum(mapped(server.pid(name))["Pss"] for name in names) < 46e6
        victim = server.pid("tts_engine@r0")
        os.kill(victim, signal.SIGKILL)
        until(lambda: server.instance("tts_engine@r0")["state"] != "ready")
        assert speak(server) == alone
        until(lambda: server.instance("tts_engine@r0")["state"] == "ready")
        assert server.pid("tts_engine@r0") != victim
        assert all(speak(server) == alone for _ in range(4))
        assert len(list(tmp_path.glob("sgl-omni/run-*/weights.sock"))) == 1
