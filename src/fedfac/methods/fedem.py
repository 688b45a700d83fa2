"""FedEM (Marfoq et al., NeurIPS 2021): clients are mixtures of M common components.

Client c models p(y|x) = Σ_m π_cm p_m(y|x). The components are shared, the mixture π_c is personal.

- E step: q_i(m) ∝ π_m·exp(−ℓ_m(x_i, y_i)) for every training sample, components in eval mode; π_m = mean of q(m).
- M step: component m is trained on the q_i(m)-weighted mean loss; the server averages each component over the cohort.
- Prediction: Σ_m π_m·softmax, probabilities and not logits; its logarithm is what the module returns.
- A newcomer, and every client before it is evaluated, takes E steps only, the components frozen.

The components start from distinct weights (a common start would keep them equal for ever): the first is the model as it
was given, the others have their modules' ``reset_parameters`` called (what is frozen stays). With M = 1 this is FedAvg.
We average over the cohort's Σ n_k; the authors' code averages over all clients, of which those that have not trained
count with the old components, so that with sampling these move by the cohort's share only. Nor does it take an E step
between aggregation and the evaluation of its training clients, and it takes one for a newcomer, where ours goes on
until π stands still.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedfac.anatomy import Anatomy
from fedfac.errors import ModelError
from fedfac.method import Begin, Method, Phase, Plan, Prediction, Step, Training, at_least_one, per_sample
from fedfac.seeds import global_stream
from fedfac.split import Split
from fedfac.state import copy_into, references, same

BATCH = 512
TOLERANCE = 1e-5
MAX_STEPS = 1000


class Mixture(nn.Module):
    """M components and their shares π."""

    pi: Tensor

    def __init__(self, model: nn.Module, components: int, seed: int) -> None:
        super().__init__()
        copies = [copy.deepcopy(model) for _ in range(components)]
        frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
        for number, component in enumerate(copies[1:], start=1):
            with global_stream(seed, "component", number):
                for module in component.modules():
                    own = list(module.parameters())
                    if own and not any(p.requires_grad for p in own):
                        continue
                    if callable(reset := getattr(module, "reset_parameters", None)):
                        reset()
            copy_into(references(component), frozen)
        if any(same(references(copies[0]), references(c)) for c in copies[1:]):
            raise ModelError(
                "FedEM's components must start from different weights, but no module of this model has a "
                "reset_parameters to draw anew what is trained"
            )
        self.components = nn.ModuleList(copies)
        self.register_buffer("pi", torch.full((components,), 1 / components, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        """log Σ_m π_m·softmax of component m."""
        outputs = [component(inputs) for component in self.components]
        if outputs[0].shape[1] < 2:
            raise ModelError("FedEM mixes the probabilities of classes; this model has one output (a regression)")
        logs = torch.stack([output.log_softmax(1) for output in outputs])
        weights = self.pi.to(logs.dtype).clamp_min(torch.finfo(logs.dtype).tiny).log()
        return torch.logsumexp(logs + weights.reshape(-1, *[1] * (logs.ndim - 1)), dim=0)


def fedem(*, components: int = 3, component_seed: int = 0) -> Method:
    """FedEM with ``components`` components; the paper takes 3."""
    at_least_one(components=components)

    def base(anatomy: Anatomy) -> Plan:
        training = Training(
            split=Split.of(anatomy, personal=["pi"]),
            phases=(Phase(objective=weighted_loss, before=expectation),),
            models=components,
        )
        prediction = Prediction(
            refresh=(Phase(epochs=0, before=expectation),), newcomer=(Phase(epochs=0, before=settle_shares),)
        )
        return Plan(training=training, prediction=prediction)

    return Method(
        name="fedem",
        base=base,
        wrap=Components(components, component_seed),
        options={"components": components, "component_seed": component_seed},
    )


@dataclass(frozen=True)
class Components:
    """Makes a mixture of a network."""

    number: int
    seed: int

    def __call__(self, model: nn.Module) -> nn.Module:
        """The mixture."""
        return Mixture(model, self.number, self.seed)


@torch.no_grad()
def expectation(begin: Begin) -> Tensor:
    """One E step: sets π and returns q, one row per training sample."""
    mixture = _mixture(begin.model)
    q = _responsibilities(_log_likelihoods(begin), mixture.pi)
    mixture.pi.copy_(q.mean(0))
    return q


@torch.no_grad()
def settle_shares(begin: Begin) -> None:
    """E steps until π stands still; the components do not change, so their losses are taken once."""
    mixture = _mixture(begin.model)
    logs = _log_likelihoods(begin)
    for _ in range(MAX_STEPS):
        before = mixture.pi.clone()
        mixture.pi.copy_(_responsibilities(logs, before).mean(0))
        if float((mixture.pi - before).abs().max()) < TOLERANCE:
            return


def weighted_loss(step: Step) -> Tensor:
    """The M step's loss: Σ_m mean_i q_i(m)·ℓ_m(x_i, y_i)."""
    q: Tensor = step.context[step.index.to(step.context.device)]
    total = torch.zeros((), device=q.device)
    for m, component in enumerate(_mixture(step.model).components):
        losses = per_sample(step.loss, component(step.inputs), step.targets)
        total = total + (q[:, m].to(losses.dtype) * losses).mean()
    return total


def _log_likelihoods(begin: Begin) -> Tensor:
    """−ℓ_m(x_i, y_i) of all training samples: (n, M)."""
    mixture = _mixture(begin.model)
    was_training = mixture.training
    mixture.eval()
    rows = []
    for index in torch.split(begin.data.train, BATCH):
        inputs, targets = begin.data.pool.batch(index)
        rows.append(torch.stack([-per_sample(begin.loss, c(inputs), targets) for c in mixture.components], dim=1))
    mixture.train(was_training)
    return torch.cat(rows).double()


def _responsibilities(logs: Tensor, pi: Tensor) -> Tensor:
    return (logs + pi.log()).softmax(1)


def _mixture(model: nn.Module) -> Mixture:
    if not isinstance(model, Mixture):
        raise ModelError(f"FedEM trains a mixture of models; it was given a {type(model).__name__}")
    return model
