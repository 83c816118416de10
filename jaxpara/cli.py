"""The command `jaxpara`: train, plan, inspect, schedule, recipes, settings.

Every setting is an option of its own dotted name, so those are taken out of the arguments before argparse sees the rest. JAX is
imported only where devices are needed.
"""
import argparse
import os
import sys
from importlib.metadata import version
from pathlib import Path

from jaxpara import checks
from jaxpara.errors import ConfigError, TrainingStopped
from jaxpara.report import screen
from jaxpara.rundir import occupied
from jaxpara.settings import load

OPTIONS = {"--run-dir", "--target", "--json", "--hlo", "--kind", "--stages", "--microbatches", "--chunks", "--times", "--plot", "--csv", "--file"}
"""Options with a value that are not settings."""

FLAGS = {"-h", "--help", "--version", "--strict"}


SCHEDULE = {
    "kind": ("KIND", "gpipe, 1f1b, interleaved, circular, zb_h1, zb_h2, zb_v, dualpipe_v"),
    "stages": ("P", "pipeline stages"),
    "microbatches": ("M", "micro-batches of one step"),
    "chunks": ("V", "chunks per stage (interleaved, circular)"),
    "times": ("F,B,W,hop", "time of forward, input gradient, weight gradient of one micro-batch in one stage, and of one hop (default: 1,1,1,0)"),
    "plot": ("FILE", "draw it there, .svg or .png; needs jaxpara[plot]"),
    "csv": ("FILE", "write the table there: stage,tick,op,microbatch,chunk"),
    "file": ("FILE", "read such a table instead of building one"),
}
"""Options of `jaxpara schedule`: (metavar, what it means)."""


class Parser(argparse.ArgumentParser):
    """argparse that reports like everything else here."""

    def error(self, message):
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. `jaxpara --help` says what there is.")


def parser():
    top = Parser(prog="jaxpara", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                 description="Train GPT models in JAX over a mesh of devices, and know what they communicate.",
                 epilog="Settings have dotted names and go to any recipe: --mesh.tp 2 --train.steps 50 --optim.clip none\n"
                        "(list: `jaxpara settings`). Exit status: 0 done, 1 stopped at a value that is not finite, or\n"
                        "inspect --strict found a difference, 2 settings that cannot be honoured, 130 interrupted.")
    top.add_argument("--version", action="version", version=f"jaxpara {version('jaxpara')}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = lambda name, words, usage: commands.add_parser(name, help=words, description=words, usage=usage, allow_abbrev=False)
    training = add("train", "Train a recipe; config.json and metrics.jsonl go to the run directory.",
                   "jaxpara train [RECIPE] [--run-dir DIR] [--SETTING VALUE ...]")
    training.add_argument("--run-dir", metavar="DIR", help="default: runs/RECIPE-TIME under the current directory")
    planning = add("plan", "Say what a run holds and sends, and where every parameter lies; nothing is compiled.",
                   "jaxpara plan [RECIPE] [--target TARGET] [--SETTING VALUE ...]")
    inspecting = add("inspect", "Compile a recipe's train step for a target and show what it communicates and holds, beside the prediction.",
                     "jaxpara inspect [RECIPE] [--target TARGET] [--json FILE] [--hlo FILE] [--strict] [--SETTING VALUE ...]")
    for command in (planning, inspecting):
        command.add_argument("--target", metavar="TARGET", help="cpu:N, tpu:v5p:4x4x4 (a topology), gpu:h100:4x8 (nodes × devices); no such "
                             "hardware is needed. Default: the devices of this machine")
    inspecting.add_argument("--json", metavar="FILE", help="write the report there too")
    inspecting.add_argument("--hlo", metavar="FILE", help="keep the text of the compiled program there")
    inspecting.add_argument("--strict", action="store_true", help="exit with 1 if anything but a known rewrite differs from the prediction")
    for command in (training, planning, inspecting):
        command.add_argument("recipe", nargs="?", default="gpt_tiny", metavar="RECIPE",
                             help="a shipped recipe, or the path of a recipe or of a run's config.json (default: gpt_tiny)")
    pipelining = add("schedule", "Show a pipeline schedule: who does what when, its bubble, what each stage holds.",
                     "jaxpara schedule --kind KIND --stages P --microbatches M [--chunks V] [--times F,B,W,hop] [--plot FILE] [--csv FILE]\n"
                     "       jaxpara schedule --file FILE.csv [--times F,B,W,hop] [--plot FILE] [--csv FILE]")
    for name, words in SCHEDULE.items():
        pipelining.add_argument(f"--{name}", metavar=words[0], help=words[1])
    add("recipes", "List the shipped recipes.", "jaxpara recipes")
    add("settings", "List every setting: what it takes, its default, what it means.", "jaxpara settings")
    return top


def split(arguments):
    """(arguments for argparse, {dotted setting: text}, violations)."""
    rest, settings, wrong, waiting = [], {}, [], list(arguments)
    while waiting:
        argument = waiting.pop(0)
        option, equals, value = argument.partition("=")
        if option in OPTIONS and not equals and waiting:
            rest += [argument, waiting.pop(0)]
        elif not argument.startswith("--") or option in OPTIONS | FLAGS:
            rest.append(argument)
        elif not equals and (not waiting or waiting[0].startswith("--")):
            wrong.append(f"{option} needs a value, as in {option} VALUE or {option}=VALUE.")
        else:
            name, value = option[2:], value if equals else waiting.pop(0)
            if settings.get(name, value) != value:
                wrong.append(f"{option} is given twice, as {settings[name]} and as {value}. Keep one.")
            settings[name] = value
    return rest, settings, wrong


def checked(options, settings, wrong):
    """The `Run` that a command line asks for; ConfigError with everything wrong with it, whatever the kind."""
    wrong, run = list(wrong), None
    if options.command == "train":
        wrong += occupied(options.run_dir)
    try:
        run = load(options.recipe, settings, data=options.command == "train")
        run = placed(run, options.target) if options.command == "plan" else run
    except ConfigError as error:
        wrong += error.violations
    if wrong:
        raise ConfigError(*wrong)
    return run


def placed(run, target):
    """`run` with its "auto" axis filled, from a target or else from this machine's devices, and checked again."""
    from jaxpara import targets
    auto = run.mesh.auto
    run = targets.fit(run, target) if target else targets.place(run)[0] if auto else run
    return checks.checked(run)


def perform(arguments):
    """Run one command line, return its exit status (None: 0); exceptions are `main`'s business."""
    rest, settings, wrong = split(arguments)
    options, console = parser().parse_args(rest), screen.console()
    if options.command in ("recipes", "settings", "schedule"):
        if settings or wrong:
            raise ConfigError(f"jaxpara {options.command} takes no settings.", *wrong)
        if options.command == "schedule":
            return schedule(options, console)
        from jaxpara.report import reference
        console.print(reference.recipe_table() if options.command == "recipes" else reference.setting_table())
        return
    run = checked(options, settings, wrong)
    if options.command == "inspect":
        return inspect(run, options, console)
    if options.command == "plan":
        from jaxpara.report.explain import explain
        screen.before(run, console)
        console.print(explain(run), soft_wrap=True, end="")
        return
    from jaxpara.train import train
    train(run, options.run_dir, console)


def inspect(run, options, console):
    """Compile, show, write what was asked for; 1 if --strict objects."""
    from jaxpara.report.inspect import show
    from jaxpara.step import build
    wrong = [f"--{name} {path}: there is no folder {Path(path).parent}." for name, path in (("json", options.json), ("hlo", options.hlo))
             if path and not Path(path).parent.is_dir()]
    if wrong:
        raise ConfigError(*wrong)
    report = build(run, options.target).inspect()
    show(report, console)
    for path, text in ((options.json, report.to_json), (options.hlo, lambda: report.text)):
        if path:
            Path(path).write_text(text(), encoding="utf-8")
    return 1 if options.strict and not report.kept else 0


def schedule(options, console):
    """Show a pipeline schedule, write what was asked for."""
    from jaxpara.pipeline.table import write
    from jaxpara.report.schedule import asked, picture, show
    table, times = asked(options)
    show(table, times, console)
    if options.csv:
        write(table, options.csv)
    if options.plot and (missing := picture(table, times, options.plot)):
        console.print(f"{options.plot}: {missing}")


def main(argv=None):
    """The command; returns its exit status. Nothing a user types makes a traceback."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")        # × and · on a terminal that has neither
    try:
        status = perform(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status or 0
    except ConfigError as error:
        count = len(error.violations)
        print(f"jaxpara: {'this setting' if count == 1 else f'these {count} settings'} cannot be honoured:",
              *(f"  {violation}" for violation in error.violations), sep="\n", file=sys.stderr)
        return 2
    except TrainingStopped as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("jaxpara: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())      # or Python flushes into the broken pipe once more at exit
        return 1
