"""Base class of agents that train neural networks with `Learner`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from rein.accelerators import find
from rein.agents.base.agent import Agent
from rein.agents.base.learner import Learner, Loss
from rein.agents.base.optimizers import (
    Adam,
    Guard,
    OptimizerFactory,
    check_learning_rate,
    describe_optimizer,
    set_learning_rate,
)
from rein.networks.encoder import EncoderFactory
from rein.options import (
    above_zero,
    as_json,
    at_least_one,
    flag,
    layers,
    not_negative,
    one_of,
    option,
    options_of,
)
from rein.schedules import Schedule

FACTORIES = ("network", "actor", "critic", "value")  # options for custom networks
REPLACED = ("hidden", "activation", "encoder", "core", "shared", "dueling", "layer_norm")  # options that they replace
OF_ONE_PROCESS = ("device", "guard", "micro_batch", "seed", "storage", "threads")  # may differ between processes


class NetworkAgent(Agent):
    """Base class of agents with networks and one or more learners, each with its own optimizer.

    `build` assigns `self.networks` and creates learners with `self.add_learner`. The learner named `actor` uses the
    option `actor_learning_rate` if the agent has it and it is not None, and `learning_rate` otherwise.
    """

    learning_rate: float | Schedule = option(
        default=3e-4, check=not_negative, help="learning rate of the optimizers; a number or a schedule"
    )
    gamma: float = option(default=0.99)
    hidden: Sequence[int] = option(default=(256, 256), check=layers, fixed=True, help="units of each hidden layer")
    activation: str = option(default="relu", fixed=True, help='activation function: "relu", "tanh", "silu" or "gelu"')
    encoder: EncoderFactory | None = option(
        default=None,
        fixed=True,
        help="factory (observation_space, generator) of the features extractor before the hidden layers; None for "
        "a CNN if observations are images",
    )
    normalize_observation: bool = option(
        default=False, check=flag, fixed=True, help="normalize observations by their running mean and deviation"
    )
    scale_images: bool = option(
        default=True,
        check=flag,
        fixed=True,
        help="divide bytes of images by 255; set False if they are codes instead of brightness",
    )
    max_grad_norm: float | None = option(
        default=None,
        check=above_zero,
        fixed=True,
        help="global norm to which gradients are clipped; None for no clipping",
    )
    optimizer: OptimizerFactory | Mapping[str, OptimizerFactory] | None = option(
        default=None,
        fixed=True,
        help="function of the parameters that returns the optimizer, or a dictionary of such functions by "
        "learner; None for Adam",
    )
    guard: Guard | None = option(
        default=None,
        fixed=True,
        help="function of (metrics, gradients), called before each optimizer step; return False to skip the step",
    )
    micro_batch: int | None = option(
        default=None,
        check=at_least_one,
        fixed=True,
        help="rows per gradient computation, affects speed and memory only; None for 4,096 on the CPU and all rows on "
        "other devices",
    )
    threads: int = option(
        default=1, check=at_least_one, fixed=True, help="threads that compute the gradients of micro-batches"
    )
    compile: bool = option(default=False, check=flag, fixed=True, help="compile losses with torch.compile")
    precision: str = option(
        default="float32",
        check=one_of("float32", "bfloat16"),
        fixed=True,
        help="precision of matrix products in updates",
    )

    _compared = False

    def __attrs_post_init__(self) -> None:
        self._check_replaced()
        super().__attrs_post_init__()
        factories = self.optimizer if isinstance(self.optimizer, Mapping) else {}
        if unknown := factories.keys() - self.learners.keys():
            described = "; rein.load_agent(path) builds the agent of a run again" if "type" in factories else ""
            raise ValueError(
                f"{type(self).__name__}(optimizer=...): there is no learner {', '.join(sorted(unknown))}; the learners "
                f"are {', '.join(self.learners)}{described}"
            )
        for name, learner in self.learners.items():
            rate = f"{name}_learning_rate"
            rates = {rate: getattr(self, rate, None) or self.learning_rate, "learning_rate": self.learning_rate}
            check_learning_rate(learner.optimizer, rate if hasattr(self, rate) else "learning_rate", rates)  # type: ignore[arg-type]

    def _check_replaced(self) -> None:
        """Raise ValueError for options of the default networks if custom networks replace all of them."""
        options = options_of(type(self))
        factories = [name for name in FACTORIES if name in options]
        if not factories or any(getattr(self, name) is None for name in factories):
            return
        replaced = (*REPLACED, "log_std") if getattr(self, "state_dependent_std", False) else REPLACED
        for name in replaced:
            if name in options and as_json(getattr(self, name)) != as_json(options[name].default):
                arguments = " and ".join(f"{factory}=" for factory in factories)
                raise ValueError(
                    f"{type(self).__name__}({name}={getattr(self, name)!r}): {name} has no effect with {arguments}, "
                    "which define all layers; remove it"
                )

    def add_learner(self, name: str, networks: nn.Module, loss: Loss) -> Learner:
        """Create the learner that trains `networks` on `loss`."""
        factory = self.optimizer.get(name) if isinstance(self.optimizer, Mapping) else self.optimizer
        learner = (find("learner", self) or Learner)(  # a `FastLearner`, unless REIN_PLAIN=1
            networks,
            loss,
            factory or self.default_optimizer,
            max_grad_norm=self.max_grad_norm,
            guard=self.guard,
            micro_batch=self.micro_batch,
            precision=self.precision,
        )
        self.learners[name] = learner
        return learner

    @staticmethod
    def default_optimizer(parameters: Iterable[Any]) -> Any:
        """Return the optimizer to use if the option `optimizer` is None."""
        return Adam(parameters)

    def set_learning_rates(self) -> None:
        """Set the learning rate of every optimizer to its current value."""
        for name, learner in self.learners.items():
            rate: Any = vars(self).get(f"{name}_learning_rate")
            rate = self.learning_rate if rate is None else rate
            set_learning_rate(learner.optimizer, rate(**self.counts))

    def compare_processes(self, **more: Any) -> None:
        """Raise ValueError if the options of data-parallel processes differ. Does nothing after the first call."""
        if not self._compared:
            options = {name: value for name, value in self.config.items() if name not in OF_ONE_PROCESS}
            first = next(iter(self.learners.values()))
            first.compare_processes({"agent": type(self).__name__, **options, **more})
            self._compared = True

    def options(self, *names: str) -> dict[str, Any]:
        """Return options by name, as keyword arguments."""
        return {name: getattr(self, name) for name in names}

    @property
    def config(self) -> dict[str, Any]:
        """The spaces and the initial options of the agent, as JSON."""
        optimizers = {name: describe_optimizer(learner.optimizer) for name, learner in self.learners.items()}
        different = isinstance(self.optimizer, Mapping)
        return {**super().config, "optimizer": optimizers if different else next(iter(optimizers.values()))}
