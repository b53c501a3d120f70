"""The table of operations against torch: what it claims of each holds."""

import operator
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from test_compress import assert_same_predictions, network
from torch import fx, nn

import zeromean as zm
from zeromean.compression.graph.operations import NEW_MEMORY, OPERATIONS, Operation, role_of
from zeromean.compression.graph.roles import Role
from zeromean.compression.graph.trace import trace

# Arguments behind the first, where a call needs some or has some to get wrong.
ARGUMENTS = {
    F.leaky_relu: (0.3,),
    F.elu: (0.7,),
    F.celu: (0.7,),
    F.softplus: (2.0, 5.0),
    F.hardtanh: (-0.5, 0.7),
    **dict.fromkeys((F.max_pool1d, F.max_pool2d, F.max_pool3d), (3, 2, 1, 1, True)),
    **dict.fromkeys((F.avg_pool1d, F.avg_pool2d, F.avg_pool3d), (3, 2, 1, True, False)),
    **dict.fromkeys((F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d), (3,)),
    F.adaptive_max_pool2d: (3,),
    F.interpolate: (None, 2.0, "bilinear", True),
    torch.flatten: (1,),
    "flatten": (1, -1),
    F.dropout: (0.5, False),
}
NUMBERS = {"clamp": (-0.5, 0.5), torch.clamp: (-0.5, 0.5)}
UNARY = {operator.neg, torch.abs, torch.exp, torch.square, "neg", "abs", "exp", "square"}
UNARY |= {"clone", "contiguous", "detach"}
WITH_MODULES = [(o, call) for o in OPERATIONS if o.modules for call in o.calls]
ON_NUMBERS = [call for o in OPERATIONS if o.of_one is Role.POINTWISE for call in o.calls]


def example(call):
    """Input with as many dimensions as a function wants, negative and positive."""
    name = getattr(call, "__name__", str(call))
    dims = 3 if name.endswith("3d") else 1 if name.endswith("1d") else 2
    return torch.randn(2, 4, *[7] * dims, generator=torch.Generator().manual_seed(0))


def called(call, x, *arguments):
    return getattr(x, call)(*arguments) if isinstance(call, str) else call(x, *arguments)


def run(graph, x):
    """What the graph computes as it is now."""
    return fx.GraphModule(graph.module, graph.module.graph)(x)


def name_of(value):
    value = (*value.modules, *value.calls)[0] if isinstance(value, Operation) else value
    return getattr(value, "__name__", str(value))


def test_everything_is_registered_once():
    for attribute in ("modules", "calls"):
        registered = Counter(item for o in OPERATIONS for item in getattr(o, attribute))
        assert set(registered.values()) == {1}


@pytest.mark.parametrize(("operation", "call"), WITH_MODULES, ids=name_of)
def test_modules_do_what_their_calls_do(operation, call):
    x, arguments = example(call), ARGUMENTS.get(call, ())
    expected = called(call, x.clone(), *arguments)
    model = network(lambda self, x: called(call, x, *arguments))
    graph = trace(model.eval())
    kinds = [type(graph.layer(node)) for node in graph.nodes if node.op == "call_module"]
    passed_on = operation.role is Role.NOTHING
    assert kinds == ([] if passed_on else [operation.modules[0]])
    torch.testing.assert_close(run(graph, x), expected)
    if not arguments and not isinstance(call, str):
        graph = trace(network(lambda self, x: call(input=x)).eval())
        torch.testing.assert_close(run(graph, x), expected)


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.homogeneous], ids=name_of)
def test_multipliers_may_stand_in_front_of_what_is_homogeneous(operation):
    for kind in operation.modules:
        x = example(kind)
        pooled = {"output_size": 3} if "Adaptive" in kind.__name__ else {"kernel_size": 2}
        options = pooled if "Pool" in kind.__name__ else {}
        options = {"scale_factor": 2} if "Upsampl" in kind.__name__ else options
        module = kind(**options)
        torch.testing.assert_close(module(3 * x), 3 * module(x))


@pytest.mark.parametrize(("operation", "call"), WITH_MODULES, ids=name_of)
def test_pointwise_modules_do_the_same_to_every_number(operation, call):
    if operation.role is Role.POINTWISE:
        x, module = example(call), operation.modules[0]()
        assert role_of(module) is Role.POINTWISE
        torch.testing.assert_close(module(x.flatten().flip(0)), module(x).flatten().flip(0))


@pytest.mark.parametrize(("operation", "call"), WITH_MODULES, ids=name_of)
def test_new_memory_is_new(operation, call):
    if name_of(call) in NEW_MEMORY:
        x = example(call)
        for arguments in (ARGUMENTS.get(call, ()), _doing_nothing(call)):
            output = called(call, x, *arguments)
            assert output.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def _doing_nothing(call):
    """Arguments for which the output is the input."""
    if call is F.interpolate:
        return (None, 1.0)
    name = name_of(call)
    if "adaptive" in name:
        return (7,)
    return (1, 1) if "pool" in name else ARGUMENTS.get(call, ())


@pytest.mark.parametrize("call", ON_NUMBERS, ids=name_of)
def test_units_go_through_arithmetic_with_numbers(call):
    arguments = NUMBERS.get(call, () if call in UNARY else (2,))
    model = network(
        lambda self, x: self.second(called(call, torch.sigmoid(self.first(x)), *arguments)),
        first=nn.Linear(5, 8),
        second=nn.Linear(8, 3),
    )
    model.first.weight.data[:4] = 0
    compressed = zm.compress(model)
    assert compressed.get_submodule("first").out_features == 4
    assert_same_predictions(model, compressed, torch.randn(6, 5))


@pytest.mark.parametrize("operation", [o for o in OPERATIONS if o.in_place], ids=name_of)
def test_operators_in_place_do_what_the_others_do(operation):
    x = torch.rand(4) + 1
    torch.testing.assert_close(operation.in_place(x.clone(), 2), operation.calls[0](x, 2))


def test_what_writes_behind_new_memory_changes_nothing_else():
    # Upsampling makes new memory, so that h is still what it was.
    def forward(self, x):
        h = self.conv1(x)
        return self.conv2(F.relu(F.interpolate(h, scale_factor=2.0), inplace=True)) + h.mean()

    model = network(forward, conv1=nn.Conv2d(1, 4, 3), conv2=nn.Conv2d(4, 2, 3))
    model.conv1.weight.data[:2] = 0
    assert_same_predictions(model, zm.compress(model), torch.randn(3, 1, 8, 8))
