"""Programs that tests run in other processes; ``support.launch`` starts them."""
