"""Training data: batches as a pure function of (seed, step); documents packed into blocks, or over rings of ranks.

corpus = ByteCorpus(["notes.txt", "texts/"])
batch = corpus.batch(step, batch=16, length=128, seed=0)
blocks = pack(documents, length=128, batch=16, ranks=8)
grouping = plan_groups(lengths, ranks=8, tokens_per_rank=2048, costs=costs)
"""

from shardlib.data.corpus import ByteCorpus
from shardlib.data.group_layout import Programs, arrange
from shardlib.data.length_groups import Costs, Group, Grouping, plan_groups
from shardlib.data.packing import pack
from shardlib.data.process_rows import process_rows
from shardlib.data.text_files import standard_library, text_files

__all__ = [
    "ByteCorpus",
    "Costs",
    "Group",
    "Grouping",
    "Programs",
    "arrange",
    "pack",
    "plan_groups",
    "process_rows",
    "standard_library",
    "text_files",
]
