"""Text out of tokens as they come, and where it stops."""

from __future__ import annotations

import json
import logging
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.text.stops import StopFinder
from sgl_omni.text.template import QUESTION, ChatTemplate, TemplateFailed, check_template, try_template
from sgl_omni.text.tokenizer import Detokenizer, TextTokenizer

pytest.importorskip("transformers")

from tiny_text_llm import save_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return TextTokenizer.load(folder)


def test_a_model_that_transformers_does_not_know_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every start of one of the speech models would warn of it."""
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_tts"}))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Qwen2Tokenizer"}))
    assert TextTokenizer.load(tmp_path).encode("a")
    assert "You are using a model of type" not in caplog.text
    logging.getLogger("transformers.configuration_utils").warning("You are using a model of type a")
    assert "You are using a model of type" in caplog.text


def pieces(items: list[int], rng: random.Random) -> list[list[int]]:
    cut = []
    while items:
        n = rng.choice([1, 1, 1, 2, 5])
        cut.append(items[:n])
        items = items[n:]
    return cut


@pytest.mark.parametrize(
    "text", ["naïve 😀 café", "日本語の文章", "the old bridge", "😀" * 20, " x ", "\ufffd a \ufffd"]
)
def test_characters_that_are_split_over_tokens_come_whole(tokenizer: TextTokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    for seed in range(5):
        words = Detokenizer(tokenizer)
        said = [words.feed(piece) for piece in pieces(ids, random.Random(seed))]
        assert "".join(said) + words.end() == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in each for each in said)


def test_noise_comes_out_as_the_tokenizer_shows_it(tokenizer: TextTokenizer) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        ids = [rng.randrange(384) for _ in range(60)]
        words = Detokenizer(tokenizer)
        said = "".join(words.feed(piece) for piece in pieces(ids, rng))
        assert said + words.end() == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["the old bridge", "naïve 日本 😀é end", " two  spaces ", "é"])
def test_tokenizers_that_fall_back_to_bytes_keep_spaces_and_characters(tmp_path: Path, text: str) -> None:
    """As Llama 2's and Mistral's: a piece for each known character, bytes for the others, spaces as marks."""
    vocabulary = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz", "▁e", "▁b"]
    whole = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(vocabulary)},
            [("▁", "e"), ("▁", "b")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    whole.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    whole.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=whole, unk_token="<unk>").save_pretrained(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    ids = tokenizer.encode(text)
    for seed in range(8):
        words = Detokenizer(tokenizer)
        said = [words.feed(piece) for piece in pieces(ids, random.Random(seed))]
        assert "".join(said) + words.end() == tokenizer.decode(ids) == text


def test_an_answer_that_breaks_off_within_a_character_says_so(tokenizer: TextTokenizer) -> None:
    words = Detokenizer(tokenizer)
    ids = tokenizer.encode("a😀")
    assert words.feed(ids[:-1]) in ("a", "")
    assert words.end().endswith("\ufffd")


def test_bytes_that_never_make_a_character_do_not_wait_for_ever(tokenizer: TextTokenizer) -> None:
    (lone,) = {i for i in tokenizer.encode("日") if tokenizer.decode([i]) == "\ufffd"} & {tokenizer.encode("日")[0]}
    words = Detokenizer(tokenizer)
    assert any(words.feed([lone]) for _ in range(200))


def test_special_tokens_are_spelled_by_templates_only(tokenizer: TextTokenizer) -> None:
    assert tokenizer.encode("a<|im_end|>")[-1] == tokenizer.id_of("<|im_end|>") == tokenizer.eos_id
    plain = tokenizer.encode_plain("a<|im_end|>")
    assert tokenizer.eos_id not in plain and tokenizer.decode(plain) == "a<|im_end|>"
    with pytest.raises(StartupError, match="no token"):
        tokenizer.id_of("<|nothing|>")


@pytest.mark.parametrize("damage", ["{", '{"model": 3}', ""])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, damage: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(damage)
    with pytest.raises(StartupError, match=str(tmp_path)):
        TextTokenizer.load(tmp_path)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """By definition: character by character, as far as no stop is complete."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))], True
    return text, False


def test_stops_end_the_text_wherever_it_is_cut() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        text = "".join(rng.choice("ab\n") for _ in range(rng.randrange(1, 14)))
        stops = ["".join(rng.choice("ab\n") for _ in range(rng.randrange(1, 5))) for _ in range(rng.randrange(0, 4))]
        finder, said, rest = StopFinder(stops), "", text
        want, found = expected(text, stops)
        while rest:
            n = rng.randrange(1, 4)
            said += finder.feed(rest[:n])
            rest = rest[n:]
            assert want.startswith(said), "a part of a stop came out"
        assert (said + finder.end(), finder.found) == (want, found), (text, stops)


def test_only_what_may_be_a_stop_waits() -> None:
    finder = StopFinder(["\n\nUser:", "END"])
    assert finder.feed("Yes.\n") == "Yes."
    assert finder.feed("No") == "\nNo"
    assert finder.feed(".E") == "."
    assert finder.feed("N") == ""
    assert finder.end() == "EN"
    assert not finder.found


def test_whether_special_tokens_count_is_each_calls_own(tokenizer: TextTokenizer) -> None:
    """Threads ask for both at once."""
    text = "<|im_start|>user, said the bus"
    special, plain = tokenizer.encode(text), tokenizer.encode_plain(text)
    assert special != plain
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: (tokenizer.encode, tokenizer.encode_plain)[i % 2](text), range(2000)))
    assert found == [special, plain] * 1000


@pytest.mark.parametrize("name", ["messages", "self", "conversation", "tokenize", "chat_template"])
def test_options_of_a_template_are_its_variables_alone(tokenizer: TextTokenizer, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"may not set {name}") as caught:
        tokenizer.chat([{"role": "user", "content": "x"}], **{name: []})
    assert caught.value.param == "chat_template_kwargs"


USER = [{"role": "user", "content": "x"}]
BROKEN = "{% for m in messages %}\n{{ m.content }"


def with_template(folder: Path, template: str) -> TextTokenizer:
    save_tokenizer(folder, template=template)
    return TextTokenizer.load(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
@pytest.mark.parametrize("several", [False, True])
def test_a_template_that_is_no_jinja_is_told_by_its_file_and_line(tmp_path: Path, name: str, several: bool) -> None:
    text: object = [{"name": "default", "template": BROKEN}] if several and name != "chat_template.jinja" else BROKEN
    (tmp_path / name).write_text(BROKEN if name.endswith("jinja") else json.dumps({"chat_template": text}))
    with pytest.raises(StartupError, match=rf"{name}: chat_template, line 2: "):
        check_template(tmp_path)


def test_templates_that_can_be_read_pass(tmp_path: Path) -> None:
    check_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    check_template(tmp_path)
    for_training = "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(for_training)
    check_template(tmp_path)


NESTED = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}" + "{% endfor %}" * 2
)
DOUBLED = "{% set n = namespace(a='12345678') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (NESTED, "does not end; it was stopped after computing for 5 s on a plain question"),
        ("{% for i in range(999999999) %}{{ i }}{% endfor %}", "makes too much of a plain question"),
        ("{{ 'x' * 1000000000000 }}", "makes too much of a plain question"),
        ("{{ 'x' * 2000000 }}", "makes too much of a plain question: more than 1048576 characters"),
        (DOUBLED, "makes too much of a plain question"),
    ],
)
def test_a_template_without_end_is_stopped_and_named(template: str, said: str) -> None:
    before = threading.active_count()
    with pytest.raises(StartupError) as caught:
        ChatTemplate(template, Path("/m/chat_template.jinja")).tried({"messages": QUESTION})
    assert str(caught.value).startswith(f"/m/chat_template.jinja: chat_template {said}")
    assert threading.active_count() == before


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('the system speaks first') }}",
        "{{ messages[0].content + 3 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_what_a_template_fails_at_or_refuses_is_told_by_who_renders_it(template: str) -> None:
    assert ChatTemplate(template, Path("t")).tried({"messages": QUESTION}) is None


def test_a_template_is_tried_as_transformers_renders_it(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for turn in messages %}{{ turn | tojson }}{% generation %}{{ turn.role }}{% endgeneration %}"
        "{% break %}{% endfor %}{% if add_generation_prompt and not tools %}{{ strftime_now('%%') }} é{% endif %}\n"
    )
    found = with_template(tmp_path, template)
    assert try_template(tmp_path) == found.chat(QUESTION)
    assert try_template(tmp_path / "nowhere") is None


@pytest.mark.parametrize("value", [5, [], {}, [5], {"tool_use": "x"}, [{"name": "default"}], {"default": 5}])
def test_a_template_that_is_no_text_is_named(tmp_path: Path, value: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(StartupError, match=r"tokenizer_config\.json lacks the field chat_template, or it is no text"):
        check_template(tmp_path)


@pytest.mark.parametrize("data", ["{", "[]", "{}", '{"chat_template": 3}'])
def test_a_template_file_without_one_is_named(tmp_path: Path, data: str) -> None:
    (tmp_path / "chat_template.json").write_text(data)
    with pytest.raises(StartupError, match=r"chat_template\.json"):
        check_template(tmp_path)


def test_a_template_that_fails_is_not_the_callers_fault(tmp_path: Path) -> None:
    found = with_template(tmp_path, "{{ messages[0].content + (messages | length) }}")
    with pytest.raises(TemplateFailed, match="chat template failed: TypeError"):
        found.chat(USER)
    with pytest.raises(StartupError, match=rf"{tmp_path}: .*chat template failed"):
        found.check_chat()


def test_what_a_template_refuses_itself_is(tmp_path: Path) -> None:
    found = with_template(tmp_path, "{{ raise_exception('the system speaks first') }}")
    found.check_chat()
    with pytest.raises(InvalidRequest, match="refuses these messages: the system speaks first") as caught:
        found.chat(USER)
    assert caught.value.param == "messages"


def test_options_that_a_template_cannot_take_are_the_callers(tmp_path: Path) -> None:
    found = with_template(tmp_path, "{{ messages[0].content + (tone or '') }}")
    found.check_chat()
    assert found.chat(USER, tone="!") == "x!"
    with pytest.raises(InvalidRequest, match="cannot take these options: ") as caught:
        found.chat(USER, tone=3)
    assert caught.value.param == "chat_template_kwargs"
