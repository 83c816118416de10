"""The command `jaxpara`: train, plan, recipes, settings.

Every setting is an option of its own dotted name, so those are taken out of the arguments before argparse sees the rest. JAX is
imported only where devices are needed.
"""
import argparse
import os
import sys
from importlib.metadata import version

from jaxpara import checks
from jaxpara.errors import ConfigError, TrainingStopped
from jaxpara.report import screen
from jaxpara.rundir import occupied
from jaxpara.settings import load

OPTIONS = {"--run-dir", "--target"}
"""Options with a value that are not settings."""

FLAGS = {"-h", "--help", "--version"}


class Parser(argparse.ArgumentParser):
    """argparse that reports like everything else here."""

    def error(self, message):
        raise ConfigError(f"{message[:1].upper()}{message[1:]}. `jaxpara --help` says what there is.")


def parser():
    top = Parser(prog="jaxpara", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
                 description="Train GPT models in JAX over a mesh of devices, and know what they communicate.",
                 epilog="Settings have dotted names and go to any recipe: --mesh.tp 2 --train.steps 50 --optim.clip none\n"
                        "(list: `jaxpara settings`). Exit status: 0 done, 1 stopped at a value that is not finite,\n"
                        "2 settings that cannot be honoured, 130 interrupted.")
    top.add_argument("--version", action="version", version=f"jaxpara {version('jaxpara')}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add = lambda name, words, usage: commands.add_parser(name, help=words, description=words, usage=usage, allow_abbrev=False)
    training = add("train", "Train a recipe; config.json and metrics.jsonl go to the run directory.",
                   "jaxpara train [RECIPE] [--run-dir DIR] [--SETTING VALUE ...]")
    training.add_argument("--run-dir", metavar="DIR", help="default: runs/RECIPE-TIME under the current directory")
    planning = add("plan", "Say what a run holds and sends, and where every parameter lies; nothing is compiled.",
                   "jaxpara plan [RECIPE] [--target cpu:N] [--SETTING VALUE ...]")
    planning.add_argument("--target", metavar="cpu:N", help="devices to plan for; default: those of this machine, if an axis is auto")
    for command in (training, planning):
        command.add_argument("recipe", nargs="?", default="gpt_tiny", metavar="RECIPE",
                             help="a shipped recipe, or the path of a recipe or of a run's config.json (default: gpt_tiny)")
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
    """Run one command line; exceptions are `main`'s business."""
    rest, settings, wrong = split(arguments)
    options, console = parser().parse_args(rest), screen.console()
    if options.command in ("recipes", "settings"):
        if settings or wrong:
            raise ConfigError(f"jaxpara {options.command} takes no settings.")
        from jaxpara.report import reference
        console.print(reference.recipe_table() if options.command == "recipes" else reference.setting_table())
        return
    run = checked(options, settings, wrong)
    if options.command == "plan":
        from jaxpara.report.explain import explain
        screen.before(run, console)
        console.print(explain(run), soft_wrap=True, end="")
        return
    from jaxpara.train import train
    train(run, options.run_dir, console)


def main(argv=None):
    """The command; returns its exit status. Nothing a user types makes a traceback."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")        # × and · on a terminal that has neither
    try:
        perform(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return 0
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
