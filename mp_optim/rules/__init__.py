"""Update rules over slots: which arithmetic a step does, and on which state."""
