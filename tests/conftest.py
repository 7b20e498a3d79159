"""Strict JAX for all tests, and shapes checked: every function of seqlab runs through jaxtyping and beartype."""

import os
from pathlib import Path

import jax
from flax import struct
from jaxtyping import install_import_hook

plain_dataclass = struct.dataclass


def unchecked_dataclass(cls, **kwargs):
    """JAX rebuilds a pytree around whatever it likes (stacked arrays, shapes, axes): only functions are checked."""
    cls = plain_dataclass(cls, **kwargs)
    cls.__no_type_check__ = True
    return cls


struct.dataclass = unchecked_dataclass
install_import_hook("seqlab", "beartype.beartype")


def pytest_configure(config):
    # beartype about the type parameters of flax's own nnx.State
    config.addinivalue_line("filterwarnings", "ignore::beartype.roar.BeartypeDecorHintPep585DeprecationWarning")
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path(config.rootpath, ".pytest_cache", "xla"))
    for name, value in {
        "jax_numpy_dtype_promotion": "strict",
        "jax_numpy_rank_promotion": "raise",
        "jax_compilation_cache_dir": cache,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }.items():
        jax.config.update(name, value)
