"""How torch is set up in a process of stages that uses a GPU."""

from __future__ import annotations

import torch


def set_up_torch(client: int | None = None) -> None:
    """Turns off cuDNN's attention: it plans anew for every shape, in every thread that calls it, for 0.1 s and more.

    Batches of pieces, recordings or prompts hardly ever have a shape that was seen before. What torch takes in its
    place, its own kernels of the same kind, needs no plan.

    ``client``: the GPU of an MPS client, as its process numbers it. Its context is opened here: proof that it is
    attached is asked for before the first request, and a stage may take no memory there until then.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)
    if client is not None:
        torch.zeros(1, device=f"cuda:{client}")
