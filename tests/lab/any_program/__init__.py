"""Random programs over the public API, compared with an oracle in numpy."""
