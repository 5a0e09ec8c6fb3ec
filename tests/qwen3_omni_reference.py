"""What transformers' whole Qwen3-Omni answers to a conversation, with its own processing of all that is in it."""

from __future__ import annotations

import io
import wave
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_qwen3_omni import AUDIO, EOS, IMAGE, TEMPLATE, VIDEO, VOCABULARY


@dataclass
class Asked:
    """A conversation, as a chat task's payload has it, and as transformers is given it."""

    messages: list[dict[str, Any]]
    media: list[bytes] = field(default_factory=list)

    def payload(self, **options: Any) -> dict[str, Any]:
        return {"messages": self.messages, "media": self.media, "temperature": 0, **options}


@dataclass
class Answered:
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    codes: list[list[int]]
    audio: np.ndarray


def user(*parts: Any, media: list[bytes] | None = None, system: str | None = None) -> Asked:
    """``parts``: texts, or pairs of a kind and indices of ``media``."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part[0], "media": list(part[1])}
        for part in parts
    ]
    before = [] if system is None else [{"role": "system", "content": [{"type": "text", "text": system}]}]
    return Asked([*before, {"role": "user", "content": content}], media or [])


def tone(seconds: float, rate: int = 16000, seed: int = 0) -> bytes:
    """A WAV file of a sound that changes."""
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * rate)) / rate
    sound = 0.3 * np.sin(2 * np.pi * (200 + 300 * seed + 400 * t) * t) + 0.05 * rng.standard_normal(len(t))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((sound * 32767).clip(-32768, 32767).astype("<i2").tobytes())
    return file.getvalue()


def picture(width: int, height: int, seed: int = 0) -> bytes:
    """A PNG file of soft colours."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


class Reference:
    """``model``: transformers' own, of the checkpoint in ``folder``."""

    def __init__(self, model: Any, folder: Path) -> None:
        from transformers import AutoTokenizer, WhisperFeatureExtractor
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        self.model = model
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.tokenizer.chat_template = TEMPLATE
        self.sounds = WhisperFeatureExtractor.from_pretrained(folder)
        self.pictures = Qwen2VLImageProcessorPil.from_pretrained(folder)
        pictures = self.pictures
        self.frames = Qwen2VLImageProcessorPil(
            size={"shortest_edge": 1024, "longest_edge": 8192},
            temporal_patch_size=1,
            patch_size=pictures.patch_size,
            merge_size=pictures.merge_size,
            image_mean=pictures.image_mean,
            image_std=pictures.image_std,
        )

    def inputs(self, asked: Asked) -> dict[str, Any]:
        """What ``generate`` takes."""
        kinds = {"image": IMAGE, "audio": AUDIO, "video": VIDEO}
        parts = [part for message in asked.messages for part in message["content"]]
        made: dict[str, list[Any]] = {kind: [] for kind in kinds}
        for part in parts:
            if part["type"] in kinds:
                made[part["type"]].append(getattr(self, f"_{part['type']}")([asked.media[i] for i in part["media"]]))
        messages = [
            {"role": m["role"], "content": [{"type": p["type"], "text": p.get("text")} for p in m["content"]]}
            for m in asked.messages
        ]
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        counts = {kind: iter([item[0] for item in items]) for kind, items in made.items()}
        ids: list[int] = []
        for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]:
            kind = next((kind for kind, place in kinds.items() if place == token), None)
            ids += [token] * (1 if kind is None else next(counts[kind]))
        found: dict[str, Any] = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()}
        if made["image"]:
            found["pixel_values"] = torch.cat([item[1] for item in made["image"]])
            found["image_grid_thw"] = torch.tensor([item[2] for item in made["image"]])
        if made["video"]:
            found["pixel_values_videos"] = torch.cat([item[1] for item in made["video"]])
            found["video_grid_thw"] = torch.tensor([item[2] for item in made["video"]])
            found["video_second_per_grid"] = torch.tensor([2.0] * len(made["video"]))
        if made["audio"]:
            longest = max(item[1].shape[1] for item in made["audio"])
            features = [torch.nn.functional.pad(item[1], (0, longest - item[1].shape[1])) for item in made["audio"]]
            known = [torch.arange(longest) < item[1].shape[1] for item in made["audio"]]
            found["input_features"], found["feature_attention_mask"] = torch.stack(features), torch.stack(known).long()
        return found

    @torch.no_grad()
    def answer(self, asked: Asked, *, tokens: int = 8, frames: int = 12, voice: str = "Ethan") -> Answered:
        """Greedy, ``frames`` at most; the code predictor's own loop as transformers has it."""
        inputs = self.inputs(asked)
        heard: list[torch.Tensor] = []
        whole = self.model.code2wav.chunked_decode

        def listen(codes: torch.Tensor, **options: Any) -> torch.Tensor:
            heard.append(codes)
            return whole(codes, **options)

        self.model.code2wav.chunked_decode = listen
        try:
            sequence, audio = self.model.generate(
                **inputs,
                speaker=voice,
                thinker_max_new_tokens=tokens,
                thinker_eos_token_id=EOS,
                thinker_do_sample=False,
                talker_max_new_tokens=frames + 1,  # the last one's other codes are not predicted
                talker_do_sample=False,
            )
        finally:
            del self.model.code2wav.chunked_decode
        prompt = inputs["input_ids"][0].tolist()
        said = sequence[0, len(prompt) :].tolist()
        text = self.tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert max(said) < VOCABULARY
        return Answered(prompt, said, text, heard[0][0].T.tolist(), audio.reshape(-1).numpy())

    def _audio(self, files: list[bytes]) -> tuple[int, torch.Tensor]:
        import soundfile
        from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import _get_feat_extract_output_lengths

        samples, rate = soundfile.read(io.BytesIO(files[0]), dtype="float32")
        assert rate == 16000
        made = self.sounds(
            samples,
            sampling_rate=rate,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        frames = int(made["attention_mask"].sum())
        return int(_get_feat_extract_output_lengths(torch.tensor(frames))), made["input_features"][0, :, :frames]

    def _image(self, files: list[bytes]) -> tuple[int, torch.Tensor, list[int]]:
        made = self.pictures(Image.open(io.BytesIO(files[0])).convert("RGB"), return_tensors="pt")
        grid = made["image_grid_thw"][0].tolist()
        return grid[1] * grid[2] // 4, made["pixel_values"], grid

    def _video(self, files: list[bytes]) -> tuple[int, torch.Tensor, list[int]]:
        """Each frame as a picture, then two after another in one patch, as a video's patches are laid out."""
        made = [self.frames(Image.open(io.BytesIO(file)).convert("RGB"), return_tensors="pt") for file in files]
        made += [made[-1]] * (len(made) % 2)
        grid = made[0]["image_grid_thw"][0].tolist()
        values = torch.stack([frame["pixel_values"] for frame in made])  # [frames, patches, 3 * 16 * 16]
        pairs = values.view(len(made) // 2, 2, -1, 3, 16 * 16).permute(0, 2, 3, 1, 4)
        return len(made) // 2 * grid[1] * grid[2] // 4, pairs.reshape(-1, 3 * 2 * 16 * 16), [len(made) // 2, *grid[1:]]
