"""The input shapes that a program is exported for: from the command line, or from a dataset."""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from praxis_lite.core.errors import ConfigError, require, shown
from praxis_lite.core.sharding.leaf_paths import leaves_with_path
from praxis_lite.core.task import Task
from praxis_lite.inputs.base import TRAIN, InputPipeline
from praxis_lite.inputs.batches import checked_spec
from praxis_lite.trainer.forward_pass import LEAVES_OF_ARGUMENTS

What = Literal["decode", "predict"]
# Stands for any number of rows.
ANY_ROWS = "b"
_INPUT = re.compile(rf"([\w/]+)=(\w+)\[(\d+|{ANY_ROWS})((?:,\d+)*)\]")
# Rank and dtype of the inputs of language models, whose shapes need no dataset.
_OF_TEXTS = {
    "ids": (2, jnp.int32), "prefix_lengths": (1, jnp.int32), "weights": (1, jnp.float32),
}
Specs = dict[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The shapes and dtypes of a program's inputs.

    Attributes:
      specs: by path, without padding; with 1 row if `any_rows`.
      any_rows: whether the program takes any number of rows.
    """

    specs: Specs
    any_rows: bool


def inputs_of(
    task: Task, what: What, datasets: Mapping[str, InputPipeline], *,
    given: Sequence[str] = (), batch: str | None = None, length: int | None = None,
) -> Inputs:
    """Returns the inputs of a job's decoding step, or of its model's call.

    Args:
      datasets: by name; for "decode" those of prompts. The shapes are those of the training
        dataset, or else of the first.
      given: "NAME=DTYPE[ROWS,DIM,...]" each, in place of a dataset's.
      batch: the number of rows, or `ANY_ROWS`; None: the dataset's.
      length: the number of tokens of a row; None: the dataset's.

    Raises:
      ConfigError: the task does not decode, an option is malformed, the rows differ, or nothing
        determines the shapes.
    """
    if what == "decode" and type(task).decode is Task.decode:
        raise ConfigError(
            f"{type(task).__name__} decodes nothing: it has no method `decode`. Export the model's "
            "call, --what=predict."
        )
    if given:
        require(
            batch is None and length is None, "--batch or --length next to --inputs",
            batch or length, "neither", "--inputs gives all shapes.",
        )
        return _parsed(given)
    is_any = batch == ANY_ROWS
    if batch is not None and not is_any:
        is_number = batch.isdecimal() and int(batch) > 0
        require(is_number, "--batch", batch, f"1 or more, or {ANY_ROWS} for any number of rows")
    require(length is None or length > 0, "--length", length, "1 or more")
    num_rows = None if batch is None else 1 if is_any else int(batch)
    arguments = None
    if what == "predict" and not takes_batches(task):
        arguments = _leaves_of_arguments(task)
    names = list(task.required_decode_inputs if arguments is None else arguments)
    if num_rows and length and names and set(names) <= _OF_TEXTS.keys():
        specs = {
            name: jax.ShapeDtypeStruct((num_rows, length)[: _OF_TEXTS[name][0]], _OF_TEXTS[name][1])
            for name in names
        }
        return Inputs(specs, is_any)
    field = "decode_datasets" if what == "decode" else "datasets"
    specs = _of_dataset(datasets, field, arguments)
    length_now = specs["ids"].shape[1:2] if "ids" in specs else ()
    require(
        length is None or length_now != (), "--length", length, "left out",
        f"The inputs have no rows of ids: {sorted(specs)}. --inputs sets other shapes.",
    )

    def resized(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        rows, *dims = x.shape or (None,)
        if length is not None and tuple(dims[:1]) == length_now:
            dims[0] = length
        shape = (num_rows or rows, *dims) if x.shape else ()
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return Inputs({name: resized(x) for name, x in specs.items()}, is_any)


def takes_batches(task: Task) -> bool:
    """Returns whether `Task.predict` takes complete batches, because the model has no call."""
    return task.predict is not None and not callable(task.model.abstract_module())


def _parsed(texts: Sequence[str]) -> Inputs:
    specs, rows = {}, {}
    for text in texts:
        match = _INPUT.fullmatch(text)
        require(
            match is not None, "--inputs", text, "NAME=DTYPE[ROWS,DIM,...], as ids=int32[8,64]",
            f"ROWS is a number, or {ANY_ROWS} for any.",
        )
        name, kind, first, others = match.groups()
        rows[name], dims = first, [int(dim) for dim in others.split(",") if dim]
        num_rows = 1 if first == ANY_ROWS else int(first)
        specs[name] = jax.ShapeDtypeStruct((num_rows, *dims), _dtype(kind, text))
        require(min(specs[name].shape) > 0, "--inputs", text, "dims of 1 or more")
    message = ", ".join(f"{name} {first}" for name, first in rows.items())
    require(len(set(rows.values())) == 1, "The rows of --inputs", message, "the same of all")
    return Inputs(specs, ANY_ROWS in rows.values())


def _dtype(kind: str, text: str) -> Any:
    try:
        dtype = jnp.dtype(kind)
        if dtype == jax.dtypes.canonicalize_dtype(dtype):
            return dtype
    except TypeError:
        pass
    raise ConfigError(
        f"--inputs is {shown(text)}; expected a dtype that JAX computes with: int32, float32, "
        "bfloat16, uint8, bool."
    )


def _of_dataset(
    datasets: Mapping[str, InputPipeline], field: str,
    arguments: Mapping[str, Sequence[str]] | None,
) -> Specs:
    """Returns the leaves of a dataset that are arguments; all leaves without arguments."""
    name = TRAIN if TRAIN in datasets else next(iter(sorted(datasets)), None)
    if name is None:
        raise ConfigError(
            f"The job has no {field}, whose batches would tell the shapes of the inputs. Give "
            "--batch=ROWS and --length=TOKENS of a language model, or --inputs "
            "NAME=DTYPE[ROWS,DIM,...] of each."
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
        call = f"the arguments {list(arguments)}" if arguments else "arguments without names"
        raise ConfigError(
            f"The model's call takes {call}, and batches of {field}.{name} have "
            f"{sorted(available)}. Give all inputs with --inputs NAME=DTYPE[ROWS,DIM,...] of each."
        )
    return specs


def _leaves_of_arguments(task: Task) -> dict[str, tuple[str, ...]]:
    """Returns the names of matching leaves of a batch by required argument of the model's call."""
    model = task.model.abstract_module()
    parameters = inspect.signature(model).parameters.values() if callable(model) else ()
    names = [
        parameter.name for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    only = task.required_inputs[:1] if len(names) == 1 else ()
    return {name: (name, LEAVES_OF_ARGUMENTS.get(name, name), *only) for name in names}
