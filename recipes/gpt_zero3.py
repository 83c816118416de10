from jaxpara import recipe


def gpt_zero3():
    """gpt_single over dp8 with ZeRO stage 3 and two accumulated micro-batches.

    jaxpara train gpt_zero3
    Collectives: parameters all-gathered over dp per layer in forward and again in backward, gradients reduce-scattered, in each of the 2 micro-batches.
    """
    return recipe("gpt_single").change(mesh=dict(dp=8), parallel=dict(zero=dict(dp=3)), train=dict(microbatches=2))
