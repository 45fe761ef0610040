"""Where the bytes of a model's parameters lie, on which rank, and which of them must go where. No torch here."""
