"""What a job would do, without doing it: the layout, and each compiled step's collectives."""

from collections.abc import Callable, Mapping

from praxis_lite import hlo
from praxis_lite.inputs import InputPipeline
from praxis_lite.job_checks import TRAIN
from praxis_lite.layout_table import layout_table, layout_warnings
from praxis_lite.partitioner import Partitioner


def explain(
    partitioner: Partitioner,
    datasets: Mapping[str, InputPipeline],
    decode_datasets: Mapping[str, InputPipeline],
    print_text: Callable[[str], None],
) -> None:
    """Prints the table of layout.txt, warnings, and per step its collectives and memory."""
    print_text(layout_table(partitioner.layout))
    for warning in layout_warnings(partitioner.layout):
        print_text(f"WARNING: {warning}")
    steps = [("train" if name == TRAIN else "eval", name, one) for name, one in datasets.items()]
    steps += [("decode", name, pipeline) for name, pipeline in decode_datasets.items()]
    for step, name, pipeline in steps:
        compiled = partitioner.lower(step, pipeline.element_spec()).compile()
        print_text(f"\n{step}_step, batches of {name}")
        print_text(_indented(hlo.collectives_table(hlo.collectives(compiled))))
        memory = hlo.memory_per_device(compiled)
        if memory is not None:
            print_text(
                f"  memory per device: arguments {hlo.format_bytes(memory.arguments)}, outputs "
                f"{hlo.format_bytes(memory.outputs)}, temporary {hlo.format_bytes(memory.temp)}"
            )
        print_text(
            f"  donated per device: {hlo.format_bytes(hlo.donated_bytes(compiled))} in "
            f"{hlo.num_donated(compiled)} buffers"
        )
        print_text(f"  matmul flops per device: {hlo.flops(compiled):,}")


def _indented(text: str) -> str:
    return "\n".join("  " + line for line in text.splitlines())
