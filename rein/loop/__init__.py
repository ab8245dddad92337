"""Generic event-driven loop: call a step repeatedly and fire events around it. Independent of agents and environments.

The order of events::

    started
      epoch_started
        iteration_started   step   iteration_completed    until `iterations`, data or a halt
      epoch_completed | epoch_halted                      exactly one per epoch that ends
      epoch_ended                                         after either of them
    completed | halted | failed                           exactly one per run, always

`docs/reference/events.md` has the table of all events with their counters and the effect of each halt.
"""

from rein.loop.loop import Loop

__all__ = ["Loop"]
