from jaxpara import recipe


def gpt_hybrid_zero():
    """ZeRO-3 inside the fast network (fsdp4), ZeRO-1 across the slow one (dp2): two rows of one table.

    jaxpara train gpt_hybrid_zero
    Collectives: over fsdp, parameters all-gathered per layer in forward and backward and gradients reduce-scattered; over dp, once
    a step, a reduce-scatter of the 1/4 of the gradients that is left and an all-gather of as much of the parameters.
    """
    return recipe("gpt_single").change(mesh=dict(dp=2, fsdp=4), parallel=dict(zero=dict(fsdp=3, dp=1)), train=dict(microbatches=2))
