"""Both Higgs models behind HTTP: real processes, tiny checkpoints, transformers' own classes as the judge."""

from __future__ import annotations

import base64
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import torch

from servers import Server, fetch, serving

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_higgs as tiny

FRAMES = 30
TEXTS = ("The sun rises.", "Audio is recorded in a room.", "Nobody was there!", "following instruction 12")
TOLERANCE = 3e-4
"""Of samples: 16-bit rounding, and sums in another order."""

ENGINE = ("--max-total-tokens", "6000", "--chunked_prefill_tokens", "256")
TABLES = (
    "sgl_omni_requests_in_flight",
    "sgl_omni_instance_requests",
    "sgl_omni_instance_in_flight",
    "sgl_omni_instance_tts_engine_running",
    "sgl_omni_instance_tts_engine_queued",
    "sgl_omni_instance_vocoder_running",
    "sgl_omni_instance_shm_segments_out",
)
"""Gauges that are 0 where nothing is in progress."""

Expected = Callable[[str, bytes | None, str | None], np.ndarray]


@dataclass(frozen=True)
class Family:
    folder: Path
    expected: Expected
    """Samples that the reference makes of a text and a recording with its transcript."""


def wav(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, tiny.RATE, format="WAV", subtype="FLOAT")
    return file.getvalue()


VOICE = wav(tiny.recording(1.4, seed=5))
VOICE_URL = f"data:audio/wav;base64,{base64.b64encode(VOICE).decode()}"


def encoded(codec: Any, recording: bytes) -> torch.Tensor:
    """Codes [frames, codebooks] by the reference."""
    samples, _ = soundfile.read(io.BytesIO(recording), dtype="float32")
    with torch.no_grad():
        codes: torch.Tensor = codec.encode(torch.from_numpy(samples)[None, None]).audio_codes[0].T
    return codes


def decoded(codec: Any, frames: list[list[int]]) -> np.ndarray:
    with torch.no_grad():
        audio: np.ndarray = codec.decode(torch.tensor(frames).T[None]).audio_values[0, 0].clamp(-1, 1).numpy()
    return audio


def v3_family(folder: Path) -> Family:
    reference, codec = tiny.save_v3(folder), tiny.reference_codec()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def expected(text: str, recording: bytes | None, transcript: str | None) -> np.ndarray:
        head, rows = "<|tts|>", None
        if recording is not None:
            codes = encoded(codec, recording).numpy()
            rows = np.full((len(codes) + tiny.BOOKS - 1, tiny.BOOKS), tiny.EOC)
            for k in range(tiny.BOOKS):
                rows[:k, k], rows[k : k + len(codes), k] = tiny.BOC, codes[:, k]
            head += (f"<|ref_text|>{transcript}" if transcript else "") + "<|ref_audio|>"
        ids = tokenizer.encode(head, add_special_tokens=False) + [-1] * (0 if rows is None else len(rows))
        ids += tokenizer.encode(f"<|text|>{text}<|audio|>", add_special_tokens=False)
        return decoded(codec, tiny.v3_frames(reference.rows(ids, rows, FRAMES), FRAMES))

    return Family(folder, expected)


def v2_family(folder: Path) -> Family:
    model, codec = tiny.save_v2(folder), tiny.reference_codec()
    from transformers import AutoTokenizer, DacFeatureExtractor
    from transformers.models.higgs_audio_v2.processing_higgs_audio_v2 import HiggsAudioV2Processor

    processor = HiggsAudioV2Processor.__new__(HiggsAudioV2Processor)
    processor.tokenizer, processor.audio_tokenizer = AutoTokenizer.from_pretrained(folder), codec
    processor.feature_extractor = DacFeatureExtractor(hop_length=1, sampling_rate=tiny.RATE)
    processor.chat_template = tiny.TEMPLATE
    processor.audio_token, processor.audio_delay_token = "<|AUDIO_OUT|>", "<|reserved_special_token_6|>"
    processor.audio_stream_bos_id, processor.audio_stream_eos_id = tiny.BOC, tiny.EOC

    def expected(text: str, recording: bytes | None, transcript: str | None) -> np.ndarray:
        def turn(role: str, *texts: str) -> dict[str, Any]:
            return {"role": role, "content": [{"type": "text", "text": each} for each in texts]}

        messages = [
            turn("system", "Generate audio following instruction."),
            turn("scene", "Audio is recorded from a quiet room."),
        ]
        audio = None
        if recording is not None:
            assert transcript is not None
            messages += [turn("user", transcript), {"role": "assistant", "content": [{"type": "audio"}]}]
            audio = [soundfile.read(io.BytesIO(recording), dtype="float32")[0]]
        rendered = processor.tokenizer.apply_chat_template(
            [*messages, turn("user", text)], tokenize=False, add_generation_prompt=True
        )
        inputs = processor(
            text=rendered, audio=audio, return_tensors="pt", add_special_tokens=False, sampling_rate=tiny.RATE
        )
        rows = model.generate(**inputs, max_new_tokens=FRAMES + tiny.BOOKS, do_sample=False)[0]
        rows = rows[0 if audio is None else inputs["audio_input_ids"].shape[1] :].tolist()
        end = next((i - 1 for i, row in enumerate(rows) if tiny.EOC in row), FRAMES)
        count = max(0, min(end, len(rows) - tiny.BOOKS))
        frames = [[min(rows[f + 1 + k][k], tiny.CODES - 1) for k in range(tiny.BOOKS)] for f in range(count)]
        return decoded(codec, frames)

    return Family(folder, expected)


@pytest.fixture(scope="module", params=["v3", "v2"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp(request.param)
    made: Family = {"v3": v3_family, "v2": v2_family}[request.param](folder)
    return made


@pytest.fixture(scope="module")
def server(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--model-path", str(family.folder), "--platform", "cpu", *ENGINE]
    with serving(*options, run_folder=tmp_path_factory.mktemp("run")) as found:
        yield found


def ask(server: Server, path: str = "speech", **fields: Any) -> httpx.Response:
    model = fetch(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "max_new_tokens": FRAMES, "temperature": 0.0, **fields}
    return httpx.post(f"{server.url}/v1/audio/{path}", json=body, timeout=120)


def speak(server: Server, text: str, **fields: Any) -> np.ndarray:
    response = ask(server, input=text, **{"response_format": "pcm", **fields})
    assert response.status_code == 200, response.text
    return np.frombuffer(response.content, "<i2")


def assert_like(found: np.ndarray, expected: np.ndarray) -> None:
    assert len(found) == len(expected)
    assert len(found) >= 5 * tiny.HOP
    assert np.abs(found / 32767 - expected).max() < TOLERANCE


@pytest.mark.parametrize("text", TEXTS[:2])
def test_speech_is_the_references(server: Server, family: Family, text: str) -> None:
    assert_like(speak(server, text), family.expected(text, None, None))


def test_a_cloned_voice_is_the_references(server: Server, family: Family) -> None:
    expected = family.expected(TEXTS[0], VOICE, "what was said")
    found = speak(server, TEXTS[0], ref_audio=VOICE_URL, ref_text="what was said")
    assert_like(found, expected)
    assert len(found) != len(plain := speak(server, TEXTS[0])) or not np.array_equal(found, plain)
    assert np.array_equal(found, speak(server, TEXTS[0], ref_audio=VOICE_URL, ref_text="what was said"))
    assert server.gauges()["sgl_omni_instance_tts_engine_reused_tokens"] > 0, "the voice's prompt is computed once"


def test_an_uploaded_voice_speaks_as_a_reference_does(server: Server) -> None:
    given = speak(server, TEXTS[1], references=[{"audio": VOICE_URL, "text": "words"}])
    files = {"audio_sample": ("voice.wav", VOICE, "audio/wav")}
    voices = f"{server.url}/v1/audio/voices"
    assert httpx.post(voices, data={"name": "carla", "ref_text": "words"}, files=files).status_code == 200
    assert np.array_equal(speak(server, TEXTS[1], voice="carla"), given)
    assert httpx.delete(f"{voices}/carla").status_code == 200


def test_streams_equal_whole_files(server: Server) -> None:
    whole = speak(server, TEXTS[0], stream=False)
    model = fetch(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "input": TEXTS[0], "max_new_tokens": FRAMES, "temperature": 0.0, "response_format": "pcm"}
    with httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body, timeout=60) as response:
        pieces = list(response.iter_raw())
    assert len(pieces) > 1
    assert np.array_equal(np.frombuffer(b"".join(pieces), "<i2"), whole)
    wave = ask(server, input=TEXTS[0], response_format="wav", stream=False).content
    assert np.array_equal(soundfile.read(io.BytesIO(wave), dtype="int16")[0], whole)


def test_many_at_once_say_what_each_says_alone(server: Server) -> None:
    wishes = [{"text": text, **voice} for text in TEXTS for voice in ({}, {"ref_audio": VOICE_URL, "ref_text": "a"})]
    alone = [speak(server, **wish) for wish in wishes]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda wish: speak(server, **wish), wishes))
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one, other)


def test_a_batch_says_what_its_texts_say_alone(server: Server) -> None:
    inputs = [TEXTS[0], {"input": TEXTS[1], "ref_audio": VOICE_URL, "ref_text": "a"}, {"input": TEXTS[2], "voice": "x"}]
    answer = ask(server, "speech/batch", inputs=inputs, response_format="pcm").json()
    found = [np.frombuffer(base64.b64decode(entry["audio"]), "<i2") for entry in answer["data"][:2]]
    assert np.array_equal(found[0], speak(server, TEXTS[0]))
    assert np.array_equal(found[1], speak(server, TEXTS[1], ref_audio=VOICE_URL, ref_text="a"))
    assert answer["data"][2]["error"]["param"] == "inputs[2].voice"


def test_a_seed_chooses_the_voice_and_speed_the_length(server: Server) -> None:
    options = {"temperature": 0.9, "seed": 3}
    first = speak(server, TEXTS[2], **options)
    assert np.array_equal(first, speak(server, TEXTS[2], **options))
    assert not np.array_equal(first, speak(server, TEXTS[2], temperature=0.9, seed=4))
    plain = speak(server, TEXTS[0])
    assert len(speak(server, TEXTS[0], speed=2.0)) == round(len(plain) / 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"ref_audio": "data:audio/wav;base64,AAAA", "ref_text": "a"}, "ref_audio"),
        ({"ref_audio": f"data:;base64,{base64.b64encode(wav(np.zeros(0))).decode()}"}, "ref_audio"),
        ({"ref_audio": "/etc/hostname"}, "ref_audio"),
        ({"references": [{"audio": VOICE_URL}] * 5}, "references"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"voice": "nobody"}, "voice"),
    ],
)
def test_what_cannot_be_a_voice_is_the_callers_mistake(server: Server, fields: dict[str, Any], param: str) -> None:
    response = ask(server, input=TEXTS[0], **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_recording_of_ten_hours_is_refused_unread(server: Server) -> None:
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", samplerate=8000, channels=1, format="FLAC", subtype="PCM_16") as sound:
        for _ in range(20):
            sound.write(np.zeros(8000 * 30, np.int16))
    url = f"data:audio/flac;base64,{base64.b64encode(file.getvalue()).decode()}"
    response = ask(server, input=TEXTS[0], ref_audio=url, ref_text="a")
    assert (response.status_code, "the limit is 60 s" in response.text) == (400, True), response.text


def test_a_client_that_leaves_frees_everything(server: Server) -> None:
    model = fetch(f"{server.url}/v1/models").json()["data"][0]["id"]
    body = {"model": model, "input": " ".join(TEXTS * 3), "temperature": 1.5, "seed": 1, "response_format": "pcm"}
    with (
        pytest.raises(RuntimeError, match="enough"),
        httpx.stream("POST", f"{server.url}/v1/audio/speech", json=body, timeout=60) as response,
    ):
        for _ in response.iter_raw():
            raise RuntimeError("enough")
    end = time.monotonic() + 60
    while any((gauges := server.gauges())[name] for name in TABLES):
        assert time.monotonic() < end, gauges
        time.sleep(0.05)
    assert len(speak(server, TEXTS[0])) > 0


@pytest.mark.slow
def test_replicas_that_share_weights_say_the_same(family: Family, server: Server, tmp_path: Path) -> None:
    expected = [speak(server, text) for text in TEXTS]
    options = ["--model-path", str(family.folder), "--platform", "cpu", *ENGINE, "--weight-share=on"]
    options += ["--tts_engine.gpu_memory_fraction=0.4", "--processes.pipeline.num_replicas=2"]
    options += ["--processes.pipeline.replica_devices=0,0"]
    with serving(*options, run_folder=tmp_path) as replicas, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: speak(replicas, text), TEXTS))
        roles = {replicas.instance(f"pipeline@r{i}")["weights"]["role"] for i in range(2)}  # type: ignore[index]
    for one, other in zip(expected, found, strict=True):
        assert np.array_equal(one, other)
    assert roles == {"leader", "follower"}


@pytest.mark.slow
def test_the_audit_passes(family: Family) -> None:
    command = [sys.executable, "-m", "sgl_omni.cli.main", "audit", str(family.folder), "--platform", "cpu", "--json"]
    command += [*ENGINE, "--rounds", "1", "--tts_engine.gpu_memory_fraction=0.4"]
    payloads = family.folder / "payloads.jsonl"
    lines = [
        {"input": text, "voice": None, "speed": 1.0, "temperature": temperature, "seed": 5, "max_new_tokens": FRAMES}
        for text in TEXTS
        for temperature in (0.0, 0.8)
    ]
    payloads.write_text("\n".join(map(json.dumps, lines)))
    done = subprocess.run([*command, "--payloads", str(payloads)], capture_output=True, text=True, timeout=170)
    assert done.stdout, done.stderr
    verdict = json.loads(done.stdout)
    assert (done.returncode, verdict["passed"], verdict["problems"]) == (0, True, []), verdict
