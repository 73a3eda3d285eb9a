"""Models, layouts, stand-ins, oracles and process starters that tests share."""
