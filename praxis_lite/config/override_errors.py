"""Messages of a `--set` that cannot be applied: the value wanted, and the likely meaning."""

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
    """Checks that a setting is `path=value`; `following` are those behind it."""
    path, equals, _ = setting.partition("=")
    path, message = path.strip(), f"--set {shown(setting)}"
    if not equals:
        # `a.b 20`, `a.b = 20` and `a.b:20`, as other programs take them.
        value = next((item.removeprefix("=") for item in following if item != "="), "")
        if ":" in path:
            path, _, value = path.partition(":")
        is_meant = value and "=" not in value
        meant = f"{path}={value}" if is_meant else f"{path}=VALUE"
        raise ConfigError(
            f"{message} has no '='; wanted is path=value, such as run.seed=7. Write --set "
            f"{shown(meant)}, without blanks around the '='."
        )
    if not path:
        raise ConfigError(
            f"{message} names no field before the '='; wanted is path=value, such as run.seed=7, "
            "without blanks around the '='."
        )


def wanted_here(wrong: WrongType, annotation: Any, text: str, may_be_named: bool) -> str:
    """Returns the values that a field takes in place of `text`."""
    wanted, parts = str(wrong), union_parts(annotation)
    plain = [type_name(part) for part in parts if is_plain(part)]
    others = [_kind(part) for part in parts if not is_plain(part)]
    if may_be_named:
        wanted = " or ".join([*plain, *others]) if plain and others else wanted
        return (
            f"{wanted}; a function or class is said by its name, such as optax.lion (of your own: "
            "--packages), and what it returns with (), such as optax.constant_schedule()"
        )
    if "Sequence[" in wanted and "," not in text:
        with contextlib.suppress(WrongType):
            parse_value(f"{text},", annotation)
            return f"{wanted}; a sequence of one is written {shown(text)},"
        return f"{wanted}, its items with commas between them"
    if plain and others:
        return (
            f"{' or '.join(plain)}; {' or '.join(others)} in its place is set in the experiment's "
            "code"
        )
    return wanted


def _kind(annotation: Any) -> str:
    if "Callable" in str(annotation):
        return "a function"
    name = type_name(annotation).rpartition(".")[2]
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


# Attributes of Pax's experiments, and what is there for them here.
PAX_NAMES = {
    "PERCORE_BATCH_SIZE": "BATCH_SIZE, of all devices together, or datasets.train.batch_size",
    "CHECKPOINT_EVERY_N_STEPS": "run.checkpoints.every_steps",
    "CHECKPOINT_MAX_TO_KEEP": "run.checkpoints.max_to_keep",
    "SUMMARY_INTERVAL_STEPS": "run.log_every_steps",
    "EVAL_INTERVAL_STEPS": "run.evaluation.every_steps",
    "MAX_STEPS": "run.num_train_steps",
    "ICI_MESH_SHAPE": "mesh.ici_mesh_shape", "DCN_MESH_SHAPE": "mesh.dcn_mesh_shape",
}


def no_such_path(config: fdl.Buildable, path: str, attributes: Collection[str]) -> str:
    """Returns the message of a path that leads to no field, with the likely paths."""
    if path not in PAX_NAMES and (hint := did_you_mean(path, attributes)):
        return f"--set {shown(path)}: the experiment has no such attribute or field.{hint}"
    fields = list(iterate_fields(config))
    near = _nearest(path, fields) or _beside(path, fields)
    roots = [str(key) for key, _, _ in children(config, UNKNOWN)]
    hint = (
        f"The nearest are {', '.join(near)}."
        if near
        else f"Paths begin with {', '.join(roots)}; config.txt in the job's directory lists all."
    )
    if path.isupper() and not attributes:
        beside = [field.path for field in fields if _last(field.path) == path.lower()]
        hint = (
            "An attribute of the experiment's class is set where that makes its config, in "
            "training and --mode=explain; eval and decode take the job's as it is. "
            + (f"Set its fields: {few(beside, 5)}." if beside else
               "Set its fields, which config.txt in the job's directory lists.")
        )
    if path.isupper() and _last(path) in PAX_NAMES:
        return (
            f"--set {shown(path)}: that is Pax's. Here it is {PAX_NAMES[_last(path)]}: "
            "docs/coming_from_pax.md."
        )
    if below := re.fullmatch(r"(.*(?:weight|activation)_split_dims_mapping)\.\w+", path):
        hint = (
            f"In Pax a mapping is a field below {_last(below[1])}; here {_last(below[1])} is the "
            f"mapping itself, a plain sequence: --set {shown(below[1])}=data,mdl."
        )
    return f"--set {shown(path)}: the config has no such field. {hint}{_subclass(path, fields)}"


def _subclass(path: str, fields: Sequence[Field]) -> str:
    """Returns the settings that put a subclass with the missing field in the place above it."""
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
        # The last name counts as much as all the rest: people forget where a field lies.
        whole = difflib.SequenceMatcher(None, path, field.path).ratio()
        if field.is_settable and path.startswith((f"{field.path}.", f"{field.path}[")):
            return whole + 1  # A step too far.
        return whole + difflib.SequenceMatcher(None, last, _last(field.path)).ratio()

    scored = sorted(((likeness(item), item.path) for item in fields), reverse=True)
    return [element for score, element in scored[:5] if score >= 1.2]


def _beside(path: str, fields: Sequence[Field]) -> list[str]:
    """Returns the fields of the config that the path leads to but for its last name."""
    above = path[: -len(_last(path))]
    beside = [field.path for field in fields if above and field.path.startswith(above)]
    return [item for item in beside if _last(item) == item[len(above) :]]


def _last(path: str) -> str:
    return re.split(r"[.\[]", path)[-1]
