"""Messages for a `--set` that cannot be applied: the expected value, and the likely meaning."""

import contextlib
import difflib
import inspect
import re
from collections.abc import Collection, Sequence
from typing import Any

import fiddle as fdl

from praxis_lite.config.paths import Field, children, iterate_fields, settings_of
from praxis_lite.config.values import (
    UNKNOWN,
    WrongType,
    is_plain,
    parse_value,
    type_name,
    union_parts,
)
from praxis_lite.core.errors import ConfigError, did_you_mean, few, shown


def check_form(setting: str, following: Sequence[str]) -> None:
    """Checks that a setting is `path=value`; `following` are the settings after it."""
    if "=" in setting:
        return
    # `a.b 20`, `a.b = 20` and `a.b:20`, as other programs take them.
    path, colon, value = setting.strip().partition(":")
    if not colon:
        value = next((item.removeprefix("=") for item in following if item != "="), "")
    meant = f"{path}={value}" if value and "=" not in value else f"{path}=VALUE"
    raise ConfigError(
        f"--set {shown(setting)} has no '='; expected path=value, such as run.seed=7. Write --set "
        f"{shown(meant)}, without blanks around the '='."
    )


def expected_here(wrong: WrongType, annotation: Any, text: str, may_be_named: bool) -> str:
    """Returns the values that a field takes in place of `text`."""
    expected, parts = str(wrong), union_parts(annotation)
    plain = [type_name(part) for part in parts if is_plain(part)]
    others = [_kind(part) for part in parts if not is_plain(part)]
    if may_be_named:
        expected = " or ".join([*plain, *others]) if plain and others else expected
        return (
            f"{expected}; a function or class is given by its name, such as optax.lion (if it is "
            "in your package, add --packages), and its result with (), such as "
            "optax.constant_schedule()"
        )
    if "Sequence[" in expected and "," not in text:
        with contextlib.suppress(WrongType):
            parse_value(f"{text},", annotation)
            return f"{expected}; a sequence of one is written {shown(text)},"
        return f"{expected}, its items separated by commas"
    if plain and others:
        return (
            f"{' or '.join(plain)}; {' or '.join(others)} can only be set in the experiment's code"
        )
    return expected


def _kind(annotation: Any) -> str:
    if "Callable" in str(annotation):
        return "a function"
    name = type_name(annotation).rpartition(".")[2]
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


# Attributes of Pax's experiments, and their counterparts here.
PAX_NAMES = {
    "PERCORE_BATCH_SIZE": "BATCH_SIZE, for all devices together, or datasets.train.batch_size",
    "CHECKPOINT_EVERY_N_STEPS": "run.checkpoints.every_steps",
    "CHECKPOINT_MAX_TO_KEEP": "run.checkpoints.max_to_keep",
    "SUMMARY_INTERVAL_STEPS": "run.log_every_steps",
    "EVAL_INTERVAL_STEPS": "run.evaluation.every_steps",
    "MAX_STEPS": "run.num_train_steps",
    "ICI_MESH_SHAPE": "mesh.ici_mesh_shape", "DCN_MESH_SHAPE": "mesh.dcn_mesh_shape",
}


def no_such_path(config: fdl.Buildable, path: str, attributes: Collection[str]) -> str:
    """Returns the message for a path that leads to no field, with the likely paths."""
    if path in PAX_NAMES:
        return (
            f"--set {path} is Pax's name. Here it is {PAX_NAMES[path]}: docs/coming_from_pax.md."
        )
    if hint := did_you_mean(path, attributes):
        return f"--set {shown(path)}: the experiment has no such attribute or field.{hint}"
    fields = list(iterate_fields(config))
    if below := re.fullmatch(r"(.*(?:weight|activation)_split_dims_mapping)\.\w+", path):
        hint = (
            f"In Pax a mapping is a field below {_last(below[1])}; here {_last(below[1])} is the "
            f"mapping itself, a plain sequence: --set {shown(below[1])}=data,mdl."
        )
    elif path.isupper() and not attributes:
        same = [field.path for field in fields if _last(field.path) == path.lower()]
        hint = (
            "Attributes of the experiment's class can be set for training and --mode=explain only: "
            "eval and decode read the job's config, which was made from them. Set its fields"
            + (f": {few(same, 5)}." if same else ", which config.txt in its directory lists.")
        )
    elif near := _nearest(path, fields):
        hint = f"The nearest are {', '.join(near)}."
    else:
        roots = [str(key) for key, _, _ in children(config, UNKNOWN)]
        hint = f"Paths begin with {', '.join(roots)}; config.txt in the job's directory lists all."
    return f"--set {shown(path)}: the config has no such field. {hint}{_subclass(path, fields)}"


def _subclass(path: str, fields: Sequence[Field]) -> str:
    """Returns the settings that replace the object above by a subclass that has the field."""
    last = _last(path)
    above = path[: -len(last)].rstrip(".")
    for field in fields:
        owner = settings_of(field.value) if field.path == above else None
        function = fdl.get_callable(owner) if isinstance(owner, fdl.Config) else None
        for subclass in function.__subclasses__() if isinstance(function, type) else ():
            if last in inspect.signature(subclass).parameters:
                name = subclass.__name__
                return f" {name} has it: --set {above}={name}() {path}=VALUE."
    return ""


def _nearest(path: str, fields: Sequence[Field]) -> list[str]:
    last = _last(path)

    def likeness(field: Field) -> float:
        # The last name counts as much as the rest: users forget where a field is.
        total = difflib.SequenceMatcher(None, path, field.path).ratio()
        if field.is_settable and path.startswith((f"{field.path}.", f"{field.path}[")):
            return total + 1  # A step too far.
        return total + difflib.SequenceMatcher(None, last, _last(field.path)).ratio()

    scored = sorted(((likeness(item), item.path) for item in fields), reverse=True)
    return [element for score, element in scored[:5] if score >= 1.2]


def _last(path: str) -> str:
    return re.split(r"[.\[]", path)[-1]
