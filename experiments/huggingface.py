"""Training and fine-tuning of Hugging Face models, from directories or from the Hub."""

import functools
from collections.abc import Iterator
from typing import Any

import fiddle as fdl
import optax

from praxis_lite import register
from praxis_lite.core import Learner
from praxis_lite.decode import Sample
from praxis_lite.experiments import lm
from praxis_lite.experiments.finetune import LORA
from praxis_lite.huggingface import DecoderSettings, lm_config, settings_in
from praxis_lite.inputs import Documents, JsonLines, PackedText, PreferenceData, about_python
from praxis_lite.inputs.tokenizers import has_tokenizer
from praxis_lite.layers import (
    SHARDING_PRESETS,
    TransformerFeedForwardMoe,
    adapted,
    set_sharding_params,
    with_reference,
)
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.preference import DpoTask

__all__ = [
    "CausalLm",
    "ChatDpo",
    "ChatDpoLora",
    "ChatFull",
    "ChatLora",
    "questions",
]

# Settings of the model if HF_DIR is not set.
TINY = DecoderSettings(
    vocab_size=257,
    model_dims=48,
    hidden_dims=109,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    dim_per_head=12,
    use_gated_activation=True,
)
QUESTIONS = "questions.jsonl"
# Also shard the dims of each expert: presets without the key "expert" do not change experts.
PRESET = {**SHARDING_PRESETS["fsdp+tensor"], "expert": None}


@register
class CausalLm(lm.PyDocs):
    """Fine-tunes the model in --set HF_DIR=DIRECTORY on text, or trains a new tiny Llama.

    HF_DIR may also be hf://org/name[@revision], a model on the Hugging Face Hub.

    To train the architecture in HF_DIR from scratch, add run.init_from_huggingface=None. The
    default learning rate is meant for fine-tuning. If corpus.tokenizer is not set, the model's
    tokenizer is used if there is one.
    """

    HF_DIR: str | None = None

    @functools.cached_property
    def text(self):
        tokenizer = self.corpus.tokenizer
        if tokenizer is None and self.HF_DIR is not None and has_tokenizer(self.HF_DIR):
            tokenizer = self.HF_DIR
        return fdl.copy_with(self.corpus, tokenizer=tokenizer)

    def task(self):
        settings = TINY if self.HF_DIR is None else settings_in(self.HF_DIR)
        model = lm_config(settings)
        if self.HF_DIR is not None and settings.max_seq_length is None:
            model.max_positions = trained_positions(settings)
        learner = fdl.Config(
            Learner,
            optimizer=fdl.Partial(optax.adamw, b2=0.95, weight_decay=0.1),
            learning_rate=1e-4,
            clip_gradient_norm_to_value=1.0,
        )
        # Freeze the router's correction bias, because it has no gradient.
        if settings.score_func == "sigmoid":
            learner.bprop_variable_exclusion = ".*/gate_correction"
        return fdl.Config(
            LanguageModelTask,
            model=set_sharding_params(model, PRESET),
            learner=learner,
            inputs_split_mapping=lm.BATCH_OVER_DATA,
            tokenizer=self.text.tokenizer,
            decoder=fdl.Config(Sample, max_decode_steps=32, temperature=0.0),
        )

    def run(self):
        run = super().run()
        run.num_train_steps = run.checkpoints.every_steps = run.evaluation.every_steps = 100
        run.init_from_huggingface = self.HF_DIR
        return run


def trained_positions(settings: DecoderSettings) -> int | None:
    """Returns the context length that a rotary model was trained for, or None if unlimited."""
    scaling = settings.rope_scaling or {}
    # Dynamic scaling adapts the frequencies to the sequence length.
    is_dynamic = "dynamic" in (scaling.get("type"), scaling.get("rope_type"))
    return None if is_dynamic else settings.max_positions


def questions(folder: str) -> Iterator[dict[str, Any]]:
    """Yields conversations about Python, with answers from Python's language reference."""
    for line in about_python():
        yield {"messages": line["messages"]}


def lines_of(files, folder):
    """Returns the arguments of JsonLines for `files`, or for generated questions in `folder`."""
    if files is not None:
        return {"files": files}
    return {"files": f"{folder}/{QUESTIONS}", "make": questions}


@register
class ChatFull(CausalLm):
    """Fine-tunes all weights of a Hugging Face model on the answers in conversations.

    --set CHAT_FILES=GLOB selects JSON lines files with "messages". By default, questions about
    Python are generated and written to `folder` once. The tokenizer provides the chat template.
    """

    folder = "~/.cache/praxis_lite/questions"
    CHAT_FILES: str | None = None
    SEQ_LEN = 512
    BATCH_SIZE = 16

    def datasets(self):
        source = fdl.Config(JsonLines, **lines_of(self.CHAT_FILES, self.folder))
        conversations = fdl.Config(
            Documents, source, "messages", tokenizer=self.text.tokenizer, heldout_percent=10
        )
        return self.splits(PackedText, conversations, too_long="refuse")

    def splits(self, pipeline, data, **settings):
        """Returns configs of a pipeline for the train and heldout splits."""
        config = functools.partial(
            fdl.Config, pipeline, data, seq_len=self.SEQ_LEN, batch_size=self.BATCH_SIZE, **settings
        )
        return {
            "train": config(split="train", shuffle=True),
            "heldout": config(split="heldout", shuffle=False),
        }

    def decode_datasets(self):
        return {}


def with_adapters(task, rank, alpha, use_dora=False):
    """Adds LoRA adapters to the attention and feed-forward layers, and trains only the adapters."""
    settings = {"rank": rank, "alpha": alpha, "use_dora": use_dora}
    blocks = task.model.transformer_layer_tpl
    for block in blocks if isinstance(blocks, tuple) else (blocks,):
        for name in ("tr_atten_tpl", "tr_fflayer_tpl"):
            base = getattr(block, name)
            if fdl.get_callable(base) is not TransformerFeedForwardMoe:
                setattr(block, name, fdl.Partial(adapted, base_tpl=base, **settings))
    # This freezes all other weights, so patterns of weights to freeze would be a contradiction.
    task.learner.bprop_variable_inclusion, task.learner.bprop_variable_exclusion = LORA, ()
    return task


@register
class ChatLora(ChatFull):
    """ChatFull with LoRA on attention and feed-forward layers; all other weights are frozen."""

    RANK = 8
    ALPHA = 16.0
    USE_DORA = False

    def task(self):
        task = with_adapters(super().task(), self.RANK, self.ALPHA, self.USE_DORA)
        task.learner.learning_rate = 1e-3
        return task


@register
class ChatDpo(ChatFull):
    """Trains all weights of a Hugging Face model with DPO on pairs of answers.

    --set CHAT_FILES=GLOB selects JSON lines files with "prompt", "chosen" and "rejected". The
    reference model is a frozen copy of the model.
    """

    def datasets(self):
        return self.splits(PreferenceData, self.CHAT_FILES, tokenizer=self.text.tokenizer)

    def task(self):
        task = super().task()
        model = fdl.Partial(with_reference, base_tpl=task.model)
        excluded = task.learner.bprop_variable_exclusion
        learner = fdl.copy_with(
            task.learner,
            bprop_variable_exclusion=tuple(filter(None, (excluded, "reference/.*"))),
            learning_rate=1e-5,
        )
        return fdl.Config(
            DpoTask,
            model=model,
            learner=learner,
            decoder=task.decoder,
            tokenizer=task.tokenizer,
            inputs_split_mapping=lm.BATCH_OVER_DATA | {"map_3d": (("replica", "data"), None, None)},
        )


@register
class ChatDpoLora(ChatDpo):
    """ChatDpo with LoRA adapters; the reference is the same model without adapters."""

    RANK = 8
    ALPHA = 16.0
    USE_DORA = False

    def task(self):
        task = super().task()
        task.model = task.model.base_tpl
        task.learner.learning_rate = 1e-4
        return with_adapters(task, self.RANK, self.ALPHA, self.USE_DORA)
