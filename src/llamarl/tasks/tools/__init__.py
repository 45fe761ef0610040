"""What answers a model between its turns: a calculator, Python in the sandbox, a user's own function or command."""
