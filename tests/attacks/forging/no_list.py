"""Sends well-formed replies that are not what is expected: one tensor where a list of observations
should be, and one that is all there is, which has no names to look up."""

import json
import os
import struct

import safetensors.torch
import torch


def send(tree):
    text = json.dumps(tree).encode()
    body = struct.pack("<Q", len(text)) + text + safetensors.torch.save({"0": torch.zeros(3)})
    os.write(3, struct.pack("<Q", len(body)) + body)
    os._exit(0)


def masked_mean(values, mask, dim=None):
    rest = [["printed", ["plain", ""]], ["log", ["plain", ""]], ["is_stub", ["plain", False]]]
    send(["dict", [["observations", ["tensor", "0"]], *rest]])


def calc_entropy(logits):
    send(["tensor", "0"])
