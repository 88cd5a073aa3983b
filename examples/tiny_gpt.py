"""Trains a small language model on a novel with onefold as its attention, and lets it write.

    pip install '.[demo]' && python examples/tiny_gpt.py

A decoder-only transformer, written to be read from top to bottom. The blocks are those of current
language models: RMSNorm before each sublayer, rotary positions, grouped-query attention (several
query heads share one key and value head), a SwiGLU MLP, and an output layer that is the embedding
transposed. The attention itself is an argument, so the same model runs on any implementation:
`onefold demo` trains this one three times, beside PyTorch's attention and a plain one.

Shapes: B sequences of S tokens, width C, H query heads and G key and value heads of size D = C / H,
vocabulary V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onefold

TEXT = Path(__file__).with_name("pride_and_prejudice.txt")
SEQUENCES = 2  # per batch, each as long as the model's context
STEPS = 300

# (q: [B, S, H, D], k: [B, S, G, D], v: [B, S, G, D]) -> [B, S, H, D]; causal, scale 1 / sqrt(D).
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Config:
    """The sizes of a model. `mlp` is the inner width of the MLP, `context` the longest sequence."""

    vocabulary: int
    context: int = 256
    width: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 320

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


def rotation(length: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """Rotary positions as unit complex numbers e^(i * position * frequency), [S, D / 2].

    Pair n of a head turns by base^(-2n/D) radians per position (Su et al., RoFormer, 2021), so the
    product of a rotated query and a rotated key depends on their distance alone.
    """
    frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return torch.polar(torch.ones_like(angle), angle).to(torch.complex64)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turns neighbouring pairs of x: [B, S, H, D] by turn: [S, D / 2]; returns [B, S, H, D]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turn[:, None]).flatten(-2)


class SelfAttention(nn.Module):
    """Projects to queries, keys and values, rotates, attends, projects back.

    x: [B, S, C] -> [B, S, C].
    """

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.config, self.attention = config, attention
        columns = (config.heads + 2 * config.kv_heads) * config.head_dim
        self.to_qkv = nn.Linear(config.width, columns, bias=False)
        self.to_out = nn.Linear(config.width, config.width, bias=False)

    def qkv(self, x: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [B, S, C] -> rotated q: [B, S, H, D] and k: [B, S, G, D], and v: [B, S, G, D]."""
        heads, kv_heads = self.config.heads, self.config.kv_heads
        qkv = self.to_qkv(x).unflatten(-1, (-1, self.config.head_dim))
        q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=2)
        return rotate(q, turn), rotate(k, turn), v

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        return self.to_out(self.attention(*self.qkv(x, turn)).flatten(2))


class SwiGLU(nn.Module):
    """A gated MLP (Shazeer, 2020), [B, S, C] -> [B, S, C]: one half gates the other."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.widen = nn.Linear(config.width, 2 * config.mlp, bias=False)
        self.narrow = nn.Linear(config.mlp, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.widen(x).chunk(2, dim=-1)
        return self.narrow(F.silu(gate) * value)


class Block(nn.Module):
    """Attention, then the MLP, each on a normalised copy and added back."""

    def __init__(self, config: Config, attention: Attention) -> None:
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = SelfAttention(config, attention)
        self.norm_mlp = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), turn)
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    """tokens: int64 [B, S] -> logits: [B, S, V]; position s predicts token s + 1.

    `seed` fixes the initial weights, so models that differ only in `attention` start equal.
    """

    turn: Tensor  # [context, D / 2]

    def __init__(self, config: Config, attention: Attention, seed: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.register_buffer("turn", rotation(config.context, config.head_dim), persistent=False)
        self.initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Normal weights that keep activations near unit size, smaller where they add to x."""
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue  # the gains of RMSNorm start at one
            deviation = weight.shape[1] ** -0.5
            if "to_out" in name or "narrow" in name:
                deviation /= (2 * self.config.layers) ** 0.5
            weight.normal_(0.0, deviation, generator=generator)

    @property
    def device(self) -> torch.device:
        return self.embedding.weight.device

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.turn[: tokens.shape[1]])
        return F.linear(self.norm(x), self.embedding.weight)

    def losses(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy in nats of every token, [B, S]; its mean is what training minimises."""
        logits = self(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(
            targets
        )

    @torch.no_grad()
    def sample(
        self, prompt: Tensor, length: int, generator: torch.Generator, temperature: float = 0.5
    ) -> Tensor:
        """Continues prompt: int64 [S] by `length` tokens; returns int64 [S + length]. Prompt, draws
        and result are on the CPU, wherever the model is."""
        tokens = prompt
        for _ in range(length):
            logits = self(tokens[None, -self.config.context :].to(self.device))[0, -1].cpu()
            weights = torch.softmax(logits / temperature, dim=-1)
            tokens = torch.cat((tokens, torch.multinomial(weights, 1, generator=generator)))
        return tokens


class Corpus:
    """A text as character numbers, and windows drawn from it."""

    def __init__(self, text: str) -> None:
        self.alphabet = sorted(set(text))
        self.numbers = {character: number for number, character in enumerate(self.alphabet)}
        self.tokens = self.encode(text)

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.numbers[character] for character in text])

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.alphabet[number] for number in tokens.tolist())

    def batches(self, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless pairs (tokens, targets), int64 [SEQUENCES, context]; targets are one ahead."""
        generator = torch.Generator().manual_seed(seed)
        window = torch.arange(context + 1)
        while True:
            last_start = len(self.tokens) - context - 1
            start = torch.randint(last_start + 1, (SEQUENCES, 1), generator=generator)
            tokens = self.tokens[start + window]
            yield tokens[:, :-1], tokens[:, 1:]


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
