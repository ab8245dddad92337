"""The loop: calls a step over and over, and says so. It knows no agent and no environment.

    started
      epoch_started
        iteration_started   step   iteration_completed        until `iterations`, or data ends, or a halt
      epoch_completed | epoch_halted                          exactly one per epoch that ends
      epoch_ended                                             after either of them
    completed | halted | failed                               exactly one per run, always

`docs/reference/loop.md` has the table of what fires when, with which counters, and what each halt does.
"""

from rein.loop.loop import Loop

__all__ = ["Loop"]
