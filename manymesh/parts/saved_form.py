"""The names, shapes and dtypes that save_pretrained would write of a transformers model, without writing anything."""

from __future__ import annotations

from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict


def saved_form(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model's tensors as they are in memory, and as they are saved (experts one by one, where they are fused).

    All on meta, where the model itself may be too. Tied weights are there once.
    """
    state_dict = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state_dict.pop(name, None)
    state_dict = remove_tied_weights_from_state_dict(state_dict, model)
    shells = {name: torch.empty_like(tensor, device="meta") for name, tensor in state_dict.items()}
    return shells, revert_weight_conversion(model, dict(shells))
