"""How positions turn, read from a Hugging Face ``config.json``. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sgl_omni.errors import StartupError


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """``sections``: pairs of each axis (time, height, width), empty for one axis; ``interleaved``: how they mix.

    ``factor`` above 1 stretches positions: all alike (``linear``), or (``llama3``) only the slow pairs, those that
    turn less than ``low`` times within ``original_positions``, passing over gradually up to ``high`` times.
    """

    theta: float
    scaling: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original_positions: int = 0
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
        raise StartupError(f"rope type {scaling!r} is not supported; use default, linear, llama3 or mrope")

    @property
    def num_axes(self) -> int:
        return len(self.sections) or 1


def _number(values: Mapping[str, Any], name: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise StartupError(f"{name} is {'missing' if value is None else repr(value)}, no number above 0")
    return float(value)
