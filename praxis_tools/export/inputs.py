"""Determines the input shapes of an exported program, from the command line or from a dataset."""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, require, shortened
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.task import Task
from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.inputs.pipeline_checks import checked_spec
from praxis_lite.trainer.forward_pass import LEAVES_OF_ARGUMENTS

What = Literal["decode", "predict"]
# Value of --batch (and of ROWS in --inputs) for exporting a program that accepts any number of
# rows.
ANY_ROWS = "b"
_INPUT = re.compile(rf"([\w/]+)=(\w+)\[(\d+|{ANY_ROWS})((?:,\d+)*)\]")
# Rank and dtype of a language model's inputs. No dataset is needed, because the input shapes only
# depend on the number of rows and the length.
_TEXT_INPUTS = {
    "ids": (2, jnp.int32),
    "prefix_lengths": (1, jnp.int32),
    "weights": (1, jnp.float32),
}
Specs = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The shapes and dtypes of a program's inputs.

    Attributes:
      specs: Maps the path of each input to its logical shape and dtype, with one row if `any_rows`.
      any_rows: Whether the program accepts any number of rows.
    """

    specs: Specs
    any_rows: bool


def inputs_of(
    task: Task,
    what: What,
    datasets: Mapping[str, InputPipeline],
    *,
    given: Sequence[str] = (),
    batch: str | None = None,
    length: int | None = None,
) -> Inputs:
    """Returns the input shapes of a job's decode step or of its model's forward pass.

    Args:
      task: The job's task.
      what: "decode" for the decode step, "predict" for the forward pass.
      datasets: Maps the names of datasets to pipelines (for "decode", prompt pipelines). Shapes
        that are not set by the other arguments are taken from `train`, or from the first dataset if
        there is no `train`.
      given: Specs of all inputs as "NAME=DTYPE[ROWS,DIM,...]". If empty, a dataset is used.
      batch: Number of rows, or `ANY_ROWS`. If None, the dataset's batch size is used.
      length: Number of tokens per row. If None, the dataset's length is used.

    Raises:
      ConfigError: The task cannot decode, an option is malformed, inputs have different numbers of
        rows, or the shapes cannot be determined.
    """
    if what == "decode" and type(task).decode is Task.decode:
        raise ConfigError(
            f"{type(task).__name__} cannot decode, because it has no `decode` method. Export the "
            "forward pass with --what=predict instead."
        )
    # The shapes are set by --inputs, by --batch and --length, or by a dataset.
    if given:
        if batch is not None or length is not None:
            raise ConfigError(
                "--batch and --length cannot be combined with --inputs, which already sets all "
                "shapes."
            )
        return _parse(given)
    is_any = batch == ANY_ROWS
    if batch is not None and not is_any:
        is_number = batch.isdecimal() and int(batch) > 0
        require(is_number, "--batch", batch, f"1 or more, or {ANY_ROWS} for any number of rows")
    require(length is None or length > 0, "--length", length, "a number of tokens, 1 or more")
    num_rows = None if batch is None else 1 if is_any else int(batch)
    arguments = None
    if what == "predict" and not takes_batches(task):
        arguments = _leaf_names_by_argument(task)
    names = list(task.required_decode_inputs if arguments is None else arguments)
    # A language model's inputs are known without a dataset.
    if num_rows and length and names and set(names) <= _TEXT_INPUTS.keys():
        specs = {}
        for name in names:
            rank, dtype = _TEXT_INPUTS[name]
            specs[name] = jax.ShapeDtypeStruct((num_rows, length)[:rank], dtype)
        return Inputs(specs, is_any)
    field = "decode_datasets" if what == "decode" else "datasets"
    specs = _specs_from_dataset(datasets, field, arguments)
    dataset_length = specs["ids"].shape[1:2] if "ids" in specs else ()
    if length is not None and dataset_length == ():
        raise ConfigError(
            f"--length={length} requires an input with token ids, but the inputs are "
            f"{sorted(specs)}. Use --inputs to set other shapes."
        )

    def resize(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not x.shape:
            return jax.ShapeDtypeStruct((), x.dtype)
        # Only the time dim depends on --length.
        rows, *dims = x.shape
        if length is not None and tuple(dims[:1]) == dataset_length:
            dims[0] = length
        return jax.ShapeDtypeStruct((num_rows or rows, *dims), x.dtype)

    return Inputs({name: resize(x) for name, x in specs.items()}, is_any)


def takes_batches(task: Task) -> bool:
    """Returns whether `Task.predict` takes a complete batch, because the model is not callable."""
    return task.predict is not None and not callable(task.model.abstract_module())


def _parse(texts: Sequence[str]) -> Inputs:
    specs, rows = {}, {}
    for text in texts:
        match = _INPUT.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"--inputs is {shortened(repr(text))}; expected NAME=DTYPE[ROWS,DIM,...] such as "
                f"ids=int32[8,64]. ROWS is a number, or {ANY_ROWS} for any number of rows."
            )
        name, dtype, rows[name], other_dims = match.groups()
        dims = [int(dim) for dim in other_dims.split(",") if dim]
        num_rows = 1 if rows[name] == ANY_ROWS else int(rows[name])
        specs[name] = jax.ShapeDtypeStruct((num_rows, *dims), _parse_dtype(dtype, text))
        require(min(specs[name].shape) > 0, "--inputs", text, "dims of 1 or more")
    if len(set(rows.values())) > 1:
        found = ", ".join(f"{name} {num_rows}" for name, num_rows in rows.items())
        raise ConfigError(
            f"--inputs: the numbers of rows differ ({found}). Set the same number for all inputs."
        )
    return Inputs(specs, ANY_ROWS in rows.values())


def _parse_dtype(name: str, text: str) -> Any:
    try:
        dtype = jnp.dtype(name)
        if dtype == jax.dtypes.canonicalize_dtype(dtype):
            return dtype
    except TypeError:
        pass
    raise ConfigError(
        f"--inputs is {shortened(text)}; expected a dtype that JAX supports, such as int32, "
        "float32, bfloat16, uint8 or bool."
    )


def _specs_from_dataset(
    datasets: Mapping[str, InputPipeline],
    field: str,
    arguments: Mapping[str, Sequence[str]] | None,
) -> Specs:
    """Returns the specs of the dataset leaves that are passed to the model's arguments.

    If `arguments` is None, the specs of all leaves are returned.
    """
    name = TRAIN if TRAIN in datasets else next(iter(sorted(datasets)), None)
    if name is None:
        raise ConfigError(
            f"The input shapes are unknown, because the job has no {field}. Set --batch=ROWS and "
            "--length=TOKENS for a language model, or specify every input with --inputs "
            "NAME=DTYPE[ROWS,DIM,...] for other models."
        )
    available = dict(leaves_with_path(checked_spec(datasets[name], f"{field}.{name}")))
    if arguments is None:
        return available
    specs = {}
    for argument, names in arguments.items():
        leaf = next((leaf for leaf in names if leaf in available), None)
        if leaf is not None:
            specs[argument] = available[leaf]
    if not specs or len(specs) < len(arguments):
        call = f"the arguments {list(arguments)}" if arguments else "unnamed arguments"
        raise ConfigError(
            f"The model takes {call}, but batches of {field}.{name} contain {sorted(available)}. "
            "Specify every input with --inputs NAME=DTYPE[ROWS,DIM,...]."
        )
    return specs


def _leaf_names_by_argument(task: Task) -> dict[str, tuple[str, ...]]:
    """Maps each required argument of the model to the possible names of its batch leaf."""
    model = task.model.abstract_module()
    parameters = inspect.signature(model).parameters.values() if callable(model) else ()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    only = task.required_inputs[:1] if len(names) == 1 else ()
    return {name: (name, LEAVES_OF_ARGUMENTS.get(name, name), *only) for name in names}
