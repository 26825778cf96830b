"""Classifiers for handwritten digits; the images come with scikit-learn and need no download."""

import fiddle as fdl
import numpy as np
import optax

from praxis_lite import (
    EvaluationSettings,
    Experiment,
    MeshConfig,
    RunConfig,
    register,
    require_package,
)
from praxis_lite.core import Learner
from praxis_lite.inputs import InMemory
from praxis_lite.layers import (
    BatchNorm,
    ClassificationModel,
    ClassTokenPooling,
    ConvBNAct,
    DotProductAttention,
    FullSoftmax,
    Repeat,
    ResNet,
    ResNetBasicBlock,
    TransformerFeedForward,
    build_vision_transformer,
)
from praxis_lite.tasks.image_classification import ClassificationTask

__all__ = ["BATCH", "Digits", "DigitsNetwork", "DigitsResNet", "DigitsViT", "digits"]

NUM_HELDOUT = 359  # Number of held-out images out of 1797. The split is always the same.
# Mesh axes over which the rows of a batch are sharded.
BATCH = ("replica", "data")


def digits(split: str) -> dict[str, np.ndarray]:
    """Returns images of digits, float32 [n, 8, 8, 1] in [0, 1], and their labels, int32 [n].

    The images are the test set of UCI's optdigits: 1797 digits by 43 writers, scaled down to 8 x 8
    pixels.

    Args:
      split: "train" or "heldout".
    """
    require_package("sklearn", "vision.digits")
    # Import sklearn here, because its import takes half a second.
    from sklearn.datasets import load_digits

    data = load_digits()
    order = np.random.RandomState(0).permutation(len(data.target))
    rows = order[:NUM_HELDOUT] if split == "heldout" else order[NUM_HELDOUT:]
    images = data.images[rows, :, :, None].astype(np.float32) / 16.0
    return {"inputs": images, "labels": data.target[rows].astype(np.int32)}


class Digits(Experiment):
    """Base class of the digit classifiers; defines the learner, the datasets and the run."""

    peak_learning_rate = 4e-3
    num_steps = 300

    def learner(self) -> fdl.Config:
        """Returns the config of the learner."""
        return fdl.Config(
            Learner,
            optimizer=fdl.Partial(optax.adamw, weight_decay=0.05),
            learning_rate=fdl.Config(
                optax.warmup_cosine_decay_schedule,
                init_value=0.0,
                peak_value=self.peak_learning_rate,
                warmup_steps=20,
                decay_steps=self.num_steps,
            ),
            clip_gradient_norm_to_value=1.0,
        )

    def datasets(self):
        train, heldout = (fdl.Partial(digits, split) for split in ("train", "heldout"))
        return {
            "train": fdl.Config(InMemory, train, batch_size=61, shuffle=True),
            "heldout": fdl.Config(InMemory, heldout, batch_size=61, shuffle=False),
        }

    def run(self):
        return fdl.Config(
            RunConfig,
            num_train_steps=self.num_steps,
            evaluation=fdl.Config(EvaluationSettings, every_steps=self.num_steps // 2),
        )


class DigitsNetwork(Digits):
    """Base class of classifiers that apply a softmax to the features of a network."""

    num_features: int

    def network(self) -> fdl.Partial:
        """Returns the config of a module that maps images to `num_features` features."""
        raise NotImplementedError

    def task(self):
        softmax = fdl.Partial(
            FullSoftmax,
            10,
            self.num_features,
            weight_split_dims_mapping=("data", "mdl"),
            activation_split_dims_mapping=(BATCH, "mdl"),
        )
        return fdl.Config(
            ClassificationTask,
            model=fdl.Partial(ClassificationModel, self.network(), softmax),
            learner=self.learner(),
            inputs_split_mapping={"map_1d": (BATCH,), "map_4d": (BATCH, None, None, None)},
        )


@register
class DigitsViT(DigitsNetwork):
    """Classifies digits with a vision transformer: 3 layers, 16 patches and a class token."""

    num_features = 45

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(2, 2, 2))

    def network(self):
        # 3 heads, 45 model dims, 91 hidden dims and 17 tokens are split over axes of size 2.
        vit = build_vision_transformer(
            pos_emb_shapes=(4, 4),
            patch_size=2,
            image_channels=1,
            model_dims=45,
            mlp_dims=91,
            num_xformer_layers=3,
            num_heads=3,
        )
        tokens = vit.activation_split_dims_mapping = (BATCH, None, None)
        vit.entry_layers_tpl.weight_split_dims_mapping = (None, "data")
        vit.entry_layers_tpl.prepend_cls_tokens = 1
        vit.exit_layers_tpl.pooling_tpl = fdl.Partial(ClassTokenPooling)
        vit.exit_layers_tpl.output_fc_tanh = False
        stack = vit.transformer_layers_tpl
        fdl.update_callable(stack, Repeat)  # Scan the layers instead of unrolling them.
        stack.checkpoint_policy = "save_everything"
        stack.block.residual_dropout_prob = 0.1
        stack.block.tr_atten_tpl = fdl.Partial(
            DotProductAttention,
            internal_enable_per_dim_scale=False,
            weight_split_dims_mapping=("data", "mdl", None),
            activation_split_dims_mapping=(BATCH, None, "mdl", None),
            output_split_dims_mapping=tokens,
        )
        stack.block.tr_fflayer_tpl = fdl.Partial(
            TransformerFeedForward,
            activation="gelu",
            weight_split_dims_mapping=("data", "mdl"),
            hidden_split_dims_mapping=(BATCH, None, "mdl"),
            activation_split_dims_mapping=tokens,
        )
        return vit


@register
class DigitsResNet(DigitsNetwork):
    """Classifies digits with a ResNet whose batch norms use the global batch of 8 devices."""

    num_features, peak_learning_rate, num_steps = 26, 1e-2, 200

    def mesh(self):
        return fdl.Config(MeshConfig, ici_mesh_shape=(1, 4, 2))

    def network(self):
        # 13 and 26 channels are split over axes of size 4 and 2.
        conv = fdl.Partial(
            ConvBNAct,
            batch_norm_tpl=fdl.Partial(BatchNorm, decay=0.9),
            weight_split_dims_mapping=(None, None, "data", "mdl"),
            activation_split_dims_mapping=(BATCH, None, None, "mdl"),
        )
        return fdl.Partial(
            ResNet,
            conv_params=conv,
            block_params=fdl.Partial(ResNetBasicBlock),
            channels=(13, 26),
            strides=(1, 2),
            blocks=(1, 1),
            kernels=(3, 3),
            entryflow_conv_kernel=(3, 3, 1),
            entryflow_conv_stride=(1, 1),
            entry_max_pool=False,
        )
