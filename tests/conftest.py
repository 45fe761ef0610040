"""What holds for every test: one thread for torch, no hub, and no time limit on a single Hypothesis example."""

from __future__ import annotations

import os

from hypothesis import settings

# Before torch is imported by anybody: tiny products are slower on several threads, and waiting threads spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# No test may reach the Hugging Face Hub or find what a user has fetched from it; some bring a hub of their own.
os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
os.environ["HF_HOME"] = "/nonexistent/hub"
os.environ["HF_HUB_DISABLE_XET"] = "1"  # a transport of its own, for the real hub
for _name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ.pop(_name, None)

settings.register_profile("llamarl", deadline=None)  # shared machines pause at will
settings.load_profile("llamarl")
