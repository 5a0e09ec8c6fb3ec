"""Numbers that a model keeps of each request in device rows, and the noise that it may draw."""

from __future__ import annotations

from typing import Any, cast

import torch

from sgl_omni.engine.device_rows import DeviceRows
from sgl_omni.engine.output_rows import OutputRows
from sgl_omni.engine.request import Prompt, Request, Sampling
from sgl_omni.engine.row_state import RowState
from sgl_omni.engine.sampler import normal, seed_key, step_keys


def request_in(row: int, **fields: Any) -> Request:
    made = Request("a", Prompt(embeddings=torch.zeros(3, 4)), max_outputs=5, **fields)
    made.row = row
    return made


def kept(rows: DeviceRows) -> torch.Tensor:
    assert rows.kept is not None
    return rows.kept.values


def test_a_request_begins_with_what_the_model_says_and_goes_on_with_what_it_keeps() -> None:
    rows = DeviceRows(4, 1, 2, 0, "cpu", kept_shape=(2, 3), begin_kept=lambda request: cast(torch.Tensor, request.task))
    first, second = torch.randn(2, 3), torch.randn(2, 3)
    request = request_in(1, task=first)
    assert rows.follow(request)
    rows.flush()
    assert torch.equal(kept(rows)[1], first) and kept(rows)[[0, 2, 3, 4]].abs().max() == 0
    # Row 0 of the pass is row 1's; of its two ends the second is there to fill the pass up.
    state = RowState(rows, torch.tensor([1]), torch.tensor([0, 0]), torch.tensor([1, rows.padding]))
    assert torch.equal(state.kept, torch.stack([first, first]))
    state.keep(torch.stack([second, -second]))
    assert torch.equal(kept(rows)[1], second) and torch.equal(kept(rows)[rows.padding], -second)
    assert not rows.follow(request)
    rows.flush()
    assert torch.equal(kept(rows)[1], second), "a request that goes on keeps what it has"
    rows.follow(request_in(1, task=first))
    rows.flush()
    assert torch.equal(kept(rows)[1], first), "another request in the same row begins anew"


def test_keys_and_temperatures_are_those_of_the_request() -> None:
    rows = DeviceRows(4, 1, 2, 0, "cpu")
    for row, seed in ((0, 7), (2, 2**63 + 5)):
        request = request_in(row, sampling=Sampling(temperature=0.5 + row, seed=seed))
        request.outputs = OutputRows([[1]] * row)
        rows.follow(request)
    rows.flush()
    state = RowState(rows, torch.tensor([2, 0]), torch.tensor([0, 1]))
    seeds = torch.tensor([seed_key(2**63 + 5), seed_key(7)])
    assert torch.equal(state.keys, step_keys(seeds, torch.tensor([2, 0])))
    assert state.temperatures.tolist() == [2.5, 0.5]


def test_noise_is_normal_and_depends_on_its_key_alone() -> None:
    keys = step_keys(torch.arange(400), torch.tensor(3))
    noise = normal(keys, 501)
    assert noise.shape == (400, 501) and noise.dtype == torch.float32 and noise.isfinite().all()
    assert noise.mean().abs() < 0.01 and (noise.std() - 1).abs() < 0.01
    for bound, share in ((1.0, 0.3173), (2.0, 0.0455), (3.0, 0.0027)):
        assert abs(float((noise.abs() > bound).float().mean()) - share) < 0.1 * share + 2e-4
    for one, other in ((noise[:, :250], noise[:, 250:500]), (noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:])):
        assert (one * other).mean().abs() < 0.01
    assert torch.equal(normal(keys[7:9], 501), noise[7:9])
    next_step = normal(step_keys(torch.arange(400), torch.tensor(4)), 501)
    assert (next_step * noise).mean().abs() < 0.01
