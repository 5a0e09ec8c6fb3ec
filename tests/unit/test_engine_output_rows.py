"""Output rows are a list of rows to those who ask for lists, and an array to those who ask for one."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_omni.engine.output_rows import OutputRows

COLUMNS = 3


@pytest.mark.parametrize("room", [0, 100, 10_000])
@pytest.mark.parametrize("seed", range(8))
def test_rows_are_those_of_a_list_however_they_came(seed: int, room: int) -> None:
    random = np.random.default_rng(seed)
    rows, expected = OutputRows(room=room), list[list[int]]()
    for _ in range(60):
        new = random.integers(0, 1 << 31, (int(random.integers(1, 30)), COLUMNS))
        if random.random() < 0.5:
            rows.append_block(new)
            expected += new.tolist()
        else:
            for row in new[:3].tolist():
                rows.append(row)
                expected.append(row)
        start, stop = sorted(random.integers(0, len(expected) + 2, 2).tolist())
        assert len(rows) == len(expected)
        assert rows[len(expected) - 1] == rows[-1] == expected[-1]
        assert rows[start:stop] == expected[start:stop]
        if random.random() < 0.3:
            assert rows.array(start, stop).tolist() == expected[start:stop]
    assert list(rows) == list(rows[:]) == expected
    assert rows[::-2] == expected[::-2]
    assert rows.array(5).tolist() == expected[5:]


def test_a_block_is_copied_and_an_array_is_not() -> None:
    block = np.ones((2, COLUMNS), np.int64)
    rows = OutputRows()
    rows.append_block(block)
    block[:] = 7
    assert rows[:] == [[1] * COLUMNS] * 2
    assert np.shares_memory(rows.array(0, 1), rows.array(0, 2))


def test_no_rows_are_no_rows() -> None:
    rows = OutputRows()
    assert (len(rows), rows[:], list(rows), rows.array().tolist()) == (0, [], [], [])
    with pytest.raises(IndexError):
        rows[0]
    assert OutputRows([[1, 2]]).array(1).shape == (0, 2)
