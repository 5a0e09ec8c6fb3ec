"""MOSS-Audio-Tokenizer, whole and piece by piece, against a plain model that sees whole recordings."""

from __future__ import annotations

import json
import math
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_omni.audio.decode import decode_channels
from sgl_omni.engine.checkpoint import CheckpointError
from sgl_omni.engine.task import HandOver
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.moss_tts_local.codec import CodecDecoder, CodecEncoder, Quantizer
from sgl_omni.models.moss_tts_local.codec_spec import CodecSpec, TransformerSpec
from sgl_omni.models.moss_tts_local.codec_stack import CodecStack
from sgl_omni.models.moss_tts_local.gathering import GatheringDecoder
from sgl_omni.models.moss_tts_local.preprocess import ReferenceVoices, level
from sgl_omni.models.moss_tts_local.vocoder import MossVocoder

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_moss import BOOKS, CHANNELS, CODEC_BOOKS, CODES, FRAME, RATE, PlainCodec, recording, write_codec

FRAMES = 60


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> tuple[Path, PlainCodec]:
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("codec") / "codec"
    return folder, write_codec(folder)


@pytest.fixture(scope="module")
def codes() -> torch.Tensor:
    return torch.randint(0, CODES, (FRAMES, BOOKS), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pieces", [[FRAMES], [1] * FRAMES, [3, *[12] * 4, 9], [29, 31]])
def test_decoding_in_pieces_gives_the_audio_of_the_whole(
    codec: tuple[Path, PlainCodec], codes: torch.Tensor, pieces: list[int]
) -> None:
    folder, plain = codec
    ours = CodecDecoder.load(folder, BOOKS)
    stream = ours.open()
    audio = torch.cat([ours.decode(piece[None], [stream])[0] for piece in codes.split(pieces)], 1)
    expected = plain.decode(codes)
    assert audio.shape == (CHANNELS, FRAMES * FRAME)
    assert (audio - expected).abs().max() < 2e-5 * expected.abs().max()


def test_streams_that_are_decoded_together_are_those_alone(codec: tuple[Path, PlainCodec], codes: torch.Tensor) -> None:
    """Each begins at a time of its own, and places in the memory are used again."""
    folder, plain = codec
    ours = CodecDecoder.load(folder, BOOKS)
    recordings = [codes.roll(shift, 0)[: 20 + 10 * shift] for shift in range(4)]
    waiting, running, heard = list(range(4)), {}, {i: [] for i in range(4)}
    while waiting or running:
        if waiting and len(running) < 3:
            running[waiting.pop(0)] = ours.open()
        pieces = [recordings[i][s.frames : s.frames + 5] for i, s in running.items()]
        audio = ours.decode(torch.stack(pieces), list(running.values()))
        for i, samples in zip(list(running), audio, strict=True):
            heard[i].append(samples)
            if running[i].frames == len(recordings[i]):
                ours.close(running.pop(i))
    assert ours._memory.rows == 4
    for i, spoken in enumerate(recordings):
        expected = plain.decode(spoken)
        assert (torch.cat(heard[i], 1) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_no_more_is_kept_than_the_context(codec: tuple[Path, PlainCodec], codes: torch.Tensor) -> None:
    ours = CodecDecoder.load(codec[0], BOOKS)
    stream = ours.open()
    for piece in codes.split(7):
        ours.decode(piece[None], [stream])
    contexts = [block.context for block in ours.spec.decoder if isinstance(block, TransformerSpec)]
    assert contexts == [5, 12]
    assert {kept.shape[3] for kept in ours._memory.layers.values()} == {context - 1 for context in contexts}


def test_what_comes_while_the_codec_is_busy_is_decoded_together(
    codec: tuple[Path, PlainCodec], codes: torch.Tensor
) -> None:
    folder, plain = codec
    batches: list[int] = []

    class Watched(CodecDecoder):
        def decode(self, codes: torch.Tensor, streams: Any) -> torch.Tensor:
            batches.append(len(streams))
            time.sleep(0.01)
            return super().decode(codes, streams)

    gathering = GatheringDecoder(Watched.load(folder, BOOKS), 4)

    def spoken(shift: int) -> torch.Tensor:
        stream = gathering.open()
        pieces = codes.roll(shift, 0).split(4 if shift % 2 else 6)
        audio = torch.cat([gathering.decode(piece, stream) for piece in pieces], 1)
        gathering.close(stream)
        return audio

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(spoken, range(8)))
    for shift, audio in enumerate(found):
        expected = plain.decode(codes.roll(shift, 0))
        assert (audio - expected).abs().max() < 2e-5 * expected.abs().max()
    assert 1 < max(batches) <= 4


def test_an_error_reaches_every_thread_that_waits(codec: tuple[Path, PlainCodec], codes: torch.Tensor) -> None:
    gathering = GatheringDecoder(CodecDecoder.load(codec[0], BOOKS), 4)

    def wrong() -> str:
        stream = gathering.open()
        try:
            gathering.decode(codes[:3, :2], stream)
        except IndexError as error:
            return type(error).__name__
        finally:
            gathering.close(stream)
        return "none"

    with ThreadPoolExecutor(3) as pool:
        assert [pool.submit(wrong).result() for _ in range(3)] == ["IndexError"] * 3
    stream = gathering.open()
    assert gathering.decode(codes[:3], stream).shape == (CHANNELS, 3 * FRAME)


@pytest.mark.parametrize("samples", [FRAME, 7 * FRAME + 5, FRAMES * FRAME])
def test_encoding_finds_the_codes_of_the_plain_model(codec: tuple[Path, PlainCodec], samples: int) -> None:
    folder, plain = codec
    heard = torch.randn(CHANNELS, samples, generator=torch.Generator().manual_seed(samples)) * 0.3
    found = CodecEncoder.load(folder, BOOKS).encode(heard)
    assert found.shape == (samples // FRAME, BOOKS)
    assert torch.equal(found, plain.encode(heard))


def test_less_than_a_frame_has_no_codes(codec: tuple[Path, PlainCodec]) -> None:
    assert CodecEncoder.load(codec[0], BOOKS).encode(torch.zeros(CHANNELS, FRAME - 1)).shape == (0, BOOKS)


@pytest.mark.parametrize("arrivals", [[FRAMES], [1] * FRAMES, [13, 47]])
def test_the_vocoder_gives_the_same_bits_however_codes_arrive(
    codec: tuple[Path, PlainCodec], codes: torch.Tensor, arrivals: list[int]
) -> None:
    folder, plain = codec
    vocoder = MossVocoder(CodecDecoder.load(folder, BOOKS), BOOKS, HandOver(2, 8))

    def spoken(arrivals: list[int]) -> list[np.ndarray]:
        state: Any = vocoder.open(None)  # type: ignore[arg-type]
        chunks = [{"codes": piece.numpy().astype(np.int16), "speed": 1.0} for piece in codes.split(arrivals)]
        found = [audio for chunk in chunks for audio in vocoder.feed(state, chunk)] + list(vocoder.flush(state))
        assert {chunk["sample_rate"] for chunk in found} == {RATE}
        return [chunk["audio"] for chunk in found]

    found = spoken(arrivals)
    assert [len(audio) // FRAME for audio in found] == [2, *[8] * 7, 2]
    joined = np.concatenate(found)
    assert np.array_equal(joined, np.concatenate(spoken([5] * 12)))
    assert np.abs(joined - plain.decode(codes).mean(0).clamp(-1, 1).numpy()).max() < 1e-4


def test_speed_changes_the_length(codec: tuple[Path, PlainCodec], codes: torch.Tensor) -> None:
    vocoder = MossVocoder(CodecDecoder.load(codec[0], BOOKS), BOOKS, HandOver(2, 8))
    state: Any = vocoder.open(None)  # type: ignore[arg-type]
    chunk = {"codes": codes.numpy().astype(np.int16), "speed": 2.0}
    found = [*vocoder.feed(state, chunk), *vocoder.flush(state)]
    assert sum(len(each["audio"]) for each in found) == FRAMES * FRAME // 2


def test_channels_of_a_file() -> None:
    one = decode_channels(recording(0.1), RATE, 2, param="references")
    assert one.shape == (2, 800) and np.array_equal(one[0], one[1])
    three = decode_channels(recording(0.1, 3), RATE, 2, param="references")
    assert three.shape == (2, 800) and not np.array_equal(three[0], three[1])
    assert decode_channels(recording(0.1, 2, 16000), RATE, 2, param="references").shape == (2, 800)
    with pytest.raises(InvalidRequest, match="2 channels cannot be made 3"):
        decode_channels(recording(0.1, 2), RATE, 3, param="references")


def test_a_voice_is_encoded_once(codec: tuple[Path, PlainCodec]) -> None:
    encoder, calls = CodecEncoder.load(codec[0], BOOKS), []

    def encode(samples: np.ndarray) -> np.ndarray:
        calls.append(samples.shape)
        return encoder.encode(torch.from_numpy(samples)).numpy()

    voices = ReferenceVoices(encode, RATE, CHANNELS)
    recorded = recording(0.3)  # a file has the second of its making in it
    first = voices.codes(recorded)
    assert np.array_equal(first, voices.codes(memoryview(recorded)))
    assert (first.shape, calls) == ((200, BOOKS), [(CHANNELS, 2400)])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (recording(0.001), "shorter than one frame"),
        (recording(61.0), r"61.0 s; the limit is 60 s"),
        (b"no audio at all", "cannot be read"),
        (recording(0), "the audio is empty"),
    ],
    ids=["short", "long", "garbage", "empty"],
)
def test_references_that_cannot_be_heard(codec: tuple[Path, PlainCodec], file: bytes, message: str) -> None:
    encoder = CodecEncoder.load(codec[0], BOOKS)
    voices = ReferenceVoices(lambda samples: encoder.encode(torch.from_numpy(samples)).numpy(), RATE, CHANNELS)
    with pytest.raises(InvalidRequest, match=message) as caught:
        voices.codes(file)
    assert caught.value.param == "references[0].audio"


@pytest.mark.parametrize(("loudness", "expected"), [(0.1, 0.1), (0.12, 0.1), (0.5, 0.5 / 1.4125), (0.001, 0.0014125)])
def test_references_are_brought_nearer_to_minus_20_decibels(loudness: float, expected: float) -> None:
    samples = np.full((2, 100), loudness, np.float32)
    assert np.allclose(level(samples), expected, rtol=1e-3)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another model": ({"model_type": "encodec"}, "model_type is 'encodec'"),
    "no decoder": ({"decoder_kwargs": None}, "decoder_kwargs"),
    "no quantizer": ({"quantizer_kwargs": None}, "quantizer_kwargs"),
    "another quantizer": ({"quantizer_kwargs": {"quantizer_type": "fsq", "input_dim": 1}}, "'fsq'"),
    "patches that do not fit": ({"downsample_rate": 13}, "not 26"),
    "a block of another kind": (
        {"encoder_kwargs": [{"module_type": "Conv"}]},
        r"encoder_kwargs\[0\].module_type 'Conv'",
    ),
    "channels side by side": ({"enable_channel_interleave": False}, "enable_channel_interleave"),
}


@pytest.mark.parametrize("case", WRONG)
def test_configs_of_another_kind_are_refused_by_field(codec: tuple[Path, PlainCodec], case: str) -> None:
    fields, message = WRONG[case]
    config = json.loads((codec[0] / "config.json").read_text()) | fields
    with pytest.raises(StartupError, match=message):
        CodecSpec.parse(config)


def test_the_gating_of_another_codec_is_refused_by_its_place(codec: tuple[Path, PlainCodec]) -> None:
    config = json.loads((codec[0] / "config.json").read_text())
    config["decoder_kwargs"][2]["gating"] = "silu"
    with pytest.raises(StartupError, match=r"decoder_kwargs\[2\].gating 'silu'"):
        CodecSpec.parse(config)


def test_more_codebooks_than_there_are(codec: tuple[Path, PlainCodec]) -> None:
    with pytest.raises(StartupError, match=f"has {CODEC_BOOKS} codebooks; the model needs {CODEC_BOOKS + 1}"):
        CodecDecoder.load(codec[0], CODEC_BOOKS + 1)


def test_a_codec_that_lacks_a_tensor_names_it(codec: tuple[Path, PlainCodec], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(codec[0] / "model.safetensors")
    del tensors["decoder.0.transformer.layers.1.ffn.0.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((codec[0] / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"missing: decoder.0.transformer.layers.1.ffn.0.weight"):
        CodecDecoder.load(tmp_path, BOOKS)
    CodecEncoder.load(tmp_path, BOOKS)


def published() -> dict[str, Any]:
    """The config of OpenMOSS-Team/MOSS-Audio-Tokenizer-v2."""

    def transformer(inside: int, outside: int, seconds: float, width: int = 768, layers: int = 12) -> dict[str, Any]:
        return {
            "module_type": "Transformer",
            "input_dimension": inside,
            "output_dimension": outside,
            "d_model": width,
            "num_heads": width // 64,
            "num_layers": layers,
            "dim_feedforward": 4 * width,
            "causal": True,
            "norm": "layer_norm",
            "positional_embedding": "rope",
            "max_period": 10000,
            "gating": "none",
            "layer_scale": 0.01,
            "conv_layout": True,
            "context_duration": seconds,
        }

    first, half = (
        {"module_type": "PatchedPretransform", "patch_size": 240},
        {
            "module_type": "PatchedPretransform",
            "patch_size": 2,
        },
    )
    down = [
        transformer(240, 384, 1.0),
        *(transformer(768, 384, s) for s in (2.0, 4.0, 8.0)),
        transformer(768, 640, 10.0),
    ]
    up = [transformer(640, 768, 10.0), *(transformer(384, 768, s) for s in (8.0, 4.0, 2.0)), transformer(384, 240, 1.0)]
    encoder = [part for block in down for part in (half, block)][1:]
    decoder = [part for block in up for part in (half, block)]
    return {
        "model_type": "moss-audio-tokenizer",
        "sampling_rate": 48000,
        "downsample_rate": 3840,
        "number_channels": 2,
        "enable_channel_interleave": True,
        "encoder_kwargs": [first, *encoder, half, transformer(1280, 768, 10.0, 1280, 32)],
        "decoder_kwargs": [transformer(768, 1280, 10.0, 1280, 32), *decoder, first],
        "quantizer_type": "rlfq",
        "quantizer_kwargs": {
            "input_dim": 768,
            "rvq_dim": 512,
            "output_dim": 768,
            "num_quantizers": 32,
            "codebook_size": 1024,
            "codebook_dim": 8,
        },
    }


def test_the_published_codec_has_the_tensors_that_its_index_counts() -> None:
    """2,094 tensors of 2,123,701,248 numbers, as model.safetensors.index.json says."""
    spec = CodecSpec.parse(published())
    with torch.device("meta"):
        encoder = CodecStack(spec.encoder, down=True, frame_places=7680)
        decoder = CodecStack(spec.decoder, down=False, frame_places=1)
        quantizer = Quantizer(spec.quantizer, 32)
    slots = [*encoder.slots("encoder."), *decoder.slots("decoder."), *quantizer.slots("quantizer.")]
    assert len({slot.name for slot in slots}) == len(slots) == 2094
    assert sum(math.prod(slot.shape) for slot in slots) == 2_123_701_248
    contexts = [block.context for block in spec.decoder if isinstance(block, TransformerSpec)]
    assert contexts == [125, 250, 400, 400, 400, 400]
