"""What a process of stages on a GPU does before they are built."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from sgl_omni.gpu.torch_setup import set_up_torch


@pytest.fixture
def zeros(monkeypatch: pytest.MonkeyPatch) -> Mock:
    made = Mock()
    monkeypatch.setattr(torch, "zeros", made)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", Mock())
    return made


def test_a_client_of_mps_opens_its_context(zeros: Mock) -> None:
    set_up_torch(0)
    assert zeros.call_args.kwargs == {"device": "cuda:0"}


def test_nobody_else_takes_memory(zeros: Mock) -> None:
    set_up_torch()
    zeros.assert_not_called()
