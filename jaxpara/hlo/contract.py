"""The contract: lines predicted from the config against lines of the compiled program. No JAX.

Matching goes from strict to lenient, and what a lenient step takes is named: first all but the dtype must agree, then owner and phase may
have been lost to a combined operation, then the compiler's known rewrites (`rewrites.py`). What is left on either side is a
`Difference`.
"""
from collections import defaultdict
from dataclasses import dataclass, field, replace

from jaxpara.hlo.lines import Found, found
from jaxpara.hlo.rewrites import KNOWN, Pair, rewrites
from jaxpara.plan.lines import Line, whole


@dataclass(frozen=True)
class Difference:
    """Something that was not predicted, or predicted and not found."""
    kind: str               # "unplanned" | "missing" | "moved into a loop" | "more often" | "less often" | "other axes" | "replicated"
    text: str               # the sentence a user reads
    bytes: int              # wire bytes per device and step that nothing explains; 0 where less is sent than planned
    line: Line | None       # compiled, or where nothing was compiled predicted


@dataclass
class Pool:
    """Calls not matched yet, by line; both sides are one."""
    left: dict = field(default_factory=lambda: defaultdict(int))

    @classmethod
    def of(cls, lines):
        pool = cls()
        for line in lines:
            pool.left[line] += line.calls
        return pool

    def lines(self):
        return [line for line, calls in self.left.items() if calls]


@dataclass(frozen=True)
class Contract:
    predicted: list[Line]
    compiled: list[Line]
    pairs: list[Pair]
    differences: list[Difference]
    found: list[Found]

    @property
    def missing(self):
        """Predicted lines that were not compiled, with the calls that lack."""
        return [one.line for one in self.differences if one.kind in ("missing", "less often")]

    @property
    def unexplained_bytes(self):
        """Wire bytes per device and step of what was compiled and neither predicted nor a known rewrite."""
        return whole(sum(one.bytes for one in self.differences))

    @property
    def rewrites(self):
        """{name of KNOWN: its pairs}."""
        return {name: [pair for pair in self.pairs if name in pair.rewrites] for name in KNOWN if any(name in pair.rewrites for pair in self.pairs)}

    @property
    def kept(self):
        """Whether `--strict` passes."""
        return not self.differences


def compare(predicted, collectives, run, platform="cpu"):
    """`Contract` of predicted lines and the collectives of a compiled program. platform: cpu | tpu | gpu, for the rewrites to expect."""
    seen = list(found(collectives, run, platform))
    ours, theirs, pairs = Pool.of(predicted), Pool.of([one.line for one in seen]), []
    for same in (identity, without_dtype, without_names):
        pairs += match(ours, theirs, same)
    pairs += rewrites(ours, theirs, run, platform)
    return Contract(predicted, [one.line for one in seen], pairs, list(differences(ours, theirs, seen)), seen)


def identity(line):
    return line.kind, line.axes, line.dtype, line.elements, line.n, line.phase, line.owner


def without_dtype(line):
    return line.kind, line.axes, line.elements, line.n, line.phase, line.owner


def without_names(line):
    return line.kind, line.axes, line.elements, line.n


def match(ours, theirs, same):
    """Take from both pools the calls of lines that are the `same`; [Pair]."""
    buckets, pairs = defaultdict(list), []
    for line in theirs.lines():
        buckets[same(line)].append(line)
    for line in ours.lines():
        for other in buckets.get(same(line), ()):
            calls = min(ours.left[line], theirs.left[other])
            if calls:
                ours.left[line] -= calls
                theirs.left[other] -= calls
                pairs.append(Pair(replace(line, calls=calls), replace(other, calls=calls), tuple(changed(line, other))))
    return pairs


def changed(predicted, compiled):
    """Names of the rewrites in a pair that matches: another width than planned, a reduce-scatter written in two."""
    if predicted.width != compiled.width:
        yield "widened" if predicted.width < compiled.width else "narrowed"
    if compiled.what in KNOWN:
        yield compiled.what


def differences(ours, theirs, seen):
    """Every `Difference` of what both pools still hold; pairs that are one mistake are told as one."""
    missing = [replace(line, calls=calls) for line, calls in ours.left.items() if calls]
    extra = [replace(line, calls=calls) for line, calls in theirs.left.items() if calls]
    parts = {replace(one.line, calls=0): one.parts for one in seen}
    for line in extra:
        kind, text, partner = explain(line, missing, parts[replace(line, calls=0)], ours)
        if partner:
            missing.remove(partner)
        yield Difference(kind, text, line.wire, line)
    for line in missing:
        again = any(without_names(line) == without_names(other) and line.owner == other.owner for other in theirs.left)
        kind = "less often" if again else "missing"
        yield Difference(kind, f"{phrase(line)}: predicted, not compiled", 0, line)


def explain(line, missing, parts, ours):
    """(kind, sentence, the missing line it stands for or None) of a compiled line that nothing predicted."""
    names = ", ".join(sorted({part.name for part in parts})[:3])
    for other in missing:
        if (other.kind, other.elements, other.owner) == (line.kind, line.elements, line.owner) and other.axes != line.axes:
            return "other axes", f"{phrase(line)} ({names}): predicted over {other.axis}", other
    planned = sum(other.calls for other in ours.left if without_names(other) == without_names(line) and other.owner == line.owner)
    if planned:
        deeper = line.when != "step" and planned <= line.calls
        return ("moved into a loop" if deeper else "more often",
                f"{phrase(line)} ({names}) beyond the {planned:,} predicted" + f"; it stands in: {line.when}" * deeper, None)
    if not line.axes:
        return "unplanned", f"{phrase(line)} ({names}): its groups follow no axes of the mesh", None
    # parameters have dotted names, blocks have not
    activation = line.kind == "all-gather" and "." not in line.owner
    reason = "a gather of an activation that nobody planned" if activation else "nobody planned it"
    return "unplanned", f"{phrase(line)} ({names}): {reason}", None


def phrase(line):
    """all-gather over tp of 18,432 float32, 3 calls, forward, attention."""
    owner = f", {line.owner}" if line.owner else ""
    return (f"{line.kind} over {line.axis or 'unknown groups'} of {line.elements:,} {line.dtype}, {line.calls:,} "
            f"call{'s' * (line.calls != 1)}, {line.phase}{owner}")
