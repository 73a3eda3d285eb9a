"""Classes that other programs import by their dotted path. Each module imports its program."""
