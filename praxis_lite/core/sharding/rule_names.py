"""The Rule type and its arguments, and a parser for the rule strings in a strategy."""

import ast
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.sharding.logical_axes import LogicalAxes, LogicalAxisRules, MeshAxes

Spec = tuple[MeshAxes, ...]


class UnknownName(ConfigError, KeyError):
    """A rule name that is not registered, or an axis name that the mesh does not have."""

    __str__ = Exception.__str__  # KeyError.__str__ would return the repr of the message.


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The properties of an array that rules can use.

    Attributes:
      path: Path of the array, which a pattern must match completely.
      shape: Logical shape.
      dtype: Anything that `numpy.dtype` accepts.
      logical_axes: A name, a tuple of names, or None per dim. If None, the array has no names.
      logical_axis_rules: (name, mesh axes) pairs for this leaf only, applied before the job's
        rules.
      spec: Initial mesh axes per dim, or () if no dim is split.
      num_stacked: Number of leading dims that stack layers.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    logical_axes: LogicalAxes | None = None
    logical_axis_rules: LogicalAxisRules = ()
    spec: Spec = ()
    num_stacked: int = 0


@dataclasses.dataclass(frozen=True)
class JobMesh:
    """The properties of the mesh and the job that rules can use.

    Attributes:
      axis_sizes: Number of devices along each mesh axis, in the mesh's order.
      logical_axis_rules: (name, mesh axes) pairs; the first match wins.
      allow_padding: Whether `Fsdp` may split a dim that is not divisible by the number of devices.
      unmapped_is_error: Whether a logical axis without a rule is an error. Otherwise its dim is not
        split.
    """

    axis_sizes: Mapping[str, int]
    logical_axis_rules: LogicalAxisRules = ()
    allow_padding: bool = False
    unmapped_is_error: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of applying a rule to a leaf.

    Attributes:
      spec: Mesh axes per dim.
      note: A note for the layout report.
      skipped: Reason why the rule did not split the leaf. Reported only if no other rule splits the
        leaf.
      by: Source of the spec, if it was not the rule itself.
    """

    spec: Spec
    note: str = ""
    skipped: str = ""
    by: str = ""


# (current spec, leaf, job_mesh) -> the new spec or an Outcome. Specs have an entry per dim.
Rule = Callable[[Spec, Leaf, JobMesh], Spec | Outcome]

REGISTERED: dict[str, Callable[..., Rule]] = {}


def register_rule(name: str) -> Callable[[Callable[..., Rule]], Callable[..., Rule]]:
    """Returns a decorator that registers a Rule class, or a function that returns a Rule.

    Args:
      name: Name of the rule in strategy strings.

    Raises:
      ConfigError: The name is already registered or is not an identifier.
    """

    def register(factory: Callable[..., Rule]) -> Callable[..., Rule]:
        registered = REGISTERED.get(name)
        # Allow a reloaded module or a rerun notebook cell to register its rule again.
        is_same = registered is None or (registered.__module__, registered.__qualname__) == (
            factory.__module__,
            factory.__qualname__,
        )
        if not name.isidentifier() or not is_same:
            raise ConfigError(
                f"register_rule: {name!r} is already registered or is not an identifier. Choose "
                "another name."
            )
        REGISTERED[name] = factory
        return factory

    return register


def rule_text(rule: Rule) -> str:
    """Formats a rule as a strategy string."""
    if isinstance(rule, functools.partial):
        settings = [*map(repr, rule.args), *(f"{k}={v!r}" for k, v in rule.keywords.items())]
        return f"{rule_text(rule.func)}({', '.join(settings)})"
    if not dataclasses.is_dataclass(rule):
        # The qualified name of a closure begins with the name of the registered function.
        return getattr(rule, "__qualname__", type(rule).__name__).partition(".<locals>")[0]
    settings = []
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if field.default is dataclasses.MISSING:
            settings.append(repr(value))
        elif value != field.default:
            settings.append(f"{field.name}={value!r}")
    known: dict[object, str] = {factory: name for name, factory in REGISTERED.items()}
    name = known.get(type(rule), type(rule).__name__)
    return f"{name}({', '.join(settings)})" if settings else name


def parsed_rules(rules: Any) -> tuple[Rule, ...]:
    """Parses rules from a string, a rule object, or a nested sequence of these, in order.

    A string contains one or more rules separated by `|`. Each rule is a registered name, or a call
    to a registered name: `'shard_dim("mdl", -1)|fsdp("data", 0)'`. Arguments must be literals; no
    code is evaluated.

    Raises:
      UnknownName: A rule is not registered. UnknownName is also a KeyError.
      ConfigError: A string cannot be parsed, arguments do not match a rule's signature, or an
        object is not a rule.
    """
    if isinstance(rules, str):
        try:
            node = ast.parse(rules.strip(), mode="eval").body
        except (SyntaxError, ValueError) as error:
            raise ConfigError(
                f"The rules {rules!r} cannot be parsed: {error}. {_EXPECTED}"
            ) from error
        return tuple(_build_rule(call, rules) for call in _alternatives(node))
    if callable(rules):
        return (rules,)
    if isinstance(rules, Iterable) and not isinstance(rules, Mapping):
        return tuple(rule for part in rules for rule in parsed_rules(part))
    raise ConfigError(f"{rules!r} is not a rule. {_EXPECTED}")


_EXPECTED = (
    "Expected a rule, a list of rules, or a string such as "
    """'shard_dim("mdl", -1)|fsdp("data", 0)'."""
)


def _alternatives(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
    else:
        yield node


def _build_rule(node: ast.expr, text: str) -> Rule:
    call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
    if not isinstance(call.func, ast.Name):
        raise ConfigError(f"The rules {text!r} contain {ast.unparse(node)!r}. {_EXPECTED}")
    name = call.func.id
    if name not in REGISTERED:
        raise UnknownName(
            f"The rules {text!r} contain '{name}', but the registered rules are "
            f"{', '.join(REGISTERED)}.{did_you_mean(name, REGISTERED)} Register a custom rule with "
            "`register_rule` in a module that is imported, or pass the rule object instead of a "
            "string."
        )
    try:
        args = [ast.literal_eval(arg) for arg in call.args]
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return REGISTERED[name](*args, **keywords)  # type: ignore[arg-type]  # None for `**x`.
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"The rules {text!r} contain {ast.unparse(node)!r}: {error}. Pass literals for the "
            "parameters of the rule."
        ) from error
