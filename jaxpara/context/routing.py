"""The mixture-of-experts layer under the manual lowering: where its tokens lie, and what routers ask of other devices."""
import jax
import jax.numpy as jnp
from jax import lax

from jaxpara import transport
from jaxpara.collectives import gather, join_parts, sum_over, take_part
from jaxpara.config import AXES, BATCH_AXES
from jaxpara.experts import copied_axes, layout, spanning, split_axes
from jaxpara.model.router import Load
from jaxpara.order import inverse, slots


class Routing:
    """The part of `ManualCtx` that `model.moe` speaks to."""

    @property
    def split(self):
        """Axes over which the tokens of one row lie in this layer."""
        return split_axes(self.run)

    def moe(self, feed, x, layer):
        """`MoE` feed of x [b, s, H] at a border -> (the same, summed over tp; its `Load`). The router's tokens lie as inside a block, or with
        moe_tp = tokens as tp splits the sequence: then a border of Megatron-SP needs no transform, another one a slice and an all-gather."""
        if self.run.parallel.moe_tp == "width" or not self.tp:
            out, load = feed(self.enter(x, "moe"), layer, self)
            return self.exit(out, "moe"), load
        if self.run.parallel.tp_sequence:
            return feed(x, layer, self)
        out, load = feed(take_part(x, self.tp, "tp.enter.moe"), layer, self)
        return join_parts(out, self.tp, "tp.exit.moe"), load

    def through_experts(self, x, routed, experts):
        """x: [b, s, H] -> the same, each token through its experts (`jaxpara.transport`)."""
        sizes = layout(self.run, x.shape[0], not self.training, self.rows.index.shape[0])
        flat = lambda array: array.reshape(-1, array.shape[-1])
        out = transport.through_experts(flat(x), flat(routed.expert), flat(routed.gates), experts, sizes, self.platform)
        return out.reshape(x.shape)

    def draw(self, site, layer, sample):
        """`draw_at` for the tokens that this device routes."""
        return self.draw_at(self.piece(self.rows.index[None], self.split)[0], site, layer, sample)

    def share(self, weigh, layer):
        """This device's part of the factor of the routers' losses: tp ranks that route the same tokens share it; padding has none."""
        copies = self.run.mesh.tp if copied_axes(self.run) else 1
        return jnp.where(layer >= 0, weigh / copies, 0)

    def row_tokens(self, here):
        """S, of `here` tokens per row on this device."""
        return here * self.run.mesh.sp * (self.run.mesh.tp if "tp" in self.split else 1)

    def spans(self):
        """Whether token groups lie on several devices."""
        return spanning(self.run, self.rows.index.shape[0])

    def whole(self, x, what):
        """x: [b, s, ...] of the tokens that this device routes -> [b, S, ...] of whole rows in their original order."""
        back = inverse(slots(self.run, self.rows.index.shape[0]))
        return gather(x, self.split, 1, f"moe.{what}")[:, back] if self.split else x

    def own(self, x):
        """The inverse of `whole`."""
        return self.piece(x[:, slots(self.run, x.shape[1])], self.split) if self.split else x

    def sum_of_row(self, counts):
        """Over the devices that hold parts of the same rows."""
        return sum_over(counts, self.split, "moe.loads")

    def sum_of_batch(self, counts):
        """Over all devices that route tokens of this micro-batch."""
        return sum_over(counts, self.run.mesh.live(BATCH_AXES) + self.split, "moe.loads")


def sum_loads(load, run):
    """`Load`s of one device -> the whole mesh's, in one sum of integers and one of losses."""
    if load is None:
        return None
    counts, losses = jnp.concatenate([load.counts, load.dropped[..., None]], axis=-1), jnp.stack([load.aux, load.z])
    counts, losses = (sum_over(once(part, run), run.mesh.live(AXES), "moe.totals") for part in (counts, losses))
    return Load(counts[..., :-1], counts[..., -1], losses[0], losses[1])


def seen(routed, run):
    """What was asked of `Load.routed`, alike on tp ranks that route the same tokens."""
    return jax.tree.map(lambda x: sum_over(once(x, run), copied_axes(run), "moe.seen"), routed)


def once(x, run):
    """What routers tell, on one of the tp ranks that route the same tokens; zeros on the others."""
    return jnp.where(lax.axis_index("tp") == 0, x, 0) if copied_axes(run) else x
