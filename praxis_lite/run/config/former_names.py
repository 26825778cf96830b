"""Today's names of the names in a config.json of an earlier version."""

from collections.abc import Collection

# Until format 2 a name was that of the module in which it was defined. Each of these parts of
# praxis_lite held what the public package beside it shows today.
_MODULES_OF_FORMAT_2 = {
    "checkpoints.best_checkpoints": "praxis_lite",
    "checkpoints.loading_rules": "praxis_lite",
    "decode": "praxis_lite.decode",
    "early_stopping": "praxis_lite",
    "experiment": "praxis_lite",
    "initializers": "praxis_lite.layers",
    "inputs": "praxis_lite.inputs",
    "inputs.numpy_data": "praxis_lite.inputs.numpy_data",
    "inputs.tf_data": "praxis_lite.inputs.tf_data",
    "layers": "praxis_lite.layers",
    "learner": "praxis_lite.core",
    "loss_scaling": "praxis_lite.core",
    "models": "praxis_lite.models",
    "optimizer_groups": "praxis_lite.core",
    "optimizers": "praxis_lite.optimizers",
    "partitioner": "praxis_lite.core",
    "quantization": "praxis_lite.layers",
    "regularization": "praxis_lite.core",
    "schedules": "praxis_lite.schedules",
    "shard_map_partitioner": "praxis_lite.core",
    "sharding": "praxis_lite.core",
    "task": "praxis_lite",
    "weight_sharding": "praxis_lite.core",
    "weights": "praxis_lite.layers",
}
_PACKAGES_OF_FORMAT_2 = {
    "tasks": "praxis_lite.tasks",
    "experiments": "praxis_lite.experiments",
}
# Public packages of later formats that have another name today.
_PACKAGES = {
    "praxis_lite.learner": "praxis_lite.core",
    "praxis_lite.learner.optimizers": "praxis_lite.optimizers",
    "praxis_lite.learner.schedules": "praxis_lite.schedules",
    "praxis_lite.partitioner": "praxis_lite.core",
    "praxis_lite.sharding": "praxis_lite.core",
}
# Classes and functions that have another public name than they had, in a file of any format.
_RENAMED = {
    "praxis_lite.core:ShardMapPartitioner": "praxis_lite.collectives:ShardMapPartitioner",
    "praxis_lite.experiments.lm:rotary_lm": "praxis_lite.layers:rotary_lm",
    "praxis_lite.experiments.huggingface:write_questions":
        "praxis_lite.experiments.huggingface:questions",
    "praxis_lite.experiments.python_texts:write_json_lines":
        "praxis_lite.experiments.python_texts:examples_of",
    "praxis_lite.experiments.python_texts:write_parquet":
        "praxis_lite.experiments.python_texts:examples_of",
    "praxis_lite.inputs:ChatData": "praxis_lite.experiments.huggingface:former_chat_data",
    "praxis_lite.layers:WeightSpec": "praxis_lite.core:WeightSpec",
    "praxis_lite.models:Model": "praxis_lite.core:Model",
    "praxis_lite.models:NnxModel": "praxis_lite.core:NnxModel",
}


def name_today(
    module: str, name: str, config_format: int, packages: Collection[str]
) -> tuple[str, str]:
    """Returns today's (module, name) of a name in a config.json.

    Args:
        module: `praxis_lite.layers.attentions` or `tasks.loss`, as the file has it.
        name: in the module: `DotProductAttention`, `WeightInit.Xavier`.
        config_format: of the file.
        packages: that the user listed: `tasks` among them is the user's own.
    """
    if config_format == 2:
        module = _module_since_format_3(module, packages)
    module = _PACKAGES.get(module, module)
    top, dot, below = name.partition(".")
    if f"{module}:{top}" in _RENAMED:
        module, top = _RENAMED[f"{module}:{top}"].split(":")
    return module, f"{top}{dot}{below}"


def experiment_today(name: str, config_format: int, packages: Collection[str]) -> str:
    """Returns the `module.Class` of today for the experiment that a config.json names."""
    module, _, name = name.rpartition(".")
    return ".".join(name_today(module, name, config_format, packages)).removeprefix(".")


def _module_since_format_3(module: str, packages: Collection[str]) -> str:
    top, _, part = module.partition(".")
    if top in _PACKAGES_OF_FORMAT_2 and top not in packages:
        return f"{_PACKAGES_OF_FORMAT_2[top]}.{part}".removesuffix(".")
    if top != "praxis_lite":
        return module
    # The longest former name that the module's own begins with.
    while part and part not in _MODULES_OF_FORMAT_2:
        part = part.rpartition(".")[0]
    return _MODULES_OF_FORMAT_2.get(part, module)
