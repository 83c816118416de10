from jaxpara import recipe


def gpt_ring():
    """Ring attention in the zigzag order over sp4, ZeRO-3 over fsdp2, longer sequences.

    jaxpara train gpt_ring
    Collectives: over sp, K and V travel 3 hops forward and 3 backward, dK and dV 4 hops backward, per layer; gradients are
    summed over sp once a step; over fsdp, ZeRO-3.
    """
    return recipe("gpt_single").change(mesh=dict(fsdp=2, sp=4), parallel=dict(sp_kind="ring", sp_order="zigzag"),
                                       train=dict(batch=4, seq=1024))
