"""The programs of docs/upstream, which XLA computes wrong: canaries, and detours that are right.

Each is tried with both partitioners, on the installed jax. A canary fails on the day that XLA is
mended: then the report, and what xla_errors.py does for it once no supported jax needs it, can go.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from praxis_lite.core.xla_workarounds.xla_errors import without_xla_errors
from tests.support.marks import every

FOLDER = Path(__file__).parents[4] / "docs/upstream"
PROGRAMS = sorted(path.stem for path in FOLDER.glob("*.py"))
# The first jax of the tested ones in which it is right.
MENDED_SINCE = {"windows": (0, 11), "tracer_sharding": (0, 12)}
WITHOUT_A_DETOUR = {"matmul_rows", "sum_over_one_device", "tracer_sharding"}


def is_right(name, jit=jax.jit):
    """Returns True if a program compiles, and computes what is expected of it."""
    try:
        expected, actual = runpy.run_path(str(FOLDER / f"{name}.py"))["results"](jit)
    except jax.errors.JaxRuntimeError as error:
        assert "INTERNAL" in str(error)
        return False
    return np.allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_canary_xla_computes_it_wrong(name, partitioner):
    is_mended = name in MENDED_SINCE and jax.__version_info__ >= MENDED_SINCE[name]
    assert is_right(name) == is_mended, f"docs/upstream/{name}.md"


@pytest.mark.parametrize("name", every(4, sorted({*PROGRAMS} - WITHOUT_A_DETOUR)))
def test_the_detour_is_right(name, partitioner):
    assert is_right(name, lambda f: jax.jit(without_xla_errors(f)))


def test_each_program_has_a_report_in_the_index():
    index = (FOLDER.parent / "upstream.md").read_text()
    assert {path.stem for path in FOLDER.glob("*.md")} == {*PROGRAMS}
    for name in PROGRAMS:
        assert f"(upstream/{name}.md)" in index and f"(upstream/{name}.py)" in index, name
        # No name of ours is in a program that is sent.
        assert "praxis_lite" not in (FOLDER / f"{name}.py").read_text()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "scatter" else pytest.mark.nightly)
        for name in PROGRAMS
    ],
)
def test_a_program_alone_prints_what_is_expected_and_computed(name):
    run = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
    )
    if name == "sum_over_one_device" and run.returncode:
        assert "Cross-partition allreduce must be in (partial) manual" in run.stderr
    else:
        assert run.returncode == 0 and f"jax {jax.__version__}: expected, actual" in run.stdout


def test_a_product_that_is_permuted_is_not_mended_where_it_is_traced():
    """A job mends it: tests/core/xla_workarounds/test_patched_matmuls.py."""
    assert not is_right("matmul_rows", lambda f: jax.jit(without_xla_errors(f)))
