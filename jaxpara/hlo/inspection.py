"""What `inspect` finds: the contract, the memory, the time on the links, in one report. No JAX."""
import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property

from jaxpara.config import Run
from jaxpara.hlo.contract import Contract, Difference, compare
from jaxpara.hlo.memory import replicated, split
from jaxpara.hlo.module import parse
from jaxpara.hlo.parse import collectives
from jaxpara.plan.hardware import parse_target
from jaxpara.plan.links import link_seconds
from jaxpara.plan.memory import arguments, temporaries
from jaxpara.plan.traffic import traffic


@dataclass(frozen=True)
class Report:
    """A compiled train step against its prediction. Bytes are per device, of wire per step."""
    run: Run
    target: str                     # "cpu:8", "tpu:v5p:4x4x4", …
    contract: Contract
    memory: dict                    # bytes: "argument", "output", "alias", "temp", "peak", "parts", "predicted", "usable" (None: unknown)
    seconds: float                  # that compiling took
    text: str                       # the compiled program

    @property
    def predicted(self):
        """Contract lines (`plan.Line`) from the config."""
        return self.contract.predicted

    @property
    def compiled(self):
        """Contract lines of the compiled program."""
        return self.contract.compiled

    @property
    def unexplained_bytes(self):
        return self.contract.unexplained_bytes

    @property
    def missing(self):
        return self.contract.missing

    @property
    def differences(self):
        """All that `--strict` objects to."""
        return self.contract.differences

    @property
    def kept(self):
        """Whether nothing but known rewrites sets the program apart from its prediction."""
        return self.contract.kept

    @property
    def fits(self):
        """Whether the peak is within what a device of the target may use; None where that is not known."""
        return None if self.memory["usable"] is None else self.memory["peak"] <= self.memory["usable"]

    def time(self, line):
        """Seconds that a line takes on the target's links at their best, nothing overlapped (`plan.links.link_seconds`); None on CPU, or
        where no axes explain the groups."""
        known = line.axes and self.named
        return link_seconds(self.target, self.run.mesh, line.axes, line.kind, line.wire, line.calls) if known else None

    @property
    def named(self):
        """Whether the target is a name with a line in the hardware table, rather than what this process runs on."""
        return self.target.partition(":")[0] in ("tpu", "gpu")

    @cached_property
    def totals(self):
        """{(axes, class): (predicted, compiled wire bytes)}, class being gather | reduce | exchange."""
        sums = defaultdict(lambda: [0, 0])
        for place, lines in enumerate((self.predicted, self.compiled)):
            for line in lines:
                sums[line.axes, CLASSES[line.kind]][place] += line.wire
        return {key: tuple(pair) for key, pair in sums.items()}

    @cached_property
    def overlap(self):
        """{"synchronous", "asynchronous", "overlapped": wire bytes}: overlapped is the part of asynchronous with work between start and done."""
        sums = dict.fromkeys(("synchronous", "asynchronous", "overlapped"), 0)
        for one in self.contract.found:
            for part in one.parts:
                wire = one.line.wire * part.calls / one.line.calls
                sums["asynchronous" if part.is_async else "synchronous"] += wire
                sums["overlapped"] += wire if part.overlapped else 0
        return sums

    def to_json(self):
        """All of it but the program's text, as JSON."""
        lines = lambda lines: [{**asdict(line), "wire": line.wire, "seconds": self.time(line)} for line in lines]
        pairs = [{"predicted": pair.predicted and pair.predicted.owner, "kind": (pair.predicted or pair.compiled).kind,
                  "axes": (pair.predicted or pair.compiled).axes, "rewrites": pair.rewrites} for pair in self.contract.pairs if pair.rewrites]
        return json.dumps({
            "recipe": self.run.name, "target": self.target, "mesh": self.run.mesh.sizes, "lowering": self.run.parallel.lowering,
            "kept": self.kept, "unexplained_bytes": self.unexplained_bytes,
            "predicted": lines(self.predicted), "compiled": lines(self.compiled), "missing": lines(self.missing),
            "differences": [{"kind": one.kind, "text": one.text, "bytes": one.bytes} for one in self.differences], "rewrites": pairs,
            "totals": [{"axes": axes, "class": name, "predicted": pair[0], "compiled": pair[1]} for (axes, name), pair in self.totals.items()],
            "memory": {**self.memory, "fits": self.fits}, "overlap": self.overlap, "compile_seconds": self.seconds}, indent=1)


CLASSES = {"all-gather": "gather", "reduce-scatter": "reduce", "all-reduce": "reduce", "all-to-all": "exchange", "permute": "exchange"}


def inspection(run, target, platform, text, stats, seconds, usable=None):
    """`Report` of a compiled step. platform: cpu | tpu | gpu; text: of the compiled program; stats: its `memory_analysis()`; seconds: that
    compiling took; usable: bytes of this process's devices (for a named target the hardware table says)."""
    if usable is None and target.partition(":")[0] in ("tpu", "gpu"):
        usable = parse_target(target).usable
    module = parse(text)
    contract = compare(traffic(run, platform), collectives(module), run, platform)
    contract.differences.extend(
        Difference("replicated", f"{name} lies on each device with {surplus:,} bytes more than its spec says", 0, None)
        for name, surplus in replicated(module, run))
    planned = {"arguments": arguments(run, platform), "temporaries": temporaries(run, platform)}
    planned["peak"] = sum(part["total"] for part in planned.values())
    return Report(run, target, contract, {**split(text, stats, run, module), "predicted": planned, "usable": usable}, seconds, text)
