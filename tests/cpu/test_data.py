"""Token shards, the packed dataset, and the corpus that every machine has."""

import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from example import example_run

from trainwright.spec.errors import InvalidSpec
from trainwright.train.corpus import build_corpus
from trainwright.train.data import PackedDataset, permuted
from trainwright.train.loop import train
from trainwright.train.shards import INDEX, open_shards, write_shards


def make_shards(directory: Path, sizes: tuple[int, ...] = (50, 0, 73), vocab_size: int = 1000) -> Path:
    """Shards whose stream is 0, 1, 2, ..."""
    directory.mkdir()
    ends = np.cumsum(sizes)
    pieces = [np.arange(end - size, end, dtype=np.uint32) for size, end in zip(sizes, ends, strict=True)]
    write_shards(directory, pieces, vocab_size, "test")
    return directory


def test_shards_are_one_stream(tmp_path: Path) -> None:
    shards = open_shards(make_shards(tmp_path / "a"))
    assert shards.num_tokens == 123
    assert shards.window(40, 30).tolist() == list(range(40, 70))
    assert shards.window(0, 123).tolist() == list(range(123))


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    directory = make_shards(tmp_path / "a", vocab_size=70000)
    assert json.loads((directory / INDEX).read_text())["dtype"] == "uint32"
    assert open_shards(directory).window(45, 10).tolist() == list(range(45, 55))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 100, 1025])
def test_permutation_is_one(size: int) -> None:
    order = [permuted(position, size, "key") for position in range(size)]
    assert sorted(order) == list(range(size))
    assert size < 7 or order != [permuted(position, size, "other") for position in range(size)]


def test_an_epoch_sees_every_token_once(tmp_path: Path) -> None:
    dataset = PackedDataset(open_shards(make_shards(tmp_path / "a", sizes=(60, 61))), seq_len=8, seed=3)
    targets = np.concatenate([dataset.sample(number)[1:] for number in range(dataset.num_windows)])
    assert sorted(targets.tolist()) == list(range(1, 121))
    again = np.concatenate([dataset.sample(15 + number)[1:] for number in range(dataset.num_windows)])
    assert sorted(again.tolist()) == list(range(1, 121))
    assert again.tolist() != targets.tolist()


@pytest.mark.parametrize(("dp", "micro_batch"), [(2, 1), (2, 2), (4, 1), (4, 2), (8, 1)])
def test_a_step_is_the_same_for_any_layout(tmp_path: Path, dp: int, micro_batch: int) -> None:
    shards = open_shards(make_shards(tmp_path / "a", sizes=(900,)))
    for step in (0, 1, 40):
        whole = step_of(PackedDataset(shards, 8, seed=3), step, dp=1, micro_batch=8)
        assert torch.equal(whole, step_of(PackedDataset(shards, 8, seed=3), step, dp=dp, micro_batch=micro_batch))
    assert not torch.equal(whole, step_of(PackedDataset(shards, 8, seed=4), step, dp=1, micro_batch=8))


def step_of(dataset: PackedDataset, step: int, *, dp: int, micro_batch: int) -> torch.Tensor:
    """Inputs and targets of all ranks of a step, in order."""
    batches = [
        dataset.batch(step, global_batch=8, micro_batch=micro_batch, dp_rank=rank, dp=dp) for rank in range(dp)
    ]
    assert {batch.global_tokens for batch in batches} == {64}
    assert {each.shape for batch in batches for each in batch.inputs_BS} == {(micro_batch, 8)}
    inputs = torch.cat([each for batch in batches for each in batch.inputs_BS])
    targets = torch.cat([each for batch in batches for each in batch.targets_BS])
    return torch.stack((inputs, targets))


def refusal(directory: Path) -> str:
    with pytest.raises(InvalidSpec) as refused:
        PackedDataset(open_shards(directory), seq_len=8, seed=0).sample(0)
    return str(refused.value)


def test_bad_directories_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    assert "has no index.json; name a directory of token shards" in refusal(empty)
    empty.mkdir()
    assert refusal(empty).endswith("empty': is empty; name a directory of token shards")
    (empty / INDEX).write_text("{")
    assert "can't be read as JSON" in refusal(empty)
    (empty / INDEX).write_text("[]")
    assert "is no index of format trainwright-shards-1" in refusal(empty)
    (empty / INDEX).write_text(
        json.dumps({"format": "trainwright-shards-1", "dtype": "uint16", "vocab_size": True, "shards": []})
    )
    assert "is no index of format trainwright-shards-1" in refusal(empty)
    assert "holds 5 tokens, which is less than one sample of seq_len+1=9" in refusal(
        make_shards(tmp_path / "short", sizes=(5,))
    )


def test_a_vocabulary_beyond_what_the_run_says_is_refused(tmp_path: Path) -> None:
    shards = make_shards(tmp_path / "a", vocab_size=300)
    said = {"model.vocab_size=299: ": (299, 298), "data.vocab_size=299: ": (300, 299)}
    for words, (of_model, of_data) in said.items():
        run = example_run(model={"vocab_size": of_model}, data={"vocab_size": of_data})
        with pytest.raises(InvalidSpec) as refused:
            train(run, shards=shards, out_dir=tmp_path / "out", steps=1)
        assert str(refused.value).startswith(words)
        assert "is below the vocabulary of" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_documents_are_numbered_within_a_sample(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    stream = np.array([5, 6, 0, 0, 7, 8, 9, 0, 5, 6, 7, 8, 9, 5, 6, 0, 7], dtype=np.uint32)
    write_shards(tmp_path / "a", [stream], 10, "test", end_of_document=0)
    shards = open_shards(tmp_path / "a")
    assert shards.end_of_document == 0
    dataset = PackedDataset(shards, seq_len=8, seed=0, end_of_document=shards.end_of_document)
    batch = dataset.batch(0, global_batch=2, micro_batch=1, dp_rank=0, dp=1)
    assert batch.documents_BS is not None
    numbered = {
        tuple(inputs[0].tolist()): documents[0].tolist()
        for inputs, documents in zip(batch.inputs_BS, batch.documents_BS, strict=True)
    }
    # An end belongs to what it ends; each sample counts from 0, whatever document it begins within.
    assert numbered == {
        (5, 6, 0, 0, 7, 8, 9, 0): [0, 0, 0, 1, 2, 2, 2, 2],
        (5, 6, 7, 8, 9, 5, 6, 0): [0] * 8,
    }
    assert open_shards(make_shards(tmp_path / "b")).end_of_document is None
    assert (
        PackedDataset(shards, 8, 0).batch(0, global_batch=2, micro_batch=1, dp_rank=0, dp=1).documents_BS is None
    )


@pytest.mark.parametrize("end", [10, -1, "0"])
def test_an_end_that_is_no_token_is_refused(tmp_path: Path, end: object) -> None:
    directory = make_shards(tmp_path / "a", vocab_size=10)
    index = json.loads((directory / INDEX).read_text())
    (directory / INDEX).write_text(json.dumps({**index, "end_of_document": end}))
    assert f"end_of_document={end!r}, which is no token" in refusal(directory)


def test_a_truncated_shard_is_refused(tmp_path: Path) -> None:
    directory = make_shards(tmp_path / "a")
    file = directory / "shard-00002.bin"
    file.write_bytes(file.read_bytes()[:-1])
    assert (
        "shard-00002.bin holds 145 bytes where index.json says 73 tokens of 2 bytes; it is truncated"
        in refusal(directory)
    )
    file.unlink()
    assert "is named in index.json but missing" in refusal(directory)


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    directory = make_shards(tmp_path / "a", sizes=(9,), vocab_size=7)
    message = refusal(directory)
    assert "token 7 at position 7 of shard-00000.bin is not below the index's vocab_size=7" in message


def test_corpus(tmp_path: Path) -> None:
    told: list[float] = []
    directory = build_corpus(tmp_path / "cache", 1024, lambda what, done: told.append(done))
    assert told == sorted(told)
    assert told[-1] == 1.0
    shards = open_shards(directory)
    assert shards.vocab_size == 1024
    assert shards.num_tokens > 1_000_000
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [directory.name]
    from tokenizers import Tokenizer

    text = Tokenizer.from_file(str(directory / "tokenizer.json")).decode(shards.window(0, 200).tolist())
    assert text in Path(sysconfig.get_path("stdlib"), "__future__.py").read_text()
    length = int(np.argmax(shards.window(0, 100_000) == shards.end_of_document))
    first = Tokenizer.from_file(str(directory / "tokenizer.json")).decode(shards.window(0, length).tolist())
    assert first == Path(sysconfig.get_path("stdlib"), "__future__.py").read_text()
    before = (directory / INDEX).stat().st_mtime_ns
    assert build_corpus(tmp_path / "cache", 1024) == directory
    assert (directory / INDEX).stat().st_mtime_ns == before
    again = build_corpus(tmp_path / "elsewhere", 1024)
    assert (again / "shard-00000.bin").read_bytes() == (directory / "shard-00000.bin").read_bytes()


def test_a_cache_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(InvalidSpec, match="choose a directory that can"):
        build_corpus(tmp_path / "cache", 1024)
