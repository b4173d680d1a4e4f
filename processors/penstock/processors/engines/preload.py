"""What the fork server imports before any engine is forked from it: heavy modules, without touching CUDA or OpenMP."""

import importlib

for name in (
    "tokenizers",
    "torch",
    "transformers",
    "transformers.generation.continuous_batching",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
):
    importlib.import_module(name)
