"""A job's trained model, in Python: its weights, predictions, continuations and scores."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import fiddle as fdl
import jax
import numpy as np

from praxis_lite.config.build import naming_settings
from praxis_lite.core.errors import ConfigError, did_you_mean
from praxis_lite.core.partitioner.partitioner import Partitioner
from praxis_lite.decode.decoder import Decoder
from praxis_lite.experiment.experiment import Job
from praxis_lite.inputs.base import InputPipeline
from praxis_lite.inputs.batches import checked_spec
from praxis_lite.inputs.text.token_ids import whole_number
from praxis_lite.job.job_dir import JobDir
from praxis_lite.trained_model.generation import changed_decoder
from praxis_lite.trained_model.shown_model import html_of, text_of
from praxis_lite.trainer.checks.datasets import check_reads
from praxis_lite.trainer.checks.job_checks import check_decoder
from praxis_lite.trainer.decoding.prompt_decoder import PromptDecoder
from praxis_lite.trainer.decoding.user_prompts import Prompts, prompt_batch
from praxis_lite.trainer.evaluation import Batch, Evaluator, in_memory
from praxis_lite.trainer.forward_pass import check_call, forward_pass
from praxis_lite.trainer.layout_table import mesh_text
from praxis_lite.trainer.metrics.columns import columns_by_dataset, columns_in
from praxis_lite.trainer.metrics.json_lines import lines_if_any
from praxis_lite.trainer.restored_weights import restored_weights

Record = dict[str, Any]


def _naming_settings(method: Callable[..., Any]) -> Callable[..., Any]:
    """Makes errors of a method name the settings that they are about."""

    @functools.wraps(method)
    def named(self: "TrainedModel", *args: Any, **kwargs: Any) -> Any:
        with naming_settings(self._config, self._files.config_json):
            return method(self, *args, **kwargs)

    return named


class TrainedModel:
    """The weights of a job's checkpoint on a mesh, and the calls of the job's task.

    Of `praxis_lite.train` the weights are read from the checkpoint when they are first used. Each
    method compiles when it is called for the first time with arrays of some shapes. To decode, the
    weights of stacked layers are copied once, layer by layer, and cached next to the stacks, for
    each form that a decoder's settings give them. A notebook shows the loss curve and the last
    numbers.

    Attributes:
      step: of the checkpoint.
      experiment: the full name of its class.
      job: as `fdl.build` made it of the job's config; its mesh is the one in use.
      partitioner: the job's task on that mesh.
      job_dir: the directory of the job, a `pathlib.Path`.
      stopped_by: what ended the training early, such as "SIGINT", or the reason that early
        stopping or a hook gave; None: nothing did, or the model was loaded.
    """

    def __init__(
        self,
        partitioner: Partitioner,
        job: Job,
        config: fdl.Config,
        job_dir: JobDir,
        step: int | str | None,
        *,
        experiment: str = "",
        stopped_by: str | None = None,
    ):
        self.partitioner, self.job, self.step = partitioner, job, step
        self.experiment, self.stopped_by = experiment, stopped_by
        self.job_dir, self._files, self._config = job_dir.path, job_dir, config
        self._with_decoder: dict[Decoder, Partitioner] = {}
        self._restored: dict[bool, Any] = {}
        self._for_decoding: dict[tuple[bool, str], Any] = {}

    def __repr__(self) -> str:
        mesh = mesh_text(self.partitioner.mesh.shape)
        numbers = text_of(self.metrics, self.evaluations)
        return f"TrainedModel({self.experiment}, step {self.step}{numbers}; {mesh}; {self.job_dir})"

    def _repr_html_(self) -> str:
        title = f"{self.experiment}, step {self.step}"
        return html_of(title, str(self.job_dir), self.metrics, self.evaluations)

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """The numbers of metrics.jsonl by name, "step", "loss", ..., each of shape [steps].

        They are float64, but "step" int64; a step that lacks a number has NaN. The file is read
        anew each time. `pandas.DataFrame(model.metrics)` is a table of it.
        """
        return columns_in(self._files.metrics_jsonl)

    @property
    def evaluations(self) -> dict[str, dict[str, np.ndarray]]:
        """The numbers of eval_metrics.jsonl by dataset, then by name; as `metrics`."""
        return columns_by_dataset(lines_if_any(self._files.eval_metrics_jsonl))

    @property
    def mdl_vars(self) -> Any:
        """The weights on the mesh as the compiled steps take them: padded and split.

        They are the averages if run.evaluation.use_ema_states is set.
        """
        return self.mdl_vars_with(use_ema=self.job.run.evaluation.use_ema_states)

    def mdl_vars_with(self, *, use_ema: bool) -> Any:
        """Returns `mdl_vars`: the checkpoint's own, or the averages that the learner keeps."""
        if use_ema not in self._restored:
            self.step, self._restored[use_ema] = restored_weights(
                self.partitioner, self._files, self.step, use_ema
            )
        return self._restored[use_ema]

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """`mdl_vars` without padding by path, "params/softmax/...", gathered to the host."""
        leaves = self.partitioner.layout.select("mdl_vars").leaves()
        return {
            leaf.path: np.asarray(x)[tuple(map(slice, leaf.shape))]
            for leaf, x in zip(leaves, jax.tree.leaves(self.mdl_vars), strict=True)
        }

    @_naming_settings
    def predict(self, *arrays: Any, **named: Any) -> Any:
        """Returns the result of the model's call with these arguments, as NumPy arrays.

        `predict(images)` is the model's own call `model(images)` in evaluation: no dropout. A
        model of plain functions has no call; `predict(batch)` is then the task's
        `predict(params, batch, None)`.

        Args:
          arrays, named: NumPy arrays, or trees of them, whose first dim counts the same rows.
            Anything else, such as a flag, reaches the model as it is.

        Raises:
          ConfigError: no argument is an array, their rows differ, a layer refuses them, or the
            model has no row for an id or no such position.
        """
        check_call(self.partitioner.task, arrays, named)
        return self._forward(self.mdl_vars, *arrays, **named)

    @_naming_settings
    def evaluate(
        self, data: str | InputPipeline | Batch | Iterable[Batch]
    ) -> dict[str, float]:
        """Returns the task's metrics, each the weighted mean over all batches.

        Args:
          data: a dataset of the job by name, or any pipeline, of which run.evaluation.max_batches
            are read as by --mode=eval; or a batch, or several, as the task reads them: NumPy arrays
            by name, of any numbers of rows. Without "weights" each row, or each of "labels",
            weighs 1.

        Raises:
          ConfigError: the job has no such dataset, it has no end, or the task reads what the
            batches have not.
        """
        limit = self.job.run.evaluation.max_batches
        if not isinstance(data, str | InputPipeline):
            data, limit = in_memory(data), None
        name, pipeline = self._pipeline("datasets", data)
        check_reads(self.partitioner.eval_step, checked_spec(pipeline, name), name)
        if pipeline.num_batches is None and limit is None:
            raise ConfigError(
                f"{name} has no end, so no evaluation on it would end. Load the job with "
                "settings=['run.evaluation.max_batches=NUMBER'], or give batches."
            )
        evaluator = Evaluator(self.partitioner, {name: pipeline}, limit, seed=self.job.run.seed)
        return evaluator.run(self.step, self.mdl_vars)[name]

    @_naming_settings
    def decode(
        self,
        data: str | InputPipeline,
        *,
        decoder: Decoder | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> list[Record]:
        """Returns the task's decoded outputs, as --mode=decode writes them: a record per row.

        Args:
          data: a decode dataset of the job by name, or any pipeline with what the task decodes.
          decoder: in place of the job's.
          seed: of the sampling; by default the run's.
          settings: of the decoder, such as temperature=0.7: in place of the job's.

        Raises:
          ConfigError: the task decodes nothing, or the job has no such dataset or setting.
        """
        return self._decoded(data, self._decoding(decoder, settings), seed)

    def _decoded(
        self, data: str | InputPipeline, partitioner: Partitioner, seed: int | None
    ) -> list[Record]:
        name, pipeline = self._pipeline("decode_datasets", data)
        check_reads(partitioner.decode_step, checked_spec(pipeline, name), name)
        run = self.job.run
        mdl_vars = self._mdl_vars_for(partitioner, run.decode_use_ema_states)
        seed = run.seed if seed is None else whole_number(seed, "seed", 0, 2**32 - 1)
        return PromptDecoder(partitioner, mdl_vars, self.step, seed).records(name, pipeline)

    @_naming_settings
    def generate(
        self,
        prompts: Prompts,
        *,
        decoder: Decoder | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> list[Record]:
        """Returns how a language model continues prompts: a record per prompt and hypothesis.

        Records are those of --mode=decode: "prompt", "continuation", "output_ids", "log_prob", ...

        Args:
          prompts: a text or several, begun as documents are in training: with the tokenizer's
            beginning or, without one, its end of text; conversations, lists of {"role", "content"}
            or rows {"messages", "tools", ...}, by the tokenizer's chat template; or token ids,
            taken as they are.
          decoder, seed, settings: as `decode`: `generate("The ", temperature=0.7)`.

        Raises:
          ConfigError: the task continues no prompts, a prompt is empty, or the decoder has no such
            setting.
        """
        partitioner = self._decoding(decoder, settings)
        return self._decoded(prompt_batch(partitioner.task, prompts), partitioner, seed)

    def _mdl_vars_for(self, decoding: Partitioner, use_ema: bool) -> Any:
        """Returns the weights for a partitioner's decoding: once for each form of them."""
        key = use_ema, str(getattr(decoding.task.decoder, "weights_form", None))
        if key not in self._for_decoding:
            mdl_vars = self.mdl_vars_with(use_ema=use_ema)
            self._for_decoding[key] = decoding.for_decoding(mdl_vars)
        return self._for_decoding[key]

    def _pipeline(self, root: str, data: str | InputPipeline) -> tuple[str, InputPipeline]:
        """Returns a name for messages, and the pipeline, checked."""
        if isinstance(data, str):
            known = getattr(self.job, root)
            if data not in known:
                raise ConfigError(
                    f"The job's {root} are {sorted(known)}; there is no {data!r}."
                    f"{did_you_mean(data, known)} Name one of them, or give a pipeline."
                )
            data, name = known[data], f"{root}.{data}"
        else:
            name = type(data).__name__
        data.check()
        return name, data

    def _decoding(self, decoder: Decoder | None, settings: Mapping[str, Any]) -> Partitioner:
        """Returns the partitioner whose task decodes so, or the job's if nothing is changed."""
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
