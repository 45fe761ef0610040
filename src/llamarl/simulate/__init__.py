"""A job rehearsed: the real controller under a virtual clock, with executors that take modeled time. No torch here."""
