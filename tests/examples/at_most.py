"""Run as `at_most.py STEPS SCRIPT ...`: an example's script, which stops for ever when it has told of so many steps.

So that a test can kill a run before its end, however fast the run and however late the test.
"""

import runpy
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    last, script = int(sys.argv[1]), sys.argv[2]
    # What a shell starts in the background ignores SIGINT, and so would all that the tests start there.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    del sys.argv[:2]
    sys.path.insert(0, str(Path(script).parent))
    import report

    tell = report.Report.step

    def step(self, step, *args, **kwargs):
        tell(self, step, *args, **kwargs)
        while step >= last:
            signal.pause()

    report.Report.step = step
    runpy.run_path(script, run_name="__main__")
