"""The counts of ``tools/check_prose.py`` and the ceilings of this repository."""

from pathlib import Path

import check_prose
import pytest
from check_prose import Passage, habits_of


def test_check_prose_passes_for_all_texts_of_the_repository():
    assert check_prose.exceeded(check_prose.rates(check_prose.passages())) == []


@pytest.mark.parametrize(
    ("text", "habit"),
    [
        ("Return the slots of what steps.", "what, who as a noun"),
        ("Written again by whoever reads it.", "what, who as a noun"),
        ("Nobody reads the file.", "somebody, nobody"),
        ("Stored beside the parameter.", "beside, anew, but for"),
        ("A tensor whose memory moved.", "of which, whose"),
        ("The state rests on the disk.", "lies, rests, travels"),
        ("The optimizer is told the device.", "told, said, asked"),
        ("There is one file a rank.", "there is"),
        ("Of a parameter the upper half.", "starts with What, Of, ..."),
        ("Take it.\n\nArgs:\n    one, two: numbers.", "two arguments on a line"),
        ("Copy " + "a word " * 30, "long sentence"),
    ],
)
def test_check_prose_counts_a_habit_once_when_a_text_has_the_habit(text, habit):
    assert habits_of(Passage("docstrings", Path("a.py"), 1, text))[habit] == 1


@pytest.mark.parametrize(
    "text",
    [
        "Return the executor that steps this slot.",
        "Print what to do. Users who load a checkpoint pass its path.",
        "True if the tensor is contiguous.\n\nArgs:\n    one: elements.\n    two: bytes.",
    ],
)
def test_check_prose_counts_no_habit_when_a_text_is_plain(text):
    assert not habits_of(Passage("docstrings", Path("a.py"), 1, text))
