"""The hook that continues prompts with the current weights while a language model trains."""

from praxis_lite.core.partitioner.train_state import TrainState
from praxis_lite.inputs.base import IndexedPipeline
from praxis_lite.inputs.pipeline_checks import checked_spec
from praxis_lite.job.job_dir import SAMPLES
from praxis_lite.trainer.checks.datasets import check_reads
from praxis_lite.trainer.decoding.prompt_decoder import Batchings, PromptDecoder
from praxis_lite.trainer.decoding.user_prompts import prompt_batch
from praxis_lite.trainer.hooks.hook import DispatchedStep, Hook
from praxis_lite.trainer.hooks.loop_state import LoopState
from praxis_lite.trainer.hooks.tracking import Trackers
from praxis_lite.trainer.job_on_mesh import JobOnMesh
from praxis_lite.trainer.metrics.records import DecodedFile, write_records
from praxis_lite.trainer.summary import continuations_in

_SETTING = "run.samples.prompts"


class Samples(Hook):
    """Decodes `run.samples.prompts`, with the compiled step and the files of --mode=decode."""

    def __init__(self, job: JobOnMesh, trackers: Trackers):
        self._job, self._trackers, self.every = job, trackers, job.run.samples.every_steps
        self._prompts = sample_prompts(job)
        self._batchings: Batchings = {}

    def before_training(self, loop: LoopState, state: TrainState) -> None:
        self._loop = loop

    def is_due(self, step: int, is_last: bool) -> bool:
        return self.every is not None and step % self.every == 0 and not self._loop.stops

    def after_step(self, dispatched: DispatchedStep) -> None:
        job, loop, step = self._job, self._loop, dispatched.step
        with loop.watchdog.during(f"decoding {_SETTING} at step {step}"):
            records = PromptDecoder(
                job.partitioner,
                job.partitioner.for_decoding(
                    job.partitioner.eval_mdl_vars(
                        dispatched.state, use_ema=job.run.decode_use_ema_states
                    )
                ),
                step,
                job.run.seed,
                batchings=self._batchings,
            ).records(SAMPLES, self._prompts)
        if loop.is_first:
            path = job.files.decode_jsonl(SAMPLES, step)
            write_records(path, records)
            text = continuations_in(DecodedFile(SAMPLES, step, path), len(records))
            loop.note(text)
            self._trackers.log_text(step, f"decode/{SAMPLES}", text)


def sample_prompts(job: JobOnMesh) -> IndexedPipeline:
    """Returns a pipeline with one batch, which contains `run.samples.prompts`.

    Raises:
      ConfigError: The task does not generate text, or a prompt is empty.
    """
    batch = prompt_batch(job.partitioner.task, job.run.samples.prompts, _SETTING)
    check_reads(job.partitioner.decode_step, checked_spec(batch, _SETTING), _SETTING)
    return batch
