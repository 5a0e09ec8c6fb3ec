"""Fixtures that tests of the engine share on all platforms: import them where they are needed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sgl_omni.engine.interface import Engine


@dataclass
class Seen:
    """Chunks and result of one request."""

    chunks: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] = field(default_factory=dict)

    def joined(self, key: str) -> torch.Tensor:
        """All chunks' arrays of one key, one after another."""
        return torch.cat([torch.as_tensor(chunk[key]) for chunk in self.chunks if key in chunk])


Churn = Callable[[Engine, Mapping[str, dict[str, Any]], str], dict[str, Seen]]


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Products this small only wait for a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def churn(one_thread: None) -> Churn:
    """Serves each payload once as it is and once as a request that is aborted at some time, in random order."""
    return _churn


def _churn(engine: Engine, payloads: Mapping[str, dict[str, Any]], seed: str) -> dict[str, Seen]:
    rng = random.Random(seed)
    arrivals = [(name, copy) for name in payloads for copy in ("kept", "aborted")]
    rng.shuffle(arrivals)
    seen = {name: Seen() for name in payloads}
    doomed: list[str] = []
    while arrivals or engine.has_work:
        for _ in range(min(len(arrivals), rng.choice([0, 1, 3]))):
            name, copy = arrivals.pop()
            engine.add(name if copy == "kept" else f"aborted {name}", payloads[name])
            doomed += [f"aborted {name}"] * (copy == "aborted")
        for output in engine.step() if engine.has_work else []:
            assert output.error is None
            if output.request_id in seen:
                seen[output.request_id].chunks += output.chunks
                seen[output.request_id].result = output.result or {}
        if doomed and rng.random() < 0.3:
            engine.abort(doomed.pop(rng.randrange(len(doomed))))
    stats = engine.stats()
    assert (stats["running"], stats["queued"], stats["kv_used_tokens"]) == (0, 0, 0)
    assert all(seen[name].result for name in payloads)
    return seen


EVERY_RUNNER = pytest.mark.parametrize("device_rows", [False, True, "captured"], ids=["at-once", "ahead", "captured"])
"""All in one pass; in device rows, ahead; the same in steps that run as a GPU's graphs do (``captured_steps``)."""


def spoil_new_memory() -> None:
    """In the rest of this process, memory that `torch.empty` gives out holds NaN, as it may on a GPU."""
    torch.use_deterministic_algorithms(True, warn_only=True)


class RunAgain:
    """In place of ``StepGraphs`` where nothing can be captured: the same buckets and tensors; the step is called."""

    capture_seconds = 0.0
    bytes = 0
    replays = 0

    def __init__(self, step: Callable[[int], None], buckets: Sequence[int], beside: RunAgain | None = None) -> None:
        self._step = step
        self.buckets = sorted(buckets)
        step(self.buckets[-1])

    def bucket_for(self, rows: int) -> int | None:
        return next((bucket for bucket in self.buckets if bucket >= rows), None)

    @torch.inference_mode()
    def replay(self, bucket: int) -> None:
        RunAgain.replays += 1
        self._step(bucket)


@pytest.fixture(autouse=True)
def captured_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where a test's ``device_rows`` is "captured", engines pad their steps to buckets and run them from tensors that
    stay where they are; all but the capture itself is then as on a GPU."""
    call = getattr(request.node, "callspec", None)
    if call is None or call.params.get("device_rows") != "captured":
        yield
        return
    monkeypatch.setattr("sgl_omni.engine.device_runner.can_capture", lambda device: True)
    monkeypatch.setattr("sgl_omni.engine.device_runner.StepGraphs", RunAgain)
    before = RunAgain.replays
    yield
    assert RunAgain.replays > before, "no step ran as a graph"
