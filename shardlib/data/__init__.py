"""Training data: batches as a pure function of (seed, step).

corpus = ByteCorpus(["notes.txt", "texts/"])
batch = corpus.batch(step, batch=16, length=128, seed=0)
"""

from shardlib.data.corpus import ByteCorpus
from shardlib.data.text_files import standard_library, text_files

__all__ = ["ByteCorpus", "standard_library", "text_files"]
