"""The arrays of a job's state, as layout.txt lists them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LayoutArray:
    """A line of layout.txt.

    Attributes:
      shape: its padded shape, if it has any padding: "[4, 148, 436]".
      spec: such as "(-, data, mdl)".
      num_bytes: on each device.
    """

    path: str
    shape: str
    dtype: str
    spec: str
    num_bytes: int


def layout_arrays(text: str) -> tuple[list[LayoutArray], str]:
    """Returns the arrays, and the sentence about their sum; none and "" if it is no layout.txt."""
    header, *lines = text.splitlines() or [""]
    names = ("shape", "padded", "dtype", "spec", "bytes/device")
    starts = [header.find(name) for name in names]
    if not header.startswith("path") or -1 in starts:
        return [], ""
    shape, padded, dtype, spec, size = starts
    size_end = size + len(names[-1])
    arrays, totals = [], ""
    for line in lines:
        *words, number = line[spec:size_end].split() or [""]
        number = number.replace(",", "")
        if number.isdecimal() and line[:shape].strip():
            arrays.append(LayoutArray(
                line[:shape].strip(), line[padded:dtype].strip() or line[shape:padded].strip(),
                line[dtype:spec].strip(), " ".join(words), int(number),
            ))
        elif "Each device of the mesh" in line:
            totals = line
    return arrays, totals
