"""Run as `stopped.py STEP for-ever|once SCRIPT ...`: an example's script, which stops when it has
told of this step.

For ever, so that a test can kill a run before its end, however fast the run and however late the
test; or its rank is killed, the first time that torchrun starts it.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    last, how, script = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    # What a shell starts in the background ignores SIGINT, and so would all that the tests start
    # there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    del sys.argv[:3]
    sys.path.insert(0, str(Path(script).parent))
    import report

    tell = report.Report.step

    def step(self, step, *args, **kwargs):
        tell(self, step, *args, **kwargs)
        if how == "once" and step == last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        while how == "for-ever" and step >= last:
            signal.pause()

    report.Report.step = step
    runpy.run_path(script, run_name="__main__")
