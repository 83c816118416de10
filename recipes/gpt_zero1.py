from jaxpara import recipe


def gpt_zero1():
    """gpt_single over dp8 with ZeRO stage 1 and two accumulated micro-batches.

    jaxpara train gpt_zero1
    Collectives: gradients reduce-scattered over dp once a step, parameters all-gathered once a step.
    """
    return recipe("gpt_single").change(mesh=dict(dp=8), parallel=dict(zero=dict(dp=1)), train=dict(microbatches=2))
