"""A tiny `hrm_lm` learns English from bytes. Referees: n-gram models counted on the same text."""

import gzip
from pathlib import Path

import pytest
import torch

from hrm_hf import HrmLmConfig, HrmLmForCausalLM


TEXT = Path(__file__).parents[3] / "shared" / "data" / "tinyshakespeare.txt.gz"
LENGTH, ROWS, STEPS = 64, 16, 600


def n_gram_loss(train: torch.Tensor, valid: torch.Tensor, n: int) -> float:
    """Nats a byte of the n-gram model with counts + 0.1, for n = 1 or 2."""
    before = train[:-1] if n == 2 else torch.zeros_like(train[:-1])
    counts = torch.zeros(256, 256).index_put_((before, train[1:]), torch.tensor(1.0), accumulate=True) + 0.1
    log_p = (counts / counts.sum(1, keepdim=True)).log()
    return -log_p[valid[:-1] if n == 2 else 0, valid[1:]].mean().item()


@pytest.mark.slow
@pytest.mark.skipif(not TEXT.is_file(), reason="tinyshakespeare.txt.gz does not lie beside the repository")
def test_a_tiny_model_predicts_bytes_better_than_their_pairs_do():
    text = torch.tensor(list(gzip.decompress(TEXT.read_bytes())))
    train, valid = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    unigram, bigram = n_gram_loss(train, valid, 1), n_gram_loss(train, valid, 2)

    torch.manual_seed(0)
    model = HrmLmForCausalLM(
        HrmLmConfig(
            vocab_size=256, hidden_size=96, intermediate_size=192, num_h_layers=1, num_l_layers=1,
            num_attention_heads=4, halt_max_steps=2, H_cycles=2, L_cycles=2, bp_steps=4,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS, pct_start=0.1)
    model.train()
    for _ in range(STEPS):
        starts = torch.randint(0, len(train) - LENGTH, (ROWS,))
        ids = torch.stack([train[start : start + LENGTH] for start in starts])
        model(ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    model.eval()
    ids = valid[: 256 * LENGTH].view(-1, LENGTH)
    with torch.no_grad():
        output = model(ids, labels=ids)
    loss, steps = output.lm_loss.item(), output.metrics["avg_steps"].item()
    print(f"unigram {unigram:.3f}, bigram {bigram:.3f}, hrm_lm {loss:.3f} nats a byte at {steps:.2f} segments")
    assert bigram < unigram
    assert loss < bigram - 0.1
