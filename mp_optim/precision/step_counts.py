"""How steps are counted, and what becomes of the counts of a step that is skipped.

A skipped step leaves no trace but in counts of skips. The counts, and who writes them:

``steps`` and ``skipped_steps`` of a stack, and the latter by cause: :class:`StepCounts`, here. Each
part of a composite has its own; ``metrics`` shows the first part's.

A slot's ``step``, from which bias corrections and random numbers are made: ``GroupState.count``,
which ``RuleOptimizer`` (``update/rule.py``) alone calls.

- *The host decides*: ``WrappedGrads.apply`` (``precision/wrapped_grads.py``) does not hand a
  skipped step down, so nothing is counted.
- *The device decides*: ``RuleOptimizer.step_slots`` counts the step as taken, and
  ``RuleOptimizer.settle`` takes it back before a count is read again, if ``DeviceVerdict.settle``
  says that it was skipped.
- *CUDA graph*: the rehearsal before a replay goes through ``step_slots`` and counts like this too.
  It is taken back if the device skipped the step, or if nothing was replayed: ``_Attempt`` in
  ``precision/graph_step.py``. The graph itself counts nothing.
- *Speculation*: what is stepped during backward is not counted. ``SpeculativeHostStepper._publish``
  (``placement/speculative_step.py``) calls ``RuleOptimizer.count`` as it swaps the buffers; a
  skipped step is never published. It never meets a verdict on the device: with a slot on the host
  ``HybridDeviceOptimizer.verdict_device`` is None, and the host decides.

Besides: loss scale, growth and hysteresis are the grad scaler's, for which a step that was skipped
for a threshold is clean. Skips in a row are the ``StandstillWatch``'s, outcomes of predictions
``SpeculativeHostStepper``'s, captures and replays, skipped or not, ``GraphedStep``'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from mp_optim.precision.device_verdict import DeviceVerdict
from mp_optim.precision.verdict import Verdict


class StepCounts:
    """Steps of one optimizer, and those of them that were skipped.

    Args:
        refuse: raises what a step ends in on which ranks disagree.

    Attributes:
        steps: all of them. skipped: those of them, by cause, that the host knows to be skipped.
    """

    def __init__(self, refuse: Callable[[], object]) -> None:
        self._refuse = refuse
        self._last: Verdict | DeviceVerdict = Verdict()
        self.steps = 0
        self.skipped = Counter(not_finite=0, over_threshold=0, spike=0)

    def record(self, verdict: Verdict | DeviceVerdict) -> None:
        """Take a verdict as the last one, after the one before it is settled, and count its step;
        whether it was skipped, as soon as the host knows."""
        self.settle()
        self._last = verdict
        self.steps += 1
        verdict.when_settled(self._see)

    def _see(self, verdict: Verdict) -> None:
        self.skipped[verdict.cause] += verdict.skip

    def settle(self) -> Verdict:
        """The last verdict, and its step in the counts; waits for the device, once.

        Raises:
            ValueError: the ranks disagreed, saying about what; nothing was stepped.
        """
        if isinstance(self._last, DeviceVerdict):
            self._last = self._last.settle()
            if self._last.disagrees:
                self._refuse()
        return self._last

    def metrics(self) -> dict[str, float]:
        """The counts by name."""
        causes = {f"skipped_steps/{name}": n for name, n in self.skipped.items()}
        skipped = sum(self.skipped.values())
        return {"steps": self.steps, "skipped_steps": skipped, **causes}
