"""Compares the layers and options of praxis 1.4.0 with ours, and writes docs/pax_coverage.md.

    python -m tests.support.pax_coverage    # writes the page again

tests/goldens/pax/layer_options.json was written with the real Pax. It lists the module, the options
and the named splits of each class. An option is covered if our class has a setting of the same
name, or of the name in AS. Any other option needs a reason in WITHOUT.
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

# Pax's class -> ours, if the names differ.
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

# Pax's activation class -> our name.
ACTIVATION_NAMES = {
    "CubedReLU": "cubed_relu", "ELU": "elu", "Exp": "exp", "GELU": "gelu", "Identity": "identity",
    "LeakyReLU": "leaky_relu", "ReLU": "relu", "ReLU6": "relu6", "SiLU": "silu",
    "Sigmoid": "sigmoid", "SineReLU": "sine_relu", "Softplus": "softplus",
    "SquaredReLU": "squared_relu", "Swish": "swish", "Tanh": "tanh",
}  # fmt: skip

_EINSUM = "used for quantization in Pax; here, use `quantized`"
_NGRAMMER = "no n-grammer"
_NO_SPEECH = "no layers for speech"
_RECURRENT = "the only recurrent layer here is `RgLruBlock`"
_NAMES = "names are fixed"
_SUMMARY = "not reported"
_TOKENS = "tokens are counted by the weights of the metrics"
_PACKED = "a batch with `segment_ids` is packed"
_BASE = "a base class"
_SHARDED = "training and decoding share one setting"
_SLOTS = "the stacked dim of a slot is sharded like that of its weight"
_ABSENT_ARRAY = "this array does not exist here"

# (Pax's class or "*", option) -> our setting or settings, if the names differ.
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

# (Pax's class or "*", option) -> the reason why it is not supported.
WITHOUT = {
    ("*", "einsum_tpl"): _EINSUM,
    ("*", "array_lookup_tpl"): _EINSUM,
    ("*", "qk_einsum_tpl"): _EINSUM,
    ("*", "pv_einsum_tpl"): _EINSUM,
    ("*", "bi_tempered_loss_tpl"): "no bi-tempered loss",
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
    ("*", "consolidate_rope_key_state"): "the cache always stores rotated keys",
    ("*", "decode_cache"): "a call that receives a cache uses it",
    ("*", "attention_mask_summary"): _SUMMARY,
    ("*", "decoding_maybe_shard_projections"): _SHARDED,
    ("*", "activation_split_dims_mapping.extend_step_out"): _SHARDED,
    ("*", "activation_split_dims_mapping.ffn0_extend_step"): _SHARDED,
    ("*", "activation_split_dims_mapping.ffn1_extend_step"): _SHARDED,
    ("*", "activation_split_dims_mapping.bd"): _SHARDED,
    ("*", "unroll_in_decode"): "`unroll` applies to training and decoding",
    ("*", "repeat_layer_name"): _NAMES,
    ("*", "sublayer_name"): _NAMES,
    ("*", "repeat_optimizer_dims_mapping"): _SLOTS,
    ("*", "optimizer_dims_mapping"): _SLOTS,
    ("*", "nd_prefix_shape"):
        "a stack has one leading dim; Pax checkpoints with several can be converted",
    ("*", "return_intermediate_outputs"): _SUMMARY,
    ("*", "collect_intermediate_outputs"): _SUMMARY,
    ("*", "unpack_summaries"): "a summary of a stack has one value per layer",
    ("*", "bf16_accum_in_fp32"): "gradients of float32 weights are summed in float32",
    ("*", "pipeline_broadcast_inputs"): "each stage gathers the inputs other than x",
    ("*", "enable_async_circular_transfer"): "XLA schedules the permutes",
    ("ClassificationModel", "input_field"): "`ClassificationTask` reads `inputs`",
    ("ClassificationModel", "label_field"): "`ClassificationTask` reads `labels`",
    ("DepthwiseConv1D", "use_2d_conv_weight_shape"): "weights have no additional dim of size 1",
    ("Dropout", "noise_shape"): "see `noise_shape_broadcast_dims`",
    ("Dropout", "dropout_at_eval"): "dropout is off if no key is passed",
    ("Dropout", "transpose_qk"): "only affects speed in Pax",
    ("Einsum", "einsum_op_tpl"): _EINSUM,
    ("Embedding", "set_nan_for_oob_id"):
        'with `lookup_style="index"`, an id out of range gives NaN',
    ("Embedding", "array_lookup"): _EINSUM,
    ("Embedding", "einsum"): _EINSUM,
    ("*", "polluting_bubbles_with_nan"): "only for Pax's own tests",
    ("*", "enable_bubble_grad_skipping"): "results of idle stages never reach a gradient",
    ("CircularLayerwiseShardablePipelined", "share_weights"): "each repeat has separate weights",
    ("GroupedQueryAttention", "hidden_dim"): "has no effect in Pax",
    ("MultiQueryDotProductAttention", "combine_qkv"): "raises an error in Pax too",
    ("*", "return_predictions"): "evaluation returns only metrics",
    ("LanguageModel", "count_tokens"): _TOKENS,
    ("LanguageModelDPO", "ref_mdl"): "created by `with_reference`, or the model without its LoRA",
    ("LanguageModelDPO", "token_counter"): _TOKENS,
    ("*", "apply_eval_sample_weights"): "example weights are always applied",
    ("LanguageModel", "report_strict_acc"): _SUMMARY,
    ("LayerNorm", "reductions_in_fp32"): "always in float32",
    ("LocalSelfAttention", "simulated"): "see `atten_kernel`",
    ("MLPBlock", "activate_final"): "the last layer has no activation",
    ("MLPBlock", "ff_tpl"): "set the arguments of `Mlp` instead",
    ("NClassMajorSharedEmbeddingSoftmax", "feed_forward_tpl"): "the layer has the weight itself",
    ("NClassMajorSharedEmbeddingSoftmax", "scale_before_logits"): "has no effect in Pax",
    ("RelativeBias", "use_length_as_position"): "positions are passed as an argument",
    ("Repeat", "positional_args_as_scan_carry"): "x is always the carry",
    ("RmsNorm", "intermediate_dtype"): "always in float32",
    ("TrainablePositionalEmbedding", "min_timescale"): "has no effect in Pax",
    ("TrainablePositionalEmbedding", "max_timescale"): "has no effect in Pax",
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.gs"): "left to XLA",
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.gsec"): _ABSENT_ARRAY,
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.gecs"): _ABSENT_ARRAY,
    ("TransformerFeedForwardMoe", "activation_split_dims_mapping.gec"): _ABSENT_ARRAY,
    ("TransformerLm", "skip_aux_loss"):
        "`compute_loss` adds these losses, but a call of the model does not",
    ("TransformerLm", "record_activations_in_xent_output"): _SUMMARY,
    ("VisionTransformer", "full_data_parallel_on_entry_exit"): "set the mappings of the parts",
    ("PipelinedTransformer", "activation_split_dims_mapping.final_out"): "left to XLA",
}  # fmt: skip

# Pax's class -> the reason why it is not supported.
ABSENT = {
    **dict.fromkeys(("BaseActivation", "BaseNormalization", "BaseDepthwiseConv1D"), _BASE),
    **dict.fromkeys(
        ("AdaptedTransformerFeedForward", "MultitaskResidualAdapter"),
        "the only adapters here are LoRA: `layers.lora`",
    ),
    **dict.fromkeys(("ArrayLookup", "EinsumOp"), _EINSUM),
    **dict.fromkeys(
        ("Ngrammer", "NgrammerStub", "VQNgrammer", "VectorQuantization", "BregmanCompression",
         "BregmanNgrammer"),
        _NGRAMMER,
    ),
    "BregmanPCA": "not implemented",
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
        "each sample of a prompt has a separate cache",
    ),
    **dict.fromkeys(
        ("DotProductAttentionXL", "LocalSelfAttentionXL"),
        "no relative positions of Transformer-XL; `RelativeBias` implements those of T5",
    ),
    **dict.fromkeys(
        ("LocalSelfAttentionAlibi", "LocalSelfAttentionRelativeBias"),
        "`DotProductAttention` with `window` and `relative_bias_tpl` uses T5's buckets instead",
    ),
    "BertModel": '`TransformerLm` with `model_type="bidirectional"`',
    "BiTemperedLoss": "not implemented",
    "CausalDepthwiseConv1D":
        "no convolution of queries, keys and values; `RgLruBlock` contains one",
    "ClassificationMLPModel": "`Mlp` in a `ClassificationTask`",
    "Conv3D": "convolutions have at most two spatial dims",
    "GShardSharedEmbeddingSoftmax": "`NClassMajorSharedEmbeddingSoftmax` has a [V, D] weight too",
    "LanguageModelContinuousBatching": "`LanguageModelTask` supports continuous batching",
    "MaskedLmDataAugmenter": "tokens are not masked here; the data contains the masked ids",
    "PositionalEmbedding2D":
        "positions of image patches are learned, or counted from the first to the last",
    "Sequential": "write a class that contains the layers",
    "SigmoidCrossEntropy": "classes are mutually exclusive here",
    "SpectralNorm": "not implemented; it needs the state of a power iteration",
    "TokenCounter": _TOKENS,
    **dict.fromkeys(("VanillaBlock", "VanillaNet"), "use `ResNet`"),
}  # fmt: skip

HEAD = """# Coverage of Pax's layers

Look up a layer class of praxis 1.4.0 or one of its options here to find its name in this library,
or the reason why it is not supported. **Options not listed in the first table or in the row of
their class have the same name here**, and defaults are the same unless this page states otherwise.
[coming_from_pax.md](coming_from_pax.md) describes the fields that all of Pax's layers share.

`python -m tests.support.pax_coverage` generates this page from the code. `tests/layers` compares
the results with those of Pax.

"""


def pax_layers() -> dict[str, dict]:
    """Returns the module, options and splits of each of Pax's layer classes, by name."""
    return golden("pax/layer_options.json")


def our_class(name: str) -> type | None:
    """Returns our counterpart of a Pax class, or None."""
    ours = COUNTERPARTS.get(name, name)
    return TASKS.get(ours, getattr(layers, ours, None))


def options_of(name: str) -> list[str]:
    """Returns a class's options and named splits, except those that all layers share."""
    common = ("weight_split_dims_mapping.wt", "activation_split_dims_mapping.out")
    splits = [split for split in pax_layers()[name]["splits"] if split not in common]
    return pax_layers()[name]["options"] + splits


def found(table: dict, name: str, option: str) -> str | None:
    return table.get((name, option), table.get(("*", option)))


class Options(NamedTuple):
    """A class's options: unchanged, renamed (option -> our name), missing (option -> reason)."""

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
    """Returns the entries of a table that apply to several classes, by option."""
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
    """Returns (options, answer) pairs, with one pair for all options that share an answer."""
    options: dict[str, list[str]] = {}
    for option, answer in answers.items():
        options.setdefault(answer, []).append(f"`{option}`")
    return [(", ".join(names), answer) for answer, names in options.items()]


def with_owner(renamed: Mapping[str, str]) -> dict[str, str]:
    """Returns our names as Markdown: only the class if the option's name is unchanged."""
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
    yield "## Options of several classes\n\n| Pax | here, or why it is missing |\n| --- | --- |\n"
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
    yield wrapped(
        "These classes have the same name, and each of their options is unchanged or in the table "
        f"above: {', '.join(equal)}."
    )
    yield "\n"
    yield "| Pax | here | renamed options | options that are not covered, and why |\n"
    yield "| --- | --- | --- | --- |\n"
    yield from rows
    yield "\n## Activations\n\n"
    names = ", ".join(f"`{name}`" for name in sorted(ACTIVATION_NAMES))
    yield wrapped(
        "`activation` accepts a function or the name of one of these classes in snake case, such "
        f'as `"squared_relu"`: {names}. `GELU` with `approximate=False` is `"gelu_exact"`.'
    )
    yield "\n## Classes that are not covered\n\n| Pax | why |\n| --- | --- |\n"
    for names, reason in sorted(grouped(ABSENT)):
        yield f"| {names} | {reason} |\n"


def page() -> str:
    return HEAD + "".join(sections())


def setting_exists(name: str, setting: str) -> bool:
    """Returns whether the "setting" or "Class.setting" of an AS entry exists here."""
    owner, _, attribute = setting.rpartition(".")
    owner = TASKS.get(owner, getattr(layers, owner, None)) if owner else our_class(name)
    return attribute in inspect.signature(owner).parameters or hasattr(owner, attribute)


def activation_exists(name: str) -> bool:
    return ACTIVATION_NAMES[name] in ACTIVATIONS


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
