"""Programs that test promises with random input for a given time: ``python tests/lab COMMAND``."""
