"""Draws the plots of all claims again, from the figures in results/*.json; nothing is measured.

python benchmarks/claims/redraw.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results"
    for file in sorted(folder.glob("*.json")):
        figures = json.loads(file.read_text())
        claim = import_module(Path(figures["command"].split()[1]).stem)
        file.with_suffix(".svg").write_text(claim.picture(figures))


if __name__ == "__main__":
    main()
