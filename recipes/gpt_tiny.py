from jaxpara import recipe


def gpt_tiny():
    """The default: gpt_single over fsdp2·sp2·tp2, with Megatron-SP and a zigzag ring.

    jaxpara train gpt_tiny
    Collectives: parameters all-gathered per layer over fsdp in forward and backward, their gradients reduce-scattered (ZeRO-3);
    activations all-gathered and reduce-scattered over tp at each block; K, V (and dK, dV) on a ring over sp; gradients
    summed over sp once a step.
    """
    return recipe("gpt_single").change(mesh=dict(fsdp=2, sp=2, tp=2), parallel=dict(sp_order="zigzag", tp_sequence=True))
