"""The arithmetic of how many replicas a GPU has room for, on figures that can be checked by hand."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_omni.dp.advice import HEADROOM, Measured, Room, advise

GB = 10**9
ONE = Measured(
    sm_active=0.29,
    host_cores=5.2,
    weights_bytes=8 * GB,
    other_bytes=2 * GB,
    bytes_per_token=150_000,
    tokens_needed=40_000,  # 6 GB
)
"""Uses 16 GB, 6 cores and 29 % of the card."""


def test_idle_multiprocessors_are_filled_and_the_memory_left_goes_to_the_pools() -> None:
    found = advise(ONE, Room(memory_bytes=100 * GB, cores=32))
    assert (found.replicas, found.bound, found.cores_each, found.mps) == (3, "multiprocessors", 10, True)
    assert found.max_total_tokens == (95 * GB - 3 * 10 * GB) // 3 // 150_000 == 144_444
    assert not found.weight_share


def test_a_busy_card_takes_one_replica() -> None:
    found = advise(dataclasses.replace(ONE, sm_active=0.61), Room(memory_bytes=100 * GB, cores=32))
    assert (found.replicas, found.bound, found.mps, found.cores_each) == (1, "multiprocessors", False, 32)
    assert advise(dataclasses.replace(ONE, sm_active=0.5), Room(memory_bytes=100 * GB, cores=32)).replicas == 2


def test_cores_bound_the_number_too() -> None:
    found = advise(ONE, Room(memory_bytes=100 * GB, cores=17))
    assert (found.replicas, found.bound, found.cores_each) == (2, "cores", 8)


def test_weights_are_shared_only_where_that_adds_replicas() -> None:
    small = Room(memory_bytes=40 * GB, cores=32, can_share=True)  # 38 GB to use: 2 x 16, or 8 + 3 x 8
    found = advise(ONE, small)
    assert (found.replicas, found.weight_share, found.max_total_tokens) == (3, True, 53_333)
    assert (advise(ONE, dataclasses.replace(small, can_share=False)).replicas) == 2
    large = advise(ONE, Room(memory_bytes=100 * GB, cores=32, can_share=True))
    assert (large.replicas, large.weight_share) == (3, False)


def test_pools_are_whole_pages_and_no_larger_than_is_of_use() -> None:
    paged = dataclasses.replace(ONE, page_tokens=64)
    assert advise(paged, Room(memory_bytes=100 * GB, cores=32)).max_total_tokens == 144_384  # 2256 pages
    useful = dataclasses.replace(paged, tokens_useful=50_000)
    assert advise(useful, Room(memory_bytes=100 * GB, cores=32)).max_total_tokens == 50_048


def test_what_does_not_fit_at_all_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="one replica of 40000 tokens lacks 1750000000 bytes"):
        advise(ONE, Room(memory_bytes=15 * GB, cores=32))


@pytest.mark.parametrize(
    ("name", "value"),
    [("sm_active", 0.0), ("sm_active", 1.1), ("sm_active", float("nan")), ("host_cores", 0.0), ("bytes_per_token", 0)],
)
def test_measurements_that_cannot_be_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(ONE, **{name: value})


@given(
    sm=st.floats(0.01, 1.0),
    host=st.floats(0.1, 64.0),
    weights=st.integers(0, 40 * GB),
    other=st.integers(0, 8 * GB),
    needed=st.integers(1, 200_000),
    page=st.integers(1, 1024),
    memory=st.integers(8 * GB, 200 * GB),
    cores=st.integers(1, 128),
    share=st.booleans(),
)
def test_what_is_advised_fits(
    sm: float, host: float, weights: int, other: int, needed: int, page: int, memory: int, cores: int, share: bool
) -> None:
    measured = Measured(
        sm_active=sm,
        host_cores=host,
        weights_bytes=weights,
        other_bytes=other,
        bytes_per_token=100_000,
        tokens_needed=needed,
        page_tokens=page,
    )
    try:
        found = advise(measured, Room(memory_bytes=memory, cores=cores, can_share=share))
    except ValueError:
        assert weights + other + needed * 100_000 > memory * (1 - HEADROOM) - page * 100_000
        return
    copies = 1 if found.weight_share else found.replicas
    taken = copies * weights + found.replicas * (other + found.max_total_tokens * 100_000)
    assert taken <= memory * (1 - HEADROOM)
    assert found.max_total_tokens >= needed and found.max_total_tokens % page == 0
    assert found.replicas * found.cores_each <= cores and found.cores_each >= 1
    assert found.replicas == 1 or (sm <= 0.6 and found.replicas * sm <= 1 + 1e-9)
