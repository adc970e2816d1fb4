"""Sends well-formed replies that are not what is expected: one tensor where a list of observations
should be, and one that is all there is, which has no names to look up."""

import os
import struct

import torch
from utils.grading import packing


def send(value):
    body = packing.pack(value)
    os.write(3, struct.pack("<Q", len(body)) + body)
    os._exit(0)


def masked_mean(values, mask, dim=None):
    send({"observations": torch.zeros(()), "printed": "", "log": ""})


def calc_entropy(logits):
    send(torch.zeros(3))
