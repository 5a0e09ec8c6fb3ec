"""Qwen3-Omni in real processes: what it writes and speaks is what transformers' whole model writes and speaks."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_qwen3_omni as tiny
from qwen3_omni_reference import Answered, Asked, Reference, picture, tone, user

from background import Background, Said, in_background, plan_for
from sgl_omni.errors import InvalidRequest

pytest.importorskip("transformers")

TOKENS = 9
LOUDNESS_TOLERANCE = 1e-4
"""Of samples in [-1, 1]: products of other shapes round otherwise."""

ASKED: dict[str, Asked] = {
    "text": user("hello there", system="be brief"),
    "audio": user("what is ", ("audio", [0]), "?", media=[tone(1.3)]),
    "image": user(("image", [0]), " and ", ("image", [1]), "?", media=[picture(90, 60), picture(40, 150, 1)]),
    "video": user("see ", ("video", [0, 1, 2]), media=[picture(90, 60, seed) for seed in range(3)]),
}
TEXT_ONLY = ["decode"]


@dataclass(frozen=True)
class Omni:
    folder: Path
    expected: dict[str, Answered]


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Omni:
    folder = tmp_path_factory.mktemp("omni")
    model = tiny.build(folder)
    tiny.write_processors(folder)
    reference = Reference(model, folder)
    expected = {
        kind: reference.answer(asked, tokens=TOKENS, frames=tiny.FRAMES, voice="Chelsie")
        for kind, asked in ASKED.items()
    }
    return Omni(folder, expected)


@pytest.fixture(scope="module")
def pipeline(omni: Omni) -> Iterator[Background]:
    """The layout that ships: seven processes."""
    with tempfile.TemporaryDirectory(prefix="omni-") as run, in_background(plan_for(omni.folder), Path(run)) as found:
        yield found


def spoken(kind: str, **options: Any) -> dict[str, Any]:
    options = {"max_new_tokens": TOKENS, "voice": "Chelsie", "modalities": ["text", "audio"], **options}
    return ASKED[kind].payload(**options)


def written(kind: str, **options: Any) -> dict[str, Any]:
    return ASKED[kind].payload(max_new_tokens=TOKENS, modalities=["text"], **options)


def check_text(said: Said, expected: Answered) -> None:
    result = said.results["decode"]
    assert result["text"] == expected.text
    assert "".join(said.joined("decode", "text")) == expected.text
    assert (result["input_tokens"], result["output_tokens"]) == (len(expected.prompt_ids), len(expected.token_ids))
    assert result["finish_reason"] == ("stop" if expected.token_ids[-1] == tiny.EOS else "length")


def check_speech(said: Said, expected: Answered) -> None:
    audio = np.concatenate(said.joined("code2wav", "audio"))
    assert audio.dtype == np.float32
    assert audio.shape == expected.audio.shape
    assert np.abs(audio - expected.audio).max() < LOUDNESS_TOLERANCE
    assert np.abs(expected.audio).mean() > 100 * LOUDNESS_TOLERANCE
    assert set(said.joined("code2wav", "sample_rate")) == {24000}
    assert said.results["code2wav"]["output_tokens"] == len(expected.codes)


def test_text_alone_is_what_generate_writes_and_speech_stages_stay_asleep(pipeline: Background, omni: Omni) -> None:
    before = pipeline.gauges()
    for kind, expected in omni.expected.items():
        said = pipeline.ask(written(kind), TEXT_ONLY)
        check_text(said, expected)
        assert said.results.keys() == {"decode"}
    after = pipeline.gauges()
    assert after["talker_ar talker_ar.generated_rows"] == before["talker_ar talker_ar.generated_rows"]
    assert after["thinker thinker.generated_rows"] > before["thinker thinker.generated_rows"]


@pytest.mark.parametrize("kind", ASKED)
def test_speech_is_what_the_whole_model_speaks(pipeline: Background, omni: Omni, kind: str) -> None:
    said = pipeline.ask(spoken(kind))
    check_text(said, omni.expected[kind])
    check_speech(said, omni.expected[kind])
    assert len(said.chunks["code2wav"]) == 3  # pieces of 4, 8 and 16 frames


def test_many_at_once_are_each_as_if_alone(pipeline: Background, omni: Omni) -> None:
    kinds = [*ASKED, *ASKED, *ASKED]
    requests = [(spoken(kind), None) if i % 2 else (written(kind), TEXT_ONLY) for i, kind in enumerate(kinds)]
    for i, (kind, said) in enumerate(zip(kinds, pipeline.ask_all(requests), strict=True)):
        check_text(said, omni.expected[kind])
        if i % 2:
            check_speech(said, omni.expected[kind])


def test_an_abort_while_it_speaks_leaves_nothing_behind(pipeline: Background, omni: Omni) -> None:
    async def hang_up() -> None:
        handle = pipeline.pipeline.submit(spoken("image", max_new_tokens=200))
        async for chunk in handle:
            if chunk.stage == "code2wav":
                break
        handle.abort()

    for _ in range(2):
        pipeline.run(hang_up())
    check_speech(pipeline.ask(spoken("text")), omni.expected["text"])

    async def settle() -> None:
        await asyncio.sleep(0.05)

    for _ in range(100):
        gauges = pipeline.gauges()
        held = {k: v for k, v in gauges.items() if k.endswith((".running", ".queued", ".kv_used_tokens", " requests"))}
        if not any(held.values()):
            break
        pipeline.run(settle())
    assert not any(held.values()), held


def test_a_stop_text_ends_the_answer_before_it(pipeline: Background, omni: Omni) -> None:
    text = omni.expected["text"].text
    stop = text[2:4]
    said = pipeline.ask(written("text", stop=[stop]), TEXT_ONLY)
    assert said.results["decode"]["text"] == text[: text.index(stop)]
    assert said.results["decode"]["finish_reason"] == "stop"
    assert said.results["decode"]["output_tokens"] < TOKENS


def test_a_seed_makes_sampled_speech_the_same_again(pipeline: Background) -> None:
    def audio(seed: int) -> np.ndarray:
        said = pipeline.ask(spoken("text", temperature=0.9, seed=seed))
        return np.concatenate(said.joined("code2wav", "audio"))

    first = audio(5)
    assert np.array_equal(first, audio(5))
    assert not np.array_equal(first, audio(6))


@pytest.mark.parametrize(
    ("asked", "options", "param", "message"),
    [
        (user(("image", [0]), media=[b"no picture"]), {}, "messages[0].content", "is none of PNG"),
        (user(("audio", [0]), media=[picture(8, 8)]), {}, "messages[0].content", "audio cannot be read"),
        (user(("image", [0]), media=[tone(0.1)]), {}, "messages[0].content", "is none of PNG"),
        (user(("audio", [0]), media=[tone(0.01)]), {}, "messages[0].content", "too short"),
        (user("x" * 600), {}, "messages", "608 tokens"),
        (user("a <|image_pad|> of mine"), {}, "messages", "must not spell"),
        (user("hi"), {"voice": "nobody"}, "voice", "is not one of chelsie, ethan"),
        (user("hi"), {"max_new_tokens": 0}, "max_tokens", "1 or more"),
    ],
    ids=["no-picture", "picture-as-audio", "audio-as-picture", "too-short", "too-long", "forged", "voice", "nothing"],
)
def test_what_cannot_be_answered_is_the_callers_mistake(
    pipeline: Background, asked: Asked, options: dict[str, Any], param: str, message: str
) -> None:
    payload = asked.payload(**{"modalities": ["text", "audio"], "max_new_tokens": 4, **options})
    with pytest.raises(InvalidRequest, match=message) as caught:
        pipeline.ask(payload)
    assert (caught.value.param or "").startswith(param.partition("]")[0])


def test_a_thinker_of_two_ranks_writes_and_speaks_the_same(omni: Omni) -> None:
    """The ranks are processes of their own; all other stages share one."""
    others = ("preprocessing", "image_encoder", "audio_encoder", "decode", "talker_ar", "code2wav")
    flags = ["--thinker.tp_size", "2", "--thinker.gpu", "0,1"]
    flags += [word for stage in others for word in (f"--{stage}.process", "host")]
    flags += [
        word
        for stage in ("image_encoder", "audio_encoder", "talker_ar", "code2wav")
        for word in (f"--{stage}.gpu", "2")
    ]
    plan = plan_for(omni.folder, *flags)
    assert [i.name for i in plan.instances] == ["host", "thinker_tp0", "thinker_tp1"]
    with tempfile.TemporaryDirectory(prefix="omni-") as run, in_background(plan, Path(run)) as ranks:
        for kind, said in zip(ASKED, ranks.ask_all([(spoken(kind), None) for kind in ASKED]), strict=True):
            check_text(said, omni.expected[kind])
            check_speech(said, omni.expected[kind])
