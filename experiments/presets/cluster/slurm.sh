#!/usr/bin/env bash
# Slurm：两台机器训练；快到时限就存好，自己重新排队，接着走，直到走完。在仓库根目录提交：
#
#     OUT=/shared/run-7 sbatch experiments/presets/cluster/slurm.sh --preset gpt_1b --data /shared/corpus
#
# 下面每一行 #SBATCH 都可以在 sbatch 的命令行上改，例如 --nodes=4 --time=12:00:00。
# 可以不设：OUT（runs/slurm-作业号，要在各台都看得见的盘上）、MARGIN（时限前几秒停下，300）、
# MAX_REQUEUES（至多重新排队几次，100），以及 torchrun.sh 的 PORT、PROCS、WAIT、RESTARTS。
#
#SBATCH --job-name=train_gpu
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=16
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "$SLURM_SUBMIT_DIR" # Slurm 运行的是脚本的一份拷贝，不在仓库里

JOB=$SLURM_JOB_ID # 重新排队之后作业号不变，torchrun 的 --rdzv-id 也就不变：接着走
NODES=$SLURM_JOB_NUM_NODES
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
OUT=${OUT:-$PWD/runs/slurm-$JOB}
RESTARTS=${RESTARTS:-1}
export JOB NODES HOST OUT RESTARTS

# 离时限还有几分钟，减去余量；没有时限就是 0，train_gpu 也把 0 当作不限
end=$(squeue --noheader --jobs="$JOB" --format=%e)
if until=$(date -d "$end" +%s 2>/dev/null); then
    limit=$(awk -v s=$((until - $(date +%s) - ${MARGIN:-300})) 'BEGIN {printf "%.2f", (s > 6 ? s / 60 : 0.1)}')
else
    limit=0
fi
echo "作业 $JOB，第 $((${SLURM_RESTART_COUNT:-0} + 1)) 次运行，$NODES 台，在 $HOST 会合，$limit 分钟之后停下存盘。"

code=0
# 从 22.05 起 srun 不再继承 sbatch 的 --cpus-per-task，不写明就只有一个核
srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=0 \
    experiments/presets/cluster/torchrun.sh "$@" --time-limit "$limit" || code=$?

# 75 是被打断而已经存好，69 是机器没有来齐：都重来；2 与 3 重来也一样，留给人看
if [[ $code -eq 75 || $code -eq 69 ]] && ((${SLURM_RESTART_COUNT:-0} < ${MAX_REQUEUES:-100})); then
    echo "退出码 $code：重新排队。"
    scontrol requeue "$JOB"
fi
exit "$code"
