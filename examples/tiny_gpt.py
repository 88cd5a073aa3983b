"""Trains a small language model with onefold as its attention, and lets it write.

    pip install '.[demo]' && python examples/tiny_gpt.py

The model, about 150 lines, is python/onefold/_demo/transformer.py; `onefold demo` trains the same
one beside PyTorch's attention, with checks and a plot.
"""

import torch
from torch import Tensor

import onefold
from onefold._demo.training import TEXT, Corpus
from onefold._demo.transformer import Config, Transformer

STEPS = 300


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q: [B, S, H, D], k and v: [B, S, G, D], H a multiple of G; returns [B, S, H, D]."""
    return onefold.attention(q, k, v, causal=True)


def main() -> None:
    corpus = Corpus(TEXT.read_text(encoding="ascii"))
    model = Transformer(Config(vocabulary=len(corpus.alphabet)), attention, seed=0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    batches = corpus.batches(model.config.context, seed=0)
    for step in range(STEPS):
        tokens, targets = next(batches)
        loss = model.losses(tokens, targets).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if (step + 1) % 20 == 0:
            print(f"step {step + 1}: {loss.item():.3f} nats per character")
    generator = torch.Generator().manual_seed(0)
    print(corpus.decode(model.sample(corpus.encode("Mr. Darcy "), 300, generator)))


if __name__ == "__main__":
    main()
