"""Programs on top of the library. Nothing below imports them; each can be read alone."""
