"""The arrays in a folder that another program wrote with Orbax, checked as those of a step are.

The folder is one OCDBT database, or has a folder of plain files for each array. There is no
manifest: what an array is, its own metadata says, and an array that was exchanged for another one
of its shape is not noticed.
"""

from pathlib import Path
from typing import Any

from praxis_lite.core.errors import ConfigError
from praxis_lite.files.open_folder import OpenFolder
from praxis_lite.run.checkpoints.files.ocdbt import (
    DATABASE,
    StoredValue,
    kvstore_spec,
    reading_context,
    stored_values,
)
from praxis_lite.run.checkpoints.files.origin import Origin
from praxis_lite.run.checkpoints.files.step_names import regular_files
from praxis_lite.run.checkpoints.files.stored_arrays import StoredArray
from praxis_lite.run.checkpoints.files.untrusted_json import is_shape, loads
from praxis_lite.run.checkpoints.files.zarr_checks import (
    ZARR_NAMES,
    check_arrays,
    check_leaf,
    np_dtype,
)


def foreign_arrays(folder: Path, origin: Origin, prefix: str = "") -> dict[str, StoredArray]:
    """Returns the arrays whose names begin with `prefix`, by path without it; decodes none.

    Raises:
      ConfigError: something in the folder is no regular file, or what is stored is not as Orbax
        writes it; for `Origin.refusing`.
    """
    files = list(regular_files(folder))
    is_database = DATABASE in files
    if is_database:
        values = stored_values(folder)
    else:
        names = [name for name in files if name.startswith(prefix)]
        values = {x: StoredValue(None, x, 0, (folder / x).lstat().st_size) for x in names}
    values = {key: value for key, value in values.items() if key.startswith(prefix)}
    if any(key.endswith("zarr.json") for key in values):
        raise ConfigError("it is in Zarr 3, and Zarr 2, Orbax's default, is what is read")
    leaves, arrays, context, opened = {}, {}, reading_context(), OpenFolder(folder)
    for key, value in values.items():
        name, _, file = key.rpartition("/")
        if file == ".zarray":
            leaves[name] = _stored_leaf(name, value.read(folder, 2**16))
    check_arrays(folder, leaves, values)
    for name, leaf in leaves.items():
        path, shape = name.removeprefix(prefix).replace(".", "/"), tuple(leaf["shape"])
        check_leaf(f"mdl_vars/{path}", leaf)
        kvstore = kvstore_spec(opened.path, f"{name}/", is_database=is_database)
        arrays[path] = StoredArray(
            path, shape, shape, np_dtype(leaf["dtype"]), kvstore, context, origin, opened
        )
    return arrays


def _stored_leaf(name: str, text: bytes) -> dict[str, Any]:
    """Returns the entry of a manifest that an array's own metadata amounts to: nothing is padded.

    Args:
      text: of its `.zarray`.

    Raises:
      ConfigError: its shape or its dtype is not one that is read.
    """
    zarray = loads(text, f"{name}/.zarray")
    zarray = zarray if isinstance(zarray, dict) else {}
    shape, dtype = zarray.get("shape"), zarray.get("dtype")
    dtypes = [ours for ours, theirs in ZARR_NAMES.items() if theirs == dtype]
    if not is_shape(shape) or not dtypes:
        raise ConfigError(f"{name} has the shape {shape!a:.80} and the dtype {dtype!a:.80}")
    return {"shape": shape, "padded_shape": shape, "dtype": dtypes[0]}
