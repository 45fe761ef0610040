"""Benchmarks of the parts, on whatever machine this is: `llamarl bench`."""
