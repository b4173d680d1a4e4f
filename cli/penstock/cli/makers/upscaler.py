"""Turn ncnn's files of Real-ESRGAN's compact network into a folder that the upscaling engine loads.

usage: python -m penstock.cli.makers.upscaler FILE.param FILE.bin OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HALF = 0x01306B47
"""ncnn's mark for weights in half precision; they are padded to four bytes."""


def read_layers(param: Path) -> list[tuple[str, dict[int, str]]]:
    """(kind, arguments by number) of each layer that has weights, in their order."""
    layers: list[tuple[str, dict[int, str]]] = []
    for line in param.read_text().splitlines():
        words = line.split()
        if words and words[0] in ("Convolution", "PReLU"):
            pairs = (word.split("=", 1) for word in words if "=" in word)
            layers.append((words[0], {int(number): value for number, value in pairs}))
    return layers


def read_weights(layers: list[tuple[str, dict[int, str]]], data: bytes) -> dict[str, Any]:
    """The state of the network. Raises SystemExit for bytes that are not those of its layers."""
    import numpy
    import torch

    state: dict[str, Any] = {}
    place = 0

    def take(kind: str, count: int) -> Any:
        nonlocal place
        values = numpy.frombuffer(data, kind, count, place)
        place += values.nbytes + (-values.nbytes) % 4
        return torch.from_numpy(values.astype("f4").copy())

    for number, (kind, arguments) in enumerate(layers):
        made = int(arguments[0])
        if kind == "PReLU":
            state[f"body.{number}.weight"] = take("<f4", made)
            continue
        half = int.from_bytes(data[place : place + 4], "little") == HALF
        place += 4
        weights = take("<f2" if half else "<f4", int(arguments[6]))
        state[f"body.{number}.weight"] = weights.reshape(made, -1, int(arguments[1]), int(arguments[1]))
        state[f"body.{number}.bias"] = take("<f4", made)
    if place != len(data):
        raise SystemExit(f"{len(data) - place} bytes of the weights belong to no layer")
    return state


def convert(param: Path, binary: Path, out: Path) -> None:
    """Write the folder; the weights are tried once."""
    import torch
    from safetensors.torch import save_file

    from penstock.processors.engines.images.upscaling import MODEL_TYPE, make_network

    layers = read_layers(param)
    convolutions = [arguments for kind, arguments in layers if kind == "Convolution"]
    scale = round((int(convolutions[-1][0]) / 3) ** 0.5)
    config = {
        "model_type": MODEL_TYPE,
        "channels": int(convolutions[0][0]),
        "convolutions": len(convolutions),
        "scale": scale,
    }
    state = read_weights(layers, binary.read_bytes())
    network = make_network(config)
    network.load_state_dict(state)
    if not bool(torch.isfinite(network(torch.rand(1, 3, 8, 8))).all()):
        raise SystemExit("the weights make no numbers")
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, out / "model.safetensors")
    (out / "config.json").write_text(json.dumps(config, indent=1))


if __name__ == "__main__":
    convert(*(Path(argument).absolute() for argument in sys.argv[1:4]))
