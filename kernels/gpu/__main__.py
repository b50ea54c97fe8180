"""Print the GPU that would be used, or in one line why none can be: `python -m kernels.gpu`."""

import sys

from kernels.gpu.device import main

sys.exit(main())
