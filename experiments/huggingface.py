"""Models of Hugging Face, from their directories."""

import functools
from pathlib import Path

import fiddle as fdl
import optax

from praxis_lite import register
from praxis_lite.checkpoints.huggingface.decoder import DecoderSettings, lm_config
from praxis_lite.checkpoints.huggingface.family import settings_in
from praxis_lite.decode import Greedy
from praxis_lite.experiments import lm
from praxis_lite.inputs.tokenizers.loading import has_tokenizer
from praxis_lite.layers import set_sharding_params
from praxis_lite.learner import Learner
from praxis_lite.tasks.language_model import LanguageModelTask

# Where there is no HF_DIR.
TINY = DecoderSettings(
    vocab_size=257, model_dims=48, hidden_dims=109, num_layers=3, num_heads=6, num_kv_heads=2,
    dim_per_head=12, use_gated_activation=True,
)


@register
class CausalLm(lm.PyDocs):
    """The model of --set HF_DIR=DIRECTORY, or a tiny Llama, on text; its weights are new.

    `praxis_lite.interop.huggingface` reads the weights too. AdamW at a rate for fine-tuning. The
    text has the tokens of the model's own tokenizer, if it has one, unless corpus.tokenizer is set.
    """

    HF_DIR: str | None = None

    @functools.cached_property
    def text(self):
        own = self.corpus.tokenizer
        if own is None and self.HF_DIR is not None and has_tokenizer(Path(self.HF_DIR)):
            own = self.HF_DIR
        return fdl.copy_with(self.corpus, tokenizer=own)

    def task(self):
        settings = TINY if self.HF_DIR is None else settings_in(self.HF_DIR)
        learner = fdl.Config(
            Learner, optimizer=fdl.Partial(optax.adamw, b2=0.95, weight_decay=0.1),
            learning_rate=1e-4, clip_gradient_norm_to_value=1.0,
        )
        return fdl.Config(
            LanguageModelTask, model=set_sharding_params(lm_config(settings)), learner=learner,
            inputs_split_mapping=lm.BATCH_OVER_DATA, tokenizer=self.text.tokenizer,
            decoder=fdl.Config(Greedy, max_decode_steps=32),
        )

    def run(self):
        run = super().run()
        run.num_train_steps = run.checkpoint_every_steps = run.eval_every_steps = 100
        return run
