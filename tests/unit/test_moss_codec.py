"""MOSS-Audio-Tokenizer, whole and piece by piece, against a plain model that sees whole recordings."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
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
from sgl_omni.models.defaults import CONTEXT_BYTES
from sgl_omni.models.moss_tts_local.codec import CodecDecoder, CodecEncoder, CodecStream, Quantizer
from sgl_omni.models.moss_tts_local.codec_spec import CodecSpec, TransformerSpec
from sgl_omni.models.moss_tts_local.codec_stack import CodecStack, Pieces, _Transformer
from sgl_omni.models.moss_tts_local.gathering import GatheringDecoder
from sgl_omni.models.moss_tts_local.preprocess import ReferenceVoices, level
from sgl_omni.models.moss_tts_local.stream_memory import NOBODY, StreamMemory
from sgl_omni.models.moss_tts_local.vocoder import MossVocoder

sys.path.insert(0, str(Path(__file__).parents[1]))
from engine_fixtures import RunAgain
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
    audio = torch.cat([decoded(ours, [piece], [stream])[0] for piece in codes.split(pieces)], 1)
    expected = plain.decode(codes)
    assert audio.shape == (CHANNELS, FRAMES * FRAME)
    assert (audio - expected).abs().max() < 2e-5 * expected.abs().max()


def decoded(ours: CodecDecoder, pieces: Sequence[torch.Tensor], streams: Sequence[CodecStream]) -> list[torch.Tensor]:
    return [torch.from_numpy(audio) for audio in ours.decode([piece.numpy() for piece in pieces], streams)]


def spoken_in_turns(ours: CodecDecoder, recordings: list[torch.Tensor], together: int) -> list[torch.Tensor]:
    """Up to 4 streams are open, of which ``together`` take turns. Each begins at a time of its own, with 3 frames, and
    goes on by 12, so that pieces of a batch are of unequal lengths."""
    waiting, heard = list(range(len(recordings))), [torch.zeros(CHANNELS, 0) for _ in recordings]
    running: dict[int, CodecStream] = {}
    while waiting or running:
        if waiting and len(running) < 4:
            running[waiting.pop(0)] = ours.open()
        turn = {i: running.pop(i) for i in list(running)[:together]}
        pieces = [recordings[i][s.frames :][: 12 if s.frames else 3] for i, s in turn.items()]
        audio = decoded(ours, pieces, list(turn.values()))
        for (i, stream), piece, samples in zip(turn.items(), pieces, audio, strict=True):
            assert samples.shape == (CHANNELS, len(piece) * FRAME)
            heard[i] = torch.cat([heard[i], samples], 1)
            if stream.frames == len(recordings[i]):
                ours.close(stream)
            else:
                running[i] = stream
    return heard


@pytest.mark.parametrize(("slots", "together"), [(4, 4), (4, 3), (3, 3), (2, 1), (1, 1)])
@pytest.mark.parametrize("captured", [False, True])
def test_streams_that_are_decoded_together_are_those_alone(
    codec: tuple[Path, PlainCodec],
    codes: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    captured: bool,
    slots: int,
    together: int,
) -> None:
    """Whether each has a slot or there are fewer of these; and as on a GPU, but that graphs are called in place."""
    folder, plain = codec
    ours = CodecDecoder.load(folder, BOOKS)
    ours.make_room(slots)
    if captured:
        monkeypatch.setattr("sgl_omni.models.moss_tts_local.codec.can_capture", lambda device: True)
        monkeypatch.setattr("sgl_omni.engine.decoder_graphs.StepGraphs", RunAgain)
        ours.capture(together, {3, 12})
        before = RunAgain.replays
    recordings = [codes.roll(shift, 0)[: 20 + 10 * (shift % 5)] for shift in range(7)]
    heard = spoken_in_turns(ours, recordings, together)
    for audio, spoken in zip(heard, recordings, strict=True):
        expected = plain.decode(spoken)
        assert (audio - expected).abs().max() < 2e-5 * expected.abs().max()
    assert ours._memory.free_slots == slots
    assert not captured or RunAgain.replays - before >= sum(map(len, recordings)) // (12 * together)


GPU_PATH = """
import sys
from pathlib import Path
import torch
sys.path[:0] = [{tests!r}, {unit!r}]
import sgl_omni.engine.platform as platform
import sgl_omni.engine.decoder_graphs as graphs
import sgl_omni.engine.kernels.rings as rings
import sgl_omni.models.moss_tts_local.codec as codec
from engine_fixtures import RunAgain, spoil_new_memory
from test_moss_codec import CODES, spoken_in_turns
from tiny_moss import BOOKS

spoil_new_memory()
folder = Path({folder!r})
generator = torch.Generator().manual_seed(5)
recordings = [torch.randint(0, CODES, (frames, BOOKS), generator=generator) for frames in (3, 17, 16)]
plain = codec.CodecDecoder.load(folder, BOOKS)
whole = [torch.from_numpy(plain.decode([each.numpy()], [plain.open()])[0]) for each in recordings]
calls, kernel = [], rings.rotate_and_keep
rings.rotate_and_keep = lambda *args: calls.append(kernel(*args))
platform.everywhere = True
graphs.StepGraphs, codec.can_capture = RunAgain, lambda device: True
ours = codec.CodecDecoder.load(folder, BOOKS)
ours.make_room(2)
ours.capture(2, [3, 12])
for found, expected in zip(spoken_in_turns(ours, recordings, 2), whole, strict=True):
    off = float((found - expected).abs().max() / expected.abs().max())
    assert off < 2e-5, off
assert RunAgain.replays >= 4 and len(calls) == 3 * (RunAgain.replays + 2), (RunAgain.replays, len(calls))
print("all checked")
"""


def test_a_gpus_kernel_keeps_what_plain_torch_does(codec: tuple[Path, PlainCodec]) -> None:
    """In a process of its own, because Triton decides at import whether it interprets."""
    pytest.importorskip("triton")
    here = Path(__file__).parent
    program = GPU_PATH.format(tests=str(here.parent), unit=str(here), folder=str(codec[0]))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.endswith("all checked\n"), done.stderr


def test_a_piece_longer_than_what_is_kept_writes_each_place_once(codec: tuple[Path, PlainCodec]) -> None:
    """On a GPU any of two writes to a place may be the last."""
    spec = CodecDecoder.load(codec[0], BOOKS).spec.decoder[0]
    assert isinstance(spec, TransformerSpec)
    pieces = Pieces(*torch.tensor([[1, 2], [7, 0], [9, 3]]))
    found = _Transformer(spec)._window(torch.zeros(2, 10, 1), pieces, stride=100).writes.view(2, 10)
    assert found[0].tolist() == [*(place % 4 for place in range(7, 12)), 100, 101, 102, 103, 0]
    assert found[1].tolist() == [200, 201, 202, *(place % 4 for place in range(3, 10))]


def test_a_row_to_spare_is_nobodys(
    codec: tuple[Path, PlainCodec], codes: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of four rows, for three of the streams that it was for before."""
    folder, plain = codec
    monkeypatch.setattr("sgl_omni.models.moss_tts_local.codec.can_capture", lambda device: True)
    monkeypatch.setattr("sgl_omni.engine.decoder_graphs.StepGraphs", RunAgain)
    ours = CodecDecoder.load(folder, BOOKS)
    ours.make_room(4)
    ours.capture(4, {12})
    streams, recordings = [ours.open() for _ in range(4)], [codes.roll(shift, 0) for shift in range(4)]
    parts = [decoded(ours, [each[:12] for each in recordings], streams)[1:]]
    for start in (12, 24, 36):
        parts.append(decoded(ours, [each[start : start + 12] for each in recordings[1:]], streams[1:]))
    for audio, spoken in zip(zip(*parts, strict=True), recordings[1:], strict=True):
        expected = plain.decode(spoken[:48])
        assert (torch.cat(audio, 1) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_pieces_that_no_graph_is_long_enough_for(
    codec: tuple[Path, PlainCodec], codes: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain = codec
    monkeypatch.setattr("sgl_omni.models.moss_tts_local.codec.can_capture", lambda device: True)
    monkeypatch.setattr("sgl_omni.engine.decoder_graphs.StepGraphs", RunAgain)
    ours = CodecDecoder.load(folder, BOOKS)
    ours.capture(1, {3, 12})
    assert [graphs.frames for graphs in ours._graphs] == [3, 12]
    stream, before = ours.open(), RunAgain.replays
    audio = torch.cat([decoded(ours, [piece], [stream])[0] for piece in codes.split([2, 13, 12, 33])], 1)
    assert RunAgain.replays - before == 2
    expected = plain.decode(codes)
    assert (audio - expected).abs().max() < 2e-5 * expected.abs().max()


def test_more_streams_together_than_there_are_slots_are_refused(
    codec: tuple[Path, PlainCodec], codes: torch.Tensor
) -> None:
    ours = CodecDecoder.load(codec[0], BOOKS)
    streams = [ours.open() for _ in range(2)]
    with pytest.raises(ValueError, match="2 streams cannot run together in 1 slots"):
        ours.decode([codes[:3].numpy()] * 2, streams)
    assert [stream.frames for stream in streams] == [0, 0]


def test_a_slot_is_taken_from_the_stream_whose_turn_was_last(codec: tuple[Path, PlainCodec]) -> None:
    spec = CodecDecoder.load(codec[0], BOOKS).spec
    memory = StreamMemory(spec.decoder, 2, torch.zeros(1))
    a, b, c = (memory.open() for _ in range(3))
    assert (a.slot, b.slot, c.slot) == (1, 2, NOBODY)
    assert memory.slots_of([b]) == [2] and memory.slots_of([a]) == [1]
    assert memory.slots_of([c]) == [1] and a.slot == NOBODY, "a ran last"
    assert memory.slots_of([a, c]) == [2, 1] and b.slot == NOBODY
    memory.close(b)
    memory.close(c)
    d = memory.open()
    assert (d.slot, memory.free_slots) == (1, 0)
    memory.close(a)
    memory.close(d)
    assert memory.free_slots == 2


def test_no_more_is_kept_than_the_context(codec: tuple[Path, PlainCodec]) -> None:
    """Two layers that look back 4 places and one that looks back 11, of 2 * 16 numbers each."""
    ours = CodecDecoder.load(codec[0], BOOKS)
    contexts = [block.context for block in ours.spec.decoder if isinstance(block, TransformerSpec)]
    assert contexts == [5, 12]
    assert ours._memory.stream_bytes == (2 * 4 + 11) * 2 * 16 * 4


def test_a_budget_bounds_what_is_decoded_together(codec: tuple[Path, PlainCodec]) -> None:
    ours = CodecDecoder.load(codec[0], BOOKS)
    kept, piece = ours._memory.stream_bytes, 2 * ours.stack.piece_bytes(12)
    weights = sum(p.nbytes for p in ours.parameters()) + ours._tables.nbytes
    least = CONTEXT_BYTES + weights + kept
    assert ours.streams_within(10**6, 12, 32) == (1, 1)
    assert ours.streams_within(10**12, 12, 32) == (32, 64)
    assert ours.streams_within(least + 5 * (piece + kept), 12, 32) == (5, 5)
    assert ours.streams_within(least + 32 * (piece + kept) + 9 * kept, 12, 32) == (32, 41)


def test_the_published_codec_fits_the_vocoders_share_of_a_card() -> None:
    """0.05 of 139.8 GiB, in bfloat16, holds 32 pieces of 12 frames at once, and the memory of some more streams."""
    spec = CodecSpec.parse(published())
    with torch.device("meta"):
        decoder = CodecStack(spec.decoder, down=False, frame_places=1).to(torch.bfloat16)
        ours = CodecDecoder(spec, decoder, Quantizer(spec.quantizer, 12))
    assert ours._memory.stream_bytes == 88_335_360
    streams, slots = ours.streams_within(round(0.05 * 139.8 * 2**30), 12, 32)
    assert streams == 32 <= slots <= 64


def test_what_comes_while_the_codec_is_busy_is_decoded_together(
    codec: tuple[Path, PlainCodec], codes: torch.Tensor
) -> None:
    folder, plain = codec
    batches: list[int] = []

    class Watched(CodecDecoder):
        def decode(self, codes: Any, streams: Any) -> list[np.ndarray]:
            batches.append(len(streams))
            time.sleep(0.01)
            return super().decode(codes, streams)

    ours = Watched.load(folder, BOOKS)
    ours.make_room(4)
    gathering = GatheringDecoder(ours, 4)

    def spoken(shift: int) -> torch.Tensor:
        stream = gathering.open()
        pieces = codes.roll(shift, 0).split(4 if shift % 2 else 6)
        audio = np.concatenate([gathering.decode(piece.numpy(), stream) for piece in pieces], 1)
        gathering.close(stream)
        return torch.from_numpy(audio)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(spoken, range(8)))
    for shift, audio in enumerate(found):
        expected = plain.decode(codes.roll(shift, 0))
        assert (audio - expected).abs().max() < 2e-5 * expected.abs().max()
    assert 1 < max(batches) <= 4


def test_an_error_reaches_every_thread_that_waits(codec: tuple[Path, PlainCodec], codes: torch.Tensor) -> None:
    ours = CodecDecoder.load(codec[0], BOOKS)
    ours.make_room(4)
    gathering = GatheringDecoder(ours, 4)

    def wrong() -> str:
        stream = gathering.open()
        try:
            gathering.decode(codes[:3, :2].numpy(), stream)
        except IndexError as error:
            return type(error).__name__
        finally:
            gathering.close(stream)
        return "none"

    with ThreadPoolExecutor(3) as pool:
        assert [pool.submit(wrong).result() for _ in range(3)] == ["IndexError"] * 3
    stream = gathering.open()
    assert gathering.decode(codes[:3].numpy(), stream).shape == (CHANNELS, 3 * FRAME)


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
