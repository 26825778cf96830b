"""`praxis inputs digest` refuses what it cannot read; docs/data.md's line runs."""

from tests.support.commands import praxis
from tests.support.every_case import assert_each

REFUSED = {
    "lm.PyDoc": "Did you mean",
    "lm.Synthetic --dataset=trian": "Did you mean train?",
    "lm.Synthetic --batches=0": "at least 1",
    "lm.Synthetic --processes=0": "at least 1",
    "lm.Synthetic --start=-1": "at least 0",
    "lm.Synthetic --dataset=heldout --batches=999": "3 batches",
    "lm.Synthetic --procesess=2": "Did you mean --processes?",
}


def test_a_wrong_argument_is_refused_by_name(capsys):
    def check(arguments):
        assert praxis("inputs", "digest", *arguments.split()) == 2
        assert REFUSED[arguments] in " ".join(capsys.readouterr().err.split())

    assert_each(check, zip(REFUSED, REFUSED, strict=True))
