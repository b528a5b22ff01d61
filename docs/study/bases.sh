#!/bin/sh
# The base policies of the study and its teacher, under workspace/study: docs/study/bases.sh [NAME ...]
# A name is KIND-SEED, KIND mid or never, or teacher; without any, all. Those that exist are left alone. The teacher is
# mid-100 after SFT on the traces of 4,096 prompts of its own. INSTRUCTIONS=avx2 makes them on these instructions of the CPU, in
# a clone of its own, since keys of stages do not count them.
set -e
all="teacher"
for seed in 101 102 1 2 3 4 5 6; do all="$all mid-$seed"; done
for seed in 1 2 3 4 5 6; do all="$all never-$seed"; done
for name in ${@:-$all}; do
  [ -d "workspace/study/$name" ] && continue
  case $name in
    teacher)
      "$0" mid-100
      luffy run arithmetic name=study_teacher seed=100 chain=sft method=sft execution.ranks=1 data.corpus=null base=null \
        model.architecture=null model.path=workspace/study/mid-100 data.train.num_prompts=4096 sft.num_traces=null \
        sft.batch_size=64 sft.epochs=3 sft.optimizer.lr=4e-4 'sft.optimizer.schedule={kind: linear}'
      luffy export workspace/runs/study_teacher-1/stages/sft workspace/study/teacher
      continue ;;
    mid-*) shares='{1: 1, 2: 1, 3: 0.25, 4: 0.08}'; seed=${name#mid-} ;;
    never-*) shares='{1: 1, 2: 1, 3: 0, 4: 0}'; seed=${name#never-} ;;
    *) echo "$name: no base of the study; give teacher, mid-SEED or never-SEED" >&2; exit 2 ;;
  esac
  luffy run arithmetic "name=study_$name" "seed=$seed" execution.ranks=1 'stages=[prepare_data, base]' \
    "execution.cpu_instructions=${INSTRUCTIONS:-native}" "data.corpus.stepwise_share=$shares"
  luffy export "workspace/runs/study_$name-1/stages/base" "workspace/study/$name"
done
