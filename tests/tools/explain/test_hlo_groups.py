"""Groups of collectives in every spelling, against lists by hand; their mesh axes."""

import numpy as np
import pytest

from praxis_tools.explain.hlo_groups import axes_of_groups, device_groups
from praxis_tools.explain.hlo_text import Program

PROGRAM = Program("HloModule m, num_partitions=8", {}, "main", {})
SIZES = {"replica": 1, "data": 4, "mdl": 2}


@pytest.mark.parametrize(
    ("text", "groups", "axes"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]], ("mdl",)),
        ("[4,2]<=[8]", [[0, 1], [2, 3], [4, 5], [6, 7]], ("mdl",)),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]], ("data",)),
        ("mesh['data'=4,'mdl'=2] {'data'}", [[0, 2, 4, 6], [1, 3, 5, 7]], ("data",)),
        ("mesh['data'=4,'mdl'=2] {'data','mdl'}", [list(range(8))], ("data", "mdl")),
        # The outer half of the data axis: places 0 and 2, 1 and 3 of it.
        ("mesh['data'=4,'mdl'=2] {'data':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]], ("data",)),
        # The inner half.
        ("mesh['data'=4,'mdl'=2] {'data':(2)2}", [[0, 2], [1, 3], [4, 6], [5, 7]], ("data",)),
        ("{}", [list(range(8))], ("data", "mdl")),
    ],
)
def test_groups_in_every_spelling(text, groups, axes):
    actual = device_groups(f" replica_groups={text}, to_apply=%add", PROGRAM)
    assert sorted(map(sorted, actual.tolist())) == groups
    assert axes_of_groups(actual, SIZES) == axes


def test_a_permutes_pairs_are_its_groups():
    actual = device_groups(" source_target_pairs={{0,2},{2,4},{4,6},{6,0}}", PROGRAM)
    np.testing.assert_array_equal(actual, [[0, 2], [2, 4], [4, 6], [6, 0]])
    assert axes_of_groups(actual, SIZES) == ("data",)


def test_devices_that_the_mesh_does_not_have_have_no_axes():
    assert axes_of_groups(np.array([[0, 9]]), SIZES) == ()
