"""Services of the operating system and torch: host memory, transfers, threads and torch's modes."""
