"""Lines of a file, read while they are added."""

import math

from praxis_lite.run.trainer.metrics.followed_lines import FollowedLines
from praxis_lite.run.trainer.metrics.json_lines import JsonLinesWriter


def steps(lines, last, wants=lambda step: True):
    return [line["step"] for line in lines.up_to(last, wants)]


def test_lines_come_once_up_to_the_announced_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = FollowedLines(path)
    assert steps(lines, 3) == []
    with JsonLinesWriter(path, None) as writer:
        for step in range(1, 8):
            writer.write({"step": step, "loss": math.nan if step == 2 else step / 7})
        (first, second) = lines.up_to(2, lambda step: True)
        assert first == {"step": 1, "loss": 1 / 7} and math.isnan(second["loss"])
        assert steps(lines, 2) == []
        assert steps(lines, 7, lambda step: step % 2 == 0) == [4, 6]
        writer.write({"step": 8})
        assert steps(lines, 8) == [8]
        with path.open("a") as file:
            file.write('{"step": 9, "lo')
        assert steps(lines, 9) == []
    lines.restart()
    with JsonLinesWriter(path, 3) as writer:
        assert steps(lines, 3) == [1, 2, 3]
        writer.write({"step": 4})
        assert steps(lines, 9) == [4]
    lines.restart()
