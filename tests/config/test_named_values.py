"""`--set` with names: functions, classes, what they return, and the settings below them."""

import fiddle as fdl
import jax
import optax
import pytest
from flax import nnx

from praxis_lite import ConfigError, EarlyStopping, Job, RunConfig, layers, optimizers
from praxis_lite.config.overrides import apply_overrides
from praxis_lite.core import Learner
from praxis_lite.layers import TransformerLm, WeightInit
from praxis_lite.tasks.language_model import LanguageModelTask
from tests.support import callables as zoo


def task_with(*settings, packages=()):
    """Returns the config of a language model's task, after `--set`."""
    lm = fdl.Partial(TransformerLm, 17, 6, 11, 3, 1)
    learner = fdl.Config(Learner, fdl.Partial(optax.adamw, b2=0.98), 3e-3)
    config = fdl.Config(Job, task=fdl.Config(LanguageModelTask, lm, learner))
    apply_overrides(config, [f"task.{setting}" for setting in settings], packages)
    return config.task


def test_an_optimizer_is_set_by_its_name_and_its_arguments_afterwards():
    learner = task_with("learner.optimizer=lion", "learner.optimizer.b1=0.8").learner
    # Nothing of adamw's stays: another optimizer's b2 is another number.
    assert learner.optimizer == fdl.Partial(optax.lion, b1=0.8)
    assert fdl.build(learner).optimizer.init({}) is not None
    # A name that says what is there changes nothing.
    for name in ("adamw", "optax.adamw"):
        optimizer = task_with(f"learner.optimizer={name}").learner.optimizer
        assert optimizer == fdl.Partial(optax.adamw, b2=0.98)
    # Pax's numerics have a name of their own, in full.
    optimizer = task_with("learner.optimizer=praxis_lite.optimizers.lion").learner.optimizer
    assert fdl.get_callable(optimizer) is optimizers.lion is not optax.lion


def test_a_schedule_is_what_a_function_returns():
    learner = task_with(
        "learner.learning_rate=constant_schedule()", "learner.learning_rate.value=0.5"
    ).learner
    assert learner.learning_rate == fdl.Config(optax.constant_schedule, value=0.5)


def test_a_template_that_defaults_to_a_class_takes_settings_and_gives_way_to_another():
    block = "model.transformer_layer_tpl"
    model = task_with(
        "model.softmax_tpl.scale_sqrt_depth=true",
        f"{block}.tr_fflayer_tpl.has_bias=false",
        "model.final_ln_tpl=RmsNorm",
        "model.final_ln_tpl.epsilon=0.5",
        f"{block}.tr_atten_tpl.proj_tpl.params_init=jax.nn.initializers.zeros",
    ).model
    assert model.softmax_tpl == fdl.Partial(layers.SharedEmbeddingSoftmax, scale_sqrt_depth=True)
    assert model.transformer_layer_tpl == fdl.Partial(
        layers.Transformer,
        tr_fflayer_tpl=fdl.Partial(layers.TransformerFeedForward, has_bias=False),
        tr_atten_tpl=fdl.Partial(
            layers.DotProductAttention,
            proj_tpl=fdl.Partial(layers.AttentionProjection, params_init=jax.nn.initializers.zeros),
        ),
    )
    assert model.final_ln_tpl == fdl.Partial(layers.RmsNorm, epsilon=0.5)
    weights = nnx.eval_shape(lambda: fdl.build(model)(rngs=nnx.Rngs(0)))
    assert isinstance(weights.final_ln, layers.RmsNorm)
    # The classes' own defaults are as they were.
    assert TransformerLm.__init__.__kwdefaults__["softmax_tpl"] is layers.SharedEmbeddingSoftmax


def activation_with(setting):
    config = fdl.Config(Job, task=fdl.Partial(zoo.Layer))
    apply_overrides(config, [f"task.{setting}"])
    return fdl.build(config.task)().given["activation"]


def test_a_function_takes_settings_and_an_instance_is_set_field_by_field():
    gelu = activation_with("activation.approximate=false")
    assert (gelu.func, gelu.keywords) == (jax.nn.gelu, {"approximate": False})
    assert activation_with("activation=jax.nn.relu") is jax.nn.relu
    model = task_with("model.softmax_tpl.weight_init.scale=0.5").model
    assert fdl.build(model.softmax_tpl.weight_init) == WeightInit("xavier", 0.5)
    # `Stopping | None`: there is nothing of which the name could be a template.
    run = fdl.Config(Job, run=fdl.Config(RunConfig, num_train_steps=7))
    apply_overrides(run, ["run.stopping.early=EarlyStopping", "run.stopping.early.metric=loss"])
    assert run.run.stopping.early == fdl.Config(EarlyStopping, metric="loss")


def test_a_users_own_function_is_named_where_its_package_is_listed():
    setting = "model.transformer_layer_tpl=tests.support.callables.Layer"
    with pytest.raises(ConfigError, match=r"task\.model\.transformer_layer_tpl.*optax\.lion"):
        task_with(setting)
    assert task_with(setting, packages=["tests"]).model.transformer_layer_tpl is zoo.Layer


def test_a_misspelled_name_is_told_its_likes():
    with pytest.raises(ConfigError, match=r"optax\.adamw.*lion"):
        task_with("learner.optimizer=lyon")
