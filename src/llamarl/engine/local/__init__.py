"""The `local` engine: every executor rank a process of its own on this machine, over inherited socket pairs.

    main process  ── control socket ──▶  nursery (has imported torch, forks on request)
         ▲                                  │ fork
         └────────── one socket pair ───────┴──▶  executor rank

Nothing listens anywhere. A child dies with the nursery, the nursery with the main process.
"""
