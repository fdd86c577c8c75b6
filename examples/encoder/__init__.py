"""A BERT sentence encoder in NumPy, in three parts that read on their own.

``weights`` finds the model on disk and reads it, ``wordpiece`` turns sentences into token ids, and
``bert`` runs the layers, with the attention left to whoever calls.
"""

from encoder.bert import Attention, Bert, BertConfig, numpy_attention, padding_mask
from encoder.weights import ModelNotFoundError, find_model, read_safetensors
from encoder.wordpiece import WordPiece

__all__ = [
    "Attention",
    "Bert",
    "BertConfig",
    "ModelNotFoundError",
    "WordPiece",
    "find_model",
    "numpy_attention",
    "padding_mask",
    "read_safetensors",
]
