"""Names of XLA's options: unknown ones are refused with today's name, or with close ones."""

import importlib.metadata
import os
import subprocess
import sys

import jax
import pytest

from praxis_lite import ConfigError
from praxis_lite.core.sharding.devices.xla_options import (
    REMOVED_OPTIONS,
    check_environment,
    option_names,
    unknown_option_message,
)
from tests.support.on_tpu import needs_libtpu

SINCE_0_12 = jax.__version_info__ >= (0, 12)


def takes(name):
    """Returns True if XLA itself knows an option; the value may be wrong."""
    try:
        jax.jit(lambda: 0, compiler_options={name: "no value of any type"}).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        return "No such compile option" not in str(error)
    return True


def test_todays_names_of_former_options_are_options():
    """What fails here was renamed once more: xla.proto of openxla/xla tells."""
    names = {name for _, present in REMOVED_OPTIONS.values() for name in present}
    if not SINCE_0_12:  # jax 0.10 has the former names.
        names -= {name for name in names if name.startswith("xla_gpu_pipeline_")}
    assert [name for name in names if not takes(name)] == []


def test_former_options_are_none_any_more():
    names = [
        name
        for name in REMOVED_OPTIONS
        if SINCE_0_12 or not name.startswith("xla_gpu_enable_pipelined_")
    ]
    assert [name for name in names if takes(name)] == []


def test_renamed_and_close_and_former_names_are_said():
    message = unknown_option_message("xla_gpu_enable_pipelined_all_gather", "jaxlib")
    assert f"XLA in jaxlib {importlib.metadata.version('jaxlib')}" in message
    assert "It is now xla_gpu_pipeline_all_gather, with the values COLLECTIVE_PIPELINING" in message
    message = unknown_option_message("xla_cpu_fast_math", "jaxlib")
    assert "Did you mean xla_cpu_enable_fast_math" in message
    message = unknown_option_message(
        "xla_cpu_enable_fast_mth", "jaxlib", lambda name: "cpu" not in name
    )
    assert "Did you mean xla_enable_fast_math" in message
    assert "xla_cpu_enable_fast_math" not in message
    message = unknown_option_message("xla_gpu_simplify_all_fp_conversions", "jaxlib")
    assert "removed from XLA" in message
    message = unknown_option_message("xla_nonesuch_of_any_kind", "jaxlib")
    assert "removed" not in message
    assert "Did you mean" not in message


def test_every_option_of_the_cpu_is_among_the_names_in_its_library():
    names = option_names("jaxlib")
    assert {"xla_cpu_enable_fast_math", "xla_dump_to", "xla_backend_optimization_level"} <= names
    assert "xla_gpu_graph_level" not in names and len(names) > 300
    assert option_names("package_that_is_not_there") == frozenset()


@needs_libtpu
def test_options_of_tpus_are_among_the_names_in_libtpu(monkeypatch):
    assert "xla_tpu_scoped_vmem_limit_kib" in option_names("libtpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=98304")
    check_environment()
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit=98304")
    with pytest.raises(ConfigError, match="LIBTPU_INIT_ARGS.*mean xla_tpu_scoped_vmem_limit_kib"):
        check_environment()


KNOWN = "--xla_dump_to=/no/where --xla_cpu_enable_fast_math=true"
WRONG = "--xla_gpu_graph_level=0 --xla_cpu_fast_math"


def test_wrong_options_in_the_environment_are_refused(monkeypatch):
    check_environment()  # Those of tests/conftest.py.
    monkeypatch.setenv("XLA_FLAGS", KNOWN)
    check_environment()
    monkeypatch.setenv("XLA_FLAGS", f"{KNOWN} {WRONG}")
    with pytest.raises(ConfigError) as refused:
        check_environment()
    assert "Remove xla_gpu_graph_level, xla_cpu_fast_math from XLA_FLAGS" in str(refused.value)
    assert "xla_gpu_enable_command_buffer" in str(refused.value)


@pytest.mark.slow
def test_xla_itself_ends_a_process_for_those_options_alone():
    for flags, survives in ((KNOWN, True), (WRONG, False)):
        run = subprocess.run(
            [sys.executable, "-c", "import jax; jax.devices()"],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        )
        assert (run.returncode == 0) == survives
    for name in ("xla_gpu_graph_level", "xla_cpu_fast_math"):
        assert f"--{name}" in run.stderr.partition("Unknown flags in XLA_FLAGS: ")[2]
