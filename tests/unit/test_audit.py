"""What the audit makes of answers: which differences are the fault of sharing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sgl_omni.runtime.audit import Answers, compare, content


def answers(alone: str, together: str | None = None, again: str | None = None) -> Answers:
    """One letter an answer; two rounds together."""
    return Answers(tuple(alone), tuple(together or 2 * alone), tuple(again or alone))


GOOD = answers("abc")


def test_equal_answers_pass() -> None:
    assert compare(GOOD, answers("abc")) == ((), ())


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (answers("abX", "abcabc", "abc"), "before the load, 1 of 3 answers differ"),
        (answers("abc", "abcXXX"), "under load, 3 of 6 answers differ"),
        (answers("abc", again="XXc"), "after the load, 2 of 3 answers differ"),
    ],
)
def test_a_difference_is_named_by_when_it_came(found: Answers, problem: str) -> None:
    (only,), _ = compare(GOOD, found)
    assert problem in only


def test_answers_that_depend_on_the_batch_are_no_fault_of_sharing() -> None:
    problems, remarks = compare(answers("abc", "abcabX"), answers("abc", "aYcYYc"))
    assert problems == ()
    assert remarks == (
        "without sharing, 1 of 6 answers under load differ from those alone",
        "with sharing, 3 of 6 do",
    )


def test_answers_that_depend_on_chance_cannot_be_compared() -> None:
    problems, _ = compare(answers("abc", again="abX"), answers("abc"))
    assert problems == ("without sharing, the same requests are not answered alike: nothing can be compared",)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(3), np.array([0, 0, -0.0])),
        (torch.zeros(3, dtype=torch.bfloat16), torch.tensor([0, 1, 0], dtype=torch.bfloat16)),
        ({"a": 1, "b": [1, {"c": np.arange(3000)}]}, {"a": 1, "b": [1, {"c": np.arange(1, 3001)}]}),
        (memoryview(b"abc"), b"abd"),
        ("\ud800", "\ud801"),
        (1, 1.0),
        (None, False),
    ],
)
def test_any_bit_counts(one: object, other: object) -> None:
    assert content(one) != content(other)
    assert content({"k": one}) == content({"k": one})
