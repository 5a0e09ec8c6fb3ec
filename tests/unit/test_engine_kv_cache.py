"""The page pool by itself, and the size of what it stands for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_omni.engine import kv_budget
from sgl_omni.engine.engine import EngineSettings
from sgl_omni.engine.kv_budget import kv_bytes
from sgl_omni.engine.kv_cache import KVCache, KVShape, PagePool, count_pages
from sgl_omni.engine.request import Prompt
from sgl_omni.errors import StartupError

SHAPE = KVShape(layers=36, kv_heads=8, head_dim=128, dtype=torch.bfloat16)


def test_the_capacity_is_exact() -> None:
    assert SHAPE.bytes_per_token == 36 * 2 * 8 * 128 * 2 == 147_456
    assert count_pages(SHAPE, 1, max_total_tokens=30_001) == 30_001
    assert count_pages(SHAPE, 16, max_total_tokens=30_001) == 1875
    assert count_pages(SHAPE, 16, kv_cache_bytes=147_456 * 64) == 4
    assert count_pages(SHAPE, 16, kv_cache_bytes=147_456 * 64 - 1) == 3
    small = KVShape(layers=2, kv_heads=1, head_dim=4)
    assert KVCache(small, num_pages=5, page_size=3).num_bytes == 15 * small.bytes_per_token


def test_a_pool_that_holds_nothing_or_is_given_twice_does_not_start() -> None:
    with pytest.raises(StartupError, match="max_total_tokens of at least 16, or kv_cache_bytes of 2359296"):
        count_pages(SHAPE, 16, max_total_tokens=15)
    with pytest.raises(StartupError, match="either"):
        count_pages(SHAPE, 16, max_total_tokens=64, kv_cache_bytes=1 << 30)
    with pytest.raises(StartupError, match="either"):
        count_pages(SHAPE, 16)
    with pytest.raises(StartupError, match="page_size"):
        count_pages(SHAPE, 0, max_total_tokens=64)


def test_cached_pages_go_least_recently_used_first_and_the_end_of_a_prompt_before_its_start() -> None:
    pool = PagePool(num_pages=4, page_size=1)
    first, second = pool.allocate(2), pool.allocate(2)
    for page, key in zip([*first, *second], [b"1a", b"1b", b"2a", b"2b"], strict=True):
        pool.remember(page, key)
    pool.release(first)
    pool.release(second)
    assert pool.available == pool.cached == 4
    assert pool.allocate(1) == [first[1]]
    assert pool.take_known([b"1a", b"1b"]) == [first[0]]
    assert pool.take_known([b"2a", b"2b", b"2c"]) == second
    assert (pool.available, pool.used) == (0, 4)


def test_a_shared_page_is_free_when_its_last_user_gives_it_up() -> None:
    pool = PagePool(num_pages=2, page_size=8)
    pages = pool.allocate(1)
    pool.remember(pages[0], b"voice")
    assert pool.take_known([b"voice"]) == pages
    pool.release(pages)
    assert (pool.used, pool.cached) == (1, 0)
    pool.release(pages)
    assert (pool.used, pool.cached) == (0, 1)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4), st.booleans()), max_size=80))
def test_a_pool_never_gives_a_used_page_nor_wrong_content(num_pages: int, steps: list[tuple[int, int, bool]]) -> None:
    """Users take runs of pages whose content is a chain of keys, share what is known, and leave in any order."""
    pool = PagePool(num_pages, page_size=1)
    content: dict[int, bytes] = {}
    held: list[list[int]] = []
    for chain, length, leave in steps:
        if leave:
            if held:
                pool.release(held.pop(chain % len(held)))
            continue
        keys = [bytes([chain, i]) for i in range(length)]
        known = pool.take_known(keys)
        assert [content[page] for page in known] == keys[: len(known)]
        missing = keys[len(known) :]
        if len(missing) > pool.available:
            pool.release(known)
            continue
        fresh = pool.allocate(len(missing))
        assert not set(fresh) & {page for pages in held for page in pages} and not set(fresh) & set(known)
        for page, key in zip(fresh, missing, strict=True):
            content[page] = key
            pool.remember(page, key)
        held.append(known + fresh)
        assert pool.used == len({page for pages in held for page in pages})
    for pages in held:
        pool.release(pages)
    assert (pool.available, pool.used) == (num_pages, 0)
    assert sorted(pool.allocate(num_pages)) == list(range(num_pages))


def test_the_keys_of_prompts_agree_up_to_where_their_content_does() -> None:
    a = Prompt(ids=torch.tensor([[1], [2], [3], [4], [5]]))
    b = Prompt(ids=torch.tensor([[1], [2], [3], [9]]))
    moved = Prompt(ids=torch.tensor([[1], [2]]), positions=torch.tensor([[0, 2]]))
    assert len(a.page_keys(2)) == 2
    assert a.page_keys(2)[0] == b.page_keys(2)[0]
    assert a.page_keys(2)[1] != b.page_keys(2)[1]
    assert moved.page_keys(2)[0] != a.page_keys(2)[0]
    embeddings = torch.randn(4, 3)
    assert Prompt(embeddings=embeddings).page_keys(2) == Prompt(embeddings=embeddings.clone()).page_keys(2)
    assert Prompt(embeddings=embeddings + 1).page_keys(2) != Prompt(embeddings=embeddings).page_keys(2)
    assert Prompt(embeddings=embeddings.bfloat16()).page_keys(2)[0] != Prompt(embeddings=embeddings).page_keys(2)[0]


def test_a_pool_is_what_a_budget_leaves_beside_the_weights() -> None:
    gib = 1 << 30
    assert kv_bytes(8 * gib, static_bytes=20 * gib, budget_bytes=30 * gib) == 12 * gib
    assert kv_bytes(8 * gib, budget_bytes=30 * gib) == 20 * gib
    with pytest.raises(StartupError, match="nothing says how large the KV pool is"):
        kv_bytes(8 * gib)
    with pytest.raises(StartupError, match=r"9.00 GiB, leaves nothing .* 8.00 GiB and 2.00 GiB of working memory"):
        kv_bytes(8 * gib, budget_bytes=9 * gib)


def test_settings_pin_the_pool_or_derive_it() -> None:
    cpu = torch.device("cpu")
    budget = (
        2 * 64 * SHAPE.bytes_per_token
    )  # a CPU leaves half of it to what else a small stage holds, and 2 GiB at most
    assert EngineSettings(budget_bytes=budget).pages(SHAPE, cpu) == 4
    assert EngineSettings(budget_bytes=budget, max_total_tokens=32).pages(SHAPE, cpu) == 2
    large = 2 * kv_budget.WORKING_BYTES + 64 * SHAPE.bytes_per_token
    assert EngineSettings(budget_bytes=large).pages(SHAPE, cpu) == (large - (2 << 30)) // (16 * SHAPE.bytes_per_token)
    with pytest.raises(StartupError, match="mem_fraction_static is a share of a GPU"):
        EngineSettings(mem_fraction_static=0.5).pages(SHAPE, cpu)
