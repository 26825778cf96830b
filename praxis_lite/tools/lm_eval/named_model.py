"""The class that lm_eval's command line finds under `--model praxis_lite`."""

from collections.abc import Mapping
from typing import Any

from lm_eval.utils import simple_parse_args_string

from praxis_lite.tools.lm_eval.lm import HarnessModel
from praxis_lite.tools.lm_eval.model_args import model_of_args


class NamedModel(HarnessModel):
    """A HarnessModel that `--model_args` describes."""

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> "HarnessModel":
        """Returns the model of `--model_args`; see `model_of_args`."""
        return model_of_args({**arg_dict, **(additional_config or {})})

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> "HarnessModel":
        """Returns the model of "job=DIR,batch_size=32"; see `model_of_args`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)
