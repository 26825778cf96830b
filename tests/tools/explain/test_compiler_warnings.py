"""XLA's warnings of full copies, made by a real program and read in words."""

import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from praxis_tools.explain.compiler_warnings import explained_warnings


def test_a_full_copy_is_said_once_with_its_layer_and_what_to_change(mesh_of, capfd):
    mesh = mesh_of(2, 2, 2)
    replica, data, mdl = mesh.axis_names

    def program(x):
        whole, other = P((replica, data, mdl), None), P(data, replica)
        with jax.named_scope("encoder/ffn"):
            # A program of this process only: one from the compilation cache has no warnings.
            x = jax.lax.with_sharding_constraint(x * os.getpid(), NamedSharding(mesh, whole))
            return jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, other))

    notes = []
    with explained_warnings(notes.append):
        os.write(2, b"of somebody else\n")
        for num_rows in (16, 32):
            x = jax.ShapeDtypeStruct((num_rows, 24), jnp.float32)
            jax.jit(program).lower(x).compile()
    os.write(2, b"and after it\n")
    assert capfd.readouterr().err == "of somebody else\nand after it\n"
    (note,) = notes
    assert note.startswith("encoder/ffn: to reshard an array")
    # A split as XLA writes it: of jax 0.10, and of 0.12.
    assert "(from {devices=[8,1]<=[8]}" in note or "[{'replica', 'data', 'mdl'}, {}]} to" in note
    assert "inputs_split_mapping=" in note


@pytest.mark.slow
def test_what_is_said_before_an_abort_is_passed_on_and_a_child_that_lives_on_holds_nothing_up():
    program = """
import os, subprocess, sys
from praxis_tools.explain.compiler_warnings import explained_warnings
with explained_warnings(print):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"], stdout=2)
print("went on", flush=True)
child.kill()
with explained_warnings(print):
    os.write(2, b"the last words")
    os.abort()
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert time.monotonic() - began < 15
    assert (done.returncode, done.stdout, done.stderr) == (-6, "went on\n", "the last words")
