"""What a run costs: measured by a few steps of the real stage programs, and predicted for all of them.

`bench_run` starts the programs and `measured_stage` is what runs inside them; `forecast` predicts from what was
measured, or from earlier runs, and loads neither torch nor a model.
"""
