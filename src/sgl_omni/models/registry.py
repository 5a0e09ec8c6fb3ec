"""The pipeline classes that ship, by name, model id and architecture. Imports a family only when it is asked for."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterable
from pathlib import Path

from sgl_omni.config.schema import PipelineConfig
from sgl_omni.config.tasks import Tasks
from sgl_omni.errors import InvalidRequest, StartupError
from sgl_omni.models.folder import find_folder, read_json

SHIPPED: dict[str, str] = {
    "DemoVoicePipelineConfig": "sgl_omni.models.demo_voice.pipeline",
    "Qwen3OmniSpeechPipelineConfig": "sgl_omni.models.qwen3_omni.pipeline",
    "HiggsTtsPipelineConfig": "sgl_omni.models.higgs_tts.pipeline",
    "MossTTSLocalPipelineConfig": "sgl_omni.models.moss_tts_local.pipeline",
    "Qwen3TTSPipelineConfig": "sgl_omni.models.qwen3_tts.pipeline",
    "MingOmniTTSPipelineConfig": "sgl_omni.models.ming_omni_tts.pipeline",
    "TextLLMPipelineConfig": "sgl_omni.models.text_llm.pipeline",
    "WhisperPipelineConfig": "sgl_omni.models.whisper.pipeline",
    "Qwen3AsrPipelineConfig": "sgl_omni.models.qwen3_asr.pipeline",
    "CsmPipelineConfig": "sgl_omni.models.csm.pipeline",
}
"""Class name -> module that defines it. A new family adds one line."""


def tasks_of(cls: type[PipelineConfig], model_path: str) -> Tasks:
    """What a pipeline serves with the files of a model.

    Raises ``StartupError`` that names file and field. A field that nobody thought of may hold anything, so what a
    family's code trips over when it reads the files is told as their fault too.
    """
    try:
        return cls.tasks(model_path)
    except InvalidRequest as error:
        raise StartupError(str(error)) from error
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError, MemoryError) as error:
        trace = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{Path(trace.filename).name}, line {trace.lineno}: {trace.line}"
        raise StartupError(
            f"the files of {model_path} do not fit {cls.__name__}: {type(error).__name__}: {error} ({line})"
        ) from error


class PipelineRegistry:
    """Finds pipeline classes among `modules` (class name -> module) and by import path."""

    def __init__(self, modules: dict[str, str] | None = None) -> None:
        self._modules = SHIPPED if modules is None else modules

    def names(self) -> tuple[str, ...]:
        return tuple(self._modules)

    def by_name(self, name: str) -> type[PipelineConfig]:
        """The class behind a ``config_cls``: a registered name, or ``package.module.ClassName``.

        Raises:
            LookupError: no such class; the message says what was looked for.
        """
        if name in self._modules:
            return _import_class(self._modules[name], name)
        module, _, attribute = name.replace(":", ".").rpartition(".")
        if not module:
            raise LookupError(f"unknown pipeline class '{name}'")
        return _import_class(module, attribute)

    def by_model(self, model_path: str) -> type[PipelineConfig] | None:
        """The class that serves a model id, or the architecture in a folder's ``config.json``."""
        classes = [self.by_name(name) for name in self._modules]
        for cls in classes:
            if model_path in cls.model_ids:
                return cls
        try:
            architectures = architectures_in(model_path)
        except InvalidRequest:
            return None
        return next((cls for cls in classes if not architectures.isdisjoint(cls.architectures)), None)

    def why_unknown(self, model_path: str) -> str:
        """What is wrong with a model that ``by_model`` finds no class for."""
        try:
            return f"its architecture is {', '.join(sorted(architectures_in(model_path)))}"
        except InvalidRequest as error:
            return str(error)

    def model_ids(self) -> Iterable[str]:
        for name in self._modules:
            yield from self.by_name(name).model_ids


def architectures_in(model_path: str) -> frozenset[str]:
    """``architectures`` in the ``config.json`` of a folder, or of a model that was downloaded.

    Raises ``InvalidRequest`` that names the file where there is no such file or list.
    """
    folder = find_folder(model_path)
    names = read_json(folder).get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise InvalidRequest(f"{folder / 'config.json'}: architectures is {names!r}, not a list of names", "model_path")
    return frozenset(names)


def _import_class(module: str, name: str) -> type[PipelineConfig]:
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise LookupError(f"module '{module}' of pipeline class '{name}' cannot be imported: {error}") from error
    except Exception as error:  # the module is the user's code and may raise anything
        raise LookupError(f"importing '{module}' for pipeline class '{name}' raised {error!r}") from error
    if not (isinstance(found, type) and issubclass(found, PipelineConfig)):
        raise LookupError(f"'{name}' of module '{module}' is no pipeline class")
    return found
