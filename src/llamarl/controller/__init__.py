"""The state machine that drives a job: pure, so that one object serves training, simulation and chaos tests.

Read in this order: line.py (roles and channels), events.py (what comes in and goes out), controller.py (the rules).
Standard library, msgspec and the bottom layer only: no clock, no socket, no torch, no randomness.
"""
