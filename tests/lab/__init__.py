"""Machines that prove promises for as long as they are given: ``python tests/lab COMMAND``.

Tests run a little of each; docs/lab.md says what each proves and how long it takes.
"""
