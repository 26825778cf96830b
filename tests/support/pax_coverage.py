"""Which class and option of praxis 1.4.0's layers is covered here: data, and docs/pax_coverage.md.

    python -m tests.support.pax_coverage    # writes the page anew

What Pax has is tests/goldens/pax/layer_options.json, made with the real Pax: by class its module,
its options, and its named splits. What is here is asked of the code: an option is covered if our
class has a setting of the same name, or if AS names another. The rest needs a reason in WITHOUT.
"""

import collections
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from praxis_lite import layers
from praxis_lite.layers.activations import ACTIVATIONS
from praxis_lite.tasks.language_model import LanguageModelTask
from praxis_lite.tasks.preference import DpoTask
from praxis_lite.tasks.sequence_to_sequence import SequenceToSequenceTask
from tests.support.goldens import golden

PAGE = Path(__file__).parents[2] / "docs/pax_coverage.md"

TASKS = {task.__name__: task for task in (DpoTask, LanguageModelTask, SequenceToSequenceTask)}

# Pax's class -> ours, where the name is another.
COUNTERPARTS = {
    "CircularLayerwiseShardablePipelined": "Pipeline",
    "LanguageModel": "LanguageModelTask",
    "LanguageModelDPO": "DpoTask",
    "LayerwiseShardablePipelined": "Pipeline",
    "LocalSelfAttention": "DotProductAttention",
    "MLPBlock": "Mlp",
    "PipelineCompatibleStackedTransformerRepeated": "Repeat",
    "PipelinedTransformer": "Pipeline",
    "SequenceModel": "SequenceToSequenceTask",
    "StackedTransformerRepeated": "Repeat",
}

# Pax's activation class -> our name of it.
ACTIVATION_NAMES = {
    "CubedReLU": "cubed_relu", "ELU": "elu", "Exp": "exp", "GELU": "gelu", "Identity": "identity",
    "LeakyReLU": "leaky_relu", "ReLU": "relu", "ReLU6": "relu6", "SiLU": "silu",
    "Sigmoid": "sigmoid", "SineReLU": "sine_relu", "Softplus": "softplus",
    "SquaredReLU": "squared_relu", "Swish": "swish", "Tanh": "tanh",
}  # fmt: skip

_EINSUM = "in Pax a template for quantization; here see `quantized`"
_NGRAMMER = "there is no n-grammer"
_NO_SPEECH = "speech"
_RECURRENT = "the recurrent layer here is `RgLruBlock`"
_NAMES = "names are fixed"
_SUMMARY = "not reported"
_TOKENS = "the metrics' weights count tokens"
_PACKED = "packed where a batch has `segment_ids`"
_BASE = "a base class"
_SHARDED = "one setting is for training and decoding"

# (Pax's class or "*", option) -> our setting or settings of another name.
AS = {
    ("*", "activation_tpl"): "activation",
    ("*", "activation_split_dims_mapping.emb_out_split_dims_mapping"): "lookup_split_dims_mapping",
    ("*", "cast_rotary_position_emb"): "rotary_position_emb_tpl",
    ("*", "weight_split_dims_mapping.proj"): "weight_split_dims_mapping",
    ("*", "activation_split_dims_mapping.blnh"): "activation_split_dims_mapping",
    ("*", "activation_split_dims_mapping.bld"): "output_split_dims_mapping",
    ("*", "x_times"): "num_layers",
    ("*", "weight_split_dims_mapping.block"): "stack_split",
    ("*", "single_stage_body"): "block",
    ("*", "weight_split_dims_mapping.stages"): "stage_axis",
    ("*", "relu_dropout_tpl"): "relu_dropout_prob",
    ("*", "residual_dropout_tpl"): "residual_dropout_prob",
    ("*", "decoder_tpl"): "decoder",
    ("LanguageModel", "model_type"): "TransformerLm.model_type",
    ("LanguageModelDPO", "model_type"): "TransformerLm.model_type",
    ("LanguageModelDPO", "mdl"): "LanguageModelTask.model",
    ("MultiQueryDotProductAttention", "internal_gshard_gaussian_init"):
        "AttentionProjection.params_init, OneHeadedAttentionProjection.params_init",
    ("TransformerFeedForward", "internal_gshard_variance_scaling_fan_in_init"):
        "FeedForward.weight_init",
    ("Embedding", "activation_split_dims_mapping.emb_out_split_dims_mapping"):
        "activation_split_dims_mapping",
    ("TrainablePositionalEmbedding", "activation_split_dims_mapping.emb_out_split_dims_mapping"):
        "activation_split_dims_mapping",
    ("Dropout", "keep_prob"): "dropout_prob",
    ("Einsum", "eqn"): "equation",
    ("Einsum", "w_shape"): "weight_shape",
    ("Einsum", "use_bias"): "has_bias",
    ("LocalSelfAttention", "left_context"): "window",
    ("LocalSelfAttention", "block_size"): "atten_chunk_size",
    ("MultiQueryDotProductAttention", "chunked_attn_num_seq_split"): "atten_chunk_size",
    ("MultiQueryDotProductAttention", "weight_split_dims_mapping.proj_headless"):
        "weight_split_dims_mapping",
    ("MultiQueryDotProductAttention", "activation_split_dims_mapping.blh"):
        "kv_split_dims_mapping",
    ("GroupedQueryAttention", "weight_split_dims_mapping.dnh"): "weight_split_dims_mapping",
    ("GroupedQueryAttention", "weight_split_dims_mapping.dkh"): "weight_split_dims_mapping",
    ("GroupedQueryAttention", "activation_split_dims_mapping.btd"): "output_split_dims_mapping",
    ("GroupedQueryAttention", "activation_split_dims_mapping.btnh"):
        "activation_split_dims_mapping",
    ("GroupedQueryAttention", "activation_split_dims_mapping.bskh"): "kv_split_dims_mapping",
    ("LanguageModel", "lm_tpl"): "model",
    ("MLPBlock", "num_layers"): "hidden_dims",
    ("SequenceModel", "model_tpl"): "model",
    ("SequenceModel", "label_smoothing_prob"): "SharedEmbeddingSoftmax.label_smoothing_prob",
    ("Repeat", "sub_tpl"): "block",
    ("Repeat", "weight_split_dims_mapping.sub"): "stack_split",
    ("PipelinedTransformer", "pipeline_stage"): "block",
    ("PipelinedTransformer", "num_pipeline_stages"): "num_stages",
    ("PipelinedTransformer", "num_pipeline_microbatches"): "num_microbatches",
    ("PipelinedTransformer", "pipeline_microbatch_size"): "microbatch_size",
    ("StackedTransformer", "transformer_layer_params_tpl"): "block",
    ("StackedTransformer", "moe_layers"): "block",
    ("StackedTransformer", "model_dims"): "Transformer.input_dims",
    ("StackedTransformer", "dropout_prob"):
        "Transformer.residual_dropout_prob, Transformer.atten_dropout_prob, "
        "Transformer.relu_dropout_prob",
    ("StackedTransformer", "moe_layer_tpl"): "Transformer.tr_fflayer_tpl",
    **{
        ("StackedTransformer", name): f"Transformer.{name}"
        for name in (
            "use_cross_attention", "mask_self_attention", "hidden_dims", "num_heads",
            "dim_per_head", "atten_dropout_prob", "residual_dropout_prob", "relu_dropout_prob",
            "fold_padding_with_segment_mask",
        )
    },
    **{
        ("StackedTransformer", name): f"TransformerFeedForwardMoe.{name}"
        for name in (
            "gating_func", "unadjusted_expert_capacity_factor", "num_experts", "num_groups",
            "min_group_size",
        )
    },
    ("TransformerFeedForward", "weight_split_dims_mapping.ffn0"): "weight_split_dims_mapping",
    ("TransformerFeedForward", "weight_split_dims_mapping.ffn1"): "weight_split_dims_mapping",
    ("TransformerFeedForward", "activation_split_dims_mapping.ffn0"): "hidden_split_dims_mapping",
    ("TransformerFeedForward", "activation_split_dims_mapping.ffn1"):
        "activation_split_dims_mapping",
    ("TransformerFeedForwardMoe", "expert_weight_shards"): "weight_split_dims_mapping",
    ("TransformerFeedForwardMoe", "weight_split_dims_mapping.me"): "gate_split_dims_mapping",
    ("TransformerFeedForwardMoe", "weight_split_dims_mapping.emh"): "weight_split_dims_mapping",
    ("TransformerFeedForwardMoe", "weight_split_dims_mapping.ehm"): "weight_split_dims_mapping",
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.gsm"):
        "activation_split_dims_mapping",
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.egcm"):
        "dispatch_split_dims_mapping",
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.gecm"):
        "dispatch_split_dims_mapping",
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.egch"):
        "hidden_split_dims_mapping",
    ("Transformer", "dropout_tpl"): "residual_dropout_prob",
    ("TransformerLm", "skip_compute_loss"): "compute_loss",
    ("VisionTransformer", "activation_split_dims_mapping.network_inputs"):
        "activation_split_dims_mapping",
    ("DepthwiseConv1D", "weight_split_dims_mapping.him"): "weight_split_dims_mapping",
}  # fmt: skip

# (Pax's class or "*", option) -> why there is nothing of it here.
WITHOUT = {
    ("*", "einsum_tpl"): _EINSUM,
    ("*", "array_lookup_tpl"): _EINSUM,
    ("*", "qk_einsum_tpl"): _EINSUM,
    ("*", "pv_einsum_tpl"): _EINSUM,
    ("*", "bi_tempered_loss_tpl"): "the bi-tempered loss is not made",
    ("*", "ngrammer_tpl"): _NGRAMMER,
    ("*", "ngrammer_tpls"): _NGRAMMER,
    ("*", "post_attention_ngrammer_tpls"): _NGRAMMER,
    ("*", "encoder_ngrammer_tpl"): _NGRAMMER,
    ("*", "decoder_ngrammer_tpl"): _NGRAMMER,
    ("*", "encoder_post_attention_ngrammer_tpls"): _NGRAMMER,
    ("*", "decoder_post_attention_ngrammer_tpls"): _NGRAMMER,
    ("*", "packed_input"): _PACKED,
    ("*", "dconv_qkv"): "no convolution of queries, keys and values",
    ("*", "dconv_kernel_size"): "no convolution of queries, keys and values",
    ("*", "causal_depthwise_conv1d_tpl"): "no convolution of queries, keys and values",
    ("*", "weight_split_dims_mapping.dconv"): "no convolution of queries, keys and values",
    ("*", "consolidate_rope_key_state"): "the cache has rotated keys",
    ("*", "decode_cache"): "there is a cache if a call is given one",
    ("*", "attention_mask_summary"): _SUMMARY,
    ("*", "decoding_maybe_shard_projections"): _SHARDED,
    ("*", "activation_split_dims_mapping.extend_step_out"): _SHARDED,
    ("*", "activation_split_dims_mapping.ffn0_extend_step"): _SHARDED,
    ("*", "activation_split_dims_mapping.ffn1_extend_step"): _SHARDED,
    ("*", "activation_split_dims_mapping.bd"): _SHARDED,
    ("*", "unroll_in_decode"): "`unroll` is for training and decoding",
    ("*", "repeat_layer_name"): _NAMES,
    ("*", "sublayer_name"): _NAMES,
    ("*", "repeat_optimizer_dims_mapping"): "a slot's stacked dim splits as its weight's",
    ("*", "optimizer_dims_mapping"): "a slot's stacked dim splits as its weight's",
    ("*", "nd_prefix_shape"): "a stack has one dim; interop takes checkpoints with several",
    ("*", "return_intermediate_outputs"): _SUMMARY,
    ("*", "collect_intermediate_outputs"): _SUMMARY,
    ("*", "unpack_summaries"): "a stack's summaries are [layers]",
    ("*", "bf16_accum_in_fp32"): "gradients of float32 weights are summed in float32",
    ("*", "pipeline_broadcast_inputs"): "inputs beside x are gathered by each stage",
    ("*", "enable_async_circular_transfer"): "XLA schedules the permutes",
    ("ClassificationModel", "input_field"): "`ClassificationTask` reads `inputs`",
    ("ClassificationModel", "label_field"): "`ClassificationTask` reads `labels`",
    ("DepthwiseConv1D", "use_2d_conv_weight_shape"): "weights have no further dim of 1",
    ("Dropout", "noise_shape"): "see `noise_shape_broadcast_dims`",
    ("Dropout", "dropout_at_eval"): "off without a key",
    ("Dropout", "transpose_qk"): "a detail of speed",
    ("Einsum", "einsum_op_tpl"): _EINSUM,
    ("Embedding", "set_nan_for_oob_id"): 'an id without a row gives NaN by `lookup_style="index"`',
    ("Embedding", "array_lookup"): _EINSUM,
    ("Embedding", "einsum"): _EINSUM,
    ("*", "polluting_bubbles_with_nan"): "for Pax's own tests",
    ("*", "enable_bubble_grad_skipping"): "what an idle stage computes reaches no gradient",
    ("CircularLayerwiseShardablePipelined", "share_weights"): "each repeat has weights of its own",
    ("GroupedQueryAttention", "hidden_dim"): "without effect in Pax",
    ("MultiQueryDotProductAttention", "combine_qkv"): "refused by Pax too",
    ("*", "return_predictions"): "evaluation returns metrics",
    ("LanguageModel", "count_tokens"): _TOKENS,
    ("LanguageModelDPO", "ref_mdl"): "made by `with_reference`, or the model without its LoRA",
    ("LanguageModelDPO", "token_counter"): _TOKENS,
    ("*", "apply_eval_sample_weights"): "weights are always heeded",
    ("LanguageModel", "report_strict_acc"): _SUMMARY,
    ("LayerNorm", "reductions_in_fp32"): "always in float32",
    ("LocalSelfAttention", "simulated"): "see `atten_kernel`",
    ("MLPBlock", "activate_final"): "the last layer has no activation",
    ("MLPBlock", "ff_tpl"): "its settings are `Mlp`'s",
    ("NClassMajorSharedEmbeddingSoftmax", "feed_forward_tpl"): "has its weight itself",
    ("NClassMajorSharedEmbeddingSoftmax", "scale_before_logits"): "without effect in Pax",
    ("RelativeBias", "use_length_as_position"): "positions are handed in",
    ("Repeat", "positional_args_as_scan_carry"): "x is carried",
    ("RmsNorm", "intermediate_dtype"): "always in float32",
    ("TrainablePositionalEmbedding", "min_timescale"): "without effect in Pax",
    ("TrainablePositionalEmbedding", "max_timescale"): "without effect in Pax",
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.gs"): "left to XLA",
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.gsec"): "never made",
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.gecs"): "never made",
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.gec"): "never made",
    ("TransformerLm", "skip_aux_loss"): "`compute_loss` adds these losses, a call does not",
    ("TransformerLm", "record_activations_in_xent_output"): _SUMMARY,
    ("VisionTransformer", "full_data_parallel_on_entry_exit"): "splits of the parts say it",
    ("PipelinedTransformer", "activation_split_dims_mapping.final_out"): "left to XLA",
}  # fmt: skip

# Pax's class -> why there is nothing of it here.
ABSENT = {
    **dict.fromkeys(("BaseActivation", "BaseNormalization", "BaseDepthwiseConv1D"), _BASE),
    **dict.fromkeys(
        ("AdaptedTransformerFeedForward", "MultitaskResidualAdapter"),
        "adapters here are LoRA: `layers.lora`",
    ),
    **dict.fromkeys(("ArrayLookup", "EinsumOp"), _EINSUM),
    **dict.fromkeys(
        ("Ngrammer", "NgrammerStub", "VQNgrammer", "VectorQuantization", "BregmanCompression",
         "BregmanNgrammer"),
        _NGRAMMER,
    ),
    "BregmanPCA": "not made",
    **dict.fromkeys(
        ("Conformer", "DotProductAttentionWithContext", "DotProductAttentionWithContextXL",
         "SelfAttentionWithNormAndResidual", "LightConv1D", "SpectrumAugmenter",
         "StackingOverTime", "TemporalShifting", "ConvBNActWithPadding", "RandomVectorQuantizer",
         "VectorQuantizer"),
        _NO_SPEECH,
    ),
    **dict.fromkeys(
        ("BaseRnnCell", "CifgLstmCellSimple", "LayerNormalizedLstmCellSimple", "LstmCellSimple",
         "FRnn", "LstmFrnn", "StackBiFrnn", "StackFrnn", "S5", "SSM", "SSMGated",
         "SSMTransformer"),
        _RECURRENT,
    ),
    **dict.fromkeys(
        ("GpuTritonFusedDotProductAttention", "GpuTritonFusedGroupedQueryAttention",
         "GpuTritonFusedLayerNorm", "GpuTritonFusedMultiQueryDotProductAttention"),
        "`DotProductAttention.atten_kernel` chooses a fused kernel; norms are left to XLA",
    ),
    **dict.fromkeys(
        ("DotProductAttentionWithLPB", "MultiQueryDotProductAttentionLPB"),
        "each sample of a prompt has a cache of its own",
    ),
    **dict.fromkeys(
        ("DotProductAttentionXL", "LocalSelfAttentionXL"),
        "no Transformer-XL relative positions; `RelativeBias` has T5's",
    ),
    **dict.fromkeys(
        ("LocalSelfAttentionAlibi", "LocalSelfAttentionRelativeBias"),
        "a window with relative positions: `DotProductAttention` with `window` and "
        "`relative_bias_tpl` has T5's buckets, not theirs",
    ),
    "BertModel": "masked language modelling is not made",
    "BiTemperedLoss": "not made",
    "CausalDepthwiseConv1D": "no convolution of queries, keys and values; `RgLruBlock` has its own",
    "ClassificationMLPModel": "`Mlp` in a `ClassificationTask`",
    "Conv3D": "images only",
    "GShardSharedEmbeddingSoftmax": "`NClassMajorSharedEmbeddingSoftmax` has a [V, D] weight too",
    "LanguageModelContinuousBatching": "`LanguageModelTask` decodes in continuous batches, too",
    "MaskedLmDataAugmenter": "masked language modelling is not made",
    "PositionalEmbedding2D": "positions of an image are learned or counted along its patches",
    "Sequential": "write a class with the layers in it",
    "SigmoidCrossEntropy": "classes exclude each other",
    "SpectralNorm": "needs a power iteration's state; not made",
    "TokenCounter": _TOKENS,
    **dict.fromkeys(("VanillaBlock", "VanillaNet"), "`ResNet` is the convolutional network"),
}  # fmt: skip

HEAD = """# Coverage of Pax's layers

Each layer class of praxis 1.4.0 and each of its options: what it is here, or why it is not. **An
option that neither the first table nor its class's row names is a setting of the same name.**
Defaults are Pax's unless said otherwise; `tests/layers` compares the numbers with those of the real
Pax (`tests/goldens`).

`python -m tests.support.pax_coverage` writes this page by asking the code; a test compares. Fields
of all layers of Pax (`name`, `dtype`, `fprop_dtype`, `params_init`, `weight_split_dims_mapping.wt`,
`activation_split_dims_mapping.out`, mesh shapes) are in [coming_from_pax.md](coming_from_pax.md).

"""


def pax_layers() -> dict[str, dict]:
    """Returns by class what the real Pax says of it: module, options, splits."""
    return golden("pax/layer_options.json")


def our_class(name: str) -> type | None:
    """Returns our class for a class of Pax's; None if there is none."""
    ours = COUNTERPARTS.get(name, name)
    return TASKS.get(ours, getattr(layers, ours, None))


def options_of(name: str) -> list[str]:
    """Returns a class's options and its splits, but those that all layers have."""
    common = ("weight_split_dims_mapping.wt", "activation_split_dims_mapping.out")
    splits = [split for split in pax_layers()[name]["splits"] if split not in common]
    return pax_layers()[name]["options"] + splits


def found(table: dict, name: str, option: str) -> str | None:
    return table.get((name, option), table.get(("*", option)))


class Options(NamedTuple):
    """A class's options: those of the same name; by option our name of it, or why there is none."""

    same: list[str]
    renamed: dict[str, str]
    without: dict[str, str | None]


def options_here(name: str) -> Options:
    result = Options([], {}, {})
    parameters = inspect.signature(our_class(name)).parameters
    for option in options_of(name):
        if option in parameters:
            result.same.append(option)
        elif ours := found(AS, name, option):
            result.renamed[option] = ours
        else:
            result.without[option] = found(WITHOUT, name, option)
    return result


def shared(table: Mapping, covered: Sequence[str]) -> dict[str, str]:
    """Returns the answers of a table that are those of several classes, by option."""
    num_classes = collections.Counter(
        option for name in covered for option in options_of(name) if (name, option) not in table
    )
    return {
        option: answer
        for (name, option), answer in table.items()
        if name == "*" and num_classes[option] > 1
    }


def our_names(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def grouped(answers: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns (options, answer) with a single entry for all options of the same answer."""
    options: dict[str, list[str]] = {}
    for option, answer in answers.items():
        options.setdefault(answer, []).append(f"`{option}`")
    return [(", ".join(names), answer) for answer, names in options.items()]


def with_owner(renamed: Mapping[str, str]) -> dict[str, str]:
    """Returns our names as the page has them: an option of the same name elsewhere as its class."""
    result = {}
    for option, ours in renamed.items():
        owner, _, name = ours.rpartition(".")
        result[option] = f"in `{owner}`" if name == option else our_names(ours)
    return result


def wrapped(text: str) -> str:
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False) + "\n"


def sections() -> Iterator[str]:
    covered = sorted(name for name in pax_layers() if our_class(name) is not None)
    of_several = shared(AS, covered), shared(WITHOUT, covered)
    yield "## Options of several classes\n\n| Pax | here, or why not |\n| --- | --- |\n"
    for table in (with_owner(of_several[0]), of_several[1]):
        for options, answer in grouped(table):
            yield f"| {options} | {answer} |\n"
    rows, equal = [], []
    for name in covered:
        options, ours = options_here(name), our_class(name).__name__
        renamed, without = (
            {option: answer for option, answer in own.items() if general.get(option) != answer}
            for own, general in zip(options[1:], of_several, strict=True)
        )
        cells = [
            "; ".join(f"{names}: {answer}" for names, answer in grouped(table)) or "-"
            for table in (with_owner(renamed), without)
        ]
        if ours == name and not renamed and not without:
            equal.append(f"`{name}`")
        else:
            rows.append(f"| `{name}` | `{ours}` | {' | '.join(cells)} |\n")
    yield "\n## Classes\n\n"
    yield wrapped(f"Of the same name, with nothing but the above to say: {', '.join(equal)}.")
    yield "\n"
    yield "| Pax | here | options of another name | not covered, and why |\n"
    yield "| --- | --- | --- | --- |\n"
    yield from rows
    yield "\n## Activations\n\n"
    names = [f'`{name}` is `"{ours}"`' for name, ours in sorted(ACTIVATION_NAMES.items())]
    gelu = '`GELU` with `approximate=False` is `"gelu_exact"`.'
    yield wrapped(f"`activation` takes a function or a name. {', '.join(names)}. {gelu}")
    yield "\n## Classes that are not covered\n\n| Pax | why |\n| --- | --- |\n"
    for names, reason in sorted(grouped(ABSENT)):
        yield f"| {names} | {reason} |\n"


def page() -> str:
    return HEAD + "".join(sections())


def setting_exists(name: str, setting: str) -> bool:
    """Returns whether AS's "setting" or "Class.setting" is one of ours."""
    owner, _, attribute = setting.rpartition(".")
    owner = TASKS.get(owner, getattr(layers, owner, None)) if owner else our_class(name)
    return attribute in inspect.signature(owner).parameters or hasattr(owner, attribute)


def activation_exists(name: str) -> bool:
    return ACTIVATION_NAMES[name] in ACTIVATIONS


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
