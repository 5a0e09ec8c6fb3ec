"""The benchmark's pure parts: texts, arrivals, figures, the sweep, the judgement of runs, the table."""

from __future__ import annotations

import sys
from io import BytesIO
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import soundfile
from python_multipart.multipart import parse_form

from sgl_omni.bench.chat import ChatOptions, ChatStream
from sgl_omni.bench.client import Orders, Record
from sgl_omni.bench.measure import (
    BenchError,
    Load,
    Sweep,
    percentiles,
    run_client,
    summarise,
    summarise_chat,
    summarise_transcription,
    timeline,
)
from sgl_omni.bench.report import chat_table, study_table, transcription_table
from sgl_omni.bench.study import WorkloadSpec, judge, load_study, parse_cores
from sgl_omni.bench.transcription import TranscriptionOptions, TranscriptStream, find_recordings
from sgl_omni.bench.workload import Workload, arrivals, length_class, load_texts, parse_mix
from sgl_omni.errors import InvalidRequest


def test_the_shipped_texts_are_of_many_lengths() -> None:
    texts = load_texts("english")
    lengths = sorted(map(len, texts))
    assert len(texts) == len(set(texts)) == 50
    assert lengths[0] <= 12 and 50 <= median(lengths) <= 70 and lengths[-1] >= 170
    assert {length_class(t) for t in texts} == {"short", "medium", "long"}


def test_texts_are_drawn_the_same_by_a_seed_and_differ_by_stream() -> None:
    workload = Workload(load_texts("english"), seed=3)
    first = list(islice(workload.draw(0), 100))
    assert first == list(islice(workload.draw(0), 100)) != list(islice(workload.draw(1), 100))
    assert sorted(first[:50]) == sorted(workload.texts), "each once before any is repeated"


def test_a_mix_keeps_its_proportions() -> None:
    workload = Workload(load_texts("english"), mix=parse_mix("10/60/30"))
    drawn = [length_class(text) for text in islice(workload.draw(0), 5000)]
    shares = [drawn.count(name) / len(drawn) for name in ("short", "medium", "long")]
    assert shares == pytest.approx([0.1, 0.6, 0.3], abs=0.03)


@pytest.mark.parametrize("text", ["", "1/2", "a/b/c", "-1/1/1", "0/0/0", "nan/1/1", "inf/1/1"])
def test_a_mix_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="mix"):
        parse_mix(text)


def test_texts_that_are_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="english"):
        load_texts(str(tmp_path / "nothing"))
    (tmp_path / "empty").write_text("\n \n")
    with pytest.raises(InvalidRequest, match="no text"):
        load_texts(str(tmp_path / "empty"))
    with pytest.raises(InvalidRequest, match="long"):
        Workload(("Short.",), mix=(1, 0, 1))


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(rate=50, seconds=200, seed=5)
    gaps = [b - a for a, b in pairwise(times)]
    assert len(times) == pytest.approx(10000, rel=0.05) and max(times) < 200
    assert fmean(g > 1 / 50 for g in gaps) == pytest.approx(0.368, abs=0.03)  # e^-1
    assert times == arrivals(50, 200, 5) != arrivals(50, 200, 6)
    bursts = arrivals(50, 200, 5, burst=10)
    assert len(bursts) == pytest.approx(10000, rel=0.15) and all(bursts.count(t) == 10 for t in set(bursts[:100]))


def test_percentiles_are_of_nearest_rank() -> None:
    found = percentiles([float(n) for n in range(100, 0, -1)])
    assert found == {"p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert percentiles([7.0])["p99"] == 7.0 and percentiles([])["p50"] is None


def record(begun: float, ended: float, audio: float = 2.0, error: str | None = None) -> Record:
    return Record(begun, None if error else begun + 0.1, ended, audio, 40, error)


def test_the_warm_up_is_excluded_and_late_ends_count_for_latency_only() -> None:
    load = Load(concurrency=2, warmup=2.0, seconds=10.0)
    records = [
        record(0.0, 1.0),  # all in the warm-up
        record(1.5, 2.5),  # ends in the window, began before
        record(3.0, 4.0),
        record(11.5, 14.5),  # begins in the window, ends after
        record(5.0, 5.1, error="status 503"),
        record(0.5, 0.6, error="in the warm-up"),
    ]
    found = summarise([records[:3], records[3:]], load)
    assert found["requests_per_s"] == 0.2 and found["audio_s_per_s"] == 0.4
    assert found["requests"] == 2 and found["errors"] == 1 and found["error_examples"] == ["status 503"]
    assert found["latency"]["p50"] == 1.0 and found["latency"]["max"] == 3.0
    assert found["ttfa"]["p50"] == pytest.approx(0.1) and found["rtf"]["max"] == 1.5
    assert timeline([records], load)[:5] == [0, 1, 1, 0, 1]


def test_a_sweep_doubles_until_two_levels_no_longer_climb() -> None:
    sweep, levels = Sweep(), []
    throughput = {1: 10, 2: 19, 4: 30, 8: 31, 16: 36, 32: 36.5, 64: 35, 128: 99}
    while sweep.level is not None:
        levels.append(sweep.level)
        sweep.take(throughput[sweep.level])
    assert levels == [1, 2, 4, 8, 16, 32, 64]
    bounded = Sweep(most=2)
    for _ in range(2):
        bounded.take(1000)
    assert bounded.level is None


def run(configuration: str, rate: float | None, errors: int = 0) -> dict[str, Any]:
    figures = rate and {
        "requests_per_s": rate, "audio_s_per_s": rate * 3, "errors": errors, "error_examples": ["x"] * errors,
        "latency": {"p50": 1.0, "p95": 2.0},
    }  # fmt: skip
    outcome, reason = ("nominal", "") if figures else ("failed", "did not | start\nat all")
    return {"configuration": configuration, "outcome": outcome, "reason": reason, "figures": figures}


def test_every_attempt_is_in_the_table_with_its_outcome() -> None:
    runs = [run("one", 20.0), run("two", 40.0), run("one", 22.0), run("two", None), run("two", 38.0), run("two", 10.0),
            run("two", 41.0, errors=1)]  # fmt: skip
    judged = judge(runs, degraded_below=0.7)
    assert [r["outcome"] for r in judged] == ["nominal"] * 3 + ["failed", "nominal", "degraded", "degraded"]
    judged.append({**run("one", None), "reason": "word " * 100})
    table = study_table({"configurations": ["one", "two", "three"], "runs": judged})
    assert "| three | - | - | - | - | not run |" in table and "word ... |" in table
    assert (
        "| two | 38.00 to 40.00 | 1.73 to 1.82x | 114.0 to 120.0 | 1.00 | 2 nominal, 2 degraded, 1 failed of 5 |"
        in table
    )
    assert "| 4 | two | failed | - | did not \\| start at all |" in table
    assert "| 6 | two | degraded | 10.00 | 10.00 requests/s, 0.26 of this configuration's median |" in table
    assert sum(line.startswith(tuple(f"| {n} |" for n in range(1, 9))) for line in table.splitlines()) == 8


STUDY = """
name: s
cores: "0"
configurations:
  a: {serve: [--model-path, m], concurrency: 2}
"""


def test_a_study_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(STUDY)
    spec = load_study(path)
    assert spec.configurations["a"].serve == ["--model-path", "m"] and spec.repeats == 3


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (STUDY.replace("concurrency", "concurency"), "configurations.a.concurency"),
        (STUDY.replace(", concurrency: 2", ""), "'a' has no load"),
        (STUDY.replace("concurrency: 2", "concurrency: 2, replicas: 2"), "cannot be split evenly over 2"),
        (STUDY.replace('"0"', '"0-"'), "0-3,8"),
        (STUDY.replace('"0"', '"0,0"'), "named twice"),
        (STUDY.replace('"0"', '"4095"'), "no core 4095"),
        ("- a\n", "study"),
        ("{", "s.yaml"),
    ],
)
def test_what_is_wrong_with_a_study_is_named(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"s\.yaml") as refused:
        load_study(path)
    assert names in str(refused.value)


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("raise SystemExit('no route')", "ended with status 1: no route"),
        ("print('[{')", "left 3 bytes, no record: .*; "),
        ("", "left 0 bytes, no record: "),
    ],
)
async def test_a_client_that_leaves_no_record_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, says: str
) -> None:
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!{sys.executable}\n{program}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr("sgl_omni.bench.measure.sys", SimpleNamespace(executable=str(interpreter)))
    orders = Orders(
        url="http://h:1", workload=Workload(("a",)), stream=0, begin=0.0, warmup=0.0, seconds=1.0, concurrency=1
    )
    with pytest.raises(BenchError, match=f"the client of http://h:1 {says}"):
        await run_client(orders, None)


def test_cores_are_numbers_and_ranges() -> None:
    assert parse_cores("0") == [0]
    with pytest.raises(ValueError, match="2-1"):
        parse_cores("2-1")


def chat_events(*texts: str, tokens: int = 3, done: bool = True) -> bytes:
    events = ['{"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}']
    events += [f'{{"choices": [{{"delta": {{"content": "{text}"}}}}], "usage": null}}' for text in texts]
    events += ['{"choices": [{"delta": {}, "finish_reason": "stop"}]}']
    events += [f'{{"choices": [], "usage": {{"prompt_tokens": 2, "completion_tokens": {tokens}}}}}']
    return "".join(f"data: {event}\n\n" for event in events + ["[DONE]"] * done).encode()


def test_a_streamed_answer_is_timed_piece_by_piece() -> None:
    stream, data = ChatStream(), chat_events("one", "two", "three")
    second, third = data.index(b"two") + 1, data.index(b"three") + 6
    for part, now in ((data[:second], 10.0), (data[second:third], 10.5), (data[third:], 12.0)):
        stream.feed(part, now)
    assert (stream.error, stream.tokens, stream.times) == (None, 3, [10.0, 10.5, 12.0])
    assert stream.gaps == (0.5, 1.5)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (chat_events("one", done=False), "broke off"),
        (chat_events(), "no text"),
        (chat_events("one", tokens=0), "no text"),
        (chat_events("one", done=False) + b'data: {"error": {"message": "stage failed"}}\n\n', "stage failed"),
        (b"data: hello\n\n", "not an event"),
    ],
)
def test_an_answer_that_does_not_count_says_why(data: bytes, error: str) -> None:
    stream = ChatStream()
    stream.feed(data, 1.0)
    assert stream.error is not None and error in stream.error


def test_figures_of_a_chat() -> None:
    load = Load(warmup=1, seconds=10)
    records = [
        Record(1.0, 1.2, 3.0, 0.0, 20, tokens=10, gaps=(0.1, 0.2)),
        Record(2.0, 2.4, 9.0, 0.0, 40, tokens=30, gaps=(0.3,)),
        Record(0.5, 0.6, 2.0, 0.0, 40, tokens=7),  # begun in the warm-up
        Record(4.0, None, 5.0, 0.0, 10, error="status 503"),
    ]
    figures = summarise_chat([records], load)
    assert (figures["requests"], figures["errors"], figures["error_examples"]) == (2, 1, ["status 503"])
    assert (figures["requests_per_s"], figures["tokens_per_s"], figures["mean_tokens"]) == (0.3, 4.7, 20.0)
    assert (figures["ttft"]["p50"], figures["ttft"]["max"]) == (0.2, 0.4)
    assert (figures["itl"]["p50"], figures["itl"]["max"], figures["latency"]["max"]) == (0.2, 0.3, 7.0)
    short = summarise_chat([records], load, short=True)
    assert (short["ttft_p50"], short["latency_p50"]) == (0.2, 2.0)
    row = chat_table([{**figures, "rate": None, "concurrency": 2}]).splitlines()[2]
    assert row == "| 2 callers each | 0.30 | 4.7 | 200 / 400 | 200 / 300 | 2.00 / 7.00 | 1 |"


def test_what_a_chat_asks() -> None:
    body = ChatOptions(max_tokens=9, ignore_eos=True, temperature=0.0).request("why?", "m")
    assert body["messages"] == [{"role": "user", "content": "why?"}] and body["stream"] is True
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ("m", 9, True, 0.0)
    assert "temperature" not in ChatOptions().request("why?", "m")


def test_a_speech_may_be_told_its_length() -> None:
    assert "max_new_tokens" not in Workload(("a",)).request("a")
    assert Workload(("a",), max_new_tokens=95).request("a")["max_new_tokens"] == 95
    assert WorkloadSpec(max_new_tokens=95).build().max_new_tokens == 95


def test_recordings_of_a_folder_are_known_by_their_length(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "b.wav", np.zeros(4000), 16000)
    soundfile.write(tmp_path / "a.flac", np.zeros((44100, 2)), 44100)
    (tmp_path / "notes.txt").write_text("no recording")
    found = find_recordings(tmp_path)
    assert list(found.items()) == [(str(tmp_path / "a.flac"), 1.0), (str(tmp_path / "b.wav"), 0.25)]


@pytest.mark.parametrize("kind", ["no folder", "no recording", "no audio", "empty"])
def test_a_folder_without_recordings_is_refused(tmp_path: Path, kind: str) -> None:
    folder, words = tmp_path, {"no folder": "No such file", "no recording": "no recording", "no audio": "x.wav"}
    if kind == "no folder":
        folder = tmp_path / "nowhere"
    elif kind == "no audio":
        (tmp_path / "x.wav").write_bytes(b"words")
    elif kind == "empty":
        soundfile.write(tmp_path / "x.wav", np.zeros(0), 16000)
    with pytest.raises(InvalidRequest, match=words.get(kind, "is empty")):
        find_recordings(folder)


def test_what_a_transcription_asks() -> None:
    options = TranscriptionOptions({"/r/x.flac": 1.0}, language="de", prompt="Größe")
    content_type, body = options.form("/r/x.flac", b"\x00\r\n--\xff", "m")
    fields: dict[bytes, bytes] = {}
    files: dict[bytes, tuple[bytes, bytes]] = {}

    def take_field(field: Any) -> None:
        fields[field.field_name] = field.value

    def take_file(file: Any) -> None:
        file.file_object.seek(0)
        files[file.field_name] = file.file_name, file.file_object.read()

    headers = {"Content-Type": content_type.encode(), "Content-Length": str(len(body)).encode()}
    parse_form(headers, BytesIO(body), take_field, take_file)
    assert fields == {b"model": b"m", b"stream": b"true", b"language": b"de", b"prompt": "Größe".encode()}
    assert files == {b"file": (b"audio.flac", b"\x00\r\n--\xff")}


def transcript_events(*texts: str, done: bool = True) -> bytes:
    events = [f'{{"type": "transcript.text.delta", "delta": "{text}"}}' for text in texts]
    end = '{"type": "transcript.text.done", "text": "", "usage": {"type": "tokens", "output_tokens": 7}}'
    return "".join(f"data: {event}\n\n" for event in [*events, *[end] * done]).encode()


def test_a_transcription_is_timed_piece_by_piece_and_may_be_silent() -> None:
    stream, data = TranscriptStream(), transcript_events("one", "two")
    second = data.index(b"two")
    stream.feed(data[:second], 1.0)
    stream.feed(data[second:], 3.0)
    assert (stream.error, stream.tokens, stream.times, stream.gaps) == (None, 7, [1.0, 3.0], (2.0,))
    silent = TranscriptStream()
    silent.feed(transcript_events(), 1.0)
    assert (silent.error, silent.times) == (None, [])
    for data, words in (
        (transcript_events("one", done=False), "broke off"),
        (b'data: {"error": {"message": "stage failed"}}\n\n', "stage failed"),
        (b"data: hello\n\n", "not an event"),
    ):
        failed = TranscriptStream()
        failed.feed(data, 1.0)
        assert failed.error is not None and words in failed.error


def test_figures_of_transcriptions() -> None:
    load = Load(warmup=1, seconds=10)
    records = [
        Record(1.0, 1.2, 3.0, 20.0, 9, tokens=10),
        Record(2.0, None, 3.0, 40.0, 9, tokens=1),  # silence: no first text
        Record(0.5, 0.6, 2.0, 10.0, 9, tokens=9),  # begun in the warm-up
        Record(4.0, None, 5.0, 0.0, 9, error="status 400"),
    ]
    figures = summarise_transcription([records], load)
    assert (figures["requests"], figures["errors"], figures["error_examples"]) == (2, 1, ["status 400"])
    assert (figures["requests_per_s"], figures["audio_s_per_s"], figures["tokens_per_s"]) == (0.3, 7.0, 2.0)
    assert (figures["ttft"]["p50"], figures["rtf"]["p50"], figures["rtf"]["max"]) == (0.2, 0.025, 0.1)
    assert figures["mean_audio_s"] == 30.0
    short = summarise_transcription([records], load, short=True)
    assert (short["ttft_p50"], short["latency_p50"], short["audio_s_per_s"]) == (0.2, 1.0, 7.0)
    row = transcription_table([{**figures, "rate": 2.0, "concurrency": None}]).splitlines()[2]
    assert row == "| 2/s each | 0.30 | 7.0 | 200 / 200 | 1.00 / 2.00 | 0.0250 / 0.1000 | 1 |"
