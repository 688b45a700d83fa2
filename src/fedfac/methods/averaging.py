"""Methods with one global model, and none at all.

- FedAvg (McMahan et al., AISTATS 2017): everything is shared, the server takes the n_k-weighted mean. The local
  optimiser is the run's, Adam by default and anew in every round; in the paper it is SGD.
- FedProx (Li et al., MLSys 2020): the local loss gets ½μ‖w − wᵗ‖², which holds clients near the global model wᵗ
  that they received. It is added to the *mean* loss of a batch; normalisation statistics are not held. Under Adam, the
  default, μ weighs distance against loss and does not scale a step. The paper draws clients with probability n_k/n and
  takes a plain mean, and lets slow ones do less; here cohorts are uniform, means weighted, and all do the same epochs.
- FedAvg+ and FedProx+ (paper 5.2): the same training; before a client predicts, a copy of the global model is
  fine-tuned on its data and thrown away afterwards. The paper does not say for how long: here for the run's local
  epochs (``refresh``).
- Local only: nothing is shared; the baseline that keeps everybody honest.
"""

from __future__ import annotations

from fedfac.anatomy import Anatomy
from fedfac.method import Method, Phase, Plan, Prediction, Training, with_switches
from fedfac.split import Split
from fedfac.switches.proximal import proximal
from fedfac.switches.refresh import Refresh

FINE_TUNED = Refresh(epochs=None, trains="all")


def fedavg() -> Method:
    """One global model: W ← W + η_g (Σ n_k W_k / Σ n_k − W). A newcomer gets the global model."""
    return Method(name="fedavg", base=_one_model)


fedavg_plus = with_switches(fedavg, FINE_TUNED, name="fedavg+")
"""FedAvg whose global model each client fine-tunes (for the run's local epochs) to predict."""


def fedprox(*, mu: float = 0.01) -> Method:
    """FedAvg with a proximal term. The paper's grid for μ: 1, 0.5, 0.1, 0.01, 0.001."""
    phase = Phase(objective=proximal(mu), stacks=True)

    def base(anatomy: Anatomy) -> Plan:
        return Plan(training=Training(split=Split.of(anatomy), phases=(phase,)))

    return Method(name="fedprox", base=base, options={"mu": mu})


fedprox_plus = with_switches(fedprox, FINE_TUNED, name="fedprox+")
"""FedProx whose global model each client fine-tunes, by the same objective, to predict."""


def local() -> Method:
    """Every client trains a model of its own from the common start; nothing is ever sent."""
    return Method(name="local", base=_nothing_shared)


def _one_model(anatomy: Anatomy) -> Plan:
    return Plan(training=Training(split=Split.of(anatomy)))


def _nothing_shared(anatomy: Anatomy) -> Plan:
    return Plan(
        training=Training(split=Split.of(anatomy, personal=anatomy.shapes)),
        prediction=Prediction(newcomer=(Phase(),)),
    )
