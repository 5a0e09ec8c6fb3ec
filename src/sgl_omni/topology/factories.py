"""Whether each stage's factory exists and takes what it will be given (rules 1 and 6)."""

from __future__ import annotations

from sgl_omni.config.schema import StageConfig
from sgl_omni.config.violations import nearest
from sgl_omni.topology.findings import Findings, quoted
from sgl_omni.topology.processes import ProcessGroup
from sgl_omni.topology.source import Missing, Opaque, Signature, SourceReader

INJECTED = ("model_path", "gpu_id", "device", "engine", "weights")
"""What a factory is given when its signature asks for it."""
_TP_INJECTED = ("shard", "tp_rank", "tp_size", "nccl_port")
_TP_ASKED = ("shard", "tp_rank")
"""A factory that takes neither would build the whole model in every rank."""
_OWNED = {
    "gpu_id": "gpu",
    "engine": "engine",
    "shard": "tp_size",
    "tp_rank": "tp_size",
    "tp_size": "tp_size",
    "nccl_port": "tp_size",
    "total_gpu_memory_fraction": "gpu_memory_fraction",
    "process_total_gpu_memory_fraction": "gpu_memory_fraction",
}
"""Arguments that follow from other keys of the stage."""


def check_factories(found: Findings, groups: tuple[ProcessGroup, ...]) -> None:
    reader = SourceReader()
    for name, stage in found.stages.items():
        _check_factory(found, reader, name, stage)
        for key, path in (("route_fn", stage.route_fn), ("merge_fn", stage.merge_fn)):
            if path is not None:
                _check_function(found, reader, name, key, path)
    for group in groups:
        if group.num_replicas > 1 or group.replica_devices is not None:
            _check_placeable(found, reader, group)
        if group.tp_size > 1:
            _check_divisible(found, reader, group)


def _check_function(found: Findings, reader: SourceReader, stage: str, key: str, path: str) -> None:
    function = reader.find(path)
    if isinstance(function, Missing):
        message = f"stage '{stage}': {key} '{path}' does not exist: {function.reason}"
        hint = nearest(path.rpartition(".")[2], function.names) if function.names else "package.module.function"
        found.refuse("PLAN-001", message, ("stages", stage, key), hint=hint)


def _check_factory(found: Findings, reader: SourceReader, name: str, stage: StageConfig) -> None:
    if stage.factory_path is None:
        message = f"stage '{name}' has no factory_path"
        found.refuse("PLAN-001", message, ("stages", name), hint=f"stages.{name}.factory_path: package.module.function")
        return
    for argument in stage.factory:
        if argument in _OWNED:
            message = f"stage '{name}': factory argument '{argument}' follows from the placement"
            hint = f"stages.{name}.{_OWNED[argument]}"
            found.refuse("PLAN-016", message, ("stages", name, "factory", argument), hint=hint)
    signature = reader.find(stage.factory_path)
    if isinstance(signature, Missing):
        message = f"stage '{name}': factory '{stage.factory_path}' does not exist: {signature.reason}"
        known = signature.names
        hint = nearest(stage.factory_path.rpartition(".")[2], known) if known else "package.module.function"
        found.refuse("PLAN-001", message, ("stages", name, "factory_path"), hint=hint)
        return
    if isinstance(signature, Signature) and signature.exact:
        _check_arguments(found, name, stage, signature)


def _check_arguments(found: Findings, name: str, stage: StageConfig, signature: Signature) -> None:
    takes = [p for p in signature.parameters if p not in INJECTED]
    for argument in stage.factory:
        if argument not in signature.parameters and not signature.takes_any and argument not in _OWNED:
            message = f"stage '{name}': factory '{stage.factory_path}' takes no argument '{argument}'"
            hint = nearest(argument, takes)
            found.refuse("PLAN-016", message, ("stages", name, "factory", argument), hint=hint)
    given = {*stage.factory, *INJECTED, *(_TP_INJECTED if stage.tp_size > 1 else ())}
    lacking = [p for p in signature.required if p not in given]
    if lacking:
        message = f"stage '{name}': factory '{stage.factory_path}' needs {quoted(lacking)}"
        hint = f"stages.{name}.factory.{lacking[0]}"
        found.refuse("PLAN-016", message, ("stages", name, "factory"), hint=hint)
    if "model_path" in signature.required and found.resolved.model_path is None and "model_path" not in stage.factory:
        message = f"stage '{name}': factory '{stage.factory_path}' needs a model_path, and none is given"
        found.refuse("PLAN-016", message, ("stages", name, "factory_path"), hint="model_path: <id or folder>")


def _check_placeable(found: Findings, reader: SourceReader, group: ProcessGroup) -> None:
    """Every GPU stage that replica_devices places must be told where: its factory declares ``gpu_id``."""
    for name in group.gpu_stages:
        path = found.stages[name].factory_path
        signature = reader.find(path) if path else Missing("")
        if isinstance(signature, Missing) or (isinstance(signature, Signature) and "gpu_id" in signature.parameters):
            continue
        reason = "its source cannot be read" if isinstance(signature, Opaque) else "its signature declares no gpu_id"
        labels = [group.stage_label(name, r) for r in range(group.num_replicas)]
        message = (
            f"stage '{name}' cannot be placed as {quoted(labels)} of Process '{group.name}': factory '{path}': {reason}"
        )
        hint = "a factory with a gpu_id parameter, or one replica without replica_devices"
        found.refuse("PLAN-006", message, ("processes", group.name), hint=hint, about=group.stages)


def _check_divisible(found: Findings, reader: SourceReader, group: ProcessGroup) -> None:
    """Each rank of a tensor-parallel stage must be told its part: its factory declares ``shard`` or ``tp_rank``."""
    for name in group.stages:
        path = found.stages[name].factory_path
        signature = reader.find(path) if path else Missing("")
        if found.stages[name].tp_size == 1 or isinstance(signature, Missing):
            continue
        if isinstance(signature, Signature) and any(p in signature.parameters for p in _TP_ASKED):
            continue
        reason = "its source cannot be read" if isinstance(signature, Opaque) else "its signature declares no shard"
        message = f"stage '{name}' cannot be tensor-parallel: factory '{path}': {reason}"
        hint = f"a factory with a shard parameter, or stages.{name}.tp_size: 1"
        found.refuse("PLAN-004", message, ("stages", name, "tp_size"), hint=hint, about=group.stages)
