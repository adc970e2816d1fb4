"""Observations as bytes: a JSON tree, then the tensors as safetensors. Reading them runs no code.

What is read may come from hostile code: whatever is not as `pack` writes it is a ValueError.
"""

import json
import math
import struct
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from utils.grading.observation import Raised, Unsupported

MAX_REPLY_BYTES = 2**26  # of one reply
MAX_STRING_CHARACTERS = 10_000  # of one string
MAX_NODES = 100_000  # of the tree
NODE_BYTES = 200  # of its text, on average: an empty list of 2 bytes takes 64 in memory
NODES_PER_TENSOR = 10  # of the tree at its longest: an empty tensor of 50 bytes takes 1400
_LENGTH = struct.Struct("<Q")


def pack(value: Any) -> bytes:
    """Pack plain data as 8 bytes with the length of the tree, the tree, and the tensors."""
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_to_tree(value, tensors)).encode()
    return _LENGTH.pack(len(tree)) + tree + safetensors.torch.save(tensors)


def unpack(data: bytes, max_nodes: int = MAX_NODES) -> Any:
    """Unpack what `pack` was given. Raises ValueError for anything else."""
    if len(data) > MAX_REPLY_BYTES:
        raise ValueError(f"data should be at most {MAX_REPLY_BYTES} bytes, but is {len(data)}")
    try:
        (length,) = _LENGTH.unpack_from(data)
        if length > max_nodes * NODE_BYTES:
            raise ValueError("too long a tree")
        (header,) = _LENGTH.unpack_from(data, _LENGTH.size + length)
        if header > max_nodes * NODE_BYTES // NODES_PER_TENSOR:
            raise ValueError("too many tensors")
        tree = json.loads(data[_LENGTH.size : _LENGTH.size + length])
        tensors = safetensors.torch.load(data[_LENGTH.size + length :])
        return _from_tree(tree, tensors, [max_nodes])
    except Exception as error:  # of the three formats; RecursionError for deep nesting
        raise ValueError(f"data is no observation: {type(error).__name__}") from error


def _to_tree(value: Any, tensors: dict[str, Tensor]) -> list:
    if value is None or type(value) in (bool, int, float, str):
        value = value[:MAX_STRING_CHARACTERS] if type(value) is str else value
        if type(value) is int and value.bit_length() > 64:
            value = math.inf  # as it is read; JSON has no numbers of thousands of digits
        return ["plain", value]
    if isinstance(value, Tensor):
        name = str(len(tensors))
        tensors[name] = value.contiguous()
        return ["tensor", name]
    if isinstance(value, list):
        return ["list", [_to_tree(item, tensors) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[key, _to_tree(item, tensors)] for key, item in value.items()]]
    if isinstance(value, Raised):
        said = (value.kind, value.message, value.trace, value.place, value.origin)
        return ["raised", [text[:MAX_STRING_CHARACTERS] for text in said]]
    if isinstance(value, Unsupported):
        return ["unsupported", value.kind[:100]]
    raise TypeError(f"value should be plain data, but is a {type(value).__name__}")


def _from_tree(tree: Any, tensors: dict[str, Tensor], left: list[int]) -> Any:
    left[0] -= 1
    if left[0] < 0:
        raise ValueError("too many nodes")
    kind, content = tree
    if kind == "plain" and (content is None or type(content) in (bool, int, float, str)):
        if type(content) is int and not -(2**63) <= content < 2**63:
            return math.inf  # no exercise asks for such a number
        return content
    if kind == "tensor":
        return torch.Tensor.clone(tensors.pop(content))  # one named often would fill the memory
    if kind == "list":
        return [_from_tree(item, tensors, left) for item in content]
    if kind == "dict":
        return {str(key): _from_tree(item, tensors, left) for key, item in content}
    if kind == "raised":
        return Raised(*(str(text) for text in content))
    if kind == "unsupported":
        return Unsupported(str(content))
    raise ValueError("unknown kind")
