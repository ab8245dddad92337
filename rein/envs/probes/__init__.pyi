from rein.envs.probes.bootstrapping import Corridor as Corridor
from rein.envs.probes.bootstrapping import Fork as Fork
from rein.envs.probes.debugging import Bandit as Bandit
from rein.envs.probes.debugging import ConstantReward as ConstantReward
from rein.envs.probes.debugging import DelayedReward as DelayedReward
from rein.envs.probes.debugging import ObservedReward as ObservedReward
from rein.envs.probes.memory import Memory as Memory
from rein.envs.probes.reach import Reach as Reach
