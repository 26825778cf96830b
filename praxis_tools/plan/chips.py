"""Peak rates and memory sizes of chips, from public sources. All sizes are in bytes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class CudaTarget:
    """Description of a GPU for which XLA can compile without an attached GPU.

    Attributes:
      capability: CUDA compute capability.
      cores: Number of streaming multiprocessors.
      fpus: Number of float32 units per multiprocessor.
      shared: Bytes of shared memory per multiprocessor.
      shared_of_block: Maximum bytes of shared memory that one block can use.
      l2: Size of the L2 cache in bytes.
      clock: Clock rate in GHz.
      memory: Device memory in bytes.
      description: Name of the device.
    """

    capability: tuple[int, int]
    cores: int
    fpus: int
    shared: int
    shared_of_block: int
    l2: int
    clock: float
    memory: int
    description: str

    def text(self, bandwidth: float) -> str:
        """Returns XLA's GpuTargetConfigProto in text format."""
        major, minor = self.capability
        return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared}
  shared_memory_per_block_optin: {self.shared_of_block}
  core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {int(bandwidth)} l2_cache_size: {self.l2} device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{self.description}"
"""


# Maps an element type to the type to which the matmul units convert it.
_UNITS = {
    "s4": "s8",
    "u4": "s8",
    "u8": "s8",
    "f8e5m2": "f8e4m3fn",
    "f8e4m3": "f8e4m3fn",
    "f8e3m4": "f8e4m3fn",
}
_NARROW = {"s8": "int8", "f8e4m3fn": "float8"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Properties of a JAX device: a chip, or one of the two cores of a TPU7x chip.

    Attributes:
      name: Name in topologies, such as "v5e" in "v5e:16x16".
      flops: Peak flops per second of matmuls, keyed by element type.
      hbm_bytes: Memory available to programs, excluding memory reserved by the runtime.
      hbm_bandwidth: Memory bandwidth in bytes per second.
      link_bandwidth: Bandwidth of one link in one direction, in bytes per second. Each torus dim
        has two links. If `torus_dims` is 0, this is the bandwidth from a device to all other
        devices in its node.
      network_bandwidth: Bandwidth from a device to other slices or nodes (DCN), in bytes per
        second.
      host_bandwidth: Bandwidth between a device and its host (PCIe) in each direction, in bytes
        per second.
      sources: Sources of these figures.
      clock: Clock rate of the matmul units in Hz, used to convert the compiler's cycles to seconds;
        None if the compiler does not estimate cycles.
      mxu: Number of rows and columns of a matmul unit (systolic array); None if unknown.
      torus_dims: Number of torus dims of the interconnect within a slice (ICI); 0 if every pair of
        devices in a node is connected (NVLink).
      wraps_at: A torus dim has wraparound links if its size is a multiple of this number; see
        `wraps`.
      cuda: Compilation target of a GPU.
    """

    name: str
    flops: Mapping[str, float]
    hbm_bytes: int
    hbm_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    host_bandwidth: float
    sources: tuple[str, ...]
    clock: float | None = None
    mxu: int | None = None
    torus_dims: int = 0
    wraps_at: int = 1
    cuda: CudaTarget | None = None

    def mxu_utilization(self, dims: int) -> float:
        """Returns the utilization of a matmul unit for a matmul with a dim of this size."""
        return 1.0 if self.mxu is None else dims / (math.ceil(dims / self.mxu) * self.mxu)

    def peak(self, dtype: str = "bf16") -> float:
        """Returns the peak flops per second of matmuls with this element type.

        4-bit integers are multiplied as int8, and all float8 types have the same peak. Types that
        the chip's matmul units do not support are multiplied in bfloat16.

        Args:
          dtype: XLA's name for an element type.
        """
        return self.flops.get(_UNITS.get(dtype, dtype), self.flops["bf16"])

    def narrow_type_notes(self, flops: Mapping[str, int]) -> list[str]:
        """Returns notes on the share of int8 and float8 matmuls and on their peak rates.

        Args:
          flops: Matmul flops of a program, keyed by element type.
        """
        total, bf16, notes = sum(flops.values()), self.peak(), []
        for unit, name in _NARROW.items():
            count = sum(n for dtype, n in flops.items() if _UNITS.get(dtype, dtype) == unit)
            if count:
                peak, share = self.peak(unit), f"{count / total:.0%} of the matmul flops"
                notes.append(
                    f"{share} are in {name}, with a peak of {peak / 1e12:,.4g} TFLOP/s; MFU and "
                    f"HFU are relative to the peak of bfloat16, {bf16 / 1e12:,.4g} TFLOP/s"
                    if peak > bf16
                    else f"{share} are in {name}, which is not faster than bfloat16 on {self.name} "
                    f"({bf16 / 1e12:,.4g} TFLOP/s)"
                )
        return notes

    def wraps(self, dims: Sequence[int]) -> tuple[bool, ...]:
        """Returns whether each torus dim of a slice has wraparound links.

        In a 3-D torus, either all dims of a slice have wraparound links or none do, because a slice
        either consists of full 4 x 4 x 4 cubes connected by optical switches, or is part of one
        cube. In a 2-D torus, a dim has wraparound links if it spans the pod.

        Args:
          dims: Size of each torus dim of the slice, in chips.
        """
        is_multiple = tuple(size % self.wraps_at == 0 for size in dims)
        return is_multiple if self.torus_dims == 2 else (all(is_multiple),) * len(is_multiple)


def _hopper(memory: int, description: str) -> CudaTarget:
    return CudaTarget(
        capability=(9, 0),
        cores=132,
        fpus=128,
        shared=233_472,
        shared_of_block=232_448,
        l2=52_428_800,
        clock=1.98,
        memory=memory,
        description=description,
    )


_CLOUD = "https://docs.cloud.google.com/tpu/docs/"
_BOOK = "https://jax-ml.github.io/scaling-book/tpus/ (links, to other slices, and to the host)"
# How the figures were derived:
# - mxu: from the v6e page ("two 256x256 matrix-multiply units"), and for other chips from
#   docs/system-architecture-tpu-vm ("256 x 256 (TPU v6e and TPU7x) or 128 x 128").
# - link_bandwidth: 0.9 of the vendor's figure for the chip's interconnect, divided by the number of
#   links and directions.
# - hbm_bytes: available memory, as reported by libtpu 0.0.51 when a program does not fit.
# - clock: peak / (matmul units x 2 x their size); this reproduces the compiler's cycles.
CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            flops={"bf16": 275e12, "s8": 275e12},
            hbm_bytes=int(30.75 * _GIB),
            hbm_bandwidth=1228e9,
            clock=1.05e9,
            mxu=128,
            torus_dims=3,
            link_bandwidth=45e9,
            wraps_at=4,
            network_bandwidth=6.25e9,
            host_bandwidth=16e9,
            sources=(_CLOUD + "v4", _BOOK),
        ),
        Chip(
            name="v5e",
            flops={"bf16": 197e12, "s8": 394e12},
            hbm_bytes=int(15.75 * _GIB),
            hbm_bandwidth=819e9,
            clock=1.5e9,
            mxu=128,
            torus_dims=2,
            link_bandwidth=45e9,
            wraps_at=16,
            network_bandwidth=3.125e9,
            host_bandwidth=16e9,
            sources=(_CLOUD + "v5e", _BOOK),
        ),
        Chip(
            name="v5p",
            flops={"bf16": 459e12, "s8": 918e12},
            hbm_bytes=int(95.74 * _GIB),
            hbm_bandwidth=2765e9,
            clock=1.75e9,
            mxu=128,
            torus_dims=3,
            link_bandwidth=90e9,
            wraps_at=4,
            network_bandwidth=6.25e9,
            host_bandwidth=16e9,
            sources=(_CLOUD + "v5p", _BOOK),
        ),
        Chip(
            name="v6e",
            flops={"bf16": 918e12, "s8": 1836e12},
            hbm_bytes=int(31.25 * _GIB),
            hbm_bandwidth=1640e9,
            clock=1.75e9,
            mxu=256,
            torus_dims=2,
            link_bandwidth=90e9,
            wraps_at=16,
            network_bandwidth=12.5e9,
            host_bandwidth=32e9,
            sources=(_CLOUD + "v6e", _BOOK),
        ),
        Chip(
            name="tpu7x",
            flops={"bf16": 2307e12 / 2, "f8e4m3fn": 4614e12 / 2},
            hbm_bytes=int(94.74 * _GIB),
            hbm_bandwidth=7380e9 / 2,
            clock=2.2e9,
            mxu=256,
            torus_dims=3,
            link_bandwidth=45e9,
            wraps_at=4,
            network_bandwidth=6.25e9,
            host_bandwidth=32e9 / 2,
            sources=(_CLOUD + "tpu7x (per chip; halved)", _BOOK, "to the host: v6e's, halved"),
        ),
        Chip(
            name="a100",
            flops={"bf16": 312e12, "s8": 624e12},
            hbm_bytes=int(79 * _GIB),
            hbm_bandwidth=2039e9,
            link_bandwidth=300e9,
            network_bandwidth=25e9,
            host_bandwidth=32e9,
            sources=(
                "https://www.nvidia.com/en-us/data-center/a100/ (SXM 80GB; HDR 200 Gb/s; PCIe 4)",
            ),
            cuda=CudaTarget(
                capability=(8, 0),
                cores=108,
                fpus=64,
                shared=167_936,
                shared_of_block=166_912,
                l2=41_943_040,
                clock=1.41,
                memory=85 * 10**9,
                description="NVIDIA A100-SXM4-80GB",
            ),
        ),
        Chip(
            name="h100",
            flops={"bf16": 989e12, "s8": 1979e12, "f8e4m3fn": 1979e12},
            hbm_bytes=int(79 * _GIB),
            hbm_bandwidth=3350e9,
            link_bandwidth=450e9,
            network_bandwidth=50e9,
            host_bandwidth=64e9,
            sources=("https://www.nvidia.com/en-us/data-center/h100/ (SXM; NDR 400 Gb/s; PCIe 5)",),
            cuda=_hopper(85 * 10**9, "NVIDIA H100 80GB HBM3"),
        ),
        Chip(
            name="h200",
            flops={"bf16": 989e12, "s8": 1979e12, "f8e4m3fn": 1979e12},
            hbm_bytes=int(139 * _GIB),
            hbm_bandwidth=4800e9,
            link_bandwidth=450e9,
            network_bandwidth=50e9,
            host_bandwidth=64e9,
            sources=("https://www.nvidia.com/en-us/data-center/h200/ (SXM; NDR 400 Gb/s; PCIe 5)",),
            cuda=_hopper(150 * 10**9, "NVIDIA H200"),
        ),
        Chip(
            name="b200",
            flops={"bf16": 2250e12, "f8e4m3fn": 4500e12},
            hbm_bytes=int(178 * _GIB),
            hbm_bandwidth=8000e9,
            link_bandwidth=900e9,
            network_bandwidth=50e9,
            host_bandwidth=64e9,
            sources=("https://www.nvidia.com/en-us/data-center/dgx-b200/",),
            cuda=CudaTarget(
                capability=(10, 0),
                cores=148,
                fpus=128,
                shared=233_472,
                shared_of_block=232_448,
                l2=132_120_576,
                clock=1.965,
                memory=192 * 10**9,
                description="NVIDIA B200",
            ),
        ),
        # Orders of magnitude for one core of a server or laptop.
        Chip(
            name="cpu",
            flops={"bf16": 30e9},
            hbm_bytes=2 * _GIB,
            hbm_bandwidth=5e9,
            link_bandwidth=2e9,
            network_bandwidth=1e9,
            host_bandwidth=5e9,
            sources=("nominal: one core of a machine, and its share of the machine's memory",),
        ),
    )
}
