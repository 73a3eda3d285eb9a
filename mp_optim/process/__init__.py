"""The process the stack runs in: its memory, torch's modes, threads, warnings."""
