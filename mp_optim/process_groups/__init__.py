"""Process groups: collectives that all ranks agree on, and errors that name missing ranks."""
