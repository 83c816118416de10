"""The command line, as a user meets it: other processes, an empty directory, no environment variables."""
import json
import os
import subprocess
import sys

import pytest

import jaxpara
from jaxpara import cli, config

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("XLA_", "JAX_")) and name != "COLUMNS"}


def jaxpara_command(*arguments, cwd, **options):
    return subprocess.run([sys.executable, "-m", "jaxpara", *arguments], cwd=cwd, env=CLEAN, capture_output=True, text=True, timeout=180, **options)


SMALL = ["--model.layers=1", "--model.width", "32", "--model.heads=2", "--model.kv_heads", "2", "--model.head_dim", "16", "--model.ffn=64",
         "--train.batch", "4", "--train.seq", "32", "--train.steps", "2", "--data.path", "text.txt"]


@pytest.fixture
def here(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    return tmp_path


def test_train_in_an_empty_directory(here):
    """Sixteen fake devices (more than the default eight) and the run directory, with nothing set up by the user."""
    done = jaxpara_command("train", "gpt_tiny", *SMALL, "--mesh.dp", "2", cwd=here)
    assert done.returncode == 0, done.stderr
    (directory,) = (here / "runs").iterdir()
    assert directory.name.startswith("gpt_tiny-")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert json.loads((directory / "config.json").read_text())["mesh"] == {"pp": 1, "dp": 2, "fsdp": 2, "ep": 1, "sp": 2, "tp": 2}
    for words in ("dp2·fsdp2·sp2·tp2", "16 of 16 cpu", "1/2  loss", "2/2  loss", "over dp", "over fsdp", "over sp", "over tp", "sent by each device"):
        assert words in done.stdout, words
    assert "optim.warmup = 10 leaves no step" in " ".join(done.stdout.split()) and "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_run_dir_and_saved_configuration(here):
    assert jaxpara_command("train", "gpt_single", *SMALL, "--run-dir", "a/b", cwd=here).returncode == 0
    done = jaxpara_command("train", "a/b/config.json", "--run-dir=c", "--train.steps=1", cwd=here)
    assert done.returncode == 0, done.stderr
    first = [json.loads((here / place / "metrics.jsonl").read_text().splitlines()[0])["loss"] for place in ("a/b", "c")]
    assert first[0] == first[1]
    again = jaxpara_command("train", "gpt_single", *SMALL, "--run-dir", "a/b", cwd=here)
    assert again.returncode == 2 and "already holds the metrics" in again.stderr


def test_a_stopped_run_has_status_1(here):
    done = jaxpara_command("train", "gpt_single", *SMALL, "--optim.lr", "1e30", "--optim.name", "sgd", "--optim.clip", "none", cwd=here)
    assert done.returncode == 1 and done.stderr.startswith("Training stopped at step 2") and "Traceback" not in done.stderr


JAX_FREE = """
import sys
from jaxpara import cli
status = cli.main(sys.argv[1:])
sys.exit(status or 50 * ("jax" in sys.modules))
"""


@pytest.mark.parametrize("command", ["plan", "plan gpt_ring --train.batch 8", "plan llama3_70b --target cpu:512", "recipes", "settings", "plan gpt_tinny"])
def test_without_jax(command, tmp_path):
    done = subprocess.run([sys.executable, "-c", JAX_FREE, *command.split()], cwd=tmp_path, env=CLEAN, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 * ("tinny" in command), done.stderr


def test_plan_asks_this_machine_only_for_auto(capsys):
    assert cli.main(["plan", "gpt2_124m"]) == 0
    assert "fsdp8" in capsys.readouterr().out


def test_plan_explains_every_parameter(capsys):
    assert cli.main(["plan", "gpt_hybrid_zero"]) == 0
    out = capsys.readouterr().out
    run = jaxpara.load("gpt_hybrid_zero")
    assert jaxpara.explain(run) in out
    for parameter in ("embedding.tokens", "layers.attention.query", "layers.mlp.down", "norm.scale", "head.weight"):
        assert f"\n{parameter}  " in out
    assert "fsdp (ZeRO-3), dp (ZeRO-1): largest dim that divides" in out


def test_explain_lists_what_stays_replicated():
    run = jaxpara.load("gpt_zero3", {"model.width": 130, "mesh.dp": 4, "model.ffn": 352})
    text = jaxpara.explain(run)
    assert "Replicated although a ZeRO stage asks for shards" in text and "norm.scale: over dp (ZeRO-3), 520 B" in text
    assert "Replicated although" not in jaxpara.explain(jaxpara.load("gpt_zero3"))


def test_explain_needs_a_filled_mesh():
    with pytest.raises(jaxpara.ConfigError, match="mesh.fsdp = auto"):
        jaxpara.explain(jaxpara.load("llama3_8b"))


def test_every_setting_is_listed_with_its_meaning(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["settings"]) == 0
    out = capsys.readouterr().out
    for name, _, _ in config.settings_of(config.Run()):
        assert f"\n{name} " in out
    assert "adamw | sgd | momentum" in out and "global gradient norm" in out


def test_every_recipe_is_listed(capsys):
    assert cli.main(["recipes"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name} " in out for name in jaxpara.recipes()) and "GPT-2 small" in out


@pytest.mark.parametrize("arguments, words", [(["--help"], "recipes"), (["train", "--help"], "--run-dir"), (["plan", "-h"], "--target"), (["--version"], "jaxpara ")])
def test_help(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 0 and words in capsys.readouterr().out


def test_both_spellings_and_negative_values():
    assert cli.split(["train", "--mesh.tp", "2", "x", "--optim.lr=-1", "--optim.clip", "-3", "--run-dir", "d", "--data.path=a=b"]) == (
        ["train", "x", "--run-dir", "d"], {"mesh.tp": "2", "optim.lr": "-1", "optim.clip": "-3", "data.path": "a=b"}, [])


def test_a_broken_pipe_is_not_a_traceback(tmp_path):
    shell = f"{sys.executable} -m jaxpara plan gpt_tiny | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {shell}"], cwd=tmp_path, env=CLEAN, capture_output=True, text=True, timeout=60)
    assert done.stdout == "gpt_tiny\n" and "Traceback" not in done.stderr and "Error" not in done.stderr
