"""Sends a well-formed reply with one tensor where a list of observations should be."""

import os
import struct

import torch
from utils.grading import packing


def masked_mean(values, mask, dim=None):
    body = packing.pack({"observations": torch.zeros(()), "printed": "", "log": ""})
    os.write(3, struct.pack("<Q", len(body)) + body)
    os._exit(0)
