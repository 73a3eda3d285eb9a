"""Vector clocks of streams and threads."""

from collections.abc import Mapping


class Actor:
    """A stream or a host thread.

    Attributes:
        name: unique name.
        clock: number of operations known to be finished, by actor.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: dict[str, int] = {name: 0}

    def tick(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]

    def learn(self, clock: Mapping[str, int]) -> None:
        for name, moment in clock.items():
            if moment > self.clock.get(name, 0):
                self.clock[name] = moment

    def knows(self, name: str, moment: int) -> bool:
        """True if another actor's operation finishes before everything that this actor does from
        now on."""
        return self.clock.get(name, 0) >= moment
