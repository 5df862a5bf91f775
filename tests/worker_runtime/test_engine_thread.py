"""The one thread that computes with torch."""

import threading

import pytest
import torch

from worker_runtime.engine_thread import EngineThread


@pytest.fixture
def num_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_it_alone_computes_with_several_threads(threads, num_threads):
    """libgomp would keep a pool of threads for each thread that does."""
    engine, found = EngineThread(threads), []
    other = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert engine.num_threads == threads
    assert found == [1]
    assert torch.get_num_threads() == 1
    assert engine.call(torch.get_num_threads) == threads
    assert engine.call(threading.current_thread) is engine.thread


def test_it_gives_back_results_and_errors_and_ends_after_its_last_work(num_threads):
    engine, done = EngineThread(1), threading.Event()
    assert engine.call(lambda: 7) == 7
    with pytest.raises(KeyError, match="no"):
        engine.call(lambda: {}["no"])
    engine.run_last(done.set)
    engine.thread.join(10)
    assert done.is_set()
    assert not engine.thread.is_alive()
