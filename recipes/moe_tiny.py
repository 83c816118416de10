from jaxpara import recipe


def moe_tiny():
    """gpt_single with 8 experts in every layer, 2 per token, over ep4·fsdp2: dropless, balanced by an auxiliary loss per row.

    jaxpara train moe_tiny
    Collectives: tokens to their experts and back by all-to-all over ep, in forward and, their gradients, in backward; parameters
    all-gathered per layer over fsdp and gradients reduce-scattered, experts' too; gradients of all but experts summed over ep once a step.
    """
    return recipe("gpt_single").change(
        model=dict(moe=dict(experts=8, top_k=2, ffn=176, aux_weight=0.01, z_weight=0.001)), mesh=dict(ep=4, fsdp=2))
