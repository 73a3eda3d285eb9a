"""Stand-ins for GPU libraries: their formulas in numpy, and no check that they lack."""
