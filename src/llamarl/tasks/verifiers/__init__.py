"""Environments of the package verifiers, which stay in a process and a virtual environment of their own."""
