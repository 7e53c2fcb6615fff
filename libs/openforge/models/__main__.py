"""`python -m openforge.models NAME`: makes a built-in model where models lie, for images without the command line."""

import sys

from openforge.models import UnknownModel, get
from openforge.models.smollm2 import ModelUnavailable

try:
    print(get(" ".join(sys.argv[1:])))
except (UnknownModel, ModelUnavailable) as error:
    sys.exit(f"error: {error}")
