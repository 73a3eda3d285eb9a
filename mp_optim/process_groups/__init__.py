"""Process groups by purpose, their collectives, and errors that name missing ranks."""
