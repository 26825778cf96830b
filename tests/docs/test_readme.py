"""README's program prints what README shows."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
PROGRAM = r"begin mlp -->\n```python\n(.*?)```\n<!-- end mlp -->\n\n((?:    [^\n]*\n)+)"


def test_the_program_prints_the_output_shown(capsys):
    block, output = re.search(PROGRAM, README, re.DOTALL).groups()
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    expected = [line.strip() for line in output.splitlines()]
    actual = capsys.readouterr().out.splitlines()
    # Rounding depends on the CPU, and 300 steps magnify it.
    losses = [re.fullmatch(r"step (\d+): loss ([\d.]+)", line) for line in expected]
    for line, loss in zip(actual, losses, strict=False):
        if loss is None:
            break
        number, value = re.fullmatch(r"step (\d+): loss ([\d.]+)", line).groups()
        assert number == loss[1] and abs(float(value) - float(loss[2])) <= 2e-3
    num_losses = sum(loss is not None for loss in losses)
    assert num_losses == 4 and actual[num_losses:] == expected[num_losses:]
