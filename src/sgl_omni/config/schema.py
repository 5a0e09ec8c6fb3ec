"""The configuration as models. A pipeline class is a subclass of `PipelineConfig` that declares default stages."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from sgl_omni.config.scalars import (
    Copies,
    CoreSets,
    Count,
    Devices,
    EnvValue,
    Flag,
    Fraction,
    Names,
    OpenFraction,
    Percentage,
    PositiveInt,
    Size,
    StageGroups,
    Text,
    choice,
)
from sgl_omni.config.tasks import Tasks


def _one_of(*options: str, switch: bool = False) -> PlainValidator:
    return PlainValidator(choice(*options, switch=switch), json_schema_input_type=Literal[options])


MpsMode = Annotated[Literal["off", "auto", "on"], _one_of("off", "auto", "on", switch=True)]
ShareMode = Annotated[Literal["off", "on", "servers"], _one_of("off", "on", "servers", switch=True)]
Policy = Annotated[Literal["round_robin", "least_inflight"], _one_of("round_robin", "least_inflight")]
DeriveMode = Annotated[Literal["off", "auto", "on"], _one_of("off", "auto", "on", switch=True)]
OnExit = Annotated[Literal["stop", "restart"], _one_of("stop", "restart")]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class EngineConfig(_Section):
    """Settings of an engine stage."""

    max_total_tokens: PositiveInt | None = Field(
        default=None, description="Capacity of the KV pool in tokens. Weight sharing needs this or kv_cache_bytes."
    )
    kv_cache_bytes: Size | None = Field(default=None, description='Size of the KV pool in bytes, or as "2GiB".')
    mem_fraction_static: OpenFraction | None = Field(
        default=None, description="Weights and KV pool together, as a fraction of the GPU's total memory."
    )
    max_running_requests: PositiveInt = Field(default=64, description="Requests decoded together at most.")
    cuda_graph_max_bs: Count = Field(
        default=64, description="Largest batch for which a CUDA graph is captured; 0 captures none."
    )
    chunked_prefill_tokens: PositiveInt | None = Field(
        default=None, description="Prompt tokens prefilled in one step at most; longer prompts take several."
    )
    dtype: Text | None = Field(
        default=None, description="Data type of weights and activations; the checkpoint's by default."
    )
    page_size: PositiveInt | None = Field(default=None, description="Tokens per page of the KV pool.")


class StageConfig(_Section):
    """One logical unit of the pipeline."""

    process: Text | None = Field(
        default=None, description="Name of the Process that the stage runs in. Stages of one name share an OS process."
    )
    gpu: Devices | None = Field(default=None, description="GPU id; for a TP stage one per rank; null for a CPU stage.")
    tp_size: Copies = Field(
        default=1, description="Ranks of a tensor-parallel stage, 256 at most; each is an OS process of its own."
    )
    gpu_memory_fraction: Fraction | None = Field(
        default=None,
        description="What the stage (each rank) may hold of the GPU's total memory, above 0 and at most 1.",
    )
    total_reserve_bytes: Size | None = Field(
        default=None, description='The same budget as bytes or "4GiB". Excludes gpu_memory_fraction.'
    )
    enforce_total_reserve: Flag = Field(
        default=False, description="The budget is also a cap on the process's allocator."
    )
    next: Names = Field(default=(), description="Stages that receive this stage's payload.")
    stream_to: Names = Field(default=(), description="Stages that receive this stage's chunks as they are made.")
    wait_for: Names = Field(default=(), description="Stages whose payloads a fan-in stage merges.")
    terminal: Flag = Field(default=False, description="The stage's output goes to the client.")
    route_fn: Text | None = Field(
        default=None, description="Import path of a function that picks among `next` per request."
    )
    merge_fn: Text | None = Field(
        default=None, description="Import path of the function that merges `wait_for` payloads."
    )
    local_output: Flag = Field(
        default=False, description="The stage's output cannot be serialised: its successors must share its Process."
    )
    device_input: Flag = Field(
        default=False,
        description="The stage takes tensors where they are: those of another process's GPU stage arrive on its GPU.",
    )
    factory_path: Text | None = Field(default=None, description="Import path of the function that builds the stage.")
    factory: dict[str, Any] = Field(default={}, description="Keyword arguments of the factory.")
    engine: EngineConfig | None = Field(default=None, description="Engine settings; engine stages only.")
    env: dict[str, EnvValue] = Field(default={}, description="Environment variables of the stage's process.")


class ProcessConfig(_Section):
    """Copies and placement of one Process."""

    num_replicas: Copies = Field(default=1, description="Copies of the whole Process, 256 at most.")
    replica_devices: Devices | None = Field(
        default=None, description="GPU id of each replica (TP size T: N x T ids). Overrides the stages' `gpu`."
    )
    replica_policy: Policy = Field(default="round_robin", description="How a request's replica is chosen.")
    cpu_cores: CoreSets | None = Field(default=None, description='One core set per replica, as in ["0-9", "10-19"].')
    mps_thread_percentage: Percentage | None = Field(
        default=None,
        description="Under MPS, the part of the GPU's multiprocessors that each instance may use, 1 to 100 percent.",
    )


class PlacementConfig(_Section):
    """Limits that every GPU keeps."""

    max_total_gpu_memory_fraction_per_gpu: Fraction = Field(
        default=1.0, description="What the budgets on one GPU may sum to, as a fraction of its total memory."
    )
    require_memory_fraction_for_colocation: Flag = Field(
        default=True, description="Whether every GPU stage must declare a budget where two Processes share a GPU."
    )
    derive_cpu_cores: DeriveMode = Field(
        default="auto",
        description="Whether GPU instances without cpu_cores get disjoint sets of cores near their GPU: off, auto "
        "(on CUDA, where each gets two physical cores or more) or on (the CPU platform too, from one core up).",
    )


class PipelineConfig(_Section):
    """A whole pipeline. Subclasses declare the shipped topology of one model family and import no torch."""

    model_ids: ClassVar[tuple[str, ...]] = ()
    architectures: ClassVar[tuple[str, ...]] = ()
    engine_stages: ClassVar[tuple[str, ...]] = ()
    process_local_edges: ClassVar[tuple[tuple[str, str], ...]] = ()
    default_stages: ClassVar[dict[str, dict[str, Any]]] = {}
    default_processes: ClassVar[dict[str, dict[str, Any]]] = {}
    default_placement: ClassVar[dict[str, Any]] = {}
    default_entry_stage: ClassVar[str | None] = None
    shareable_architectures: ClassVar[tuple[str, ...]] = ()

    config_cls: Text | None = Field(
        default=None, description="Registered pipeline class, or the import path of one (package.module.ClassName)."
    )
    name: Text | None = Field(default=None, description="Display name of the pipeline.")
    model_path: Text | None = Field(default=None, description="Hugging Face id or folder of the checkpoint.")
    entry_stage: Text | None = Field(
        default=None, description="Stage that receives requests; the one without input by default."
    )
    stages: dict[str, StageConfig] = Field(
        default={}, description="Stage name -> its settings; a full list without a class."
    )
    processes: dict[str, ProcessConfig] = Field(default={}, description="Process name -> replicas and placement.")
    placement: PlacementConfig = Field(default=PlacementConfig(), description="Limits that every GPU keeps.")
    mps: MpsMode = Field(
        default="off", description="CUDA MPS: off, auto (GPUs with two or more eligible processes) or on."
    )
    weight_share: ShareMode = Field(
        default="off",
        description="Replicas of one Process on one GPU share one set of weights: off, on, or servers (with other "
        "servers on that GPU too, so that one replica is enough).",
    )
    weights_from: Text | None = Field(
        default=None,
        description="With weight_share: servers, the socket of the server whose weights the engines attach to, as its "
        "/health tells it (weights.lent_at). Without it they read the checkpoint.",
    )
    fused_stages: StageGroups = Field(default=(), description="Groups of adjacent stages to put in one Process each.")
    on_process_exit: OnExit = Field(default="stop", description="What follows when a process dies: stop or restart.")

    @classmethod
    def resolve_model_path(cls, model_path: str) -> str:
        """The checkpoint behind what the user wrote. Raises ``InvalidRequest`` where there is none."""
        return model_path

    @classmethod
    def tasks(cls, model_path: str) -> Tasks:
        """What the pipeline serves with this checkpoint. Raises ``InvalidRequest`` where it cannot be read."""
        return Tasks()
