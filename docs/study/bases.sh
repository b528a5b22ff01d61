#!/bin/sh
# The base policies of the study and its teacher, under workspace/study: docs/study/bases.sh [NAME ...]
# A name is KIND-SEED, KIND mid or never, or teacher; without any, all. Those that exist are left alone.
set -e
all="teacher"
for seed in 101 102 1 2 3 4 5 6; do all="$all mid-$seed"; done
for seed in 1 2 3 4 5 6; do all="$all never-$seed"; done
for name in ${@:-$all}; do
  [ -d "workspace/study/$name" ] && continue
  case $name in
    teacher) shares=1; seed=7 ;;
    mid-*) shares='{1: 1, 2: 1, 3: 0.25, 4: 0.08}'; seed=${name#mid-} ;;
    never-*) shares='{1: 1, 2: 1, 3: 0, 4: 0}'; seed=${name#never-} ;;
    *) echo "$name: no base of the study; give teacher, mid-SEED or never-SEED" >&2; exit 2 ;;
  esac
  luffy run arithmetic "name=study_$name" "seed=$seed" execution.ranks=1 'stages=[prepare_data, base]' \
    "data.corpus.stepwise_share=$shares"
  luffy export "workspace/runs/study_$name-1/stages/base" "workspace/study/$name"
done
