"""A line per step and, on a terminal, a bar below them."""
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from jaxpara.report.units import span


class Steps:
    """Context manager that prints the steps of a run. console: of `screen.console`; steps: how many there will be."""

    def __init__(self, console, steps):
        self.console, self.steps = console, steps
        self.bar = Progress(TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TimeElapsedColumn(),
                            TextColumn("{task.fields[eta]}"),
                            console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task("", total=steps, eta="compiling")

    def __enter__(self):
        self.bar.start()
        return self

    def __exit__(self, *_):
        self.bar.stop()

    def show(self, row, pace=None):
        """Print one step. row: its line of metrics.jsonl; pace: mean seconds per step so far, None while only compiled ones are known."""
        eta = "" if pace is None else f"ETA {span(pace * (self.steps - row['step']))}"
        self.bar.update(self.task, completed=row["step"], eta=eta)
        self.console.print(step_line(row, self.steps, eta))


def step_line(row, steps, eta):
    """At most 80 columns for ordinary numbers. Of a model with experts the load of the busiest, over the mean, stands in place of the
    learning rate."""
    third = f"load {row['moe/load_max']:.2f}" if "moe/load_max" in row else f"lr {row['lr']:.2e}"
    head = f"{row['step']:>{len(str(steps))}}/{steps}  loss {row['loss']:.4f}  grad {significant(row['grad_norm'])}  {third}"
    if row.get("compiled"):
        return f"{head}  {row['ms']:,.0f} ms, compilation included"
    return f"{head}  {row['tokens_per_s']:>6,.0f} tok/s  {row['ms']:>4,.0f} ms  {eta}"


def significant(value):
    """Four digits, in five columns for ordinary norms."""
    return f"{value:.3f}" if 0.001 <= value < 100 else f"{value:.3g}"
