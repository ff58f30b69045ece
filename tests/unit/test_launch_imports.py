"""Modules that the warm process imports in advance."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.launch.processes.imports import (
    AT_FIRST_USE,
    BEHIND,
    BEHIND_WITH_TORCH,
    FRAMEWORKS,
    SAFE,
    preloads,
    safe_imports,
)
from strata.launch.processes.local import SINGLE_THREADED

OURS = tuple(module for modules in BEHIND.values() for module in modules)


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import torch", ("torch",)),
        ("import torch.nn.functional as F", ("torch",)),
        ("from torch.nn import Linear", ("torch",)),
        ("import os, numpy as np\nfrom pandas import DataFrame", ("numpy", "pandas")),
        ("import torchvision, numpy_financial, jax", ()),
        ("from . import torch\nfrom .torch import x", ()),
        ("if __name__ == '__main__':\n    import torch\nelse:\n    import numpy", ("numpy", "torch")),
        ("try:\n    import torch\nexcept ImportError:\n    import numpy", ("numpy", "torch")),
        ("if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy", ("numpy",)),
        ("if typing.TYPE_CHECKING:\n    import torch", ()),
        ("def f():\n    import torch\nclass C:\n    import numpy", ()),
        ("", ()),
        ("import torch\nthis is no Python", ()),
        ("import torch\0", ()),
        ("import strata", OURS),
        ("from strata import CheckpointManager", OURS),
        ("from strata.errors import StrataError", ()),
        ("from strata.checkpoint import EverySteps", BEHIND["strata.checkpoint"]),
        ("from strata.checkpoint.manager import CheckpointManager", BEHIND["strata.checkpoint"]),
        ("from strata.coordinator import client", BEHIND["strata.coordinator.client"]),
        (
            "import strata.data\nimport torch",
            ("torch", *BEHIND["strata.data"], *BEHIND_WITH_TORCH["strata.data"]),
        ),
    ],
)
def test_the_imports_of_a_script_are_read_from_its_text(text: str, modules: tuple[str, ...]) -> None:
    assert safe_imports(text) == modules
    assert safe_imports(text.encode()) == modules


@given(st.permutations(["torch", "numpy.linalg as la", "os", "jax", "strata.data", "strata.train"]), st.integers(0, 6))
def test_the_order_of_the_imports_does_not_matter(names: list[str], num_names: int) -> None:
    chosen = names[:num_names]
    found = safe_imports("\n".join(f"import {name}" for name in chosen))

    assert found == safe_imports("\n".join(f"import {name}" for name in sorted(chosen)))
    assert len(set(found)) == len(found)


def test_a_script_is_found_by_its_path_or_its_module_and_never_run(tmp_path: Path) -> None:
    text = "import torch, numpy\nraise SystemExit('it ran')"
    for name in ("script.py", "package/part.py", "package/__main__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "package/__init__.py").write_text("raise SystemExit('it was imported')")
    directory = str(tmp_path)

    for script in ("script.py", str(tmp_path / "script.py")):
        assert preloads(script, directory=directory) == ("numpy", "torch")
    for module in ("script", "package", "package.part"):
        assert preloads(module, is_module=True, directory=directory) == ("numpy", "torch")


@pytest.mark.parametrize(
    "use",
    [
        "torch.optim.Adam(x)",
        "from torch import optim",
        "import torch.optim as o",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
    ],
)
def test_what_torch_imports_when_an_optimizer_is_made_is_imported_before(use: str) -> None:
    assert safe_imports(f"import torch\n{use}") == ("torch", "torch._dynamo")
    assert safe_imports("import torch\ntorch.ones(1)") == ("torch",)


FOR_OPTIMIZERS = ("torch", "torch._dynamo")


@pytest.mark.parametrize(
    ("text", "modules"),
    [
        ("import lightning as L", ("lightning.pytorch",)),
        ("from lightning.pytorch import Trainer", ("lightning.pytorch",)),
        ("from accelerate import Accelerator", ("accelerate",)),
        ("import transformers\ntransformers.Trainer", ("transformers", "transformers:Trainer")),
        ("from transformers import *", ("transformers",)),
        (
            "from transformers import Trainer, GPT2Model\nfrom transformers.trainer import TRAINER_STATE_NAME",
            ("transformers", "transformers:GPT2Model", "transformers:Trainer", "transformers:trainer"),
        ),
        (
            "import accelerate\nfrom strata.integrations.accelerate import StrataLoop",
            ("accelerate", "strata.integrations.accelerate"),
        ),
    ],
)
def test_a_framework_is_imported_before_with_torch_and_the_names_that_it_would_import_late(
    text: str, modules: tuple[str, ...]
) -> None:
    assert safe_imports(text) == (*FOR_OPTIMIZERS, *modules)


def test_a_framework_that_a_script_does_not_import_is_not_imported_for_it() -> None:
    assert not any("integrations" in name for name in safe_imports("import strata"))


def test_a_script_that_cannot_be_read_has_no_imports(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for module in ("nowhere", "sys", "empty", "script.part", ""):
        assert preloads(module, is_module=True, directory=str(tmp_path)) == ()
    for script in ("nowhere.py", "empty", str(tmp_path)):
        assert preloads(script, directory=str(tmp_path)) == ()
    with (tmp_path / "huge.py").open("wb") as file:
        file.truncate(9 << 20)
    assert preloads("huge.py", directory=str(tmp_path)) == ()


def test_everything_on_the_list_can_be_forked_for_it_starts_no_threads() -> None:
    modules = [
        *SAFE,
        *OURS,
        *(module for more in BEHIND_WITH_TORCH.values() for module in more),
        *AT_FIRST_USE.values(),
        *(module for both in FRAMEWORKS.values() for module in both),
    ]
    program = """
        import importlib, os, sys
        for name in sys.argv[1:]:
            try:
                module = importlib.import_module(name)
                if name == "transformers":
                    module.Trainer, module.AutoModelForCausalLM, module.GPT2LMHeadModel, module.pipeline
            except ImportError as error:
                print("passed over", name, error, file=sys.stderr)
            threads = os.listdir("/proc/self/task")
            assert len(threads) == 1, f"{name} has started threads"
        print([name for name in sys.argv[1:] if name not in sys.modules])
        import torch
        assert not torch.cuda.is_initialized()
    """

    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *modules],
        env={"PATH": "/usr/bin:/bin", **SINGLE_THREADED},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (run.returncode, ast.literal_eval(run.stdout or "0")) == (0, []), run.stderr
