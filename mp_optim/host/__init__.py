"""The process that the stack runs in: host memory, transfers, threads, torch modes."""
