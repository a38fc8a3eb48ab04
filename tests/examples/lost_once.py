"""Run as `lost_once.py STEP SCRIPT ...`: an example's script, whose rank is killed once it has told of this step, the first time that torchrun starts it."""

import os
import runpy
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    last, script = int(sys.argv[1]), sys.argv[2]
    del sys.argv[:2]
    sys.path.insert(0, str(Path(script).parent))
    import report

    tell = report.Report.step

    def step(self, step, *args, **kwargs):
        tell(self, step, *args, **kwargs)
        if step == last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    report.Report.step = step
    runpy.run_path(script, run_name="__main__")
