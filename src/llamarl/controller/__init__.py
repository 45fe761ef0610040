"""The state machine that drives a job. It is pure, so one object serves training, simulation and chaos tests.

Read in this order: line.py (roles and channels), events.py (input and output), controller.py (the rules).
Standard library, msgspec and the bottom layer only: no clock, no socket, no torch, no randomness.
"""
