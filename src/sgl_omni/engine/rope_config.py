"""How positions turn, read from a Hugging Face ``config.json``. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgl_omni.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """``sections``: pairs of each axis (time, height, width), empty for one axis; ``interleaved``: how they mix.

    ``factor`` above 1 stretches positions: all alike (``linear``), or (``llama3``, ``yarn``) only the slow pairs, those
    that turn less than ``low`` times within ``original_positions``, passing over gradually up to ``high`` times. For
    ``yarn`` that begins and ends at whole pairs if ``whole_pairs``, and cosines and sines are ``amplitude`` high.
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_positions: int = 0
    whole_pairs: bool = True
    amplitude: float = 1.0
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Reads ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` of older files.

        Raises ``StartupError`` that names the field which is no number, or the kind that is not supported.
        """
        values = config.get("rope_parameters") or config.get("rope_scaling") or {}
        scaling = values.get("rope_type", values.get("type", "default"))
        rope = cls(
            theta=_number({"rope_theta": 10000.0, **config, **values}, "rope_theta"),
            sections=tuple(values.get("mrope_section") or ()),
            interleaved=bool(values.get("mrope_interleaved", values.get("interleaved", False))),
        )
        if _number({"partial_rotary_factor": 1.0, **config, **values}, "partial_rotary_factor") != 1.0:
            raise StartupError("rotary embeddings of a part of each head are not supported")
        if scaling in ("default", "mrope"):
            return rope
        if scaling == "linear":
            return replace(rope, scaling=scaling, factor=_number(values, "factor"))
        if scaling == "llama3":
            return replace(
                rope,
                scaling=scaling,
                factor=_number(values, "factor"),
                low=_number(values, "low_freq_factor"),
                high=_number(values, "high_freq_factor"),
                original_positions=int(_number(values, "original_max_position_embeddings")),
            )
        if scaling == "yarn":
            return _yarn(rope, config, values)
        raise StartupError(f"rope type {scaling!r} is not supported; use default, linear, llama3, yarn or mrope")

    @property
    def num_axes(self) -> int:
        return len(self.sections) or 1

    @property
    def stretched_positions(self) -> int:
        """What ``yarn`` makes of the positions that a model was trained with; 0 for other kinds."""
        return round(self.factor * self.original_positions) if self.scaling == "yarn" else 0


def _yarn(rope: RopeConfig, config: Mapping[str, Any], values: Mapping[str, Any]) -> RopeConfig:
    """Fields and their defaults are those of transformers."""
    if rope.theta <= 1:
        raise StartupError(f"rope_theta is {rope.theta:g}, and yarn needs one above 1")
    name, trained = "original_max_position_embeddings", "max_position_embeddings"
    original = int(_number({name: config.get(trained), **_given(values, name), **_given(config, name)}, name))
    factor = _number({"factor": _ratio(config.get(trained), original), **_given(values, "factor")}, "factor")
    amplitude = _number(
        {"attention_factor": _height(factor, 1.0), **_given(values, "attention_factor")}, "attention_factor"
    )
    if values.get("attention_factor") is None and values.get("mscale") and values.get("mscale_all_dim"):
        scales = (_number(values, key) for key in ("mscale", "mscale_all_dim"))
        above, below = (_height(factor, scale) for scale in scales)
        amplitude = above / below
    return replace(
        rope,
        scaling="yarn",
        factor=factor,
        low=_number({"beta_slow": values.get("beta_slow") or 1.0}, "beta_slow"),
        high=_number({"beta_fast": values.get("beta_fast") or 32.0}, "beta_fast"),
        original_positions=original,
        whole_pairs=bool(values.get("truncate", True)),
        amplitude=amplitude,
    )


def _given(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {} if values.get(name) is None else {name: values[name]}


def _ratio(positions: Any, original: int) -> Any:
    return positions / original if isinstance(positions, int) else None


def _height(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise StartupError(f"{name} is {'missing' if value is None else repr(value)}, no number above 0")
    return float(value)
