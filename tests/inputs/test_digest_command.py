"""`python -m praxis_lite.inputs digest` refuses what it cannot read; docs/data.md's line runs."""

from praxis_lite.inputs import __main__ as command
from tests.support.every_case import assert_each

REFUSED = {
    "--exp=lm.PyDoc": "Did you mean",
    "--exp=lm.Synthetic --dataset=trian": "Did you mean train?",
    "--exp=lm.Synthetic --batches=0": "at least 1",
    "--exp=lm.Synthetic --processes=0": "at least 1",
    "--exp=lm.Synthetic --start=-1": "at least 0",
    "--exp=lm.Synthetic --dataset=heldout --batches=999": "3 batches",
    "--exp=lm.Synthetic --procesess=2": "Did you mean --processes?",
}


def test_a_wrong_argument_is_refused_by_name(capsys):
    def check(arguments):
        assert command.main(["digest", *arguments.split()]) == 2
        assert REFUSED[arguments] in capsys.readouterr().err

    assert_each(check, zip(REFUSED, REFUSED, strict=True))
