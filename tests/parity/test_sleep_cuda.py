"""An engine that sleeps on a GPU: its memory is free, and it wakes with its weights, its CUDA graphs and its tokens."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_generators import assert_likely, prompts

from cluster.catalogue import CATALOGUE
from engine.engine import Engine
from engine.errors import BackendError
from engine.measure.random_engine import random_engine
from engine.options import SamplingOptions
from engine.run.block import Block
from engine.run.cuda import CudaRunner
from engine.run.cuda_streams import StreamRunner
from engine.run.kv_cache import PAGE_SIZE
from engine.run.sleep import tensors_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CACHE_TOKENS = 64 * PAGE_SIZE
GREEDY = SamplingOptions(max_tokens=40, temperature=0.0)
TEXTS = [np.array(each, np.int32) for each in prompts((5, 200, 31, 129))]


def ids(engine: Engine) -> list[list[int]]:
    return [[token.id for token in answer.tokens] for answer in engine.generate(TEXTS, GREEDY)]


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(0)[0]


def test_a_block_keeps_its_address() -> None:
    block = Block(3 << 20, torch.device("cuda", 0))
    values, freed = block.bytes.view(torch.float32), list[int]()
    for number in range(3):
        address = values.data_ptr()
        values.fill_(float(number))
        assert float(values.sum()) == number * len(values)
        torch.cuda.synchronize()
        before = free()
        block.unmap()
        freed.append(free() - before)
        block.map()
        assert values.data_ptr() == address
    assert max(freed) >= block.num_bytes  # other processes may take memory at the same time
    with pytest.raises(BackendError, match="cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY"):
        Block(1 << 45, torch.device("cuda", 0))


def test_a_generating_engine_sleeps_and_wakes() -> None:
    config = replace(CATALOGUE["Qwen/Qwen3-0.6B"], n_layers=6)
    engine = random_engine(config, cache_tokens=CACHE_TOKENS, sleeps=True)
    assert isinstance(engine.runner, StreamRunner)
    ids(engine)
    engine.runner.graphs.wait()
    graphs = len(engine.runner.graphs)
    assert graphs
    weights = tensors_of(engine.network)
    copies = [each.cpu() for each in weights]  # on the CPU: the engine limits this process's GPU memory
    assert engine._sleeper is not None
    held = engine._sleeper.held_bytes(engine.device)
    assert held > 500 << 20
    for _ in range(2):
        assert engine.sleep()
        assert engine._sleeper.held_bytes(engine.device) == 0
        assert engine.pages is not None
        engine.pages.check_integrity()
        others = Block(held, torch.device("cuda", 0))  # as another program that gets the memory of the weights
        others.bytes.fill_(255)
        del others
        for _ in range(2):  # first without cached prefixes, then with them
            assert_likely(engine, [each.tolist() for each in TEXTS], ids(engine), GREEDY.max_tokens)
        assert not engine.asleep
        assert len(engine.runner.graphs) >= graphs
        assert all(torch.equal(each.cpu(), copy) for each, copy in zip(weights, copies, strict=True))


def test_an_embedding_engine_sleeps_and_wakes() -> None:
    config = replace(CATALOGUE["Qwen/Qwen3-Embedding-0.6B"], n_layers=4)
    engine = random_engine(config, sleeps=True)
    assert isinstance(engine.runner, CudaRunner)
    for _ in range(2):
        expected = engine.embed(TEXTS)
        engine.runner.graphs.wait()
    assert engine.sleep()
    np.testing.assert_array_equal(engine.embed(TEXTS), expected)


def test_it_sleeps_on_where_the_gpu_has_no_memory() -> None:
    engine = random_engine(replace(CATALOGUE["Qwen/Qwen3-0.6B"], n_layers=6), cache_tokens=CACHE_TOKENS, sleeps=True)
    assert engine.sleep()
    other = Block(free() - (300 << 20), torch.device("cuda", 0))
    with pytest.raises(BackendError, match="OUT_OF_MEMORY"):
        ids(engine)
    assert engine.asleep
    del other
    assert_likely(engine, [each.tolist() for each in TEXTS], ids(engine), GREEDY.max_tokens)
