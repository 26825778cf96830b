"""A plan in words: the figures, and the collectives as a table."""

from collections.abc import Sequence

from praxis_lite.core.errors import format_bytes
from praxis_lite.run.text_table import table_lines
from praxis_lite.tools.plan.step_plan import StepPlan

MOST_COLLECTIVES = 12


def seconds_text(seconds: float) -> str:
    """Returns '12.9 s', '47.3 ms' or '310 us'."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds * 1e6:.0f} us"


def figures(plan: StepPlan) -> list[tuple[str, str]]:
    """Returns the figures of a plan of a step, as (name, value)."""
    share = plan.peak_bytes_per_device / plan.hbm_bytes_per_device
    room = plan.hbm_bytes_per_device - plan.peak_bytes_per_device
    spare = f"{format_bytes(room)} to spare" if room >= 0 else f"{format_bytes(-room)} too much"
    result = [
        ("fits", f"{'yes' if plan.fits else 'NO'}: {format_bytes(plan.peak_bytes_per_device)} of "
         f"{format_bytes(plan.hbm_bytes_per_device)} ({share:.0%}), {spare}"),
    ]
    if plan.step_seconds is not None:
        flops = max(plan.flops_per_device, 1)
        # Simulated devices share the cores that there are: a speed of one would mean nothing.
        speed = (
            ", if each simulated device were a nominal core of its own"
            if plan.topology.startswith("cpu") else
            f" ({seconds_text(plan.step_seconds_low)} to {seconds_text(plan.step_seconds_high)}), "
            f"{plan.tokens_per_second:,.0f} {plan.unit} per second and device, MFU {plan.mfu:.1%}, "
            f"HFU {plan.hfu:.1%}"
        )
        name = "step" if plan.decoding is None else "token"
        result.append((name, f"{seconds_text(plan.step_seconds)}{speed}"))
        if plan.correction is not None:
            corrected = seconds_text(plan.correction.seconds)
            result.append(("corrected", f"{corrected}: {plan.correction}"))
        result += [
            ("of it", f"{seconds_text(plan.compute_seconds)} in matmuls, "
             f"{seconds_text(plan.memory_seconds)} in other work, "
             f"{seconds_text(plan.exposed_seconds)} waiting for collectives, which take "
             f"{seconds_text(plan.network_seconds)} in all"),
            ("matmuls", f"{plan.flops_per_device:.4g} flops per device, "
             f"{plan.recomputed_flops / flops:.0%} of it computed again by remat"),
        ]
        if plan.expert_turn_seconds is not None:
            turns = f"{plan.expert_turns} turn{'s' if plan.expert_turns > 1 else ''}"
            result.append(
                ("experts", f"{seconds_text(plan.step_seconds)} is with even loads, in one turn of "
                 f"{seconds_text(plan.expert_turn_seconds)}; with a load of {plan.expert_load:g} "
                 f"times the even one {turns}, {seconds_text(plan.uneven_seconds)} at most")
            )
        if plan.host_bytes:
            result.append(
                ("host", f"{format_bytes(plan.host_bytes)} to and from its memory per device, "
                 f"{seconds_text(plan.host_seconds)} over the link, of which "
                 f"{seconds_text(plan.host_exposed_seconds)} is waited for")
            )
    result += _of_decoding(plan)
    if plan.bubble_share is not None:
        result.append(
            ("pipeline", f"its stages idle in {plan.bubble_share:.1%} of the ticks (bubbles)")
        )
    result += [("compiled", f"in {plan.compile_seconds:.0f} s")]
    return result


def _of_decoding(plan: StepPlan) -> list[tuple[str, str]]:
    item = plan.decoding
    if item is None:
        return []
    result = [
        ("first", f"token of {item.rows:,} rows after {seconds_text(item.first_token_seconds)}, "
         f"from prompts of {item.prompt_length:,} tokens; then {item.tokens_per_second:,.0f} "
         "tokens per second of all devices"),
    ]
    if item.limit_seconds is not None:
        result.append(
            ("limit", f"{seconds_text(item.limit_seconds)} to read "
             f"{format_bytes(item.weight_bytes)} of weights and {format_bytes(item.cache_bytes)} "
             f"of cache on each device, {item.share_of_limit:.0%} of the token's time")
        )
    return result


def decoding_table(plans: Sequence[StepPlan]) -> str:
    """Returns a line per plan of decoding: its batch, seconds, speed and share of the limit."""
    rows: list[Sequence[str]] = [
        ("batch", "token", "limit", "of it", "tokens/s", "per device", "first token", "GiB",
         "fits")
    ]
    for plan in plans:
        item, gib = plan.decoding, f"{plan.peak_bytes_per_device / 2**30:.2f}"
        fits = "yes" if plan.fits else "NO"
        if item is None:
            rows.append((*"-" * 7, gib, fits))
            continue
        has_limit = item.limit_seconds is not None
        rows.append((
            f"{item.batch_size:,}", seconds_text(plan.step_seconds),
            seconds_text(item.limit_seconds) if has_limit else "-",
            f"{item.share_of_limit:.0%}" if has_limit else "-",
            f"{item.tokens_per_second:,.0f}", f"{plan.tokens_per_second:,.0f}",
            seconds_text(item.first_token_seconds), gib, fits,
        ))
    return "\n".join(table_lines(rows, right=range(8)))


def plan_text(plan: StepPlan) -> str:
    """Returns a step's plan: figures, memory in parts, collectives, notes."""
    lines = [f"{name:<10}{value}" for name, value in figures(plan)]
    if plan.memory is not None:
        lines += ["", "memory per device", plan.memory.table()]
    if plan.timeline is not None:
        lines += ["", collectives_text(plan)]
    lines += [f"note: {note}" for note in plan.notes]
    if plan.why_not:
        lines.append(f"It does not fit. {plan.why_not}")
    return "\n".join(lines)


def collectives_text(plan: StepPlan) -> str:
    """Returns bytes and seconds of collectives, by kind and axes, and of the costliest layers.

    Copies to and from the host are among them.
    """
    result = [*plan.timeline.collectives.values(), *plan.timeline.host_copies.values()]
    if not result:
        return "no collectives"
    rows: list[Sequence[str]] = [("collective", "axes", "count", "sent", "on the wire", "exposed")]
    groups: dict[tuple[str, tuple[str, ...]], list] = {}
    for element in result:
        groups.setdefault((element.kind, element.axes), []).append(element)
    by_time = sorted(groups.items(), key=lambda item: -sum(one.seconds for one in item[1]))
    for (kind, axes), group in by_time:
        named = "+".join(axes) or "-"
        if any(one.crosses for one in group):
            named += " (between slices)"
        rows.append((kind, named, *_sums(group)))
        largest = sorted(group, key=lambda one: -one.seconds)
        rows += [(f"  {one.layer}", "", *_sums([one])) for one in largest[:MOST_COLLECTIVES]]
        if left := largest[MOST_COLLECTIVES:]:
            rows.append((f"  {len(left)} more layers", "", *_sums(left)))
    return "\n".join(table_lines(rows, right=range(2, len(rows[0]))))


def _sums(group: Sequence) -> tuple[str, str, str, str]:
    return (
        f"{sum(item.count for item in group):,}",
        format_bytes(int(sum(element.wire_bytes for element in group))),
        seconds_text(sum(one.seconds for one in group)),
        seconds_text(sum(one.exposed_seconds for one in group)),
    )
