"""A checkpoint that is not whole is refused before any process starts, or at least before a stage takes GPU memory."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import BUILDERS
from torch import Tensor

from sgl_omni.engine import checkpoint
from sgl_omni.engine.checkpoint import Checkpoint, CheckpointError, Slot
from sgl_omni.engine.code_predictor import CodeSampling
from sgl_omni.engine.decoder_config import DecoderConfig
from sgl_omni.engine.headers import check_shapes, read_headers
from sgl_omni.engine.model import CausalModel
from sgl_omni.engine.shapes import Named, causal_shapes
from sgl_omni.errors import InvalidRequest
from sgl_omni.models import folder as models_folder
from sgl_omni.models.csm import spec as csm
from sgl_omni.models.csm.model import CsmModel
from sgl_omni.models.higgs_audio_v2 import spec as higgs2
from sgl_omni.models.higgs_audio_v2.codec_decoder import dac_decoder
from sgl_omni.models.higgs_audio_v2.codec_encoder import CodecEncoder as HiggsCodecEncoder
from sgl_omni.models.higgs_audio_v2.codec_shapes import codec_shapes as higgs_shapes
from sgl_omni.models.higgs_audio_v2.codec_spec import CodecSpec as HiggsCodec
from sgl_omni.models.higgs_audio_v2.model import HiggsModel
from sgl_omni.models.higgs_tts import spec as higgs3
from sgl_omni.models.higgs_tts.model import HiggsTts3Model
from sgl_omni.models.mimi_shapes import mimi_shapes
from sgl_omni.models.ming_omni_tts import spec as ming
from sgl_omni.models.ming_omni_tts.model import MingModel
from sgl_omni.models.ming_omni_tts.vae import VaeEncoder
from sgl_omni.models.ming_omni_tts.vae_decoder import VaeDecoder
from sgl_omni.models.moss_tts_local import spec as moss
from sgl_omni.models.moss_tts_local.model import MossModel
from sgl_omni.models.qwen3_omni import spec as omni
from sgl_omni.models.qwen3_omni import tower_shapes
from sgl_omni.models.qwen3_omni.talker import TalkerModel as OmniTalker
from sgl_omni.models.qwen3_tts import spec as tts
from sgl_omni.models.qwen3_tts.codec_shapes import SPEAKER_DEFAULTS, speaker_shapes
from sgl_omni.models.qwen3_tts.talker import TalkerModel
from sgl_omni.models.registry import PipelineRegistry
from sgl_omni.models.whisper.decoder import WhisperDecoder
from sgl_omni.models.whisper.shapes import tensor_shapes
from sgl_omni.models.whisper.spec import WhisperSpec
from sgl_omni.runtime.wiring import load_object

ENGINE = {
    "csm": "backbone_model.layers.1.mlp.up_proj.weight",
    "demo_voice": "model.layers.1.mlp.up_proj.weight",
    "higgs_v2": "model.layers.1.audio_mlp.up_proj.weight",
    "higgs_v3": "body.layers.1.self_attn.k_norm.weight",
    "ming": "flowloss.cfm.model.blocks.1.attn.to_k.weight",
    "ming_experts": "model.model.layers.1.mlp.shared_experts.up_proj.weight",
    "moss": "local_transformer.h.1.attn.c_attn.bias",
    "qwen3_asr": "thinker.model.layers.1.mlp.up_proj.weight",
    "qwen3_asr_new": "model.language_model.layers.1.mlp.up_proj.weight",
    "qwen3_omni": "talker.code_predictor.model.layers.1.self_attn.o_proj.weight",
    "qwen3_tts": "talker.model.layers.1.mlp.up_proj.weight",
    "text_llm": "model.layers.1.self_attn.q_norm.weight",
    "text_llm_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
    "whisper": "model.encoder.layers.1.fc1.bias",
}
"""A tensor whose name and shape are known from the config alone."""

HIGGS3 = "tied.embedding.modality_embeddings.0.model."
PARTS = {
    "csm": [("", f"codec_model.{part}.") for part in ("decoder", "encoder", "quantizer")],
    "ming": [("", "audio.encoder.encoder.layers."), ("", "audio.decoder.decoder.layers.")],
    "demo_voice": [("codec", "decoder.")],
    "moss": [("codec", f"{part}.") for part in ("decoder", "encoder", "quantizer")],
    "qwen3_asr": [("", "thinker.audio_tower.")],
    "qwen3_asr_new": [("", "model.audio_tower."), ("", "model.multi_modal_projector.")],
    "qwen3_omni": [("", "thinker.visual."), ("", "thinker.audio_tower."), ("", "code2wav.")],
    "qwen3_tts": [("", "speaker_encoder."), ("speech_tokenizer", "encoder."), ("speech_tokenizer", "decoder.decoder.")],
    "higgs_v2": [
        ("audio_tokenizer", f"{part}.") for part in ("acoustic_decoder", "acoustic_encoder", "semantic_model")
    ],
    "higgs_v3": [("", f"{HIGGS3}acoustic_decoder."), ("", f"{HIGGS3}encoder_semantic.")],
}
"""Folder and prefix of encoders and codecs."""

CODECS = {
    "csm": [("", "codec_model.")],
    "ming": [("", "audio.")],
    "moss": [("codec", "")],
    "qwen3_asr": PARTS["qwen3_asr"],
    "qwen3_asr_new": PARTS["qwen3_asr_new"],
    "qwen3_omni": PARTS["qwen3_omni"],
    "qwen3_tts": [("", "speaker_encoder."), ("speech_tokenizer", "")],
    "higgs_v2": [("audio_tokenizer", "")],
    "higgs_v3": [("", HIGGS3)],
}
"""The same, whole."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    built: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in built:
            built[family] = tmp_path_factory.mktemp(family)
            BUILDERS[family](built[family])
        return built[family]

    return folder


@pytest.fixture
def copied(whole: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def copy(family: str) -> Path:
        return Path(shutil.copytree(whole(family), tmp_path / family))

    return copy


def refused(folder: Path) -> str:
    """What the check before the start says."""
    cls = PipelineRegistry().by_model(str(folder))
    assert cls is not None
    with pytest.raises(InvalidRequest) as caught:
        cls.tasks(str(folder))
    assert caught.value.param == "model_path"
    return str(caught.value)


def rewrite(folder: Path, name: str, value: Tensor | None) -> Path:
    """Gives a tensor another value, or takes it away, and leaves all else as it was; the file that held it."""
    file = read_headers(folder)[name].file
    tensors = load_file(file)
    if value is None:
        del tensors[name]
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            said = json.loads(index.read_text())
            del said["weight_map"][name]
            index.write_text(json.dumps(said))
    else:
        tensors[name] = value
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("family", BUILDERS)
def test_headers_and_templates_are_read_once_before_the_start(family: str, whole: Callable[[str], Path]) -> None:
    folder = whole(family)
    cls = PipelineRegistry().by_model(str(folder))
    assert cls is not None
    opened: Counter[str] = Counter()
    is_on = True

    def note(event: str, given: tuple[object, ...]) -> None:
        if is_on and event == "open" and str(given[0]).startswith(str(folder)):
            opened[str(given[0])] += 1

    sys.addaudithook(note)  # there is no way to take it away again
    cls.tasks(str(folder))
    is_on = False
    files = {str(file): file.suffix for file in folder.rglob("*") if file.suffix in (".safetensors", ".jinja")}
    read = {name: count for name, count in opened.items() if name in files}
    assert set(read.values()) == {1}, read
    assert {name for name, kind in files.items() if kind == ".safetensors"} <= read.keys()


@pytest.mark.parametrize("family", BUILDERS)
def test_what_is_wrong_with_the_engines_tensors_is_told_before_the_start(
    family: str, whole: Callable[[str], Path], copied: Callable[[str], Path]
) -> None:
    cls = PipelineRegistry().by_model(str(whole(family)))
    assert cls is not None
    cls.tasks(str(whole(family)))
    folder, name = copied(family), ENGINE[family]
    entry = read_headers(folder)[name]
    shape = [*entry.shape]
    rewrite(folder, name, torch.zeros(*shape, dtype=torch.int64))
    assert f"{entry.file}: {name} is I64, not one of BF16" in refused(folder)
    rewrite(folder, name, torch.zeros(*shape, dtype=torch.int8))
    assert f"{entry.file}: {name} is I8, not one of" in refused(folder)
    rewrite(folder, name, torch.zeros(shape[0] + 1, *shape[1:]))
    assert f"{entry.file}: {name} is {[shape[0] + 1, *shape[1:]]}, not {shape}" in refused(folder)
    rewrite(folder, name, None)
    assert f"{folder}: missing: {name}" in refused(folder)
    entry.file.write_bytes(entry.file.read_bytes()[:-8])
    assert str(entry.file) in refused(folder) and "truncated or damaged" in refused(folder)
    entry.file.unlink()
    assert f"{entry.file} is missing" in refused(folder)


FOLDERS = [(family, "") for family in BUILDERS if not family.startswith("ming")]
FOLDERS += [("demo_voice", "codec"), *((family, at) for family, parts in CODECS.items() for at, _ in parts if at)]


@pytest.mark.parametrize(("family", "at"), FOLDERS)
def test_a_tensor_that_no_stage_knows_is_told_before_the_start(
    family: str, at: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(family)
    entries = read_headers(folder / at)
    file = entries[min(entries)].file
    beside = f"{min(entries).rpartition('.')[0]}.bigger"
    tensors = load_file(file)
    for name in ("foo.weight", beside):
        save_file({**tensors, name: torch.zeros(2)}, file)
        index = folder / at / "model.safetensors.index.json"
        if index.is_file():
            said = json.loads(index.read_text())
            said["weight_map"] = {**{each: entry.file.name for each, entry in entries.items()}, name: file.name}
            index.write_text(json.dumps(said))
        assert refused(folder) == f"{file}: unknown to this model: {name}"


@pytest.mark.parametrize(("family", "at", "prefix"), [(f, *part) for f, parts in PARTS.items() for part in parts])
def test_what_is_wrong_with_another_part_is_told_before_the_start(
    family: str, at: str, prefix: str, copied: Callable[[str], Path]
) -> None:
    """Its stage refuses it too, before it takes memory: there is no such GPU here, and it would fail otherwise."""
    folder = copied(family)
    entries = read_headers(folder / at)
    name = next(name for name in sorted(entries) if name.startswith(prefix) and len(entries[name].shape) > 1)
    entry, shape = entries[name], [*entries[name].shape]
    rewrite(folder / at, name, torch.zeros(*shape, dtype=torch.int64))
    assert f"{entry.file}: {name} is I64, not one of BF16" in refused(folder)
    for value, told in ((torch.zeros(3, 5, 7, 9), f"{name} is [3, 5, 7, 9], not {shape}"), (None, f"missing: {name}")):
        rewrite(folder / at, name, value)
        assert told in refused(folder)
        errors = [error for error in failures(folder) if isinstance(error, CheckpointError)]
        assert errors and all(told in str(error) for error in errors), errors
    entry.file.write_bytes(entry.file.read_bytes()[:-8])
    assert str(entry.file) in refused(folder) and "truncated or damaged" in refused(folder)


@pytest.mark.parametrize("family", CODECS)
def test_all_that_stages_read_is_looked_at_before_the_start(
    family: str, whole: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = whole(family)
    before, read = recorded(monkeypatch, models_folder), recorded(monkeypatch, checkpoint)
    cls = PipelineRegistry().by_model(str(folder))
    assert cls is not None
    cls.tasks(str(folder))
    for _ in failures(folder):
        pass
    assert before == before | read
    for at, prefix in CODECS[family]:
        assert below(before, folder / at, prefix) == below(read, folder / at, prefix) != {}


@pytest.mark.parametrize(
    ("family", "at", "prefix"),
    [
        ("csm", "", "codec_model."),
        ("demo_voice", "codec", "decoder."),
        ("higgs_v2", "audio_tokenizer", "acoustic_decoder."),
        ("moss", "codec", "quantizer."),
        ("qwen3_asr", "", "thinker.audio_tower."),
        ("qwen3_omni", "", "code2wav."),
        ("qwen3_tts", "", "speaker_encoder."),
        ("qwen3_tts", "speech_tokenizer", "encoder."),
    ],
)
def test_a_part_that_is_not_there_is_told_before_the_start(
    family: str, at: str, prefix: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(family)
    for name in read_headers(folder / at):
        if name.startswith(prefix):
            rewrite(folder / at, name, None)
    assert f"{folder / at} holds no tensors below {prefix}" in refused(folder)


Looked = dict[tuple[str, str], tuple[int, ...]]
"""Shapes by folder and name."""


def recorded(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Looked:
    """What this module looks for in checkpoints from now on."""
    seen: Looked = {}

    def check(entries: Any, wanted: Named, where: str, **options: Any) -> None:
        wanted = list(wanted)
        seen.update({(where, name): shape for name, shape in wanted})
        check_shapes(entries, wanted, where, **options)

    monkeypatch.setattr(module, "check_shapes", check)
    return seen


def below(seen: Looked, folder: Path, prefix: str) -> Looked:
    return {key: shape for key, shape in seen.items() if key[0] == str(folder) and key[1].startswith(prefix)}


def failures(folder: Path) -> Iterator[Exception]:
    """Of all stages that use a GPU."""
    cls = PipelineRegistry().by_model(str(folder))
    assert cls is not None
    for stage in cls.default_stages.values():
        factory = load_object(stage["factory_path"])
        offered = {"model_path": str(folder), "gpu_id": 9, "device": "cuda:9", "engine": {"max_total_tokens": 64}}
        declared = inspect.signature(factory).parameters
        if "device" not in declared:
            continue
        try:
            factory(**{key: value for key, value in offered.items() if key in declared})
        except Exception as error:  # noqa: BLE001 - those that get as far as the GPU fail there, each in its way
            yield error


@pytest.mark.parametrize(
    ("family", "at", "field", "value", "told"),
    [
        (
            "moss",
            "codec",
            "quantizer_kwargs.num_quantizers",
            1,
            "and the audio tokenizer in {folder}/codec has 1 codeb",
        ),
        (
            "qwen3_tts",
            "speech_tokenizer",
            "decoder_config.latent_dim",
            None,
            "lacks the field decoder_config.latent_dim",
        ),
        (
            "qwen3_tts",
            "speech_tokenizer",
            "decoder_config.decoder_dim",
            "9",
            "decoder_config.decoder_dim is '9', no whole",
        ),
        ("qwen3_tts", "speech_tokenizer", "encoder_config", None, "lacks the field encoder_config"),
        ("csm", "", "codec_config.num_filters", "many", "codec_config.num_filters is 'many', no whole number"),
        ("moss", "codec", "decoder_kwargs.0.num_layers", 10**9, "decoder_kwargs.0.num_layers is 1000000000, more"),
        ("qwen3_tts", "speech_tokenizer", "encoder_config.num_quantizers", 10**9, "num_quantizers is 1000000000, more"),
        ("csm", "", "codec_config.num_semantic_quantizers", 10**9, "num_semantic_quantizers is 1000000000, more than"),
    ],
)
def test_a_field_that_says_no_shapes_is_named(
    family: str, at: str, field: str, value: Any, told: str, copied: Callable[[str], Path]
) -> None:
    folder = copied(family)
    file = folder / at / "config.json"
    config = within = json.loads(file.read_text())
    *path, last = field.split(".")
    for part in path:
        within = within[int(part)] if isinstance(within, list) else within[part]
    within.pop(last, None)
    if value is not None:
        within[last] = value
    file.write_text(json.dumps(config))
    assert told.format(folder=folder) in refused(folder)


def test_words_of_a_vocabulary_count_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"depth": 18053}}}))
    assert models_folder.read_json(tmp_path, "tokenizer.json")["model"]["vocab"] == {"depth": 18053}


def test_buffers_that_nobody_loads_are_let_be(copied: Callable[[str], Path]) -> None:
    folder = copied("csm")
    file = read_headers(folder)["codec_model.decoder.layers.0.conv.weight"].file
    buffers = {
        "codec_model.decoder_transformer.rotary_emb.inv_freq": torch.ones(4),
        "codec_model.decoder.layers.0.norm.num_batches_tracked": torch.tensor(3),
    }
    save_file(load_file(file) | buffers, file)
    cls = PipelineRegistry().by_model(str(folder))
    assert cls is not None
    cls.tasks(str(folder))
    entries = read_headers(folder)
    assert entries.keys() >= buffers.keys()
    known = {name: entry.shape for name, entry in entries.items() if name not in buffers}
    check_shapes(entries, known.items(), "here", prefix="")
    with pytest.raises(CheckpointError, match=r"unknown to this model: codec_model\.decoder\.layers\.0\.conv\.weight"):
        del known["codec_model.decoder.layers.0.conv.weight"]
        check_shapes(entries, known.items(), "here", prefix="")


def test_an_index_and_its_shards_must_agree(copied: Callable[[str], Path]) -> None:
    folder = copied("qwen3_omni")
    index = folder / "model.safetensors.index.json"
    said = json.loads(index.read_text())
    name, file = next(iter(said["weight_map"].items()))
    other = next(each for each in said["weight_map"].values() if each != file)

    def with_map(entry: str) -> str:
        index.write_text(json.dumps({**said, "weight_map": {**said["weight_map"], name: entry}}))
        return refused(folder)

    assert f"{folder / 'gone.safetensors'} is missing" in with_map("gone.safetensors")
    assert f"{folder / other} lacks the tensor {name}" in with_map(other)
    assert f"weight_map.{name} is '../x', no name of a file" in with_map("../x")


def header(tensors: dict[str, Any], data: int) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


@pytest.mark.parametrize(
    ("tensors", "data", "told"),
    [
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}, 12, r"a is F32 \[4\] and takes 12 bytes"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, 12, "a begins at byte 4 of the data"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, 4, r"F32 \[-1\] at 0 to 4"),
        ({"a": {"dtype": "F32", "shape": 3, "data_offsets": [0, 4]}}, 4, "neither type, shape nor place"),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4, "neither type, shape nor place"),
        ({"a": 3}, 4, "neither type, shape nor place"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 9, "has [0-9]+ bytes, and its header tells of"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_named(
    tmp_path: Path, tensors: dict[str, Any], data: int, told: str
) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(tensors, data))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors .*{told}"):
        read_headers(tmp_path)


def named(slots: Iterator[Slot]) -> dict[str, tuple[int, ...]]:
    return {slot.name: slot.shape for slot in slots}


def ming_tensors(spec: ming.MingSpec) -> tuple[dict[str, tuple[int, ...]], Named]:
    vae = VaeEncoder(spec.vae).slots("audio.encoder."), VaeDecoder(spec.vae).slots("audio.decoder.")
    read = named(chain(MingModel(spec).slots(), *vae))
    return read, chain(ming.engine_shapes(spec), ming.vae_shapes(spec.vae))


MODELS: dict[str, Callable[[Path, dict[str, Any]], tuple[dict[str, tuple[int, ...]], Named]]] = {
    "csm": lambda folder, config: (
        named(CsmModel(csm.CsmSpec.parse(config)).slots("t")),
        csm.engine_shapes(csm.CsmSpec.parse(config), "t"),
    ),
    "higgs_v2": lambda folder, config: (
        named(HiggsModel(higgs2.HiggsSpec.parse(config)).slots()),
        higgs2.engine_shapes(higgs2.HiggsSpec.parse(config)),
    ),
    "higgs_v3": lambda folder, config: (
        named(HiggsTts3Model(higgs3.HiggsTts3Spec.parse(config)).slots()),
        higgs3.engine_shapes(higgs3.HiggsTts3Spec.parse(config)),
    ),
    "ming": lambda folder, config: ming_tensors(ming.MingSpec.parse(config)),
    "ming_experts": lambda folder, config: ming_tensors(ming.MingSpec.parse(config)),
    "moss": lambda folder, config: (
        named(MossModel(moss.MossSpec.parse(config)).slots()),
        moss.engine_shapes(moss.MossSpec.parse(config)),
    ),
    "qwen3_omni": lambda folder, config: (
        named(OmniTalker(omni.TalkerSpec.parse(config)).slots()),
        omni.talker_shapes(omni.TalkerSpec.parse(config)),
    ),
    "qwen3_tts": lambda folder, config: (
        named(TalkerModel(tts.TalkerSpec.parse(config), CodeSampling(1.0, 50, 1.0)).slots()),
        tts.talker_shapes(tts.TalkerSpec.parse(config)),
    ),
    "text_llm": lambda folder, config: (
        named(CausalModel(DecoderConfig.parse(config)).slots("model.", "lm_head")),
        causal_shapes(DecoderConfig.parse(config), "model.", "lm_head"),
    ),
    "text_llm_moe": lambda folder, config: (
        named(CausalModel(DecoderConfig.parse(config)).slots("model.", "lm_head")),
        causal_shapes(DecoderConfig.parse(config), "model.", "lm_head"),
    ),
    "whisper": lambda folder, config: (
        named(WhisperDecoder(WhisperSpec.load(folder)).slots()),
        ((name, shape) for name, shape in tensor_shapes(config) if name.startswith("model.decoder.")),
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_what_is_expected_without_torch_is_what_the_model_reads(family: str, whole: Callable[[str], Path]) -> None:
    folder = whole(family)
    with torch.device("meta"):
        read, expected = MODELS[family](folder, Checkpoint(folder).config())
    assert dict(expected) == read


@pytest.mark.parametrize(
    "config",
    [
        {"attention_bias": True, "mlp_bias": True, "model_type": "llama"},
        {"model_type": "qwen2_moe", "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6,
         "shared_expert_intermediate_size": 10, "decoder_sparse_step": 2},
        {"model_type": "qwen3", "head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ],
)  # fmt: skip
def test_every_kind_of_decoder_is_expected_as_it_is_built(config: dict[str, Any]) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4}
    parsed = DecoderConfig.parse({**sizes, "rms_norm_eps": 1e-6, "vocab_size": 20, **config})
    with torch.device("meta"):
        model = CausalModel(parsed)
    assert dict(causal_shapes(parsed, "model.", "head")) == named(model.slots("model.", "head"))


def shapes_of(module: torch.nn.Module, prefix: str = "") -> dict[str, tuple[int, ...]]:
    return {prefix + name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize(
    "config",
    [
        {},
        {
            "attention_bias": True,
            "num_residual_layers": 2,
            "num_key_value_heads": 2,
            "upsample_groups": 1,
            "compress": 4,
        },
        {"vector_quantization_hidden_dimension": 512, "upsampling_ratios": [5, 3], "frame_rate": 400, "head_dim": 32},
    ],
)
def test_mimi_is_expected_as_transformers_builds_it(config: dict[str, Any]) -> None:
    from transformers import MimiConfig, MimiModel

    with torch.device("meta"):
        model = MimiModel(MimiConfig(**config))
    newer = re.compile(r"^(?:encoder|decoder)\.((?:en|de)coder_transformer|downsample|upsample)\.")
    names = {name: re.sub(r"^(\w+)\.\1_seanet\.", r"\1.", newer.sub(r"\1.", name)) for name in shapes_of(model)}
    assert dict(mimi_shapes(config, "")) == {names[name]: shape for name, shape in shapes_of(model).items()}


def test_towers_are_expected_as_transformers_builds_them() -> None:
    from transformers.models.qwen3_omni_moe import configuration_qwen3_omni_moe as configs
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as models

    with torch.device("meta"):
        audio = models.Qwen3OmniMoeAudioEncoder._from_config(configs.Qwen3OmniMoeAudioEncoderConfig())
        vision = models.Qwen3OmniMoeVisionEncoder._from_config(configs.Qwen3OmniMoeVisionEncoderConfig())
        code2wav = models.Qwen3OmniMoeCode2Wav._from_config(configs.Qwen3OmniMoeCode2WavConfig())
    assert dict(tower_shapes.audio_shapes({}, "")) == shapes_of(audio)
    assert dict(tower_shapes.vision_shapes({}, "")) == shapes_of(vision)
    assert dict(tower_shapes.code2wav_shapes({}, "")) == shapes_of(code2wav)


@pytest.mark.parametrize(
    "semantic",
    [
        {},
        {"feat_extract_norm": "layer", "conv_bias": True, "feat_proj_layer_norm": False, "do_stable_layer_norm": True},
    ],
)
def test_the_published_tokenizer_of_higgs_is_expected_as_transformers_builds_it(semantic: dict[str, Any]) -> None:
    spec = HiggsCodec.parse({"semantic_model_config": {"hidden_size": 768, **semantic}}, "config.json")
    with torch.device("meta"):
        encoder, decoder = HiggsCodecEncoder(spec), dac_decoder(spec)
    parts = ("acoustic_encoder.", "semantic_model.", "encoder_semantic.", "fc.")
    built = {name: shape for name, shape in shapes_of(encoder).items() if name.startswith(parts)}
    built |= shapes_of(decoder, "acoustic_decoder.")
    found = dict(higgs_shapes(spec, "", built.keys()))
    assert {name: shape for name, shape in found.items() if name.startswith((*parts, "acoustic_decoder."))} == built


def test_the_published_speaker_encoder_is_expected_as_transformers_builds_it() -> None:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import ECAPA_TimeDelayNet

    config: Any = SimpleNamespace(**SPEAKER_DEFAULTS)
    with torch.device("meta"):
        network = ECAPA_TimeDelayNet(config)
    assert dict(speaker_shapes({}, "")) == shapes_of(network)
