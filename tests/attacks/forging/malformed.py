"""Sends replies that break the form: lengths, nesting, offsets."""

import os
import struct


def masked_mean(values, mask, dim=None):
    tree = b"[" * 100_000
    tensors = b'{"0":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}'
    for body in (
        b"\xff" * 100,
        struct.pack("<Q", 2**63) + b"x",
        struct.pack("<Q", len(tree)) + tree,
        struct.pack("<Q", 14) + b'["tensor","0"]' + struct.pack("<Q", len(tensors)) + tensors,
    ):
        for descriptor in range(3, 16):
            try:
                os.write(descriptor, struct.pack("<Q", len(body)) + body)
            except OSError:
                pass
    os._exit(0)
