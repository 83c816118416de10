"""The load of every expert over a run: kept in bounded memory, written as numbers and as a picture. No JAX; matplotlib (`jaxpara[plot]`) only for the
picture."""
import numpy as np

COLUMNS = 256
"""Most columns of the picture: when they are full, two neighbours become one."""


class LoadMap:
    """Loads summed over equal runs of steps. layers: numbers of the layers with experts."""

    def __init__(self, layers):
        self.layers, self.columns, self.each, self.steps = list(layers), [], 1, 0

    def add(self, load):
        """One step's int [n, E]."""
        if self.steps % self.each == 0:
            if len(self.columns) == COLUMNS:
                self.columns = [first + second for first, second in zip(self.columns[::2], self.columns[1::2])]
                self.each *= 2
            self.columns.append(np.zeros(np.shape(load), np.int64))
        self.columns[-1] += load
        self.steps += 1

    def write(self, directory):
        """expert_load.npz: "load" int [columns, n, E], "layers" int [n], "steps_per_column" (the last column may have fewer); and expert_load.png
        where matplotlib is installed. Returns the paths written."""
        if not self.columns:
            return []
        numbers = directory / "expert_load.npz"
        np.savez_compressed(numbers, load=np.stack(self.columns), layers=self.layers, steps_per_column=self.each)
        picture = draw(np.stack(self.columns), self.layers, self.each, self.steps)
        if picture is None:
            return [numbers]
        picture.savefig(directory / "expert_load.png", dpi=110)
        return [numbers, directory / "expert_load.png"]


def draw(load, layers, each, steps):
    """A matplotlib figure of int [columns, n, E], or None without matplotlib: a strip per layer with a row per expert; colour is the load
    over the mean."""
    try:
        from matplotlib.colors import TwoSlopeNorm
        from matplotlib.figure import Figure
    except ImportError:
        return None
    columns, n, experts = load.shape
    share = load * experts / np.maximum(load.sum(-1, keepdims=True), 1)
    inch = min(max(0.16 * experts, 0.5), 2.5)
    figure = Figure(figsize=(8, 1.3 + n * (inch + 0.12)), layout="constrained")
    axes = figure.subplots(n, 1, sharex=True, squeeze=False)[:, 0]
    norm = TwoSlopeNorm(1, 0, max(share.max(), 2))
    for strip, layer, axis in zip(np.moveaxis(share, 1, 0), layers, axes):
        image = axis.imshow(strip.T, aspect="auto", interpolation="nearest", cmap="RdBu_r", norm=norm, origin="lower",
                            extent=(0.5, 0.5 + columns * each, -0.5, experts - 0.5))
        axis.set_ylabel(f"layer {layer}", rotation=0, ha="right", va="center")
        axis.set_yticks([0, experts - 1])
    axes[-1].set_xlim(0.5, steps + 0.5)
    axes[-1].set_xlabel("step")
    axes[0].set_title(f"Load of each expert (rows 0 to {experts - 1}) over the mean; 1 = balanced", fontsize=11)
    figure.colorbar(image, ax=list(axes), label="load ÷ mean", shrink=min(1, 3 / (n * inch)) if n * inch > 3 else 1)
    return figure
