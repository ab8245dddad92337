from rein.handlers.loggers.attach import attach as attach
from rein.handlers.loggers.csv import CSVLogger as CSVLogger
from rein.handlers.loggers.media import Histogram as Histogram
from rein.handlers.loggers.media import Image as Image
from rein.handlers.loggers.media import Video as Video
from rein.handlers.loggers.mlflow import MlflowLogger as MlflowLogger
from rein.handlers.loggers.tensorboard import TensorBoardLogger as TensorBoardLogger
from rein.handlers.loggers.wandb import WandbLogger as WandbLogger
