"""examples/minimal.py runs, learns, and is as short as the README says."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
MINIMAL = ROOT / "examples/minimal.py"


def test_it_prints_what_is_split_how_and_learns_as_one_device_does(capsys):
    runpy.run_path(str(MINIMAL), run_name="__main__")
    out = capsys.readouterr().out
    assert re.search(r"blocks/0/up +\(13, 37\) +\(16, 38\)  data, mdl +304 of +1924 bytes", out)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", out)]
    assert losses[-1] < losses[0] / 20
    assert "one device: losses differ by at most" in out


def test_it_is_short_and_has_neither_experiment_nor_trainer():
    source = MINIMAL.read_text(encoding="utf-8")
    assert source.count("\n") <= 150
    imported = re.findall(r"^(?:from|import) .*$", source, re.MULTILINE)
    assert not re.search("Experiment|trainer|fiddle", "\n".join(imported))
    assert "examples/minimal.py" in (ROOT / "README.md").read_text(encoding="utf-8")
