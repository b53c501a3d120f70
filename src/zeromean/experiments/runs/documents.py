"""The five documents: who says what, and which of their tables and figures are reproduced.

`ITEMS` lists every table, figure and numbered claim of the documents. An experiment names those
that it covers (`COVERS`); for each of the others stands here why there is none. What the report
says is not reproduced is read from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Author:
    """Who claims something, and where: a document, or we ourselves.

    Attributes:
        document: Key of the document; empty where it is our own claim.
        place: Section, table or figure of the document; of ours, why the bound is what it is.
    """

    document: str
    place: str

    @property
    def key(self) -> str:
        return self.document or OURS

    def __str__(self) -> str:
        if self.document:
            return f"{DOCUMENTS[self.document].name}, {self.place}"
        return f"ours: {self.place}" if self.place else "ours"


@dataclass(frozen=True)
class Document:
    """One of the documents; called with a place in it, it gives the author of a claim."""

    key: str
    name: str
    title: str

    def __call__(self, place: str) -> Author:
        return Author(self.key, place)


@dataclass(frozen=True)
class Item:
    """A table, a figure or a numbered claim.

    Attributes:
        document: Key of its document.
        place: Where it is; with the document it is the item's key.
        what: What it shows.
        why_not: Why no experiment covers it; empty where one does.
    """

    document: str
    place: str
    what: str
    why_not: str = ""

    @property
    def key(self) -> str:
        return f"{self.document}: {self.place}"


OURS = "ours"
PAPER = Document(
    "paper",
    "Neklyudov et al. (2019)",
    "Variance networks: when expectation does not meet your expectations",
)
POSTER = Document("poster", "poster on variance networks", "Variance networks, the poster")
CHIRKOVA = Document(
    "chirkova",
    "Chirkova, lecture",
    "Stochastic variational inference and Bayesian neural networks",
)
MOLCHANOV = Document("molchanov", "Molchanov, lecture", "Bayesian neural networks")
TALK = Document(
    "talk",
    "Molchanov & Ashuha (2016), talk",
    "Variational dropout for deep neural networks and linear models",
)
DOCUMENTS = {each.key: each for each in (PAPER, POSTER, TALK, CHIRKOVA, MOLCHANOV)}


def ours(why: str = "") -> Author:
    """The author of a bound that we chose ourselves, whatever document it is about."""
    return Author("", why)


_DERIVATION = "a derivation, without an experiment"
_QUOTED = "quoted next to ours, not run again"

ITEMS = (
    Item("paper", "Figure 1", "two kinds of representation in two variance neurons"),
    Item("paper", "section 3.3", "Gaussian, Bernoulli and uniform variance layers on MNIST"),
    Item("paper", "Figure 2", "the KL divergence against α for three priors"),
    Item("paper", "equation 11", "the KL divergence to the ARD prior"),
    Item("paper", "Figure 3", "the phase transition by epoch (here on LeNet-5)"),
    Item("paper", "Figure 3 on CIFAR-10", "the phase transition of a VGG-like network"),
    Item(
        "paper",
        "section 4.3, α > 10⁷",
        "dropout rates that grow to essentially infinite values",
        "log α is recorded with Table 1 and Figure 3, but no run was long enough to aim at it",
    ),
    Item("paper", "Theorem 1", "the zero-mean approximation, and equation 38, its bound"),
    Item("paper", "Table 1", "the ELBO of five parameterizations, LeNet-5"),
    Item("paper", "Table 1 on CIFAR-10", "ELBO of three parameterizations, VGG-like"),
    Item("paper", "Figure 4", "accuracy of single samples and of averages of 200"),
    Item("paper", "Figure 5", "pruning a variance layer by σ"),
    Item("paper", "Table 2", "dropout against variance networks, LeNet-5"),
    Item("paper", "Table 2 on CIFAR-10", "dropout against variance, VGG-like"),
    Item("paper", "Table 2 on CIFAR-100", "dropout against variance, VGG-like"),
    Item("paper", "section 6.1, log α of VGG", "log α > 15 and log α > 12 by layer"),
    Item("paper", "Figure 6", "exploration on CartPole and Acrobot"),
    Item("paper", "Figure 7", "adversarial examples: variance networks, dropout, ensembles"),
    Item(
        "paper",
        "section 7, pruning by signal-to-noise ratio",
        "a layer without a signal can be crucial and must not be pruned by its ratio",
    ),
    Item("paper", "Figure 8", "the phase transition for three priors (here on LeNet-5)"),
    Item("paper", "Figure 8 on CIFAR-10", "three priors for a VGG-like network"),
    Item(
        "paper",
        "Figure 8, the slow curve",
        "Student's t with a KL estimated by one sample converges more slowly",
    ),
    Item("paper", "Table 3", "tanh networks without biases"),
    Item("paper", "Figure 9", "energy levels of variance neurons"),
    Item("paper", "Appendix E", "local reparameterization of a convolutional variance layer"),
    Item("paper", "Appendix F", "the KL of a zero-mean posterior is constant", _DERIVATION),
    Item("poster", "a toy example", "what a variance layer learns"),
    Item("poster", "classification, LeNet-5", "dropout against a variance network"),
    Item("poster", "classification, VGG-like", "dropout against a variance network"),
    Item("poster", "from variational dropout to variance networks", "α → ∞ in practice"),
    Item("poster", "better ELBO", "the ELBO of four parameterizations"),
    Item(
        "talk",
        "layer case, 3FC(1000) on CIFAR",
        "α at its upper bound after a few iterations",
    ),
    Item(
        "talk",
        "can we remove the boundaries?",
        "α without an upper bound: worse quality; do alphas stabilize?",
    ),
    Item(
        "talk",
        "post-linear Gaussian dropout",
        "faster, and of smaller gradient variance, which can lead to overfitting",
    ),
    Item("talk", "log-normal noise on neurons", "an outlook, without results"),
    Item("talk", "linear regression", "100,000 examples, 100 features: error, time, relevance"),
    Item(
        "talk", "logistic regression", "100,000 examples, 100 features: accuracy, time, relevance"
    ),
    Item("talk", "more features", "1,000 examples, 10 of 1,000 features relevant"),
    Item("talk", "relevance vector machine", "evidence maximization prunes what is irrelevant"),
    Item("chirkova", "ensembling", "accuracy and log-likelihood by the number of samples"),
    Item(
        "chirkova",
        "uncertainty in classification",
        "LeNet with weight decay against multiplicative normalizing flows",
        "there are no normalizing flows here",
    ),
    Item(
        "chirkova",
        "on-line learning",
        "yesterday's posterior is today's prior",
    ),
    Item(
        "chirkova",
        "reparametrization trick: examples",
        "Gamma, exponential and full-covariance posteriors",
        "all are there (docs, Other posteriors), and tested against torch.distributions, without "
        "an experiment",
    ),
    Item("chirkova", "binary dropout", "its KL is an L2 penalty", _DERIVATION),
    Item("chirkova", "approximating the KL divergence", "the sigmoid fit"),
    Item("chirkova", "visualization", "filters and weights of LeNet-5 by epoch, 270× at 99.3%"),
    Item("chirkova", "LeNets on MNIST", "sparse variational dropout: error and compression"),
    Item("chirkova", "LeNets on MNIST, other methods", "pruning, DNS and SWS", _QUOTED),
    Item("chirkova", "random labeling", "training accuracy and sparsity with random labels"),
    Item("chirkova", "random labeling, test accuracy", "the column of test accuracies"),
    Item("chirkova", "other compression", "group sparsification and quantization"),
    Item("molchanov", "local reparameterization", "two parts of the variance of a gradient"),
    Item("molchanov", "LRT for convolutions", "better than plain reparameterization"),
    Item(
        "molchanov",
        "on-line learning",
        "yesterday's posterior is today's prior",
    ),
    Item(
        "molchanov",
        "distillation",
        "the student is worse than the ensemble and better than one network",
    ),
    Item("molchanov", "quantization", "the bits that a posterior needs"),
    Item("molchanov", "variance reduction", "additive in place of multiplicative noise"),
    Item("molchanov", "why large alphas", "the KL term favours large dropout rates"),
    Item("molchanov", "visualization", "filters and weights of LeNet-5 by epoch"),
    Item("molchanov", "LeNets on MNIST", "sparse variational dropout: error and compression"),
    Item("molchanov", "LeNets on MNIST, other methods", "pruning, DNS and SWS", _QUOTED),
    Item("molchanov", "VGG-like on CIFAR-10", "sparsity and accuracy by the width"),
    Item(
        "molchanov",
        "ResNet-50 on ImageNet",
        "the state of sparsity (Gale et al., 2019)",
        "ImageNet is out of reach of one machine without a GPU; the experiment `sparse_resnet` "
        "draws the same curves for a small residual network on CIFAR-10",
    ),
    Item("molchanov", "random labeling", "training accuracy and sparsity with random labels"),
    Item("molchanov", "random labeling, test accuracy", "the column of test accuracies"),
    Item("molchanov", "extensions", "recurrent networks and structured sparsity"),
)


def not_reproduced(covered: Iterable[str]) -> dict[str, list[Item]]:
    """The items that no experiment covers, by the name of their document.

    Args:
        covered: Keys of the items that experiments cover.
    """
    known = set(covered)
    left = [item for item in ITEMS if item.key not in known]
    return {
        document.name: found
        for document in DOCUMENTS.values()
        if (found := [item for item in left if item.document == document.key])
    }
