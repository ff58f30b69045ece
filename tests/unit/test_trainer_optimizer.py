"""Optimizers from every form that users write, stacks of optimizers and losses, and moving averages."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from strata.errors import InvalidArgument
from strata.trainer.optimizer import FTRL, Ema, LossFnStack, OptimizerStack, Part, StackedOptimizer, build
from strata.trainer.optimizer.factory import FUSED
from strata.trainer.optimizer.rows import group_of, release


class WideAndDeep(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wide = nn.Linear(3, 1)
        self.deep = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.scale * (self.wide(rows) + self.deep(rows))).squeeze(1)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 3, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        optimizer.zero_grad()
        module(torch.randn((8, 3), generator=generator)).square().mean().backward()
        optimizer.step()


def weights_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def same_weights(left: nn.Module, right: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left.parameters(), right.parameters(), strict=True))


def matched(stack: OptimizerStack, module: nn.Module) -> dict[str, list[str]]:
    """Return the names of the parameters of each part."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    optimizers = stack.compile(module).optimizers
    return {
        key: [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        for key, optimizer in optimizers.items()
    }


DEEP = ["deep.0.weight", "deep.0.bias", "deep.2.weight", "deep.2.bias", "deep.3.weight", "deep.3.bias"]
WIDE = ["wide.weight", "wide.bias"]


def test_parts_are_chosen_by_submodule_parameter_pattern_and_function() -> None:
    stack = OptimizerStack(
        Part("wide", FTRL), Part("scale", "sgd"), Part("deep.?.bias", "adam"), Part(lambda _, p: p.dim() == 2, "adamw")
    )
    module = WideAndDeep()
    with pytest.raises(InvalidArgument, match=r"'wide.weight' is matched by 'wide', 'part 3'.*'\*'"):
        stack.compile(module)
    stack = OptimizerStack(
        Part("wide", FTRL), Part("deep.?.bias", "adam"), Part(lambda n, p: "deep" in n and p.dim() == 2, "adamw", {}),
        {"*": "sgd"},
    )  # fmt: skip

    assert matched(stack, module) == {
        "wide": WIDE,
        "deep.?.bias": ["deep.0.bias", "deep.2.bias", "deep.3.bias"],
        "part 2": ["deep.0.weight", "deep.3.weight"],
        "*": ["scale", "deep.2.weight"],
    }


def test_all_forms_of_a_stack_are_the_same() -> None:
    veloce = OptimizerStack(
        {"cls": torch.optim.Adam, "args": {"lr": 1e-2}, "model_key": "deep"},
        {"cls": FTRL, "args": {"alpha": 0.5, "l1": 0.1}, "model_key": "wide"},
        {"cls": torch.optim.SGD, "model_key": "scale"},
    )
    mapping = OptimizerStack(
        {"deep": functools.partial(torch.optim.Adam, lr=1e-2), "wide": functools.partial(FTRL, lr=0.5, l1=0.1)},
        {"*": "sgd"},
    )
    parts = OptimizerStack(
        Part("deep", "adam", {"lr": 1e-2}), Part("wide", "ftrl", {"lr": 0.5, "l1": 0.1}), Part("*", "SGD")
    )
    modules = [WideAndDeep() for _ in range(3)]
    for module, stack in zip(modules, (veloce, mapping, parts), strict=True):
        train(module, stack.compile(module))

    assert same_weights(modules[0], modules[1])
    assert same_weights(modules[0], modules[2])


def test_a_stack_steps_each_part_as_its_optimizer_would_alone() -> None:
    stacked, alone = WideAndDeep(), WideAndDeep()
    train(stacked, OptimizerStack({"wide": "ftrl", "*": functools.partial(torch.optim.Adam, lr=0.1)}).compile(stacked))
    rest = [parameter for name, parameter in alone.named_parameters() if not name.startswith("wide")]
    optimizers = [FTRL(alone.wide.parameters()), torch.optim.Adam(rest, lr=0.1, fused=True)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        alone.zero_grad()
        alone(torch.randn((8, 3), generator=generator)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    assert same_weights(stacked, alone)


def test_a_restored_stack_continues_with_the_same_bits() -> None:
    stack = OptimizerStack({"wide": "ftrl", "deep": functools.partial(torch.optim.AdamW, lr=0.1), "*": "adagrad"})
    module = WideAndDeep()
    optimizer = stack.compile(module)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(module, optimizer)
    scheduler.step()
    restored = WideAndDeep(seed=5)
    restored.load_state_dict(module.state_dict())
    continued = stack.compile(restored)
    other = torch.optim.lr_scheduler.StepLR(continued, 1, gamma=0.5)
    continued.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other.load_state_dict(scheduler.state_dict())
    for each, its_optimizer, its_scheduler in ((module, optimizer, scheduler), (restored, continued, other)):
        train(each, its_optimizer, seed=2)
        its_scheduler.step()
        train(each, its_optimizer, seed=3)

    assert same_weights(module, restored)
    assert [group["lr"] for group in continued.param_groups] == pytest.approx([0.1 / 4, 0.1 / 4, 0.01 / 4])


def test_a_scheduler_changes_the_learning_rate_of_every_part() -> None:
    module = WideAndDeep()
    optimizer = OptimizerStack(
        Part("wide", FTRL, {"lr": 1.0}), Part("*", torch.optim.SGD, {"lr": 0.5})
    ).compile(module)  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda _: 0.1, lambda _: 0.2])
    train(module, optimizer, 1)
    scheduler.step()

    assert [each.param_groups[0]["lr"] for each in optimizer.optimizers.values()] == [0.1, 0.1]


@pytest.mark.parametrize("is_stack", [False, True])
def test_a_group_follows_the_learning_rate_after_a_restore(is_stack: bool) -> None:
    module = WideAndDeep()
    spec: Any = OptimizerStack({"wide": "sgd", "*": "adam"}) if is_stack else torch.optim.SGD
    optimizer = build(spec, module)
    group = group_of(optimizer, module.wide.weight, "wide.weight")
    saved = copy.deepcopy(optimizer.state_dict())

    optimizer.load_state_dict(saved)  # replaces the dicts of the groups
    optimizer.param_groups[0]["lr"] = 0.125

    assert group.rate == 0.125


def test_a_group_makes_an_optimizer_of_the_same_kind_for_other_parameters() -> None:
    module, twin = WideAndDeep(), WideAndDeep()
    optimizer = build(functools.partial(torch.optim.Adam, lr=0.1, weight_decay=0.01), module)
    group = group_of(optimizer, module.wide.weight, "wide.weight")
    made = group.optimizer_of([module.wide.weight])
    release(optimizer, [module.wide.weight])
    whole = build(functools.partial(torch.optim.Adam, lr=0.1, weight_decay=0.01), twin)
    for rate in (0.1, 0.05):
        optimizer.param_groups[0]["lr"] = whole.param_groups[0]["lr"] = rate
        for each in (module, twin):
            each.zero_grad()
            each(torch.ones(8, 3)).sum().backward()
        group.renew(made)
        for each in (optimizer, made, whole):
            each.step()

    assert len(made.state) == 1
    assert all(map(torch.equal, module.parameters(), twin.parameters()))


def test_a_stacked_optimizer_behaves_as_an_optimizer() -> None:
    module = WideAndDeep()
    optimizer = OptimizerStack({"wide": "ftrl", "*": "adam"}).compile(module)
    module(torch.ones(8, 3)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not parameter.grad.any() for parameter in module.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in module.parameters())
    before = weights_of(module)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(module(torch.ones(8, 3)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(module.wide.weight, before["wide.weight"])

    assert isinstance(optimizer, torch.optim.Optimizer)
    assert "FTRL" in repr(optimizer)
    with pytest.raises(InvalidArgument, match="no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(InvalidArgument, match="cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(InvalidArgument, match=r"has the parts 'deep', this OptimizerStack has 'wide', '\*'"):
        optimizer.load_state_dict({"optimizers": {"deep": {}}})


def test_a_description_and_a_bound_stack_are_pickled() -> None:
    stack = OptimizerStack({"wide": "ftrl", "*": functools.partial(torch.optim.Adam, lr=0.1)})
    module = WideAndDeep()
    optimizer = stack.compile(module)
    train(module, optimizer)
    other, its_optimizer = pickle.loads(pickle.dumps((module, optimizer)))
    third = pickle.loads(pickle.dumps(stack)).compile(WideAndDeep())
    for each, each_optimizer in ((module, optimizer), (other, its_optimizer)):
        train(each, each_optimizer, seed=2)

    assert isinstance(its_optimizer, StackedOptimizer)
    assert same_weights(module, other)
    assert list(third.optimizers) == ["wide", "*"]


def test_a_shared_parameter_is_matched_by_any_of_its_names_and_once() -> None:
    module = WideAndDeep()
    module.wide.weight = module.deep[0].weight = nn.Parameter(torch.ones(4, 3))

    with pytest.raises(InvalidArgument, match="is matched by 'wide', 'deep'"):
        OptimizerStack({"wide": "sgd", "deep": "adam"}).compile(module)
    assert "wide.weight" in matched(OptimizerStack({"deep": "adam", "*": "sgd"}), module)["deep"]


def test_frozen_parameters_need_no_optimizer() -> None:
    module = WideAndDeep()
    module.wide.requires_grad_(False)
    module.scale.requires_grad_(False)

    assert matched(OptimizerStack({"deep": "adam"}), module) == {"deep": DEEP}
    with pytest.raises(InvalidArgument, match="'wide' of the OptimizerStack matches frozen parameters only"):
        OptimizerStack({"wide": "ftrl", "deep": "adam"}).compile(module)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (({"tower": "adam", "*": "sgd"},), "'tower' .*no parameter; WideAndDeep has the submodules 'wide', 'deep'"),
        (({"deep": "adam"},), r"matches 3 parameters .*'scale', 'wide.weight', 'wide.bias'; add a part '\*'"),
        (({"dee": "adam", "*": "sgd"},), "'dee' of the OptimizerStack matches no parameter"),
        (({"wide": "adam", "deep": "adam", "scale": "sgd", "*": "sgd"},), "because other parts match every parameter"),
        ((Part(lambda *_: False, "adam"), Part("*", "sgd")), "'part 0' of the OptimizerStack matches no parameter"),
        (({"*": "adamm"},), "'adamm' is unknown; did you mean 'adam'"),
        (({"*": functools.partial(torch.optim.Adam, rate=1)},), "cannot be created.*rate"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit_the_module_are_refused(parts: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        OptimizerStack(*parts).compile(WideAndDeep())


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((), "needs a part"),
        (({},), "needs a part"),
        ((torch.optim.Adam,), "is not a part of an OptimizerStack"),
        (({"cls": torch.optim.Adam, "args": {"lr": 1}},), r"has the keys \['args', 'cls'\]"),
        (
            ({"cls": torch.optim.Adam, "model_key": "deep", "lr": 1},),
            r"write dict\(cls=…, args=dict\(…\), model_key=…\)",
        ),
        (({"deep": "adam"}, {"deep": "sgd"}), "two parts of the OptimizerStack match 'deep'"),
    ],
)
def test_other_forms_of_parts_are_refused(parts: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        OptimizerStack(*parts)


@pytest.mark.parametrize(
    ("spec", "args", "kind"),
    [
        ("adam", None, torch.optim.Adam),
        ("AdamW", {"lr": 0.5}, torch.optim.AdamW),
        ("sgd", {"momentum": 0.9}, torch.optim.SGD),
        ("adagrad", None, torch.optim.Adagrad),
        ("ftrl", {"l1": 1.0}, FTRL),
        (torch.optim.RMSprop, {"lr": 0.5}, torch.optim.RMSprop),
        (functools.partial(torch.optim.Adam, lr=0.5), {"betas": (0.8, 0.9)}, torch.optim.Adam),
        (lambda parameters: torch.optim.SGD(parameters[:1], lr=0.5), None, torch.optim.SGD),
        (OptimizerStack({"*": "adam"}), None, StackedOptimizer),
    ],
)
def test_an_optimizer_is_built_from_every_form(spec: Any, args: dict[str, Any] | None, kind: type) -> None:
    module = WideAndDeep()
    module.scale.requires_grad_(False)
    optimizer = build(spec, module, args)
    train(module, optimizer, 1)

    assert type(optimizer) is kind
    group = optimizer.param_groups[0]
    assert all(group[name] == value for name, value in (args or {}).items())
    assert not any(parameter is module.scale for parameter in group["params"])


@pytest.mark.parametrize("kind", FUSED)
def test_adam_is_created_with_the_fused_implementation_and_agrees_with_the_default(
    kind: type[torch.optim.Optimizer],
) -> None:
    """It takes a third of the time for a small network, and agrees within the rounding of single precision."""
    found = []
    for args in ({"lr": 1e-2}, {"lr": 1e-2, "fused": False}):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = build(kind, module, args)
        x = torch.randn(64, 8)
        for _ in range(20):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
        found.append((optimizer.param_groups[0]["fused"], torch.cat([each.flatten() for each in module.parameters()])))
    (is_fused, weights), (is_default_fused, default) = found
    assert (is_fused, is_default_fused) == (True, False)
    assert torch.allclose(weights, default, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "args", "dtype", "fused"),
    [
        ("adam", {}, torch.float32, True),
        (functools.partial(torch.optim.AdamW, lr=0.1), {}, torch.float64, True),
        (functools.partial(torch.optim.Adam, foreach=True), {}, torch.float32, None),
        ("adam", {"foreach": False}, torch.float32, None),
        (lambda parameters: torch.optim.Adam(parameters[:1]), {}, torch.float32, None),
        ("adam", {}, torch.bfloat16, None),
        ("sgd", {}, torch.float32, None),
    ],
)
def test_the_user_and_the_parameters_decide_whether_the_fused_implementation_is_used(
    spec: Any, args: dict[str, Any], dtype: torch.dtype, fused: bool | None
) -> None:
    optimizer = build(spec, nn.Linear(2, 1, dtype=dtype), args)
    assert optimizer.param_groups[0]["fused"] is fused


def test_an_instance_is_used_as_it_is() -> None:
    module = WideAndDeep()
    optimizer = torch.optim.Adam(module.deep.parameters())

    assert build(optimizer, module) is optimizer


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda module: torch.optim.Adam(WideAndDeep().parameters()), "9 of the 9 parameters of Adam do not belong"),
        (
            lambda module: torch.optim.Adam([*module.wide.parameters(), nn.Parameter(torch.zeros(1))]),
            "1 of the 3 parameters of Adam do not belong to WideAndDeep",
        ),
        (
            lambda module: torch.optim.Adam([*frozen(module.wide).parameters(), module.scale]),
            "2 of the 3 parameters of Adam require no gradient",
        ),
        (lambda module: lambda parameters: None, "returned NoneType; return a torch.optim.Optimizer"),
        (lambda module: lambda parameters: torch.optim.Adam([torch.zeros(1)]), "1 of the 1 parameters"),
        (lambda module: torch.optim.LBFGS(module.parameters()), "LBFGS computes the loss several times .*'adam'"),
        (lambda module: OptimizerStack({"*": torch.optim.LBFGS}), "LBFGS computes the loss several times"),
        (lambda module: "adma", "'adma' is unknown; did you mean .*'adam'"),
        (lambda module: 3, "is not an optimizer"),
    ],
)
def test_an_optimizer_that_does_not_fit_the_module_is_refused(make: Any, words: str) -> None:
    module = WideAndDeep()

    with pytest.raises(InvalidArgument, match=words):
        build(make(module), module)


def test_arguments_that_cannot_be_applied_are_refused() -> None:
    module = WideAndDeep()

    with pytest.raises(InvalidArgument, match=r"\{'rate': 1\}"):
        build("adam", module, {"rate": 1})
    with pytest.raises(InvalidArgument, match="cannot be applied to Adam"):
        build(torch.optim.Adam(module.parameters()), module, {"lr": 1})
    with pytest.raises(InvalidArgument, match="cannot be applied to OptimizerStack"):
        build(OptimizerStack({"*": "adam"}), module, {"lr": 1})


def test_a_module_without_trainable_parameters_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no parameter that requires a gradient"):
        build("adam", frozen(WideAndDeep()))


def test_losses_are_added_with_their_weights() -> None:
    predictions, targets = torch.tensor([0.2, 0.9], requires_grad=True), torch.tensor([0.0, 1.0])
    veloce = LossFnStack({"fn": nn.BCELoss(), "weight": 0.7}, {"fn": nn.MSELoss(), "weight": 2})
    named = LossFnStack(bce=(nn.functional.binary_cross_entropy, 0.7), squared=(nn.MSELoss(), 2.0))
    bce, squared = nn.BCELoss()(predictions, targets), nn.MSELoss()(predictions, targets)
    total = named(predictions, targets)
    total.backward()

    assert total.item() == veloce(predictions, targets).item() == pytest.approx((0.7 * bce + 2 * squared).item())
    assert {name: part.item() for name, part in named.parts.items()} == {"bce": bce.item(), "squared": squared.item()}
    assert list(veloce.parts) == ["BCELoss", "MSELoss"]
    assert not any(part.requires_grad for part in named.parts.values())
    assert predictions.grad is not None
    assert "squared: 2" in repr(named)


def test_a_loss_without_a_weight_counts_with_1_and_equal_names_are_numbered() -> None:
    stack = LossFnStack(nn.MSELoss(), {"fn": nn.MSELoss()}, {"fn": nn.L1Loss(), "name": "far"}, near=nn.L1Loss())

    assert stack.weights == {"MSELoss": 1, "MSELoss_2": 1, "far": 1, "near": 1}


def test_the_buffers_and_parameters_of_losses_belong_to_the_stack() -> None:
    stack = LossFnStack(ce=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0])), learned=(nn.Linear(2, 1), 0.5))

    assert list(stack.state_dict()) == ["losses.ce.weight", "losses.learned.weight", "losses.learned.bias"]
    assert all(tensor.dtype == torch.float64 for tensor in stack.double().state_dict().values())
    assert pickle.loads(pickle.dumps(stack)).weights == stack.weights


@pytest.mark.parametrize(
    ("losses", "named", "words"),
    [
        ((), {}, "needs a loss"),
        (({"loss": nn.MSELoss()},), {}, r"has the keys \['loss'\]; write dict\(fn=…, weight=…\)"),
        (({"fn": nn.MSELoss(), "weight": 0},), {}, "weight=0; use a positive number"),
        (({"fn": nn.MSELoss(), "weight": math.inf},), {}, "weight=inf"),
        ((), {"mse": (nn.MSELoss(), "1")}, "weight='1'"),
        ((), {"mse": (nn.MSELoss(), True)}, "weight=True"),
        ((), {"mse": (nn.MSELoss(), 1, 2)}, "is not a pair"),
        ((), {"mse": 3}, "'mse' is 3, which cannot be called"),
        ((nn.MSELoss,), {}, r"is a class; pass an instance: MSELoss\(\)"),
    ],
)
def test_losses_of_other_forms_are_refused(losses: tuple[Any, ...], named: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        LossFnStack(*losses, **named)


def test_losses_of_different_shapes_are_refused() -> None:
    stack = LossFnStack(whole=nn.MSELoss(), rows=nn.MSELoss(reduction="none"))

    with pytest.raises(InvalidArgument, match=r"'whole': \[\], 'rows': \[3\]"):
        stack(torch.zeros(3), torch.ones(3))


@settings(max_examples=30)
@given(decay=st.sampled_from([0.0, 0.5, 0.999]), every=st.integers(1, 3), num_steps=st.integers(1, 7))
def test_averages_are_those_of_torch(decay: float, every: int, num_steps: int) -> None:
    module = WideAndDeep()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ema, expected = Ema(decay, every), AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for step in range(1, num_steps + 1):
        train(module, optimizer, 1, seed=step)
        ema.update(module)
        if step % every == 0:
            expected.update_parameters(module)
    with ema.applied(module):
        found = weights_of(module)

    if num_steps >= every:
        assert all(torch.equal(found[name], each) for name, each in expected.module.named_parameters())


def test_the_weights_return_bit_for_bit_also_after_an_error() -> None:
    module = WideAndDeep()
    with torch.no_grad():
        module.wide.weight[0, 0] = -0.0
        module.wide.weight[0, 1] = math.nan
    ema = Ema(0.5)
    ema.update(module)
    train(module, torch.optim.SGD(module.deep.parameters(), lr=0.1))
    before = {name: parameter.detach().clone().view(torch.int32) for name, parameter in module.named_parameters()}
    memory = [parameter.data_ptr() for parameter in module.parameters()]
    averages = copy.deepcopy(ema.state_dict())
    with pytest.raises(KeyError), ema.applied(module):  # noqa: PT012
        assert not torch.equal(module.deep[0].weight.view(torch.int32), before["deep.0.weight"])
        assert [parameter.data_ptr() for parameter in module.parameters()] == memory
        raise KeyError

    assert all(torch.equal(parameter.view(torch.int32), before[name]) for name, parameter in module.named_parameters())
    for name, average in ema.state_dict()["averages"].items():
        assert torch.equal(average.view(torch.int32), averages["averages"][name].view(torch.int32))


def test_before_the_first_update_the_weights_are_used_as_they_are() -> None:
    module, ema = WideAndDeep(), Ema(every=2)
    ema.update(module)
    before = weights_of(module)

    with ema.applied(module):
        assert all(torch.equal(before[name], each) for name, each in module.named_parameters())


def test_a_restored_average_continues_with_the_same_bits() -> None:
    module = WideAndDeep()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ema, restored = Ema(0.9, every=2), Ema(0.9, every=2)
    for step in range(9):
        train(module, optimizer, 1, seed=step)
        ema.update(module)
        if step == 4:
            restored.load_state_dict(ema.state_dict())
        elif step > 4:
            restored.update(module)

    assert ema.state_dict()["num_calls"] == restored.state_dict()["num_calls"] == 9
    for name, average in ema.state_dict()["averages"].items():
        assert torch.equal(average, restored.state_dict()["averages"][name])


def test_frozen_parameters_have_no_average_until_they_are_unfrozen() -> None:
    module, ema = WideAndDeep(), Ema(0.5)
    module.wide.requires_grad_(False)
    ema.update(module)
    assert "wide.weight" not in ema.state_dict()["averages"]
    module.wide.requires_grad_(True)
    ema.update(module)

    assert torch.equal(ema.state_dict()["averages"]["wide.weight"], module.wide.weight)


def test_nothing_else_is_done_with_averages_while_they_are_applied() -> None:
    module, ema = WideAndDeep(), Ema()
    ema.update(module)

    with ema.applied(module):
        for call in (lambda: ema.update(module), ema.state_dict, lambda: ema.applied(module).__enter__()):
            with pytest.raises(InvalidArgument, match=r"leave the block of applied\(\) first"):
                call()
    ema.update(module)


def test_averages_of_another_module_are_refused() -> None:
    ema = Ema()
    ema.update(WideAndDeep())

    with pytest.raises(InvalidArgument, match="Linear has no parameter 'scale'"), ema.applied(nn.Linear(1, 1)):
        pass
    wider = WideAndDeep()
    wider.wide = nn.Linear(7, 1)
    with pytest.raises(InvalidArgument, match=r"'wide.weight' has the shape \[1, 3\], the parameter \[1, 7\]"):
        ema.update(wider)


@pytest.mark.parametrize(("arguments", "words"), [((1.0,), "decay=1.0"), ((-0.1,), "decay"), ((0.9, 0), "every=0")])
def test_averages_outside_their_range_are_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Ema(*arguments)
