"""A job of every release can still be evaluated, decoded and resumed."""

import json

import pytest

from tests.releases.releases import EXPECTED, FOLDER, unpacked

FOLDERS = sorted(path.parent for path in FOLDER.glob(f"*/{EXPECTED}"))


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def release(request, tmp_path, monkeypatch):
    """Returns the stored job of a release, and the results that the release recorded."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.chdir(tmp_path)
    expected = json.loads((request.param / EXPECTED).read_text(encoding="utf-8"))
    return unpacked(request.param, tmp_path), expected


@pytest.mark.slow
def test_its_checkpoint_is_evaluated_and_decoded(release):
    job, expected = release
    assert job.evaluate() == pytest.approx(expected["evaluate"], rel=1e-5)
    assert job.decode() == expected["decode"]


@pytest.mark.slow
def test_it_resumes_with_the_recorded_losses(release):
    job, expected = release
    losses, norms = job.resume()
    assert losses == pytest.approx(expected["losses"], rel=1e-5)
    assert norms == pytest.approx(expected["norms"], rel=1e-4)
