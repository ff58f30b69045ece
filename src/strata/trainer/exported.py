"""Predict with an exported model. This file needs nothing but Python and torch.

    from predict import Predictor

    model = Predictor("model/")
    model.predict({"carrier": ["AA", "DL"], "distance": [733, 2475]})

or, for rows in a JSON file ({"column": [values, …], …}):

    python model/predict.py rows.json
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

NEWEST_FORMAT = 1


class Predictor:
    """A model as `Trainer.export` wrote it."""

    def __init__(self, directory: str | Path) -> None:
        self._directory = Path(directory)
        about = json.loads((self._directory / "model.json").read_text(encoding="utf-8"))
        if about["format"] > NEWEST_FORMAT:
            raise ValueError(
                f"{directory} has format {about['format']}, and this predict.py reads up to {NEWEST_FORMAT}; use the "
                "predict.py of that directory"
            )
        self._about = about
        self._encoder = self._load_encoder() if about["has_features"] else None
        if not about["has_program"]:
            raise ValueError(
                f"torch.export could not capture this model ({about['why_no_program']}); create the module from its "
                "own code and load model.safetensors into it"
            )
        self._module = torch.export.load(self._directory / "model.pt2").module()

    def predict(self, rows: Mapping[str, Any] | list[Any]) -> Any:
        """Return the model's outputs for rows given as columns, or as a list of tensors if the model has no names."""
        inputs = rows if self._encoder is None else self._encoder(rows)
        args, kwargs = self._arguments(inputs)
        with torch.inference_mode():
            return self._module(*args, **kwargs)

    def _arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mode, names = self._about["mode"], self._about["columns"]
        if mode == "sequence":
            return tuple(self._tensor(value, str(number)) for number, value in enumerate(inputs)), {}
        if mode == "mapping":
            return ({name: self._column(inputs, name) for name in self._about["entries"]},), {}
        columns = {name: self._column(inputs, name) for name in names}
        if mode == "stack":
            return (torch.cat([each.reshape(len(each), -1).float() for each in columns.values()], dim=1),), {}
        return (tuple(columns.values()), {}) if self._about["is_positional"] else ((), columns)

    def _column(self, inputs: Mapping[str, Any], name: str) -> torch.Tensor:
        if name in inputs:
            return self._tensor(inputs[name], name)
        if name not in self._about["parts"]:
            raise ValueError(f"column {name!r} is missing; found: {', '.join(map(repr, inputs)) or 'no columns'}")
        matrix, start, stop = self._about["parts"][name]
        column: torch.Tensor = inputs[matrix][:, start] if stop is None else inputs[matrix][:, start:stop]
        return column

    def _tensor(self, values: Any, name: str) -> torch.Tensor:
        dtype = self._about["dtypes"].get(name)
        tensor = torch.as_tensor(values)
        return tensor if dtype is None else tensor.to(getattr(torch, dtype))

    def _load_encoder(self) -> Any:
        """Load the encoder of the features from its file beside this one."""
        spec = importlib.util.spec_from_file_location("strata_encoder", self._directory / "encoder.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        state = json.loads((self._directory / "features.json").read_text(encoding="utf-8"))
        return module.PortableEncoder.from_state(state)


def _plain(output: Any) -> Any:
    """Return an output as JSON has it."""
    if isinstance(output, torch.Tensor):
        return output.tolist()
    if isinstance(output, dict):
        return {name: _plain(value) for name, value in output.items()}
    return [_plain(value) for value in output] if isinstance(output, list | tuple) else output


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: python {sys.argv[0]} rows.json")
    rows = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    json.dump(_plain(Predictor(Path(__file__).parent).predict(rows)), sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
