"""Whether a compiled program fits the memory of its device."""

import os

import jax
from jax.stages import Compiled

SHARE = 0.8
"""Of the memory: the rest is for validation, measures and fragments."""


def fits(program: Compiled) -> bool:
    """True also where nobody knows."""
    needed, memory = bytes_needed(program), bytes_of_memory()
    return needed is None or memory is None or needed <= SHARE * memory


def bytes_needed(program: Compiled) -> int | None:
    """On each device: its arguments, results and what it computes with; None where the backend does not say."""
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes  # a donated argument is its own result
    return analysis.argument_size_in_bytes + analysis.temp_size_in_bytes + results


def bytes_of_memory() -> int | None:
    """Of the first device of this process; the machine's, shared by its devices, where that is a CPU."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.local_device_count()
    return (device.memory_stats() or {}).get("bytes_limit")
