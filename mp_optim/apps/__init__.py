"""Programs on top of the library. No module of the library imports a program, and each program
can be read alone."""
