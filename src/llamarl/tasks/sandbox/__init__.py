"""The sandbox for programs that a policy wrote: no network, no files but their own, no processes left, limits on everything.

    judge ── fork ── reaper (outside) ── fork ── program: walls that it cannot take down, then a fresh interpreter

The kernel enforces the walls: Landlock, seccomp, rlimits, namespaces. They overlap, so a gap in one is covered by another.
"""
