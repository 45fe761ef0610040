"""Agents of the user: what they are given, how they run in worker processes, and what they give back."""
