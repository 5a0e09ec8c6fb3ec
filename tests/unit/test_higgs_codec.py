"""The Higgs audio tokenizer against transformers' own class, and its decoding in chunks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny_higgs as tiny

from sgl_omni.engine.checkpoint import CheckpointError
from sgl_omni.engine.headers import check_shapes, read_headers
from sgl_omni.errors import InvalidRequest
from sgl_omni.models.higgs_audio_v2.codec_decoder import CodecDecoder
from sgl_omni.models.higgs_audio_v2.codec_encoder import CodecEncoder, resample
from sgl_omni.models.higgs_audio_v2.codec_shapes import codec_shapes
from sgl_omni.models.higgs_audio_v2.codec_spec import CodecSpec
from sgl_omni.models.higgs_tts.cuts import cut_after, frames_wanted
from sgl_omni.models.higgs_tts.vocoder import HiggsVocoder

SPEC = CodecSpec.parse(tiny.CODEC, "tiny")
TOLERANCE = 5e-6
"""Of samples whose largest is about one: sums in another order."""


@pytest.fixture(scope="module")
def reference() -> Any:
    return tiny.reference_codec()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, reference: Any) -> Path:
    folder = tmp_path_factory.mktemp("codec")
    reference.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def decoder(folder: Path) -> CodecDecoder:
    return CodecDecoder.load(folder, SPEC)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> CodecEncoder:
    return CodecEncoder.load(folder, SPEC)


def codes(frames: int, seed: int = 0, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, tiny.CODES, (batch, frames, tiny.BOOKS), generator=generator)


def test_the_published_tokenizer_has_eight_codebooks_at_25_frames_a_second() -> None:
    spec = CodecSpec.parse({}, "published")
    assert (spec.num_codebooks, spec.codebook_size, spec.frames_per_second, spec.hop) == (8, 1024, 25.0, 960)
    assert (spec.hidden_size, spec.semantic_stride, spec.context) == (1024, 2, (10, 10))


def test_decoding_equals_the_reference(reference: Any, decoder: CodecDecoder) -> None:
    given = codes(37, batch=2)
    with torch.no_grad():
        expected = reference.decode(given.transpose(1, 2)).audio_values[:, 0]
    found = decoder.decode(given)
    assert found.shape == (2, 37 * tiny.HOP)
    assert expected.abs().max() > 0.1
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("samples", [24_000, 28_800, 33_123, 40_000])
def test_encoding_equals_the_reference(reference: Any, encoder: CodecEncoder, samples: int) -> None:
    audio = torch.from_numpy(tiny.recording(samples / tiny.RATE, seed=samples))
    with torch.no_grad():
        expected = reference.encode(audio[None, None]).audio_codes[0].T
    found = encoder.encode(audio)
    assert torch.equal(found, expected)
    assert found.unique().numel() > 8, "codes that are all alike prove little"


def test_every_tensor_of_the_encoder_comes_from_the_checkpoint(encoder: CodecEncoder) -> None:
    assert not [name for name, _ in encoder.named_buffers()]
    assert all(torch.isfinite(parameter).all() for parameter in encoder.parameters())


AGES = [("weight_g", "weight_v"), ("original0", "original1")]


def normalised(folder: Path, names: tuple[str, str]) -> dict[str, Tensor]:
    """A checkpoint's tensors, with the acoustic convolutions' weights as lengths and directions called so."""
    tensors = load_file(folder / "model.safetensors")
    for name in [
        name for name in tensors if ".conv" in name and name.startswith("acoustic") and name.endswith("weight")
    ]:
        weight = tensors.pop(name)
        base = name.removesuffix("weight") + ("parametrizations.weight." if names[0] == "original0" else "")
        length = weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.dim() - 1))
        tensors |= {base + names[0]: length.contiguous(), base + names[1]: (weight * 0.5).contiguous()}
    return tensors


@pytest.mark.parametrize("names", AGES)
@pytest.mark.parametrize("gone", [(0,), (1,), (0, 1)])
def test_a_missing_part_of_a_weight_is_told_by_its_name_in_the_file(
    folder: Path, tmp_path: Path, names: tuple[str, str], gone: tuple[int, ...]
) -> None:
    base = "acoustic_decoder.block.1.conv_t1." + ("parametrizations.weight." if names[0] == "original0" else "")
    absent = [base + names[i] for i in gone]
    kept = {name: tensor for name, tensor in normalised(folder, names).items() if name not in absent}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing: {', '.join(map(re.escape, absent))}$"):
        check_shapes(read_headers(tmp_path), codec_shapes(SPEC, "", kept.keys()), str(tmp_path))
    with pytest.raises(CheckpointError, match=f"missing: {', '.join(map(re.escape, absent))}$"):
        CodecDecoder.load(tmp_path, SPEC)


def test_a_missing_weight_of_positions_is_told_as_length_and_direction(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    gone = sorted(name for name in tensors if "pos_conv_embed" in name and "weight" in name)
    assert [name.rpartition(".")[2] for name in gone] == ["original0", "original1"]
    kept = {name: tensor for name, tensor in tensors.items() if name not in gone}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing: {', '.join(map(re.escape, gone))}$"):
        CodecEncoder.load(tmp_path, SPEC)


@pytest.mark.parametrize("names", AGES)
def test_weights_may_be_normalised_on_disk(
    decoder: CodecDecoder, encoder: CodecEncoder, folder: Path, tmp_path: Path, names: tuple[str, str]
) -> None:
    save_file(normalised(folder, names), tmp_path / "model.safetensors")
    given, audio = codes(9), torch.from_numpy(tiny.recording(1.0))
    again = CodecDecoder.load(tmp_path, SPEC).decode(given)
    assert (again - decoder.decode(given)).abs().max() < TOLERANCE
    assert torch.equal(CodecEncoder.load(tmp_path, SPEC).encode(audio), encoder.encode(audio))


def test_a_checkpoint_of_other_shapes_is_refused_by_name(folder: Path, decoder: CodecDecoder, tmp_path: Path) -> None:
    wide = CodecSpec.parse({**tiny.CODEC, "codebook_dim": 4}, "wide")
    with pytest.raises(CheckpointError, match=r"codebook\.embed is \[64, 8\], not \[64, 4\]"):
        CodecDecoder.load(folder, wide)
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc2.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: fc2\.bias"):
        CodecDecoder.load(tmp_path, SPEC)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"acoustic_model_config": {"hidden_size": 16}}, "lacks the field decoder_hidden_size"),
        ({"acoustic_model_config": 5}, "acoustic_model_config is not an object"),
        ({"acoustic_model_config": tiny.CODEC["acoustic_model_config"] | {"upsampling_ratios": [2]}}, "do not undo"),
        ({"acoustic_model_config": tiny.CODEC["acoustic_model_config"] | {"upsampling_ratios": []}}, "list of factors"),
        ({"semantic_model_config": {}}, "semantic_model_config lacks the field hidden_size"),
    ],
)
def test_a_config_that_makes_no_sense_names_its_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        CodecSpec.parse(tiny.CODEC | change, "here")


def test_resampling_keeps_low_tones_and_drops_high_ones() -> None:
    time = torch.arange(24_000) / 24_000
    place = torch.arange(16_000) / 16_000
    for hertz, level in ((440.0, 1.0), (3000.0, 1.0), (10_000.0, 0.0)):
        found = resample(torch.sin(2 * torch.pi * hertz * time), 24_000, 16_000)
        assert found.shape == (16_000,)
        wanted = level * torch.sin(2 * torch.pi * hertz * place)
        assert (found - wanted)[100:-100].abs().max() < 0.02
    assert resample(torch.zeros(100), 24_000, 16_000).shape == (67,)


class Asked:
    id, aborted = "a", False


def spoken(vocoder: HiggsVocoder, given: np.ndarray, groups: int, speed: float = 1.0) -> np.ndarray:
    state = vocoder.open(Asked())  # type: ignore[arg-type]
    extra = {} if speed == 1.0 else {"speed": speed}
    chunks = [given[i : i + groups] for i in range(0, len(given), groups)]
    parts = [out["audio"] for chunk in chunks for out in vocoder.feed(state, {"codes": chunk, **extra})]
    parts += [out["audio"] for out in vocoder.flush(state)]
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


@pytest.mark.parametrize("frames", [0, 1, 4, 11, 26, 70, 113])
def test_chunks_join_to_what_decoding_at_once_gives(decoder: CodecDecoder, frames: int) -> None:
    given = codes(frames, seed=frames)
    vocoder = HiggsVocoder(decoder)
    whole = decoder.decode(given)[0].clamp(-1, 1).numpy() if frames else np.zeros(0, np.float32)
    rows = given[0].numpy().astype(np.int16)
    found = spoken(vocoder, rows, 5)
    assert found.shape == whole.shape
    assert np.abs(found - whole).max(initial=0) < TOLERANCE
    for groups in (1, 13, 200):
        assert np.array_equal(spoken(vocoder, rows, groups), found), "cuts must not depend on how codes arrive"


def test_the_first_sound_needs_fourteen_frames(decoder: CodecDecoder) -> None:
    vocoder = HiggsVocoder(decoder)
    state = vocoder.open(Asked())  # type: ignore[arg-type]
    rows = codes(40)[0].numpy().astype(np.int16)
    assert not list(vocoder.feed(state, {"codes": rows[:13]}))
    (first,) = vocoder.feed(state, {"codes": rows[13:14]})
    assert (len(first["audio"]), first["sample_rate"]) == (4 * tiny.HOP, tiny.RATE)
    assert [cut_after(start) for start in (0, 4, 12, 36, 96)] == [4, 12, 36, 96, 156]


@pytest.mark.parametrize(("known", "wanted"), [(0, 14), (13, 14), (14, 22), (22, 46), (45, 46), (46, 106), (106, 166)])
def test_codes_go_on_when_another_chunk_can_be_decoded(known: int, wanted: int) -> None:
    assert frames_wanted(known, 10) == wanted


GPU_PATH = """
import sys
from pathlib import Path
import torch
import sgl_omni.engine.decoder_graphs as graphs
import sgl_omni.engine.platform as platform
sys.path[:0] = [{tests!r}]
import tiny_higgs as tiny
from engine_fixtures import RunAgain, spoil_new_memory
import sgl_omni.models.higgs_audio_v2.codec_decoder as codec_decoder
from sgl_omni.models.higgs_audio_v2.codec_spec import CodecSpec

spoil_new_memory()
spec, folder = CodecSpec.parse(tiny.CODEC, "tiny"), Path({folder!r})
codes = torch.randint(0, tiny.CODES, (2, 2, tiny.BOOKS), generator=torch.Generator().manual_seed(3)).numpy()
pieces = [codes[0], codes[1, :1]]
plain = codec_decoder.CodecDecoder.load(folder, spec)
whole = [plain.decode_pieces([piece])[0] for piece in pieces]
platform.everywhere = True
torch.backends.cudnn.allow_tf32 = False
decoder = codec_decoder.CodecDecoder.load(folder, spec)
assert decoder.takes_any_lengths
loose = decoder.decode_pieces(pieces)
for found, expected in zip(loose, whole, strict=True):
    off = float(abs(found - expected).max() / abs(expected).max())
    assert found.shape == expected.shape and off < 5e-6, off
graphs.StepGraphs, codec_decoder.can_capture = RunAgain, lambda device: True
decoder.capture(2, 2)
for order in ((0,), (1, 0), (1,)):  # of one graph after another, with codes left over from before
    found = decoder.decode_pieces([pieces[i] for i in order])
    assert all((a == loose[i]).all() for a, i in zip(found, order, strict=True)), order
assert RunAgain.replays == 3
print("all checked")
"""


def test_a_gpus_kernels_decode_what_the_module_does(folder: Path) -> None:
    """Each by itself and as graphs; in a process of its own, because Triton decides at import whether it interprets."""
    program = GPU_PATH.format(tests=str(Path(__file__).parents[1]), folder=str(folder))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.endswith("all checked\n"), done.stderr


def test_a_budget_bounds_what_is_decoded_together(decoder: CodecDecoder) -> None:
    published = CodecSpec.parse({}, "published")
    assert published.decoding_bytes(80) == 80 * 960 * 32 * 14  # the last stage: 24 kHz, 32 channels
    each, most = decoder.spec.decoding_bytes(80), 32
    assert decoder.windows_within(10**6, 80, most) == 1
    assert decoder.windows_within(10**12, 80, most) == most
    assert 1 < decoder.windows_within(700 * 10**6 + 5 * each, 80, most) <= most


def test_rows_of_different_lengths_are_no_batch_without_kernels(decoder: CodecDecoder) -> None:
    with pytest.raises(ValueError, match=r"rows of \[2, 3\] frames"):
        decoder.decode_pieces([codes(3)[0].numpy(), codes(2)[0].numpy()])


def test_speed_changes_the_length_alone(decoder: CodecDecoder) -> None:
    vocoder = HiggsVocoder(decoder)
    rows = codes(40)[0].numpy().astype(np.int16)
    assert len(spoken(vocoder, rows, 7, speed=2.0)) == 20 * tiny.HOP
    assert len(spoken(vocoder, rows, 7, speed=0.5)) == 80 * tiny.HOP


def test_windows_of_many_threads_are_decoded_together(decoder: CodecDecoder) -> None:
    sizes: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    class Slow:
        spec, device, takes_any_lengths = SPEC, decoder.device, False

        def decode_pieces(self, pieces: list[Any]) -> Any:
            sizes.append(len(pieces))
            begun.set()
            go_on.wait(10)
            return decoder.decode_pieces(pieces)

    windowed = HiggsVocoder(Slow(), max_batch=32)._windows  # type: ignore[arg-type]
    windows = [codes(12 if i % 5 else 9, seed=i)[0].numpy().astype(np.int16) for i in range(21)]
    with ThreadPoolExecutor(21) as pool:
        first = pool.submit(windowed, windows[0])
        assert begun.wait(10)
        others = [pool.submit(windowed, window) for window in windows[1:]]
        while len(windowed._waiting) < 20:
            threading.Event().wait(0.01)
        go_on.set()
        found = [job.result(10) for job in (first, *others)]
    assert sorted(sizes) == [1, 4, 16]
    for window, audio in zip(windows, found, strict=True):
        alone = decoder.decode(torch.from_numpy(window.astype(np.int64))[None])[0].numpy()
        assert np.abs(audio - alone).max() < TOLERANCE


def test_a_window_that_fails_fails_those_that_wait_with_it(decoder: CodecDecoder) -> None:
    windowed = HiggsVocoder(decoder, max_batch=32)._windows
    with pytest.raises(IndexError):
        windowed(np.full((3, tiny.BOOKS), 30_000, np.int16))
    assert len(windowed(np.zeros((3, tiny.BOOKS), np.int16))) == 3 * tiny.HOP
