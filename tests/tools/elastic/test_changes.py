"""The record of an elastic job: which steps a regrouping cost."""

import pytest

from praxis_tools.elastic.generation_log import last_completed_step
from praxis_tools.elastic.members import Generation, Member


def generation(number, members, last_step):
    return Generation(
        number=number,
        kind="died",
        who=(),
        why="",
        members=members,
        incarnations=("a",) * len(members),
        coordinator="h:1",
        event=0.0,
        noticed=0.0,
        agreed=0.0,
        last_step=last_step,
    )


def member(number, of_generation, made=None):
    worker = {} if made is None else {"made": made}
    return Member(member=number, incarnation="a", generation=of_generation, worker=worker)


@pytest.mark.parametrize(
    "last, members, expected",
    [
        # Its steps count, though members that are gone had made more before.
        (generation(15, (0,), 119), [member(0, 15, 114), member(1, 14, 119)], 114),
        (generation(15, (0, 2), 119), [member(0, 15, 121), member(2, 15, 122)], 122),
        # It made none: what was made before it may still be lost.
        (generation(15, (0,), 119), [member(0, 15), member(1, 14, 119)], 119),
        # Its members have gone on to nothing, or are another's.
        (generation(15, (0, 1), 119), [member(0, 14, 118)], 119),
        (None, [member(0, 0, 7), member(1, 0)], 7),
        (None, [], 0),
    ],
)
def test_the_last_step_is_of_the_generation_that_ran_last(last, members, expected):
    assert last_completed_step(last, {item.member: item for item in members}) == expected
