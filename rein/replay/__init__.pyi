from rein.replay.frames import FrameReplay as FrameReplay
from rein.replay.frames import PrioritizedFrameReplay as PrioritizedFrameReplay
from rein.replay.hindsight import Hindsight as Hindsight
from rein.replay.prioritized import PrioritizedReplay as PrioritizedReplay
from rein.replay.replay import Replay as Replay
from rein.replay.rollout import Rollout as Rollout
from rein.replay.sequences import PrioritizedSequenceReplay as PrioritizedSequenceReplay
from rein.replay.sequences import SequenceReplay as SequenceReplay
