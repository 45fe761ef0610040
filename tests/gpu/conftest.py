from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")
