#!/usr/bin/env bash
# A run as a Slurm job that is asked to end two minutes before its time limit, and put back into the queue:
#
#   sbatch --gres=gpu:8 --time=12:00:00 deploy/slurm.sh CONFIG [key.path=value ...]
#
# The signal goes to this script alone (B:), which passes it on to the run. The stage at work writes a checkpoint at the
# end of its step, within execution.grace_s, and the run ends with the exit code 75.
#
# On several nodes (--nodes=2), with luffy and the workspace under the same paths, Ray is started on all of them for the
# job, and the run joins it: execution.ray.trainer_ranks and execution.ray.engines are those of all nodes together.
#
# Checked with shellcheck, and with stand-ins for srun and scontrol on two machines made of namespaces; never run under
# Slurm.
#SBATCH --job-name=luffy
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=luffy-%j.log
set -u

EX_TEMPFAIL=75 # luffy/errors.py: the same command goes on

nodes=${SLURM_JOB_NUM_NODES:-1}
if [ "$nodes" -gt 1 ]; then
  address=$(hostname -I | cut -d ' ' -f 1)
  port=$((20000 + SLURM_JOB_ID % 10000)) # another job may use this node; Ray's own ports end below
  RAY_AUTH_TOKEN=$(od -A n -t x1 -N 16 /dev/urandom | tr -d ' ')
  export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
  ray start --head --node-ip-address="$address" --port="$port" --include-dashboard=false || exit
  srun --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --exclude="$SLURMD_NODENAME" --cpu-bind=none \
    ray start --block --address="$address:$port" &
  others=$!
  until [ "$(ray status --address="$address:$port" | grep -c '^ 1 node_')" -eq "$nodes" ]; do
    kill -0 "$others" || exit # srun has said why
    sleep 2
  done
  set -- "$@" cluster=ray execution.ray.address="$address:$port"
fi

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
