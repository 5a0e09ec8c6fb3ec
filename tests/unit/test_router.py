"""The router's pure parts: policies, health, addresses, loads, events, heads, sums."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_omni.errors import InvalidRequest
from sgl_omni.router.events import Events
from sgl_omni.router.heads import request_head, request_id
from sgl_omni.router.health import Health, State, Thresholds
from sgl_omni.router.load import Load, estimate, parse_load
from sgl_omni.router.policy import POLICIES, make_policy
from sgl_omni.router.workers import parse_address


@dataclass
class View:
    name: str
    in_flight: int = 0
    work: float = 0.0
    load: Load | None = None


def pool(*in_flight: int) -> list[View]:
    return [View("abcdef"[i], n) for i, n in enumerate(in_flight)]


def chosen(policy: str, workers: list[View], times: int = 1, estimate: float = 10.0, **options: int) -> str:
    made = make_policy(policy, **options)
    return "".join(made.choose(workers, estimate).name for _ in range(times))


def test_round_robin_takes_each_in_turn() -> None:
    assert chosen("round_robin", pool(9, 0, 0), 7) == "abcabca"


def test_least_inflight_takes_the_idlest_and_ties_in_turn() -> None:
    assert chosen("least_inflight", pool(2, 0, 1), 3) == "bbb"
    assert Counter(chosen("least_inflight", pool(1, 1, 1), 9)) == {"a": 3, "b": 3, "c": 3}


def test_fill_first_fills_in_order_then_levels() -> None:
    assert chosen("fill_first", pool(3, 0, 0), capacity=4) == "a"
    assert chosen("fill_first", pool(4, 3, 0), capacity=4) == "b"
    assert chosen("fill_first", pool(6, 5, 4), capacity=4) == "c"


def test_power_of_two_never_takes_the_fullest_and_repeats_with_its_seed() -> None:
    drawn = chosen("power_of_two", pool(5, 1, 2), 200, seed=7)
    assert "a" not in drawn and {"b", "c"} == set(drawn)
    assert drawn == chosen("power_of_two", pool(5, 1, 2), 200, seed=7)
    assert chosen("power_of_two", pool(5), 2) == "aa"


def test_random_reaches_all_about_equally() -> None:
    counts = Counter(chosen("random", pool(0, 0, 0, 0), 4000, seed=1))
    assert len(counts) == 4 and min(counts.values()) > 850


def test_least_work_counts_text_not_requests() -> None:
    workers = [View("a", in_flight=1, work=2000), View("b", in_flight=5, work=300)]
    assert chosen("least_work", workers) == "b"


def test_least_work_counts_the_requests_of_others() -> None:
    busy = Load(running=8, queued=4, kv_free=0.9, known=2)
    workers = [View("a", 2, 100.0, busy), View("b", 3, 150.0, Load(3, 0, 0.9, known=3))]
    assert chosen("least_work", workers, estimate=50.0) == "b"


def test_least_work_avoids_a_worker_whose_kv_cache_is_nearly_full() -> None:
    workers = [View("a", 2, 100.0, Load(2, 0, 0.01, 2)), View("b", 2, 150.0, Load(2, 0, 0.5, 2))]
    assert chosen("least_work", workers, estimate=10.0) == "b"


@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(0, 100), st.floats(0, 1e6)), min_size=1, max_size=9),
    st.floats(0, 1e5),
)
def test_every_policy_takes_one_of_those_it_is_given(
    policy: str, state: list[tuple[int, float]], estimate: float
) -> None:
    workers = [View(str(i), n, work) for i, (n, work) in enumerate(state)]
    assert make_policy(policy).choose(workers, estimate) in workers


def up() -> Health:
    health = Health(Thresholds(failures=3, successes=2))
    health.probe_succeeded()
    return health


def test_a_worker_is_not_used_before_its_first_good_probe() -> None:
    health = Health(Thresholds())
    health.failed("no route")
    assert (health.state, health.takes_requests, health.reason) == (State.STARTING, False, "no route")
    health.probe_succeeded()
    assert health.state is State.UP and health.takes_requests


def test_failures_in_a_row_take_it_out_and_an_answer_between_them_counts_anew() -> None:
    health = up()
    health.failed("slow")
    health.failed("slow")
    health.answered()
    health.failed("slow")
    health.failed("slow")
    assert health.state is State.UP
    health.failed("slow")
    assert health.state is State.DOWN and not health.takes_requests


def test_one_refused_connection_takes_it_out() -> None:
    health = up()
    health.refused("connection refused")
    assert health.state is State.DOWN and health.reason == "connection refused"


def half_open() -> Health:
    health = up()
    health.refused("gone")
    health.probe_succeeded()
    assert health.state is State.DOWN
    health.probe_succeeded()
    assert health.state is State.HALF_OPEN
    return health


def test_it_comes_back_by_one_trial_at_a_time() -> None:
    health = half_open()
    assert health.takes_requests
    health.given_request()
    assert not health.takes_requests
    health.answered()
    assert health.state is State.UP and health.takes_requests


def test_a_failed_trial_takes_it_out_again_and_an_abandoned_one_decides_nothing() -> None:
    health = half_open()
    health.given_request()
    health.request_over()
    assert health.state is State.HALF_OPEN and health.takes_requests
    health.failed("broke")
    assert health.state is State.DOWN


def test_a_late_answer_does_not_bring_back_a_worker_that_is_down() -> None:
    health = up()
    health.refused("gone")
    health.answered()
    assert health.state is State.DOWN


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8091", "http://127.0.0.1:8091"),
        (" http://Worker:80/ ", "http://worker:80"),
        ("10.0.0.1:8091", "http://10.0.0.1:8091"),
        ("http://[::1]:8091", "http://[::1]:8091"),
    ],
)
def test_addresses_have_one_spelling(text: str, url: str) -> None:
    assert parse_address(text).url == url


@pytest.mark.parametrize(
    "text",
    ["", "http://", "http://host", "https://host:1", "http://host:0", "http://host:99999", "http://host:1/path",
     "http://u:p@host:1", "http://host:1?x=1", "http://[zz]:1", "http://ho st:1", "host:1\r\nx: y", "ftp://a:1", "http://é:1"],
)  # fmt: skip
def test_what_is_no_address_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match="write http://host:port"):
        parse_address(text)


METRICS = b"""# HELP sgl_omni_instance_tts_engine_running tts_engine.running of each process instance.
sgl_omni_instance_vocoder_running{instance="vocoder"} 7.0
sgl_omni_instance_tts_engine_running{instance="tts_engine@r0"} 3.0
sgl_omni_instance_tts_engine_running{instance="tts_engine@r1"} 2.0
sgl_omni_instance_tts_engine_queued{instance="tts_engine@r0"} 4.0
sgl_omni_instance_tts_engine_kv_capacity_tokens{instance="tts_engine@r0"} 1000.0
sgl_omni_instance_tts_engine_kv_used_tokens{instance="tts_engine@r0"} 250.0
sgl_omni_requests_in_flight 9.0
"""


def test_a_workers_load_is_read_from_its_metrics() -> None:
    load = parse_load(METRICS, known=6)
    assert load == Load(running=5, queued=4, kv_free=0.75, known=6)
    assert load.others == 3
    assert parse_load(b"process_cpu_seconds_total 1.0\n", 0) is None


@pytest.mark.parametrize(
    ("body", "characters"),
    [
        (b'{"model": "m", "input": "hello"}', 5),
        (b'{"input": ["ab", "cde"]}', 5),
        (b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "abcd"}]}, {"content": "xy"}]}', 6),
        (b"not json", 80),
        (b"[1, 2]", 80),
    ],
)
def test_the_work_of_a_request_is_its_text(body: bytes, characters: int) -> None:
    assert estimate(body, 200) == characters


STREAM = b'data: {"a": 1}\n\ndata: two\r\n\r\n: comment\n\nevent: x\ndata: 3\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_pass_whole_and_unchanged_however_they_are_cut(cuts: list[int]) -> None:
    events = Events()
    edges = [0, *sorted(cuts), len(STREAM)]
    out = [events.take(STREAM[a:b]) for a, b in pairwise(edges)]
    assert b"".join(out) + events.rest() == STREAM
    assert all(piece.endswith((b"\n\n", b"\r\n\r\n")) for piece in out if piece)


def test_a_request_keeps_its_headers_but_those_of_one_connection() -> None:
    headers = [(b"host", b"h"), (b"connection", b"close, x-mine"), (b"x-mine", b"1"), (b"te", b"trailers"),
               (b"authorization", b"Bearer k"), (b"x-request-id", b"old"), (b"content-length", b"5")]  # fmt: skip
    head = request_head(b"POST", b"/v1/x?y=1", headers, b"content-length: 5\r\n", b"req-1")
    assert head == (
        b"POST /v1/x?y=1 HTTP/1.1\r\nhost: h\r\nauthorization: Bearer k\r\ncontent-length: 5\r\n"
        b"x-request-id: req-1\r\n\r\n"
    )


def test_a_sane_request_id_is_kept() -> None:
    assert request_id(b"job-7.a_B") == b"job-7.a_B"
    for bad in (b"", b"a b", b"x" * 129, b"a\xff", None):
        assert request_id(bad).startswith(b"req-")
