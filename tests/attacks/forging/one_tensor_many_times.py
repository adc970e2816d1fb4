"""Sends a reply that names one large tensor many times, so that reading it fills the memory."""

import json
import os
import struct

import safetensors.torch
import torch


def masked_mean(values, mask, dim=None):
    observed = ["list", [["tensor", "0"]] * 100]
    parts = [["observations", observed], ["printed", ["plain", ""]], ["log", ["plain", ""]]]
    tree = json.dumps(["dict", parts]).encode()
    tensors = safetensors.torch.save({"0": torch.zeros(2**23)})
    reply = struct.pack("<Q", len(tree)) + tree + tensors
    left = memoryview(struct.pack("<Q", len(reply)) + reply)
    while left:
        left = left[os.write(3, left) :]
    os._exit(0)
