from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    yield torch.device("cuda")
    torch.cuda.empty_cache()  # other processes of tests share the GPU, and torch would keep tens of GiB
