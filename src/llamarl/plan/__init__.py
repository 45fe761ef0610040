"""Predicts the cost of a job: cost terms, the theory of sync and async training, and the search for the best plan.

Nothing here imports torch, so `llamarl plan` starts at once and needs no GPU.
"""
