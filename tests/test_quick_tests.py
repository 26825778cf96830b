"""What `make test` leaves to `make test-all` has a quick test that stands for it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from praxis_lite import decode, layers, optimizers

TESTS = Path(__file__).parent
SLOW = "pytest.mark.slow"
NOT_QUICK = {SLOW, "pytest.mark.nightly"}
NOT_QUICK_FILES = {f"pytestmark = {mark}" for mark in NOT_QUICK}

STAND_FOR = {
    "every layer on an uneven mesh": (
        "layers/test_layers_on_meshes.py::test_of_uneven_sizes_it_equals_one_device"
    ),
    "every optimizer of Pax": "optimizers/test_pax_optimizer_options.py::test_five_steps_equal_pax",
    "every decoder on a mesh": (
        "decode/test_loop.py"
        "::test_sharded_decoding_equals_unsharded_with_heads_and_rows_that_do_not_divide"
    ),
    "the first program of the docs": (
        "docs/test_readme.py::test_the_program_prints_the_output_shown"
    ),
    "a mesh of two axes that divide nothing": (
        "core/partitioner/test_partitioner.py::test_losses_over_20_steps_are_those_of_one_device"
    ),
    "a mesh of three axes": "core/sharding/test_uneven_reference.py::test_a_run_of_the_reference",
    "pipeline stages on a mesh": (
        "layers/stacking/test_pipelines.py::test_on_a_mesh_it_gives_the_same"
    ),
    "experts on a mesh": "layers/moe/test_sharded_experts.py::test_sharded_equals_unsharded",
    "every way to say how weights are split": (
        "core/sharding/test_five_ways.py::test_each_way_has_the_same_losses"
    ),
    "the partitioner by shard_map": (
        "core/collectives/test_explicit_collectives.py::test_the_notebooks_losses_and_accuracies"
    ),
    "gradients by shard_map": (
        "core/collectives/test_shard_map_layers.py"
        "::test_gradients_on_a_devices_rows_add_up_to_those_of_all_rows"
    ),
    "an experiment's gradients": (
        "core/partitioner/test_experiment_gradients.py"
        "::test_the_gradient_of_each_weight_is_that_on_one_device"
    ),
    "a resume": "trainer/test_resume.py::test_the_job_carries_on_all_that_a_step_can_carry_on",
    "a signal": "job/test_stopping.py::test_a_signal_is_answered_and_the_running_step_ends",
    "a pair of processes": (
        "job/test_processes.py::test_a_process_feeds_all_rows_that_its_devices_hold"
    ),
    "a fault on disk": (
        "checkpoints/test_damage.py::test_damage_is_told_in_a_line_and_the_step_before_is_used"
    ),
}


def quick_parts(path: Path) -> Iterator[ast.stmt]:
    """Yields the statements of a test file, without tests of which every case is slow."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node) in NOT_QUICK_FILES:
            return
        decorators = {ast.unparse(item) for item in getattr(node, "decorator_list", [])}
        if not decorators & NOT_QUICK:
            yield node


def words_of(node: ast.AST) -> list[str]:
    """Returns the words that a node has itself, those of its text included."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name):
            return name.split(".")
        case ast.Constant(value=str(text)):
            return re.findall(r"\w+", text)
    return []


@pytest.mark.parametrize("what", STAND_FOR)
def test_what_stands_for_much_is_quick(what):
    file, _, name = STAND_FOR[what].partition("::")
    assert name in [getattr(node, "name", None) for node in quick_parts(TESTS / file)]


@pytest.mark.slow
def test_every_layer_decoder_optimizer_and_partitioner_is_in_a_quick_test():
    words = {
        word
        for path in TESTS.rglob("*.py")
        for node in quick_parts(path)
        if path != Path(__file__) and not path.is_relative_to(TESTS / "faults")
        for part in ast.walk(node)
        for word in words_of(part)
    }
    partitioners = {"Partitioner", "ExplicitCollectives"}
    shown = {*layers.__all__, *decode.__all__, *optimizers.__all__, *partitioners}
    # Every DotProductAttention has one, and is compared with Pax's; an optimizer has its state.
    of_others = {"PerDimScale"} | {name for name in optimizers.__all__ if name.endswith("State")}
    assert sorted(shown - words - of_others) == []
