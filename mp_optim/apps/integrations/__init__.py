"""Classes that other programs import by their dotted path. Each module imports the program that
it is for."""
