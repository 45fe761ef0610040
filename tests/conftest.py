"""One thread in the process that runs the tests: some of them fork, and a pool of threads does not survive that."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
