#!/usr/bin/env bash
# 几台机器上的同一次训练：每台机器运行同一条命令，哪一台先、哪一台后都可以。
#
#     HOST=node1 NODES=2 JOB=run-7 OUT=/shared/run-7 \
#         experiments/presets/cluster/torchrun.sh --preset gpt_1b --data /shared/corpus
#
#   HOST   约好在哪一台会合：各台都认得的名字或地址
#   NODES  几台
#   JOB    这次训练的名字，各台相同；每次新的训练换一个，被打断之后接着训练时不换
#   OUT    检查点的文件夹，在各台都看得见的共享盘上
# 可以不设：PORT（29500）、PROCS（每台几个进程，auto 是每张卡一个）、WAIT（等别的机器最多几秒，600）、
# RESTARTS（工作进程至多重启几次，3）、SCRIPT（experiments/train_gpu.py）。
#
# 工作进程死了由 torchrun 重启；torchrun 自己死了（会合的机器没了）由下面的循环重来，至多 WAIT 秒。
# 退出码就是训练的结局：0 走完，2 输入有误，3 发散，69 机器没有来齐，75 被打断、已存好。
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

for name in HOST NODES JOB OUT; do
    if [[ -z ${!name:-} ]]; then
        echo "错误：没有设 $name；用法见 ${BASH_SOURCE[0]} 的开头。" >&2
        exit 2
    fi
done
PORT=${PORT:-29500} PROCS=${PROCS:-auto} WAIT=${WAIT:-600} RESTARTS=${RESTARTS:-3}
SCRIPT=${SCRIPT:-experiments/train_gpu.py}

# 主机名常常解析成回环地址：自己的地址、网卡、是不是 HOST，都问内核
where=$(python -m experiments.ranks.address "$HOST") || exit 2
read -r address interface is_host <<<"$where"
address=${ADDRESS:-$address} is_host=${IS_HOST:-$is_host}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$interface}
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-$interface}
# 不设它，一台机器死了再回来就会合不成：torchrun 只在第一轮公布 store 的地址，回来的那台问不到
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}

launch() { # 与直接写 torchrun 的参数相同；换成 agent，出错时只有一句话，退出码也传得出来
    exec python -m experiments.ranks.agent \
        --nnodes "$NODES" --nproc-per-node "$PROCS" \
        --rdzv-backend c10d --rdzv-endpoint "$HOST:$PORT" --rdzv-id "$JOB" \
        --rdzv-conf "is_host=$is_host,join_timeout=$WAIT,read_timeout=$((WAIT < 60 ? WAIT : 60)),last_call_timeout=1,keep_alive_interval=2" \
        --local-addr "$address" --max-restarts "$RESTARTS" \
        "$SCRIPT" --out-dir "$OUT" "$@"
}

mark() { cksum "$OUT/status.json" 2>/dev/null || true; } # 训练一开始就会改写它

running="" stop=""
trap 'stop=1; kill -TERM "$running" 2>/dev/null || true' TERM INT
last=$SECONDS # 最近一次大家都在的时刻
while :; do
    before=$(mark)
    launch "$@" &
    running=$! code=0
    while kill -0 "$running" 2>/dev/null; do # 信号会打断 wait：接着等，等它存完
        wait "$running" && code=0 || code=$?
    done
    if [[ $(mark) != "$before" ]]; then
        last=$SECONDS # 这一次训练起来了才断：重新给它 WAIT 秒
    fi
    if ((code != 69)) || [[ -n $stop ]] || ((SECONDS - last >= WAIT)); then
        exit "$code"
    fi
    echo "5 秒之后再试，至多等到 WAIT=$WAIT 秒。" >&2
    sleep 5
done
