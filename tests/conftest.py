"""Strict JAX for all tests, and shapes checked: every function of seqlab runs through jaxtyping and beartype."""

import contextlib
import gc
import io
import logging
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import absl.logging
import jax
import pytest
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


@pytest.fixture(scope="module", autouse=True)
def _free_compiled_programs():
    """Every loaded program holds memory maps, of which Linux gives a process 65,530: all modules together need more."""
    yield
    jax.clear_caches()
    gc.collect()


@dataclass(frozen=True)
class Typed:
    """What a command line came to."""

    code: int
    lines: list[str]
    """Of standard error."""


@pytest.fixture(scope="session")
def command():
    """Types a command line in a directory, in this process: command("model=gru train.steps=5", tmp_path)."""
    import seqlab.launch
    import seqlab.run

    def type_in(line, directory, run=seqlab.run.run):
        # Hydra sets up logging anew, at which absl closes the stream it was imported with: pytest's own capture
        absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)
        error = io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.chdir(directory),
            contextlib.redirect_stderr(error),
            # optax raises float32 decay rates to an int32 count of steps, which strict promotion refuses
            jax.numpy_dtype_promotion("standard"),
        ):
            patch.setattr(sys, "argv", ["seqlab", *shlex.split(line)])
            patch.setattr(sys, "path", [*sys.path])
            patch.setenv("COLUMNS", "200")
            patch.setenv("HYDRA_FULL_ERROR", "1")  # which `launch` sets
            try:
                code = seqlab.launch.launch(run)
            except SystemExit as stop:
                code = stop.code
        logging.root.setLevel(logging.WARNING)
        for logger in logging.root.manager.loggerDict.values():  # Hydra sets up logging anew, without those it finds
            if isinstance(logger, logging.Logger):
                logger.disabled = False
        return Typed(code, error.getvalue().splitlines())

    return type_in


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a small disk of its own: small_disk(kilobytes=400) -> its directory."""
    mounted = []

    def mount(kilobytes):
        directory = tmp_path / f"disk{len(mounted)}"
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(directory)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a disk cannot be mounted here: {done.stderr.strip()}")
        mounted.append(directory)
        return directory

    yield mount
    for directory in mounted:
        subprocess.run(["umount", str(directory)], check=True)
