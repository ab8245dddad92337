from rein.envs.probes.bandit import Bandit as Bandit
from rein.envs.probes.corridor import Corridor as Corridor
from rein.envs.probes.fork import Fork as Fork
from rein.envs.probes.memory import Memory as Memory
from rein.envs.probes.reach import Reach as Reach
from rein.envs.probes.values import ConstantReward as ConstantReward
from rein.envs.probes.values import DelayedReward as DelayedReward
from rein.envs.probes.values import ObservedReward as ObservedReward
