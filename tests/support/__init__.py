"""What tests share: models, layouts, stand-ins, oracles, and the processes that they start."""
