"""Where programs of a policy run: no network, no files but their own, no process left, bounded in everything.

    judge ── fork ── reaper (outside) ── fork ── program: behind walls that it cannot take down, then a fresh interpreter

The kernel keeps the walls: Landlock, seccomp, rlimits, namespaces. What one of them lets through another one stops.
"""
