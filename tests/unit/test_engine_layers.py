"""The parts of a decoder by themselves: attention, positions, shards, checkpoints, sampling."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from sgl_omni.engine import sampler
from sgl_omni.engine.attention import QKV, AttentionSpan, TorchAttention
from sgl_omni.engine.checkpoint import Checkpoint, CheckpointError, Slot
from sgl_omni.engine.decoder import Decoder, materialise
from sgl_omni.engine.decoder_config import DecoderConfig, MoEConfig
from sgl_omni.engine.fixed_cache import FixedCache, TorchFixedAttend, TritonFixedAttend
from sgl_omni.engine.kv_cache import KVCache, KVShape
from sgl_omni.engine.layers import Attention, Embedding, GatedMLP, RMSNorm
from sgl_omni.engine.moe import MoE
from sgl_omni.engine.output_rows import OutputRows
from sgl_omni.engine.request import Prompt, Request, Sampling
from sgl_omni.engine.rope import Rope, axes, frequencies, rotate
from sgl_omni.engine.rope_config import RopeConfig
from sgl_omni.engine.sampler import SamplingBatch, sample
from sgl_omni.engine.shard import Shard
from sgl_omni.errors import StartupError

pytestmark = pytest.mark.usefixtures("one_thread")

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def dense_attention(q: Tensor, k: Tensor, v: Tensor, start: int, window: int | None) -> Tensor:
    """Row by row, head by head: what every backend must give."""
    result = torch.empty_like(q)
    for row in range(q.shape[0]):
        last = start + row
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(HEADS):
            shared = head * KV_HEADS // HEADS
            keys, values = k[first : last + 1, shared], v[first : last + 1, shared]
            result[row, head] = (keys @ q[row, head] / math.sqrt(HEAD_DIM)).softmax(0) @ values
    return result


def test_rows_of_few_places_are_the_kernels_and_windows_smaller_than_them_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    shape = KVShape(1, KV_HEADS, HEAD_DIM)
    one = torch.zeros(1, KV_HEADS, HEAD_DIM)
    plain = FixedCache(shape, 1, 6, one).at(0, 1)
    assert isinstance(plain, TorchFixedAttend)
    plain(0, one, one, one, window=6)
    with pytest.raises(NotImplementedError, match="a window of 5"):
        plain(0, one, one, one, window=5)
    monkeypatch.setattr("sgl_omni.engine.platform.everywhere", True)
    fused = FixedCache(shape, 1, 64, one).at(0, 1)
    assert isinstance(fused, TritonFixedAttend)
    with pytest.raises(NotImplementedError, match="a window of 63"):
        fused.from_qkv(0, QKV(one.view(1, -1), 2, None, 0.0), (one, one), window=63)
    assert isinstance(FixedCache(shape, 1, 65, one).at(0, 1), TorchFixedAttend)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("scattered", [False, True])
def test_paged_attention_equals_attention_written_out(window: int | None, scattered: bool) -> None:
    torch.manual_seed(0)
    cache = KVCache(KVShape(2, KV_HEADS, HEAD_DIM), num_pages=24, page_size=4)
    order = random.Random(1).sample(range(24), 24) if scattered else list(range(24))
    tables = [order[:6], order[6:12], order[12:18], order[18:]]
    k, v = torch.randn(4, 24, KV_HEADS, HEAD_DIM), torch.randn(4, 24, KV_HEADS, HEAD_DIM)
    steps = [
        [(0, 9), (0, 4), (0, 1), (0, 22)],
        [(9, 13), (4, 5), (1, 2), (22, 23)],
        [(13, 14), (5, 6), (2, 3), (23, 24)],
    ]
    for step in steps:
        spans = [AttentionSpan(a, b, table) for (a, b), table in zip(step, tables, strict=True)]
        rows = sum(span.length for span in spans)
        q = torch.randn(rows + 3, HEADS, HEAD_DIM)  # three rows of padding
        padding = torch.full((3, KV_HEADS, HEAD_DIM), math.nan)
        new_k = torch.cat([*(k[i, a:b] for i, (a, b) in enumerate(step)), padding])
        new_v = torch.cat([*(v[i, a:b] for i, (a, b) in enumerate(step)), padding])
        attended = TorchAttention().begin(cache, spans)(1, q, new_k, new_v, window=window)
        expected = [
            dense_attention(rows_q, k[i], v[i], step[i][0], window)
            for i, rows_q in enumerate(q[:rows].split([span.length for span in spans]))
        ]
        torch.testing.assert_close(attended[:rows], torch.cat(expected))
        assert attended[rows:].abs().max() == 0
    assert all(part.abs().max() == 0 for part in cache.layer(0))


@pytest.mark.parametrize("model", ["qwen2_vl", "qwen3_omni_moe"])
def test_positions_of_several_axes_turn_as_in_transformers(model: str) -> None:
    pytest.importorskip("transformers")
    positions = torch.stack([torch.arange(9), torch.arange(9) // 2, torch.arange(9) % 4])
    q = torch.randn(9, 2, 32)
    if model == "qwen2_vl":
        from transformers.models.qwen2_vl import modeling_qwen2_vl as reference
        from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

        section = {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": [6, 5, 5]}
        config = Qwen2VLTextConfig(hidden_size=64, num_attention_heads=2, rope_parameters=section)
        rotary = reference.Qwen2VLRotaryEmbedding(config)
    else:
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as reference
        from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig

        section = {"rope_theta": 1000.0, "rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        config = Qwen3OmniMoeTextConfig(head_dim=32, hidden_size=64, num_attention_heads=2, rope_parameters=section)
        rotary = reference.Qwen3OmniMoeThinkerTextRotaryEmbedding(config)
    cosine, sine = rotary(q, positions[:, None])
    if cosine.dim() == 4:  # the axes are still apart: this model mixes them when it rotates
        halves = [part[i % 3] for i, part in enumerate(cosine.split([6, 5, 5] * 2, -1))]
        cosine = torch.cat(halves, -1)
        sine = torch.cat([part[i % 3] for i, part in enumerate(sine.split([6, 5, 5] * 2, -1))], -1)
    half = torch.cat([-q[..., 16:], q[..., :16]], -1)
    expected = q * cosine[0, :, None] + half * sine[0, :, None]
    rope = Rope(RopeConfig.parse({"rope_parameters": section}), 32, "cpu")
    rotation = rope(positions, torch.float32)
    torch.testing.assert_close(rotate(q, rotation), expected)
    assert all(part.is_contiguous() for part in rotation)
    equal = rope(positions[:1].expand(3, -1), torch.float32)
    plain = Rope(RopeConfig(theta=1000.0), 32, "cpu")(positions[:1], torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(equal, plain, strict=True))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"factor": None},
        {"factor": 1.0},
        {"attention_factor": 0.8},
        {"beta_fast": 16, "beta_slow": 2},
        {"mscale": 1.0, "mscale_all_dim": 0.7},
        {"mscale": 1.0},
        {"truncate": False},
        {"original_max_position_embeddings": None},
        {"original_max_position_embeddings": 131072, "rope_theta": 1e6},
        {"original_max_position_embeddings": 7},
    ],
    ids=str,
)
def test_yarn_turns_as_in_transformers(fields: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    said = {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, **fields}
    said = {key: value for key, value in said.items() if value is not None or key == "factor"}
    config = {"head_dim": 32, "max_position_embeddings": 512, "rope_parameters": {"rope_type": "yarn", **said}}
    rope = RopeConfig.parse(config)
    rotary = Qwen3RotaryEmbedding(transformers.Qwen3Config(**config))
    assert torch.equal(frequencies(rope, 32), rotary.inv_freq)
    assert rope.amplitude == rotary.attention_scaling
    positions = torch.tensor([[0, 1, 7, 63, 64, 511]])
    expected = rotary(torch.zeros(1), positions)
    for mine, theirs in zip(Rope(rope, 32, "cpu")(positions, torch.float32), expected, strict=True):
        assert torch.equal(mine[:, 0], theirs[0, :, :16])


def test_yarn_makes_room_for_the_positions_that_it_stretches_to() -> None:
    """As the authors of Qwen3 say how to come to long contexts: one field is added and nothing else changed."""
    config = {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
    }
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert DecoderConfig.parse(config).max_positions == 40960
    assert DecoderConfig.parse({**config, "rope_scaling": scaling}).max_positions == 131072


def test_rope_kinds_that_are_not_there_are_named() -> None:
    with pytest.raises(StartupError, match="'dynamic' is not supported; use default, linear, llama3, yarn or mrope"):
        RopeConfig.parse({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}})
    with pytest.raises(StartupError, match="rope_theta is 1, and yarn needs one above 1"):
        RopeConfig.parse({"rope_theta": 1.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    with pytest.raises(StartupError, match="original_max_position_embeddings is missing"):
        RopeConfig.parse({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}})
    with pytest.raises(StartupError, match="do not sum to the 16 pairs"):
        axes(RopeConfig(theta=1e4, sections=(4, 4, 4)), 32)
    older = RopeConfig.parse({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    torch.testing.assert_close(frequencies(older, 8), frequencies(RopeConfig(theta=5e5), 8) / 2)


def filled(module: Any, tensors: dict[str, Tensor]) -> Any:
    """The module with its slots filled from whole tensors, as a checkpoint would."""
    for slot in module.slots("m"):
        whole = tensors.setdefault(slot.name, torch.randn(slot.shape) * 0.2)
        slot.target.copy_(whole[slot.index])
    return module


@pytest.mark.parametrize("size", [2, 4])
def test_shards_of_an_mlp_and_of_experts_sum_to_the_whole(size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 16)
    moe = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=8, normalise=True, shared_size=12)
    for build in (lambda shard: GatedMLP(16, 24, shard, bias=False), lambda shard: MoE(16, moe, shard)):
        tensors: dict[str, Tensor] = {}
        whole = filled(build(Shard()), tensors)(x)
        parts = [filled(build(Shard(index, size)), tensors)(x) for index in range(size)]
        torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("size", [2, 4])
def test_a_shard_holds_its_heads_and_the_keys_they_need(size: int) -> None:
    torch.manual_seed(0)
    tensors: dict[str, Tensor] = {}
    x = torch.randn(6, 16)

    def attended(shard: Shard) -> Tensor:
        layer = Attention(0, 16, HEADS, KV_HEADS, HEAD_DIM, shard, qkv_bias=True, out_bias=True, qk_norm_eps=1e-6)
        filled(layer, tensors)
        cache = KVCache(KVShape(1, shard.kv_heads(KV_HEADS)[1], HEAD_DIM), 2, 4)
        attend = TorchAttention().begin(cache, [AttentionSpan(0, 6, [1, 0])])
        result: Tensor = layer(x, Rope(RopeConfig(theta=1e4), HEAD_DIM, "cpu")(torch.arange(6)[None], x.dtype), attend)
        return result

    parts = [attended(Shard(index, size)) for index in range(size)]
    torch.testing.assert_close(sum(parts), attended(Shard()))
    with pytest.raises(StartupError, match="4 attention heads cannot be divided among 3 ranks"):
        attended(Shard(0, 3))


def test_codebook_embeddings_are_summed_each_from_its_own_part_of_the_table() -> None:
    embedding = Embedding(20, 4, offsets=(0, 10))
    embedding.weight.normal_()
    table = embedding.weight
    torch.testing.assert_close(embedding(torch.tensor([[3, 4]]))[0], table[3] + table[14])


def test_a_norm_is_computed_in_float32() -> None:
    norm = RMSNorm(8, 1e-6)
    norm.weight.fill_(1.0)
    norm.to(torch.bfloat16)
    x = (torch.randn(3, 8) * 100).bfloat16()
    assert torch.equal(norm(x), F.rms_norm(x.float(), (8,), None, 1e-6).bfloat16())


# --- checkpoints


def slots_of(**shapes: tuple[int, ...]) -> dict[str, Slot]:
    return {name: Slot(f"talker.{name}", torch.zeros(shape), shape) for name, shape in shapes.items()}


def write(folder: Path, files: dict[str, dict[str, Tensor]]) -> None:
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    if len(files) > 1:
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_part_of_a_sharded_checkpoint_is_read_by_its_prefix(tmp_path: Path) -> None:
    a, b = torch.randn(2, 3), torch.randn(4)
    write(
        tmp_path,
        {
            "model-1.safetensors": {"talker.a": a, "thinker.x": torch.zeros(1)},
            "model-2.safetensors": {"talker.b": b.bfloat16()},
        },
    )
    slots = slots_of(a=(2, 3), b=(4,))
    Checkpoint(tmp_path).load(slots.values(), prefix="talker.")
    assert torch.equal(slots["a"].target, a)
    assert torch.equal(slots["b"].target, b.bfloat16().float())


def test_missing_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": {"talker.a": torch.zeros(2, 3), "talker.c": torch.zeros(1)}})
    slots = slots_of(a=(2, 3), b=(4,))
    with pytest.raises(CheckpointError, match=r"missing: talker\.b; .*safetensors: unknown to this model: talker\.c"):
        Checkpoint(tmp_path).load(slots.values(), prefix="talker.")
    Checkpoint(tmp_path).load([slots["a"]], prefix="talker.", ignore=["*.c"])
    with pytest.raises(CheckpointError, match=r"talker\.a is \[2, 3\], not \[3, 3\]"):
        Checkpoint(tmp_path).load(slots_of(a=(3, 3)).values(), prefix="talker.a")


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"lacks gone\.safetensors"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Checkpoint(tmp_path)


def test_a_decoder_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(StartupError, match="'gpt2' is not one of llama"):
        DecoderConfig.parse({"model_type": "gpt2"})
    with pytest.raises(StartupError, match="activation 'gelu'"):
        DecoderConfig.parse({"model_type": "llama", "hidden_act": "gelu"})


def test_a_decoder_is_built_without_memory_and_then_given_its_own() -> None:
    config = DecoderConfig.parse(
        {
            "model_type": "qwen3",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
        }
    )
    with torch.device("meta"):
        decoder = Decoder(config)
    assert all(parameter.is_meta for parameter in decoder.parameters())
    materialise(decoder, "cpu", torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in decoder.parameters())
    assert decoder.kv_shape == KVShape(1, 1, 8, torch.bfloat16)


# --- sampling


def drawn(logits: Tensor, options: list[Sampling], outputs: int = 0) -> list[int]:
    """One id a row of logits [rows, vocabulary]."""
    requests = [
        Request(str(i), Prompt(ids=torch.zeros(1, 1, dtype=torch.int64)), 9999, sampling=option)
        for i, option in enumerate(options)
    ]
    for request in requests:
        request.outputs = OutputRows([[0]] * outputs)
    ids: list[int] = sample(logits[:, None], SamplingBatch.of(requests))[:, 0].tolist()
    return ids


def test_greedy_rows_take_the_largest_and_random_rows_beside_them_do_not_matter() -> None:
    logits = torch.randn(4, 50)
    options = [Sampling(), Sampling(temperature=9.0, seed=1), Sampling(temperature=2.0, top_k=1), Sampling()]
    ids, best = drawn(logits, options), logits.argmax(-1).tolist()
    assert [ids[0], ids[2], ids[3]] == [best[0], best[2], best[3]]


def test_draws_follow_the_softmax_at_the_temperature() -> None:
    logits, n = torch.tensor([2.0, 1.0, 0.0, -1.0]), 20_000
    ids = drawn(logits.expand(n, -1), [Sampling(temperature=0.7, seed=seed) for seed in range(n)])
    counts = torch.bincount(torch.tensor(ids), minlength=4) / n
    torch.testing.assert_close(counts, (logits / 0.7).softmax(-1), atol=0.012, rtol=0)


def test_draws_of_one_seed_follow_the_softmax_over_its_outputs_and_columns() -> None:
    logits, n = torch.tensor([1.0, 0.5, 0.0]), 3000
    request = Request("r", Prompt(ids=torch.zeros(1, 1, dtype=torch.int64)), 9999, Sampling(temperature=1.0, seed=3))
    ids = []
    for _ in range(n):
        ids += sample(logits.expand(1, 4, -1), SamplingBatch.of([request]))[0].tolist()
        request.outputs.append([0])
    counts = torch.bincount(torch.tensor(ids), minlength=3) / (4 * n)
    torch.testing.assert_close(counts, logits.softmax(-1), atol=0.02, rtol=0)
    columns = torch.tensor(ids).view(n, 4)
    assert 0.2 < (columns[:, 0] == columns[:, 1]).float().mean() < 0.5  # 0.38 for independent columns


def test_top_k_and_top_p_leave_the_likeliest_only() -> None:
    logits, n = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(500, -1), 500
    for options, left in [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.71}, {0, 1, 2}),
        ({"top_p": 0.01}, {0}),
        ({"top_k": 3, "top_p": 0.75}, {0, 1}),  # of the three left, 0.4 and 0.3 hold 0.78
        ({"top_k": 99}, {0, 1, 2, 3}),
    ]:
        assert set(drawn(logits, [Sampling(temperature=1.0, seed=seed, **options) for seed in range(n)])) == left


def test_a_draw_depends_on_seed_and_output_index_alone() -> None:
    logits = torch.randn(1, 100)
    option = Sampling(temperature=1.0, seed=11, top_k=50)
    alone = [drawn(logits, [option], outputs=i)[0] for i in range(20)]
    others = [Sampling(temperature=1.5, seed=5), Sampling(), Sampling(temperature=0.1, top_p=0.5)]
    among = [drawn(logits.expand(4, -1), [others[0], others[1], option, others[2]], outputs=i)[2] for i in range(20)]
    assert among == alone
    assert len(set(alone)) > 8


@pytest.mark.parametrize("kind", ["wide", "sharp", "equal", "few", "no numbers"])
def test_of_a_large_vocabulary_the_same_is_drawn_without_sorting_all(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 2, 9000, generator=generator) * (8 if kind == "sharp" else 1)
    if kind == "equal":
        logits = (logits * 2).round() / 2
    elif kind == "few":
        logits[:, :, torch.randperm(9000, generator=generator)[:-20]] = -math.inf
    elif kind == "no numbers":
        logits[1:3] = math.nan
    options = [(0, 1.0), (1, 0.9), (50, 1.0), (20, 0.8), (3000, 0.95), (0, 0.9)]
    requests = [
        Request(str(i), Prompt(torch.zeros(1, 1)), 9, Sampling(temperature=0.7 + i / 5, top_k=k, top_p=p, seed=i))
        for i, (k, p) in enumerate(options)
    ]
    batch = SamplingBatch.of(requests)
    found = sample(logits, batch, 3)
    monkeypatch.setattr(sampler, "LARGE", 10**6)
    sorted_whole = sample(logits, batch, 3)
    numbers = [0, 3, 4, 5] if kind == "no numbers" else [*range(6)]
    assert found[numbers].tolist() == sorted_whole[numbers].tolist()
    assert bool(((found >= 0) & (found < 9000)).all())


def test_ids_of_minus_infinity_are_never_drawn() -> None:
    logits = torch.full((300, 6), -math.inf)
    logits[:, [1, 4]] = torch.tensor([0.0, -3.0])
    for temperature in (3.0, 1e300):
        assert set(drawn(logits, [Sampling(temperature=temperature, seed=seed) for seed in range(300)])) == {1, 4}
