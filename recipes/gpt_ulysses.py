from jaxpara import recipe


def gpt_ulysses():
    """Ulysses over sp4 (heads for sequence, by all-to-all), ZeRO-3 over fsdp2, longer sequences.

    jaxpara train gpt_ulysses
    Collectives: over sp, per layer, four all-to-alls forward (q, k, v, out) and four backward; gradients are summed over sp once a
    step; over fsdp, ZeRO-3.
    """
    return recipe("gpt_single").change(mesh=dict(fsdp=2, sp=4), parallel=dict(sp_kind="ulysses"), train=dict(batch=4, seq=1024))
