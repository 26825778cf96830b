"""Formats a plan as text: predicted time, memory, and a table of collectives."""

from collections.abc import Sequence

from praxis_lite.core.errors import format_bytes
from praxis_lite.host.text_table import table_lines
from praxis_tools.plan.decoding import Decoding
from praxis_tools.plan.schedule.timeline import Timeline, Transfer
from praxis_tools.plan.step_plan import PredictedStepPlan, StepPlan

_MAX_LAYERS = 12  # Maximum number of layers listed in the table for each kind of collective.


def seconds_text(seconds: float) -> str:
    """Formats a duration, for example '12.9 s', '47.3 ms' or '310 us'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds * 1e6:.0f} us"


def figures(plan: StepPlan) -> list[tuple[str, str]]:
    """Returns the planned time and memory of a step as (name, value) pairs."""
    share = plan.peak_bytes_per_device / plan.hbm_bytes_per_device
    room = plan.hbm_bytes_per_device - plan.peak_bytes_per_device
    spare = f"{format_bytes(room)} to spare" if room >= 0 else f"{format_bytes(-room)} too much"
    pairs = [
        (
            "fits",
            f"{'yes' if plan.fits else 'NO'}: {format_bytes(plan.peak_bytes_per_device)} of "
            f"{format_bytes(plan.hbm_bytes_per_device)} ({share:.0%}), {spare}",
        ),
    ]
    if isinstance(plan, PredictedStepPlan):
        flops = max(plan.flops_per_device, 1)
        # Simulated devices share this machine's cores, so speeds per device would be meaningless.
        if plan.topology.startswith("cpu"):
            speed = ", if each simulated device had a nominal core to itself"
        else:
            low, high = seconds_text(plan.step_seconds_low), seconds_text(plan.step_seconds_high)
            speed = (
                f" ({low} to {high}), {plan.tokens_per_second:,.0f} {plan.unit} per second and "
                f"device, MFU {plan.mfu:.1%}, HFU {plan.hfu:.1%}"
            )
        name = "step" if plan.decoding is None else "token"
        pairs.append((name, f"{seconds_text(plan.step_seconds)}{speed}"))
        if plan.correction is not None:
            corrected = seconds_text(plan.correction.seconds)
            pairs.append(("corrected", f"{corrected}: {plan.correction}"))
        pairs += [
            (
                "time",
                f"{seconds_text(plan.compute_seconds)} in matmuls, "
                f"{seconds_text(plan.memory_seconds)} in other work and "
                f"{seconds_text(plan.exposed_seconds)} waiting for collectives, out of "
                f"{seconds_text(plan.network_seconds)} in collectives",
            ),
            (
                "matmuls",
                f"{plan.flops_per_device:.4g} flops per device, "
                f"of which remat recomputes {plan.recomputed_flops / flops:.0%}",
            ),
        ]
        uneven_seconds = plan.uneven_seconds
        if plan.expert_round_seconds is not None and uneven_seconds is not None:
            rounds = f"{plan.num_expert_rounds} round{'s' if plan.num_expert_rounds > 1 else ''}"
            pairs.append(
                (
                    "experts",
                    f"{seconds_text(plan.step_seconds)} assumes even loads, in one round "
                    f"of {seconds_text(plan.expert_round_seconds)}; a load of {plan.expert_load:g} "
                    f"times the even load takes {rounds}, at most "
                    f"{seconds_text(uneven_seconds)}",
                )
            )
        if plan.host_bytes:
            pairs.append(
                (
                    "host",
                    f"{format_bytes(plan.host_bytes)} per device to and from host memory in "
                    f"{seconds_text(plan.host_seconds)}; the device waits "
                    f"{seconds_text(plan.host_exposed_seconds)} for it",
                )
            )
    if plan.decoding is not None:
        pairs += _decoding_figures(plan.decoding)
    if plan.bubble_share is not None:
        pairs.append(
            ("pipeline", f"stages are idle in {plan.bubble_share:.1%} of the ticks (bubbles)")
        )
    pairs += [("compiled", f"in {plan.compile_seconds:.0f} s")]
    return pairs


def _decoding_figures(decoding: Decoding) -> list[tuple[str, str]]:
    pairs = [
        (
            "first",
            f"token of {decoding.rows:,} rows after "
            f"{seconds_text(decoding.first_token_seconds)}, from prompts of "
            f"{decoding.prompt_length:,} tokens; then {decoding.tokens_per_second:,.0f} tokens per "
            "second on all devices",
        ),
    ]
    weights, cache = decoding.weight_bytes, decoding.cache_bytes
    if weights is not None and cache is not None and decoding.limit_seconds is not None:
        pairs.append(
            (
                "limit",
                f"{seconds_text(decoding.limit_seconds)} to read "
                f"{format_bytes(weights)} of weights and "
                f"{format_bytes(cache)} of cache on each device, "
                f"{decoding.share_of_limit:.0%} of the time per token",
            )
        )
    return pairs


def decoding_table(plans: Sequence[StepPlan]) -> str:
    """Returns a text table that compares decoding plans, with one line per batch size."""
    rows: list[Sequence[str]] = [
        ("batch", "token", "limit", "share", "tokens/s", "per device", "first token", "GiB", "fits")
    ]
    for plan in plans:
        decoding, gib = plan.decoding, f"{plan.peak_bytes_per_device / 2**30:.2f}"
        fits = "yes" if plan.fits else "NO"
        if decoding is None or not isinstance(plan, PredictedStepPlan):  # It did not compile.
            rows.append((*"-" * 7, gib, fits))
            continue
        limit = decoding.limit_seconds
        rows.append(
            (
                f"{decoding.batch_size:,}",
                seconds_text(plan.step_seconds),
                "-" if limit is None else seconds_text(limit),
                "-" if limit is None else f"{decoding.share_of_limit:.0%}",
                f"{decoding.tokens_per_second:,.0f}",
                f"{plan.tokens_per_second:,.0f}",
                seconds_text(decoding.first_token_seconds),
                gib,
                fits,
            )
        )
    return "\n".join(table_lines(rows, right=range(8)))


def plan_text(plan: StepPlan) -> str:
    """Formats the plan of a step: time, memory, collectives and notes."""
    lines = [f"{name:<10}{value}" for name, value in figures(plan)]
    if plan.memory is not None:
        lines += ["", "memory per device", plan.memory.table()]
    if plan.timeline is not None:
        lines += ["", _transfers_table(plan.timeline)]
    lines += [f"note: {note}" for note in plan.notes]
    if plan.why_not:
        lines.append(f"It does not fit. {plan.why_not}")
    return "\n".join(lines)


def _transfers_table(timeline: Timeline) -> str:
    """Returns a table of collectives and host copies, with the slowest layers of each kind."""
    transfers = [*timeline.collectives.values(), *timeline.host_copies.values()]
    if not transfers:
        return "no collectives"
    rows: list[Sequence[str]] = [("collective", "axes", "count", "sent", "on the wire", "exposed")]
    groups: dict[tuple[str, tuple[str, ...]], list[Transfer]] = {}
    for transfer in transfers:
        groups.setdefault((transfer.kind, transfer.axes), []).append(transfer)
    slowest_groups = sorted(groups.items(), key=lambda item: -sum(x.seconds for x in item[1]))
    for (kind, axes), group in slowest_groups:
        axes_text = "+".join(axes) or "-"
        if any(transfer.crosses for transfer in group):
            axes_text += " (between slices)"
        rows.append((kind, axes_text, *_cells(group)))
        slowest_layers = sorted(group, key=lambda transfer: -transfer.seconds)
        rows += [(f"  {x.layer}", "", *_cells([x])) for x in slowest_layers[:_MAX_LAYERS]]
        if remaining := slowest_layers[_MAX_LAYERS:]:
            rows.append((f"  {len(remaining)} more layers", "", *_cells(remaining)))
    return "\n".join(table_lines(rows, right=range(2, len(rows[0]))))


def _cells(group: Sequence[Transfer]) -> tuple[str, str, str, str]:
    return (
        f"{sum(x.count for x in group):,}",
        format_bytes(int(sum(x.wire_bytes for x in group))),
        seconds_text(sum(x.seconds for x in group)),
        seconds_text(sum(x.exposed_seconds for x in group)),
    )
