"""What a config may name: each name of the library that it may is looked at, and does no harm."""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import fiddle as fdl
import pytest

import praxis_lite.experiments
import praxis_lite.tasks
from praxis_lite import ConfigError
from praxis_lite.inputs import JsonLines, Parquet
from praxis_lite.run.config import configurable, nodes
from praxis_lite.run.config.names import imported, name_of, named
from praxis_lite.run.config.node_form import check

CHECKOUT = Path(__file__).parents[3]
OWN = [
    f"{package.__name__}.{module.name}" for package in (praxis_lite.experiments, praxis_lite.tasks)
    for module in pkgutil.iter_modules(package.__path__)
]


def holder(module):
    import jax

    if module == "jax.checkpoint_policies":
        return jax.checkpoint_policies
    return importlib.import_module(module)


@functools.cache
def may_be_named():
    """Returns the objects that a config may name, by (module, name), with methods of classes."""
    actual = {}
    for module in (*configurable.PUBLIC, *OWN, *configurable.LIBRARIES):
        values = vars(holder(module))
        if module in configurable.PUBLIC:  # Some are there when they are asked for.
            values = values | {element: getattr(holder(module), element)
                               for element in getattr(holder(module), "__all__", ())}
        for name, value in values.items():
            members = dir(value) if isinstance(value, type) else ()
            for item in (name, *(f"{name}.{member}" for member in members)):
                if configurable.is_allowed(module, item, ()):
                    try:
                        actual[module, item] = imported(module, item)
                    except ConfigError:
                        continue
    return actual


# They read what a setting names, and write beside it or in cache_dir alone.
MAY_READ = {
    "ArrayRecords", "ArrowFiles", "CheckpointLoadingRules", "FileSource", "HuggingFaceDataset",
    "ImageFiles", "JsonLines", "NpyFiles", "Parquet", "PreferenceData", "TextCorpus", "TextFiles",
    "TfRecords", "Tfds", "examples_of", "questions",
}

# Trackers write and connect when a job trains, whose config comes from code and never from a file.
MAY_READ |= {"PrometheusTextfile"}


def test_no_name_takes_a_path_but_what_reads_it():
    names = may_be_named()
    assert len(names) > 600
    paths = re.compile("(^|_)(path|files?|filename|folder|dir|directory|url|host|port|command)s?$")
    for (module, name), value in names.items():
        if not callable(value) or name in MAY_READ:
            continue
        try:
            parameters = inspect.signature(value).parameters
        except (TypeError, ValueError):
            continue
        taken = [parameter for parameter in parameters if paths.search(parameter)]
        assert taken == [], (module, name)


def test_no_name_is_a_method_that_acts():
    for (module, name), value in may_be_named().items():
        if "." in name and module not in configurable.ARRAY_LIBRARIES:
            member = inspect.getattr_static(
                getattr(holder(module), name.split(".")[0]), name.split(".")[1]
            )
            makes_one = isinstance(member, classmethod | staticmethod | type)
            assert makes_one or not callable(value) or hasattr(value, "value"), (module, name)


WRITING = {"write_text", "write_bytes", "mkdir", "touch", "replace", "rename", "unlink", "rmtree",
           "symlink_to", "system", "Popen", "run", "savez", "save", "tofile", "dump", "connect"}


def test_what_a_config_may_name_in_the_library_writes_nothing():
    modules = {getattr(item, "__module__", None) or "" for item in may_be_named().values()}
    # Trackers write when a job trains.
    modules = {
        element for element in modules if element.startswith("praxis_lite.")
        and not element.startswith("praxis_lite.run.trackers.")
    }
    actual = []
    for module in sorted(modules):
        file = CHECKOUT / f"{module.replace('.', '/')}.py"
        actual += [f"{file.name}: {ast.unparse(node)[:60]}" for node in calls_in(file)]
    assert len(modules) > 60
    assert actual == []


def calls_in(file):
    """Yields calls that may write a file or start a process."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            owner, _, method = name.rpartition(".")
            opens = name == "open" and any(ast.unparse(item) != "'rb'" for item in node.args[1:])
            if opens or (method in WRITING and owner.partition(".")[0] in
                         ("os", "shutil", "subprocess", "np", "json", "pickle", "path", "file")):
                yield node


# Where functions act: of these packages a config may name no more.
OF_ACTING_PACKAGES = {
    "praxis_lite": """
        BestCheckpoints CheckpointLoadingRules EarlyStopping EvaluationSettings Experiment Job
        LossSpikeSettings MLflow MeshConfig ProfileSettings PrometheusTextfile RunConfig
        SaveSettings SaveSettings.of StopSettings Task TensorBoard WeightsAndBiases
    """,
    "praxis_lite.collectives": "ExplicitCollectives",
    "praxis_lite.core": """
        AuxiliaryOptimizer Fsdp GradientLimits Gradients Learner
        LogicalPartitioning MeshConfig MeshRules Model NnxModel Partitioner Replicate ShardDim
        StateLayout Task TrainState WeightSharding WeightSpec constrain
    """,
    "praxis_lite.decode": "BeamSearch Decoder Greedy Sample pax_outputs",
    "praxis_lite.inputs.numpy_data": "InMemory SyntheticLm TextCorpus TextWindows",
    "praxis_lite.inputs.tf_data": "TextWindows",
}


def test_of_packages_that_act_a_config_may_name_a_list_and_no_more():
    for package, names in OF_ACTING_PACKAGES.items():
        assert {name for module, name in may_be_named() if module == package} == set(names.split())
    packages = {module for module, _ in may_be_named() if module.startswith("praxis_lite")}
    assert packages == {
        *OF_ACTING_PACKAGES, *OWN, "praxis_lite.inputs", "praxis_lite.layers",
        "praxis_lite.models", "praxis_lite.optimizers", "praxis_lite.schedules",
    }


def test_of_inputs_and_tasks_a_config_may_name_classes_alone():
    of_these = {
        symbol: value for symbol, value in may_be_named().items()
        if symbol[0] == "praxis_lite.inputs" or symbol[0].startswith("praxis_lite.tasks.")
    }
    assert len(of_these) > 30
    assert [symbol for symbol, value in of_these.items() if not isinstance(value, type)] == []


REFUSED = """
    builtins:eval builtins:open builtins:getattr builtins:type builtins:object
    os:remove shutil:rmtree pathlib:Path.unlink subprocess:run socket:create_connection
    praxis_lite:load praxis_lite:register praxis_lite:TrainedModel praxis_lite:ConfigError
    praxis_lite:Checkpoints praxis_lite.core:records_of
    praxis_lite.core:decide_shardings praxis_lite.decode:for_tokenizer
    praxis_lite.inputs:about_python praxis_lite.inputs:language_reference
    praxis_lite.inputs:spec_of praxis_lite.inputs:BadExample praxis_lite.inputs:Source
    praxis_lite:Hook praxis_lite.inputs.tokenizers:JsonTokenizer
    praxis_lite.tools.huggingface:settings_in praxis_lite.tools.pax:read_pax_checkpoint
    praxis_lite.tools.testing:check_on_meshes praxis_lite.tools.nnx:mdl_vars_from_nnx
    praxis_lite.tasks.language_model:outputs_of_logits
    praxis_lite.main:main praxis_lite.run.command:Parser praxis_lite.files.whole_files:not_written
    praxis_lite.run.job.job_dir:open_for_training praxis_lite.run.job.job_dir:JobDir
    praxis_lite.run.checkpoints.checkpoints:Checkpoints praxis_lite.run.checkpoints.tools:listing
    praxis_lite.tools.pax.job:begin_job praxis_lite.tools.huggingface:load
    praxis_lite.run.trainer.launch:train praxis_lite.inputs.sources.cache:write
    praxis_lite.inputs.sources.files.paths:make_files praxis_lite.inputs.tokenizers:load_tokenizer
    praxis_lite.inputs:JsonLines.check praxis_lite.inputs:TextCorpus.__call__
    praxis_lite.inputs:sources praxis_lite.inputs.numpy_data:random_bits
    praxis_lite.core:simulate_devices praxis_lite.core:make_mesh
    praxis_lite.core:register_rule praxis_lite.core:global_batch
    praxis_lite.experiments.huggingface:lines_of praxis_lite.experiments.huggingface:with_adapters
    praxis_lite.experiments.huggingface:ChatFull.datasets praxis_lite.experiments.lm:PyDocs.config
    praxis_lite.experiments.moe:with_experts praxis_lite.experiments.finetune:code
    praxis_lite.tasks.loss:_weighted praxis_lite.tasks.language_model:LanguageModelTask.decode
    jax.lax:while_loop jax.lax:fori_loop jax.lax:iota jax.lax:broadcast jax.lax:full jax.lax:map
    jax.numpy:save jax.numpy:load jax.numpy:fromfile jax.numpy:arange jax.numpy:zeros
    numpy:save numpy:memmap numpy:fromfile numpy:zeros numpy:fromfunction numpy:frompyfunc
    optax:nnls optax:power_iteration optax:matrix_inverse_pth_root optax:MultiSteps.init
    flax.linen:tabulate flax.nnx:jit flax.nnx:Module.sow jax.profiler:start_server jax:config
    fiddle:build functools:partial importlib:import_module
"""


@pytest.mark.parametrize("symbol", REFUSED.split())
def test_what_acts_is_refused(symbol):
    module, name = symbol.split(":")
    with pytest.raises(ConfigError, match=f"config.json names {module}.{name},"):
        nodes.read({"name": symbol}, check({"name": symbol}, ()))
        pytest.fail(f"{module}.{name} is allowed")


NOT_CALLED = """
    jax.lax:mul numpy:power jax.numpy:left_shift jax.nn:one_hot jax.nn.initializers:zeros
    optax:softmax_cross_entropy optax:global_norm optax:apply_updates
"""


@pytest.mark.parametrize("symbol", NOT_CALLED.split())
def test_a_function_of_arrays_is_handed_on_and_not_called(symbol):
    for kind in ("name", "Partial"):
        node = {kind: symbol} if kind == "name" else {kind: symbol, "arguments": {}}
        nodes.read(node, check(node, ()))
    node = {"Config": symbol, "arguments": {}}
    with pytest.raises(ConfigError, match=symbol.replace(":", ".")):
        nodes.read(node, check(node, ()))
    with pytest.raises(ConfigError, match=symbol.replace(":", ".")):
        nodes.write(fdl.Config(imported(*symbol.split(":"))), ())


def test_what_makes_an_optimizer_or_a_schedule_is_called():
    for symbol in ("optax:adamw", "optax:warmup_cosine_decay_schedule", "optax.contrib:dog",
                   "optax:inject_hyperparams", "jax.nn.initializers:normal", "jax.nn:gelu",
                   "praxis_lite.layers:WeightInit.Xavier", "builtins:dict"):
        node = {"Config": symbol, "arguments": {}}
        nodes.read(node, check(node, ()))


def test_each_module_of_the_library_says_what_it_shows_to_configs():
    for module in OWN:
        shows = importlib.import_module(module).__all__
        assert shows == sorted(shows) and shows, module


def test_a_module_that_its_owner_put_beside_ours_shows_all_that_it_defines(tmp_path, monkeypatch):
    (tmp_path / "my_own.py").write_text("def scaled(x): return 3 * x\n")
    monkeypatch.setattr(
        praxis_lite.experiments, "__path__", [*praxis_lite.experiments.__path__, str(tmp_path)]
    )
    scaled = named("praxis_lite.experiments.my_own.scaled", ())
    assert scaled(7) == 21
    assert name_of(scaled) == ("praxis_lite.experiments.my_own", "scaled")


def test_a_name_in_other_letters_is_the_first_that_may_be_meant():
    from praxis_lite.run.config.callables import suggestion

    assert suggestion("adamW", None, None).startswith(" Did you mean adamw,")
    # Names of ours are known before they are loaded.
    assert suggestion("LayerNrm", None, None).startswith(" Did you mean LayerNorm,")
    assert suggestion("JsonLine", None, None).startswith(" Did you mean JsonLines,")


@pytest.mark.parametrize("source, name", [(JsonLines, "a.jsonl"), (JsonLines, "a.jsonl.gz"),
                                          (JsonLines, "a.jsonl.zst"), (Parquet, "a.parquet")])
def test_the_examples_that_a_function_returns_are_the_files(tmp_path, source, name):
    def make(folder):
        return ({"text": f"number {i}"} for i in range(137))

    result = source(f"{tmp_path}/{name}", make=make)
    assert len(result) == 137 and result[131] == {"text": "number 131"}


def test_a_function_that_makes_files_writes_over_none(tmp_path):
    (tmp_path / ".profile").write_text("precious")

    def make(folder):
        Path(folder, ".profile").write_text("evil")

    with pytest.raises(ConfigError, match=r"\.profile .*`make`"):
        len(JsonLines(f"{tmp_path}/*.jsonl", make=make))
    assert (tmp_path / ".profile").read_text() == "precious"
    with pytest.raises(ConfigError, match=r"a\.txt'.*\.jsonl"):
        len(JsonLines(f"{tmp_path}/a.txt", make=lambda folder: iter([{"text": "b"}])))
