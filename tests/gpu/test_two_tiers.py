"""Two tiers as real processes on one GPU: pages go from VRAM to VRAM, and answers are those of one process."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.gpu.small_model import SMALL

pytestmark = pytest.mark.gpu
VOCAB_SIZE = 320
ARMS = {
    "colocated": {"colocated": 1},
    "each step waited for": {"colocated": 1, "overlap": "off"},
    "two tiers": {},
}


@pytest.fixture(scope="module")
def answers(device, tmp_path_factory):
    """Token ids of the same prompts by each arm."""
    pytest.importorskip("nixl", reason="nixl is not installed: no pages can be moved")
    folder = tmp_path_factory.mktemp("gpu")
    save_model(folder / "model", device)
    rng = random.Random()
    prompts = [[rng.randrange(2, VOCAB_SIZE) for _ in range(n)] for n in (5, 100, 1000, 3000, 3500)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_PROTO_INFO", "y")  # it tells which transports it took
        found = {arm: ask(folder, arm, options, prompts, device) for arm, options in ARMS.items()}
    log = (folder / "two-tiers" / "prefill-0.log").read_text().splitlines()
    print("UCX took: " + ", ".join(transports(log)))
    return found


@pytest.mark.parametrize("arm", ["each step waited for", "two tiers"])
def test_answers_are_those_of_one_process(arm, answers):
    assert all(answers[arm])
    assert answers[arm] == answers["colocated"]


def ask(folder, arm, options, prompts, device):
    """Starts the cluster of an arm and asks it one prompt after the other; its logs are shown if something fails."""
    from kvferry.client import Client
    from local_cluster.cluster import LocalCluster
    from local_cluster.config import ClusterConfig

    logs = folder / arm.replace(" ", "-")
    config = ClusterConfig(
        model=str(folder / "model"), device=str(device), memory_fraction=0.4, port=0, log_dir=logs, **options
    )
    try:
        with LocalCluster(config) as cluster, Client(cluster.address) as client:
            return [greedy_answer(client, arm, prompt) for prompt in prompts]
    except BaseException:
        for path in sorted(logs.glob("*")):
            print(f"--- {path.name}\n{path.read_text()[-3000:]}")
        raise


def greedy_answer(client, arm, prompt):
    started = time.monotonic()
    result = client.generate(prompt, max_tokens=32, temperature=0, ignore_eos=True, return_token_ids=True).result()
    told = f"{arm}: {len(prompt)} tokens, {(time.monotonic() - started) * 1e3:.0f} ms"
    moved, stages = result.kv_transfer, result.timings_ms
    if arm == "two tiers":
        assert moved.bytes > 0
        assert moved.decode_computed_prompt_tokens == 0
        told += (
            f", {moved.bytes / 1e6:.1f} MB over {moved.transport} at {moved.gb_per_s:.1f} GB/s, "
            f"{moved.bytes_while_computing / moved.bytes:.0%} while computing, exposed "
            f"{stages['transfer_finished'] - stages['prefill_finished']:.1f} ms"
        )
    print(told, flush=True)
    return result.token_ids


def save_model(folder, device):
    config = AutoConfig.for_model(
        "llama", bos_token_id=0, eos_token_id=1, **(SMALL | {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 30})
    )
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    del model
    torch.cuda.empty_cache()


def transports(log: list[str]) -> list[str]:
    """What UCX's tables (UCX_PROTO_INFO) name as carrying bytes from GPU to GPU, such as cuda_ipc/cuda."""
    found: dict[str, None] = {}
    is_ours = False
    for line in log:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            is_ours = "from cuda" in cells[0] and "to cuda" in cells[0]
        elif is_ours and len(cells) == 3:
            found[f"{cells[2]} ({cells[1]})"] = None
    return list(found)


def save_tokenizer(folder: Path) -> None:
    """One token per byte behind two special ones: the router wants a tokenizer, though prompts here are tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1} | {letter: index + 2 for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
