"""Models, layouts, stand-ins, oracles and processes for tests."""
