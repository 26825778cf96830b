"""TrainedModel: the weights of a job's checkpoint, with evaluation, prediction and generation."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import fiddle as fdl
import jax
import numpy as np

from praxis_lite.checkpoints.steps.verified_steps import Step
from praxis_lite.config.build import build, naming_settings
from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.core.sharding.mesh_config import MeshConfig
from praxis_lite.decode.decoder import Decoder
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.inputs.pipeline_checks import checked_spec
from praxis_lite.inputs.text.token_ids import checked_int
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trained_model.generation import changed_decoder
from praxis_lite.trained_model.shown_model import html_of, text_of
from praxis_lite.trainer.checks.datasets import check_reads
from praxis_lite.trainer.checks.job_checks import check_decoder
from praxis_lite.trainer.decoding.prompt_decoder import PromptDecoder
from praxis_lite.trainer.decoding.user_prompts import Prompts, prompt_batch
from praxis_lite.trainer.evaluation import Batch, Evaluator, in_memory
from praxis_lite.trainer.forward_pass import check_call, forward_pass
from praxis_lite.trainer.job_on_mesh import partitioner_of
from praxis_lite.trainer.layout_table import mesh_text
from praxis_lite.trainer.metrics.columns import columns_by_dataset, columns_in
from praxis_lite.trainer.metrics.json_lines import read_json_lines
from praxis_lite.trainer.restored_weights import restored_weights

Record = dict[str, Any]


class TrainedModel:
    """The weights of a job's checkpoint on a mesh, with methods that call the job's task.

    `praxis_lite.train` returns a model whose weights are restored on first use; `load` restores
    them immediately. Each method compiles once per combination of array shapes. For decoding, the
    weights of stacked layers are copied once per format that a decoder requires, and the copies are
    cached. Notebooks display the loss curve and the last metrics. A pickled model refers to the
    checkpoint instead of containing the weights. An unpickled model restores the weights on first
    use, on a mesh of the same shape.

    Attributes:
      step: Step of the checkpoint.
      experiment: Full name of the experiment class.
      job: The job built from its config, with the mesh in use.
      partitioner: Partitioner of the job's task on the mesh.
      job_dir: Job directory, a `pathlib.Path`.
      stopped_by: The time limit that stopped training, or the reason given by early stopping or by
        a hook. None if training reached its last step, and for loaded models.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        job: Job,
        config: fdl.Config,
        job_dir: JobDir,
        step: Step,
        *,
        experiment: str = "",
        stopped_by: str | None = None,
    ):
        self.partitioner, self.job = partitioner, job
        self.step: Step = step
        self.experiment, self.stopped_by = experiment, stopped_by
        self.job_dir, self._files, self._config = job_dir.path, job_dir, config
        # Caches: partitioners by decoder, weights by use_ema, and weights for decoding by (use_ema,
        # format).
        self._with_decoder: dict[Decoder, Partitioner] = {}
        self._restored: dict[bool, Any] = {}
        self._for_decoding: dict[tuple[bool, str], Any] = {}

    def __reduce__(self) -> tuple[Callable[..., "TrainedModel"], tuple[Any, ...]]:
        return _unpickled, (
            self._config,
            self.job.mesh,
            self._files,
            self.step,
            self.experiment,
            self.stopped_by,
        )

    def __repr__(self) -> str:
        mesh = mesh_text(self.partitioner.mesh.shape)
        numbers = text_of(self.metrics, self.evaluations)
        return f"TrainedModel({self.experiment}, step {self.step}{numbers}; {mesh}; {self.job_dir})"

    def _repr_html_(self) -> str:
        title = f"{self.experiment}, step {self.step}"
        return html_of(title, str(self.job_dir), self.metrics, self.evaluations)

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """Columns of metrics.jsonl, keyed by name, as float64[num_steps]; "step" is int64.

        Missing values are NaN. The file is read on each access. Use
        `pandas.DataFrame(model.metrics)` to get a table.
        """
        return columns_in(self._files.metrics_jsonl)

    @property
    def evaluations(self) -> dict[str, dict[str, np.ndarray]]:
        """Columns of eval_metrics.jsonl, keyed by dataset, then by name as in `metrics`."""
        return columns_by_dataset(read_json_lines(self._files.eval_metrics_jsonl))

    @property
    def mdl_vars(self) -> Any:
        """The weights on the mesh, padded and sharded as the compiled steps expect them.

        If run.evaluation.use_ema_states is set, these are the moving averages of the weights.
        """
        return self.mdl_vars_with(use_ema=self.job.run.evaluation.use_ema_states)

    def mdl_vars_with(self, *, use_ema: bool) -> Any:
        """Returns `mdl_vars` with the trained weights or their moving averages."""
        if use_ema not in self._restored:
            self.step, self._restored[use_ema] = restored_weights(
                self.partitioner, self._files, self.step, use_ema
            )
        return self._restored[use_ema]

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """Unpadded NumPy arrays of all weights, keyed by path such as "params/softmax/..."."""
        leaves = self.partitioner.layout.select("mdl_vars").leaves()
        return {
            leaf.path: np.asarray(x)[tuple(map(slice, leaf.shape))]
            for leaf, x in zip(leaves, jax.tree.leaves(self.mdl_vars), strict=True)
        }

    def predict(self, *arrays: Any, **named: Any) -> Any:
        """Calls the model without dropout, and returns its outputs as NumPy arrays.

        `predict(images)` computes `model(images)`. For a model of plain functions, `predict(batch)`
        computes the task's `predict(params, batch, None)`.

        Args:
          *arrays: NumPy arrays, or trees of arrays, whose first dim is the batch. Other values,
            such as flags, are passed unchanged.
          **named: Keyword arguments, treated in the same way.

        Returns:
          An array, or the structure of arrays that the model returns. The type is Any, because the
          model determines the structure.

        Raises:
          ConfigError: No argument is an array, arrays have different numbers of rows, a layer
            rejects them, or an id or position is out of range.
        """
        with self._naming_settings():
            check_call(self.partitioner.task, arrays, named)
            return self._forward(self.mdl_vars, *arrays, **named)

    def evaluate(self, data: str | InputPipeline | Batch | Iterable[Batch]) -> dict[str, float]:
        """Evaluates the task's metrics.

        Args:
          data: Name of a dataset in the job, an input pipeline, or one or more batches. As in
            `praxis eval`, at most run.evaluation.max_batches batches of a dataset or pipeline are
            read. Batches are dicts of NumPy arrays with any number of rows. If "weights" is
            missing, every row or label has weight 1.

        Returns:
          The weighted mean of each metric over all batches, keyed by metric name.

        Raises:
          ConfigError: The job has no such dataset, the dataset is endless, or the batches lack an
            input of the task.
        """
        run, limit = self.job.run, self.job.run.evaluation.max_batches
        with self._naming_settings():
            if not isinstance(data, str | InputPipeline):
                data, limit = in_memory(data), None
            name, pipeline = self._pipeline("datasets", data)
            check_reads(self.partitioner.eval_step, checked_spec(pipeline, name), name)
            if pipeline.num_batches is None and limit is None:
                raise ConfigError(
                    f"{name} cannot be evaluated completely, because it is endless. Load the job "
                    "with settings=['run.evaluation.max_batches=NUMBER'], or pass batches."
                )
            evaluator = Evaluator(self.partitioner, {name: pipeline}, limit, seed=run.seed)
            # Restoring the weights also sets `step`.
            mdl_vars = self.mdl_vars
            metrics = evaluator.run(self._restored_step(), mdl_vars)
        assert metrics is not None, "Only `should_stop` ends an evaluation early."
        return metrics[name]

    def _naming_settings(self) -> contextlib.AbstractContextManager:
        """Returns a context in which error messages mention the settings that caused them."""
        return naming_settings(self._config, self._files.config_json)

    def _restored_step(self) -> int:
        assert isinstance(self.step, int), "`mdl_vars_with` has set the number."
        return self.step

    def decode(
        self,
        data: str | InputPipeline,
        *,
        decoder: Decoder | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> list[Record]:
        """Decodes a dataset.

        Args:
          data: Name of a decode dataset in the job, or an input pipeline with the inputs that the
            task decodes.
          decoder: The decoder, or None for the job's decoder.
          seed: Seed for sampling, or None for the seed of the run.
          **settings: Settings of the decoder to change, such as temperature=0.7.

        Returns:
          A record per row, as written by `praxis decode`.

        Raises:
          ConfigError: The task cannot decode, the job has no such dataset, or the decoder has no
            such setting.
        """
        with self._naming_settings():
            return self._decoded(data, self._decoding(decoder, settings), seed)

    def _decoded(
        self, data: str | InputPipeline, partitioner: Partitioner, seed: int | None
    ) -> list[Record]:
        name, pipeline = self._pipeline("decode_datasets", data)
        check_reads(partitioner.decode_step, checked_spec(pipeline, name), name)
        run = self.job.run
        mdl_vars = self._mdl_vars_for(partitioner, run.decode_use_ema_states)
        seed = run.seed if seed is None else checked_int(seed, "seed", 0, 2**32 - 1)
        step = self._restored_step()
        return PromptDecoder(partitioner, mdl_vars, step, seed).records(name, pipeline)

    def generate(
        self,
        prompts: Prompts,
        *,
        decoder: Decoder | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> list[Record]:
        """Continues prompts with a language model, as in `generate("The ", temperature=0.7)`.

        Args:
          prompts: One or more strings, conversations or lists of token ids. Strings start like
            documents in training, with the beginning-of-sequence token or, if there is none, the
            end-of-sequence token. Conversations are lists of {"role", "content"}, or dicts
            {"messages", "tools", ...}; the chat template of the tokenizer formats them. Token ids
            are used unchanged.
          decoder: The decoder, or None for the job's decoder.
          seed: Seed for sampling, or None for the seed of the run.
          **settings: Settings of the decoder to change.

        Returns:
          A record per prompt and hypothesis, with the keys of `praxis decode`: "prompt",
          "continuation", "output_ids", "log_prob" and others.

        Raises:
          ConfigError: The task does not continue prompts, a prompt is empty, or the decoder has no
            such setting.
        """
        with self._naming_settings():
            partitioner = self._decoding(decoder, settings)
            return self._decoded(prompt_batch(partitioner.task, prompts), partitioner, seed)

    def _mdl_vars_for(self, decoding: Partitioner, use_ema: bool) -> Any:
        """Returns the weights in the format that a decoder needs, cached per format."""
        key = use_ema, str(getattr(decoding.task.decoder, "weights_form", None))
        if key not in self._for_decoding:
            mdl_vars = self.mdl_vars_with(use_ema=use_ema)
            self._for_decoding[key] = decoding.for_decoding(mdl_vars)
        return self._for_decoding[key]

    def _pipeline(self, root: str, data: str | InputPipeline) -> tuple[str, InputPipeline]:
        """Returns a name for error messages, and the checked pipeline."""
        if isinstance(data, str):
            known = getattr(self.job, root)
            if data not in known:
                raise ConfigError(
                    f"The job's {root} are {sorted(known)}; there is no {data!r}."
                    f"{did_you_mean(data, known)} Choose one of them, or pass a pipeline."
                )
            name, pipeline = f"{root}.{data}", known[data]
        else:
            name, pipeline = type(data).__name__, data
        pipeline.check()
        return name, pipeline

    def _decoding(self, decoder: Decoder | None, settings: Mapping[str, Any]) -> Partitioner:
        """Returns a partitioner for the given decoder, or the job's partitioner."""
        if decoder is None and not settings:
            check_decoder(self.partitioner.task)
            return self.partitioner
        config = self._config.task
        changed = changed_decoder(self.partitioner.task, config, decoder, settings)
        if changed not in self._with_decoder:
            task = fdl.build(fdl.copy_with(config, decoder=changed))
            check_decoder(task)
            make = self.job.partitioner or Partitioner
            self._with_decoder[changed] = make(task, self.partitioner.mesh)
        return self._with_decoder[changed]

    @functools.cached_property
    def _forward(self) -> Callable[..., Any]:
        return forward_pass(self.partitioner)


def _unpickled(
    config: fdl.Config,
    mesh: MeshConfig,
    job_dir: JobDir,
    step: int,
    experiment: str,
    stopped_by: str | None,
) -> TrainedModel:
    """Returns the model that `TrainedModel.__reduce__` describes."""
    with naming_settings(config, job_dir.config_json):
        job = dataclasses.replace(build(config), mesh=mesh)
        partitioner = partitioner_of(job, "load")
    return TrainedModel(
        partitioner, job, config, job_dir, step, experiment=experiment, stopped_by=stopped_by
    )
