"""A small assembler of classic BPF programs, in which jumps name labels.

A program is a list of instructions and, as strings, of labels. Sources: linux/bpf_common.h and
linux/filter.h of the kernel's headers.
"""

import struct
from dataclasses import dataclass

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K
_JUMP_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_JUMP_IF_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_JUMP_IF_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_MAX_JUMP = 255  # an offset is one byte


@dataclass(frozen=True)
class Instruction:
    """One instruction; a jump goes to the label `then` or `otherwise`, None being the next line."""

    code: int
    value: int
    then: str | None = None
    otherwise: str | None = None


Program = list[Instruction | str]


def load(offset: int) -> Instruction:
    """Load the 32-bit word at this offset of the data."""
    return Instruction(_LOAD, offset)


def keep_bits(mask: int) -> Instruction:
    """Keep these bits of what was loaded."""
    return Instruction(_AND, mask)


def give(value: int) -> Instruction:
    """End the program with this value."""
    return Instruction(_RETURN, value)


def jump_if_equal(value: int, label: str) -> Instruction:
    """Jump where what was loaded is this value."""
    return Instruction(_JUMP_IF_EQUAL, value, then=label)


def jump_unless_equal(value: int, label: str) -> Instruction:
    """Jump where what was loaded is another value."""
    return Instruction(_JUMP_IF_EQUAL, value, otherwise=label)


def jump_if_at_least(value: int, label: str) -> Instruction:
    """Jump where what was loaded is this value or a larger one."""
    return Instruction(_JUMP_IF_AT_LEAST, value, then=label)


def jump_if_any_bit(mask: int, label: str) -> Instruction:
    """Jump where one of these bits is set in what was loaded."""
    return Instruction(_JUMP_IF_ANY_BIT, mask, then=label)


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

    def measure_jump(place: int, label: str | None) -> int:
        if label is None:
            return 0
        offset = places.get(label, -1) - (place + 1)
        if not 0 <= offset <= _MAX_JUMP:
            raise ValueError(f"{label} should stand at most {_MAX_JUMP} instructions below a jump")
        return offset

    return b"".join(
        struct.pack(
            "<HBBI",
            line.code,
            measure_jump(place, line.then),
            measure_jump(place, line.otherwise),
            line.value,
        )
        for place, line in enumerate(lines)
    )
