"""Imports point one way (docs/architecture.md), and what only one place may do, only it does."""

import ast
import functools
import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

# By folder: a part imports what stands on a line above its own, and what is in itself.
ORDERS = {
    "praxis_lite": (
        {"public_names"},
        {"core"},
        {"host", "models", "optimizers"},
        {"config", "inputs", "layers", "trackers"},
        {"decode", "job"},
        {"checkpoints"},
        {"experiment"},
        {"trainer"},
        {"pax", "trained_model"},
        {"huggingface"},
        {"modes"},
        {"installed_tools"},
        {"programs"},
        {"api", "main"},
    ),
    "praxis_tools": (
        {"export", "interpreter", "lm_eval", "serve", "stuck", "sweep"},
        {"elastic", "explain"},
        {"goodput", "nan_finder", "plan"},
        {"check", "profile", "report", "utilization"},
        {"certificates", "modes"},
        {"api", "job_tools"},
    ),
    "praxis_lite/core": (
        {"errors", "jaxprs"},
        {"callables", "sharding", "user_lines"},
        {"learner", "metrics", "models", "xla_workarounds"},
        {"task"},
        {"partitioner"},
        {"collectives"},
    ),
    "praxis_lite/layers": (
        {"activations", "initializers"},
        {"base"},
        {"linears", "normalizations", "stochastics"},
        {"embedding", "stacking"},
        {"attention", "moe"},
        {"recurrent", "transformer"},
        {"vision"},
        {"whole_model"},
    ),
    "praxis_lite/core/learner": (
        {
            "ema",
            "gradient_limits",
            "optimizer_factories",
            "path_masks",
            "schedule_free",
        },
        {"whole_tree_optimizers"},
        {"optimizer_groups", "weight_groups"},
        {"slots", "update"},
        {"learner"},
    ),
    "praxis_lite/trainer": (
        {
            "forward_pass",
            "layout_table",
            "metrics",
            "spike_detector",
        },
        {"checks"},
        {"compilation"},
        {"job_on_mesh", "summary"},
        {"job_history"},
        {"restored_weights"},
        {"create_job", "evaluation"},
        {"decoding"},
        {"hooks"},
        {"job_tools"},
        {"starting_point"},
        {"training_loop"},
        {"job_files"},
        {"launch"},
    ),
    "praxis_lite/checkpoints": (
        {"steps", "stored_arrays"},
        {"orbax_write", "save_checks", "sharded_reading", "tools"},
        {"tensorstore_write"},
        {"background_save"},
        {"save_queue"},
        {"checkpoints", "digest", "step_differences"},
        {"init"},
        {"nnx"},
    ),
}
# At the top of a checkout, and no packages of the library by these names.
FOREIGN = {"tasks", "experiments", "benchmarks", "tests"}
LIBRARY = [
    path
    for package in ("praxis_lite", "praxis_tools")
    for path in sorted((ROOT / package).rglob("*.py"))
]


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """Returns the full name of each module that a file imports, wherever in it."""
    names = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            # `from praxis_tools.explain import hlo` imports a module or a name of the package.
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names += [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    return tuple(names)


def part_of(path: Path, folder: str = "praxis_lite") -> str:
    """Returns the first part of a file's name below a folder: "core" for core/errors.py."""
    return path.relative_to(ROOT / folder).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_library_imports_only_what_comes_before():
    for folder, order in ORDERS.items():
        rank = {name: item for item, names in enumerate(order) for name in names}
        package = folder.replace("/", ".")
        for path in LIBRARY:
            if not path.is_relative_to(ROOT / folder):
                continue
            part = part_of(path, folder)
            if part == "__init__":  # Shows what is in its folder.
                continue
            if path.stem == "__main__":  # `python -m praxis_lite`, above all floors.
                continue
            assert part in rank, f"say in ORDERS where {folder}/{part} stands"
            for name in imports(path):
                assert name.split(".")[0] not in FOREIGN, (path, name)
                if name.startswith(f"{package}."):
                    actual = name.removeprefix(f"{package}.").split(".")[0]
                    # A name of the package's own __init__ is of no part.
                    is_below = actual == part or rank.get(actual, len(order)) < rank[part]
                    assert is_below, f"{name_of(path)} imports {name}"


def test_praxis_lite_does_not_import_praxis_tools():
    for path in (ROOT / "praxis_lite").rglob("*.py"):
        assert not any(name.split(".")[0] == "praxis_tools" for name in imports(path)), path


def test_every_package_says_the_question_it_answers_and_what_it_never_sees():
    for path in LIBRARY:
        if path.name == "__init__.py":
            assert (ast.get_docstring(ast.parse(path.read_text())) or "").strip(), name_of(path)


def test_no_public_name_is_that_of_a_module_in_its_package():
    """Once the module is imported, the package has it in place of the name."""
    for stub in ROOT.glob("praxis_*/**/__init__.pyi"):
        package = name_of(stub.parent).replace("/", ".")
        modules = {path.stem for path in stub.parent.iterdir()}
        clashes = set(importlib.import_module(package).__all__) & modules
        assert clashes <= {"numpy_data", "tf_data"}, package  # These are the modules.


def imports_in(folder):
    """Returns pairs of a file's name and a name that it imports."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    found = [(name_of(path), name) for path in paths for name in imports(path)]
    assert found
    return found


def test_sharding_knows_jax_numpy_and_errors_only():
    for path, name in imports_in("praxis_lite/core/sharding"):
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names | {"jax", "numpy"}:
            known = ("praxis_lite.core.errors.", "praxis_lite.core.sharding.")
            assert name.startswith(known), (path, name)


def test_tasks_and_experiments_know_the_library_and_tasks_no_experiments():
    for path, name in imports_in("tasks") + imports_in("experiments"):
        assert name.split(".")[0] not in FOREIGN, (path, name)
    for path, name in imports_in("tasks"):
        assert not name.startswith("praxis_lite.experiments."), (path, name)


DEVICE_QUESTIONS = {
    "devices",
    "local_devices",
    "device_count",
    "local_device_count",
    "default_backend",
}


def test_only_the_mesh_asks_jax_for_devices():
    asking = {}
    for folder in ("praxis_lite", "praxis_tools", "tasks", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in nodes(path):
                if isinstance(node, ast.Attribute) and node.attr in DEVICE_QUESTIONS:
                    # `mesh.devices` is no question to JAX.
                    asking.setdefault(ast.unparse(node), set()).add(name_of(path))
            for name in imports(path):
                if name.split(".")[0] == "jax" and name.split(".")[-1] in DEVICE_QUESTIONS:
                    asking.setdefault(name, set()).add(name_of(path))
    of_jax = {text: files for text, files in asking.items() if text.startswith("jax")}
    mesh = {"praxis_lite/core/sharding/mesh.py"}
    # It is copied to where nothing of this library is.
    mesh_or_loader = {*mesh, "praxis_tools/export/load.py"}
    assert of_jax == {"jax.devices": mesh_or_loader, "jax.default_backend": mesh_or_loader}


def test_tensorflow_is_imported_under_inputs_alone_and_by_a_function():
    for folder in ("praxis_lite", "praxis_tools", "tasks", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            if any(name.split(".")[0] == "tensorflow" for name in imports(path)):
                assert path.is_relative_to(ROOT / "praxis_lite" / "inputs"), name_of(path)
                body = ast.parse(path.read_text()).body
                at_top = [n for n in body if isinstance(n, (ast.Import, ast.ImportFrom))]
                assert "tensorflow" not in " ".join(map(ast.unparse, at_top)), name_of(path)
