"""How parameters are laid out over ranks, and which bytes go from which rank to which. No torch here."""
