"""Writes a model folder of the published size and format with random weights, for a look at memory and speed.

    python -m benchmarks.real_size --family higgs_tts --out /tmp/higgs

Names and shapes are those that the family's loaders ask for; configs are the published ones as far as they are read.
Weights are bfloat16, in shards of at most 5 GB, drawn on the GPU where there is one. The tokenizer takes every letter
for a token. Practically no draw ends an answer or a speech: how long one gets is what its request says.

``--drawn-gb N`` leaves experts' matrices as holes in the files once N GB are drawn: they read as zeros, take no room
on the disk and the same room in memory.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.sizes import ming, published
from benchmarks.sizes.draw import Rules, write_weights
from benchmarks.sizes.tensors import shapes_of
from benchmarks.sizes.words import write_words

CONFIGS: dict[str, Callable[[int | None, bool], published.Files]] = {
    "higgs_tts": published.higgs_tts,
    "qwen3_tts": published.qwen3_tts,
    "moss_tts_local": published.moss_tts_local,
    "csm": published.csm,
    "ming_omni_tts": ming.ming_omni_tts,
    "ming_omni_tts_moe": ming.ming_omni_tts_moe,
    "whisper": published.whisper,
    "qwen3_asr": published.qwen3_asr,
    "text_llm": published.text_llm,
    "qwen3_omni": published.qwen3_omni,
}


def make(
    family: str,
    out: Path,
    *,
    layers: int | None = None,
    tiny: bool = False,
    drawn_bytes: int | None = None,
    only: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Fills the folder ``out``; returns what was written, by the folders within it, and how long it took.

    ``only``: what the paths of tensors begin with (folder, ``/``, name) where one stage alone is to be started.
    """
    begun = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    files = CONFIGS[family](layers, tiny)
    for name, value in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(json.dumps(value, indent=1))
    write_words(family, out)
    written = {}
    for seed, (part, shapes) in enumerate(shapes_of(family, files).items()):
        if only:
            shapes = {name: shape for name, shape in shapes.items() if f"{part}/{name}".lstrip("/").startswith(only)}
        rules = rules_of(family, files) if part == "" and not only else Rules(zero_rows={}, constants={})
        found = write_weights(out / part, shapes, rules, seed=seed, drawn_bytes=drawn_bytes)
        written[part or "."] = asdict(found)
    return {"family": family, "folder": str(out), "written": written, "seconds": time.perf_counter() - begun}


def rules_of(family: str, files: published.Files) -> Rules:
    """What keeps a family's model from ending by itself."""
    config = files["config.json"]
    zero_rows: dict[str, tuple[int, ...]] = {}
    constants: dict[str, tuple[float, ...]] = {}
    if family == "text_llm":
        zero_rows["model.embed_tokens.weight"] = (151643, 151645)
    elif family == "higgs_tts":
        audio = config["audio_encoder_config"]
        ends = tuple((book + 1) * audio["vocab_size"] - 1 for book in range(audio["num_codebooks"]))
        zero_rows["tied.embedding.modality_embeddings.0.embedding.weight"] = ends
    elif family == "qwen3_tts":
        zero_rows["talker.codec_head.weight"] = (config["talker_config"]["codec_eos_token_id"],)
    elif family == "whisper":
        zero_rows["model.decoder.embed_tokens.weight"] = (config["eos_token_id"],)
    elif family == "qwen3_asr":
        zero_rows["thinker.model.embed_tokens.weight"] = (151643, 151645)
    elif family == "qwen3_omni":
        zero_rows["thinker.lm_head.weight"] = (config["im_end_token_id"],)
        zero_rows["talker.codec_head.weight"] = (config["talker_config"]["codec_eos_token_id"],)
    elif family == "moss_tts_local":
        # The decision sees a normed state, whose numbers add up to the sum of the norm's bias, whatever was said.
        constants["local_transformer.ln_f.bias"] = (0.1,) * config["gpt2_config"]["n_embd"]
        constants["local_text_lm_head.weight"] = (1.0, -1.0)
    elif family in ("ming_omni_tts", "ming_omni_tts_moe"):
        zero_rows["stop_head.weight"] = (0, 1)
        constants["stop_head.bias"] = (1.0, 0.0)
    # CSM ends with a frame of which all 32 codes are 0.
    return Rules(zero_rows=zero_rows, constants=constants)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=CONFIGS, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, help="layers of the main decoder, in place of all")
    parser.add_argument("--tiny", action="store_true", help="small widths and two layers, for a rehearsal on a CPU")
    parser.add_argument("--drawn-gb", type=float, help="draw no more than that; experts beyond are holes")
    options = parser.parse_args()
    drawn = None if options.drawn_gb is None else int(options.drawn_gb * 1e9)
    made = make(options.family, options.out, layers=options.layers, tiny=options.tiny, drawn_bytes=drawn)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
