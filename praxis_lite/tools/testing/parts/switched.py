"""The same numbers however a model computes them: settings of models of others, switched."""

from collections.abc import Iterator

from praxis_lite.run.config.build import build
from praxis_lite.tools.testing import tolerances
from praxis_lite.tools.testing.certificate import Comparison
from praxis_lite.tools.testing.check import Check
from praxis_lite.tools.testing.parts import data
from praxis_lite.tools.testing.runs.how_settings import HowSetting, how_settings, switched
from praxis_lite.tools.testing.runs.on_mesh import Leaves, OnMesh, reporting
from praxis_lite.tools.testing.runs.states import restacked, stacked_like


def settings_switched(check: Check, one: OnMesh) -> Iterator[list[Comparison]]:
    """A step, an evaluation and decoding with each such setting switched, against a device."""
    for setting in how_settings(check.config):
        refusals = []
        for value in setting.others:
            try:
                found = _with_value(check, setting, value)
            except Exception as error:  # A model of others refuses a value as it likes.
                refusals.append(f"{value!r}: {str(error).splitlines()[0][:200] or type(error)}")
                continue
            if found is None:
                refusals.append(f"{value!r}: its weights have other names")
                continue
            yield from _compared(check, one, f"{setting.name} {value!r}", found)
            break
        else:
            why = "; ".join(refusals) or "no other value of it is known"
            check.remark(f"{setting.name} = {setting.value!r}: not switched ({why}).")


def _with_value(check: Check, setting: HowSetting, value: object) -> dict[str, Leaves] | None:
    """Returns the results with another value, by kind; None if it has other weights."""
    task = reporting(build(switched(check.config, setting, value)).task)
    other = check.on_mesh(check.own_shape, None, task)
    state, batch = restacked(check.state, other), check.batches[0]
    if state is None:
        return None
    (report,), _, _ = other.train(
        state, [batch], check.seed, without_randomness=check.is_random
    )
    found = {"training": report, "evaluation": other.evaluate(state.mdl_vars, batch)}
    for name, prompts in _prompts(check).items():
        found[name] = other.decode(state.mdl_vars, prompts)
    return found


def _compared(
    check: Check, one: OnMesh, what: str, found: dict[str, Leaves]
) -> Iterator[list[Comparison]]:
    reference, batch, plain = check.reference_of(one), check.batches[0], check.plain_one
    wanted, _ = check.train_once(reference, batch)
    moved, _ = check.train_once(reference, batch, nudged=True)
    report = stacked_like(wanted, found["training"])
    yield tolerances.of(what, tolerances.by_kind(one.name, wanted, report, moved, 0))
    mdl_vars, nudged = check.state.mdl_vars, check.nudged.mdl_vars
    yield tolerances.in_float64(
        one.name, f"evaluation, {what}", reference.evaluate(mdl_vars, batch), found["evaluation"],
        reference.evaluate(nudged, batch),
    )
    for name, prompts in _prompts(check).items():
        yield tolerances.in_float64(
            one.name, f"decoding, {what}", plain.decode(mdl_vars, prompts), found[name],
            plain.decode(nudged, prompts),
        )


def _prompts(check: Check) -> dict[str, dict]:
    return {
        f"decoding {name}": check.known(data.first_batches(pipeline, 1)[0])
        for name, pipeline in check.job.decode_datasets.items()
    }
