"""tf.data yields what NumPy yields; tensorflow is imported late, or not at all."""

import itertools
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from praxis_lite.inputs import TextCorpus, numpy_data, tf_data
from tests.support.marks import needs_tensorflow

CORPUS = TextCorpus()
ROOT = pathlib.Path(__file__).parents[2]


def run_python(program):
    env = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env=env,
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"split": "train", "seed": 3, "shuffle": True},
        {"split": "heldout", "shuffle": False},
        {"split": "heldout", "shuffle": False, "stride": 101},
    ],
)
@pytest.mark.parametrize("rows", [None, slice(2, 4)])
def test_batches_are_those_of_numpy_to_the_bit(settings, rows):
    settings = {"batch_size": 6, "seq_len": 257} | settings
    pipelines = [module.TextWindows(CORPUS, **settings) for module in (tf_data, numpy_data)]
    for start in 0, 11:
        of_tf, of_numpy = (
            list(itertools.islice(p.batches(start, rows=rows), 37)) for p in pipelines
        )
        assert len(of_tf) == len(of_numpy) > 0
        for batch, expected in zip(of_tf, of_numpy, strict=True):
            assert batch.keys() == expected.keys()
            for name in expected:
                assert isinstance(batch[name], np.ndarray)
                assert batch[name].dtype == expected[name].dtype
                np.testing.assert_array_equal(batch[name], expected[name])
    assert pipelines[0].fingerprint() == pipelines[1].fingerprint()


@needs_tensorflow
@pytest.mark.slow
def test_tensorflow_is_imported_late_and_owns_no_gpu():
    done = run_python(
        "import sys\n"
        "from praxis_lite.inputs import TextCorpus, tf_data\n"
        "pipeline = tf_data.TextWindows(TextCorpus(), 'train', 2, 7, shuffle=True)\n"
        "pipeline.check(); pipeline.element_spec(); pipeline.fingerprint()\n"
        "assert 'tensorflow' not in sys.modules\n"
        "print(next(pipeline.batches())['ids'].shape)\n"
        "import tensorflow as tf\n"
        "assert not tf.config.get_visible_devices('GPU')\n"
    )
    assert done.stdout == "(2, 7)\n"


def test_without_tensorflow_numpy_makes_the_batches():
    done = run_python(
        "import sys\n"
        "sys.modules['tensorflow'] = None\n"
        "from praxis_lite.inputs import *\n"
        "corpus = TextCorpus()\n"
        "settings = dict(corpus=corpus, split='train', batch_size=2, seq_len=7, shuffle=True)\n"
        "for pipeline in (SyntheticLm(37, 2, 7), InMemory({'labels': [1, 2]}, 2, shuffle=True),\n"
        "                 TextPrompts(corpus, 'heldout', 2, 3, 5, 7)):\n"
        "    next(pipeline.batches())\n"
        "for module in (numpy_data, tf_data):\n"
        "    batches = module.TextWindows(**settings).batches(3, rows=slice(1, 2))\n"
        "    print(*(next(batches)['ids'].tolist() for _ in range(5)))\n"
    )
    expected, actual = done.stdout.splitlines()
    assert actual == expected


def test_importing_inputs_imports_no_tensorflow_and_reads_nothing():
    run_python(
        "import sys\n"
        "import praxis_lite.inputs\n"
        "assert 'jax' not in sys.modules\n"
        "from praxis_lite.inputs import *\n"
        "corpus = TextCorpus('/no/such/file')\n"
        "tf_data.TextWindows(corpus, 'train', 2, 7, shuffle=True)\n"
        "TextPrompts(corpus, 'train', 2, 3, 5, 7)\n"
        "assert 'tensorflow' not in sys.modules and 'pydoc_data.topics' not in sys.modules\n"
    )
