#!/usr/bin/env bash
# A run as a Slurm job that is asked to end two minutes before its time limit, and put back into the queue:
#
#   sbatch --gres=gpu:8 --time=12:00:00 deploy/slurm.sh CONFIG [key.path=value ...]
#
# The signal goes to this script alone (B:), which passes it on to the run. The stage at work writes a checkpoint at the
# end of its step, within execution.grace_s, and the run ends with the exit code 75. Checked with shellcheck and with
# stand-ins for luffy and scontrol; never run under Slurm.
#SBATCH --job-name=luffy
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=luffy-%j.log
set -u

EX_TEMPFAIL=75 # luffy/errors.py: the same command goes on

luffy run "$@" &
run=$!

trap 'asked=yes; kill -TERM "$run"' TERM

while true; do
  asked=no
  wait "$run"
  code=$?
  [ "$asked" = yes ] || break # a signal has ended the wait, not the run
done

if [ "$code" -eq "$EX_TEMPFAIL" ] && [ -n "${SLURM_JOB_ID:-}" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
