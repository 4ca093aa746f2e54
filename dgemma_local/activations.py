"""What a run holds beside weights and cache: the tensors that are alive at the worst moment of each of its parts.

Counted along model.py, sampler.py and noise.py as Python frees them, blocks of decoded weights among them. A peak is that
of the operations of a CPU, where a softmax of bf16 makes an fp32 copy first; a GPU fuses that, and takes up to 33 MB less
of the real model.

Not counted is what an operation allocates and frees inside. Attention is taken to be a fused kernel, which has an output
and row sums, as on a CPU. What torch falls back to on CUDA where no fused kernel takes the case (a head dimension of
512, or a mask, with grouped heads) makes scores of all heads and copies of K and V: that is not in the plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dgemma_local import model, noise, quant
from dgemma_local.cache import Room, slots
from dgemma_local.config import LayerConfig, ModelConfig


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of the tensors that are alive at the worst moment of each part of a run.

    Letters as in model.py; P = T · A are the rows that experts see.
    """

    config: ModelConfig
    room: Room
    forms: Mapping[str, str]  # component -> the dtype of its weights
    b: int  # bytes of an activation
    on_gpu: bool

    def rotary(self, T: int) -> int:
        """cos and sin of a pass, of each geometry."""
        return sum(2 * T * layer.head_dim * self.b for layer in set(self.config.layers))

    def vocabulary(self) -> int:
        """A canvas's logits, and the largest of what is made on the way to them and from them."""
        L, V, b = self.config.canvas_length, self.config.vocab_size, self.b
        ids, soft = (min(most, max(1, model.VOCABULARY_BLOCK // (4 * other))) for most, other in ((V, L), (L, V)))
        calm, drawn = (min(L, max(1, noise.BLOCK_BYTES // (4 * V * each))) for each in (1, noise.DRAWN))
        head = self._linear("embedding", ids, self.config.hidden_size, L)
        entropies = 2 * calm * V * 4
        draws = 7 * drawn * V * 4 + V * 2
        decoded = self._block("embedding", V, self.config.hidden_size)[1]
        probabilities = soft * V * b + max(0 if b == 4 else soft * V * 8, decoded)
        hidden = 2 * L * self.config.hidden_size * b  # two signals, or one and what goes into the head
        return L * V * 4 + hidden + max(head, entropies, draws, probabilities)

    def step(self) -> int:
        """A canvas through the layers, with the signal that it is conditioned on."""
        L = self.config.canvas_length
        return L * self.config.hidden_size * self.b + max(self._layer(L, layer) for layer in set(self.config.layers))

    def prefill(self) -> int:
        """A chunk at the end of the longest prompt: ids, masks, and a layer that makes its mask a bias. The last is cut short.

        Canvases that are committed are no longer, and none is committed that no other follows.
        """
        end = self.room.context - self.config.canvas_length
        T = min(self.room.rows, end)
        seen = {"full": end, "sliding": min(end, self.config.sliding_window - 1 + T)}
        masks = sum(T * seen[kind] for kind in self.config.rope)
        *whole, last = self.config.layers
        layers = [self._layer(T, layer, T * seen[layer.kind] * self.b) for layer in set(whole)]
        grown = self.rotary(T) - self.rotary(self.config.canvas_length)
        return max(0, 8 * end + masks + grown + max(*layers, self._project(T, last), 0))

    def _layer(self, T: int, layer: LayerConfig, bias: int = 0) -> int:
        return max(self._project(T, layer), self._attend(T, layer, bias), self._mlp(T), self._experts(T))

    def _heads(self, T: int, layer: LayerConfig) -> tuple[int, int, int]:
        """Numbers of q, k and v as they are stored; of q and k; of v."""
        H, KV, d = self.config.heads, layer.kv_heads, layer.head_dim
        return T * (H + (1 if layer.kind == "full" else 2) * KV) * d, T * (H + KV) * d, T * KV * d

    def _project(self, T: int, layer: LayerConfig) -> int:
        """The heads' normal form is fp32; q and k are multiplied, rounded, and rotated by four operations."""
        D, b = self.config.hidden_size, self.b
        stored, turned, _ = self._heads(T, layer)
        widest = max(0 if b == 4 else 4 * stored, (4 if b == 4 else 4 + b) * turned, 4 * b * turned)
        return 2 * T * D * b + max(self._linear("attention", stored // T, D, T), (b + 4) * stored + widest)

    def _attend(self, T: int, layer: LayerConfig, bias: int) -> int:
        H, KV, d, D, b = self.config.heads, layer.kv_heads, layer.head_dim, self.config.hidden_size, self.b
        stored, turned, values = self._heads(T, layer)
        written = b * stored + (4 * stored + b * turned if b == 4 else b * (turned + values))  # in fp32 v is a view
        slab = slots(self.config, layer.kind, self.room)
        moved = 0 if layer.kind == "full" else max(0, slab - T) * KV * d * b
        out = T * H * d
        projected = b * out + self._linear("attention", D, H * d, T)
        seen = b * turned + max(bias + b * out + T * H * 4, projected)
        return 2 * T * D * b + max(written + moved if moved else 0, seen)

    def _mlp(self, T: int) -> int:
        D, I, b = self.config.hidden_size, self.config.intermediate_size, self.b
        around = T * D * 5 * b  # x, its norm, the sum with attention's output, and that one's two norms
        up, down = self._linear("dense MLP", 2 * I, D, T), self._linear("dense MLP", D, I, T)
        return around + max(up, b * T * 4 * I, b * T * I + down)

    def _experts(self, T: int) -> int:
        D, F, A, b = self.config.hidden_size, self.config.expert_size, self.config.top_k, self.b
        P = T * A
        around = T * D * 6 * b + P * (4 + 8 + 8)  # as above, the MLP's output; weights, choices, their order
        up = P * D * b + P * 2 * F * b + max(P * 2 * F * b, self._block("experts", 2 * F, D)[1])
        down = P * D * b + P * F * b + P * D * b + self._block("experts", D, F)[1]
        summed = P * D * (3 * b + 4) + T * D * 4  # rows as grouped, in order, and weighted in fp32
        return around + max(up, down, summed)

    def _linear(self, component: str, out: int, width: int, T: int) -> int:
        """What `quant.linear` makes: its output, and the decoded block behind it."""
        rows, decoding = self._block(component, out, width)
        if not rows:
            return T * out * self.b
        decoded, product = rows * width * self.b, T * rows * self.b
        whole = T * out * self.b if rows < out else 0
        return whole + max(decoding, decoded + product)

    def _block(self, component: str, out: int, width: int) -> tuple[int, int]:
        """Rows that are decoded at once, and the bytes that takes; none of a plain matrix."""
        rows = min(out, max(1, (quant.GPU_BLOCK if self.on_gpu else quant.CPU_BLOCK) // (4 * width)))
        n = rows * width
        form = self.forms.get(component, "")
        if form == "fp8":  # index and fp32; fp32 and rounded
            return rows, max(8 * n, (4 + self.b) * n)
        if form == "nvfp4":  # half an index, fp32, and a scale for 16
            return rows, max(6 * n, (4 + self.b) * n) + n // 4
        return 0, 0
