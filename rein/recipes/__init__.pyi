from rein.recipes.base import Builder as Builder
from rein.recipes.base import recipe as recipe
