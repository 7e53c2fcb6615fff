"""A task so small that a random model learns it in a minute: answer with characters of one class."""
