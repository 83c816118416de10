from jaxpara import recipe


def gpt_1f1b():
    """1F1B over pp4, one layer per stage, ZeRO-1 over dp2; embedding, final norm and head under ZeRO-1 over pp too.

    jaxpara train gpt_1f1b
    Collectives: over pp, permutes in the ticks in which some stage has something to send, per micro-batch an all-to-all and an all-gather for
    the head, once a step the reduce-scatter and all-gather of embedding and head; over dp, ZeRO-1's once a step.
    """
    return recipe("gpt_single").change(mesh=dict(pp=4, dp=2), parallel=dict(schedule="1f1b", zero=dict(dp=1, pp=1)), train=dict(microbatches=8))
