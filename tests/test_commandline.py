"""From what is typed to a job or a refusal: one line that names the value and what would work, and nothing on disk."""

import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

CONF = Path(__file__).parents[1] / "conf"
CHOICES = {
    group: ", ".join(sorted(file.stem for file in (CONF / group).glob("*.yaml")))
    for group in ("model", "task", "position")
}

REFUSED = {
    # unknown names, and the nearest that exists
    "model=transformr": ("model=transformr", "transformer"),
    "model=qqq": ("model=qqq", f"use {CHOICES['model']}"),
    "task=mqarr": ("task=mqarr", "mqar"),
    # patterns and their parts
    "model=hybrid pattern=[ssm,gruu]": ("gruu is no model", "gru?"),
    "model=hybrid pattern=[hybrid]": ("hybrid is no model of its own", "transformer"),
    "model=hybrid pattern=[]": ("pattern=[]", "pattern=[ssm,attention]"),
    "pattern=[ssm]": ("pattern=", "model=hybrid"),
    "model=hybrid pattern=[ssm,ssm,gru] model.depth=4": ("model.depth=4", "model.depth=3"),
    "model=hybrid model.depth=0": ("model.depth=0", "at least 1"),
    "model=hybrid +model.parts.ssm.state=8": ("model.parts.ssm.state ", "state_size"),
    "model=hybrid +model.parts.ssm.width=8": ("model.parts.ssm.width", "state_size"),  # what all parts share
    "model=hybrid +model.parts.ssm.state_size=-3": ("model.parts.ssm.state_size=-3", "at least 1"),
    "model=hybrid +model.parts.ssm=3": ("model.parts.ssm=3", "model.parts.ssm.WORD=VALUE"),
    "model=hybrid +model.parts.gru.state_size=3": ("model.parts.gru", "pattern=[ssm,attention]"),
    # what does not go together
    "model=transformer position=rope model.heads=64": ("model.width / model.heads", "even"),
    "model=transformer model.kv_heads=3": ("model.kv_heads=3", "[1, 2, 4]"),
    "model=sliding_window model.window=0": ("model.window=0", "at least 1"),
    "model=mamba model.eigenvalue_range=[0,2]": ("model.eigenvalue_range=[0, 2]", "[-1,1]"),
    "model=mamba2 model.heads=3": ("model.heads=3", "[1, 2, 4"),
    "model=ssm chunk=0": ("chunk=0", "at least 1"),
    "model.tied=no": ("model.tied=no", "False"),
    "model=gru position=t5": ("position=t5", "position=none"),
    "model=gru position=learned position.length=40": ("T=64", "position.length=64"),
    "model=gru position=learned position.length=70 task.eval_lengths=[128]": ("T=128", "position.length=128"),
    "'runs=\"a[b]\"'": ("a[b]", "no checkpoint can be kept"),
    "position=ropes": ("position=ropes", "rope"),
    "optimizer=sgd": ("optimizer=sgd", "adamw"),
    "experiment=smok": ("experiment=smok", "smoke"),
    "task=null": ("NoneType", "string"),
    "~task": ("task=", "--help"),
    "model.widht=8": ("model.widht", "model.width"),
    "train.step=5": ("train.step ", "train.steps"),
    "widht=8": ("widht", "--cfg job"),
    "model=ssm model.heads=3": ("model.heads", "model."),
    "model=transformer model.build.mixer.head=3": ("model.build.mixer.head", "model.build.mixer.heads"),
    "+task.foo=1": ("foo", ""),
    "foo": ("foo", ""),
    "model.build.mixer._target_=mine.Mixer": ("mine.Mixer", "No module named"),
    "model=gru,lstm": ("model=gru,lstm", "-m"),
    "modle=lstm": ("modle", "did you mean model?"),
    "ssm": ("ssm", "model=ssm"),
    "measure=roles": ("measure=roles", "task=mqar"),
    "--config-dir=missing": ("missing", ""),
    "model.width=${model.depht}": ("model.depht", ""),
    # values of another kind
    "train.steps=many": ("train.steps=many", "1200"),
    "train.steps=0": ("train.steps=0", "1"),
    "train.steps=null": ("train.steps=None", "1200"),
    "model.width=8.5": ("model.width=8.5", "64"),
    "model=gru model.state_size=-3": ("model.state_size=-3", "1"),
    "model.dropout=1.5": ("model.dropout=1.5", "below 1"),
    "population.seeds=0": ("population.seeds=0", "1"),
    "population.learning_rates=0.01": ("population.learning_rates=0.01", "["),
    "population.learning_rates=[]": ("population.learning_rates=[]", "[0.001,0.003]"),
    "population.learning_rates=[abc]": ("abc", "[0.001,0.003]"),
    "population.learning_rates=[-1]": ("-1", "[0.001,0.003]"),
    "seed=-1": ("seed=-1", "0"),
    "seed=5000000000": ("seed=5000000000", "2^32"),
    "optimizer.warmup=2.0": ("optimizer.warmup=2", "0 to 1"),
    "optimizer.b2=1.0": ("optimizer.b2=1", "below 1"),
    "optimizer.clip_norm=0.0": ("optimizer.clip_norm=0", "positive"),
    "train.compute_dtype=float16": ("train.compute_dtype=float16", "bfloat16"),
    "scan=fast": ("scan=fast", "associative"),
    # values that do not fit together
    "model=encoder task=text task.objective=next": ("task.objective=next", "task.objective=masked"),
    "model=gru model.bidirectional=true task=text task.objective=next": ("task.objective=next", "masked"),
    "model=gru model.bidirectional=both": ("model.bidirectional=both", "concat"),
    "model=encoder model.bidirectional=true": ("model.bidirectional", "false"),
    "model=transformer model.width=10": ("model.width=10", "[1, 2, 5, 10]"),
    "model=transformer position=rope model.width=12": ("position=rope", "even"),
    "model=gru position=rope": ("position=rope", "position=none"),
    "task.pairs=8 task.length=16": ("8", "at most 4 pairs"),
    "task.length=15": ("15", "use 16"),
    "task.vocab_size=4": ("4", "vocab_size 17"),
    "task.eval_lengths=[15]": ("15", "16"),
    "task=roles task.length=3": ("task.length=3", "6"),
    "task=roles task.nouns=[a,b]": ("task.nouns", "8"),
    # files
    "task=text task.corpus=kjv": ("task.corpus=kjv", "asv"),
    "task=text task.path=missing.txt": ("task.path=missing.txt", "name a UTF-8 text file"),
    "task=text task.path=latin.txt": ("task.path=latin.txt", "convert it to UTF-8"),
    "task=text task.path=empty.txt": ("task.path=empty.txt", "name a UTF-8 text file"),
    "task=text task.path=short.txt": ("task.path=short.txt", "longer text"),
    "task=text task.path=runs": ("task.path=runs", "name a UTF-8 text file"),
    "runs=short.txt/below": ("runs=short.txt/below", "use runs=DIRECTORY"),
}


def on_disk(directory):
    return {path: path.read_bytes() if path.is_file() else None for path in directory.rglob("*")}


@pytest.mark.parametrize("line", REFUSED)
def test_bad_input_gets_one_line_and_leaves_no_trace(command, tmp_path, line):
    (tmp_path / "latin.txt").write_bytes("déjà vu".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "runs" / "mqar").mkdir(parents=True)
    (tmp_path / "runs" / "mqar" / "note.txt").write_text("mine")
    before = on_disk(tmp_path)
    typed = command(line, tmp_path)
    value, alternative = REFUSED[line]
    assert typed.code == 2
    assert len(typed.lines) == 1, typed.lines
    assert typed.lines[0].startswith("seqlab: ")
    assert value in typed.lines[0]
    assert alternative in typed.lines[0]
    assert on_disk(tmp_path) == before


def job_of(command, tmp_path, line):
    jobs = []
    typed = command(line, tmp_path, run=lambda job: jobs.append(job) or 0)
    assert typed == type(typed)(0, [])
    (job,) = jobs
    return job


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("", "mqar/ssm/defaults"),
        ("runs=elsewhere overwrite=true", "mqar/ssm/defaults"),
        ("model=transformer position=sinusoidal train.steps=1200", "mqar/transformer/defaults"),  # as they are anyway
        ("train.steps=300 model=transformer position=rope", "mqar/transformer/position=rope,train.steps=300"),
        ("position=rope model=transformer train.steps=300", "mqar/transformer/position=rope,train.steps=300"),
        ("task=roles model.width=32 seed=7", "roles/ssm/model.width=32,seed=7"),
        ("population.learning_rates=[1e-3,3e-3]", "mqar/ssm/population.learning_rates=0.001+0.003"),
    ],
)
def test_a_directory_is_named_by_what_differs_from_the_defaults(command, tmp_path, line, name):
    job = job_of(command, tmp_path, line)
    assert job.name == name
    assert job.directory == Path("elsewhere" if "elsewhere" in line else "runs") / name
    assert shlex.split(job.command) == ["python", "-m", "seqlab.run", *line.split()]


def test_names_that_are_cut_or_cleaned_still_differ(command, tmp_path):
    lines = ["task=text task.path=a/b.txt", "task=text task.path=a_b.txt", "task=text 'task.path=a b.txt'"]
    lines += [f"'task.nouns=[{','.join(f'word{i}' for i in range(40))},{last}]' task=roles" for last in ("x", "y")]
    names = [job_of(command, tmp_path, line).name for line in lines]
    assert len(set(names)) == len(lines)
    for name in names:
        assert len(name.split("/")) == 3
        assert len(name.encode()) < 200  # a file system takes 255 bytes


def test_an_experiment_is_named_by_what_it_sets(command, tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "short.yaml").write_text("# @package _global_\ntrain: {steps: 7}\n")
    assert job_of(command, tmp_path, "--config-dir mine experiment=short").name == "mqar/ssm/train.steps=7"


def test_a_hybrid_takes_its_mixers_from_the_models_that_its_pattern_names(command, tmp_path):
    job = job_of(command, tmp_path, "model=hybrid pattern=[ssm,ssm,attention] +model.parts.ssm.state_size=9")
    assert job.name == "mqar/hybrid/model.parts.ssm.state_size=9,pattern=ssm+ssm+attention"
    model = OmegaConf.to_container(job.config.model, resolve=True)
    ssm, again, attention = model["build"]["mixer"]
    assert ssm == again and ssm["_target_"].endswith("LRU") and ssm["state_size"] == 9
    assert attention["_target_"].endswith("Attention") and attention["heads"] == 4
    assert model["depth"] == model["build"]["depth"] == 3
    # a word whose default is null
    windowed = job_of(command, tmp_path, "model=hybrid +model.parts.attention.window=5").config
    assert windowed.model.build.mixer[1].window == 5


def test_an_interpolation_is_typed_back_as_it_was(command, tmp_path):
    job = job_of(command, tmp_path, "model.state_size='${model.width}'")
    assert job.config.model.state_size == 64
    assert "${model.width}" in job.command


def test_a_sweep_goes_on_after_a_bad_job_and_lists_it(command, tmp_path):
    done = []
    typed = command("-m model=gru,lstm train.steps=5,-1", tmp_path, run=lambda job: done.append(job.name) or 0)
    assert done == ["mqar/gru/train.steps=5", "mqar/lstm/train.steps=5"]
    assert typed.code == 2
    assert "2 of 4 runs finished" in typed.lines
    reason = "train.steps=-1 must be at least 1; its default is 1200"
    assert typed.lines[-2:] == [f"  model={model} train.steps=-1: {reason}" for model in ("gru", "lstm")]
    assert not any("Traceback" in line for line in typed.lines)


def test_a_bug_keeps_its_traceback_and_a_sweep_goes_on(command, tmp_path):
    def run(job):
        return 1 // job.config.seed and 0

    typed = command("-m seed=0,1", tmp_path, run=run)
    assert typed.code == 1
    assert "Traceback (most recent call last):" in typed.lines
    assert typed.lines[-2:] == [
        "1 of 2 runs finished",
        "  seed=0: ZeroDivisionError: integer division or modulo by zero",
    ]


def test_a_sweep_of_an_unknown_name_starts_nothing(command, tmp_path):
    done = []
    typed = command("-m model=gru,lstmm", tmp_path, run=lambda job: done.append(job.name) or 0)
    assert (typed.code, typed.lines) == (2, ["seqlab: model=lstmm is unknown; did you mean lstm?"])
    assert not done


def test_a_signal_ends_a_sweep(command, tmp_path):
    done = []

    def run(job):
        done.append(job.config.seed)
        return 130

    assert command("-m seed=0,1", tmp_path, run=run).code == 130
    assert done == [0]


def test_ctrl_c_outside_of_training_gets_one_line(command, tmp_path):
    def run(job):
        raise KeyboardInterrupt

    typed = command("-m seed=0,1", tmp_path, run=run)
    assert typed.code == 130
    assert typed.lines == ["[1] seed=0", "seqlab: stopped by Ctrl-C; the same command goes on from the last checkpoint"]


def test_the_worst_exit_code_of_a_sweep_is_its_own(command, tmp_path):
    assert command("-m seed=0,1", tmp_path, run=lambda job: 3 * job.config.seed).code == 3


def in_a_process(tmp_path, *words):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)


def test_a_process_is_refused_too(tmp_path):
    done = in_a_process(tmp_path, "-m", "seqlab.run", "train.target=high")
    assert done.returncode == 2
    assert done.stderr == "seqlab: train.target=high is not a number; null never stops early\n"
    assert not list(tmp_path.iterdir())


def test_help_answers_at_once_and_lists_the_choices(tmp_path):
    """In 1.5 s; about 0.7 s of the CPU's time were seen, which does not depend on what else runs."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = in_a_process(tmp_path, "-X", "importtime", "-m", "seqlab.run", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "seqlab.commandline" in imported
    assert not imported & {"jax", "flax", "orbax", "tensorboard", "matplotlib", "rich"}
    for group, choices in CHOICES.items():
        assert f"{group}: {choices}" in done.stdout
    assert not list(tmp_path.iterdir())
