"""Compiles one pipelined train step for a described TPU and prints what it takes, as JSON; run in a child process.

python -m tests.tpu_pipeline toolkit 32 --embed 512 --layers 8
"""

import argparse
import json
import logging

import jax

import shardlib as sl
from benchmarks.pipeline import FORMS, plain_step, toolkit_step
from benchmarks.variants import Case
from meshes.devices import compile_only
from models import gpt
from shardlib.audit.hlo import parse


class TpuCase(Case):
    """A case of the pipeline benchmark on devices that are only described."""

    def make_mesh(self):
        return sl.make_mesh(self.mesh, devices=compile_only("v5p:4x4x4"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program", choices=["toolkit", *FORMS])
    parser.add_argument("microbatches", type=int)
    parser.add_argument("--mesh", default="stage=4,data=16")
    parser.add_argument("--embed", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=128)
    given = parser.parse_args()
    sizes = {"layers": given.layers, "embed": given.embed, "heads": given.embed // 128, "mlp": 4 * given.embed}
    config = gpt.Config(**sizes, vocab=1024, length=given.length)
    shards = sl.Plan(mesh=sl.MeshShape.parse(given.mesh), num_microbatches=given.microbatches).num_batch_shards
    case = TpuCase(
        config=config, batch=2 * given.microbatches * shards, mesh=given.mesh, num_microbatches=given.microbatches
    )
    if given.program == "toolkit":
        prepared = toolkit_step(case, schedule="1f1b", residuals="full")
    else:
        prepared = plain_step(case, FORMS[given.program])
    compiled = prepared.compile()
    memory = compiled.memory_analysis()
    program = parse(compiled.as_text())
    permutes = [c for c in program.collectives if c.kind == "collective-permute"]
    print(
        json.dumps(
            {
                "temp_bytes": memory.temp_size_in_bytes,
                "argument_bytes": memory.argument_size_in_bytes,
                "permutes": len(permutes),
                "devices": program.num_devices,
            }
        )
    )


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    jax.config.update("jax_platforms", "cpu")
    main()
