"""Benchmarks of the parts on this machine: `llamarl bench`."""
