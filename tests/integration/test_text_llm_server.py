"""A language model behind the real server: the answers of transformers, over OpenAI's routes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from servers import Server, fetch, serving

pytest.importorskip("transformers")

from tiny_text_llm import KINDS, Reference, build

ASKED = ("what is the weather", "the quick fox", "日本語の文章", "naïve café, and on to the sea", "a", "señor, привет")
MOST = 48
FLAGS = ("--platform", "cpu", "--name", "tiny", "--llm.factory.num_threads", "1", "--max-total-tokens", "1024")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("--model-path", str(folder), *FLAGS, run_folder=tmp_path_factory.mktemp("run")) as found:
        yield found


def post(server: Server, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{route}", json={"model": "tiny", **body}, timeout=60)


def chat(server: Server, text: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": MOST, **fields}
    response = post(server, "chat/completions", **body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def said(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def expected(reference: Reference, text: str, most: int = MOST) -> tuple[str, int, int]:
    """The answer's text, and the tokens of prompt and answer."""
    prompt = reference.chat_ids(text)
    ids = reference.ids(prompt, most)
    return reference.text(ids), len(prompt), len(ids)


def chunks(server: Server, **body: Any) -> list[dict[str, Any]]:
    text = post(server, "chat/completions", stream=True, **body).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_answers_are_those_of_transformers(server: Server, reference: Reference) -> None:
    for text in ASKED:
        answer = chat(server, text)
        words, prompt, tokens = expected(reference, text)
        assert said(answer) == words
        assert answer["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": tokens,
            "total_tokens": prompt + tokens,
        }


def test_a_stream_is_the_same_answer_in_pieces(server: Server, reference: Reference) -> None:
    for text in ASKED:
        words, _, tokens = expected(reference, text)
        found = chunks(
            server,
            messages=[{"role": "user", "content": text}],
            max_tokens=MOST,
            stream_options={"include_usage": True},
        )
        pieces = [c["choices"][0]["delta"].get("content", "") for c in found[:-1]]
        assert "".join(pieces) == words and sum(map(bool, pieces)) > 3
        assert found[-1]["usage"]["completion_tokens"] == tokens


def test_conversations_and_template_options(server: Server, reference: Reference) -> None:
    messages = [
        {"role": "user", "content": "the fox"},
        {"role": "assistant", "content": "jumps"},
        {"role": "user", "content": [{"type": "text", "text": "over"}]},
    ]
    answer = post(
        server, "chat/completions", messages=messages, max_tokens=20, chat_template_kwargs={"tone": "calm"}
    ).json()
    prompt = reference.chat_ids("the fox", "jumps", "over", tone="calm")
    assert said(answer) == reference.text(reference.ids(prompt, 20))


def test_texts_and_ids_are_continued(server: Server, reference: Reference) -> None:
    ids = reference.tokenizer.encode("the old stone bridge")
    words = reference.text(reference.ids(ids, 16))
    for prompt in ("the old stone bridge", ids):
        answer = post(server, "completions", prompt=prompt).json()
        assert answer["choices"][0]["text"] == words
        assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_early(server: Server, reference: Reference, stream: bool) -> None:
    words, _, tokens = expected(reference, ASKED[0])
    stop = words[5:8]
    body = {"messages": [{"role": "user", "content": ASKED[0]}], "max_tokens": MOST, "stop": ["never", stop]}
    before = server.gauges()["sgl_omni_instance_llm_generated_rows"]
    if stream:
        found = chunks(server, **body)
        pieces = [c["choices"][0]["delta"].get("content", "") for c in found]
        text, reason = "".join(pieces), found[-1]["choices"][0]["finish_reason"]
    else:
        answer = post(server, "chat/completions", **body).json()
        text, reason = said(answer), answer["choices"][0]["finish_reason"]
    assert (text, reason) == (words[: words.index(stop)], "stop")
    made = server.gauges()["sgl_omni_instance_llm_generated_rows"] - before
    assert 0 < made < tokens, "the engine went on"


def test_many_at_once_answer_as_each_alone(server: Server, reference: Reference) -> None:
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda text: said(chat(server, text)), ASKED * 3))
    assert together == [expected(reference, text)[0] for text in ASKED] * 3


def test_sampling_is_reproducible_by_its_seed(server: Server) -> None:
    options = {"temperature": 1.0, "top_p": 0.95, "top_k": 50}
    one = said(chat(server, ASKED[0], seed=5, **options))
    with ThreadPoolExecutor(4) as pool:
        more = list(pool.map(lambda seed: said(chat(server, ASKED[0], seed=seed, **options)), [5, 6, 7, 5]))
    assert more[0] == more[3] == one and len(set(more)) == 3


def test_penalties_reach_the_engine(server: Server, reference: Reference) -> None:
    ids = reference.ids(reference.chat_ids(ASKED[1]), MOST, repetition_penalty=1.3)
    assert said(chat(server, ASKED[1], repetition_penalty=1.3)) == reference.text(ids)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": 600}, "max_tokens", "the model attends over 512 in all"),
        ({"messages": [{"role": "user", "content": "日" * 400}]}, "messages", "the model attends over 512"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]},
            "messages",
            "the system speaks first",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_the_model_cannot_do_is_the_callers_mistake(
    server: Server, fields: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "stream": stream, **fields}
    response = post(server, "chat/completions", **body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param) and words in error["message"]


def test_ids_that_are_none_are_refused(server: Server) -> None:
    response = post(server, "completions", prompt=[5, 9999])
    assert response.status_code == 400 and "9999" in response.text


def test_a_client_that_goes_away_frees_the_engine(server: Server) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "ignore_eos": True,
        "max_tokens": 450,
        "stream": True,
    }
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=30) as response:
        for _, _line in zip(range(4), response.iter_lines(), strict=False):
            continue
    end = time.monotonic() + 60
    while (gauges := server.gauges())["sgl_omni_instance_llm_running"] or gauges["sgl_omni_requests_in_flight"]:
        assert time.monotonic() < end
        time.sleep(0.05)
    assert gauges["sgl_omni_instance_llm_kv_used_tokens"] == 0


def test_the_official_client_works_unchanged(server: Server, reference: Reference) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "system", "content": "be calm"}, {"role": "user", "content": ASKED[0]}]
    answer = client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=12)
    text = ""
    for chunk in client.chat.completions.create(model="tiny", messages=messages, max_completion_tokens=12, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == answer.choices[0].message.content and text
    completion = client.completions.create(model="tiny", prompt="the old", max_tokens=8, temperature=0)
    assert completion.choices[0].text == reference.text(reference.ids(reference.tokenizer.encode("the old"), 8))
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model="tiny", messages=messages, tools=[{"type": "function", "function": {"name": "f"}}]
        )


def test_the_benchmark_measures_chats(server: Server, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "sgl_omni.cli.main", "bench", "chat", "--url", server.url, "--model", "tiny"]
    command += ["--max-tokens", "6", "--ignore-eos", "--warmup", "0.5", "--seconds", "3", "--out", str(out)]
    done = subprocess.run([*command, "--concurrency", "1,3"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    levels = json.loads(out.read_text())["levels"]
    assert [level["concurrency"] for level in levels] == [1, 3]
    for level in levels:
        assert level["errors"] == 0 and level["requests"] >= 2 and level["mean_tokens"] == 6.0
        assert 0 < level["ttft"]["p50"] <= level["latency"]["p50"] and level["itl"]["p50"] is not None
        assert level["tokens_per_s"] == pytest.approx(6 * level["requests_per_s"], rel=0.02)
    assert "| 3 callers each |" in done.stdout and "TTFT" in done.stdout
    opened = subprocess.run([*command, "--rate", "2"], capture_output=True, text=True, timeout=120)
    assert opened.returncode == 0 and "2/s each" in opened.stdout
    refused = subprocess.run([*command, "--model", "other", "--rate", "2"], capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1 and "status 404" in refused.stderr


REPLICAS = ("--processes.llm.num_replicas", "2", "--processes.llm.replica_devices", "0,0")
ONE_PROCESS = ("--decode.process", "llm", "--preprocessing.process", "llm")
LAYOUTS = {
    "replicas that share": (*REPLICAS, "--llm.gpu_memory_fraction", "0.3", "--weight_share", "on"),
    "two ranks": ("--llm.tp_size", "2", "--llm.gpu", "0,1"),
    "one process": ONE_PROCESS,
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_gives_the_same_answers(
    folder: Path, reference: Reference, tmp_path: Path, layout: tuple[str, ...]
) -> None:
    with serving("--model-path", str(folder), *FLAGS, *layout, run_folder=tmp_path) as other:
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda text: said(chat(other, text, max_tokens=24)), ASKED))
        assert found == [expected(reference, text, 24)[0] for text in ASKED]
        health = fetch(f"{other.url}/health").json()
        roles = [i["weights"]["role"] for i in health["instances"] if i["weights"] and i["name"].startswith("llm")]
        assert ("leader" in roles and "follower" in roles) == ("--weight_share" in layout)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_architectures_pass_the_audit_of_sharing(tmp_path: Path, kind: str) -> None:
    folder = build(tmp_path / "model", kind)
    payloads = [{"prompt": text, "max_new_tokens": 12, "stream": bool(i % 2)} for i, text in enumerate(ASKED[:4])]
    payloads += [{**payload, "temperature": 1.0, "seed": i} for i, payload in enumerate(payloads)]
    lines = tmp_path / "payloads.jsonl"
    lines.write_text("\n".join(map(json.dumps, payloads)))
    command = [sys.executable, "-m", "sgl_omni.cli.main", "audit", str(folder), "--json", "--payloads", str(lines)]
    done = subprocess.run(
        [*command, *FLAGS, *ONE_PROCESS, "--llm.gpu_memory_fraction", "0.3", "--rounds", "1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout, done.stderr
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["passed"], verdict["problems"]) == (0, True, []), verdict
    assert verdict["backend"] == "shm"


def test_a_bad_checkpoint_ends_the_start(tmp_path: Path) -> None:
    folder = build(tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    command = [sys.executable, "-m", "sgl_omni.cli.main", "serve", "--model-path", str(folder), *FLAGS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "truncated or damaged" in done.stderr and "Traceback" not in done.stderr
