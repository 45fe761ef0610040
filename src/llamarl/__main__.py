"""`llamarl` and `python -m llamarl`: the command line, and what Ctrl-C says while it is still being imported."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from llamarl.cli import main as run
    except KeyboardInterrupt:
        print("llamarl: interrupted", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
