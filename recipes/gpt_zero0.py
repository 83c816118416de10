from jaxpara import recipe


def gpt_zero0():
    """gpt_single over dp8 with ZeRO stage 0 and two accumulated micro-batches.

    jaxpara train gpt_zero0
    Collectives: gradients all-reduced over dp once a step.
    """
    return recipe("gpt_single").change(mesh=dict(dp=8), parallel=dict(zero=dict(dp=0)), train=dict(microbatches=2))
