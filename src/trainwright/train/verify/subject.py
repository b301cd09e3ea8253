"""A trainer on its data beside the plain program on the same: what `verify` steps, and what faults are planted
in."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch.distributed.fsdp import FSDPModule

from trainwright.spec.run import Run
from trainwright.train.data import Batch, PackedDataset
from trainwright.train.loop import batch_of
from trainwright.train.parallelize import Trainer
from trainwright.train.shards import Shards
from trainwright.train.verify.plain import Sample


@dataclass
class Subject:
    """One rank's trainer, and whose samples it takes."""

    trainer: Trainer
    dataset: PackedDataset
    dp_rank: int

    def batch(self, step: int) -> Batch:
        """As the training loop takes it."""
        return batch_of(self.trainer.run, self.dataset, step, self.dp_rank)

    def samples(self, step: int) -> list[Sample]:
        """The samples of all ranks, one after another."""
        recipe = self.trainer.run.recipe
        size = recipe.global_batch
        whole = self.dataset.batch(step, global_batch=size, micro_batch=size, dp_rank=0, dp=1)
        documents = [None] * size if whole.documents_BS is None else list(whole.documents_BS[0])
        numbers = whole.samples_B(0).tolist()
        return [
            Sample(*each) for each in zip(numbers, whole.inputs_BS[0], whole.targets_BS[0], documents, strict=True)
        ]

    def sharded_modules(self) -> Iterator[FSDPModule]:
        for piece in self.trainer.pieces:
            for module in piece.modules():
                if isinstance(module, FSDPModule):
                    yield module


def random_tokens(run: Run, steps: int) -> PackedDataset:
    """A data set of as many random samples as so many steps take, from the run's seed. Where documents are masked
    one token in six ends one."""
    recipe, vocab_size = run.recipe, run.model.vocab_size
    num_tokens = steps * recipe.tokens_per_step + 1
    generator = np.random.default_rng(recipe.seed)
    tokens = generator.integers(vocab_size, size=num_tokens, dtype=np.uint32)
    end_of_document = None
    if run.data.document_mask:
        end_of_document = 0
        tokens[generator.random(num_tokens) < 1 / 6] = end_of_document
    shards = Shards(Path("random tokens"), vocab_size, ("tokens",), (tokens,), (0, num_tokens))
    return PackedDataset(shards, recipe.seq_len, recipe.seed, end_of_document)
