"""Builds single ranks of large worlds on fake tensors, from the code that trains and generates, and counts their memory."""
