"""Writes the files beside it: what the model authors' own code makes of the tiny checkpoints.

Their package, ``qwen-tts`` 0.1.1, pins transformers 4.57.3 and imports torchaudio and sox, so it cannot share an
environment with this project. In one of its own, whose other packages may be this project's::

    python -m venv reference && . reference/bin/activate
    pip install --no-deps qwen-tts==0.1.1 transformers==4.57.3 huggingface-hub==0.36.0 tokenizers==0.22.1
    pip install torch librosa einops onnxruntime safetensors regex pyyaml requests tqdm packaging filelock
    python tests/unit/data/qwen3_tts/make_goldens.py

torchaudio and sox only serve its 25 Hz tokenizer and are replaced by empty modules. Everything that is compared runs
as published: the wrapper's tokenising, prompts, ``generate`` (greedy), speaker encoder, and codec in both directions.
"""

from __future__ import annotations

import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers  # before the empty modules: it looks for these packages itself

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))
for name in ("torchaudio", "torchaudio.compliance", "torchaudio.compliance.kaldi", "sox"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["torchaudio.compliance"].kaldi = sys.modules["torchaudio.compliance.kaldi"]  # type: ignore[attr-defined]

import tiny_qwen3_tts as tiny  # noqa: E402
from qwen_tts import Qwen3TTSModel  # noqa: E402
from qwen_tts.core.models import Qwen3TTSConfig, Qwen3TTSForConditionalGeneration  # noqa: E402
from qwen_tts.core.tokenizer_12hz.configuration_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Config  # noqa: E402
from qwen_tts.core.tokenizer_12hz.modeling_qwen3_tts_tokenizer_v2 import Qwen3TTSTokenizerV2Model  # noqa: E402

FRAMES = 24
GREEDY = {"do_sample": False, "subtalker_dosample": False, "repetition_penalty": 1.05}
CASES: dict[str, dict[str, Any]] = {
    "custom": {"kind": "custom_voice", "text": "Hello there, how are you?", "speaker": "Vivian", "language": "English"},
    "custom instructed": {
        "kind": "custom_voice",
        "text": "你好,世界。",
        "speaker": "vivian",
        "language": "Chinese",
        "instruct": "Very happy.",
    },
    "custom dialect": {"kind": "custom_voice", "text": "It rains.", "speaker": "eric"},
    "custom dialect elsewhere": {"kind": "custom_voice", "text": "It rains.", "speaker": "eric", "language": "english"},
    "design": {"kind": "voice_design", "text": "The bus is late.", "instruct": "An old man.", "language": "English"},
    "design plain": {"kind": "voice_design", "text": "The bus is late.", "instruct": ""},
    "clone": {"kind": "base", "text": "Something the voice never said.", "ref_text": "A b c.", "language": "English"},
    "clone of few words": {"kind": "base", "text": "No.", "ref_text": "A."},
    "clone by speaker": {"kind": "base", "text": "Only the timbre.", "language": "Chinese"},
    "clone by speaker, one letter": {"kind": "base", "text": "a"},
}


def main() -> None:
    torch.set_num_threads(1)
    (HERE / "tensors.json").write_text(json.dumps(tensors(), separators=(",", ":")))
    found: dict[str, np.ndarray[Any, Any]] = {}
    for kind in tiny.KINDS:
        with tempfile.TemporaryDirectory() as folder:
            model = Qwen3TTSModel.from_pretrained(str(tiny.build(Path(folder), kind)), dtype=torch.float32)
        for name, case in CASES.items():
            if case["kind"] == kind:
                found |= {f"{name}/{key}": value for key, value in spoken(model, case).items()}
        if kind == "base":
            found |= heard(model)
    codes = np.random.RandomState(8).randint(0, tiny.CODES, (70, tiny.GROUPS))
    found |= {"codec/codes": codes.astype(np.int16), "codec/audio": whole(model, codes)}
    np.savez_compressed(HERE / "goldens.npz", **found)  # type: ignore[arg-type]
    (HERE / "cases.json").write_text(json.dumps(CASES, ensure_ascii=False, indent=1) + "\n")
    lengths = {name: len(found[f"{name}/codes"]) for name in CASES}
    print(transformers.__version__, lengths, (HERE / "goldens.npz").stat().st_size, "bytes")


def tensors() -> dict[str, dict[str, list[int]]]:
    """Names and shapes of every tensor, as the authors' classes have them."""
    models: dict[str, torch.nn.Module] = {
        kind: Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**tiny.config(kind))) for kind in tiny.KINDS
    }
    models["speech_tokenizer"] = Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**tiny.speech_tokenizer_config()))
    return {kind: {n: [*t.shape] for n, t in sorted(model.state_dict().items())} for kind, model in models.items()}


def spoken(model: Any, case: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Prompt, trailing text, codes and audio of one case."""
    seen: dict[str, np.ndarray[Any, Any]] = {}
    talker, generate = model.model.talker, model.model.talker.generate
    decoder = model.model.speech_tokenizer

    def record(**options: Any) -> Any:
        seen["prompt"] = options["inputs_embeds"][0].numpy()
        seen["trailing"] = options["trailing_text_hidden"][0].numpy()
        return generate(**options)

    options = {key: value for key, value in case.items() if key != "kind"}
    audio = (tiny.recording(), tiny.SAMPLE_RATE)
    talker.generate = record
    decode = decoder.decode

    def record_codes(encoded: Any) -> Any:
        seen["codes"] = encoded[0]["audio_codes"].numpy().astype(np.int16)
        return decode(encoded)

    decoder.decode = record_codes
    limit = {**GREEDY, "max_new_tokens": FRAMES + 1}  # of the last only the first code is made
    try:
        if case["kind"] == "base":
            alone = "ref_text" not in case
            wavs, _ = model.generate_voice_clone(ref_audio=audio, x_vector_only_mode=alone, **options, **limit)
        elif case["kind"] == "custom_voice":
            wavs, _ = model.generate_custom_voice(**options, **limit)
        else:
            wavs, _ = model.generate_voice_design(**options, **limit)
    finally:
        del talker.generate, decoder.decode
    frames = seen["codes"]
    if "ref_text" in case:  # the decoder is given the recording's frames too
        frames = frames[model.create_voice_clone_prompt(audio, "x")[0].ref_code.shape[0] :]
    return {**seen, "codes": frames, "audio": wavs[0][-len(frames) * tiny.FRAME_SAMPLES :]}


def heard(model: Any) -> dict[str, np.ndarray[Any, Any]]:
    """What is taken of a recording: at the model's own rate, and at one that has to be resampled."""
    found = {}
    for name, rate in (("", tiny.SAMPLE_RATE), (" at 16 kHz", 16000)):
        item = model.create_voice_clone_prompt((tiny.recording(rate=rate), rate), "x")[0]
        found[f"reference{name}/codes"] = item.ref_code.numpy().astype(np.int16)
        found[f"reference{name}/speaker"] = item.ref_spk_embedding.numpy()
    return found


def whole(model: Any, codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        audio = model.model.speech_tokenizer.model.decoder(torch.from_numpy(codes.T[None].astype(np.int64)))
    return audio[0, 0].numpy()


if __name__ == "__main__":
    main()
