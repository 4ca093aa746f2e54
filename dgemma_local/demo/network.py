"""The layers of `model.py` with a batch axis and gradients: what training adds to inference, and nothing else.

Batch     memory of one batch: prompts padded on the left, the K/V of the encoder pass, masks
Muon      Newton-Schulz-orthogonalised momentum for matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon)
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from dgemma_local import ops
from dgemma_local.cache import causal_mask
from dgemma_local.config import Kind, ModelConfig
from dgemma_local.model import DiffusionGemma, Router, parameter_shapes
from dgemma_local.ops import Routing


class Batch:
    """The Memory of one training batch of B prompts, padded on the left to P positions.

    Positions count from the start of the padding: rotary embedding is relative, so a shift of a whole row changes
    nothing. An encoder pass stores its keys and values; `length` then says where a canvas begins.
    """

    def __init__(self, real: Tensor, layers: int, window: int) -> None:
        """real [B, P] bool, False at the padding."""
        self.real, self.window, self.length = real, window, 0
        self.kv: list[tuple[Tensor, Tensor] | None] = [None] * layers

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        held = self.kv[layer]
        if self.length == 0:
            self.kv[layer] = (k, v)
            return k, v
        assert held is not None  # the encoder pass came first
        return torch.cat([held[0], k], -2), torch.cat([held[1], v], -2)

    def mask(self, kind: Kind, rows: int, causal: bool) -> Tensor | None:
        """[B, 1, T, N + T], True is seen; padding sees itself only, so that no row is empty."""
        window = self.window if kind == "sliding" else None
        if causal:
            square = causal_mask(0, rows, window, self.real.device)
            own = torch.eye(rows, dtype=torch.bool, device=self.real.device)
            return (square & self.real[:, None, None, :]) | own
        seen = self.real.clone()
        if window is not None:
            seen[:, : max(0, self.length - (window - 1))] = False
        return F.pad(seen, (0, rows), value=True)[:, None, None, :]

    def canvases(self, views: int, length: int, detach: bool, rows: Tensor | None = None) -> "Batch":
        """The memory that `views` canvases a prompt see: the first `length` positions; `rows` picks some of them."""
        other = Batch(self.real[:, :length], len(self.kv), self.window)
        other.length = length
        other.real = _pick(other.real, views, rows)
        for i, held in enumerate(self.kv):
            assert held is not None
            k, v = (_pick(t[..., :length, :].detach() if detach else t[..., :length, :], views, rows) for t in held)
            other.kv[i] = (k, v)
        return other


def _pick(t: Tensor, views: int, rows: Tensor | None) -> Tensor:
    t = t.repeat_interleave(views, 0)
    return t if rows is None else t[rows]


class CountingRouter(Router):
    """Remembers the load-balance loss of its last pass: E · Σ share of rows × mean probability (Switch, Fedus 2021)."""

    balance: Tensor

    def __call__(self, residual: Tensor) -> Routing:
        routing = super().__call__(residual)
        p = ops.probabilities(residual, self.scale, self.proj, self.eps)
        E = p.shape[-1]
        share = torch.bincount(routing.chosen.flatten(), minlength=E) / routing.chosen.numel()
        self.balance = E * (share * p.flatten(0, -2).mean(0)).sum()
        return routing


def trainable(config: ModelConfig, weights: Mapping[str, Tensor]) -> DiffusionGemma:
    """The model over `weights`, with routers that count."""
    model = DiffusionGemma(config, weights)
    for i, layer in enumerate(model.layers):
        own = {k.removeprefix(f"layers.{i}."): w for k, w in weights.items() if k.startswith(f"layers.{i}.")}
        layer.router = CountingRouter(config, own)
    return model


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """fp32 parameters: matrices N(0, 1/fan_in); norms so that attention starts soft and branches start small."""
    draw = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in parameter_shapes(config).items():
        leaf = name.rsplit(".", 1)[-1]
        if len(shape) > 1:
            weights[name] = torch.randn(shape, generator=draw) * shape[-1] ** -0.5
        elif leaf in ("q_norm", "k_norm"):  # attention has no 1/√d: the norms' scales stand for it
            weights[name] = torch.full(shape, shape[0] ** -0.25 * (1.5 if leaf == "k_norm" else 1.0))
        elif leaf.startswith("post_"):
            weights[name] = torch.full(shape, 0.5)
        else:
            weights[name] = torch.ones(shape)
        if leaf == "proj":
            weights[name] *= 0.5
    return weights


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon trains it; embedding, router, norms and scalars are AdamW's."""
    return weight.dim() > 1 and name != "embed_tokens" and "router" not in name


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """[..., m, n] -> nearest semi-orthogonal, by the quintic Newton-Schulz iteration with Muon's coefficients."""
    x: Tensor = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised, for weights whose rows are `parts` fused matrices (q, k, v; gate, up) or experts."""

    def __init__(self, params: list[tuple[Tensor, list[int]]], lr: float, momentum: float, weight_decay: float) -> None:
        self.parts = {id(p): rows for p, rows in params}
        super().__init__([p for p, _ in params], {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr, mu, decay = group["lr"], group["momentum"], group["weight_decay"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].lerp_(p.grad, 1 - mu)
                update = p.grad.lerp(state["momentum"], mu)  # Nesterov
                parts = [orthogonalise(t) for t in update.split(self.parts[id(p)], -2)]
                scale = [max(1.0, t.shape[-2] / t.shape[-1]) ** 0.5 for t in parts]
                p.mul_(1 - lr * decay).add_(
                    torch.cat([t * s for t, s in zip(parts, scale, strict=True)], -2), alpha=-lr
                )


def fused_rows(config: ModelConfig, name: str, weight: Tensor) -> list[int]:
    """How many rows each of the matrices fused into this weight has."""
    if name.endswith("qkv_proj"):
        layer = config.layers[int(name.split(".")[1])]
        kv = layer.kv_heads * layer.head_dim
        return [config.heads * layer.head_dim, kv] + ([kv] if layer.kind == "sliding" else [])
    if name.endswith("gate_up_proj"):
        return [weight.shape[-2] // 2] * 2
    return [weight.shape[-2]]
