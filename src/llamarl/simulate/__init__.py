"""A job rehearsed: the real controller under a virtual clock, with executors that take modelled time. No torch here."""
