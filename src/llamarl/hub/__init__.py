"""Models and data by their names on the Hugging Face Hub: the only room that talks to it."""
