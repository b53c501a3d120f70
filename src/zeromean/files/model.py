"""Saving and loading models without pickle: safetensors with the layers' settings in its header.

A file holds the state dict, a format version and, for every stochastic layer, what would rebuild
it, with the noise on what layers read. The architecture itself stays code: `load` fills a model of
the same architecture, plain or stochastic.
"""

from __future__ import annotations

import copy
import json
import os
from dataclasses import asdict, is_dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zeromean.arguments import require_model
from zeromean.conversion.become_prior import remember_layer_
from zeromean.conversion.twins import (
    has_several_weights,
    multi_weight_twin,
    plain_layer,
    plain_multi_weight,
    stochastic_twin,
)
from zeromean.distributions.from_posterior import FromPosterior, is_remembered
from zeromean.distributions.posteriors.posterior import Posterior, PosteriorFactory
from zeromean.distributions.priors import Prior
from zeromean.files.input_noise import (
    OtherModelError,
    describe_input_noise,
    rebuild_input_noise_,
)
from zeromean.files.safetensors import (
    _without_aliases,
    damaged_header,
    parse_header,
    read_safetensors,
    write_safetensors,
)
from zeromean.layers.attention import MultiheadAttention
from zeromean.layers.dropout.input_noise import input_noises
from zeromean.layers.multi_weight_layer import MultiWeightLayer
from zeromean.layers.recurrent import RecurrentLayer
from zeromean.layers.stochastic_layer import StochasticLayer
from zeromean.layers.stochastic_module import own_sampler, stochastic_modules
from zeromean.layers.surgery import replace_modules_
from zeromean.prediction.randomness import forked_generators
from zeromean.registry import (
    LAYERS,
    NOISES,
    POSTERIORS,
    PRIORS,
    SAMPLERS,
    Registry,
    UnregisteredError,
)

# 1: the first. 2: posteriors can be pruned, and have masks. 3: recurrent layers are described.
# 4: posteriors can share single parameters (one α of several layers), and aliases are ties.
# 5: attention is described. 6: so is noise on what layers read; posteriors can have priors of their
# own (`zm.become_prior_`). 7: biases and norms can be random.
FORMAT_VERSION = 7
HEADER = "zeromean"  # Under which a file has it, and by which it is known.
# What a header says of a layer besides the arguments of its posterior.
_OF_LAYER = ("layer", "posterior", "noise", "prior", "sampler", "tied_to", "bias")


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model's parameters, buffers and stochastic settings to a safetensors file.

    What is shared is written once, and is shared again after `load`: whole posteriors, and single
    parameters that were tied by hand, such as one log α of several layers.

    The file appears under its name only when it is complete.
    """
    require_model(model)
    tensors, aliases = _without_aliases(model.state_dict())
    header = {
        "format_version": _oldest_reader(model),
        "aliases": aliases,
        "layers": _describe_layers(model),
        "shared_posteriors": _shared_posteriors(model),
    }
    if input_noises(model):
        header["input_noise"] = describe_input_noise(model)
    write_safetensors(path, tensors, {HEADER: json.dumps(header)})


def load(path: str | os.PathLike[str], model: nn.Module) -> nn.Module:
    """A copy of the model with the parameters and the stochastic layers of a saved one.

    As with `load_state_dict`, device and dtype are those of the given model, but those of the file
    where that one is on the meta device. The global generator is not touched. Parameters that were
    one when the file was saved are one again.

    Args:
        path: A file that `zm.save` wrote.
        model: A model of the same architecture: the plain one, or the stochastic one. It is left
            as it is.
    """
    require_model(model)
    text, tensors = read_safetensors(path, HEADER, "zm.save")
    model = copy.deepcopy(model)
    header = parse_header(text, path, FORMAT_VERSION)
    try:
        aliases = {name: tensors[target] for name, target in header["aliases"].items()}
        with forked_generators(model):  # New layers draw initial values.
            model = _rebuild_layers_(model, header["layers"], path)
            rebuild_input_noise_(model, header.get("input_noise", []), tensors, path)
        _share_posteriors_(model, header.get("shared_posteriors", {}))
        _tie_(model, header["aliases"])
    except OtherModelError:
        raise
    except UnregisteredError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    except Exception as error:  # What a header can say wrong ends in errors of every kind.
        raise damaged_header(path, error) from error
    # A model on the meta device has nothing to copy into.
    on_meta = any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    state = {**tensors, **aliases}
    _refuse_other_ties(model, state, path)
    try:
        model.load_state_dict(_tied_as_in(model, state) if on_meta else state, assign=on_meta)
    except RuntimeError as error:
        raise ValueError(f"{path} holds a model of another architecture: {error}") from error
    return model


def _shared_posteriors(model: nn.Module) -> dict[str, str]:
    """Further names of posteriors, and the first one of each."""
    first: dict[Posterior, str] = {}
    shared: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Posterior) and first.setdefault(module, name) != name:
            shared[name] = first[module]
    return shared


def _share_posteriors_(model: nn.Module, shared: dict[str, str]) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, other in shared.items():
        owner, _, attribute = name.rpartition(".")
        posterior = modules.get(other)
        # What is missing, load_state_dict will name.
        if owner in modules and isinstance(posterior, Posterior):
            modules[owner].add_module(attribute, posterior)


def _tie_(model: nn.Module, aliases: dict[str, str]) -> None:
    """Let names that stood for one tensor in the saved model stand for one again."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, other in aliases.items():
        (owner, _, attribute), (target, _, original) = (n.rpartition(".") for n in (name, other))
        if owner not in modules or target not in modules:
            continue  # load_state_dict will name it.
        for kind in ("_parameters", "_buffers"):
            mine, theirs = (getattr(modules[module], kind) for module in (owner, target))
            if mine.get(attribute) is not None and theirs.get(original) is not None:
                mine[attribute] = theirs[original]


def _refuse_other_ties(model: nn.Module, state: dict[str, Tensor], path: Any) -> None:
    """Refuse one parameter for names that have different values: the last would win."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(parameter, name)
        if name in state and other in state and not torch.equal(state[name], state[other]):
            raise ValueError(
                f"The model has one parameter for {other} and {name}, but {path} holds different "
                "values for them; build the architecture that was saved, with nothing tied that "
                "was not."
            )


def _tied_as_in(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with one parameter for names that share one in the model.

    Assigned tensors would become a parameter each, which an optimizer would step one by one.
    """
    parameters: dict[nn.Parameter, nn.Parameter] = {}
    tied = dict(state)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            new = nn.Parameter(state[name], requires_grad=parameter.requires_grad)
            tied[name] = parameters.setdefault(parameter, new)
    return tied


def _describe_layers(model: nn.Module) -> dict[str, dict[str, Any]]:
    layers: dict[str, dict[str, Any]] = {}
    owners: dict[Posterior, str] = {}
    for name, layer in stochastic_modules(model).items():
        if isinstance(layer, MultiWeightLayer):
            layers[name] = _describe_several(layer, name)
        if not isinstance(layer, StochasticLayer):
            continue  # Noise on units stands in the code of the architecture.
        posterior = layer.weight
        layers[name] = {
            "layer": _name_of(type(layer), LAYERS, name),
            **_describe_posterior(posterior, name),
            "prior": _describe_prior(layer.prior, name),
            "sampler": _name_of(own_sampler(layer), SAMPLERS, name),
            "tied_to": owners.get(posterior),
        }
        if isinstance(layer.bias, Posterior):
            layers[name]["bias"] = _describe_posterior(layer.bias, name)
        owners.setdefault(posterior, name)
    return layers


def _describe_several(layer: MultiWeightLayer, name: str) -> dict[str, Any]:
    first, *others = (_describe_posterior(p, name) for p in layer.posteriors().values())
    if any(other != first for other in others):
        raise ValueError(
            f"Layer {name} has posteriors of several kinds, which a file cannot describe; save "
            "model.state_dict() instead."
        )
    kind = _name_of(type(layer), LAYERS, name)
    return {
        "layer": kind,
        **first,
        "prior": _describe_prior(layer.prior, name),
        "sampler": _name_of(own_sampler(layer), SAMPLERS, name),
    }


def _describe_posterior(posterior: Posterior, layer: str) -> dict[str, Any]:
    return {
        "posterior": _name_of(type(posterior), POSTERIORS, layer),
        "noise": _name_of(posterior.noise, NOISES, layer),
        **posterior.settings(),
    }


def _describe_prior(prior: Prior | None, layer: str) -> dict[str, Any] | None:
    if prior is None:
        return None
    name = _name_of(type(prior), PRIORS, layer)
    own: Any = getattr(prior, "settings", partial(_fields, prior))
    # JSON does not know numpy's numbers.
    settings = {k: v.item() if isinstance(v, np.generic) else v for k, v in own().items()}
    return {"name": name, **settings}


def _fields(prior: Any) -> dict[str, Any]:
    if not is_dataclass(prior) or isinstance(prior, type):
        raise ValueError(
            f"A file cannot tell what builds {prior!r} again; make it a dataclass, or give it a "
            "method settings() that returns its arguments as a dict."
        )
    return asdict(prior)


def _name_of(part: Any, registry: Registry, layer: str) -> str:
    name = registry.name_of(part)
    if name is None:
        kind = registry.kind
        raise ValueError(
            f"The {kind} at {layer}, {part!r}, is not registered, so that a file cannot name it; "
            f"put @zm.register({kind!r}) above its definition, or save model.state_dict()."
        )
    return name


def _rebuild_layers_(model: nn.Module, layers: dict[str, Any], path: Any) -> nn.Module:
    modules = dict(model.named_modules())
    replacements: dict[nn.Module, nn.Module] = {}
    rebuilt: dict[str, Any] = {}
    drawn: dict[Posterior, nn.Parameter] = {}
    of_several: dict[Any, Posterior] = {}  # Their weights are tied as those of the model are.
    for name, settings in layers.items():
        found = module = modules.get(name)
        if isinstance(found, StochasticLayer):
            module = plain_layer(name, found, "sample", {})
        elif isinstance(found, MultiWeightLayer):
            module = plain_multi_weight(name, found, "sample", drawn)
        if found is None or type(module) is not LAYERS[settings["layer"]].torch_twin:
            raise OtherModelError(
                f"{path} needs a {settings['layer']} at {name!r}, but the model has "
                f"{'nothing' if found is None else type(found).__name__} there; build the "
                "architecture that was saved."
            )
        if has_several_weights(module):
            rebuilt[name] = replacements[found] = multi_weight_twin(
                module,
                posterior_factory(settings),
                _prior_to_build(settings),
                SAMPLERS[settings.get("sampler", "weight")],  # Not in files of LSTMs before 5.
                of_several,
            )
            continue
        tied_to, bias = settings["tied_to"], settings.get("bias")
        rebuilt[name] = replacements[found] = stochastic_twin(
            name,
            module,
            posterior_factory(settings),
            _prior_to_build(settings),
            SAMPLERS[settings["sampler"]],
            kind=LAYERS[settings["layer"]],
            tied=None if tied_to is None else rebuilt[tied_to].weight,
            bias=None if bias is None else posterior_factory(bias),
        )
    for name, settings in layers.items():
        if isinstance(prior_of(settings["prior"]), FromPosterior):
            remember_layer_(rebuilt[name])  # What it was, the tensors of the file say.
    return replace_modules_(model, replacements)


def _prior_to_build(settings: dict[str, Any]) -> Prior | None:
    prior = prior_of(settings["prior"])
    return None if isinstance(prior, FromPosterior) else prior


def posterior_factory(settings: dict[str, Any]) -> PosteriorFactory:
    """What builds the posterior that a header describes."""
    options = {key: value for key, value in settings.items() if key not in _OF_LAYER}
    return partial(POSTERIORS[settings["posterior"]], noise=NOISES[settings["noise"]], **options)


def prior_of(settings: dict[str, Any] | None) -> Prior | None:
    """The prior that a header describes."""
    if settings is None:
        return None
    arguments = {key: value for key, value in settings.items() if key != "name"}
    return PRIORS[settings["name"]](**arguments)


def _oldest_reader(model: nn.Module) -> int:
    """The oldest version that can read the file of a model."""
    if any(isinstance(m, Posterior) and m.layout.affine for m in model.modules()):
        return 7
    remembered = any(isinstance(m, Posterior) and is_remembered(m) for m in model.modules())
    if remembered or input_noises(model):
        return 6
    if any(isinstance(m, MultiheadAttention) for m in model.modules()):
        return 5
    owners: dict[nn.Parameter, Posterior] = {}
    for module in model.modules():
        if isinstance(module, Posterior):
            if any(owners.setdefault(p, module) is not module for p in module.parameters()):
                return 4
    if any(isinstance(m, RecurrentLayer) for m in model.modules()):
        return 3
    masked = any(isinstance(m, Posterior) and m.mask is not None for m in model.modules())
    return 2 if masked else 1
