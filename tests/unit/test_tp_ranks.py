"""The ranks of a group by themselves: what they tell each other, and how they notice that they differ."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.interface import EngineOutput, Payload
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.shard import Shard
from sgl_omni.engine.task import InputSpec, TokenTask
from sgl_omni.errors import InvalidRequest, PayloadError, StartupError
from sgl_omni.runtime import tp
from sgl_omni.runtime.instance import GroupSockets
from sgl_omni.runtime.tp import Add, Drop, Extend, FinishInput, GroupBroken, Ranks, Step
from sgl_omni.runtime.tp_engine import LeadingEngine, LeadingFedEngine, RankEngine, lead, summary


@pytest.fixture
def ranks() -> Iterator[list[Ranks]]:
    """Three ranks of one group, in one process."""
    sockets = GroupSockets(3)
    links = [sockets.link(rank) for rank in range(3)]
    copies = [tp.GroupLink(link.port, -1, [os.dup(fd) for fd in link.sockets], link.seed) for link in links]
    sockets.close()
    yield [Ranks(rank, 3, link, None) for rank, link in enumerate(copies)]


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tp, "PEER_SECONDS", 0.0)


def test_every_group_has_a_port_of_its_own() -> None:
    groups = [GroupSockets(2) for _ in range(3)]
    assert len({group.link(0).port for group in groups}) == 3
    assert all(group.link(0).port == group.link(1).port for group in groups)
    assert [fd >= 0 for fd in (groups[0].link(0).listener, groups[0].link(1).listener)] == [True, False]
    for group in groups:
        group.close()


def test_commands_arrive_in_order_and_whole(ranks: list[Ranks]) -> None:
    leader, *others = ranks
    payload = {"ids": [1, 2], "bulk": np.arange(70_000), "text": "ä" * 70_000, "x": torch.ones(2, dtype=torch.bfloat16)}
    commands = [Add("a", payload), Extend("a", {"n": 1}), FinishInput("a"), Step(7), Drop("a"), Step(8)]

    def hear(rank: Ranks) -> list[tp.Command]:
        return [rank.next_command() for _ in commands]

    with ThreadPoolExecutor(2) as pool:
        heard = [pool.submit(hear, rank) for rank in others]
        for command in commands:
            leader.tell(command, "s")
        for first, *rest in (future.result(timeout=30) for future in heard):
            assert isinstance(first, Add)
            assert first.request_id == "a"
            assert (first.payload["ids"], first.payload["text"]) == (payload["ids"], payload["text"])
            assert first.payload["x"].dtype == torch.bfloat16
            np.testing.assert_array_equal(first.payload["bulk"], payload["bulk"])
            assert rest == commands[1:]


def test_what_cannot_travel_reaches_nobody(ranks: list[Ranks]) -> None:
    leader, other, _ = ranks
    with pytest.raises(PayloadError, match=r"stage 's'.*'bad'"):
        leader.tell(Add("a", {"bad": object()}), "s")
    with pytest.raises(PayloadError, match="more than 64 bits"):
        leader.tell(Add("a", {"n": 2**70}), "s")
    leader.tell(Step(1), "s")
    assert other.next_command() == Step(1)


def test_a_rank_that_is_gone_breaks_the_group(ranks: list[Ranks]) -> None:
    leader, first, second = ranks
    first._sockets[0].close()
    with pytest.raises(GroupBroken, match="cannot tell"):
        for _ in range(100):
            leader.tell(Step(0), "s")
    for sock in leader._sockets:
        sock.close()
    with pytest.raises(GroupBroken, match="rank 0 is gone"):
        while True:
            second.next_command()


class Echo:
    """Answers each request in the next step."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, Payload]] = []
        self.fail = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def add(self, request_id: str, payload: Payload) -> None:
        if payload.get("bad"):
            raise InvalidRequest("bad is not allowed", "bad")
        self.waiting.append((request_id, payload))

    def abort(self, request_id: str) -> None:
        self.waiting = [item for item in self.waiting if item[0] != request_id]

    def step(self) -> list[EngineOutput]:
        if self.fail:
            raise MemoryError("no room")
        waiting, self.waiting = self.waiting, []
        return [EngineOutput(name, result={"seed": payload["seed"]}) for name, payload in waiting]

    def stats(self) -> dict[str, float]:
        return {"queued": len(self.waiting)}


def test_a_follower_that_does_what_it_is_told_comes_to_the_same(ranks: list[Ranks]) -> None:
    leader, other, _ = ranks
    engine = lead(Echo(), leader, "s")
    assert type(engine) is LeadingEngine, "an engine that takes no input later does not pretend to"
    engine.add("a", {})
    engine.add("b", {"seed": 3})
    engine.add("c", {"seed": None})
    with pytest.raises(InvalidRequest):
        engine.add("d", {"bad": True})
    engine.abort("c")
    [a, b] = engine.step()
    assert b.result == {"seed": 3}
    assert isinstance(a.result["seed"], int)
    assert engine.step() == []

    copy = RankEngine(Echo())
    digests = []
    for _ in range(7):
        command = other.next_command()
        if isinstance(command, Step):
            digests.append((command.digest, copy.digest))
        if isinstance(command, Add) and command.payload.get("bad"):
            with pytest.raises(InvalidRequest):
                copy.obey(command)
        else:
            copy.obey(command)
    assert [ours == theirs for ours, theirs in digests] == [True, True]
    assert digests[0] != digests[1]


def test_input_that_arrives_later_reaches_every_rank(tmp_path: Path, ranks: list[Ranks]) -> None:
    leader, other, _ = ranks

    def build() -> AutoregressiveEngine:
        model = CausalModel.load(saved(tmp_path, "Qwen3ForCausalLM"))
        task = TokenTask(InputSpec(vocab_sizes=(97,), hidden_size=32))
        return AutoregressiveEngine.build(model, task, EngineSettings(max_total_tokens=64, page_size=4))

    engine, copy = lead(build(), leader, "s"), RankEngine(build())
    assert isinstance(engine, LeadingFedEngine)
    engine.add("a", {"prompt_ids": [1, 2], "max_new_tokens": 3, "prompt_open": True, "input_open": True})
    assert not engine.has_work
    engine.extend("a", {"prompt_ids": [3], "prompt_open": False, "added_embeddings": np.ones((2, 32), np.float32)})
    engine.finish_input("a")
    results = [output.result for _ in range(3) for output in engine.step() if output.result is not None]
    found = []
    for _ in range(6):
        command = other.next_command()
        if isinstance(command, Step):
            assert command.digest == copy.digest
        found += [output.result for output in copy.obey(command) if output.result is not None]
    assert found == results
    assert len(found[0]["token_ids"]) == 3


def test_a_step_that_fails_in_one_rank_breaks_the_group() -> None:
    engine = Echo()
    engine.fail = True
    with pytest.raises(GroupBroken, match="a step failed"):
        RankEngine(engine).obey(Step(0))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"ids": [1, 2]}, {"ids": [1, 3]}, False),
        ({"codes": np.array([1, 2])}, {"codes": np.array([1, 3])}, False),
        ({"codes": torch.tensor([1, 2])}, {"codes": torch.tensor([1, 3])}, False),
        ({"finish_reason": "stop"}, {"finish_reason": "length"}, False),
        ({"hidden": np.ones(3)}, {"hidden": np.ones(3) * (1 + 1e-12)}, True),
        ({"hidden": torch.ones(3)}, {"hidden": torch.ones(3) * (1 + 1e-6)}, True),
        ({"hidden": np.ones(3)}, {"hidden": np.ones(4)}, False),
        ({"score": 0.5}, {"score": 0.5000001}, True),
        (None, {}, False),
    ],
)
def test_digests_tell_decisions_apart_and_not_roundings(one: Any, other: Any, same: bool) -> None:
    assert (summary(one) == summary(other)) is same


class Meeting:
    """Sums over ranks that are threads of one process."""

    def __init__(self, size: int) -> None:
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def shard(self, index: int) -> Shard:
        def reduce(x: Tensor) -> Tensor:
            self.parts[index] = x
            self.barrier.wait()
            total = torch.stack([part for part in self.parts if part is not None]).sum(0)
            self.barrier.wait()
            return total

        return Shard(index, len(self.parts), reduce)


SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"model_type": "qwen3", "num_key_value_heads": 2},
    "LlamaForCausalLM": {"model_type": "llama", "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}


def saved(folder: Path, architecture: str) -> Path:
    config = {
        "architectures": [architecture],
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        **SHAPES[architecture],
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    slots = CausalModel(DecoderConfig.parse(config)).slots("model.", "lm_head")
    save_file({s.name: torch.randn(s.shape, generator=generator) * 0.3 for s in slots}, folder / "model.safetensors")
    return folder


def tokens(folder: Path, shard: Shard) -> dict[str, list[int]]:
    model = CausalModel.load(folder, shard=shard)
    task = TokenTask(InputSpec(vocab_sizes=(97,), hidden_size=32))
    engine = AutoregressiveEngine.build(model, task, EngineSettings(max_total_tokens=48, page_size=4))
    for i in range(4):
        engine.add(str(i), {"prompt_ids": list(range(i, 7 * i + 3)), "max_new_tokens": 12})
    found = {}
    while engine.has_work:
        found |= {o.request_id: o.result["token_ids"] for o in engine.step() if o.result is not None}
    assert engine.stats()["retractions"] > 0
    return found


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("architecture", SHAPES)
def test_shards_of_a_checkpoint_give_the_tokens_of_the_whole(tmp_path: Path, architecture: str, size: int) -> None:
    """Also where ranks outnumber the KV heads, and where each holds a part of every expert."""
    folder = saved(tmp_path, architecture)
    whole = tokens(folder, Shard())
    assert len({tuple(ids) for ids in whole.values()}) == 4
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        parts = list(pool.map(lambda index: tokens(folder, meeting.shard(index)), range(size)))
    assert parts == [whole] * size


def test_a_checkpoint_that_cannot_be_divided_so(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="4 attention heads cannot be divided among 3 ranks"):
        CausalModel.load(saved(tmp_path, "Qwen3ForCausalLM"), shard=Shard(0, 3))
