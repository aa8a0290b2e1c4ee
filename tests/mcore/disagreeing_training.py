"""`megatron_epp.mcore.pretrain_gpt` on a rank that was started with other flags than its peers."""

import os
import sys

from megatron_epp.mcore import pretrain_gpt

if __name__ == "__main__":
    sys.argv += ["--epp-slices", str(1 + int(os.environ["RANK"]))]
    pretrain_gpt.main()
