"""Which rows of the thinker's prompt the talker hears. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

HEADER = 3
"""Rows that begin the assistant's turn: start, assistant, new line. The answer's first token comes after them."""
OWN_ROWS = HEADER + 6
"""Rows of the talker's prompt that follow what it heard: header, four of padding, the begin, the first token."""


def rows_of_users(prompt_ids: Sequence[int], start_id: int, user_id: int) -> list[int]:
    """Places of all users' turns, headers included."""
    places, is_user = [], False
    for i, token in enumerate(prompt_ids):
        if token == start_id:
            is_user = i + 1 < len(prompt_ids) and prompt_ids[i + 1] == user_id
        if is_user:
            places.append(i)
    return places
