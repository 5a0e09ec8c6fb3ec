"""Where a model's tensors live: in this process's own memory, or in an arena that replicas share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

Fill = Callable[[Mapping[str, Tensor]], None]


@dataclass(frozen=True, slots=True)
class SharePolicy:
    """What replicas of an architecture share. An architecture without a policy is never shared.

    ``private``: patterns (as of ``fnmatch``) of the tensors that a request writes; each replica owns a copy of them.
    ``remarks``: what a replica holds besides, derived from the shared tensors.
    """

    architecture: str
    private: tuple[str, ...] = ()
    remarks: str = ""


class WeightStore(Protocol):
    """Gives one model of a process its tensors. A factory gets one where its signature names ``weights``."""

    def obtain(
        self,
        wanted: Mapping[str, Tensor],
        device: torch.device | str,
        fill: Fill,
        *,
        policy: SharePolicy | None,
        fingerprint: str,
    ) -> dict[str, Tensor]:
        """Real tensors for those ``wanted`` on the meta device, of the same names, shapes, strides and dtypes.

        ``fill`` must write every tensor that it is given and keep none of them. It is called where the checkpoint
        has to be read, and nowhere else. Shared tensors may be mapped read-only: writing one ends the process.

        Raises:
            WeightShareError: the weights cannot be shared, or those found are not this model's.
        """
        ...

    def verify(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ``WeightShareError`` where one of these shared tensors no longer lies where the group's weights are.

        To be called before anything remembers addresses, as a CUDA graph does.
        """
        ...

    def refuse_update(self) -> None:
        """Raises ``WeightShareError`` while the weights are shared; to be called before weights are changed."""
        ...


class OwnWeights:
    """Every tensor in memory of its own; nothing is shared."""

    def obtain(
        self,
        wanted: Mapping[str, Tensor],
        device: torch.device | str,
        fill: Fill,
        *,
        policy: SharePolicy | None,
        fingerprint: str,
    ) -> dict[str, Tensor]:
        tensors = {name: torch.empty_like(tensor, device=device) for name, tensor in wanted.items()}
        fill(tensors)
        return tensors

    def verify(self, tensors: Mapping[str, Tensor]) -> None:
        return

    def refuse_update(self) -> None:
        return


def load_module(
    module: nn.Module,
    store: WeightStore,
    read: Callable[[], None],
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    policy: SharePolicy | None,
    fingerprint: str,
) -> None:
    """Gives a module that was built on the meta device its tensors.

    Args:
        read: fills all parameters and buffers of the module, from a checkpoint say. It is called first while they are
            on the meta device, so that it refuses what does not fit before any memory is taken (``Checkpoint.load``
            then checks and copies nothing).
    """
    module.to(dtype)
    read()
    places = _places(module)
    wanted = {name: tensor for name, (tensor, _) in places.items()}

    def bind(tensors: Mapping[str, Tensor]) -> None:
        for name, (original, owners) in places.items():
            tensor = tensors[name]
            if isinstance(original, nn.Parameter) and not isinstance(tensor, nn.Parameter):
                tensor = nn.Parameter(tensor, requires_grad=False)
            for owner, attribute in owners:
                setattr(owner, attribute, tensor)

    def fill(tensors: Mapping[str, Tensor]) -> None:
        bind(tensors)
        try:
            read()
        finally:
            bind(wanted)

    bind(store.obtain(wanted, device, fill, policy=policy, fingerprint=fingerprint))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; one that several modules hold appears once."""
    return {name: tensor for name, (tensor, _) in _places(module).items()}


def _places(module: nn.Module) -> dict[str, tuple[Tensor, list[tuple[nn.Module, str]]]]:
    """Each tensor by its first name, with the modules that hold it and what they call it."""
    found: dict[str, tuple[Tensor, list[tuple[nn.Module, str]]]] = {}
    first_name: dict[int, str] = {}
    for path, owner in module.named_modules():
        for attribute, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is None:
                continue
            name = first_name.setdefault(id(tensor), f"{path}.{attribute}" if path else attribute)
            found.setdefault(name, (tensor, []))[1].append((owner, attribute))
    return found
