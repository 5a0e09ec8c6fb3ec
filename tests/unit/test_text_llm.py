"""Plain language models: the engine's task and model against transformers, and the stages around them."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from sgl_omni.config.load import load_config
from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.engine.task import InputSpec
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.models.text_llm.decode import TextDecoder
from sgl_omni.models.text_llm.generation import GenerationDefaults
from sgl_omni.models.text_llm.model import TextModel
from sgl_omni.models.text_llm.pipeline import TextLLMPipelineConfig
from sgl_omni.models.text_llm.preprocess import TextPreprocessor
from sgl_omni.models.text_llm.stages import create_llm
from sgl_omni.models.text_llm.task import TextTask
from sgl_omni.text.tokenizer import TextTokenizer
from sgl_omni.topology.builder import build_plan
from sgl_omni.topology.host import virtual_host

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("transformers")

from tiny_text_llm import KINDS, VOCABULARY, Reference, build, save_tokenizer  # noqa: E402 - needs transformers

BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])
ASKED = ("what is the weather", "the quick fox", "日本語", "a", "naïve café, and on to the sea it goes")
MOST = 40


@dataclass(frozen=True)
class Model:
    folder: Path
    reference: Reference
    model: TextModel
    tokenizer: TextTokenizer

    def prompts(self) -> list[list[int]]:
        return [self.reference.chat_ids(text) for text in ASKED]


@pytest.fixture(scope="module")
def models(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    found = {}
    for kind in KINDS:
        folder = build(tmp_path_factory.mktemp(kind), kind)
        found[kind] = Model(folder, Reference(folder), TextModel.load(folder), TextTokenizer.load(folder))
    return found


@pytest.fixture
def qwen(models: dict[str, Model]) -> Model:
    return models["Qwen3"]


def engine_for(found: Model, device_rows: bool = False, **settings: Any) -> AutoregressiveEngine:
    options = EngineSettings(**{"max_total_tokens": 1024, "page_size": 4, **settings})
    positions = found.model.config.max_positions
    task = TextTask(
        InputSpec(vocab_sizes=(VOCABULARY,), hidden_size=32),
        found.tokenizer,
        eos_ids=GenerationDefaults.load(found.folder).eos_ids,
        pool_tokens=options.pages(found.model.kv_shape, found.model.device) * options.page_size,
        max_positions=positions,
    )
    return AutoregressiveEngine.build(found.model, task, options, max_positions=positions, device_rows=device_rows)


def answers(found: Model, engine: AutoregressiveEngine, payloads: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each request's text, streamed text, and the rest of its result, by way of the decode stage."""
    stage = TextDecoder(found.tokenizer)
    states = {name: stage.open(SimpleNamespace()) for name in payloads}  # type: ignore[arg-type]
    streamed = dict.fromkeys(payloads, "")
    results = {}
    for name, payload in payloads.items():
        engine.add(name, payload)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            state, name = states[output.request_id], output.request_id
            for chunk in output.chunks:
                streamed[name] += "".join(said["text"] for said in stage.feed(state, chunk))
            if output.result is not None:
                streamed[name] += "".join(said["text"] for said in stage.flush(state))
                results[name] = {**stage.result(state, output.result), "streamed": streamed[name]}
    return results


@BOTH_RUNNERS
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_text_equals_transformers(models: dict[str, Model], kind: str, stream: bool, device_rows: bool) -> None:
    found = models[kind]
    payloads = {
        str(i): {"prompt_ids": prompt, "max_new_tokens": MOST, "stream": stream}
        for i, prompt in enumerate(found.prompts())
    }
    results = answers(found, engine_for(found, device_rows), payloads)
    for i, prompt in enumerate(found.prompts()):
        ids = found.reference.ids(prompt, MOST)
        result = results[str(i)]
        assert result["text"] == found.reference.text(ids)
        assert (result["input_tokens"], result["output_tokens"]) == (len(prompt), len(ids))
        assert result["finish_reason"] == ("stop" if ids[-1] in (0, 2) else "length")
        assert result["streamed"] == (result["text"] if stream else "")


@BOTH_RUNNERS
def test_a_repetition_penalty_counts_the_prompt_as_transformers_does(qwen: Model, device_rows: bool) -> None:
    payloads = {
        str(i): {"prompt_ids": prompt, "max_new_tokens": MOST, "repetition_penalty": 1.0 + 0.2 * (i % 3)}
        for i, prompt in enumerate(qwen.prompts())
    }
    results = answers(qwen, engine_for(qwen, device_rows, max_total_tokens=160), payloads)
    for i, prompt in enumerate(qwen.prompts()):
        ids = qwen.reference.ids(prompt, MOST, repetition_penalty=1.0 + 0.2 * (i % 3))
        assert results[str(i)]["text"] == qwen.reference.text(ids)
    plain = qwen.reference.ids(qwen.prompts()[1], MOST)
    assert qwen.reference.ids(qwen.prompts()[1], MOST, repetition_penalty=1.2) != plain, "the penalty changes nothing"


@BOTH_RUNNERS
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_stop_text_ends_the_answer_and_the_decoding(qwen: Model, stream: bool, device_rows: bool) -> None:
    for prompt in qwen.prompts():
        ids = qwen.reference.ids(prompt, MOST)
        whole = qwen.reference.text(ids)
        at = next(i for i in range(3, len(whole)) if "\ufffd" not in whole[i : i + 3])
        stop = whole[at : at + 3]
        payload = {"prompt_ids": prompt, "max_new_tokens": MOST, "stop": ["nowhere", stop], "stream": stream}
        result = answers(qwen, engine_for(qwen, device_rows), {"one": payload})["one"]
        assert result["text"] == whole[: whole.index(stop)]
        assert result["finish_reason"] == "stop"
        needed = next(n for n in range(1, len(ids) + 1) if stop in qwen.reference.text(ids[:n]))
        assert result["output_tokens"] <= needed + 3, "at most a character's bytes are waited for"
        assert result["streamed"] == (result["text"] if stream else "")


def test_ignore_eos_goes_on(qwen: Model) -> None:
    prompt = qwen.prompts()[0]
    forced = qwen.reference.ids(prompt, MOST, eos_token_id=None)
    task_ends = forced[5]
    file = qwen.folder / "generation_config.json"
    before = file.read_text()
    file.write_text(json.dumps({"eos_token_id": task_ends}))
    try:
        engine = engine_for(qwen)
    finally:
        file.write_text(before)
    payload = {"prompt_ids": prompt, "max_new_tokens": MOST}
    results = answers(qwen, engine, {"stops": payload, "goes on": {**payload, "ignore_eos": True}})
    first = forced.index(task_ends)
    assert results["stops"]["text"] == qwen.reference.text(forced[:first])
    assert (results["stops"]["finish_reason"], results["stops"]["output_tokens"]) == ("stop", first + 1)
    assert (results["goes on"]["finish_reason"], results["goes on"]["output_tokens"]) == ("length", MOST)


@BOTH_RUNNERS
def test_what_else_runs_changes_nothing(qwen: Model, device_rows: bool) -> None:
    """Streamed and whole requests, stop texts and sampling in one tight pool, with aborts."""
    rng = random.Random(3)
    payloads = {}
    for i, prompt in enumerate(qwen.prompts() * 2):
        fields: dict[str, Any] = {"stream": bool(i % 2), "max_new_tokens": rng.randrange(5, MOST)}
        if i % 3 == 0:
            fields |= {"temperature": 1.0, "seed": i, "top_p": 0.9, "top_k": 40}
        if i % 4 == 0:
            fields["stop"] = ["e"]
        payloads[str(i)] = {"prompt_ids": prompt, **fields}
    alone = {
        name: answers(qwen, engine_for(qwen, device_rows), {name: payload})[name] for name, payload in payloads.items()
    }
    engine = engine_for(qwen, device_rows, max_total_tokens=176)
    for name, payload in payloads.items():
        engine.add(f"doomed {name}", payload)
    engine.step()
    for name in payloads:
        engine.abort(f"doomed {name}")
    assert answers(qwen, engine, payloads) == alone
    assert engine.stats()["kv_used_tokens"] == 0


@BOTH_RUNNERS
@pytest.mark.parametrize(("together", "size"), [(8, 1), (9, 2), (25, 4)])
def test_pieces_grow_with_the_company(qwen: Model, together: int, size: int, device_rows: bool) -> None:
    engine = engine_for(qwen, device_rows, max_total_tokens=2048)
    for i in range(together):
        engine.add(str(i), {"prompt_ids": [5, 6, 7 + i], "max_new_tokens": 13, "ignore_eos": True})
    sizes: dict[str, list[int]] = {str(i): [] for i in range(together)}
    while engine.has_work:
        for output in engine.step():
            sizes[output.request_id] += [len(chunk["token_ids"]) for chunk in output.chunks]
    assert all(found == [1, *[size] * (12 // size)] for found in sizes.values())


def test_an_answer_may_be_as_long_as_there_is_room(qwen: Model) -> None:
    engine = engine_for(qwen, max_total_tokens=64)
    prompt = qwen.prompts()[1]
    result = answers(qwen, engine, {"one": {"prompt_ids": prompt, "ignore_eos": True}})["one"]
    assert result["output_tokens"] == 65 - len(prompt)
    for payload, message in (
        ({"prompt_ids": [5] * 65, "prompt_field": "messages"}, "has 65 tokens; the KV pool holds 64"),
        ({"prompt_ids": prompt, "max_new_tokens": 66 - len(prompt)}, "the KV pool holds 64 in all"),
        ({"prompt_ids": prompt, "max_new_tokens": 0}, "max_tokens"),
        ({"prompt_ids": [VOCABULARY]}, f"id {VOCABULARY} is not one of"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            engine.add("refused", payload)
    roomy = engine_for(qwen)
    with pytest.raises(InvalidRequest, match="the model attends over 512"):
        roomy.add("refused", {"prompt_ids": [5] * 513})


def prepare(found: Model, payload: dict[str, Any]) -> dict[str, Any]:
    stage = TextPreprocessor(found.tokenizer, GenerationDefaults.load(found.folder))
    return stage(payload, SimpleNamespace())  # type: ignore[arg-type]


def turn(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def test_a_conversation_becomes_the_templates_prompt(models: dict[str, Model]) -> None:
    found = models["Llama"]
    expected = found.reference.chat_ids("the fox", "jumps", "what\nis it", tone="calm")
    payload = {
        "messages": [turn("user", "the fox"), turn("assistant", "jumps"), turn("user", "what", "is it")],
        "template": {"tone": "calm"},
        "top_p": 0.5,
        "stop": ["x"],
        "stream": False,
    }
    made = prepare(found, payload)
    assert made.pop("prompt_ids").tolist() == expected
    assert made == {
        "prompt_field": "messages",
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "stop": ["x"],
        "stream": False,
    }


def test_a_document_begins_as_the_tokenizer_begins_one(models: dict[str, Model]) -> None:
    for kind, begins in (("Llama", [0]), ("Qwen3", [])):
        found = models[kind]
        plain = found.reference.tokenizer.encode("the fox", add_special_tokens=False)
        assert prepare(found, {"prompt": "the fox"})["prompt_ids"].tolist() == begins + plain
        assert prepare(found, {"prompt": [7, 8]})["prompt_ids"].tolist() == [7, 8]


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({"prompt": ""}, "empty"),
        ({"prompt": []}, "empty"),
        ({"messages": [turn("user", "a"), turn("system", "b")]}, "the system speaks first"),
        ({"messages": [turn("user", "a")], "template": {"tokenize": True}}, "may not set tokenize"),
        ({"messages": [turn("user", "a")], "template": {"chat_template": "x"}}, "may not set chat_template"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "media": [0]}]}]}, "reads text, not image"),
    ],
)
def test_what_is_no_prompt_is_refused(qwen: Model, payload: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        prepare(qwen, payload)


def test_a_model_without_a_template_completes_texts_only(qwen: Model, tmp_path: Path) -> None:
    save_tokenizer(tmp_path, template=None)
    stage = TextPreprocessor(TextTokenizer.load(tmp_path), GenerationDefaults())
    assert len(stage({"prompt": "the fox"}, SimpleNamespace())["prompt_ids"])  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        stage({"messages": [turn("user", "a")]}, SimpleNamespace())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (None, GenerationDefaults(eos_ids=(2,))),
        ({"eos_token_id": [2, 0]}, GenerationDefaults(eos_ids=(2, 0))),
        ({"do_sample": False, "temperature": 0.6}, GenerationDefaults(temperature=0.0, eos_ids=(2,))),
        (
            {"do_sample": True, "top_k": -1},
            GenerationDefaults(top_k=0, eos_ids=(2,)),
        ),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
            GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05, eos_ids=(2,)),
        ),
    ],
)
def test_a_silent_request_gets_what_the_checkpoint_says(
    tmp_path: Path, fields: dict[str, Any] | None, expected: GenerationDefaults
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    if fields is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert GenerationDefaults.load(tmp_path) == expected


@pytest.mark.parametrize("fields", [{"temperature": "hot"}, {"top_p": 2}, {"eos_token_id": "</s>"}, {"top_k": -2}])
def test_generation_settings_that_mean_nothing_are_named(tmp_path: Path, fields: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    with pytest.raises(InvalidRequest, match=rf"generation_config\.json: {next(iter(fields))} is"):
        GenerationDefaults.load(tmp_path)


def spoil(folder: Path, how: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    if how == "quantised":
        config["quantization_config"] = {"quant_method": "fp8"}
    elif how == "field":
        del config["num_hidden_layers"]
    elif how == "other":
        config["architectures"] = ["GPT2LMHeadModel"]
    elif how == "truncated":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-100])
    elif how == "dtype":
        tensors = load_file(folder / "model.safetensors")
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
        save_file(tensors, folder / "model.safetensors")
    elif how == "tokenizer":
        (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("quantised", r"config\.json has a quantization_config"),
        ("field", r"config\.json lacks the field num_hidden_layers"),
        ("other", "GPT2LMHeadModel"),
        ("truncated", r"model\.safetensors has .* truncated or damaged"),
        ("dtype", r"model\.safetensors: model\.norm\.weight is I8"),
        ("tokenizer", "holds no tokenizer"),
    ],
)
def test_a_bad_checkpoint_is_named_before_anything_starts(tmp_path: Path, how: str, message: str) -> None:
    folder = build(tmp_path)
    assert TextLLMPipelineConfig.tasks(str(folder)).chat is not None
    spoil(folder, how)
    with pytest.raises(InvalidRequest, match=message):
        TextLLMPipelineConfig.tasks(str(folder))


def test_an_unknown_dtype_is_refused(qwen: Model) -> None:
    with pytest.raises(StartupError, match=r"engine\.dtype 'int4'"):
        create_llm(str(qwen.folder), engine={"dtype": "int4"})


def test_on_a_cpu_the_pool_has_a_size_of_its_own(qwen: Model) -> None:
    for engine, tokens in (({}, 4096), ({"max_total_tokens": 320}, 320), ({"kv_cache_bytes": 1 << 20}, None)):
        stats = create_llm(str(qwen.folder), engine=engine).engine.stats()
        assert tokens is None or stats["kv_capacity_tokens"] == tokens


def test_the_example_is_planned_without_the_checkpoint() -> None:
    config = Path(__file__).parents[2] / "examples/configs/text_llm.yaml"
    plan = build_plan(load_config(config, [], registry=PipelineRegistry()), virtual_host(4 << 30, 4))
    assert [(stage.name, stage.process) for stage in plan.stages] == [
        ("preprocessing", "preprocessing"),
        ("llm", "llm"),
        ("decode", "decode"),
    ]
    with pytest.raises(InvalidRequest, match="hf download Qwen/Qwen3-4B"):
        TextLLMPipelineConfig.tasks("Qwen/Qwen3-4B")
