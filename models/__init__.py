"""Example models: ordinary Flax plus `shardlib.annotate`, no parallelism configuration and no `jax.jit`.

Each module has callables without required arguments that return `(module, loss, batch_spec)` and allocate nothing:
`models.gpt:small`, `models.gpt_nnx:small`, `models.llama:tiny`, `llama_8b`, `llama_70b`, `llama_405b`,
`models.lora:small`, `models.convnet:small`.
"""
