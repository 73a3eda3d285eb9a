"""Classes that other training programs import by their dotted path. Each module imports the
training program that it is for."""
