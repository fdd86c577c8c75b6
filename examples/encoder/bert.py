"""BERT's forward pass in NumPy (Devlin et al. 2019, https://arxiv.org/abs/1810.04805), attention left open.

B is the batch, S the padded length, H the heads, D the head size; the hidden size is ``H * D``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Attention", "Bert", "BertConfig", "numpy_attention", "padding_mask"]

Attention = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""``(query, key, value, attn_mask) -> output``: ``[B, H, S, D]`` three times, ``[B, 1, S, S]``, ``[B, H, S, D]``."""

_erf = np.frompyfunc(math.erf, 1, 1)


@dataclass(frozen=True)
class BertConfig:
    """The numbers of ``config.json`` that the forward pass needs."""

    layers: int
    heads: int
    hidden_size: int
    layer_norm_eps: float

    @classmethod
    def read(cls, path: Path) -> BertConfig:
        numbers = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            layers=numbers["num_hidden_layers"],
            heads=numbers["num_attention_heads"],
            hidden_size=numbers["hidden_size"],
            layer_norm_eps=numbers["layer_norm_eps"],
        )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def scale(self) -> float:
        """What attention logits are multiplied by: ``1 / sqrt(head_dim)``."""
        return 1 / math.sqrt(self.head_dim)


class Bert:
    """A sentence encoder: embeddings, layers, mean pooling, unit length.

    Args:
        weights: tensors by the names of the Hugging Face ``BertModel``.
        config: sizes.
        dtype: of the whole computation, float32 or float64.
    """

    def __init__(
        self, weights: Mapping[str, np.ndarray], config: BertConfig, dtype: type[np.floating] = np.float32
    ) -> None:
        self.config = config
        self.dtype = dtype
        # The embedding tables stay as they are: most of their rows are never read.
        self._weights = {
            name: tensor if name.endswith("embeddings.weight") else tensor.astype(dtype)
            for name, tensor in weights.items()
        }

    def encode(self, ids: np.ndarray, lengths: np.ndarray, attention: Attention) -> np.ndarray:
        """Unit embeddings ``[B, H * D]`` of padded token ids ``[B, S]``, of which ``lengths[b]`` are real."""
        mask = padding_mask(lengths, ids.shape[1], self.dtype)
        hidden = self._embed(ids)
        for layer in range(self.config.layers):
            hidden = self._layer(f"encoder.layer.{layer}", hidden, mask, attention)
        is_real = np.arange(ids.shape[1]) < lengths[:, None]
        # The mean over real tokens has the direction of their sum, and the length is divided out below.
        pooled = np.where(is_real[:, :, None], hidden, 0).sum(axis=1)
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    def _embed(self, ids: np.ndarray) -> np.ndarray:
        words = self._weights["embeddings.word_embeddings.weight"][ids].astype(self.dtype)
        positions = self._weights["embeddings.position_embeddings.weight"][: ids.shape[1]].astype(self.dtype)
        sentence = self._weights["embeddings.token_type_embeddings.weight"][0].astype(self.dtype)
        return self._layer_norm("embeddings.LayerNorm", words + positions + sentence)

    def _layer(self, name: str, hidden: np.ndarray, mask: np.ndarray, attention: Attention) -> np.ndarray:
        query, key, value = (
            self._split_heads(self._linear(f"{name}.attention.self.{part}", hidden))
            for part in ("query", "key", "value")
        )
        attended = self._merge_heads(attention(query, key, value, mask))
        hidden = self._layer_norm(
            f"{name}.attention.output.LayerNorm",
            hidden + self._linear(f"{name}.attention.output.dense", attended),
        )
        inner = _gelu(self._linear(f"{name}.intermediate.dense", hidden))
        return self._layer_norm(f"{name}.output.LayerNorm", hidden + self._linear(f"{name}.output.dense", inner))

    def _linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]

    def _layer_norm(self, name: str, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = np.square(centred).mean(axis=-1, keepdims=True)
        normal = centred / np.sqrt(variance + self.config.layer_norm_eps)
        return normal * self._weights[f"{name}.weight"] + self._weights[f"{name}.bias"]

    def _split_heads(self, x: np.ndarray) -> np.ndarray:
        """``[B, S, H * D]`` to ``[B, H, S, D]``."""
        return x.reshape(*x.shape[:2], self.config.heads, self.config.head_dim).transpose(0, 2, 1, 3)

    def _merge_heads(self, x: np.ndarray) -> np.ndarray:
        """``[B, H, S, D]`` to ``[B, S, H * D]``."""
        return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], self.config.hidden_size)


def padding_mask(lengths: np.ndarray, size: int, dtype: type[np.floating]) -> np.ndarray:
    """The additive mask ``[B, 1, S, S]`` that hides the keys from ``lengths[b]`` on: 0, or -inf."""
    row = np.where(np.arange(size) < lengths[:, None], 0, -np.inf).astype(dtype)
    return np.broadcast_to(row[:, None, None, :], (len(lengths), 1, size, size)).copy()


def numpy_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Softmax attention ``[B, H, S, D]`` in the dtype of its input; every row must have a key that it may see."""
    logits = query @ key.transpose(0, 1, 3, 2) / math.sqrt(query.shape[-1]) + mask
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights @ value / weights.sum(axis=-1, keepdims=True)


def _gelu(x: np.ndarray) -> np.ndarray:
    """``x`` times the normal distribution function at ``x``, exactly (https://arxiv.org/abs/1606.08415)."""
    return x * (0.5 * (1 + np.asarray(_erf(x / math.sqrt(2)), x.dtype)))
