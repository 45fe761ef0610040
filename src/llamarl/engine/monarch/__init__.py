"""The `monarch` engine: every executor rank an actor in a process mesh of Monarch, on this machine or on many.

    main process ── Monarch (Unix sockets here, mutual TLS between hosts) ──▶ worker, one on each host
         ▲                                                                      │ starts
         └──────── reports, over Monarch ──── rank ◀── fork ── fork server ◀── stub
                                              host agent: heartbeats, and kills on request

A worker runs Monarch's own loop. What it starts as a process is a stub, for which the host's fork server, which has imported
torch, forks the real process: an executor is back in a second instead of after the import of torch.
"""
