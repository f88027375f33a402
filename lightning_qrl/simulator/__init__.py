"""Asynchronous RL in low precision, simulated: what staleness and quantization do together.

Three models, none of which knows a network:

* ``reference``: the toy of "The 4-bitter Lesson", tick for tick, with the constants of
  ``constants.POST``. The page (``page``) runs the same model in the browser.
* ``calibrated``: the same structure, its constants estimated from runs of this project.
* ``cluster``: samplers, queue and trainers as a discrete-event system of any size.

``closed_forms`` says what can be known of them without running anything.
"""
