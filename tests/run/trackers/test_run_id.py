"""The run's id, and the positions of trackers, in files that may be damaged."""

import json
import os

import pytest

from praxis_lite.run.trackers.run_id import Position, run_id


def test_the_id_is_made_once(tmp_path):
    notes = []
    first = run_id(tmp_path / "trackers", notes.append)
    assert len(first) == 32 and int(first, 16)
    assert run_id(tmp_path / "trackers", notes.append) == first
    assert run_id(tmp_path / "other", notes.append) != first
    assert notes == [] and os.listdir(tmp_path / "trackers") == ["run_id.json"]


@pytest.mark.parametrize("content", ['{"id": "../../x"}', '{"id": 7}', "[]", "{", "\xff", ""])
def test_a_damaged_id_is_noted_and_made_anew(tmp_path, content):
    (tmp_path / "run_id.json").write_text(content)
    notes = []
    new = run_id(tmp_path, notes.append)
    assert json.loads((tmp_path / "run_id.json").read_text()) == {"id": new}
    assert notes and all(str(tmp_path / "run_id.json") in note for note in notes)


def test_a_position_is_kept(tmp_path):
    path, notes = tmp_path / "wandb.json", []
    position = Position(path, notes.append)
    assert (position.step, position.evaluation) == (0, 0)
    for position.step, position.evaluation in ((123456, 7), (9, 5)):
        position.save()
    position.close()
    again = Position(path, notes.append)
    assert (again.step, again.evaluation) == (9, 5) and notes == []
    again.close()


@pytest.mark.parametrize("content", ['{"step": -1, "evaluation": "x"}', "[1]", "{", ""])
def test_a_damaged_position_begins_anew(tmp_path, content):
    (tmp_path / "wandb.json").write_text(content)
    position = Position(tmp_path / "wandb.json", lambda note: None)
    assert (position.step, position.evaluation) == (0, 0)
    position.close()


def test_a_launch_that_was_killed_before_its_first_record_leaves_nothing_to_note(tmp_path):
    notes = []
    Position(tmp_path / "wandb.json", notes.append).close()
    Position(tmp_path / "wandb.json", notes.append).close()
    assert notes == []


def test_a_pipe_in_the_place_of_a_position_is_no_file_to_write(tmp_path):
    path = tmp_path / "wandb.json"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(OSError, match="no plain file"):
            Position(path, lambda note: None)
    finally:
        os.close(reader)
