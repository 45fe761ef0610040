"""Tools that reply between a model's turns: a calculator, Python in the sandbox, the user's own function or command."""
