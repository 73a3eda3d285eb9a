"""The random numbers that a case is drawn with."""

from __future__ import annotations

import random


class Chance(random.Random):
    """Draws of one seed, in one order."""

    def often(self, share: float) -> bool:
        """Whether something that happens in this share of the cases does."""
        return self.random() < share
