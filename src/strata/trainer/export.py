"""Export a trained module: plain files that need no Strata.

    model.safetensors   the weights
    model.pt2           the program, captured by torch.export, with any number of rows
    features.json, encoder.py   the fitted features, and the code that applies them
    model.json          how columns become arguments
    predict.py          loads all of it; needs only torch
    model.onnx          on request

A program that torch.export cannot capture is left out, and `model.json` states the reason.
"""

from __future__ import annotations

import json
import logging
import shutil
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from strata.checkpoint.format import layout, tree
from strata.errors import ConfigError, InvalidArgument
from strata.trainer import exported
from strata.trainer.exported import NEWEST_FORMAT

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from strata.trainer.batches import Batch
    from strata.trainer.binding import Binding
    from strata.trainer.features import Features

log = logging.getLogger(__name__)


def export(
    directory: Path, module: nn.Module, *, features: Features | None, example: Batch, binding: Binding, onnx: bool
) -> None:
    """Write the files of an exported model.

    Args:
        example: A batch of at least two rows, with which the program is captured.

    Raises:
        InvalidArgument: The directory is not empty.
        ConfigError: `onnx` is set, and a package is missing or the module cannot be converted.
    """
    if directory.exists() and any(directory.iterdir()):
        raise InvalidArgument(f"{str(directory)!r} is not empty; choose a new directory", field="path")
    directory.mkdir(parents=True, exist_ok=True)
    was_training = module.training
    module.eval()
    try:
        _write_weights(module, directory / "model.safetensors")
        reason = _write_program(module, example, directory / "model.pt2")
        if onnx:
            _write_onnx(module, example, directory / "model.onnx")
    finally:
        module.train(was_training)
    if features is not None:
        from strata.trainer.features import portable  # noqa: PLC0415 - only where features are used

        (directory / "features.json").write_text(json.dumps(features.state()), encoding="utf-8")
        shutil.copyfile(portable.__file__, directory / "encoder.py")
    about = {
        "format": NEWEST_FORMAT,
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "mode": binding.mode,
        "columns": list(binding.columns),
        "entries": list(example.args[0]) if binding.mode == "mapping" else [],
        "dtypes": _dtypes(example, binding),
        "is_positional": binding.is_positional,
        "parts": {name: _part(matrix, where) for name, (matrix, where) in binding.parts.items()},
        "has_features": features is not None,
        "has_program": not reason,
        "why_no_program": reason,
    }
    (directory / "model.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(exported.__file__, directory / "predict.py")


def _part(matrix: str, where: int | slice) -> list[Any]:
    return [matrix, where.start, where.stop] if isinstance(where, slice) else [matrix, where, None]


def _dtypes(example: Batch, binding: Binding) -> dict[str, str]:
    """Return the types of the inputs by name or position: JSON has only one kind of number."""
    if binding.mode == "mapping":
        named = example.args[0]
    elif binding.mode == "sequence":
        named = {str(number): value for number, value in enumerate(example.args)}
    elif binding.mode == "columns":
        named = dict(zip(binding.columns, example.args, strict=True)) if binding.is_positional else example.kwargs
    else:
        named = {}
    return {
        name: str(value.dtype).removeprefix("torch.")
        for name, value in named.items()
        if isinstance(value, torch.Tensor)
    }


def _write_weights(module: nn.Module, path: Path) -> None:
    leaves = tree.flatten(module.state_dict()).leaves
    plan = layout.plan(leaves, {"format": "pt"})
    sources = {leaf.name: leaf.source for leaf in leaves}
    with path.open("wb") as file:
        file.write(plan.header)
        for place in plan.places:
            data = sources[place.name].detach().cpu().contiguous()
            file.write(data.reshape(-1).view(torch.uint8).numpy().tobytes())


def _write_program(module: nn.Module, example: Batch, path: Path) -> str:
    """Capture and write the program; return the reason if that is not possible, else nothing."""
    try:
        torch.export.save(_captured(module, example), path)
    except Exception as error:  # noqa: BLE001 - a module may fail to be captured in any way; the rest is still useful
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        log.warning("the program was not exported: %s", reason)
        path.unlink(missing_ok=True)
        return reason
    return ""


def _captured(module: nn.Module, example: Batch) -> Any:
    num_copies = 2 if example.num_rows == 1 else 1  # the program would be one for single rows
    args, kwargs = tree_map(lambda value: _copied(value, num_copies), (example.args, example.kwargs))
    shapes = tree_map(lambda value: {0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) else None, args)
    named = tree_map(lambda value: {0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) else None, kwargs)
    dynamic = named if kwargs else shapes
    return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic)


def _copied(value: Any, num_copies: int) -> Any:
    """Return a tensor of its own: a loader's batch may share memory, which export would record."""
    return torch.cat([value.detach()] * num_copies) if isinstance(value, torch.Tensor) and value.dim() else value


def _write_onnx(module: nn.Module, example: Batch, path: Path) -> None:
    try:
        program = torch.onnx.export(_captured(module, example), dynamo=True, verbose=False)
    except ImportError as error:
        raise ConfigError(
            f"ONNX needs a package that is not installed ({error}); pip install onnx onnxscript"
        ) from error
    except Exception as error:
        raise ConfigError(
            f"the module cannot be converted to ONNX ({type(error).__name__}: {error}); export it without onnx=True",
            field="onnx",
        ) from error
    assert program is not None
    program.save(str(path))
