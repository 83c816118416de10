from jaxpara import recipe


def gpt_zero2():
    """gpt_single over dp8 with ZeRO stage 2 and two accumulated micro-batches.

    jaxpara train gpt_zero2
    Collectives: gradients reduce-scattered over dp in each of the 2 micro-batches, parameters all-gathered once a step.
    """
    return recipe("gpt_single").change(mesh=dict(dp=8), parallel=dict(zero=dict(dp=2)), train=dict(microbatches=2))
