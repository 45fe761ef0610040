"""The `local` engine: every executor rank a process of its own on this machine, over inherited socket pairs.

    main process  ── control socket ──▶  fork server (has imported torch, forks on request)
         ▲                                  │ fork
         └────────── one socket pair ───────┴──▶  executor rank

Nothing listens on any address; the daemon of `mps.py` has a Unix socket. A child dies with the fork server, and the
fork server with the main process.
"""
