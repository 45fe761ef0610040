"""The `monarch` engine: every executor rank an actor in a process mesh of Monarch, on this machine or on many.

    main process ── Monarch (Unix sockets here, mutual TLS between hosts) ──▶ worker, one on each host
         ▲                                                                      │ starts
         └──────── reports, over Monarch ──────── rank ◀── fork ── nursery ◀── stub
                                                  keeper: beats, and kills on request

A worker is Monarch's own host agent. What it starts as a process is a stub, in whose name the host's nursery, which has
imported torch, forks the real one: an executor is back in a second instead of after the import of torch.
"""
