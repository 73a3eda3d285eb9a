"""Process groups: collectives that all ranks call alike, and errors that name missing ranks."""
