"""From a YAML file and command-line flags to one validated configuration that knows where each value came from.

Precedence: schema default < pipeline class < file < broadcast flag < explicit flag.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from sgl_omni.config.flags import Flag, split_flags
from sgl_omni.config.layers import FileTree, Layers
from sgl_omni.config.resolved import ResolvedConfig
from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.violations import Origin, PlanError, Violation, nearest
from sgl_omni.config.yaml_source import Document, read_yaml

_MAX_BYTES = 4 << 20


class Registry(Protocol):
    """Where pipeline classes are found."""

    def names(self) -> tuple[str, ...]: ...

    def by_name(self, name: str) -> type[PipelineConfig]: ...

    def by_model(self, model_path: str) -> type[PipelineConfig] | None: ...

    def why_unknown(self, model_path: str) -> str: ...


def load_config(
    path: Path | str | None,
    flags: Sequence[str] = (),
    *,
    registry: Registry,
    model_path: str | None = None,
) -> ResolvedConfig:
    """Reads ``path`` (None: the class follows from the model) and applies ``flags``.

    Args:
        flags: what the command line holds beyond the command's own options, e.g. ``["--vocoder.gpu", "1"]``.
        model_path: the model given as the command's argument; outranks the file.

    Raises:
        PlanError: the file cannot be read, or there is no pipeline to speak of.
    """
    document = read_document(Path(path)) if path is not None else Document("command line", {})
    return resolve(document, flags, registry=registry, model_path=model_path)


def resolve(
    document: Document,
    flags: Sequence[str] = (),
    *,
    registry: Registry,
    model_path: str | None = None,
    cls: type[PipelineConfig] | None = None,
) -> ResolvedConfig:
    """`load_config` for a document already read; ``cls`` spares the look-up of ``config_cls``."""
    problems = list(document.violations)
    if any(v.code == "PLAN-020" for v in problems):
        raise PlanError(problems)
    data = document.data if document.data is not None else {}
    if not isinstance(data, dict):
        message = "a configuration is a mapping of keys to values"
        raise PlanError([*problems, Violation(code="PLAN-023", message=message, place=document.origin(()))])
    written, flag_problems = split_flags(flags)
    problems += flag_problems
    if model_path is not None:
        written.insert(0, Flag("model-path", model_path))
    file = FileTree(document, dict(data), problems)
    cls = cls or _class_of(file, written, registry, problems)
    layers = Layers(cls, problems)
    layers.add_class()
    layers.add_file(file)
    layers.add_flags(written)
    return layers.finish()


def read_document(path: Path) -> Document:
    """A YAML file with the line of each value. Raises ``PlanError`` where it cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        message = f"cannot read {path}: {error.strerror or error}"
        raise PlanError([Violation(code="PLAN-020", message=message)]) from error
    if len(raw) > _MAX_BYTES:
        raise PlanError([Violation(code="PLAN-020", message=f"{path} is larger than {_MAX_BYTES >> 20} MiB")])
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        place = Origin("file", f"{path}:{line}")
        raise PlanError([Violation(code="PLAN-020", message="this is not UTF-8 text", place=place)]) from error
    return read_yaml(text, str(path))


def _class_of(
    file: FileTree, flags: Sequence[Flag], registry: Registry, problems: list[Violation]
) -> type[PipelineConfig]:
    """The pipeline class: named, or the one that serves the model, or plain where ``stages`` is complete."""
    name, place = file.data.get("config_cls"), file.document.origin(("config_cls",))
    model = file.data.get("model_path")
    for flag in flags:
        if flag.name.replace("-", "_") == "config_cls":
            name, place = flag.value, Origin("flag", flag.text)
        if flag.name.replace("-", "_") == "model_path":
            model = flag.value
    if isinstance(name, str) and name:
        try:
            return registry.by_name(name)
        except LookupError as error:
            hint = nearest(name, registry.names())
            raise PlanError(
                [*problems, Violation(code="PLAN-024", message=str(error), place=place, hint=hint)]
            ) from error
    if name is not None:
        message = "config_cls must be the name of a pipeline class"
        raise PlanError([*problems, Violation(code="PLAN-024", message=message, place=place)])
    if "stages" in file.data and file.is_full:
        return PipelineConfig
    found = registry.by_model(model) if isinstance(model, str) else None
    if found is not None:
        return found
    if "stages" in file.data:
        return PipelineConfig
    if isinstance(model, str):
        message = f"no pipeline class serves model '{model}': {registry.why_unknown(model)}"
    else:
        message = "there is no pipeline: neither config_cls, nor model_path, nor stages is given"
    hint = f"config_cls: one of {', '.join(registry.names())}"
    raise PlanError([*problems, Violation(code="PLAN-024", message=message, hint=hint)])
