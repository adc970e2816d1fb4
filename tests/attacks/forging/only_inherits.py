"""Nothing but inheritance: the base classes of earlier chapters."""

from solutions.ch2_ppo import RLHFTrainer
from solutions.ch3_grpo import GrpoTrainer as RlvrBase


class GrpoTrainer(RLHFTrainer):
    pass


class RlvrTrainer(RlvrBase):
    train = RLHFTrainer.train
