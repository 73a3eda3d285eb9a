"""Objects that other programs ask for by their dotted path. Each imports its program."""
