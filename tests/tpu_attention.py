"""Compiles one train step of a Llama for a described TPU and prints what its attention became, as JSON.

Run in a child process: a crash of the compiler ends the process it is in.

    python -m tests.tpu_attention small --topology v5e:2x4 --mesh data=2,tensor=4 --length 512
    python -m tests.tpu_attention 8b --topology v5p:4x4x4 --mesh fsdp=4,context=8,tensor=2 --length 131072
"""

import argparse
import json
import logging
import re

import jax
import optax

import shardlib as sl
from meshes.devices import compile_only
from models import llama
from shardlib.audit.hlo_text import Module, read

BLOCKS = ("while", "conditional", "custom-call")
CYCLES = re.compile(r'"estimated_cycles":"(\d{1,15})"')


def model(given):
    if given.model == "8b":
        shards = sl.MeshShape.parse(given.mesh)
        return llama.llama_8b(batch=shards.size("fsdp") * shards.size("data"), length=given.length, layers=given.layers)
    embed = given.heads * given.head_dim
    sizes = {"embed": embed, "heads": given.heads, "kv_heads": given.kv_heads, "mlp": 2 * embed, "remat": True}
    return llama.tiny(batch=8, length=given.length, layers=given.layers, **sizes)


def transfers(module: Module) -> list[dict[str, object]]:
    """Every permute over the ring of attention, and what is scheduled between its start and its end.

    "blocks" counts kernels, loops and conditionals, in which blocks are computed; "cycles" is the compiler's estimate
    of the rest. Sums of gradients travel in float32 ("f32"), keys and values in the dtype of the computation.
    """
    found = []
    for computation in module.computations.values():
        instructions = list(computation.instructions.values())
        for at, instruction in enumerate(instructions):
            if "ppermute" not in instruction.line or instruction.opcode not in (
                "collective-permute",
                "collective-permute-start",
            ):
                continue
            ends = [
                number
                for number, other in enumerate(instructions)
                if other.opcode == "collective-permute-done" and other.operands() == (instruction.name,)
            ]
            between = instructions[at + 1 : ends[0]] if ends else []
            found.append(
                {
                    "asynchronous": len(ends) == 1,
                    "dtype": instruction.type_text.lstrip("(").partition("[")[0],
                    "backward": "transpose(" in instruction.line,
                    "blocks": sum(other.opcode in BLOCKS for other in between),
                    "cycles": sum(int(cycles) for other in between for cycles in CYCLES.findall(other.line)),
                }
            )
    return found


def kernels(module: Module) -> list[str]:
    """The kernels that the program calls, by the name before the number."""
    return sorted(
        instruction.name.partition(".")[0]
        for computation in module.computations.values()
        for instruction in computation.instructions.values()
        if 'custom_call_target="tpu_custom_call"' in instruction.line
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=["small", "8b"])
    parser.add_argument("--topology", default="v5e:2x4")
    parser.add_argument("--mesh", default="data=2,tensor=4")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--attention")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--microbatches", type=int, default=1)
    parser.add_argument("--idle", default="skip")
    parser.add_argument("--text")
    given = parser.parse_args()
    module, loss, batch_spec = model(given)
    plan = sl.Plan(
        mesh=given.mesh,
        compute_dtype=given.dtype,
        attention=given.attention,
        num_microbatches=given.microbatches,
        idle=given.idle,
    )
    bound = sl.bind(module, loss, plan, batch_spec)
    mesh = sl.make_mesh(plan.mesh, devices=compile_only(given.topology))
    trainer = sl.Trainer(bound, optax.adamw(1e-3), mesh=mesh, check_separable=False, check_order=False)
    compiled = trainer.compiled
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if given.text:
        with open(given.text, "w") as file:
            file.write(text)
    print(
        json.dumps(
            {
                "kernels": kernels(read(text)),
                "transfers": transfers(read(text)),
                "temp_bytes": memory.temp_size_in_bytes,
                "argument_bytes": memory.argument_size_in_bytes,
                "program_bytes": memory.generated_code_size_in_bytes,
                "kind": None if bound.context is None else bound.context.kind,
                "placement": None if bound.context is None else bound.context.placement,
                "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(bound.abstract_params)),
            }
        )
    )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    jax.config.update("jax_platforms", "cpu")
    main()
