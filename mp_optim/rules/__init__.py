"""Update rules over slots: the arithmetic of a step, and the state of each slot."""
