"""The record of a run on a mixture of packed texts, in microbatches, stopped and moved."""

import contextlib
import io
import shutil

import pytest

from praxis_lite.job.job_dir import JobDir
from tests.support.commands import praxis
from tests.support.job_runs import home, succeed

pytestmark = pytest.mark.slow

MIXED = '''
import fiddle as fdl

from jobzoo.experiments import TEXTS, Tiny
from praxis_lite import register
from praxis_lite.inputs import ByteTokenizer, Documents, Mixture, PackedText, TextFiles


@register
class Mixed(Tiny):
    """Two sources of packed documents, dropout, averages, and three microbatches."""

    def datasets(self):
        def packed(pattern):
            source = fdl.Config(TextFiles, f"{TEXTS}/{pattern}.txt")
            documents = fdl.Config(Documents, source, tokenizer=fdl.Config(ByteTokenizer))
            return fdl.Config(
                PackedText, documents, "train", batch_size=12, seq_len=37, shuffle=True
            )

        mixed = fdl.Config(
            Mixture, sources={"even": packed("t[0246]"), "odd": packed("t[1357]")},
            weights=[(0, {"even": 0.6, "odd": 0.4}), (5, {"even": 1, "odd": 1})], batch_size=12,
        )
        return {"train": mixed}

    def task(self):
        task = super().task()
        task.learner.gradient_accumulation_steps = 3
        task.learner.ema_decay = 0.9
        return task
'''


def digest(*argv):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        status = praxis("inputs", "digest", *argv, "--packages=jobzoo")
    return status, out.getvalue()


@pytest.mark.nightly
def test_a_mixture_of_packed_texts_in_microbatches_is_used_once_over_a_stop_and_a_move(tmp_path):
    (home() / "jobzoo/mixed.py").write_text(MIXED)
    exp, job = "--exp=jobzoo.mixed.Mixed", JobDir(tmp_path / "job")
    moved = ("--set", "mesh.ici_mesh_shape=(1, 2, 1)")
    succeed(exp, f"--job_log_dir={job.path}", "--set", "run.num_train_steps=4")
    succeed(exp, f"--job_log_dir={job.path}", *moved)
    status, out = digest(f"--job={job.path}")
    assert status == 0 and "steps 1 to 7: batches 0 to 6; relaunches: 1" in out, out
    whole = JobDir(tmp_path / "whole")
    succeed(exp, f"--job_log_dir={whole.path}", *moved)
    (line,) = [line for line in out.splitlines() if line.startswith("digest ")]
    assert line in digest(f"--job={whole.path}")[1]
    # Another weight of the mixture, or a changed text, is another stream.
    weights = 'datasets.train.weights=[(0, {"even": 0.5, "odd": 0.5})]'
    assert digest(f"--job={job.path}", "--set", weights)[0] == 1
    texts = tmp_path / "texts"
    shutil.copytree(home() / "texts", texts)
    (texts / "t3.txt").write_text((texts / "t3.txt").read_text().replace("plus", "less", 5))
    patterns = [
        f"datasets.train.sources.{name}.documents.source.files={texts}/t[{digits}].txt"
        for name, digits in (("even", "0246"), ("odd", "1357"))
    ]
    status, out = digest(f"--job={job.path}", "--set", *patterns)
    assert status == 1 and "have changed since they were fed" in out
