"""One table of parameters for each model family: names, shapes, and how tensor parallelism cuts them. No torch here."""
