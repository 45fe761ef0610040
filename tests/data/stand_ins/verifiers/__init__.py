"""Stands in for the package verifiers: speaks as its environment server does, and lies where it is told to."""
