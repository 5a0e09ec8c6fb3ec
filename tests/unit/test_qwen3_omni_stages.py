"""The stages of Qwen3-Omni one by one and one after another, in this process, against transformers' own code."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_qwen3_omni as tiny
import torch
from PIL import Image
from qwen3_omni_reference import Asked, Reference, picture, tone, user

from sgl_omni.engine.engine import AutoregressiveEngine, EngineSettings
from sgl_omni.errors import InvalidRequest, NotFinite, OmniError, StartupError
from sgl_omni.models.qwen3_omni import stages
from sgl_omni.models.qwen3_omni.code2wav import Code2Wav, Cuts, Vocoder
from sgl_omni.models.qwen3_omni.patches import fitting_size, image_patches
from sgl_omni.models.qwen3_omni.pipeline import Qwen3OmniSpeechPipelineConfig
from sgl_omni.models.qwen3_omni.positions import audio_tokens, three_axes
from sgl_omni.models.qwen3_omni.prompt_spec import Pixels, PromptSpec
from sgl_omni.models.qwen3_omni.talker_engine import TalkerEngine

pytest.importorskip("transformers")

TOKENS = 8
TOLERANCE = 1e-5
BOTH_RUNNERS = pytest.mark.parametrize("device_rows", [False, True], ids=["at-once", "ahead"])


@dataclass(frozen=True)
class Omni:
    folder: Path
    reference: Reference
    spec: PromptSpec


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Omni:
    folder = tmp_path_factory.mktemp("omni")
    model = tiny.build(folder, seed=1)
    tiny.write_processors(folder)
    return Omni(folder, Reference(model, folder), PromptSpec.load(str(folder)))


@pytest.fixture(scope="module")
def preprocess(omni: Omni) -> Any:
    return stages.create_preprocessing(str(omni.folder)).fn


@pytest.fixture(scope="module")
def encoders(omni: Omni) -> dict[str, Any]:
    return {
        "image_encoder": stages.create_image_encoder(str(omni.folder), max_patches=60).fn,
        "audio_encoder": stages.create_audio_encoder(str(omni.folder), max_frames=200).fn,
    }


MIXED = user(
    ("image", [0]),
    "a ",
    ("audio", [1]),
    ("video", [2, 3, 4, 5]),
    "b",
    ("audio", [6]),
    ("image", [7]),
    media=[
        picture(70, 70),
        tone(0.7),
        *[picture(64, 40, seed) for seed in range(2, 6)],
        tone(2.01, seed=1),
        picture(130, 40, 9),
    ],
    system="both ears open",
)


# Preprocessing --------------------------------------------------------------------------------------------------------


def test_sizes_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    rng = random.Random(0)
    for _ in range(500):
        height, width = rng.randint(1, 3000), rng.randint(1, 3000)
        if max(height, width) > 200 * min(height, width):
            continue
        expected = smart_resize(height, width, factor=32, min_pixels=3136, max_pixels=400_000)
        assert fitting_size(height, width, 32, Pixels(least=3136, most=400_000), "x") == expected


def test_a_picture_that_is_a_line_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="longer than 200 times"):
        fitting_size(3, 700, 32, Pixels(least=3136, most=40_000), "x")


@pytest.mark.parametrize("size", [(90, 60), (64, 64), (33, 250), (500, 400), (5, 5)])
def test_patches_are_those_of_transformers(omni: Omni, size: tuple[int, int]) -> None:
    from sgl_omni.media.images import decode_image

    file = picture(*size)
    patches, grid = image_patches(decode_image(file, param="x"), omni.spec.vision, "x")
    _, expected, expected_grid = omni.reference._image([file])
    assert list(grid) == expected_grid
    spec, per_colour = omni.spec.vision, 2 * 16 * 16
    mean, std = (np.repeat(np.float32(values), per_colour) for values in (spec.mean, spec.std))
    assert np.abs((patches * np.float32(spec.scale) - mean) / std - expected.numpy()).max() < TOLERANCE


def test_audio_tokens_are_those_of_transformers() -> None:
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

    for frames in range(1, 1000):
        assert audio_tokens(frames, 50) == int(_get_feat_extract_output_lengths(torch.tensor(frames)))


def test_the_mixed_prompt_its_positions_pixels_and_sounds_are_those_of_transformers(
    omni: Omni, preprocess: Any
) -> None:
    made = preprocess(MIXED.payload(modalities=["text"]), None)
    inputs = omni.reference.inputs(MIXED)
    assert made["prompt_ids"].tolist() == inputs["input_ids"][0].tolist()
    positions, _ = omni.reference.model.thinker.get_rope_index(
        inputs["input_ids"],
        inputs["image_grid_thw"],
        inputs["video_grid_thw"],
        inputs["attention_mask"],
        False,
        inputs["feature_attention_mask"].sum(-1),
        inputs["video_second_per_grid"],
    )
    assert made["positions"].tolist() == positions[:, 0].long().tolist()
    assert made["positions"].max() != made["positions"].shape[1] - 1
    known = [
        row[:, mask.bool()]
        for row, mask in zip(inputs["input_features"], inputs["feature_attention_mask"], strict=True)
    ]
    assert np.array_equal(made["mels"], torch.cat(known, 1).numpy())
    assert made["mel_lengths"].tolist() == [row.shape[1] for row in known]
    assert made["grids"].tolist()[1] == inputs["video_grid_thw"][0].tolist()
    assert stages.route_to_encoders("r", made) == ["image_encoder", "audio_encoder", "thinker"]


def test_positions_of_many_prompts_are_those_of_transformers(omni: Omni) -> None:
    rng = random.Random(3)
    for _ in range(60):
        ids: list[int] = []
        images: list[list[int]] = []
        videos: list[list[int]] = []
        order: list[tuple[int, ...]] = []
        for _ in range(rng.randint(1, 4)):
            ids += [rng.randint(30, 180) for _ in range(rng.randint(0, 5))]
            grid = [rng.choice([1, 2, 3]), 2 * rng.randint(1, 4), 2 * rng.randint(1, 4)]
            kind = rng.choice(["image", "video"])
            if kind == "image":
                grid[0] = 1
            (images if kind == "image" else videos).append(grid)
            order.append(tuple(grid))
            token = tiny.IMAGE if kind == "image" else tiny.VIDEO
            ids += [195, *[token] * (grid[0] * grid[1] * grid[2] // 4), 196]
        ids += [rng.randint(30, 180) for _ in range(rng.randint(0, 3))]
        expected, _ = omni.reference.model.thinker.get_rope_index(
            torch.tensor([ids]),
            torch.tensor(images) if images else None,
            torch.tensor(videos) if videos else None,
            torch.ones(1, len(ids)).long(),
            second_per_grids=torch.tensor([2.0] * len(videos)),
        )
        mine = three_axes(np.asarray(ids), order, omni.spec, 25)
        assert mine is not None
        assert mine.tolist() == expected[:, 0].long().tolist()


def test_tags_are_equal_for_equal_media_alone(preprocess: Any) -> None:
    def tags(*files: bytes, kind: str = "image") -> list[int]:
        asked = user(*[(kind, [i]) for i in range(len(files))], media=list(files))
        made = preprocess(asked.payload(), None)
        assert len(made["inserted_tags"]) == len(made.get("vision_at", [])) + len(made.get("audio_at", []))
        found: list[int] = made["inserted_tags"].tolist()
        return found

    one, other = picture(64, 64), picture(64, 64, 1)
    assert tags(one, other) == tags(one) + tags(other)
    assert not set(tags(one)) & {*tags(other), *tags(one, kind="video"), *tags(picture(64, 128))}
    assert tags(tone(0.5), kind="audio") != tags(tone(0.5, seed=1), kind="audio")


def test_text_alone_brings_nothing_for_the_encoders(preprocess: Any) -> None:
    made = preprocess(user("hi").payload(modalities=["text"], stream=False, top_k=5), None)
    assert made.keys() == {"prompt_ids", "temperature", "top_k", "stop", "stream", "prompt_field"}
    assert made["stream"] is False
    assert stages.route_to_encoders("r", made) == ["thinker"]
    assert stages.merge_embeddings({"preprocessing": made}) == made


def test_the_talker_samples_as_the_checkpoint_says_unless_all_is_greedy(preprocess: Any) -> None:
    asked = user("hi").payload(modalities=["text", "audio"], voice="CHELSIE", stream=False)
    greedy = preprocess(asked, None)
    assert greedy["stream"] is True
    assert greedy["speech"]["voice"] == "CHELSIE"
    assert greedy["speech"]["options"]["temperature"] == 0
    del asked["temperature"]
    speech = preprocess({**asked, "seed": 4}, None)["speech"]
    assert speech["options"] == {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 1.0,
        "repetition_penalty": 1.05,
        "max_frames": tiny.FRAMES,
        "seed": 4,
    }


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (Asked([]), "at least one message"),
        (Asked([{"role": "assistant", "content": [{"type": "text", "text": "x"}]}]), "must not be the assistant's"),
        (Asked([{"role": "system", "content": [{"type": "image", "media": [0]}]}], [picture(9, 9)]), "only a user's"),
        (Asked([{"role": "user", "content": [{"type": "smell", "media": [0]}]}], [b""]), "'smell' is not one of"),
        (user(("image", [0, 0]), media=[picture(9, 9)]), "cannot have 2 files"),
        (user(("video", []), media=[]), "cannot have 0 files"),
        (user(("video", [0, 1]), media=[picture(9, 9), picture(9, 10)]), "of one size"),
        (user(("video", [0] * 9), media=[picture(9, 9)]), "9 frames; the limit is 8"),
        (user(("audio", [0]), media=[tone(3.5)]), "lasts 3.5 s; the limit is 3 s"),
        (
            user(*[("image", [0])] * 14, media=[picture(300, 300)]),
            "tokens; the model takes less than 512",
        ),
        (user("<|audio_pad|>"), "must not spell"),
    ],
)
def test_conversations_that_cannot_be(omni: Omni, asked: Asked, message: str) -> None:
    limited = stages.create_preprocessing(str(omni.folder), max_audio_seconds=3.0, max_frames=8).fn
    with pytest.raises(InvalidRequest, match=message):
        limited(asked.payload(), None)


def gif(frames: int) -> bytes:
    file = io.BytesIO()
    first, *others = (Image.new("L", (9, 9), 50 * color) for color in range(frames))
    first.save(file, "GIF", save_all=True, append_images=others)
    return file.getvalue()


@pytest.mark.parametrize(
    ("part", "media", "message", "place"),
    [
        ({"type": "image"}, [b"no picture"], "none of PNG", 0),
        ({"type": "audio"}, [b"no sound"], "the audio cannot be read", 0),
        ({"type": "video"}, [picture(9, 9), b"no picture"], "none of PNG.*taken as its frames", 1),
        ({"type": "video"}, [b"\0\0\0\x20ftypisom" + bytes(64)], "taken as its frames", 0),
        ({"type": "video"}, [gif(3)], "an animation; a video is taken as its frames", 0),
        ({"type": "image"}, [picture(40, 90)], "have 3700 pixels up to this one; the limit is 3650 in all", 0),
        ({"type": "video"}, [picture(40, 50), picture(40, 50)], "have 4100 pixels up to this one", 1),
    ],
)
def test_a_file_that_cannot_be_is_named_by_its_place(
    omni: Omni, monkeypatch: pytest.MonkeyPatch, part: dict[str, Any], media: list[bytes], message: str, place: int
) -> None:
    """The pictures before it are not decoded for that."""
    from sgl_omni.models.qwen3_omni import preprocess as module

    decoded: list[str] = []
    monkeypatch.setattr(module, "decode_image", lambda data, *, param: decoded.append(param))
    limited = stages.create_preprocessing(str(omni.folder), max_pixels=3650).fn
    params = [f"messages[1].content[2].here[{i}]" for i in range(len(media))]
    content = [
        {"type": "image", "media": [0], "params": ["before"]},
        {**part, "media": [*range(1, 1 + len(media))], "params": params},
    ]
    asked = Asked([{"role": "user", "content": content}], [picture(10, 10), *media])
    if part["type"] == "audio":
        asked.messages[0]["content"].pop(0)
    with pytest.raises(InvalidRequest, match=message) as caught:
        limited(asked.payload(), None)
    assert caught.value.param == params[place]
    assert decoded == []


# Encoders -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_towers_batch_pictures_and_recordings_as_if_each_were_alone(
    omni: Omni, preprocess: Any, encoders: dict[str, Any]
) -> None:
    asked = [MIXED, user(("image", [0]), ("audio", [1]), media=[picture(40, 90), tone(1.0)])]
    payloads = [preprocess(each.payload(), None) for each in asked]
    seen = encoders["image_encoder"](payloads)
    heard = encoders["audio_encoder"](payloads)
    thinker = omni.reference.model.thinker
    for each, payload, rows, sounds in zip(asked, payloads, seen, heard, strict=True):
        inputs = omni.reference.inputs(each)
        images = thinker.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"], return_dict=True)
        parts = [
            (piece, level)
            for piece, level in zip(images.pooler_output, zip(*images.deepstack_features, strict=True), strict=True)
        ]
        if "pixel_values_videos" in inputs:
            videos = thinker.get_video_features(
                inputs["pixel_values_videos"], inputs["video_grid_thw"], return_dict=True
            )
            parts.insert(1, (videos.pooler_output[0], next(zip(*videos.deepstack_features, strict=True))))
        expected = torch.cat([piece for piece, _ in parts])
        levels = torch.stack([torch.cat([level[i] for _, level in parts]) for i in range(2)])
        assert (rows["embeddings"] - expected).abs().max() < TOLERANCE * expected.abs().max()
        assert (rows["layered"] - levels).abs().max() < TOLERANCE * levels.abs().max()
        assert len(rows["embeddings"]) == len(payload["vision_at"])
        for i, (features, mask) in enumerate(
            zip(inputs["input_features"], inputs["feature_attention_mask"], strict=True)
        ):
            alone = thinker.get_audio_features(features[None], mask[None], return_dict=True).last_hidden_state
            start = sum(audio_tokens(int(n), 50) for n in payload["mel_lengths"][:i])
            mine = sounds["embeddings"][start : start + len(alone)]
            assert (mine - alone).abs().max() < TOLERANCE * alone.abs().max()


# Thinker, talker and vocoder together ---------------------------------------------------------------------------------


def engines(omni: Omni, device_rows: bool, **settings: Any) -> tuple[Any, TalkerEngine]:
    """Built by the factories, and built again in the other runner where that is asked for."""
    options = {"max_total_tokens": 2048, "page_size": 4, "max_running_requests": 6, **settings}
    thinker = stages.create_thinker(str(omni.folder), engine=options).engine
    talker: Any = stages.create_talker(str(omni.folder), engine=options).engine
    if not device_rows:
        return thinker, talker

    def again(engine: Any) -> AutoregressiveEngine:
        model, task = engine._runner._model, engine._task
        return AutoregressiveEngine.build(model, task, EngineSettings.parse(options), device_rows=True)

    return again(thinker), TalkerEngine(again(talker._engine), talker._model)


def prompt_of(preprocess: Any, encoders: dict[str, Any], asked: Asked, **options: Any) -> dict[str, Any]:
    made = preprocess(
        asked.payload(max_new_tokens=TOKENS, modalities=["text", "audio"], voice="ethan", **options), None
    )
    inputs = {"preprocessing": made}
    for stage in stages.route_to_encoders("r", made)[:-1]:
        [inputs[stage]] = encoders[stage]([made])
    return stages.merge_embeddings(inputs)


def converse(thinker: Any, talker: Any, prompts: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Runs all at once; yields what is said as (request, "tokens" or "codes", list)."""
    begun: set[str] = set()
    for name, prompt in prompts.items():
        thinker.add(name, prompt)
    while thinker.has_work or talker.has_work:
        for output in thinker.step() if thinker.has_work else []:
            for chunk in output.chunks:
                yield output.request_id, "tokens", chunk["token_ids"]
                if "speech" in prompts[output.request_id]:
                    talker_takes(talker, begun, output.request_id, chunk)
            if output.result is not None and output.request_id in begun:
                talker.extend(output.request_id, output.result)
                talker.finish_input(output.request_id)
        for output in talker.step() if talker.has_work else []:
            for chunk in output.chunks:
                yield output.request_id, "codes", chunk["codes"].tolist()


def talker_takes(talker: Any, begun: set[str], name: str, chunk: dict[str, Any]) -> None:
    if name in begun:
        talker.extend(name, chunk)
    else:
        talker.add(name, {**chunk, "input_open": True})
        begun.add(name)


@BOTH_RUNNERS
@pytest.mark.parametrize("chunk", [2048, 11])
def test_all_kinds_of_input_at_once_are_answered_as_the_whole_model_answers_each(
    omni: Omni, preprocess: Any, encoders: dict[str, Any], device_rows: bool, chunk: int
) -> None:
    asked = {
        "text": user("hello", system="be brief"),
        "audio": user("what ", ("audio", [0]), media=[tone(1.3)]),
        "image": user(("image", [0]), "and", ("image", [1]), media=[picture(90, 60), picture(40, 150, 1)]),
        "video": user(("video", [0, 1, 2]), "now", media=[picture(90, 60, seed) for seed in range(3)]),
    }
    prompts = {name: prompt_of(preprocess, encoders, each) for name, each in asked.items()}
    said: dict[tuple[str, str], list[Any]] = {}
    for name, what, new in converse(*engines(omni, device_rows, chunked_prefill_tokens=chunk), prompts):
        said.setdefault((name, what), []).extend(new)
    for name, each in asked.items():
        expected = omni.reference.answer(each, tokens=TOKENS, frames=tiny.FRAMES)
        assert said[name, "tokens"] == [token for token in expected.token_ids if token != tiny.EOS]
        assert said[name, "codes"] == expected.codes


@torch.no_grad()
def test_a_conversation_of_everything_is_continued_as_the_thinker_continues_it(
    omni: Omni, preprocess: Any, encoders: dict[str, Any]
) -> None:
    """Transformers' talker cannot take sounds and pictures together, so this looks at the text."""
    expected = omni.reference.model.thinker.generate(
        **omni.reference.inputs(MIXED), max_new_tokens=TOKENS, do_sample=False, eos_token_id=tiny.EOS
    )[0]
    prompt = prompt_of(preprocess, encoders, MIXED)
    thinker, talker = engines(omni, False)
    said: dict[str, list[Any]] = {"tokens": [], "codes": []}
    for _, what, new in converse(thinker, talker, {"a": prompt}):
        said[what] += new
    expected = expected.tolist()[len(prompt["prompt_ids"]) :]
    assert said["tokens"] == [token for token in expected if token != tiny.EOS]
    assert len(said["codes"]) == tiny.FRAMES


def test_under_load_the_talker_hears_every_word(omni: Omni, preprocess: Any, encoders: dict[str, Any]) -> None:
    """Tokens are handed on several at a time then, beside answers that nobody listens to."""
    prompts = {str(i): prompt_of(preprocess, encoders, user(f"say {i}")) for i in range(10)}
    silent = {f"silent {i}": preprocess(user(f"write {i}").payload(max_new_tokens=9), None) for i in range(4)}

    def said(device_rows: bool, prompts: dict[str, Any]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for name, what, new in converse(*engines(omni, device_rows, max_running_requests=16), prompts):
            if what == "codes":
                found.setdefault(name, []).extend(new)
        return found

    together = said(True, {**prompts, **silent})
    assert together.keys() == prompts.keys()
    assert together == {name: said(False, {name: prompt})[name] for name, prompt in prompts.items()}


@BOTH_RUNNERS
def test_what_a_stop_text_leaves_out_is_not_spoken(omni: Omni, preprocess: Any, device_rows: bool) -> None:
    """And what only began like one is."""
    from sgl_omni.text.tokenizer import TextTokenizer

    words = TextTokenizer.load(omni.folder)
    prompt = prompt_of(preprocess, {}, user("hm"))
    thinker, talker = engines(omni, device_rows)

    def said(stop: list[str], tokens: int = 12) -> tuple[list[int], list[Any]]:
        found: dict[str, list[Any]] = {"tokens": [], "codes": []}
        for _, what, new in converse(thinker, talker, {"a": {**prompt, "stop": stop, "max_new_tokens": tokens}}):
            found[what] += new
        return found["tokens"], found["codes"]

    ids, spoken = said([])
    assert [words.decode([token]) for token in ids[8:]] == ["\f", "X", "user", "\f"]
    for stop, whole in (("user", 10), ("Xus", 9), ("er\f", 10)):  # the last one takes a part of a token
        codes = said([stop])[1]
        assert codes == said([], whole + 1)[1]  # the last token of such an answer is not run, so not spoken either
        assert codes != spoken
    assert said([words.decode(ids[:2])])[1] == []
    assert said(["Xusual", "X\f", "\fnot this"]) == (ids, spoken)


def test_without_speech_no_hidden_states_are_kept(omni: Omni, preprocess: Any) -> None:
    thinker, _ = engines(omni, False)
    thinker.add("a", preprocess(user("hello").payload(max_new_tokens=4), None))
    chunks = []
    while thinker.has_work:
        chunks += [chunk for output in thinker.step() for chunk in output.chunks]
        assert all(request.hidden is None for request in thinker.running)
    assert chunks
    assert all(chunk.keys() == {"token_ids"} for chunk in chunks)


def test_an_answer_without_a_word_is_silence(omni: Omni, preprocess: Any) -> None:
    _, talker = engines(omni, False)
    speech = preprocess(user("hello").payload(modalities=["text", "audio"]), None)["speech"]
    rows = torch.zeros(len(speech["prompt_ids"]), 2, tiny.THINKER_WIDTH)
    talker.add("a", {"token_ids": [], "hidden_states": rows, "speech": speech, "input_open": True})
    assert not talker.has_work
    assert talker.stats()["queued"] == 1
    talker.finish_input("a")
    [output] = talker.step()
    assert output.result == {"finish_reason": "stop", "input_tokens": 0, "output_tokens": 0}
    assert not talker.has_work
    assert talker.stats()["queued"] == 0


def test_what_came_of_all_requests_is_brought_in_together(
    omni: Omni, preprocess: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, talker = engines(omni, False)
    sizes: list[int] = []
    forward = type(talker._model.text_projection).forward

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return forward(self, x)

    speech = preprocess(user("hello").payload(modalities=["text", "audio"]), None)["speech"]
    rows = torch.randn(len(speech["prompt_ids"]) + 1, 2, tiny.THINKER_WIDTH)
    for name in "abc":
        talker.add(name, {"hidden_states": rows, "speech": speech, "input_open": True})
    talker.step()
    monkeypatch.setattr(type(talker._model.text_projection), "forward", counted)
    for _ in range(4):
        for name in "abc":
            talker.extend(name, {"hidden_states": rows[:2]})
    talker.finish_input("c")
    assert sizes == []
    talker.step()
    assert sizes == [24], "texts of three requests at once, and no picture"
    inputs = {request.id: request.inputs for request in talker._engine.running}
    assert [(inputs[name].count, inputs[name].ended) for name in "abc"] == [(8, False), (8, False), (9, True)]


def test_a_request_whose_words_are_no_numbers_fails_alone(omni: Omni, preprocess: Any) -> None:
    _, talker = engines(omni, False)
    speech = preprocess(user("hello").payload(modalities=["text", "audio"]), None)["speech"]
    rows = torch.zeros(len(speech["prompt_ids"]) + 1, 2, tiny.THINKER_WIDTH)
    for name in "abc":
        broken = torch.full_like(rows, math.nan) if name == "b" else rows
        talker.add(name, {"hidden_states": broken, "speech": speech, "input_open": True})
    errors = {output.request_id: output.error for output in talker.step() if output.error is not None}
    assert [*errors] == ["b"] and isinstance(errors["b"], NotFinite)
    talker.extend("c", {"hidden_states": torch.full_like(rows[:1], math.inf)})
    talker.extend("b", {"hidden_states": rows[:1]})  # it is gone, and the thinker does not know yet
    errors = {output.request_id: output.error for output in talker.step() if output.error is not None}
    assert [*errors] == ["c"]
    with pytest.raises(
        InvalidRequest, match=r"hidden_states must be floats \[n, 2, \d+\], not torch.float32 \[3, 1, 5\]"
    ):
        talker.extend("a", {"hidden_states": torch.zeros(3, 1, 5)})
    talker.finish_input("a")
    ended = []
    while talker.has_work:
        ended += [output.request_id for output in talker.step() if output.result is not None]
    assert ended == ["a"] and talker.stats()["kv_used_tokens"] == talker.stats()["queued"] == 0


def test_the_talker_forgets_what_was_aborted_and_is_silent_for_who_did_not_ask(omni: Omni, preprocess: Any) -> None:
    _, talker = engines(omni, False)
    speech = preprocess(user("hello").payload(modalities=["text", "audio"]), None)["speech"]
    rows = torch.zeros(len(speech["prompt_ids"]) + 1, 2, tiny.THINKER_WIDTH)
    chunk = {"token_ids": [], "hidden_states": rows, "speech": speech, "input_open": True}
    for name in "ab":
        talker.add(name, dict(chunk))
    talker.abort("a")
    talker.extend("a", {"hidden_states": rows[:1]})
    talker.finish_input("a")
    talker.finish_input("b")
    finished = []
    while talker.has_work:
        finished += [output.request_id for output in talker.step() if output.result is not None]
    assert finished == ["b"]
    assert talker.stats()["kv_used_tokens"] == talker.stats()["queued"] == 0
    for name in "cd":
        talker.add(name, {"token_ids": [1], "input_open": True})
    talker.abort("c")
    for name in "cd":
        talker.finish_input(name)
    [output] = talker.step()
    assert (output.request_id, output.result["output_tokens"], output.chunks) == ("d", 0, [])
    assert not talker.has_work


# Vocoder --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocoder(omni: Omni) -> Vocoder:
    return Vocoder(omni.folder, "cpu", torch.float32)


def voiced(stage: Code2Wav, codes: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Audio of codes [frames, codebooks] that come in groups of these sizes, over and over."""
    state, at, audio = stage.open(None), 0, []  # type: ignore[arg-type]
    for size in itertools.cycle(sizes):
        if at >= len(codes):
            break
        audio += [chunk["audio"] for chunk in stage.feed(state, {"codes": codes[at : at + size].astype(np.int16)})]
        at += size
    return audio + [chunk["audio"] for chunk in stage.flush(state)]


@pytest.mark.parametrize("frames", [1, 3, 4, 5, 12, 28, 29, 61])
def test_audio_is_the_same_however_the_codes_arrive(vocoder: Vocoder, frames: int) -> None:
    stage = Code2Wav(vocoder, Cuts())
    codes = np.random.default_rng(frames).integers(0, tiny.CODES, (frames, tiny.GROUPS))
    whole = voiced(stage, codes, [frames])
    for sizes in ([1], [5, 2], [40]):
        pieces = voiced(stage, codes, sizes)
        assert [len(piece) for piece in pieces] == [len(piece) for piece in whole]
        assert all(np.array_equal(one, other) for one, other in zip(pieces, whole, strict=True))
    assert sum(map(len, whole)) == frames * 1920 - vocoder.lookahead


@torch.no_grad()
def test_audio_is_what_transformers_makes_of_the_same_windows(omni: Omni, vocoder: Vocoder) -> None:
    """And where windows reach back to the first frame, of all frames at once, without a sample lost at a cut."""
    reference = omni.reference.model.code2wav
    codes = np.random.default_rng(0).integers(0, tiny.CODES, (61, tiny.GROUPS))
    audio = np.concatenate(voiced(Code2Wav(vocoder, Cuts()), codes, [1]))
    first, at = [0, 4, 12, 28, 52, 61], 0
    for start, end in itertools.pairwise(first):
        context = max(0, start - 25)
        window = reference(torch.from_numpy(codes[context:end].T)[None])[0, 0].numpy()
        expected = window[at - context * 1920 :]
        assert np.abs(audio[at : at + len(expected)] - expected).max() < 1e-5
        at += len(expected)
    assert at == len(audio)
    early = 28 * 1920 - vocoder.lookahead
    once = reference.chunked_decode(torch.from_numpy(codes[:28].T)[None], chunk_size=300, left_context_size=25)[0, 0]
    assert np.abs(audio[:early] - once.numpy()).max() < 1e-5


def test_windows_of_several_lengths_decode_together_as_alone(vocoder: Vocoder) -> None:
    rng = np.random.default_rng(5)
    windows = [rng.integers(0, tiny.CODES, (tiny.GROUPS, frames)) for frames in (3, 40, 1, 17)]
    for window, audio in zip(windows, vocoder.decode(windows), strict=True):
        [alone] = vocoder.decode([window])
        assert audio.shape == alone.shape
        assert np.abs(audio - alone).max() < 1e-5


GPU_PATH = """
import sys
from pathlib import Path
import numpy as np
import torch
sys.path[:0] = [{tests!r}]
from engine_fixtures import spoil_new_memory
import sgl_omni.engine.platform as platform
from sgl_omni.models.qwen3_omni.code2wav import Vocoder

spoil_new_memory()
torch.set_num_threads(1)
rng = np.random.default_rng(5)
windows = [rng.integers(0, {codes}, ({groups}, frames)) for frames in (1, 2)]
plain = Vocoder(Path({folder!r}), "cpu", torch.float32)
whole = [plain.decode([window])[0] for window in windows]
platform.everywhere = True
torch.backends.cudnn.allow_tf32 = False
ours = Vocoder(Path({folder!r}), "cpu", torch.float32)
assert ours.lookahead == plain.lookahead == 555
for found, expected in zip(ours.decode(windows), whole, strict=True):
    assert found.shape == expected.shape
    assert abs(found - expected).max() / abs(expected).max() < 5e-6
print("all checked")
"""


@pytest.mark.slow
def test_a_gpus_kernels_decode_what_transformers_does(omni: Omni) -> None:
    """In a process of its own, because Triton decides at import whether it interprets."""
    tests = str(Path(__file__).parents[1])
    program = GPU_PATH.format(tests=tests, folder=str(omni.folder), codes=tiny.CODES, groups=tiny.GROUPS)
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=900)
    assert done.stdout.endswith("all checked\n"), done.stderr


@pytest.mark.parametrize("numbers", [(0, 24, 25), (30, 24, 25), (4, 24, 0)])
def test_cuts_that_mean_nothing(numbers: tuple[int, int, int]) -> None:
    first, most, context = numbers
    with pytest.raises(StartupError, match="first_frames"):
        Cuts(first=first, most=most, context=context)


# Checkpoints that cannot be served ------------------------------------------------------------------------------------


def without(name: str) -> Any:
    return lambda folder: (folder / name).unlink()


def changed(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for path, value in changes.items():
            *parents, last = path.split("__")
            inner = config
            for parent in parents:
                inner = inner[parent]
            if value is None:
                del inner[last]
            else:
                inner[last] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


def cut(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (without("config.json"), "holds no config.json"),
        (without("tokenizer.json"), "holds no tokenizer"),
        (without("preprocessor_config.json"), r"preprocessor_config.json cannot be read"),
        (cut, "truncated or damaged"),
        (changed(architectures=["LlamaForCausalLM"]), "architectures is .*Llama"),
        (changed(enable_audio_output=False), "enable_audio_output is False .* does not speak"),
        (changed(talker_config=None), "talker_config is absent"),
        (changed(talker_config__accept_hidden_layer=None), "lacks the field talker_config.accept_hidden_layer"),
        (changed(talker_config__speaker_id={}), "speaker_id names no voice"),
        (changed(thinker_config__audio_token_id=None), "lacks the field thinker_config.audio_token_id"),
    ],
)
def test_a_folder_that_is_not_whole_is_named_before_anything_starts(
    omni: Omni, tmp_path: Path, harm: Any, message: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(omni.folder, folder)
    assert Qwen3OmniSpeechPipelineConfig.tasks(str(folder)).chat is not None
    harm(folder)
    with pytest.raises(InvalidRequest, match=message):
        Qwen3OmniSpeechPipelineConfig.tasks(str(folder))


def test_a_tensor_that_is_missing_is_named(omni: Omni, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(omni.folder, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    gone = "thinker.visual.patch_embed.proj.weight"
    del index["weight_map"][gone]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(OmniError, match=f"missing: {gone}"):
        stages.create_image_encoder(str(folder))


def test_what_the_pipeline_serves(omni: Omni) -> None:
    chat = Qwen3OmniSpeechPipelineConfig.tasks(str(omni.folder)).chat
    assert chat is not None
    assert (chat.text_output, chat.audio_output, chat.sample_rate) == ("decode", "code2wav", 24000)
    assert chat.inputs == ("text", "image", "audio", "video")
    assert (chat.voices, chat.default_voice) == (("chelsie", "ethan"), "ethan")
