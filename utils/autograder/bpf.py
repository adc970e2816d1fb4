"""A small assembler of classic BPF programs, in which jumps name labels.

A program is a list of instructions and, as strings, of labels. Sources: linux/bpf_common.h and
linux/filter.h of the kernel's headers.
"""

import struct
from dataclasses import dataclass
from functools import partial

_MAX_JUMP = 255  # an offset is one byte


@dataclass(frozen=True)
class Instruction:
    """One instruction; a jump goes to the label `then` or `otherwise`, None being the next line."""

    code: int
    value: int
    then: str | None = None
    otherwise: str | None = None


Program = list[Instruction | str]
load = partial(Instruction, 0x20)  # the 32-bit word at an offset: BPF_LD | BPF_W | BPF_ABS
keep_bits = partial(Instruction, 0x54)  # of a mask: BPF_ALU | BPF_AND | BPF_K
give = partial(Instruction, 0x06)  # a value, at the end: BPF_RET | BPF_K
jump_if_equal = partial(Instruction, 0x15)  # BPF_JMP | BPF_JEQ | BPF_K
jump_if_at_least = partial(Instruction, 0x35)  # BPF_JMP | BPF_JGE | BPF_K
jump_if_any_bit = partial(Instruction, 0x45)  # BPF_JMP | BPF_JSET | BPF_K


def assemble(program: Program) -> bytes:
    """Return the instructions as the kernel reads them, 8 bytes each.

    Raises ValueError for a jump to no label, backwards, or too far.
    """
    places: dict[str, int] = {}
    lines: list[Instruction] = []
    for line in program:
        if isinstance(line, str):
            places[line] = len(lines)
        else:
            lines.append(line)

    def calc_jump(place: int, label: str | None) -> int:
        if label is None:
            return 0
        offset = places.get(label, -1) - (place + 1)
        if not 0 <= offset <= _MAX_JUMP:
            raise ValueError(f"{label} should stand at most {_MAX_JUMP} instructions below a jump")
        return offset

    return b"".join(
        struct.pack("<HBBI", line.code, *(calc_jump(place, label) for label in labels), line.value)
        for place, line in enumerate(lines)
        for labels in [(line.then, line.otherwise)]
    )
