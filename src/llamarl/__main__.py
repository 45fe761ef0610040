"""`python -m llamarl` is `llamarl`."""

from llamarl.cli import main

if __name__ == "__main__":
    main()
