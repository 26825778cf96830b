"""Error messages for `--set` settings that cannot be applied."""

import contextlib
import difflib
import inspect
import re
from collections.abc import Collection, Sequence
from typing import Any

import fiddle as fdl

from praxis_lite.config.literals import (
    UNKNOWN,
    WrongType,
    is_plain,
    parse_value,
    type_name,
    union_parts,
)
from praxis_lite.config.paths import Field, children, iterate_fields, settings_of
from praxis_lite.core.errors import ConfigError, did_you_mean, first_few, shortened


def check_form(setting: str, following: Sequence[str]) -> None:
    """Checks that a setting has the format `path=value`.

    Args:
        setting: The setting.
        following: The settings after it, the first of which may be its value.

    Raises:
        ConfigError: The setting has no "=".
    """
    if "=" in setting:
        return
    # Recognize the formats `a.b 20`, `a.b = 20` and `a.b:20`, which other programs use.
    path, colon, value = setting.strip().partition(":")
    if not colon:
        value = next((word.removeprefix("=") for word in following if word != "="), "")
    meant = f"{path}={value}" if value and "=" not in value else f"{path}=VALUE"
    raise ConfigError(
        f"--set {shortened(setting)} has no '='; expected path=value, such as run.seed=7. Write "
        f"--set {shortened(meant)}, without spaces around the '='."
    )


def expected_here(wrong: WrongType, annotation: Any, text: str, may_be_named: bool) -> str:
    """Describes the values that a field accepts instead of `text`."""
    expected, parts = str(wrong), union_parts(annotation)
    plain = [type_name(part) for part in parts if is_plain(part)]
    objects = [_kind(part) for part in parts if not is_plain(part)]
    if may_be_named:
        expected = " or ".join([*plain, *objects]) if plain and objects else expected
        return (
            f"{expected}; specify a function or class by its name, such as optax.lion (if it is in "
            "your package, add --packages), and the result of a call with (), such as "
            "optax.constant_schedule()"
        )
    # If a trailing comma makes the text valid, the user has probably forgotten it.
    if "Sequence[" in expected and "," not in text:
        with contextlib.suppress(WrongType):
            parse_value(f"{text},", annotation)
            return f"{expected}; write a sequence of one item as {shortened(text)},"
        return f"{expected}, with items separated by commas"
    if plain and objects:
        return (
            f"{' or '.join(plain)}; {' or '.join(objects)} can only be set in the experiment's code"
        )
    return expected


def _kind(annotation: Any) -> str:
    """Describes a type without literals, such as "a function" or "an Optimizer"."""
    if "Callable" in str(annotation):
        return "a function"
    name = type_name(annotation).rpartition(".")[2]
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


# Attributes of Pax's experiments, and their equivalents in praxis_lite.
PAX_NAMES = {
    "PERCORE_BATCH_SIZE": "BATCH_SIZE, for all devices together, or datasets.train.batch_size",
    "CHECKPOINT_EVERY_N_STEPS": "run.checkpoints.every_steps",
    "CHECKPOINT_MAX_TO_KEEP": "run.checkpoints.max_to_keep",
    "SUMMARY_INTERVAL_STEPS": "run.log_every_steps",
    "EVAL_INTERVAL_STEPS": "run.evaluation.every_steps",
    "MAX_STEPS": "run.num_train_steps",
    "ICI_MESH_SHAPE": "mesh.ici_mesh_shape",
    "DCN_MESH_SHAPE": "mesh.dcn_mesh_shape",
}


def no_such_path(config: fdl.Buildable, path: str, attributes: Collection[str]) -> str:
    """Returns the error message for a path that does not exist, with similar paths."""
    if path in PAX_NAMES:
        return (
            f"--set {path} is a name of Pax. In praxis_lite it is {PAX_NAMES[path]}: see "
            "docs/coming_from_pax.md."
        )
    root = re.split(r"[.\[]", path)[0]
    is_field = root in fdl.ordered_arguments(config, include_defaults=True)
    if not is_field and (hint := did_you_mean(root, attributes)):
        return f"--set {shortened(path)}: the experiment has no such attribute or field.{hint}"
    fields = list(iterate_fields(config))
    if below := re.fullmatch(r"(.*(?:weight|activation)_split_dims_mapping)\.\w+", path):
        hint = (
            f"In Pax the mapping is a field of {_last(below[1])}; in praxis_lite "
            f"{_last(below[1])} is the mapping itself, a plain sequence: --set "
            f"{shortened(below[1])}=data,mdl."
        )
    # Probably an attribute of an experiment's class, but the config was read from a job.
    elif path.isupper() and not attributes:
        same = [field.path for field in fields if _last(field.path) == path.lower()]
        hint = (
            "Attributes of the experiment's class can be set only for training and `praxis "
            "explain`; eval and decode read the job's config, which was created from them. Set its "
            "fields instead"
            + (
                f": {first_few(same, 5)}."
                if same
                else "; config.txt in the job's directory lists them."
            )
        )
    elif near := _nearest(path, fields):
        hint = f"Similar fields: {', '.join(near)}."
    else:
        roots = [str(key) for key, _, _ in children(config, UNKNOWN)]
        hint = f"Paths start with {', '.join(roots)}; config.txt in the job's directory lists all."
    message = f"--set {shortened(path)}: the config has no such field."
    return f"{message} {hint}{_subclass_hint(path, fields)}"


def _subclass_hint(path: str, fields: Sequence[Field]) -> str:
    """Returns a hint if a subclass of the object at the parent path has the field, else ""."""
    last = _last(path)
    parent = path[: -len(last)].rstrip(".")
    for field in fields:
        owner = settings_of(field.value) if field.path == parent else None
        function = fdl.get_callable(owner) if isinstance(owner, fdl.Config) else None
        subclasses: Sequence[type] = function.__subclasses__() if isinstance(function, type) else ()
        for subclass in subclasses:
            if last in inspect.signature(subclass).parameters:
                name = subclass.__name__
                return f" {name} has it: --set {parent}={name}() {path}=VALUE."
    return ""


def _nearest(path: str, fields: Sequence[Field]) -> list[str]:
    """Returns the paths of at most five fields that are similar to a path."""
    last = _last(path)

    def similarity(field: Field) -> float:
        # The last name has the same weight as the complete path, because users may not remember
        # where a field is.
        total = difflib.SequenceMatcher(None, path, field.path).ratio()
        if field.is_settable and path.startswith((f"{field.path}.", f"{field.path}[")):
            return total + 1  # The path starts with the path of an existing field.
        return total + difflib.SequenceMatcher(None, last, _last(field.path)).ratio()

    scored = sorted(((similarity(field), field.path) for field in fields), reverse=True)
    return [field_path for score, field_path in scored[:5] if score >= 1.2]


def _last(path: str) -> str:
    return re.split(r"[.\[]", path)[-1]
