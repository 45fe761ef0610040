"""What a job will cost, before it is paid for: cost terms, the theory of sync and async, and the search for the best plan.

No torch here: `llamarl plan` starts at once and needs no GPU.
"""
