"""Where weights lie in memory. Knows tensors; knows nothing of stores or slots.

Small float32 products give other last bits when a matrix starts inside a cache line, and transformers maps weights
straight from files, where they start anywhere. Two copies of a model are comparable bit for bit once both are aligned.
"""

from __future__ import annotations

from itertools import chain

from torch import nn

from .blocks import TENSOR_ALIGNMENT


def align_weights(model: nn.Module) -> None:
    """Copy parameters and buffers that start inside a cache line to memory that does not."""
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.device.type == "cpu" and tensor.data_ptr() % TENSOR_ALIGNMENT:
            tensor.data = tensor.data.clone()
