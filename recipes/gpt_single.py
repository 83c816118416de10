from jaxpara import Data, Model, Optim, Run, Train


def gpt_single():
    """A small Llama-style model on one device, on the Python standard library's source text: what every other mesh must equal.

    jaxpara train gpt_single
    Collectives: none.
    """
    return Run(model=Model(style="llama", layers=4, width=128, heads=8, kv_heads=4, head_dim=16, ffn=352, vocab=256),
               optim=Optim(name="adamw", lr=3e-3, weight_decay=0.1, clip=1.0, schedule="cosine", warmup=10),
               data=Data(),
               train=Train(batch=16, seq=256, steps=120))
